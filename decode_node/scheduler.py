"""Fixed slots: at most `max_num_seqs` requests run, one token each, each with KV room for its whole sequence.

Owns: admission into the engine, and the guarantee that a step holds no prompt token and that no request is preempted.
A request that is admitted has its KV read at once, also while all slots run, and takes a slot when the KV has arrived.
It repeats the node's own lease accounting on purpose: the blocks of an aborted request become free later, and only the
engine knows when. Must not know: leases, gRPC, sampling.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.vllm.gpu_lock import DecodeTurn
from corun.node.vllm.scheduler import ReservingScheduler

LONGEST_WAIT = "longest_wait_s"
"""The key of the longest wait of a step, in seconds, in the connector's extra configuration; our schedulers read their
settings there."""


class FixedSlotScheduler(ReservingScheduler):
    """Decodes requests whose prompt KV arrives from a prefill node (paper, Section IV-B)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.slots = self.max_num_running_reqs
        # The stock scheduler looks at waiting requests only below both limits, so their KV would be read only while a
        # slot is free. A request never runs on the added ones (`_try_promote_blocked_waiting_request`).
        self.max_num_running_reqs += 1
        self.max_num_scheduled_tokens += 1
        self.turn: DecodeTurn | None = None
        if (path := self.gpu_lock()) is not None:
            self.turn = DecodeTurn(path, self.vllm_config.kv_transfer_config.kv_connector_extra_config[LONGEST_WAIT])

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule one decode step over the admitted requests. On a shared GPU, prefill goes first.

        Raises:
            RuntimeError: the step would have another shape; it is refused and does not run.
        """
        if self.turn is not None and self.running:
            self.turn.wait()
        with self.showing_waiting(self.admissible()):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        self._check_shape(output)
        return output

    def admissible(self) -> list[Request]:
        """Return the requests at the head of the queue that get KV room. The order is FIFO, so the first request
        without room ends the list. Their number is bounded by the node's leases."""
        free = self.free_blocks([*self.running, *self.skipped_waiting])
        chosen: list[Request] = []
        for request in self.waiting:
            free -= self.blocks_of(request)
            if free < 0:
                break
            chosen.append(request)
        return chosen

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        """Let a request run whose KV has arrived, if a slot is free. vLLM asks in the order of arrival, and otherwise
        keeps the request in its place."""
        return len(self.running) < self.slots and bool(super()._try_promote_blocked_waiting_request(request))

    def _check_shape(self, output: SchedulerOutput) -> None:
        tokens = output.num_scheduled_tokens
        if len(tokens) > self.slots or any(count != 1 for count in tokens.values()):
            raise RuntimeError(f"a decode step holds one token for up to {self.slots} requests: {tokens}")

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        raise RuntimeError(f"request {request.request_id} would be preempted, but its KV room was reserved")
