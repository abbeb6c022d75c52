"""What one router's targets of latency change in the placement of its samples, as far as there are colocated nodes.

Each router decides for its own samples, by what it measures of the nodes. This module owns when the nodes are looked at
again, and what is told of a change. It must not know how one is decided (`router.flexing`) or how a node is chosen.
"""

from __future__ import annotations

import asyncio
import logging

from corun.config.fields import RouterConfig
from router.flexing import Flexing
from router.nodes.registry import Registry
from router.queue import SampleQueue

log = logging.getLogger(__name__)


class Targets:
    """The targets of one router. `review_soon` has to be called when the registry changes."""

    def __init__(self, registry: Registry, queue: SampleQueue, config: RouterConfig) -> None:
        self.flexing = Flexing(ttft_target_ms=config.ttft_target_ms, tpot_target_ms=config.tpot_target_ms)
        self._registry = registry
        self._queue = queue
        self._reviewing: asyncio.Handle | None = None

    def review_soon(self) -> None:
        """Call `review` after the code that runs now, once for all changes in it, if there is any target."""
        if self._reviewing is None and self.flexing.has_target:
            self._reviewing = asyncio.get_running_loop().call_soon(self.review)

    def review(self) -> None:
        """Look at what the nodes have reported, and change what they take if a target asks for it."""
        self._reviewing = None
        self._queue.settle()  # What is first there afterwards waits for something, which tells what is lacking.
        head = self._queue.head.need if self._queue.head else None
        now = self._registry.clock.time()
        for node in self.flexing.review(*self._registry.in_use(), head, self._queue.tokens_to_compute, now):
            self._queue.pump_soon()
            what = "prompts only" if node.room.prompts_only else "samples to decode again"
            log.info("%s takes %s: first tokens would come after %.1f s", node.info.ref, what, self.flexing.wait_s)
