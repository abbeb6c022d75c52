"""Fixed slots: at most `max_num_seqs` requests, one token each, admitted only with KV room for their whole sequence.

Owns: admission into the engine and the promise that a step holds no prompt token and nothing is preempted. It repeats
the node's own lease accounting on purpose: the blocks of an aborted request come back late, and only the engine knows
when. Must not know: leases, gRPC, sampling.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.vllm.gpu_lock import DecodeTurn
from corun.node.vllm.scheduler import ReservingScheduler

LONGEST_WAIT = "longest_wait_s"
"""Of a step, in the connector's configuration, where schedulers find ours."""


class FixedSlotScheduler(ReservingScheduler):
    """Decodes requests whose prompt KV arrives from a prefill node (paper, Section IV-B)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turn: DecodeTurn | None = None
        if (path := self.gpu_lock()) is not None:
            self.turn = DecodeTurn(path, self.vllm_config.kv_transfer_config.kv_connector_extra_config[LONGEST_WAIT])

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One decode step over the admitted requests. On a GPU that is shared, prefill goes first.

        Raises:
            RuntimeError: the step would have another shape; it is refused, not run.
        """
        if self.turn is not None and self.running:
            self.turn.wait()
        with self.showing_waiting(self.admissible()):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        self._check_shape(output)
        return output

    def admissible(self) -> list[Request]:
        """The requests from the head of the queue that have a slot and KV room; FIFO, so the first misfit ends it."""
        admitted = [*self.running, *self.skipped_waiting]
        slots = self.max_num_running_reqs - len(admitted)
        free = self.free_blocks(admitted)
        chosen: list[Request] = []
        for request in self.waiting:
            free -= self.blocks_of(request)
            if len(chosen) == slots or free < 0:
                break
            chosen.append(request)
        return chosen

    def _check_shape(self, output: SchedulerOutput) -> None:
        tokens = output.num_scheduled_tokens
        if len(tokens) > self.max_num_running_reqs or any(count != 1 for count in tokens.values()):
            raise RuntimeError(
                f"a decode step holds one token for up to {self.max_num_running_reqs} requests: {tokens}"
            )

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        raise RuntimeError(f"request {request.request_id} would be preempted, but its KV room was reserved")
