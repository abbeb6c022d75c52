"""The slots and KV room of a decode node, and the leases that hold them.

Owns: admission. A lease is granted only when a slot *and* the KV blocks for prompt + max_tokens are free, so that no
running request is ever preempted (paper, Section IV-B; `can_fit_full_sequence` in Alg. 1).
Must not know: gRPC, engines, clocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass


class NoRoomError(Exception):
    """There is no free slot, or there are not enough free KV blocks, right now."""


@dataclass(frozen=True, slots=True)
class Room:
    """An amount of slots and KV blocks."""

    slots: int = 0
    kv_blocks: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(self.slots + other.slots, self.kv_blocks + other.kv_blocks)

    def __sub__(self, other: Room) -> Room:
        return Room(self.slots - other.slots, self.kv_blocks - other.kv_blocks)

    def __mul__(self, samples: int) -> Room:
        return Room(self.slots * samples, self.kv_blocks * samples)


NOTHING = Room()


@dataclass(frozen=True, slots=True)
class Lease:
    """One slot and its KV blocks, held by one session of one router for one sample."""

    lease_id: int
    slot: int
    router_id: str
    session: int
    num_prompt_tokens: int
    max_tokens: int
    kv_blocks: int


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Return the number of KV blocks, of `block_size` tokens each, that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class SlotTable:
    """The leases over `slots` slots and `kv_blocks` KV blocks of `block_size` tokens each."""

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int) -> None:
        self.slots = slots
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.used_kv_blocks = 0
        self._free = list(range(slots))  # a heap: the lowest slot is given first
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)

    @property
    def total(self) -> Room:
        return Room(self.slots, self.kv_blocks)

    def needs(self, num_tokens: int) -> Room:
        """Return the room for one sample; `num_tokens` is the largest number of its prompt and output tokens."""
        return Room(1, blocks_needed(num_tokens, self.block_size))

    def reserve(
        self, router_id: str, num_prompt_tokens: int, max_tokens: int, kept: Room = NOTHING, *, session: int = 0
    ) -> Lease:
        """Lease the lowest free slot. kept: the free room that this router must not use.

        Raises NoRoomError if every slot is held or kept, or fewer KV blocks are left than the sample needs.
        """
        need, free = self.needs(num_prompt_tokens + max_tokens).kv_blocks, self.kv_blocks - self.used_kv_blocks
        if not self._free:
            raise NoRoomError(f"all {self.slots} slots are held")
        if need > free:
            raise NoRoomError(f"{need} KV blocks are needed and {free} of {self.kv_blocks} are free")
        if len(self._free) <= kept.slots or need > free - kept.kv_blocks:
            kept_here = f"{kept.slots} slots and {kept.kv_blocks} KV blocks are kept for routers that hold less"
            raise NoRoomError(f"{kept_here}, of {len(self._free)} and {free} that are free")
        slot = heapq.heappop(self._free)
        lease = Lease(next(self._ids), slot, router_id, session, num_prompt_tokens, max_tokens, need)
        self._leases[lease.lease_id] = lease
        self.used_kv_blocks += need
        return lease

    def release(self, lease_id: int) -> Lease | None:
        """Free a lease and return it; None if it is not held (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            heapq.heappush(self._free, lease.slot)
            self.used_kv_blocks -= lease.kv_blocks
        return lease

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    @property
    def held(self) -> dict[str, Room]:
        """The room that each router holds, by router id."""
        slots: Counter[str] = Counter()
        kv_blocks: Counter[str] = Counter()
        for lease in self._leases.values():
            slots[lease.router_id] += 1
            kv_blocks[lease.router_id] += lease.kv_blocks
        return {router_id: Room(number, kv_blocks[router_id]) for router_id, number in slots.items()}

    def held_by(self, router_id: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.router_id == router_id]

    def slots_in_use(self) -> list[int]:
        """Return the leased slots, ascending."""
        return sorted(lease.slot for lease in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
