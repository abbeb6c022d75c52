"""What is kept for routers that asked for a slot in vain.

A router hears at once when one of its own samples ends, and of other free slots with the next heartbeat only. So a
router that keeps all slots busy would take each of them again before another one knew of it. Whoever asked in vain is
owed slots until it holds as many as those who hold more; from those they are kept meanwhile. Pure: it is told the
time, in seconds on any clock. Must not know: leases, which slots there are, KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WISH_S = 3.0
"""How long what was asked for is kept, if its router does not ask again: it does with every heartbeat, one a second."""
TURN_S = 5.0
"""How long one must have waited to go before another that holds as many. What is kept stays empty until it hears of it,
so the slot that is left over where they do not divide evenly must not change hands all the time."""


@dataclass(slots=True)
class Wish:
    """Of a router whose last request was refused."""

    slots: int
    since: float
    """When it asked in vain for the first time since it was given something."""
    until: float


class Wishes:
    """Those of all routers."""

    def __init__(self) -> None:
        self._wishes: dict[str, Wish] = {}

    def refused(self, router_id: str, slots: int, now: float) -> None:
        """A router that has use for so many slots got none."""
        known = self._wishes.get(router_id)
        self._wishes[router_id] = Wish(slots, known.since if known else now, now + WISH_S)

    def granted(self, router_id: str, now: float) -> None:
        """A router got a slot. What else it wants is kept for no longer than before: if it has use for that, it takes
        what is free, and asks once more in vain."""
        wish = self._wishes.get(router_id)
        if wish is None:
            return
        wish.slots -= 1
        wish.since = now
        if not wish.slots:
            del self._wishes[router_id]

    def kept_from(self, router_id: str, held: Mapping[str, int], now: float) -> int:
        """How many free slots are not for this router. held: slots, by router."""
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}
        own, mine = held.get(router_id, 0), self._wishes.get(router_id)
        since = min(mine.since if mine else now, now - TURN_S)
        slots = 0
        for name, wish in self._wishes.items():
            theirs = held.get(name, 0)
            if theirs < own or (theirs == own and wish.since < since):
                slots += min(wish.slots, (own + 2 - theirs) // 2)  # As many as make both equal, at least one.
        return slots
