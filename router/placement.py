"""Which nodes the next sample gets, and a router's estimate of the free room on each.

A sample goes to a pair of a decode and a prefill node with an open NIXL connection. The two sides of a colocated node
have one engine, so a pair of them needs no handoff. The same view of the nodes gives the same choice, and ties are
broken by node id. The estimates come from the router's own claims and from the nodes' heartbeats. The node decides: an
estimate of free room that is too high costs one refused Reserve, and one that is too low costs a wait. So estimates
lean to the high side, and a refusal closes the node until something changes. This module is pure: it must not know
clients, clocks or queues.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corun.room import SampleBlocks, UsedBlocks, places
from corun.types import NodeLoad

PREFILLS_IN_FLIGHT = 4
"""The most prompts that a router has at one prefill node at a time, if the node computes one after the other.

More prompts would only wait there while they hold decode room. With fewer, the node would be idle for a round trip.
"""
STEPS_IN_FLIGHT = 5
"""The prompt tokens that a router has at a prefill node that computes several prompts in a step, in full steps; there
may be `PREFILLS_IN_FLIGHT` prompts even if they have more.

An engine chooses a step when the one before begins, and the router has not heard yet of the one that has just ended. A
prompt that is cut counts as a whole until its last part is computed, and beside rows it gets one chunk of a step. With
two steps of tokens, a colocated node would decode with hardly a prompt in between. With four and prompts of 4096
tokens, two steps of six lacked a quarter (seen on H200). More prompts would only wait there.
"""
LATELY = 64
"""The number of recent prompts remembered per prefill node, because later samples may get the same KV."""
BEGINNING = 256
"""The number of tokens from one beginning of a prompt to the next. A shorter one would save less than about 6 ms of
prefill, and each costs every prompt a digest."""
HANDOFF_PART = 4
"""A prompt that another engine must read counts for one part in so many more, because its first token is so much later.

Measured on H200 with Qwen3-8B: 512 tokens are computed in 13 ms, and read over NVLink in 4.4 ms. That is a third. It is
less of a longer prompt, because the copy itself takes 0.3 ms of it. So it is rounded to a quarter for all.
"""

BESIDE = 4096
"""What a colocated node counts for in prompt tokens, more than a node of one role: a prompt there holds up its rows,
and a row there waits for its prompts.

It is a full step of a prefill node. In the simulation of 4 GPUs with rates of H200, mixes of both kinds of nodes had
less time between tokens with it, first tokens no later, and up to a quarter more throughput: two prefill nodes and two
colocated ones with 50 prompts of 2048 tokens a second, 256 tokens out each, drew a token every 14 ms instead of 44.
With twice as much, first tokens came later; with half, tokens.
"""
BESIDE_PART = 4
"""A sample that may draw more tokens than its prompt has counts for little as a prompt, and much as a row. For it,
nodes that only decode go before colocated ones only while they decode more samples by at most this part of the slots of
these. Without a bound, they would decode alone in a mix until they are full.

In the simulation of 4 GPUs with rates of H200 and 256 slots, one decode node and three colocated ones with 200 samples
of 128 tokens in and 1024 out in flight draw 22,600 tokens a second with it, instead of 15,400. Long prompts have no
bound: with half of the slots as one for all samples, 55 prompts of 2048 tokens a second, 256 tokens out each, lost 16 %
of the requests that got a token every 15 ms.
"""
OWN_PART = 4
"""A colocated node decodes what it computes while the node with the most free slots has at most this part of the node's
slots more. Without a bound, samples of one prompt, and prompts that begin alike, would fill one node."""

ENDING = 32
"""A sample that has drawn a token and may draw at most so many more leaves its slot at about the time when a new one
needs it, because the new one's prompt has to be computed first. So its slot counts as free where nodes are compared
that both have a free slot, or both none. Otherwise a sample with a short prompt would wait for it while another slot is
free: on four decode nodes of 8 slots, in the simulation, 1 % of the first tokens would come after more than 0.1 s
instead of 0.03 s.

Samples that began together end together. If the node where that happens a moment earlier counted as the emptier one, it
would get all that follow, and the other would work with few of its slots. In the simulation of two colocated nodes, one
slower by 1 %, with 512 of 640 requests in flight, that costs 4 % of the throughput (512 tokens in, 256 out) or 8 % (128
and 1024). On two H200s, one of them decoded 119 of the last 128 samples. With 8 tokens a part of that is still lost,
with 32 nothing is, and more gain nothing.
"""


class SharedCount:
    """One counted resource of a node that several routers use."""

    def __init__(self) -> None:
        self.own = 0
        self.foreign = 0
        self.used = 0
        """Our own use and the others' together: each placement reads it of all nodes."""
        self._peak = 0

    def take(self, amount: int) -> int:
        """Add `amount` to our own use. Return by how much our use now exceeds its peak since the last report."""
        self.own += amount
        self.used += amount
        raised = max(0, self.own - self._peak)
        self._peak += raised
        return raised

    def give(self, amount: int) -> None:
        self.own -= amount
        self.used -= amount
        assert self.own >= 0

    def untake(self, amount: int, raised: int) -> None:
        """Undo a `take` of which the node never gave us `amount`. `raised` is the value that `take` returned."""
        self.give(amount)
        self._peak = max(self.own, self._peak - min(raised, amount))

    def report(self, total: int) -> None:
        """Take the node's own figure. It may be older than our last changes, so our peak use since the previous report
        counts as ours, and only the rest as other routers'."""
        self.foreign = max(0, total - self._peak)
        self.used = self.own + self.foreign
        self._peak = self.own


class DecodeRoom:
    """The places and KV blocks of one decode node: a place for each slot, and some in line (`corun.room.places`).

    Blocks that samples share count once, as on the node. Its engine may share none, and then the node refuses what was
    estimated too high here.
    """

    def __init__(self, *, slots: int, kv_blocks: int, block_size: int, engine_id: str = "") -> None:
        self.engine_id = engine_id
        """The id of the node's engine; empty if it is not known."""
        self.prompts_only = False
        """Whether this side of a colocated node gets no samples, so that the other side computes prompts sooner."""
        self._total_slots = slots
        self._total_places = places(slots)
        self._total_blocks = kv_blocks
        self._block_size = block_size
        self._leases = SharedCount()
        self._blocks = SharedCount()
        self._used = UsedBlocks()
        self._num_ending = 0
        self._refused = False
        self._has_asked = False  # Whether a sample was placed without room since the last report.

    @property
    def free_slots(self) -> int:
        """The number of slots that no lease will take. It is negative while samples are in line for slots."""
        return self._unless_closed(self._total_slots - self._leases.used)

    @property
    def soon_free(self) -> int:
        """The number of slots that no lease will take when the samples that end soon (`ENDING`) have left."""
        return self._unless_closed(self._total_slots - self._leases.used + self._num_ending)

    @property
    def foreign_leases(self) -> int:
        """The number of leases that other routers hold, as far as reports have told."""
        return self._leases.foreign

    @property
    def free_places(self) -> int:
        return 0 if self._is_closed else max(0, self._total_places - self._leases.used)

    @property
    def is_empty(self) -> bool:
        return not self._leases.used

    @property
    def free_blocks(self) -> int:
        return 0 if self._is_closed else max(0, self._total_blocks - self._blocks.used)

    @property
    def _is_closed(self) -> bool:
        return self._refused or self.prompts_only

    def _unless_closed(self, free: int) -> int:
        return min(0, free) if self._is_closed else free

    @property
    def most_tokens(self) -> int:
        """The prompt and output tokens of the largest sample that fits on the node when the node is empty."""
        return self._total_blocks * self._block_size if self._total_slots > 0 else 0

    def could_hold(self, num_tokens: int) -> bool:
        """Return whether a sample of `num_tokens` tokens fits on the node when the node is empty."""
        return num_tokens <= self.most_tokens

    def has_room(self, need: Need) -> bool:
        """Return whether there is room for a sample here now."""
        return self.free_places > 0 and self._used.needed(self._blocks_of(need)) <= self.free_blocks

    def may_ask(self, need: Need) -> bool:
        """Return whether the router may try to place a sample here now."""
        return self.has_room(need) or self.may_ask_without_room(need)

    def may_ask_without_room(self, need: Need) -> bool:
        """Return whether the router may try to place a sample here even if the node seems full.

        Where other routers hold room, it asks once after each report. The refusal tells the node that this router
        waits, and while it does, none of the others may hold more than its part.
        """
        asks = self._leases.foreign > 0 and not self._is_closed and not self._has_asked
        return asks and self.could_hold(need.total)

    def keeps_free(self, spare_slots: int) -> bool:
        """Return whether `spare_slots` slots are free; on a smaller node, all slots but one are enough. None is free
        while a sample is in line, and then this is false for 0, too."""
        return self.free_slots >= min(spare_slots, self._total_slots - 1)

    def has_idle_room(self, need: Need, spare_slots: int) -> bool:
        """Return whether a sample fits and `keeps_free` would still hold after it is placed."""
        return self.has_room(need) and self.free_slots > min(spare_slots, self._total_slots - 1)

    def is_nearly_as_free(self, most_free: int) -> bool:
        """Return whether a sample gets a slot here soon, and nearly as many slots are free then as `most_free`
        (`OWN_PART`)."""
        return 0 < self.soon_free >= most_free - self._total_slots // OWN_PART

    def is_ahead_of(self, other: DecodeRoom) -> bool:
        """Return whether more samples decode here than there, without those that end soon, by more than a part of the
        slots there (`BESIDE_PART`)."""
        more = self._total_slots - self.soon_free - (other._total_slots - other.soon_free)
        return more > other._total_slots // BESIDE_PART

    def take(self, need: Need) -> tuple[int, int]:
        """Claim a place and KV blocks for a sample. Return the value that `refuse` needs to undo this."""
        self._has_asked = self._has_asked or not self.has_room(need)
        return self._leases.take(1), self._blocks.take(self._used.add(self._blocks_of(need)))

    def note_ending(self) -> None:
        """Note that a sample here ends soon (`ENDING`)."""
        self._num_ending += 1

    def give(self, need: Need, *, was_ending: bool = False) -> None:
        """Return a sample's place and blocks, because they are free again. was_ending: `note_ending` was called."""
        self._num_ending -= was_ending
        self._leases.give(1)
        self._blocks.give(self._used.remove(self._blocks_of(need)))
        self._refused = False

    def refuse(self, need: Need, raised: tuple[int, int]) -> None:
        """Undo a sample's claim after the node refused it, and close the node until the next change."""
        self._leases.untake(1, raised[0])
        self._blocks.untake(self._used.remove(self._blocks_of(need)), raised[1])
        self._refused = True

    def report(self, load: NodeLoad) -> None:
        self._leases.report(load.leases)
        self._blocks.report(load.used_kv_blocks)
        self._refused = self._has_asked = False

    def _blocks_of(self, need: Need) -> SampleBlocks:
        return _blocks_of(need.num_prompt, need.max_tokens, self._block_size, need.kv_key)


_blocks_of = functools.lru_cache(maxsize=256)(SampleBlocks.of)
"""The blocks of a sample, computed once for all nodes that it might go to."""


class PrefillRoom:
    """The backlog of one prefill node. Samples that share the KV of one computation count once."""

    def __init__(self, *, max_in_flight: int, max_tokens: int = 0, engine_id: str = "") -> None:
        """Create the room: for `max_in_flight` prompts, and for more while they have at most `max_tokens` together."""
        self.max_tokens = max_tokens
        self.max_beginnings = 0
        """The most beginnings of prompts that the node may have in its prefix cache; 0 if it takes none from there."""
        self.engine_id = engine_id
        """The id of the node's engine; empty if it is not known."""
        self.is_slow = False
        """Whether the steps of a colocated node last too long while it has prompts, so that it gets them last."""
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._tokens = SharedCount()
        self._samples: dict[str, int] = {}  # The number of samples that wait for one computation, by KV key.
        self._lately: deque[str] = deque(maxlen=LATELY)  # The keys of KV that this node computed for us recently.
        self._beginnings: dict[bytes, None] = {}  # Those of prompts that it computed for us, the latest last.

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

    def cached_tokens(self, need: Need) -> int:
        """Return how many tokens of a prompt the node probably need not compute. Other routers' prompts are not known,
        and what it has dropped since is not either."""
        if self.may_have(need.kv_key):
            return need.num_prompt
        if not (self.max_beginnings and self._beginnings):
            return 0
        # A beginning is forgotten after the longer ones, so there is none behind the first one that is not known.
        return BEGINNING * sum(1 for _ in itertools.takewhile(self._beginnings.__contains__, need.beginnings))

    def has_room(self, num_tokens: int, kv_key: str = "") -> bool:
        """Return whether a prompt of `num_tokens` tokens may go to the node now."""
        fits = self._in_flight < self._max_in_flight or self._tokens.own + num_tokens <= self.max_tokens
        return fits or self.computes(kv_key)

    def take(self, num_tokens: int, kv_key: str = "") -> None:
        if kv_key:
            self._samples[kv_key] = self._samples.get(kv_key, 0) + 1
            if self._samples[kv_key] > 1:
                return
        self._in_flight += 1
        self._tokens.take(num_tokens)

    def give(
        self, num_tokens: int, kv_key: str = "", *, is_computed: bool = False, beginnings: Sequence[bytes] = ()
    ) -> None:
        if is_computed:
            self._remember(beginnings)
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

    def _remember(self, beginnings: Sequence[bytes]) -> None:
        for beginning in reversed(beginnings):  # The node, too, drops the ends of prompts first.
            self._beginnings.pop(beginning, None)
            self._beginnings[beginning] = None
        for _ in range(len(self._beginnings) - self.max_beginnings):
            del self._beginnings[next(iter(self._beginnings))]


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
    beginnings: tuple[bytes, ...] = ()
    """The prompt's beginnings, from the shortest to the longest (`beginnings_of`). Empty if it may take none of them
    from a prefix cache, and leave none there."""
    is_score: bool = False
    """Whether the tokens are only scored, on a prefill node alone. `max_tokens` is 0 then."""

    @property
    def total(self) -> int:
        return self.num_prompt + self.max_tokens

    @property
    def tokens_before_ending(self) -> int:
        """The number of output tokens after which the sample ends soon (`ENDING`)."""
        return max(1, self.max_tokens - ENDING)

    def again(self, *avoid: str, shares: bool = False) -> Need:
        """Return the need of another run, away from the nodes `avoid`. shares: the run may share KV as before;
        otherwise it gets its own KV, because the shared KV may have been wrong."""
        again = replace(self, avoid=self.avoid.union(avoid))
        return again if shares else replace(again, kv_key="", beginnings=())


def beginnings_of(prompt: Sequence[int], scope: str) -> tuple[bytes, ...]:
    """Return a digest for each beginning of a prompt, one for every `BEGINNING` tokens. Equal digests mean equal tokens
    and scopes, because prefix caches keep scopes apart. A prompt without a scope has none."""
    if not scope:
        return ()
    whole = len(prompt) // BEGINNING * BEGINNING
    tokens, size = struct.pack(f"<{whole}I", *prompt[:whole]), 4 * BEGINNING
    digest, found = hashlib.blake2b(scope.encode(), digest_size=8), []
    for start in range(0, len(tokens), size):
        digest.update(tokens[start : start + size])
        found.append(digest.digest())
    return tuple(found)


def choose_pair(
    need: Need,
    decodes: Mapping[str, DecodeRoom],
    prefills: Mapping[str, PrefillRoom],
    is_warm: Callable[[str, str], bool],
) -> tuple[str, str] | None:
    """Return the ids of the (decode, prefill) pair for a sample now, or None if it has to wait.

    Of the nodes that only decode, and of the colocated ones, one is in question: the one with room, if there is any
    (`DecodeRoom.may_ask` allows others), then with a free slot, then with the most slots that are free soon, then with
    the most free KV; with any prefill node that is warm with it. Other colocated nodes whose own side computes the
    prompt, so that no KV is read, are in question if they have nearly as many slots free (`OWN_PART`). The first of
    these pairs is of a kind with room and a free slot, if there is any; then it has steps of prompts that are not too
    slow; then it computes the same KV already; then it has the fewest prompt tokens until this prompt is where it is
    decoded (`_delay`, `HANDOFF_PART`), with what rows and prompts of one engine do to each other (`BESIDE`,
    `BESIDE_PART`).
    """
    avoid = _avoided(need, decodes, prefills)
    engines = {room.engine_id for room in prefills.values()} - {""}
    beside = {room.engine_id: room for room in decodes.values() if room.engine_id in engines and not room.prompts_only}
    ranks: dict[str, tuple[bool, bool, bool, int, int]] = {}
    """The nodes that may be asked, by whether they are avoided, whether they lack room, and how much they are used."""
    for node_id, room in decodes.items():
        if (has_room := room.has_room(need)) or room.may_ask_without_room(need):
            ranks[node_id] = (node_id in avoid, not has_room, *least_used(room))
    fitting = sorted(ranks, key=lambda node_id: (ranks[node_id], node_id))
    free = {node_id: room for node_id, room in prefills.items() if room.has_room(need.num_prompt, need.kv_key)}
    delays = {node_id: _delay(need, room) for node_id, room in free.items()}
    sides = {room.engine_id: node_id for node_id, room in free.items()}
    is_mix = any(room.engine_id not in beside for room in prefills.values())
    bests: list[DecodeRoom] = []
    waits: dict[tuple[str, str], bool] = {}
    """The pairs in question, and whether their kind of decode nodes has no room, or no free slot."""
    for is_colocated in (False, True):
        kind = [node_id for node_id in fitting if (decodes[node_id].engine_id in beside) is is_colocated]
        pairs: list[tuple[str, str]] = []
        for decode in kind:
            if pairs := [(decode, node_id) for node_id in free if is_warm(decode, node_id)]:
                break
        if not pairs:
            continue
        _, lacks_room, is_full, *_ = ranks[pairs[0][0]]
        best = decodes[pairs[0][0]]
        bests.append(best)
        if is_colocated:
            most = best.soon_free
            near = [node_id for node_id in kind if decodes[node_id].is_nearly_as_free(most) and not ranks[node_id][1]]
            own = [(node_id, sides[engine]) for node_id in near if (engine := decodes[node_id].engine_id) in sides]
            pairs += [pair for pair in own if is_warm(*pair)]
        waits |= dict.fromkeys(pairs, lacks_room or is_full)
    is_uneven = need.max_tokens > need.num_prompt and len(bests) > 1 and bests[0].is_ahead_of(bests[1])
    handoff = need.num_prompt // HANDOFF_PART

    def order(pair: tuple[str, str]) -> tuple[Any, ...]:
        decode, prefill = pair
        is_slow, computes, delay = delays[prefill]
        own, other = decodes[decode].engine_id, free[prefill].engine_id
        delay += 0 if is_one_engine(decodes[decode], free[prefill]) else handoff
        delay += BESIDE * (own in beside and not is_uneven)
        delay += BESIDE * (is_mix and other in beside and not beside[other].is_empty)
        is_avoided, _, *used = ranks[decode]
        return is_avoided, prefill in avoid, waits[pair], is_slow, computes, delay, *used, pair

    return min(waits, key=order, default=None)


def choose_prefill(need: Need, prefills: Mapping[str, PrefillRoom]) -> str | None:
    """Return the id of the prefill node for tokens to score now, or None if they have to wait: the one with the fewest
    tokens until these are computed, those whose steps are too slow last."""
    avoid = _avoided(need, prefills)
    free = [node_id for node_id, room in prefills.items() if room.has_room(need.num_prompt)]

    def key(node_id: str) -> tuple[bool, bool, int, str]:
        room = prefills[node_id]
        return node_id in avoid, room.is_slow, room.queued_tokens - room.cached_tokens(need), node_id

    return min(free, key=key, default=None)


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
    avoid = _avoided(need, decodes, prefills)
    able = [node_id for node_id, room in decodes.items() if room.could_hold(need.total)]
    pairs = [pair for pair in itertools.product(able, prefills) if is_warm(*pair)]
    fewest = min((len(avoid.intersection(pair)) for pair in pairs), default=0)
    idle = [
        (*least_used(decodes[decode]), decode, not is_one_engine(decodes[decode], prefills[prefill]), prefill)
        for decode, prefill in pairs
        if len(avoid.intersection((decode, prefill))) == fewest
        and prefills[prefill].is_idle
        and decodes[decode].has_idle_room(need, spare_slots)
    ]
    if not idle:
        return None
    *_, decode, _, prefill = min(idle)
    return decode, prefill


def _avoided(need: Need, *groups: Mapping[str, DecodeRoom | PrefillRoom]) -> frozenset[str]:
    """Return the nodes that a sample avoids, with the other sides of those that are colocated."""
    rooms = [(name, room) for group in groups for name, room in group.items() if room.engine_id] if need.avoid else []
    engines = {room.engine_id for name, room in rooms if name in need.avoid}
    return need.avoid.union(name for name, room in rooms if room.engine_id in engines)


def is_one_engine(decode: DecodeRoom, prefill: PrefillRoom) -> bool:
    return bool(decode.engine_id) and decode.engine_id == prefill.engine_id


def least_used(room: DecodeRoom) -> tuple[bool, int, int]:
    """Return the place of a node among others: first those with a free slot, then by the slots that are free soon, then
    by free KV. A short prompt is computed before a sample that ends soon has left."""
    return room.free_slots <= 0, -room.soon_free, -room.free_blocks


def _delay(need: Need, room: PrefillRoom) -> tuple[bool, bool, int]:
    """Return whether the node is too slow, whether it would have to compute the prompt, and the prompt tokens until it
    is computed: those before it in the queue, and its own that are in no cache."""
    if room.computes(need.kv_key):
        return room.is_slow, False, 0
    return room.is_slow, True, room.queued_tokens + need.num_prompt - room.cached_tokens(need)
