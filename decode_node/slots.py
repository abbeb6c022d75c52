"""The slots and KV room of a decode node, and who holds them.

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
    """No slot or not enough KV blocks right now."""


class NoSlotError(NoRoomError):
    """No slot."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One slot and its KV blocks, held by one router for one sample."""

    lease_id: int
    slot: int
    router_id: str
    num_prompt_tokens: int
    max_tokens: int
    kv_blocks: int


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """KV blocks for `num_tokens` tokens of `block_size` tokens each."""
    return -(-num_tokens // block_size)


class SlotTable:
    """Leases over `slots` slots and `kv_blocks` KV blocks of `block_size` tokens."""

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int) -> None:
        self.slots = slots
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.used_kv_blocks = 0
        self._free = list(range(slots))  # a heap: the lowest slot is given first
        self._leases: dict[int, Lease] = {}
        self._ids = itertools.count(1)

    def reserve(self, router_id: str, num_prompt_tokens: int, max_tokens: int, kept: int = 0) -> Lease:
        """Leases the lowest free slot. kept: free slots that are not for this router.

        Raises:
            NoSlotError: every slot is held, or kept.
            NoRoomError: fewer KV blocks are free than the whole sequence may need.
        """
        need = blocks_needed(num_prompt_tokens + max_tokens, self.block_size)
        if not self._free:
            raise NoSlotError(f"all {self.slots} slots are held")
        if len(self._free) <= kept:
            raise NoSlotError(f"{len(self._free)} slots are free, for routers that hold fewer")
        if need > self.kv_blocks - self.used_kv_blocks:
            free = self.kv_blocks - self.used_kv_blocks
            raise NoRoomError(f"{need} KV blocks are needed and {free} of {self.kv_blocks} are free")
        lease = Lease(next(self._ids), heapq.heappop(self._free), router_id, num_prompt_tokens, max_tokens, need)
        self._leases[lease.lease_id] = lease
        self.used_kv_blocks += need
        return lease

    def release(self, lease_id: int) -> Lease | None:
        """Frees a lease; None if it is not held (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            heapq.heappush(self._free, lease.slot)
            self.used_kv_blocks -= lease.kv_blocks
        return lease

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    @property
    def held(self) -> Counter[str]:
        """Slots, by router."""
        return Counter(lease.router_id for lease in self._leases.values())

    def held_by(self, router_id: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.router_id == router_id]

    def slots_in_use(self) -> list[int]:
        """The leased slots, ascending."""
        return sorted(lease.slot for lease in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
