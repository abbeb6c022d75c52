"""Fixed slots: at most `max_num_seqs` requests, one token each, admitted only with KV room for their whole sequence.

Owns: admission into the engine and the promise that a step holds no prompt token and nothing is preempted. It repeats
the node's own lease accounting on purpose: the blocks of an aborted request come back late, and only the engine knows
when. Must not know: leases, gRPC, sampling.
"""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.scheduler import ReservingScheduler


class FixedSlotScheduler(ReservingScheduler):
    """Decodes requests whose prompt KV arrives from a prefill node (paper, Section IV-B)."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One decode step over the admitted requests.

        Raises:
            RuntimeError: the step would have another shape; it is refused, not run.
        """
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
