"""Isolated prefill: a scheduling step that holds prompt tokens holds one request (paper, Algorithms 1 and 2).

Owns: which request may prefill next. The stock scheduler does the rest, shown only that request. Chunk boundaries
follow from the request's own length, because an isolated request always has the step's whole token budget. Must not
know: connectors, sampling, slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.vllm.gpu_lock import PrefillTurn
from corun.node.vllm.scheduler import ReservingScheduler


class IsolatedPrefillScheduler(ReservingScheduler):
    """Runs one prompt at a time, first come, first served; steps without prompt tokens stay the stock scheduler's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = self.gpu_lock()
        self.turn = None if path is None else PrefillTurn(path)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Paper, Algorithm 2: isolates the request of Algorithm 1, or runs a decode step without admitting anything."""
        chosen = self.find_prefill_request()
        self._take_turn(busy=chosen is not None or bool(self.running))
        with self._isolating(chosen):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        if chosen is not None and output.num_scheduled_tokens.keys() - {chosen.request_id}:
            raise RuntimeError(f"the prefill step of {chosen.request_id} holds {sorted(output.num_scheduled_tokens)}")
        return output

    def find_prefill_request(self) -> Request | None:
        """Paper, Algorithm 1: an unfinished chunked prompt, else the head of the queue if its whole sequence fits."""
        for request in self.running:
            if request.num_computed_tokens < request.num_prompt_tokens:
                return request
        if self.waiting and len(self.running) < self.max_num_running_reqs:
            head: Request = self.waiting.peek_request()
            if self.blocks_of(head) <= self.free_blocks(self.running):
                return head
        return None

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._take_turn(busy=self.has_work())
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._take_turn(busy=self.has_work())
        return finished

    def has_work(self) -> bool:
        """Whether the next step may hold a prompt. After a step without one it has not: there is no room."""
        return bool(self.running or self.waiting)

    def _take_turn(self, *, busy: bool) -> None:
        if self.turn is not None:
            self.turn.hold(busy)

    @contextmanager
    def _isolating(self, chosen: Request | None) -> Iterator[None]:
        """Shows the stock scheduler only `chosen`; with None, only the requests that have started."""
        if chosen is None:
            with self.showing_waiting([]):
                yield
            return
        running = self.running
        starts = chosen not in running
        self.running = [] if starts else [chosen]
        try:
            with self.showing_waiting([chosen] if starts else []):
                yield
        finally:
            # The chosen request goes first: Algorithm 1 finds an unfinished prompt at the head.
            self.running.extend(request for request in running if request is not chosen)
