"""Which colocated nodes take prompts only, and which get prompts last, under the targets of latency of one router.

A node that has both roles does either with time that the other one lacks. Under a target for first tokens, some of
these nodes take prompts only while first tokens would come too late; the samples that they decode end first. Under a
target for each token, a node whose steps last too long gets prompts last. This module is pure, so that a simulated
cluster flexes as a real one does: it must not know clocks, queues or the registry, nor how a node is chosen. It sets
what `router.placement` looks at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from corun.types import NodeLoad
from router.placement import DecodeRoom, Need, PrefillRoom, least_used

DWELL_S = 5.0
"""The shortest time between two changes of what nodes take, in seconds, unless samples wait for nodes that decode.

A node that takes prompts only still decodes the samples that it has. So a change shows its whole effect only after some
seconds, and the next one before that would go too far. But a node that decodes again has slots at once.
"""
RATE_S = 2.0
"""The least number of seconds over which a rate is measured: nodes count a prompt's tokens when it is done."""
RATE_MEMORY = 4
"""A new measurement moves the mean by one part in so many."""
RELAXED = 0.5
"""A node takes samples to decode again once first tokens come after this part of their target. It is well below 1,
because its prompts take longer then, and it should not have to change back at once."""


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


class Reporting(Protocol):
    """A node, as far as it reports what it does."""

    @property
    def node_id(self) -> str: ...

    @property
    def load(self) -> NodeLoad:
        """What its last report said."""

    @property
    def heard_at(self) -> float:
        """The time of that report, in seconds."""


class Prefills(Reporting, Protocol):
    """A node that computes prompts."""

    @property
    def room(self) -> PrefillRoom: ...


class Decodes(Reporting, Protocol):
    """A node that decodes samples."""

    @property
    def room(self) -> DecodeRoom: ...


D = TypeVar("D", bound=Decodes)


class Flexing:
    """What the targets of one router make of its colocated nodes, by what it measures of all nodes."""

    def __init__(self, *, ttft_target_ms: int, tpot_target_ms: int) -> None:
        """Create it without any measurement. A target of 0 is none."""
        self.wait_s = 0.0
        """For how many seconds a prompt that comes now should wait for its computation; 0 without a target."""
        self.num_prompts_only = 0
        """The number of colocated nodes that take prompts only."""
        self._first_token_s = ttft_target_ms / 1000
        self._token_s = tpot_target_ms / 1000
        self._rates: WeakKeyDictionary[Any, Rate] = WeakKeyDictionary()
        """The prompt tokens a second of prefill nodes; the steps a second of decode nodes while they hold prompts."""
        self._changed_at = float("-inf")

    @property
    def has_target(self) -> bool:
        return bool(self._first_token_s or self._token_s)

    def review(
        self, decodes: Sequence[D], prefills: Sequence[Prefills], head: Need | None, waiting_tokens: int, now: float
    ) -> list[D]:
        """Look at what the nodes have reported, and change what they take if a target asks for it. Return the nodes
        that take prompts only from now on, or samples to decode again.

        head, waiting_tokens: as for `first_token_wait_s`.
        now: the time in seconds, on the clock of the nodes' reports.
        """
        engines = {node.room.engine_id: node for node in prefills if node.room.engine_id}
        colocated = [(node, engines[node.room.engine_id]) for node in decodes if node.room.engine_id in engines]
        if self._token_s:
            self._review_steps(colocated)
        if not self._first_token_s:
            return []
        rooms = {node.node_id: node.room for node in decodes}
        rates = [self._rate(node, node.load.tokens, is_busy=node.load.queued_prompt_tokens > 0) for node in prefills]
        known = [rate for rate in rates if rate]
        per_s = sum(known) / len(known) * len(rates) if known else 0.0  # A node without a rate counts as their mean.
        backlogs = [node.room for node in prefills]
        self.wait_s = first_token_wait_s(head, waiting_tokens, rooms.values(), backlogs, per_s)
        changing: list[D] = []
        if lacks_decode(rooms.values()):  # Another node has gone: this cannot wait.
            changing = [node for node in decodes if node.room.prompts_only]
        elif waits_for_decode(head, rooms.values()):  # So more prefill is no help, and more decode is one at once.
            changing = [node for node in decodes if node.room.prompts_only][:1]
        elif now - self._changed_at >= DWELL_S:
            name = choose_flexing(self.wait_s, self._first_token_s, rooms, [node.node_id for node, _ in colocated])
            changing = [node for node in decodes if node.node_id == name]
        for node in changing:
            node.room.prompts_only = not node.room.prompts_only
            self._changed_at = now
        self.num_prompts_only = sum(room.prompts_only for room in rooms.values())
        return changing

    def _review_steps(self, colocated: Sequence[tuple[Decodes, Prefills]]) -> None:
        for decode, prefill in colocated:
            is_busy = decode.load.used_slots > 0 and prefill.load.queued_prompt_tokens > 0
            per_s = self._rate(decode, decode.load.steps, is_busy=is_busy)
            # A node without rows holds none up, and is not measured again while it has none.
            prefill.room.is_slow = decode.load.used_slots > 0 and 0 < per_s * self._token_s < 1

    def _rate(self, node: Reporting, count: int, *, is_busy: bool) -> float:
        """Measure a node again, and return its rate per second; 0 if it is not known yet."""
        rate = self._rates.setdefault(node, Rate())
        rate.report(count, node.heard_at, is_busy=is_busy)
        return rate.per_s


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
    is_behind = head is not None and not waits_for_decode(head, decodes)
    if head and is_behind and not any(room.has_room(head.num_prompt, head.kv_key) for room in prefills):
        tokens += waiting_tokens
    return tokens / tokens_per_s if tokens_per_s else 0.0


def waits_for_decode(head: Need | None, decodes: Iterable[DecodeRoom]) -> bool:
    """Return whether the first sample in line, if there is any, waits for room to decode it."""
    return head is not None and not head.is_score and not any(room.may_ask(head) for room in decodes)


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
