"""What the targets of latency change in the placement of samples, as far as there are colocated nodes.

A node that has both roles does either with time that the other one lacks. Under a target for first tokens, some of
these nodes take prompts only while first tokens would come too late; the samples that they decode end first. Under a
target for each token, a node whose steps last too long gets prompts last. Each router decides for its own samples, by
what it measures of the nodes. This module must not know how a node is chosen: it sets what `router.placement` looks at.
"""

from __future__ import annotations

import asyncio
import logging

from corun.config.fields import RouterConfig
from router.nodes.node import DecodeNode, PrefillNode
from router.nodes.registry import Registry
from router.placement import choose_flexing, first_token_wait_s, lacks_decode
from router.queue import SampleQueue

DWELL_S = 5.0
"""The shortest time between two changes of what nodes take, in seconds.

A node that takes prompts only still decodes the samples that it has. So a change shows its whole effect only after some
seconds, and the next one before that would go too far.
"""

log = logging.getLogger(__name__)


class Targets:
    """The targets of one router. `review_soon` has to be called when the registry changes, before `pump_soon` of the
    queue."""

    def __init__(self, registry: Registry, queue: SampleQueue, config: RouterConfig) -> None:
        self.wait_s = 0.0
        """For how many seconds a prompt that comes now should wait for its computation; 0 without a target."""
        self.num_prompts_only = 0
        """The number of colocated nodes that take prompts only."""
        self._registry = registry
        self._queue = queue
        self._first_token_s = config.ttft_target_ms / 1000
        self._token_s = config.tpot_target_ms / 1000
        self._changed_at = float("-inf")
        self._reviewing: asyncio.Handle | None = None

    def review_soon(self) -> None:
        """Call `review` after the code that runs now, once for all changes in it, if there is any target."""
        if self._reviewing is None and (self._first_token_s or self._token_s):
            self._reviewing = asyncio.get_running_loop().call_soon(self.review)

    def review(self) -> None:
        """Look at what the nodes have reported, and change what they take if a target asks for it."""
        self._reviewing = None
        decodes, prefills = self._registry.in_use()
        engines = {node.info.engine_id: node for node in prefills if node.info.engine_id}
        colocated = [(node, engines[node.info.engine_id]) for node in decodes if node.info.engine_id in engines]
        if self._token_s:
            self._review_steps(colocated)
        if self._first_token_s:
            self._review_first_tokens(decodes, prefills, colocated)

    def _review_steps(self, colocated: list[tuple[DecodeNode, PrefillNode]]) -> None:
        for decode, prefill in colocated:
            is_busy = decode.load.used_slots > 0 and prefill.load.queued_prompt_tokens > 0
            decode.rate.report(decode.load.steps, decode.heard_at, is_busy=is_busy)
            prefill.room.is_slow = 0 < decode.rate.per_s * self._token_s < 1

    def _review_first_tokens(
        self, decodes: list[DecodeNode], prefills: list[PrefillNode], colocated: list[tuple[DecodeNode, PrefillNode]]
    ) -> None:
        for node in prefills:
            node.rate.report(node.load.tokens, node.heard_at, is_busy=node.load.queued_prompt_tokens > 0)
        rooms, per_s = {node.node_id: node.room for node in decodes}, sum(node.rate.per_s for node in prefills)
        backlogs = [node.room for node in prefills]
        self.wait_s = first_token_wait_s(self._queue.head, self._queue.waiting_tokens, rooms.values(), backlogs, per_s)
        if lacks_decode(rooms.values()):  # Another node has gone: this cannot wait.
            self._change(*(node for node in decodes if node.room.prompts_only))
        elif self._registry.clock.time() - self._changed_at >= DWELL_S:
            ids = [decode.node_id for decode, _ in colocated]
            name = choose_flexing(self.wait_s, self._first_token_s, rooms, ids)
            self._change(*(node for node in decodes if node.node_id == name))
        self.num_prompts_only = sum(room.prompts_only for room in rooms.values())

    def _change(self, *nodes: DecodeNode) -> None:
        """Let nodes take prompts only, or samples to decode again if they do."""
        for node in nodes:
            node.room.prompts_only = not node.room.prompts_only
            self._changed_at = self._registry.clock.time()
            what = "prompts only" if node.room.prompts_only else "samples to decode again"
            log.info("%s takes %s: first tokens would come after %.1f s", node.info.ref, what, self.wait_s)
