"""Which nodes the next sample gets, and a router's estimate of the free room on each.

A sample goes to a pair of a decode and a prefill node with an open NIXL connection. The same view of the nodes gives
the same choice, and ties are broken by node id. The estimates come from the router's own claims and from the nodes'
heartbeats. The node decides: an estimate of free room that is too high costs one refused Reserve, and one that is too
low costs a wait. So estimates lean to the high side, and a refusal closes the node until something changes. This module
is pure: it must not know clients, clocks or queues.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from corun.types import NodeLoad, places

PREFILLS_IN_FLIGHT = 4
"""The most prompts that a router has at one prefill node at a time, if the node computes one after the other.

More prompts would only wait there while they hold decode room. With fewer, the node would be idle for a round trip.
"""
PACKED_TOKENS_IN_FLIGHT = 8192
"""The most prompt tokens that a router has at a prefill node that computes several prompts in a step; there may be
`PREFILLS_IN_FLIGHT` prompts even if they have more.

They are two of its steps: the prompts of the next step are there before the one that runs is done. With fewer, steps
would be partly empty. More prompts would only wait there. Four prompts of a whole chunk have as many tokens, so short
prompts wait no longer at the node than long ones do.
"""
LATELY = 64
"""The number of recent prompts remembered per prefill node, because later samples may get the same KV."""


class SharedCount:
    """One counted resource of a node that several routers use."""

    def __init__(self) -> None:
        self.own = 0
        self.foreign = 0
        self._peak = 0

    @property
    def used(self) -> int:
        return self.own + self.foreign

    def take(self, amount: int) -> int:
        """Add `amount` to our own use. Return by how much our use now exceeds its peak since the last report."""
        self.own += amount
        raised = max(0, self.own - self._peak)
        self._peak += raised
        return raised

    def give(self, amount: int) -> None:
        self.own -= amount
        assert self.own >= 0

    def untake(self, amount: int, raised: int) -> None:
        """Undo a `take` whose amount the node never gave us. `raised` is the value that `take` returned."""
        self.give(amount)
        self._peak = max(self.own, self._peak - raised)

    def report(self, total: int) -> None:
        """Take the node's own figure. It may be older than our last changes, so our peak use since the previous report
        counts as ours, and only the rest as other routers'."""
        self.foreign = max(0, total - self._peak)
        self._peak = self.own


class DecodeRoom:
    """The places and KV blocks of one decode node: a place for each slot, and some in line (`corun.types.places`)."""

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int) -> None:
        self._total_slots = slots
        self._total_places = places(slots)
        self._total_blocks = kv_blocks
        self._block_size = block_size
        self._leases = SharedCount()
        self._blocks = SharedCount()
        self._refused = False

    @property
    def free_slots(self) -> int:
        """The number of slots that no lease will take. It is negative while samples are in line for slots."""
        free = self._total_slots - self._leases.used
        return min(0, free) if self._refused else free

    @property
    def free_places(self) -> int:
        return 0 if self._refused else max(0, self._total_places - self._leases.used)

    @property
    def free_blocks(self) -> int:
        return 0 if self._refused else max(0, self._total_blocks - self._blocks.used)

    def blocks(self, num_tokens: int) -> int:
        """Return how many KV blocks a sample of `num_tokens` prompt and output tokens needs."""
        return -(-num_tokens // self._block_size)

    @property
    def most_tokens(self) -> int:
        """The prompt and output tokens of the largest sample that fits on the node when the node is empty."""
        return self._total_blocks * self._block_size if self._total_slots > 0 else 0

    def could_hold(self, num_tokens: int) -> bool:
        """Return whether a sample of `num_tokens` tokens fits on the node when the node is empty."""
        return num_tokens <= self.most_tokens

    def has_room(self, num_tokens: int) -> bool:
        """Return whether there is room for a sample of `num_tokens` tokens here now."""
        return self.free_places > 0 and self.blocks(num_tokens) <= self.free_blocks

    def may_ask(self, num_tokens: int) -> bool:
        """Return whether the router may try to place a sample of `num_tokens` tokens here now.

        Where other routers hold room, it asks once after each report even if the node seems full. The refusal tells the
        node that this router waits, and while it does, none of the others may hold more than its part.
        """
        asks = self._leases.foreign > 0 and not self._refused and self.could_hold(num_tokens)
        return asks or self.has_room(num_tokens)

    def keeps_free(self, spare_slots: int) -> bool:
        """Return whether `spare_slots` slots are free; on a smaller node, all slots but one are enough. None is free
        while a sample is in line, and then this is false for 0, too."""
        return self.free_slots >= min(spare_slots, self._total_slots - 1)

    def has_idle_room(self, num_tokens: int, spare_slots: int) -> bool:
        """Return whether a sample of `num_tokens` tokens fits and `keeps_free` would still hold after it is placed."""
        return self.has_room(num_tokens) and self.free_slots > min(spare_slots, self._total_slots - 1)

    def take(self, num_tokens: int) -> tuple[int, int]:
        """Claim a place and KV blocks for a sample. Return the value that `refuse` needs to undo this."""
        return self._leases.take(1), self._blocks.take(self.blocks(num_tokens))

    def give(self, num_tokens: int) -> None:
        """Return a sample's place and blocks, because they are free again."""
        self._leases.give(1)
        self._blocks.give(self.blocks(num_tokens))
        self._refused = False

    def refuse(self, num_tokens: int, raised: tuple[int, int]) -> None:
        """Undo a sample's claim after the node refused it, and close the node until the next change."""
        self._leases.untake(1, raised[0])
        self._blocks.untake(self.blocks(num_tokens), raised[1])
        self._refused = True

    def report(self, load: NodeLoad) -> None:
        self._leases.report(load.leases)
        self._blocks.report(load.used_kv_blocks)
        self._refused = False


class PrefillRoom:
    """The backlog of one prefill node. Samples that share the KV of one computation count once."""

    def __init__(self, *, max_in_flight: int, max_tokens: int = 0) -> None:
        """Create the room: for `max_in_flight` prompts, and for more while they have at most `max_tokens` together."""
        self._max_in_flight = max_in_flight
        self._max_tokens = max_tokens
        self._in_flight = 0
        self._tokens = SharedCount()
        self._samples: dict[str, int] = {}  # The number of samples that wait for one computation, by KV key.
        self._lately: deque[str] = deque(maxlen=LATELY)  # The keys of KV that this node computed for us recently.

    @property
    def queued_tokens(self) -> int:
        return self._tokens.used

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not self.queued_tokens

    def computes(self, kv_key: str) -> bool:
        """Return whether the node is already computing the KV with this key."""
        return kv_key in self._samples

    def may_have(self, kv_key: str) -> bool:
        """Return whether the node computed the KV with this key recently and may still hold it."""
        return kv_key in self._lately

    def has_room(self, num_tokens: int, kv_key: str = "") -> bool:
        """Return whether a prompt of `num_tokens` tokens may go to the node now."""
        fits = self._in_flight < self._max_in_flight or self._tokens.own + num_tokens <= self._max_tokens
        return fits or self.computes(kv_key)

    def take(self, num_tokens: int, kv_key: str = "") -> None:
        if kv_key:
            self._samples[kv_key] = self._samples.get(kv_key, 0) + 1
            if self._samples[kv_key] > 1:
                return
        self._in_flight += 1
        self._tokens.take(num_tokens)

    def give(self, num_tokens: int, kv_key: str = "", *, is_computed: bool = False) -> None:
        if kv_key:
            if is_computed and kv_key not in self._lately:
                self._lately.append(kv_key)
            self._samples[kv_key] -= 1
            if self._samples[kv_key]:
                return
            del self._samples[kv_key]
        self._in_flight -= 1
        self._tokens.give(num_tokens)

    def report(self, load: NodeLoad) -> None:
        self._tokens.report(load.queued_prompt_tokens)


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


def choose_pair(
    need: Need,
    decodes: Mapping[str, DecodeRoom],
    prefills: Mapping[str, PrefillRoom],
    is_warm: Callable[[str, str], bool],
) -> tuple[str, str] | None:
    """Return the ids of the (decode, prefill) pair for a sample now, or None if it has to wait.

    The decode node is the one with the most free slots, then with the most free KV. The prefill node is chosen among
    those warm with it: first a node that is computing the same KV already, then the one with the fewest queued prompt
    tokens. This prompt's tokens are included, except on a node that may already have its KV.
    """
    fitting = [node_id for node_id, room in decodes.items() if room.may_ask(need.total)]
    fitting.sort(key=lambda node_id: (node_id in need.avoid, *_least_used(decodes[node_id]), node_id))
    free = [node_id for node_id, room in prefills.items() if room.has_room(need.num_prompt, need.kv_key)]
    free.sort(key=lambda node_id: (node_id in need.avoid, *_delay(need, prefills[node_id]), node_id))
    return next((pair for pair in itertools.product(fitting, free) if is_warm(*pair)), None)


def choose_idle_pair(
    need: Need,
    decodes: Mapping[str, DecodeRoom],
    prefills: Mapping[str, PrefillRoom],
    is_warm: Callable[[str, str], bool],
    spare_slots: int,
) -> tuple[str, str] | None:
    """Return the ids of the (decode, prefill) pair for a sample that no client waits for, or None if it has to wait.

    The prefill node must have nothing to do, and the decode node must keep `spare_slots` slots free. A node of
    `need.avoid` is used only if no pair without it could ever hold the sample, not because the other nodes are busy.
    """
    able = [node_id for node_id, room in decodes.items() if room.could_hold(need.total)]
    pairs = [pair for pair in itertools.product(able, prefills) if is_warm(*pair)]
    fewest = min((len(need.avoid.intersection(pair)) for pair in pairs), default=0)
    idle = [
        (*_least_used(decodes[decode]), decode, prefill)
        for decode, prefill in pairs
        if len(need.avoid.intersection((decode, prefill))) == fewest
        and prefills[prefill].is_idle
        and decodes[decode].has_idle_room(need.total, spare_slots)
    ]
    return min(idle)[2:] if idle else None


def _least_used(room: DecodeRoom) -> tuple[int, int]:
    return -room.free_slots, -room.free_blocks


def _delay(need: Need, room: PrefillRoom) -> tuple[bool, int]:
    if room.computes(need.kv_key):
        return False, 0
    return True, room.queued_tokens + (0 if room.may_have(need.kv_key) else need.num_prompt)
