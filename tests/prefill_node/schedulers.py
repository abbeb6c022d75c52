"""A scheduler to compare the prefill node's with: one prompt a step, in the plainest form.

Imports vLLM: load it with `tests.loading.load`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from corun.node.vllm.scheduler import ReservingScheduler


class OnePromptScheduler(ReservingScheduler):
    """The paper's Algorithms 1 and 2 word by word: a step has one prompt. It was the node's own scheduler once."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        with self._isolating(self._find_prefill_request()):
            return super().schedule(throttle_prefills)

    def _find_prefill_request(self) -> Request | None:
        for request in self.running:
            if request.num_computed_tokens < request.num_prompt_tokens:
                return request
        if self.waiting and len(self.running) < self.max_num_running_reqs:
            head: Request = self.waiting.peek_request()
            if self.blocks_of(head) <= self.free_blocks(self.running):
                return head
        return None

    @contextmanager
    def _isolating(self, chosen: Request | None) -> Iterator[None]:
        if chosen is None:
            with self.showing_waiting([]):
                yield
            return
        running = self.running
        starts = chosen not in running
        self.running = [] if starts else [chosen]
        with self.showing_waiting([chosen] if starts else []):
            yield
        self.running.extend(request for request in running if request is not chosen)
