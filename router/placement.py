"""Where the next sample goes. Pure: the same view of the nodes gives the same choice, ties by node id.

A sample goes to a pair of a decode and a prefill node whose NIXL connection stands. This module must not know clients,
clocks or queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.slots import DecodeRoom, PrefillRoom

PREFILLS_IN_FLIGHT = 4
"""Prompts a router has at one prefill node at a time.

A prefill runs alone, so more would only wait there while they hold decode slots, whose leases end after a time; fewer
would let the node idle for a round trip.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What one sample needs, in tokens."""

    num_prompt: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    """Node ids where this sample has failed before; taken only if there is no other."""

    @property
    def total(self) -> int:
        return self.num_prompt + self.max_tokens

    def avoiding(self, node_id: str) -> Need:
        return replace(self, avoid=self.avoid | {node_id})


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

    Decode: most free slots, then most free KV. Prefill, among those with a warm pair: fewest queued prompt tokens.
    """
    free = [node for node in prefills if node.room.has_room()]
    free.sort(key=lambda node: (node.node_id in need.avoid, node.room.queued_tokens, node.node_id))
    for decode in _by_room(need, decodes):
        for prefill in free:
            if is_warm(decode.node_id, prefill.node_id):
                return decode.node_id, prefill.node_id
    return None


def _by_room(need: Need, decodes: Iterable[DecodeCandidate]) -> list[DecodeCandidate]:
    fitting = [node for node in decodes if node.room.has_room(need.total)]
    fitting.sort(key=lambda n: (n.node_id in need.avoid, -n.room.free_slots, -n.room.free_blocks, n.node_id))
    return fitting
