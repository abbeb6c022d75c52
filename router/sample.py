"""Run one sample, from its place in the queue to its receipt, over as many attempts as node faults make necessary.

`SampleRun.run` is the design of the cluster in one loop: place, reserve, prefill, decode, finish. If a node fault
ends an attempt, the sample starts again from its prompt with the same seed. The tokens that were delivered must come
again bit by bit, and the client sees one stream. When an attempt ends in any way, even by cancellation, its lease,
its KV and its claims are given back. This module must not know gRPC messages or how nodes are found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from corun.config.fields import RouterConfig
from corun.errors import (
    CorunError,
    DataLossError,
    InvalidArgumentError,
    OverloadedError,
    Shown,
    UnavailableError,
)
from corun.observe.tracing import Span
from corun.receipt import Receipt
from corun.types import FinishReason
from router.attempt import Attempt, NodeFaultError, SampleTask, receipt_of
from router.clock import loop_time
from router.faults import Faults
from router.metrics import RouterMetrics
from router.nodes.node import Placement
from router.nodes.registry import Registry
from router.output import SampleOutput
from router.queue import QueueEntry, SampleQueue

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


@dataclass(kw_only=True)
class RunContext:
    """What the runs of all samples and scores share."""

    registry: Registry
    queue: SampleQueue
    config: RouterConfig
    metrics: RouterMetrics
    on_finished: Callable[[Finished], None]


class SampleRun:
    """The attempts of one sample. They show which nodes to name if the sample cannot go on."""

    def __init__(self, context: RunContext, task: SampleTask, entry: QueueEntry, output: SampleOutput) -> None:
        self._context = context
        self._task = task
        self._entry = entry
        self._output = output
        self._first_token_at: float | None = None
        self._kept_kv = ExitStack()
        """Releases the KV that an attempt left unread for the next one."""
        self._reached: list[tuple[int, Placement]] = []
        """The attempts that have ended: the tokens that the sample had then, and where it ran."""
        self._faults = Faults(str(task), task.deadline, context.registry, context.config, context.metrics)

    async def run(self) -> Receipt:
        """Run the sample to its end. Its tokens go to the output as they come.

        Raises:
            DeadlineError: the sample's deadline has passed.
            UnavailableError: nodes are missing, or failed `max_attempts` attempts.
            InvalidArgumentError: an engine refuses the request, or two attempts had no finite logits to draw from.
            DataLossError: a repeated attempt gave other bits than the one before, or than the client received.
        """
        task, output = self._task, self._output
        reason: FinishReason | None = None
        with self._kept_kv:
            while reason is None:
                with task.span.child("attempt", task.facts | {"corun.attempt": self._faults.num_failed + 1}) as span:
                    placement = await self._place(span)
                    more_follow = self._context.queue.more_follow(placement.need.kv_key)
                    attempt = Attempt(task, placement, output, self._context.config, span, more_follow=more_follow)
                    with self._account_for(attempt):
                        await attempt.reserve()  # Decode node: KV room for prompt and output, a place in line.
                        handle = await attempt.prefill()  # Prefill node: the prompt's KV.
                        self._kept_kv.close()  # This attempt has its own claim on it.
                        reason = output.end(await attempt.decode(handle))  # Decode node: a slot, the tokens.
                        span.note({"gen_ai.usage.output_tokens": output.num_tokens})
                        span.note({"gen_ai.response.finish_reasons": (reason.value,)})
                if reason is None:  # mypy does not know that `_account_for` ends some errors.
                    output.restart()  # type: ignore[unreachable]
                    self._context.queue.again(self._entry, ran=self._faults.num_failed > 0)
            return self._finish(reason)

    async def _place(self, span: Span) -> Placement:
        """Wait for the sample's place on a pair of nodes."""
        began = loop_time()
        with span.child("queue"):
            placement = await self._context.queue.place(self._entry, self._task.deadline)
        assert isinstance(placement, Placement)  # Only a score gets less.
        self._context.metrics.queue_seconds.observe(loop_time() - began)
        prefill, decode = placement.refs
        span.note({"corun.prefill_node": str(prefill), "corun.decode_node": str(decode)})
        return placement

    @contextmanager
    def _account_for(self, attempt: Attempt) -> Iterator[None]:
        """Give back what an attempt holds, and draw the consequences of its end.

        A refused reservation and a node fault end the attempt without an error, so that the sample can be placed again.
        Raises the error that ends the sample, if it may not.
        """
        placement, clock = attempt.placement, self._context.registry.clock
        still_before, unreceived = clock.still_s, self._num_unreceived()
        try:
            yield
        except OverloadedError as error:
            log.debug("%s waits again: %s", self._task, error)
            placement.refuse()
        except DataLossError as error:
            self._note_mismatch(error, attempt)
            raise
        except NodeFaultError as fault:
            if (mismatch := self._output.mismatch) is not None:  # The next run would be taken for the one that differs.
                self._note_mismatch(mismatch, attempt)
                raise mismatch from fault
            if fault.node is placement.decode and fault.is_loss and self._entry.need.kv_key:
                attempt.leave_kv(self._kept_kv)
            self._note_fault(fault, attempt, clock.still_s - still_before)
        finally:
            if placement.holds_room:  # A refused placement has led to no attempt.
                self._reached.append((self._output.num_tokens, placement))
            self._context.metrics.output_tokens.inc(self._num_unreceived() - unreceived)
            if self._first_token_at is None and attempt.first_token_at is not None:
                self._first_token_at = attempt.first_token_at
                if self._task.arrived is not None:
                    waited_s = self._first_token_at - self._task.arrived
                    self._context.metrics.time_to_first_token_seconds.observe(waited_s)
            attempt.close()

    def _num_unreceived(self) -> int:
        """Return the number of the sample's tokens that the client did not have from an earlier call."""
        received = self._task.received
        return max(0, self._output.num_tokens - (received.num_tokens if received else 0))

    def _note_fault(self, fault: NodeFaultError, attempt: Attempt, still_s: float) -> None:
        """Take a node fault into account (`Faults.note`), and prepare the next attempt. Raises the error that ends the
        sample if there is no next attempt."""
        self._faults.note(fault, attempt.placement.refs, still_s)
        attempt.span.fail(fault)
        if error := self._final_error():
            log.error("%s: %s", self._task, error)
            raise error from fault
        shares = not fault.doubts_kv(self._output.position)
        self._entry.need = self._entry.need.again(fault.node.node_id, shares=shares)

    def _final_error(self) -> CorunError | None:
        """Return the error that ends the sample after its newest fault; None if it runs again.

        The error names the nodes. It also blames the request, if nodes are lost wherever it runs, or if two attempts
        had no finite logits to draw from: clients then do not send it again as it is.
        """
        task, max_attempts, nodes = self._task, self._context.config.max_attempts, self._faults
        runs = len(nodes.nodes)
        if nodes.lack_finite_logits:
            position = self._output.num_tokens
            limit = f"has logits that are not finite at output token {position} with these parameters ({nodes})"
            return InvalidArgumentError("prompt", Shown(f"{len(task.prompt_token_ids)} tokens"), limit)
        if runs < max_attempts:
            return None
        if nodes.losses == runs:
            return UnavailableError(
                f"request {task.request_id!r} may be poison: {runs} runs of its sample {task.index} "
                f"ended with a lost node ({nodes})"
            )
        return UnavailableError(f"nodes failed {runs} runs of {task} ({nodes})")

    def _note_mismatch(self, error: DataLossError, attempt: Attempt) -> None:
        """Log that bits differ. If two attempts in this router differ, quarantine the nodes of both, because one of
        them gave wrong bits and nothing shows which."""
        log.error("%s of %s", error, self._task)
        differs_at = self._output.differs_at
        if differs_at is None:  # The bits differ only from those the client sent, which proves nothing of nodes.
            return
        source = next(placement for num_tokens, placement in self._reached if num_tokens > differs_at)
        self._context.registry.quarantine((*source.refs, *attempt.placement.refs), str(self._task))

    def _finish(self, reason: FinishReason) -> Receipt:
        """Count and deliver a sample that ended well, and return its receipt."""
        task, output, context = self._task, self._output, self._context
        _, newest = self._reached[-1]
        context.metrics.finished_samples.inc()
        receipt = receipt_of(task, context.registry.contract.fingerprint, output, newest, reason)
        if task.arrived is not None:
            context.metrics.note_sample(
                task.arrived, self._first_token_at, receipt.num_prompt_tokens, receipt.num_output_tokens
            )
        output.deliver(receipt)
        self._faults.contradict(newest.refs)
        context.on_finished(
            Finished(task=task, receipt=receipt, records=output.records, node_reason=output.node_reason)
        )
        return receipt
