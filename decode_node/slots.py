"""The leases of a decode node, the slots that their samples take, the parts of routers, and the rows of steps.

Owns: admission. A lease is granted only when the KV blocks for prompt + max_tokens are free, so that no running request
is ever preempted (paper, Section IV-B; `can_fit_full_sequence` in Alg. 1), and a place: there is one for each slot, and
a line of a quarter as many (`corun.room.places`). A sample takes a slot when its KV has arrived and one is free, so no
slot stands idle while a prompt is computed and read. Slots are counted, they have no numbers.

Leases with one share key are of samples of one prompt, which share the blocks of the prompt that nothing writes to
(`corun.room`). These blocks count once while any of the leases lives. The engine keeps to it: it never holds a
second copy of them for a sample that may run (decode_node/scheduler.py), so what is granted here always gets room.

A router learns at once when one of its own samples ends, but of other free room only with the next heartbeat. So a
router that keeps a node full would take all freed room again. Therefore, while another router waits, none may hold more
than its part (`_check_part`). A router waits from a refused reservation until it gets one, or until `WAIT_S` after the
last refusal.

The contract is the step with a row for every slot. A smaller step may run in its place once the node's self-test has
compared the two, bit by bit, on its own model and device (decode_node/certify.py). If they differ, steps keep all
their rows. Must not know: gRPC, engines, clocks; callers pass the time, in seconds on any clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from corun.node.kv.handle import READER
from corun.room import SampleBlocks, UsedBlocks, places

SMALLER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768)
"""The numbers of rows that are tried, as far as they are below the number of slots. They are closer together above 128:
with so many rows matrix products no longer wait for the weights, so each idle row takes time."""


def smaller_than(slots: int) -> tuple[int, ...]:
    """Return the numbers of rows below `slots` to try, ascending."""
    return tuple(rows for rows in SMALLER if rows < slots)


def rows_of_step(live: int, sizes: Sequence[int]) -> int:
    """Return the least of the allowed numbers of rows (ascending) for `live` requests; a longer step stays as is."""
    return next((rows for rows in sizes if rows >= live), live)


class NoRoomError(Exception):
    """There is no free place, or there are not enough free KV blocks, right now."""


WAIT_S = 5.0
"""How long a refused router counts as waiting. It asks again after each heartbeat while samples of it wait."""


@dataclass(slots=True)
class Waiting:
    """A router that was refused room."""

    since: float
    last: float
    """The time of its last refusal."""
    kv_blocks: int
    """The KV blocks that it asked for last."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A place and the KV blocks of one sample, held by one session of one router."""

    lease_id: int
    router_id: str
    session: int
    num_prompt_tokens: int
    max_tokens: int
    blocks: SampleBlocks

    @property
    def request_id(self) -> str:
        """The id of the engine's request for the sample. It begins with a mark that no prefill's id may hold, since the
        engine of a colocated node has prefills, too."""
        return f"{READER}lease-{self.lease_id}"


class SlotTable:
    """The leases over the places of `slots` slots and over `kv_blocks` KV blocks of `block_size` tokens each."""

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int, shares: bool = True) -> None:
        """Create the table of an empty node. shares: whether its engine lets samples of a prompt share blocks."""
        self.slots = slots
        self.places = places(slots)
        self.kv_blocks = kv_blocks
        self.block_size = block_size
        self.used_kv_blocks = 0
        self._leases: dict[int, Lease] = {}
        self._in_slots: set[int] = set()  # The ids of the leases whose samples decode.
        self._ids = itertools.count(1)
        self._waiting: dict[str, Waiting] = {}
        self._shares = shares
        self._used = UsedBlocks()

    def reserve(
        self,
        router_id: str,
        num_prompt_tokens: int,
        max_tokens: int,
        *,
        share_key: str = "",
        session: int = 0,
        now: float = 0.0,
    ) -> Lease:
        """Lease a place and KV blocks.

        Raises NoRoomError if every place is held, fewer KV blocks are free than the sample needs, or this router
        already holds its part while another one comes first (`_check_part`).
        """
        self._waiting = {name: wait for name, wait in self._waiting.items() if now - wait.last < WAIT_S}
        share_key = share_key if self._shares else ""
        blocks = SampleBlocks.of(num_prompt_tokens, max_tokens, self.block_size, share_key)
        need = self._used.needed(blocks)
        free = self.kv_blocks - self.used_kv_blocks
        try:
            if len(self._leases) >= self.places:
                raise NoRoomError(f"all {self.slots} slots and {self.places - self.slots} places in line are held")
            if need > free:
                raise NoRoomError(f"{need} KV blocks are needed and {free} of {self.kv_blocks} are free")
            self._check_part(router_id, need, now)
        except NoRoomError:
            if need <= self.kv_blocks:  # Else it would wait for ever, and all others with it.
                since = self._waiting[router_id].since if router_id in self._waiting else now
                self._waiting[router_id] = Waiting(since, now, need)
            raise
        self._waiting.pop(router_id, None)
        lease = Lease(next(self._ids), router_id, session, num_prompt_tokens, max_tokens, blocks)
        self._leases[lease.lease_id] = lease
        self.used_kv_blocks += self._used.add(blocks)
        return lease

    def _check_part(self, router_id: str, need: int, now: float) -> None:
        """Raise NoRoomError if this router would hold more than its part while another one comes first.

        The parts of all routers that hold or wait for room are equal. Those that hold less than their part come first,
        then those that have waited longer. If one that comes first waits for a larger sample than its part has room
        for, the others leave it that room, or it would wait for ever.
        """
        if not self._waiting.keys() - {router_id}:
            return
        held: dict[str, list[int]] = {name: [] for name in (*self._waiting, router_id)}
        counted = UsedBlocks()  # A group's shared blocks count for the router of its oldest lease.
        for lease in self._leases.values():
            held.setdefault(lease.router_id, []).append(counted.add(lease.blocks))
        part, kv_blocks = self.places // len(held), self.kv_blocks // len(held)

        def order(name: str) -> tuple[bool, float, str]:
            has_part = len(held[name]) >= part or sum(held[name]) >= kv_blocks
            return has_part, self._waiting[name].since if name in self._waiting else now, name

        first = [wait for name, wait in self._waiting.items() if order(name) < order(router_id)]
        kv_blocks = min([kv_blocks, *(self.kv_blocks - wait.kv_blocks for wait in first)])
        if first and (len(held[router_id]) + 1 > part or sum(held[router_id]) + need > kv_blocks):
            each = f"{part} places and {kv_blocks} KV blocks are the part of each of {len(held)} routers"
            raise NoRoomError(f"{each}, and another router comes first")

    @property
    def used_slots(self) -> int:
        """The number of samples that decode, each in a slot."""
        return len(self._in_slots)

    def enter(self, lease_id: int) -> None:
        """Note that the sample of a lease has a slot, which its first row shows."""
        self._in_slots.add(lease_id)

    def release(self, lease_id: int) -> Lease | None:
        """Free a lease and return it; None if it is not held (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._in_slots.discard(lease_id)
            self.used_kv_blocks -= self._used.remove(lease.blocks)
        return lease

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def held_by(self, router_id: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.router_id == router_id]

    def __len__(self) -> int:
        return len(self._leases)
