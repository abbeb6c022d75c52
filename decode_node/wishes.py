"""What is kept for routers that asked for a slot in vain.

A router hears at once when one of its own samples ends, and of other free slots with the next heartbeat only. So a
router that keeps all slots busy would take each of them again before another one knew of it. Whoever asked in vain is
owed slots until it holds as many as those who hold more; from those they are kept meanwhile. Pure: it is told the
time, in seconds on any clock. Must not know: leases, which slots there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WISH_S = 3.0
"""How long what was asked for is kept, if its router does not ask again: it does with every heartbeat, one a second."""


@dataclass(slots=True)
class Wish:
    """Of a router whose last request was refused."""

    slots: int
    kv_blocks: int
    """That the next of its samples needs."""
    since: float
    """When it asked in vain for the first time since it was given something."""
    until: float


class Wishes:
    """Those of all routers."""

    def __init__(self) -> None:
        self._wishes: dict[str, Wish] = {}

    def refused(self, router_id: str, slots: int, kv_blocks: int, now: float) -> None:
        """A router that has use for `slots` did not get one with so many KV blocks."""
        known = self._wishes.get(router_id)
        self._wishes[router_id] = Wish(slots, kv_blocks, known.since if known else now, now + WISH_S)

    def granted(self, router_id: str, now: float) -> None:
        """A router got a slot."""
        wish = self._wishes.get(router_id)
        if wish is None:
            return
        wish.slots -= 1
        wish.since, wish.until = now, now + WISH_S
        if not wish.slots:
            del self._wishes[router_id]

    def kept_from(self, router_id: str, held: Mapping[str, int], now: float) -> tuple[int, int]:
        """How many free slots and KV blocks are not for this router. held: slots, by router."""
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}
        own, mine = held.get(router_id, 0), self._wishes.get(router_id)
        since = mine.since if mine else now
        slots = kv_blocks = 0
        for name, wish in self._wishes.items():
            theirs = held.get(name, 0)
            if theirs < own or (theirs == own and wish.since < since):
                slots += min(wish.slots, (own + 2 - theirs) // 2)  # As many as make both equal, at least one.
                kv_blocks += wish.kv_blocks
        return slots, kv_blocks
