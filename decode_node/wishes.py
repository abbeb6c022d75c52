"""How much free room is kept for routers that wait for room.

A router learns at once when one of its own samples ends, but learns of other free room only with the next heartbeat.
So a router that keeps a node full would take all freed room again before another router knew of it. Therefore routers
say, in answer to heartbeats, how much room they would use here.

Free room is kept for a waiting router from each router that holds more by at least the waiting sample. After `TURN_S`
it is also kept from a router that holds as much, or more by less than that, if the routers that hold more could give
up enough. Routers are compared by dominant shares: the larger of a router's shares of the slots and of the KV blocks
(Ghodsi et al., Dominant Resource Fairness, NSDI 2011). This module is pure: callers pass the time, in seconds on any
clock. Must not know: leases, which slots there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from decode_node.slots import NOTHING, Room

TURN_S = 5.0
"""How long a router waits, at least, before room is kept for it from routers with an equal or slightly larger share.
Kept room stays empty until its router learns of it, so room that cannot be divided evenly must change hands rarely."""


@dataclass(slots=True)
class Wish:
    """The wish of a router that waits for room."""

    samples: int
    room: Room
    """The room that the first waiting sample needs; the other samples are assumed to need the same."""
    share: int
    """The share that the router held when it stated the wish. Room of its own samples that end after that still counts,
    because the router takes such room again by itself."""
    since: float
    """The time from which the router has waited with this share."""
    granted_at: float
    """The time when the router last got room, even if only to replace a sample that ended, or else began to wait."""
    until: float


class Wishes:
    """The wishes of all routers, for a node whose whole room is `total`."""

    def __init__(self, total: Room) -> None:
        self._total = total
        self._wishes: dict[str, Wish] = {}

    def note(
        self, router_id: str, samples: int, room: Room, held: Mapping[str, Room], now: float, until: float
    ) -> None:
        """Record that a router would use room for `samples` samples. The wish holds until `until`, unless the router
        states a new one. room: the room of one sample; held: the room that each router holds."""
        self._forget_old(now)
        known = self._wishes.pop(router_id, None)
        if not samples or self._share(room) > self._share(self._total):  # More than the whole room can never be kept.
            return
        share = self._share_of(router_id, held)
        since = known.since if known is not None and known.share == share else now
        granted_at = now if known is None else known.granted_at
        self._wishes[router_id] = Wish(samples, room, share, since, granted_at, until)

    def granted(self, router_id: str, room: Room, now: float) -> None:
        """Record that a router got room."""
        if (wish := self._wishes.get(router_id)) is None:
            return
        wish.granted_at = now
        if room.kv_blocks >= wish.room.kv_blocks:
            wish.samples -= 1
        if not wish.samples:
            del self._wishes[router_id]

    def kept_from(self, router_id: str, held: Mapping[str, Room], now: float) -> Room:
        """Return how much of the free room is kept from this router."""
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
                kept += wish.room * min(wish.samples, 1 + lead // (2 * each))  # Makes both equal; at least one.
        return kept

    def _forget_old(self, now: float) -> None:
        self._wishes = {name: wish for name, wish in self._wishes.items() if wish.until > now}

    def _can_get(self, router_id: str, need: Room, held: Mapping[str, Room]) -> bool:
        """Return whether `need` would be free if all routers with a larger share came down to this router's share."""
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
        """Return the dominant share as an integer: 1 stands for one part of (total slots times total KV blocks)."""
        return max(room.slots * self._total.kv_blocks, room.kv_blocks * self._total.slots)
