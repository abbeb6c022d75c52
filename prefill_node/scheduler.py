"""Isolated prefill: a scheduling step that holds prompt tokens holds one request (paper, Algorithms 1 and 2).

Owns: which request may prefill next. The stock scheduler sees only that request and does the rest. Chunk boundaries
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
from prefill_node.prefix_cache import PrefixCache


class IsolatedPrefillScheduler(ReservingScheduler):
    """Runs one prompt at a time, first come, first served; the stock scheduler makes steps without prompt tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chunk_size = self.scheduler_config.max_num_batched_tokens
        self.prefix_cache = PrefixCache(self.kv_cache_manager, chunk_size=chunk_size, block_size=self.block_size)
        path = self.gpu_lock()
        self.turn = None if path is None else PrefillTurn(path)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Isolate the request that Algorithm 1 chose, or run a decode step without admitting anything (Algorithm 2)."""
        chosen = self.find_prefill_request()
        self._hold_gpu(busy=chosen is not None or bool(self.running))
        with self._isolating(chosen):
            output: SchedulerOutput = super().schedule(throttle_prefills)
        if chosen is not None and output.num_scheduled_tokens.keys() - {chosen.request_id}:
            raise RuntimeError(f"the prefill step of {chosen.request_id} holds {sorted(output.num_scheduled_tokens)}")
        return output

    def find_prefill_request(self) -> Request | None:
        """Return an unfinished chunked prompt, else the head of the queue if its whole sequence fits (Algorithm 1)."""
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
        self._hold_gpu(busy=bool(self.running or self.waiting))
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().finish_requests(*args, **kwargs)
        self._hold_gpu(busy=bool(self.running or self.waiting))
        return finished

    def _hold_gpu(self, *, busy: bool) -> None:
        """Hold the GPU while a request runs or waits. Only `schedule` finds out whether a waiting prompt has room; if
        none has and no request runs, it gives the turn back."""
        if self.turn is not None:
            self.turn.hold(busy)

    @contextmanager
    def _isolating(self, chosen: Request | None) -> Iterator[None]:
        """Show the stock scheduler only `chosen`; with None, show only the requests that have started."""
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
            # The chosen request goes first, because Algorithm 1 looks for an unfinished prompt from the head.
            self.running.extend(request for request in running if request is not chosen)
