"""Run one sample, from its place in the queue to its receipt, over as many runs as node faults make necessary.

If a node fault ends a run, the sample runs again from its prompt with the same seed. The tokens that were delivered
must come again bit by bit, and the client sees one stream. When a run ends in any way, even by cancellation, its slot,
its KV and its claims are given back. This module must not know gRPC messages or how nodes are found.
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
"""The number of runs without finite logits after which the request is at fault. A single run may have been on a broken
node."""
SOURCE_CHECK_S = 0.5
"""The seconds between two checks whether the node that holds a sample's KV is still there. They end with the sample's
first token."""

_OF_CLIENTS = ("prompt.", "sampling_params", "seed")
"""The prefixes of the fields that come from a client's request. All other fields of a call to a node come from the
router."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sample of a checked request."""

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    prompt_digest: str
    """The digest of the prompt's token ids (`corun.receipt.prompt_digest`)."""
    params: SamplingParams
    seed: int
    deadline: float
    """The time by which the sample must have ended, on the loop's clock."""
    received: ResumePoint | None = None
    """The output of this sample that the client has from an earlier call."""
    caller: Caller = ANYONE
    priority: Priority = Priority.NORMAL
    arrived: float | None = None
    """When the sample's request came, on the loop's clock; None if no client's request came for it."""
    share_scope: str = ""
    """The scope in which equal prompts may share KV, such as one client; empty if the sample shares none."""
    span: Span = field(default=OFF, repr=False, compare=False)
    """The span of the sample's request."""
    token_texts: bool = False
    """Whether the client wants the text of each token."""

    @property
    def need(self) -> Need:
        """The need of the sample's first run."""
        kv_key = self.share_scope and f"{self.prompt_digest} {self.share_scope}"
        return Need(num_prompt=len(self.prompt_token_ids), max_tokens=self.params.max_tokens, kv_key=kv_key)

    def __str__(self) -> str:
        return f"sample {self.index} of request {self.request_id!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample whose output the client has in full."""

    sample: Sample
    receipt: Receipt
    records: bytes | bytearray
    """The records of the sample's tokens, 8 bytes each (`router.output.RECORD`)."""
    node_reason: FinishReason | None
    """Why the node ended the sample; None if the router ended it at a stop string."""


class NodeFaultError(Exception):
    """A node failed this run. Another run may succeed."""

    def __init__(self, member: Member[Any], error: CorunError) -> None:
        super().__init__(f"{member.info.ref}: {error}")
        self.member = member
        self.error = error

    @property
    def is_loss(self) -> bool:
        """Whether the node went away in the run. Otherwise it answered with an error of its own."""
        gone = isinstance(self.error, (UnavailableError, StaleGenerationError, CancelledByPeerError))
        return gone or bool(self.member.lost)

    def doubts_kv(self, num_tokens: int) -> bool:
        """Return whether the KV may have been wrong. This is so if the decode node answered with an error, or not in
        time, and drew no token from the KV. A node that went away tells nothing about its KV. num_tokens: the tokens of
        the run."""
        return not (isinstance(self.member, PrefillMember) or self.is_loss or num_tokens)


class History:
    """The runs of one sample so far. They show which nodes to name if the sample cannot go on."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        """When the sample's first token came, on the loop's clock; None before it."""
        self._give_back_kv: Callable[[], None] = _nothing
        self.num_failed = 0
        """The number of runs that a fault ended, including excused ones."""
        self._reached: list[tuple[int, Seat]] = []
        self._faults: list[NodeRef] = []
        self._losses = 0
        self._not_finite: list[tuple[int, Seat]] = []  # The entries of `_reached` for runs without finite logits.

    @property
    def num_faults(self) -> int:
        """The number of runs that a node failed, without excused ones."""
        return len(self._faults)

    def note_run(self, num_tokens: int, seat: Seat) -> None:
        """Note that a run on `seat` has ended, when the sample had `num_tokens` tokens."""
        self._reached.append((num_tokens, seat))

    def note_failed(self, fault: NodeFaultError, *, is_excused: bool) -> None:
        """Note that a fault ended a run. is_excused: neither the node nor the request is to blame for it."""
        self.num_failed += 1
        if not is_excused:
            self._faults.append(fault.member.info.ref)
            self._losses += fault.is_loss
        if is_not_finite(fault.error):
            self._not_finite.append(self._reached[-1])

    def keep_kv(self, give_back: Callable[[], None]) -> None:
        """Keep KV that a run left unread, because the next run may read it. `give_back` releases it."""
        self._give_back_kv = give_back

    def give_back_kv(self) -> None:
        """Release the kept KV, because the next run has its own claim on it or there is no next run."""
        self._give_back_kv()
        self._give_back_kv = _nothing

    @property
    def contradicted(self) -> tuple[NodeRef, ...]:
        """The nodes of the runs without finite logits, to be read after the last run ended well. That run contradicts
        them. Nodes of the last run are included only if there are no others."""
        refs = [ref for _, seat in self._not_finite for ref in seat.refs]
        return tuple(ref for ref in refs if ref not in self._reached[-1][1].refs) or tuple(refs)

    def source(self, position: int) -> Seat | None:
        """Return the seat of the run that first drew the token at `position`."""
        return next((seat for num_tokens, seat in self._reached if num_tokens > position), None)

    def given_up(self, sample: Sample, max_attempts: int) -> CorunError | None:
        """Return the error that ends the sample after its newest fault; None if it runs again.

        The error names the nodes. It also blames the request, if nodes are lost wherever it runs, or if two of its runs
        had no finite logits to draw from.
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
        """The number of samples that ended well, since the router started."""
        self.tally = Tally()
        self._registry = registry
        self._queue = queue
        self._config = config
        self._on_finished = on_finished

    async def run(self, sample: Sample, ticket: Ticket, output: SampleOutput) -> Receipt:
        """Run a sample to its end. Its tokens go to `output` as they come.

        Raises:
            DeadlineError: the sample's deadline has passed.
            OverloadedError: its request was shed for others before it ever had a seat.
            UnavailableError: nodes are missing, or failed `max_attempts` runs.
            InvalidArgumentError: an engine refuses the request, or two runs had no finite logits to draw from.
            DataLossError: a repeated run gave other bits than the run before, or than the client received.
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
        """Run the sample once and return its receipt; None if a node failed the run. Raises DeadlineError if the run
        failed because the sample's deadline passed."""
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
        """Return whether this router itself stood still in a run for longer than a node may be silent.

        Nodes end the streams and leases of such a router. So the failed run is not their fault, and it is no reason to
        give the request up before its deadline. Each such run takes so long that even a request that kills nodes kills
        only a few.
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
        """Log that bits differ. If two runs in this router differ, quarantine the nodes of both, because one of them
        gave wrong bits and nothing shows which."""
        log.error("%s of %s", error, sample)
        if output.differs_at is None:  # The bits differ only from those the client sent, which proves nothing of nodes.
            return
        source = history.source(output.differs_at)
        assert source is not None  # An earlier run drew the token that differs.
        self._registry.quarantine((*source.refs, *seat.refs), str(sample))

    async def _admit(self, sample: Sample, ticket: Ticket, output: SampleOutput, span: Span) -> Run:
        """Wait for a seat and reserve it. If the node has no room after all, wait again at the same place."""
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
    """The receiver of a run's tokens."""

    position: int
    """The number of tokens that the current run has given so far."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the sample so far, over all its runs."""

    def take(self, token_id: int, logprob: float) -> bool:
        """Take the run's next token. Return True if the sample ends with it."""

    def hexdigest(self) -> str:
        """Return the digest of the sample's tokens (`corun.receipt.OutputDigest`)."""

    def tokens_hexdigest(self) -> str:
        """Return the digest of the sample's token ids alone."""


class Run:
    """One run of one sample on one pair of nodes, with the slot and the KV that it holds there."""

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
        self._prefill_id = ""  # It is set while the prefill node may hold KV for this run.

    @property
    def first_token_at(self) -> float | None:
        """When the run's first token came, on the loop's clock; None if there was none."""
        return self._lease.first_row_at

    async def reserve(self) -> None:
        """Lease the slot. Raises OverloadedError if the node has no room now."""
        with _faults_of(self.seat.decode, passing=OverloadedError), self._span.child("reserve"):
            await self.seat.decode.client.reserve(
                self._lease,
                num_prompt_tokens=len(self._sample.prompt_token_ids),
                max_tokens=self._sample.params.max_tokens,
                timeout_s=self._time(self._config.reserve_timeout_s),
            )
        self._span.note({"corun.slot": self._lease.slot or 0})

    async def to_end(self) -> FinishReason:
        """Compute the whole sample in the leased slot. Its tokens go to the output as they come."""
        return await self.decode(await self.prefill())

    async def decode(self, handle: KvHandle) -> FinishReason:
        """Decode all tokens from the prompt's KV. They go to the output as they come."""
        with self._span.child("decode") as span:
            try:
                await self.start(handle)
                return await self.stream()
            finally:
                if self.first_token_at is not None:
                    span.event("first_token", self.first_token_at)

    async def prefill(self) -> KvHandle:
        """Compute the prompt's KV and return its handle."""
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
        """Hand the KV over to the decode node and start to decode."""
        sample = self._sample
        start = Start(handle=handle, prompt_token_ids=sample.prompt_token_ids, params=sample.params, seed=sample.seed)
        with _faults_of(self.seat.decode):
            timeout_s = self._time(self._config.step_timeout_s)
            await self.seat.decode.client.start(self._lease, start, timeout_s, self._span.metadata)

    async def stream(self) -> FinishReason:
        """Wait for the last token. Tokens go to the output as they come."""
        ended = self._lease.ended
        with _faults_of(self.seat.decode):
            while not ended.done():
                left = self._config.step_timeout_s - self.seat.decode.client.silent_s(self._lease)
                if left <= 0:
                    raise DeadlineError(f"no token for {self._config.step_timeout_s:g} s")
                if not self._output.position:  # Before the first token, the KV may not have been read yet.
                    self._check_source()
                    left = min(left, SOURCE_CHECK_S)
                await asyncio.wait((ended,), timeout=self._time(left))
            return ended.result()

    def _check_source(self) -> None:
        """Raise NodeFaultError if the prefill node that holds the KV is lost or stuck."""
        prefill = self.seat.prefill
        if reason := prefill.lost or prefill.stuck:
            raise NodeFaultError(prefill, UnavailableError(f"{prefill.node_id}: {reason}"))

    def close(self) -> None:
        """Give back all that the run holds. This never waits: calls to nodes run in the background."""
        self.seat.leave()
        self.leave_kv()()
        self.seat.decode.client.release(self._lease, self.seat.free)

    def leave_kv(self) -> Callable[[], None]:
        """Leave the KV on the prefill node for another run, and return a function that releases it. Call this before
        `close`."""
        name, self._prefill_id = self._prefill_id, ""
        if not name or self._output.position:  # Once there is a token, the KV has been read.
            return _nothing
        return partial(self.seat.prefill.client.release_kv, name)

    def _time(self, longest_s: float) -> float:
        """Return the seconds until the sample's deadline, at most `longest_s`. Raises DeadlineError if none is left."""
        left = self._sample.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineError(f"the deadline passed in a run of {self._sample}")
        return min(left, longest_s)


def _nothing() -> None:
    pass


def _not_finite(sample: Sample, position: int, nodes: str) -> InvalidArgumentError:
    """Return the error for a request whose logits overflow. It tells clients not to send the request again as it is."""
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
    """Return the number of the sample's tokens that the client did not have from an earlier call."""
    return max(0, output.num_tokens - (sample.received.num_tokens if sample.received else 0))


def _is_over(sample: Sample, fault: NodeFaultError) -> bool:
    """Return whether a run ended because the sample's deadline passed. That must not count as a fault of the node,
    because short deadlines could then keep the node from work. gRPC's clock may be a little ahead of the loop's."""
    slack_s = CLOCK_SLACK_S if isinstance(fault.error, DeadlineError) else 0.0
    return asyncio.get_running_loop().time() >= sample.deadline - slack_s


@contextmanager
def _faults_of(member: Member[Any], passing: type[CorunError] | tuple[()] = ()) -> Iterator[None]:
    """Turn the errors of calls to a node into faults of that node, except `passing` and errors in the client's own
    fields."""
    try:
        yield
    except passing:
        raise
    except CorunError as error:
        if isinstance(error, InvalidArgumentError) and error.field.startswith(_OF_CLIENTS):
            raise  # The engine refuses the request, and another run would not change that.
        raise NodeFaultError(member, error) from error


def receipt_of(sample: Sample, fingerprint: str, output: Output, seat: Seat, reason: FinishReason) -> Receipt:
    """Return the receipt of a run that has ended."""
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
