"""What is kept for routers that asked for room in vain.

A router hears at once when one of its own samples ends, and of other free room with the next heartbeat only. So one
that keeps a node full would take all of that again before another one knew of it. Whoever asked in vain is owed room
until it holds as much as those who hold more; from those it is kept meanwhile. Who holds more is told by dominant
shares: the larger one of a router's shares of the slots and of the KV blocks (Ghodsi et al., Dominant Resource
Fairness, NSDI 2011). Pure: it is told the time, in seconds on any clock. Must not know: leases, which slots there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decode_node.slots import NOTHING, Room

WISH_S = 3.0
"""How long what was asked for is kept, if its router does not ask again: it does with every heartbeat, one a second."""
TURN_S = 5.0
"""How long one must have waited to go before another that holds as much, or more by less than the sample that waits.
What is kept stays empty until its router hears of it, so what is left over where room does not divide evenly must not
change hands all the time."""


@dataclass(slots=True)
class Wish:
    """Of a router whose last request was refused."""

    samples: int
    room: Room
    """Of one sample: those that wait are taken to be like the one that was asked for."""
    since: float
    """When it asked in vain for the first time since it was given something."""
    until: float


class Wishes:
    """Those of all routers, for a node that has so much room in `total`."""

    def __init__(self, total: Room) -> None:
        self._total = total
        self._wishes: dict[str, Wish] = {}

    def refused(self, router_id: str, samples: int, room: Room, now: float) -> None:
        """A router that has use for so many samples' room got none. room: of the one that it asked for; if that is more
        than there is, nothing is kept for it."""
        if self._share(room) > self._share(self._total):
            return
        known = self._wishes.get(router_id)
        self._wishes[router_id] = Wish(samples, room, known.since if known else now, now + WISH_S)

    def granted(self, router_id: str, now: float) -> None:
        """A router got room for a sample. What else it wants is kept for no longer than before: if it has use for that,
        it takes what is free, and asks once more in vain."""
        wish = self._wishes.get(router_id)
        if wish is None:
            return
        wish.samples -= 1
        wish.since = now
        if not wish.samples:
            del self._wishes[router_id]

    def kept_from(self, router_id: str, held: Mapping[str, Room], now: float) -> Room:
        """How much of what is free is not for this router. held: by router."""
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}
        own, mine = self._share(held.get(router_id, NOTHING)), self._wishes.get(router_id)
        since = min(mine.since if mine else now, now - TURN_S)
        kept = NOTHING
        for name, wish in self._wishes.items():
            lead, each = own - self._share(held.get(name, NOTHING)), self._share(wish.room)
            if lead >= each or (lead >= 0 and wish.since < since):
                kept += wish.room * min(wish.samples, 1 + lead // (2 * each))  # That makes both equal; at least one.
        return kept

    def _share(self, room: Room) -> int:
        """The dominant share, in parts of slots times KV blocks, so that it is an integer."""
        return max(room.slots * self._total.kv_blocks, room.kv_blocks * self._total.slots)
