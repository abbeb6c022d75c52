"""What the targets of latency change in the placement of samples, as far as there are colocated nodes.

A node that has both roles does either with time that the other one lacks. Under a target for first tokens, some of
these nodes take prompts only while first tokens would come too late; the samples that they decode end first. Under a
target for each token, a node whose steps last too long gets prompts last. Each router decides for its own samples, by
what it measures of the nodes. This module must not know how a node is chosen: it sets what `router.placement` looks at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from corun.config.fields import RouterConfig
from router.nodes.node import DecodeNode, Node, PrefillNode
from router.nodes.registry import Registry
from router.placement import DecodeRoom, Need, PrefillRoom, least_used
from router.queue import SampleQueue

DWELL_S = 5.0
"""The shortest time between two changes of what nodes take, in seconds.

A node that takes prompts only still decodes the samples that it has. So a change shows its whole effect only after some
seconds, and the next one before that would go too far.
"""
RATE_S = 2.0
"""The least number of seconds over which a rate is measured: nodes count a prompt's tokens when it is done."""
RATE_MEMORY = 4
"""A new measurement moves the mean by one part in so many."""
RELAXED = 0.5
"""A node takes samples to decode again once first tokens come after this part of their target. It is well below 1,
because its prompts take longer then, and it should not have to change back at once."""

log = logging.getLogger(__name__)


class Rate:
    """How fast a node counts up while it is busy, as a running mean over its heartbeats."""

    def __init__(self) -> None:
        self.per_s = 0.0
        """The count per second; 0 until it has been measured."""
        self._since: tuple[float, int] | None = None
        """The time and the count at which the present measurement began; None while the node is not busy."""

    def report(self, count: int, now: float, *, is_busy: bool) -> None:
        """Take what a heartbeat said at the time `now`. Seeing a heartbeat again does nothing."""
        if not is_busy or (self._since and count < self._since[1]):
            self._since = None
        elif self._since is None:
            self._since = now, count
        elif (seconds := now - self._since[0]) >= RATE_S:
            found = (count - self._since[1]) / seconds
            self.per_s += (found - self.per_s) / (RATE_MEMORY if self.per_s else 1)
            self._since = now, count


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
        self._rates: WeakKeyDictionary[Node[Any], Rate] = WeakKeyDictionary()
        """The prompt tokens a second of prefill nodes; the steps a second of decode nodes while they hold prompts."""
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
            per_s = self._rate(decode, decode.load.steps, is_busy=is_busy)
            prefill.room.is_slow = 0 < per_s * self._token_s < 1

    def _review_first_tokens(
        self, decodes: list[DecodeNode], prefills: list[PrefillNode], colocated: list[tuple[DecodeNode, PrefillNode]]
    ) -> None:
        rooms = {node.node_id: node.room for node in decodes}
        per_s = sum(self._rate(node, node.load.tokens, is_busy=node.load.queued_prompt_tokens > 0) for node in prefills)
        backlogs = [node.room for node in prefills]
        head = self._queue.head.need if self._queue.head else None
        self.wait_s = first_token_wait_s(head, self._queue.tokens_to_compute, rooms.values(), backlogs, per_s)
        if lacks_decode(rooms.values()):  # Another node has gone: this cannot wait.
            self._change(*(node for node in decodes if node.room.prompts_only))
        elif self._registry.clock.time() - self._changed_at >= DWELL_S:
            ids = [decode.node_id for decode, _ in colocated]
            name = choose_flexing(self.wait_s, self._first_token_s, rooms, ids)
            self._change(*(node for node in decodes if node.node_id == name))
        self.num_prompts_only = sum(room.prompts_only for room in rooms.values())

    def _rate(self, node: Node[Any], count: int, *, is_busy: bool) -> float:
        """Measure a node again, and return its rate per second; 0 if it is not known yet."""
        rate = self._rates.setdefault(node, Rate())
        rate.report(count, node.heard_at, is_busy=is_busy)
        return rate.per_s

    def _change(self, *nodes: DecodeNode) -> None:
        """Let nodes take prompts only, or samples to decode again if they do."""
        for node in nodes:
            node.room.prompts_only = not node.room.prompts_only
            self._changed_at = self._registry.clock.time()
            what = "prompts only" if node.room.prompts_only else "samples to decode again"
            log.info("%s takes %s: first tokens would come after %.1f s", node.info.ref, what, self.wait_s)


def first_token_wait_s(
    head: Need | None,
    waiting_tokens: int,
    decodes: Iterable[DecodeRoom],
    prefills: Iterable[PrefillRoom],
    tokens_per_s: float,
) -> float:
    """Return for how many seconds a prompt that comes now waits until it is computed; 0 while no rate is known.

    head, waiting_tokens: the first sample in line, and the prompt tokens to compute for all that wait. They are before
        the new prompt only if the first one waits for a prefill node. If it waits for a decode node, more prefill is no
        help.
    """
    prefills = list(prefills)
    tokens = sum(room.queued_tokens for room in prefills)
    decodes_may = head is not None and (head.is_score or any(room.may_ask(head) for room in decodes))
    if head and decodes_may and not any(room.has_room(head.num_prompt, head.kv_key) for room in prefills):
        tokens += waiting_tokens
    return tokens / tokens_per_s if tokens_per_s else 0.0


def choose_flexing(
    wait_s: float, target_s: float, decodes: Mapping[str, DecodeRoom], colocated: Iterable[str]
) -> str | None:
    """Return the id of the colocated node that is to begin to take prompts only, or to end it; None if none is to.

    It is one node at a time. The one with the most free slots begins, because it has the least left to decode. The
    other nodes that decode must be able to hold samples as large as this one can.
    """
    closed = sorted(node_id for node_id, room in decodes.items() if room.prompts_only)
    if closed and wait_s < RELAXED * target_s:
        return closed[0]
    if wait_s <= target_s:
        return None
    serving = {node_id: room.most_tokens for node_id, room in decodes.items() if not room.prompts_only}
    able = [
        node_id
        for node_id in serving.keys() & set(colocated)
        if any(most >= serving[node_id] for other, most in serving.items() if other != node_id)
    ]
    return min(able, key=lambda node_id: (*least_used(decodes[node_id]), node_id), default=None)


def lacks_decode(decodes: Iterable[DecodeRoom]) -> bool:
    """Return whether samples that fit on a node that takes prompts only fit on none that decodes."""
    decodes = list(decodes)
    serving = max((room.most_tokens for room in decodes if not room.prompts_only), default=0)
    return any(room.most_tokens > serving for room in decodes if room.prompts_only)
