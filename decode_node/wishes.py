"""What is kept for routers that wait for room.

A router hears at once when one of its own samples ends, and of other free room with the next heartbeat only. So one
that keeps a node full would take all of that again before another one knew of it. Routers therefore say, in answer to
heartbeats, what they would use here. Free room is kept for one that waits from each that holds more by at least the
sample that waits, and after `TURN_S` also from one that holds as much, or more by less, where they could give enough.
Who holds more is told by dominant shares: the larger one of a router's shares of the slots and of the KV blocks (Ghodsi
et al., Dominant Resource Fairness, NSDI 2011). Pure: it is told the time, in seconds on any clock. Must not know:
leases, which slots there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decode_node.slots import NOTHING, Room

TURN_S = 5.0
"""The least wait for what others may as well have. What is kept stays empty until its router hears of it, so what is
left over where room does not divide evenly must not change hands all the time."""


@dataclass(slots=True)
class Wish:
    """Of a router that waits."""

    samples: int
    room: Room
    """Of the first of them; the others are taken to be like it."""
    share: int
    """That it had when it said so: what ends of it meanwhile it takes again by itself."""
    since: float
    """It has waited with this share."""
    granted_at: float
    """When it was last given room, be it for what it had before; else when it began to wait."""
    until: float


class Wishes:
    """Those of all routers, for a node that has so much room in `total`."""

    def __init__(self, total: Room) -> None:
        self._total = total
        self._wishes: dict[str, Wish] = {}

    def note(
        self, router_id: str, samples: int, room: Room, held: Mapping[str, Room], now: float, until: float
    ) -> None:
        """A router would use room for so many samples, if there was some; that holds `until` then, unless it says so
        again. room: of one sample; held: by router."""
        self._forget_old(now)
        known = self._wishes.pop(router_id, None)
        if not samples or self._share(room) > self._share(self._total):  # More than there is can never be kept.
            return
        share = self._share_of(router_id, held)
        since = known.since if known is not None and known.share == share else now
        granted_at = now if known is None else known.granted_at
        self._wishes[router_id] = Wish(samples, room, share, since, granted_at, until)

    def granted(self, router_id: str, room: Room, now: float) -> None:
        """A router was given room."""
        if (wish := self._wishes.get(router_id)) is None:
            return
        wish.granted_at = now
        if room.kv_blocks >= wish.room.kv_blocks:
            wish.samples -= 1
        if not wish.samples:
            del self._wishes[router_id]

    def kept_from(self, router_id: str, held: Mapping[str, Room], now: float) -> Room:
        """How much of what is free is not for this router."""
        self._forget_old(now)
        own, mine = self._share_of(router_id, held), self._wishes.get(router_id)
        kept = NOTHING
        for name, wish in self._wishes.items():
            if wish is mine:
                continue
            each = self._share(wish.room)
            lead = own - max(wish.share, self._share_of(name, held))
            is_next = lead > 0 or (lead == 0 and (mine is None or wish.granted_at < mine.granted_at))
            has_turn = is_next and wish.since < now - TURN_S and self._can_get(name, wish.room, held)
            if lead >= each or has_turn:
                kept += wish.room * min(wish.samples, 1 + lead // (2 * each))  # That makes both equal; at least one.
        return kept

    def _forget_old(self, now: float) -> None:
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}

    def _can_get(self, router_id: str, need: Room, held: Mapping[str, Room]) -> bool:
        """Whether others that come down to what it holds leave it so much more."""
        theirs = self._share_of(router_id, held)
        left = self._total - sum(held.values(), NOTHING)
        for room in held.values():
            if (share := self._share(room)) > theirs:
                kept = Room(room.slots * theirs // share, room.kv_blocks * theirs // share)
                left += room - kept
        return left.slots >= need.slots and left.kv_blocks >= need.kv_blocks

    def _share_of(self, router_id: str, held: Mapping[str, Room]) -> int:
        return self._share(held.get(router_id, NOTHING))

    def _share(self, room: Room) -> int:
        """The dominant share, in parts of slots times KV blocks, so that it is an integer."""
        return max(room.slots * self._total.kv_blocks, room.kv_blocks * self._total.slots)
