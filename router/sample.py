"""Run one sample, from its place in the queue to its receipt, over as many attempts as node faults make necessary.

`SampleRunner.run` is the design of the cluster in one loop: place, reserve, prefill, decode, finish. If a node fault
ends an attempt, the sample starts again from its prompt with the same seed. The tokens that were delivered must come
again bit by bit, and the client sees one stream. When an attempt ends in any way, even by cancellation, its slot, its
KV and its claims are given back. This module must not know gRPC messages or how nodes are found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from corun.config.fields import RouterConfig
from corun.errors import (
    CorunError,
    DataLossError,
    DeadlineError,
    InvalidArgumentError,
    OverloadedError,
    Shown,
    UnavailableError,
)
from corun.observe.tracing import Span, Value
from corun.receipt import Receipt
from corun.types import FinishReason, NodeRef
from router.attempt import Attempt, NodeFaultError, SampleTask, nothing, receipt_of
from router.clock import loop_time
from router.metrics import RouterMetrics
from router.nodes.node import Placement
from router.nodes.node_client import ALONE, KvScope, is_not_finite
from router.nodes.registry import Registry
from router.output import SampleOutput
from router.queue import QueueEntry, SampleQueue

CLOCK_SLACK_S = 0.1
NOT_FINITE_ATTEMPTS = 2
"""The number of attempts without finite logits after which the request is at fault. A single one may have been on a
broken node."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample whose output the client has in full."""

    task: SampleTask
    receipt: Receipt
    records: bytes | bytearray
    """The records of the sample's tokens, 8 bytes each (`router.output.RECORD`)."""
    node_reason: FinishReason | None
    """Why the node ended the sample; None if the router ended it at a stop string."""


class History:
    """The attempts of one sample so far. They show which nodes to name if the sample cannot go on."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        """When the sample's first token came, on the loop's clock; None before it."""
        self._give_back_kv: Callable[[], None] = nothing
        self.num_failed = 0
        """The number of attempts that a fault ended, including excused ones."""
        self._reached: list[tuple[int, Placement]] = []
        self._faults: list[NodeRef] = []
        self._losses = 0
        self._not_finite: list[tuple[int, Placement]] = []  # As `_reached`, without finite logits.

    @property
    def num_faults(self) -> int:
        """The number of attempts that a node failed, without excused ones."""
        return len(self._faults)

    def note_attempt(self, num_tokens: int, placement: Placement) -> None:
        """Note that an attempt on `placement` has ended, when the sample had `num_tokens` tokens."""
        self._reached.append((num_tokens, placement))

    def note_failed(self, fault: NodeFaultError, attempt: Attempt[SampleOutput], *, is_excused: bool) -> None:
        """Note that a fault ended an attempt. is_excused: neither the node nor the request is to blame for it."""
        self.num_failed += 1
        if not is_excused:
            self._faults.append(fault.node.info.ref)
            self._losses += fault.is_loss
        if is_not_finite(fault.error):
            self._not_finite.append((attempt.output.num_tokens, attempt.placement))

    def keep_kv(self, give_back: Callable[[], None]) -> None:
        """Keep KV that an attempt left unread, because the next attempt may read it. `give_back` releases it."""
        self._give_back_kv = give_back

    def give_back_kv(self) -> None:
        """Release the kept KV, because the next attempt has its own claim on it or there is no next attempt."""
        self._give_back_kv()
        self._give_back_kv = nothing

    @property
    def newest(self) -> Placement:
        """The placement of the newest attempt that has ended."""
        return self._reached[-1][1]

    @property
    def contradicted(self) -> tuple[NodeRef, ...]:
        """The nodes of the attempts without finite logits, to be read after the last attempt ended well. It contradicts
        them. Its own nodes are included only if there are no others."""
        refs = [ref for _, placement in self._not_finite for ref in placement.refs]
        return tuple(ref for ref in refs if ref not in self.newest.refs) or tuple(refs)

    def source(self, position: int) -> Placement | None:
        """Return the placement of the attempt that first drew the token at `position`."""
        return next((placement for num_tokens, placement in self._reached if num_tokens > position), None)

    def final_error(self, task: SampleTask, max_attempts: int) -> CorunError | None:
        """Return the error that ends the sample after its newest fault; None if it runs again.

        The error names the nodes. It also blames the request, if nodes are lost wherever it runs, or if two attempts
        had no finite logits to draw from.
        """
        nodes = ", ".join(map(str, self._faults))
        if len(self._not_finite) >= min(NOT_FINITE_ATTEMPTS, max_attempts):
            return _not_finite(task, self._not_finite[-1][0], nodes)
        if self.num_faults < max_attempts:
            return None
        if self._losses == self.num_faults:
            return UnavailableError(
                f"request {task.request_id!r} may be poison: {self._losses} runs of its sample {task.index} "
                f"ended with a lost node ({nodes})"
            )
        return UnavailableError(f"nodes failed {self.num_faults} runs of {task} ({nodes})")


class SampleRunner:
    """Runs samples on the registry's nodes, in the queue's order."""

    def __init__(
        self,
        registry: Registry,
        queue: SampleQueue,
        config: RouterConfig,
        metrics: RouterMetrics,
        on_finished: Callable[[Finished], None] = lambda _: None,
    ) -> None:
        self.metrics = metrics
        self._registry = registry
        self._queue = queue
        self._config = config
        self._on_finished = on_finished

    async def run(self, task: SampleTask, entry: QueueEntry, output: SampleOutput) -> Receipt:
        """Run a sample to its end. Its tokens go to `output` as they come.

        Raises:
            DeadlineError: the sample's deadline has passed.
            UnavailableError: nodes are missing, or failed `max_attempts` attempts.
            InvalidArgumentError: an engine refuses the request, or two attempts had no finite logits to draw from.
            DataLossError: a repeated attempt gave other bits than the one before, or than the client received.
        """
        history = History()
        reason: FinishReason | None = None
        try:
            while reason is None:
                with task.span.child("attempt", _attempt_facts(task, history)) as span:
                    placement = await self._place(task, entry, span)
                    attempt = Attempt(task, placement, output, self._config, span, self._kv_scope(task, entry))
                    with self._account_for(attempt, entry, history):
                        await attempt.reserve()  # Decode node: a slot, and KV room for prompt and output.
                        handle = await attempt.prefill()  # Prefill node: the prompt's KV.
                        history.give_back_kv()
                        reason = output.end(await attempt.decode(handle))  # Decode node: the tokens.
                        span.note(_output_facts(output, reason))
                if reason is None:  # mypy does not know that `_account_for` ends some errors.
                    output.restart()  # type: ignore[unreachable]
                    self._queue.again(entry, ran=history.num_failed > 0)
            return self._finish(task, output, history, reason)
        finally:
            history.give_back_kv()

    async def _place(self, task: SampleTask, entry: QueueEntry, span: Span) -> Placement:
        """Wait for the sample's place on a pair of nodes."""
        began = loop_time()
        with span.child("queue"):
            placement = await self._queue.place(entry, task.deadline)
        self.metrics.queue_seconds.observe(loop_time() - began)
        prefill, decode = placement.refs
        span.note({"corun.prefill_node": str(prefill), "corun.decode_node": str(decode)})
        return placement

    def _kv_scope(self, task: SampleTask, entry: QueueEntry) -> KvScope:
        kv_key = entry.need.kv_key
        return KvScope(task.share_scope, self._queue.more_follow(kv_key)) if kv_key else ALONE

    @contextmanager
    def _account_for(self, attempt: Attempt[SampleOutput], entry: QueueEntry, history: History) -> Iterator[None]:
        """Give back what an attempt holds, and draw the consequences of its end.

        A refused reservation and a node fault end the attempt without an error, so that the sample can be placed again.
        Raises the error that ends the sample, if it may not.
        """
        task, output, placement = attempt.task, attempt.output, attempt.placement
        still_before, unreceived = self._registry.clock.still_s, _unreceived(task, output)
        try:
            yield
        except OverloadedError as error:
            log.debug("%s waits again: %s", task, error)
            placement.refuse()
        except DataLossError as error:
            self._note_mismatch(error, attempt, history)
            raise
        except NodeFaultError as fault:
            if fault.node is placement.decode and fault.is_loss and entry.need.kv_key:
                history.keep_kv(attempt.leave_kv())
            self._note_fault(fault, attempt, entry, history, self._registry.clock.still_s - still_before)
        finally:
            if placement.holds_slot:  # A refused placement has led to no attempt.
                history.note_attempt(output.num_tokens, placement)
            self.metrics.output_tokens.inc(_unreceived(task, output) - unreceived)
            self._note_first_token(attempt, history)
            attempt.close()

    def _note_fault(
        self, fault: NodeFaultError, attempt: Attempt[SampleOutput], entry: QueueEntry, history: History, still_s: float
    ) -> None:
        """Tell the registry of a node fault, and prepare the next attempt. Raises DeadlineError if the attempt failed
        because the sample's deadline passed, and the error that ends the sample if there is no next attempt.

        still_s: for how many seconds this router stood still in the attempt.
        """
        task = attempt.task
        if _is_over(task, fault):
            log.info("an attempt of %s ended: %s", task, fault)
            raise DeadlineError(f"the deadline passed in an attempt of {task}") from fault
        log.warning("an attempt of %s failed: %s", task, fault)
        attempt.span.fail(fault)
        self.metrics.sample_retries.labels("lost" if fault.is_loss else "fault").inc()
        history.note_failed(fault, attempt, is_excused=self._is_excused(still_s))
        self._registry.note_fault(fault.node, fault.error)
        if error := history.final_error(task, self._config.max_attempts):
            log.error("%s: %s", task, error)
            raise error from fault
        entry.need = entry.need.again(fault.node.node_id, shares=not fault.doubts_kv(attempt.output.position))

    def _is_excused(self, still_s: float) -> bool:
        """Return whether this router itself stood still in an attempt for longer than a node may be silent.

        Nodes end the streams and leases of such a router. So the failed attempt is not their fault, and it is no reason
        to give the request up before its deadline. Each such attempt takes so long that even a request that kills nodes
        kills only a few.
        """
        if excused := still_s > self._config.heartbeat_timeout_ms / 1000:
            log.warning("it does not count: this router stood still for %.1f s in it", still_s)
        return excused

    def _note_first_token(self, attempt: Attempt[SampleOutput], history: History) -> None:
        if history.first_token_at is None and attempt.first_token_at is not None:
            history.first_token_at = attempt.first_token_at
            if attempt.task.arrived is not None:
                self.metrics.time_to_first_token_seconds.observe(attempt.first_token_at - attempt.task.arrived)

    def _note_mismatch(self, error: DataLossError, attempt: Attempt[SampleOutput], history: History) -> None:
        """Log that bits differ. If two attempts in this router differ, quarantine the nodes of both, because one of
        them gave wrong bits and nothing shows which."""
        log.error("%s of %s", error, attempt.task)
        differs_at = attempt.output.differs_at
        if differs_at is None:  # The bits differ only from those the client sent, which proves nothing of nodes.
            return
        source = history.source(differs_at)
        assert source is not None  # An earlier attempt drew the token that differs.
        self._registry.quarantine((*source.refs, *attempt.placement.refs), str(attempt.task))

    def _finish(self, task: SampleTask, output: SampleOutput, history: History, reason: FinishReason) -> Receipt:
        """Count and deliver a sample that ended well, and return its receipt."""
        self.metrics.finished_samples.inc()
        receipt = receipt_of(task, self._registry.contract.fingerprint, output, history.newest, reason)
        if task.arrived is not None:
            self.metrics.note_sample(
                task.arrived, history.first_token_at, receipt.num_prompt_tokens, receipt.num_output_tokens
            )
        output.deliver(receipt)
        if history.contradicted:
            self._registry.quarantine(history.contradicted, str(task))
        self._on_finished(Finished(task=task, receipt=receipt, records=output.records, node_reason=output.node_reason))
        return receipt


def _not_finite(task: SampleTask, position: int, nodes: str) -> InvalidArgumentError:
    """Return the error for a request whose logits overflow. It tells clients not to send the request again as it is."""
    limit = f"has logits that are not finite at output token {position} with these parameters ({nodes})"
    return InvalidArgumentError("prompt", Shown(f"{len(task.prompt_token_ids)} tokens"), limit)


def _attempt_facts(task: SampleTask, history: History) -> dict[str, Value]:
    return {
        "corun.sample_index": task.index,
        "corun.attempt": history.num_failed + 1,
        "gen_ai.request.seed": task.seed,
        "gen_ai.usage.input_tokens": len(task.prompt_token_ids),
    }


def _output_facts(output: SampleOutput, reason: FinishReason) -> dict[str, Value]:
    return {
        "gen_ai.usage.output_tokens": output.num_tokens,
        "gen_ai.response.finish_reasons": (reason.value,),
    }


def _unreceived(task: SampleTask, output: SampleOutput) -> int:
    """Return the number of the sample's tokens that the client did not have from an earlier call."""
    return max(0, output.num_tokens - (task.received.num_tokens if task.received else 0))


def _is_over(task: SampleTask, fault: NodeFaultError) -> bool:
    """Return whether an attempt ended because the sample's deadline passed. That must not count as a fault of the node,
    because short deadlines could then keep the node from work. gRPC's clock may be a little ahead of the loop's."""
    slack_s = CLOCK_SLACK_S if isinstance(fault.error, DeadlineError) else 0.0
    return loop_time() >= task.deadline - slack_s
