"""One sample, from its place in the queue to its receipt, over as many runs as node faults make necessary.

A run that a node fault ends is started again from the prompt with the same seed; the tokens that were delivered must
come again bit by bit, and the client sees one stream. However a run ends, by cancellation too, its slot, its KV and its
claims are given back. This module must not know gRPC messages or how nodes are found.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from corun.config.fields import RouterConfig
from corun.errors import (
    CancelledByPeerError,
    CorunError,
    DataLossError,
    DeadlineError,
    InvalidArgumentError,
    OverloadedError,
    Shown,
    StaleGenerationError,
    UnavailableError,
)
from corun.observe.tracing import OFF, Span, Value
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.rpc.auth import ANYONE, Caller
from corun.types import FinishReason, KvHandle, NodeRef, Priority, ResumePoint
from router.admission import AdmissionQueue
from router.lanes import Ticket
from router.nodes.members import Member, PrefillMember, Seat
from router.nodes.node_client import ALONE, Lease, Share, Start, is_not_finite
from router.nodes.registry import Registry
from router.output import SampleOutput
from router.placement import Need
from router.tally import Tally

CLOCK_SLACK_S = 0.1
NOT_FINITE_RUNS = 2
"""How many runs must have nothing to draw from before it is the request's: one may have been on a broken node."""
SOURCE_CHECK_S = 0.5
"""How often a sample without a token looks whether the node that holds its KV is still there."""

_OF_CLIENTS = ("prompt.", "sampling_params", "seed")
"""How the fields of a client's request begin; all others of a call to a node are the router's."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample of a request, checked."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    prompt_digest: str
    """Over the prompt's token ids (`corun.receipt.prompt_digest`)."""
    params: SamplingParams
    seed: int
    deadline: float
    """On the loop's clock."""
    received: ResumePoint | None = None
    """What the client has of it from an earlier call."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    arrived: float | None = None
    """When its request came, on the loop's clock; None: not a client's."""
    share_scope: str = ""
    """Whose equal prompts may get the same KV; empty: nobody's."""
    span: Span = field(default=OFF, repr=False, compare=False)
    """The request's."""
    token_texts: bool = False
    """Its client wants the text of each token."""

    @property
    def need(self) -> Need:
        """Of its first run."""
        kv_key = self.share_scope and f"{self.prompt_digest} {self.share_scope}"
        return Need(num_prompt=len(self.prompt_token_ids), max_tokens=self.params.max_tokens, kv_key=kv_key)

    def __str__(self) -> str:
        return f"sample {self.index} of request {self.request_id!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample that its client has in full."""

    sample: Sample
    receipt: Receipt
    records: bytes | bytearray
    """Of its tokens, 8 bytes each (`router.output.RECORD`)."""
    node_reason: FinishReason | None
    """Why the node ended it; None: the router did, at a stop string."""


class NodeFaultError(Exception):
    """A node failed this run; another run may succeed."""

    def __init__(self, member: Member[Any], error: CorunError) -> None:
        super().__init__(f"{member.info.ref}: {error}")
        self.member = member
        self.error = error

    @property
    def is_loss(self) -> bool:
        """The node went away in the run; else it answered, with an error of its own."""
        gone = isinstance(self.error, (UnavailableError, StaleGenerationError, CancelledByPeerError))
        return gone or bool(self.member.lost)

    def doubts_kv(self, num_tokens: int) -> bool:
        """Whether the KV may be what was wrong: the node that was to read it answered with an error, or not in time,
        and has drawn no token from it. One that went away says nothing of it. num_tokens: of the run."""
        return not (isinstance(self.member, PrefillMember) or self.is_loss or num_tokens)


class History:
    """The runs of one sample so far, for whom to name when it cannot go on."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        """On the loop's clock."""
        self._give_back_kv: Callable[[], None] = _nothing
        self.num_failed = 0
        """Runs without an end, whoever has to answer for it."""
        self._reached: list[tuple[int, Seat]] = []
        self._faults: list[NodeRef] = []
        self._losses = 0
        self._not_finite: list[tuple[int, Seat]] = []  # Runs that had nothing to draw from, as in `_reached`.

    @property
    def num_faults(self) -> int:
        """Runs that a node failed."""
        return len(self._faults)

    def note_run(self, num_tokens: int, seat: Seat) -> None:
        """A run has ended; the sample had so many tokens then."""
        self._reached.append((num_tokens, seat))

    def note_failed(self, fault: NodeFaultError, *, is_excused: bool) -> None:
        """A run has no end. is_excused: neither the node nor the request has to answer for that."""
        self.num_failed += 1
        if not is_excused:
            self._faults.append(fault.member.info.ref)
            self._losses += fault.is_loss
        if is_not_finite(fault.error):
            self._not_finite.append(self._reached[-1])

    def keep_kv(self, give_back: Callable[[], None]) -> None:
        """A run has left KV that nobody has read; the next one may read it."""
        self._give_back_kv = give_back

    def give_back_kv(self) -> None:
        """The next run has a claim of its own, or there is none."""
        self._give_back_kv()
        self._give_back_kv = _nothing

    @property
    def contradicted(self) -> tuple[NodeRef, ...]:
        """Nodes that had nothing to draw from where the last run, which ended well, drew its tokens; those of that run
        only if there are no others."""
        refs = [ref for _, seat in self._not_finite for ref in seat.refs]
        return tuple(ref for ref in refs if ref not in self._reached[-1][1].refs) or tuple(refs)

    def source(self, position: int) -> Seat | None:
        """Where the token at `position` was drawn first."""
        return next((seat for num_tokens, seat in self._reached if num_tokens > position), None)

    def given_up(self, sample: Sample, max_attempts: int) -> CorunError | None:
        """What ends the sample after its newest fault; None: it runs again.

        Names the nodes; and the request, if it seems to take its nodes with it wherever it runs, or if two runs of it
        had nothing to draw from.
        """
        nodes = ", ".join(map(str, self._faults))
        if len(self._not_finite) >= min(NOT_FINITE_RUNS, max_attempts):
            return _not_finite(sample, self._not_finite[-1][0], nodes)
        if self.num_faults < max_attempts:
            return None
        if self._losses == self.num_faults:
            return UnavailableError(
                f"request {sample.request_id!r} may be poison: {self._losses} runs of its sample {sample.index} "
                f"ended with a lost node ({nodes})"
            )
        return UnavailableError(f"nodes failed {self.num_faults} runs of {sample} ({nodes})")


class SampleRunner:
    """Runs samples on the registry's nodes, in the queue's order."""

    def __init__(
        self,
        registry: Registry,
        queue: AdmissionQueue,
        config: RouterConfig,
        on_finished: Callable[[Finished], None] = lambda _: None,
    ) -> None:
        self.finished = 0
        """Samples, since the router started."""
        self.tally = Tally()
        self._registry = registry
        self._queue = queue
        self._config = config
        self._on_finished = on_finished

    async def run(self, sample: Sample, ticket: Ticket, output: SampleOutput) -> Receipt:
        """Runs a sample to its end; its tokens go to `output` as they come.

        Raises:
            DeadlineError: the sample's deadline has passed.
            OverloadedError: it had to go for others before it ever had a seat.
            UnavailableError: nodes are missing, or failed `max_attempts` runs.
            InvalidArgumentError: an engine refuses the request, or two runs had nothing to draw from.
            DataLossError: a repeated run gave other bits than the one before, or than the client received.
        """
        history = History()
        try:
            while (receipt := await self._try(sample, ticket, output, history)) is None:
                if error := history.given_up(sample, self._config.max_attempts):
                    log.error("%s: %s", sample, error)
                    raise error
                output.restart()
                self._queue.again(ticket, ran=True)
        finally:
            history.give_back_kv()
        self.finished += 1
        if sample.arrived is not None:
            self.tally.note_sample(
                sample.arrived, history.first_token_at, receipt.num_prompt_tokens, receipt.num_output_tokens
            )
        output.deliver(receipt)
        if history.contradicted:
            self._registry.quarantine(history.contradicted, str(sample))
        self._on_finished(
            Finished(sample=sample, receipt=receipt, records=output.records, node_reason=output.node_reason)
        )
        return receipt

    async def _try(self, sample: Sample, ticket: Ticket, output: SampleOutput, history: History) -> Receipt | None:
        """One run; None if a node failed it. Raises DeadlineError if the sample's time is over."""
        still_before = self._registry.clock.still_s
        try:
            return await self._run_once(sample, ticket, output, history)
        except NodeFaultError as fault:
            if _is_over(sample, fault):
                log.info("a run of %s ended: %s", sample, fault)
                raise DeadlineError(f"the deadline passed in a run of {sample}") from fault
            log.warning("a run of %s failed: %s", sample, fault)
            self.tally.retries["lost" if fault.is_loss else "fault"] += 1
            history.note_failed(fault, is_excused=self._stood_still(self._registry.clock.still_s - still_before))
            self._registry.note_fault(fault.member, fault.error)
            shares = not fault.doubts_kv(output.position)
            ticket.need = ticket.need.again(fault.member.node_id, shares=shares)
            return None

    def _stood_still(self, still_s: float) -> bool:
        """Whether this router itself was silent in a run for longer than a node may be.

        Nodes end the streams and leases of such a router, so a failed run is no fault of theirs, and no reason to give
        the request up before its deadline. Each such run takes so long that a request which does kill nodes kills few.
        """
        if excused := still_s > self._config.heartbeat_timeout_ms / 1000:
            log.warning("it does not count: this router stood still for %.1f s in it", still_s)
        return excused

    async def _run_once(self, sample: Sample, ticket: Ticket, output: SampleOutput, history: History) -> Receipt:
        with sample.span.child("attempt", _attempt_facts(sample, history)) as span:
            receipt = await self._run(sample, ticket, output, history, span)
            span.note(_receipt_facts(receipt))
        return receipt

    async def _run(self, sample: Sample, ticket: Ticket, output: SampleOutput, history: History, span: Span) -> Receipt:
        run = await self._admit(sample, ticket, output, span)
        before = _unreceived(sample, output)
        try:
            handle = await run.prefill()
            history.give_back_kv()
            reason = output.end(await run.decode(handle))
        except DataLossError as error:
            self._note_mismatch(error, sample, run.seat, output, history)
            raise
        except NodeFaultError as fault:
            if fault.member is run.seat.decode and fault.is_loss and ticket.need.kv_key:
                history.keep_kv(run.leave_kv())
            raise
        finally:
            history.note_run(output.num_tokens, run.seat)
            self.tally.output_tokens += _unreceived(sample, output) - before
            self._note_first_token(sample, run, history)
            run.close()
        return receipt_of(sample, self._registry.contract.fingerprint, output, run.seat, reason)

    def _note_first_token(self, sample: Sample, run: Run, history: History) -> None:
        if history.first_token_at is None and run.first_token_at is not None:
            history.first_token_at = run.first_token_at
            if sample.arrived is not None:
                self.tally.first_token_s.observe(run.first_token_at - sample.arrived)

    def _note_mismatch(
        self, error: DataLossError, sample: Sample, seat: Seat, output: SampleOutput, history: History
    ) -> None:
        """Bits differ. If two runs here do, some node of theirs gave wrong ones; which, nobody can tell."""
        log.error("%s of %s", error, sample)
        if output.differs_at is None:  # The client's word against the nodes': that convicts no node.
            return
        source = history.source(output.differs_at)
        assert source is not None  # What differs was there before.
        self._registry.quarantine((*source.refs, *seat.refs), str(sample))

    async def _admit(self, sample: Sample, ticket: Ticket, output: SampleOutput, span: Span) -> Run:
        """Waits for a seat and reserves it; if the node has no room after all, waits again at the same place."""
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            with span.child("queue"):
                seat = await self._queue.seat(ticket, sample.deadline)
            self.tally.queue_s.observe(now() - began)
            span.note(
                {"corun.prefill_node": str(seat.prefill.info.ref), "corun.decode_node": str(seat.decode.info.ref)}
            )
            kv_key = ticket.need.kv_key
            share = Share(sample.share_scope, self._queue.more_follow(kv_key)) if kv_key else ALONE
            run = Run(sample, seat, output, self._config, span, share)
            try:
                await run.reserve()
            except OverloadedError as error:
                log.debug("%s waits again: %s", sample, error)
                seat.refuse()
                self._queue.again(ticket)
            except BaseException:
                run.close()
                raise
            else:
                return run


class Output(Protocol):
    """Where the tokens of a run go."""

    position: int
    """Tokens of the current run."""

    @property
    def num_tokens(self) -> int:
        """Of the sample."""

    def take(self, token_id: int, logprob: float) -> bool:
        """Takes the run's next token; True ends the sample."""

    def hexdigest(self) -> str:
        """Of the sample's tokens (`corun.receipt.OutputDigest`)."""

    def tokens_hexdigest(self) -> str:
        """Of their ids alone."""


class Run:
    """One run of one sample on one pair of nodes, and what it holds there."""

    def __init__(
        self,
        sample: Sample,
        seat: Seat,
        output: Output,
        config: RouterConfig,
        span: Span = OFF,
        share: Share = ALONE,
    ) -> None:
        self.seat = seat
        self._share = share
        self._span = span
        self._sample = sample
        self._output = output
        self._config = config
        self._lease = Lease(output.take)
        self._prefill_id = ""  # Set while the prefill node may hold KV for us.

    @property
    def first_token_at(self) -> float | None:
        """On the loop's clock; None: there was none."""
        return self._lease.first_row_at

    async def reserve(self) -> None:
        """Leases the slot. Raises OverloadedError if the node has no room now."""
        with _faults_of(self.seat.decode, passing=OverloadedError), self._span.child("reserve"):
            await self.seat.decode.client.reserve(
                self._lease,
                num_prompt_tokens=len(self._sample.prompt_token_ids),
                max_tokens=self._sample.params.max_tokens,
                timeout_s=self._time(self._config.reserve_timeout_s),
            )
        self._span.note({"corun.slot": self._lease.slot or 0})

    async def to_end(self) -> FinishReason:
        """Computes the whole sample, in a slot that is leased; tokens go to the output meanwhile."""
        return await self.decode(await self.prefill())

    async def decode(self, handle: KvHandle) -> FinishReason:
        """Draws all tokens from the prompt's KV; they go to the output."""
        with self._span.child("decode") as span:
            try:
                await self.start(handle)
                return await self.stream()
            finally:
                if self.first_token_at is not None:
                    span.event("first_token", self.first_token_at)

    async def prefill(self) -> KvHandle:
        """Computes the prompt's KV."""
        self._prefill_id = secrets.token_hex(12)
        with _faults_of(self.seat.prefill), self._span.child("prefill") as span:
            handle = await self.seat.prefill.client.prefill(
                self._prefill_id,
                self._sample.prompt_token_ids,
                self.seat.decode.info.ref,
                self._time(self._config.prefill_timeout_s),
                span.metadata,
                share=self._share,
            )
        self.seat.prefilled()
        return handle

    async def start(self, handle: KvHandle) -> None:
        """Hands the KV over and starts to decode."""
        sample = self._sample
        start = Start(handle=handle, prompt_token_ids=sample.prompt_token_ids, params=sample.params, seed=sample.seed)
        with _faults_of(self.seat.decode):
            timeout_s = self._time(self._config.step_timeout_s)
            await self.seat.decode.client.start(self._lease, start, timeout_s, self._span.metadata)

    async def stream(self) -> FinishReason:
        """Waits for the last token; tokens go to the output meanwhile."""
        ended = self._lease.ended
        with _faults_of(self.seat.decode):
            while not ended.done():
                left = self._config.step_timeout_s - self.seat.decode.client.silent_s(self._lease)
                if left <= 0:
                    raise DeadlineError(f"no token for {self._config.step_timeout_s:g} s")
                if not self._output.position:  # The KV may not have been read yet.
                    self._check_source()
                    left = min(left, SOURCE_CHECK_S)
                await asyncio.wait((ended,), timeout=self._time(left))
            return ended.result()

    def _check_source(self) -> None:
        """Raises NodeFaultError if nobody may answer for the KV any more."""
        prefill = self.seat.prefill
        if reason := prefill.lost or prefill.stuck:
            raise NodeFaultError(prefill, UnavailableError(f"{prefill.node_id}: {reason}"))

    def close(self) -> None:
        """Gives back all that the run holds. Never waits: what needs a call happens in the background."""
        self.seat.leave()
        self.leave_kv()()
        self.seat.decode.client.release(self._lease, self.seat.free)

    def leave_kv(self) -> Callable[[], None]:
        """Leaves KV where it is, for another run; to be called before `close`. Returns what gives it back."""
        name, self._prefill_id = self._prefill_id, ""
        if not name or self._output.position:  # With the first token, the KV has been read.
            return _nothing
        return partial(self.seat.prefill.client.release_kv, name)

    def _time(self, longest_s: float) -> float:
        """Seconds until `longest_s` or the sample's deadline, whichever is sooner. Raises DeadlineError if none."""
        left = self._sample.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"the deadline passed in a run of {self._sample}")
        return min(left, longest_s)


def _nothing() -> None:
    pass


def _not_finite(sample: Sample, position: int, nodes: str) -> InvalidArgumentError:
    """The model's numbers overflow for this very request: no client is to send it again as it is."""
    limit = f"has logits that are not finite at output token {position} with these parameters ({nodes})"
    return InvalidArgumentError("prompt", Shown(f"{len(sample.prompt_token_ids)} tokens"), limit)


def _attempt_facts(sample: Sample, history: History) -> dict[str, Value]:
    return {
        "corun.sample_index": sample.index,
        "corun.attempt": history.num_failed + 1,
        "gen_ai.request.seed": sample.seed,
        "gen_ai.usage.input_tokens": len(sample.prompt_token_ids),
    }


def _receipt_facts(receipt: Receipt) -> dict[str, Value]:
    return {
        "gen_ai.usage.output_tokens": receipt.num_output_tokens,
        "gen_ai.response.finish_reasons": (receipt.finish_reason.value,),
    }


def _unreceived(sample: Sample, output: SampleOutput) -> int:
    """Tokens that the client did not have before it came."""
    return max(0, output.num_tokens - (sample.received.num_tokens if sample.received else 0))


def _is_over(sample: Sample, fault: NodeFaultError) -> bool:
    """Whether a run ended since the sample's time is over. That is no fault of a node, else short deadlines could keep
    it from work. gRPC's clock may be a little ahead of the loop's."""
    slack_s = CLOCK_SLACK_S if isinstance(fault.error, DeadlineError) else 0.0
    return asyncio.get_running_loop().time() >= sample.deadline - slack_s


@contextmanager
def _faults_of(member: Member[Any], passing: type[CorunError] | tuple[()] = ()) -> Iterator[None]:
    """Turns what a node's call raises into that node's fault, but for `passing` and what is the client's own."""
    try:
        yield
    except passing:
        raise
    except CorunError as error:
        if isinstance(error, InvalidArgumentError) and error.field.startswith(_OF_CLIENTS):
            raise  # The engine refuses what it cannot do; no other run would change that.
        raise NodeFaultError(member, error) from error


def receipt_of(sample: Sample, fingerprint: str, output: Output, seat: Seat, reason: FinishReason) -> Receipt:
    """Of a run that has ended."""
    return Receipt(
        fingerprint=fingerprint,
        request_id=sample.request_id,
        sample_index=sample.index,
        seed=sample.seed,
        prompt_digest=sample.prompt_digest,
        params_digest=sample.params.digest(),
        output_digest=output.hexdigest(),
        num_prompt_tokens=len(sample.prompt_token_ids),
        num_output_tokens=output.num_tokens,
        finish_reason=reason,
        prefill_node=seat.prefill.info.ref,
        decode_node=seat.decode.info.ref,
        tokens_digest=output.tokens_hexdigest(),
    )
