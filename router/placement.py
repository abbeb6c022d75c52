"""Choose the nodes for the next sample. This module is pure: the same view of the nodes gives the same choice, and ties
are broken by node id.

A sample goes to a pair of a decode and a prefill node with an open NIXL connection. This module must not know clients,
clocks or queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.slots import DecodeRoom, PrefillRoom

PREFILLS_IN_FLIGHT = 4
"""The most prompts that a router has at one prefill node at a time.

A prefill runs alone, so more prompts would only wait there while they hold decode slots. With fewer, the node would be
idle for a round trip.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The room that one sample needs, in tokens, and its choice of nodes."""

    num_prompt: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    """The ids of nodes where this sample has failed before. They are used only if there are no others."""
    kv_key: str = ""
    """The key of the KV. Samples with the same key may share KV that is computed once; with an empty key, a sample
    shares none."""

    @property
    def total(self) -> int:
        return self.num_prompt + self.max_tokens

    def again(self, *avoid: str, shares: bool = False) -> Need:
        """Return the need of another run, away from the nodes `avoid`. shares: the run may share KV as before;
        otherwise it gets its own KV, because the shared KV may have been wrong."""
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
    """Return the ids of the (decode, prefill) pair for a sample now, or None if it has to wait.

    The decode node is the one with the most free slots, then with the most free KV. The prefill node is chosen among
    those warm with it: first a node that is computing the same KV already, then the one with the fewest queued prompt
    tokens. This prompt's tokens are included, except on a node that may already have its KV.
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
    """Return the ids of the (decode, prefill) pair for a sample that no client waits for, or None if it has to wait.

    The prefill node must have nothing to do, and the decode node must keep `spare_slots` slots free. A node of
    `need.avoid` is used only if no pair without it could ever hold the sample, not because the other nodes are busy.
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
