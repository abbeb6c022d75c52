"""Where the next sample goes. Pure: the same view of the nodes gives the same choice, ties by node id.

A sample goes to a pair of a decode and a prefill node whose NIXL connection stands. This module must not know clients,
clocks or queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.slots import DecodeRoom, PrefillRoom

PREFILLS_IN_FLIGHT = 4
"""Prompts a router has at one prefill node at a time.

A prefill runs alone, so more would only wait there while they hold decode slots; fewer would let the node idle for a
round trip.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one sample needs, in tokens."""

    num_prompt: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    """Node ids where this sample has failed before; taken only if there is no other."""
    kv_key: str = ""
    """Samples with the same one may get KV that is computed once. Empty: this one shares none."""

    @property
    def total(self) -> int:
        return self.num_prompt + self.max_tokens

    def again(self, *avoid: str, shares: bool = False) -> Need:
        """For another run, away from these nodes. shares: it may have KV with others, as before; else it gets its own,
        since that may be what was wrong with the first."""
        return replace(self, avoid=self.avoid.union(avoid), kv_key=self.kv_key if shares else "")


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    node_id: str
    room: DecodeRoom


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    node_id: str
    room: PrefillRoom


def choose_pair(
    need: Need,
    decodes: Iterable[DecodeCandidate],
    prefills: Iterable[PrefillCandidate],
    is_warm: Callable[[str, str], bool],
) -> tuple[str, str] | None:
    """The ids of the (decode, prefill) pair for a sample now, or None if it has to wait.

    Decode: most free slots, then most free KV. Prefill, among those with a warm pair: one that computes the same KV
    already, then fewest queued prompt tokens, this prompt's included where its KV may not be.
    """
    free = [node for node in prefills if node.room.has_room(need.kv_key)]
    free.sort(key=lambda node: (node.node_id in need.avoid, *_delay(need, node.room), node.node_id))
    for decode in _by_room(need, decodes):
        for prefill in free:
            if is_warm(decode.node_id, prefill.node_id):
                return decode.node_id, prefill.node_id
    return None


def choose_idle_pair(
    need: Need,
    decodes: Iterable[DecodeCandidate],
    prefills: Iterable[PrefillCandidate],
    is_warm: Callable[[str, str], bool],
    spare_slots: int,
) -> tuple[str, str] | None:
    """The (decode, prefill) pair for a sample that nobody waits for, or None if it has to wait.

    Only a prefill node with nothing to do and a decode node that keeps `spare_slots` free will do. A node of
    `need.avoid` is taken where no pair without it could ever hold the sample, and not because the others are busy.
    """
    able = [node for node in decodes if node.room.could_hold(need.total)]
    pairs = [pair for pair in itertools.product(able, prefills) if is_warm(pair[0].node_id, pair[1].node_id)]
    known = [sum(node.node_id in need.avoid for node in pair) for pair in pairs]
    idle = [
        (-decode.room.free_slots, -decode.room.free_blocks, decode.node_id, prefill.node_id)
        for (decode, prefill), number in zip(pairs, known, strict=True)
        if number == min(known) and prefill.room.is_idle and decode.room.has_idle_room(need.total, spare_slots)
    ]
    return min(idle)[2:] if idle else None


def _delay(need: Need, room: PrefillRoom) -> tuple[bool, int]:
    if room.computes(need.kv_key):
        return False, 0
    return True, room.queued_tokens + (0 if room.may_have(need.kv_key) else need.num_prompt)


def _by_room(need: Need, decodes: Iterable[DecodeCandidate]) -> list[DecodeCandidate]:
    fitting = [node for node in decodes if node.room.has_room(need.total)]
    fitting.sort(key=lambda n: (n.node_id in need.avoid, -n.room.free_slots, -n.room.free_blocks, n.node_id))
    return fitting
