"""The prefix cache on vLLM's own scheduler and block pool, with KV that remembers how it was computed.

The KV of a position is a text of all that went into it: the KV before it, as the blocks hold it when the step runs, its
token, and the step's first and last position. So KV of another prompt, of other chunks, or of a block that was given
away is told from a prompt's own, as bits are on a CPU. Every prompt is compared with what it computes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.config.fields import DecodeConfig, PrefillConfig
from corun.node.kv.handle import owner
from corun.node.kv.judging import Claim, compare
from corun.node.kv.stamps import StampTable, chained, stamps
from corun.types import NixlEndpoint, NodeRole
from tests.loading import environment, load
from tests.prefill_node.test_scheduler import OURS
from tests.traces import (
    ANY_PLATFORM,
    BLOCK_SIZE,
    CPU,
    ENDLESS,
    Abort,
    Arrive,
    Platform,
    Run,
    Trace,
    examples,
    prefill_traces,
)
from tests.traces import violations as common_violations

CACHED, ANYWHERE = ("cached",), ("cached", "chunks")
Kv = list[Any]


def text(before: Any, token: int, start: int, end: int, freedoms: Collection[str]) -> int:
    """Return the KV of a position of a step; with `chunks` it does not depend on the step."""
    return hash((before, token) if "chunks" in freedoms else (before, token, start, end))


def alone(tokens: list[int], chunk: int, freedoms: Collection[str]) -> Kv:
    """Return the KV of a prompt that is computed alone."""
    found: Kv = []
    for start in range(0, len(tokens), chunk):
        for token in tokens[start : start + chunk]:
            end = min(start + chunk, len(tokens))
            found.append(text(found[-1] if found else None, token, start, end, freedoms))
    return found


def refusal(claim: Claim, rows: Any) -> str:
    """Return why a read with these stamps is refused; empty if it is not. No digests are compared."""
    (verdict,) = compare([(claim, rows)], lambda blocks: rows[:0, 1])
    return verdict.refusal


@dataclass
class Ended:
    """A prompt whose KV waits for its reader."""

    number: int
    blocks: list[int]
    owners: list[tuple[str, int]]
    kv: Kv
    claim: Claim

    @property
    def num_cached(self) -> int:
        return sum(count for name, count in self.owners if name != str(self.number))


@dataclass
class Node:
    """A prefill node's engine whose worker keeps KV and stamps, and what it has found out about every prompt."""

    engine: Any
    chunk: int
    tokens_of: Any
    ref: Any
    kv: dict[int, Kv] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = self.engine.scheduler.kv_cache_manager
        self.table = StampTable(len(self.manager.block_pool.blocks))
        self._run, self.engine.worker.execute = self.engine.worker.execute, self._execute
        self._took, self.engine._take = self.engine._take, self._take

    def play(self, *ops: Any) -> None:
        self.engine._trace = replace(self.engine._trace, ops=ops)
        self.engine.play()

    def _execute(self, output: Any, requests: Any) -> Any:
        for owned in output.kv_connector_metadata.owned:
            self.table.own(owned.blocks, owned.stamps)
        for block in output.new_block_ids_to_zero or ():
            self.kv[block] = [None] * BLOCK_SIZE
        for name, count in output.num_scheduled_tokens.items():
            request = requests[name]
            (blocks,) = self.manager.get_block_ids(name)
            end, freedoms = request.num_computed_tokens, request.kv_transfer_params["corun_freedoms"]
            for at in range(end - count, min(end, request.num_prompt_tokens)):
                before = self._at(blocks, at - 1) if at else None
                found = text(before, request.all_token_ids[at], end - count, end, freedoms)
                self.kv.setdefault(blocks[at // BLOCK_SIZE], [None] * BLOCK_SIZE)[at % BLOCK_SIZE] = found
        return self._run(output, requests)

    def _at(self, blocks: list[int], at: int) -> Any:
        return self.kv[blocks[at // BLOCK_SIZE]][at % BLOCK_SIZE]

    def _take(self, output: Any) -> None:
        self._took(output)
        params = output.kv_transfer_params
        if params is None:
            return
        number = int(output.request_id)
        tokens = self.tokens_of(self.engine.record.requests[number])
        (blocks,) = params["remote_block_ids"]
        owners = [(name, count) for name, count in params["corun_owners"]]
        names = [(owner(name, self.ref), count) for name, count in owners]
        kv = [self._at(blocks, at) for at in range(len(tokens))]
        ids = tuple(blocks)
        claim = Claim(
            stamps=stamps(names, tokens, BLOCK_SIZE), first=0, engine_id="", request_id="", theirs=ids, ours=ids
        )
        ended = self.ended[number] = Ended(number, blocks, owners, kv, claim)
        self.wrong += [f"prompt {number}: {what}" for what in self._violations(ended, tokens)]

    def _violations(self, ended: Ended, tokens: list[int]) -> Iterator[str]:
        arrival = self.engine.record.requests[ended.number]
        if ended.kv != alone(tokens, self.chunk, arrival.freedoms):
            yield "its KV is not what it computes alone"
        if None in ended.kv or len({*ended.kv}) != len(tokens):
            yield "a position was not computed"
        if self.refusal(ended):
            yield self.refusal(ended)
        if ended.num_cached * BLOCK_SIZE >= len(tokens) or ended.owners[-1][0] != str(ended.number):
            yield "its last token was not computed"
        if ended.num_cached and "cached" not in arrival.freedoms:
            yield "it took from the cache"
        for name, _ in ended.owners[:-1]:
            earlier = self.engine.record.requests[int(name)]
            if (earlier.scope, earlier.freedoms) != (arrival.scope, arrival.freedoms):
                yield "it took another client's KV, or KV of other freedoms"

    def refusal(self, ended: Ended) -> str:
        """Return what a reader of this KV finds wrong now."""
        return refusal(ended.claim, self.table.rows[list(ended.blocks)])


def make(stepping: ModuleType, platform: Platform = CPU, *, chunk: int = 32, blocks: int = 40, slots: int = 4) -> Node:
    trace = Trace(slots=slots, chunk=chunk, blocks=blocks, ops=())
    return Node(stepping.engine(OURS, trace, platform, role=NodeRole.PREFILL), chunk, stepping.tokens_of, stepping.REF)


@pytest.fixture
def node(stepping: ModuleType, platform: Platform) -> Node:
    return make(stepping, platform)


def asks(
    prompt: int, *, common: int = ENDLESS, freedoms: tuple[str, ...] = CACHED, scope: str = "a", **more: Any
) -> Arrive:
    return Arrive(prompt=prompt, common=common, freedoms=freedoms, scope=scope, **more)


SETTLE = Run(40)
"""Enough steps for all prompts so far to be computed and read."""


def test_every_prompt_has_the_kv_that_it_computes_alone(stepping: ModuleType) -> None:
    """Random traces in few blocks, so that cached ones are evicted all the time; with aborts, and KV that is held."""
    taken = set()

    @examples(220)
    @given(
        prefill_traces(
            chunks=(24, 32, 40),
            common=st.sampled_from([ENDLESS, ENDLESS, ENDLESS, 16, 48]),
            scope=st.sampled_from("aaaaab"),
            freedoms=[*[CACHED] * 5, ANYWHERE, ()],
        ),
        ANY_PLATFORM,
    )
    def check(trace: Trace, platform: Platform) -> None:
        node = make(stepping, platform, chunk=trace.chunk, blocks=trace.blocks, slots=trace.slots)
        node.play(*trace.ops)
        assert node.wrong == []
        assert list(common_violations(node.engine.record)) == []
        taken.update(ended.num_cached for ended in node.ended.values())

    check()
    assert taken >= {0, 1, 2, 3, 4, 5}, "hardly anything was taken from the cache: this proves little"


BROKEN = {
    "hits at any block": ("_unit", lambda self, request: BLOCK_SIZE, "its KV is not what it computes alone"),
    "hits for everybody": ("_unit", lambda self, request: self._whole_chunks, "it took from the cache"),
}


@pytest.mark.parametrize(("method", "broken", "finding"), BROKEN.values(), ids=BROKEN)
def test_a_broken_cache_is_noticed(
    stepping: ModuleType, platform: Platform, method: str, broken: Any, finding: str
) -> None:
    """Negative control, without the scheduler's own check, which would refuse the step."""
    cache, scheduler = load("prefill_node.prefix_cache").PrefixCache, load("prefill_node.scheduler").PrefillScheduler
    with mock.patch.object(cache, method, broken), mock.patch.object(scheduler, "check_prompts"):
        node = make(stepping, platform)
        node.play(*(op for freedoms in (CACHED, ()) for n in (50, 66) for op in (asks(n, freedoms=freedoms), SETTLE)))
    assert any(finding in one for one in node.wrong), node.wrong


def test_a_hit_within_a_chunk_is_refused_before_its_step_runs(stepping: ModuleType) -> None:
    cache = load("prefill_node.prefix_cache").PrefixCache
    with mock.patch.object(cache, "_unit", return_value=BLOCK_SIZE):
        node = make(stepping)
        with pytest.raises(RuntimeError, match="prompt 1 got tokens 48 to 66: no chunk of the contract"):
            node.play(asks(50), SETTLE, asks(66), SETTLE)


def test_a_cache_of_another_prefix_is_noticed(node: Node) -> None:
    """Negative control: the hash of a block does not look at its tokens."""
    node.engine._hasher = lambda request: [bytes([i]) * 32 for i in range(request.num_tokens // BLOCK_SIZE)]
    node.play(asks(64), SETTLE, asks(64, common=1), SETTLE)
    assert "prompt 1: its KV is not what it computes alone" in node.wrong
    assert "prompt 1: block 0 of 4 is not this prompt's (2 are not)" in node.wrong, "a reader would refuse it, too"


@pytest.mark.parametrize("length", [31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97])
@pytest.mark.parametrize(
    ("freedoms", "unit"), [(CACHED, 32), (ANYWHERE, 16), ((), 10**6)], ids=["chunks", "blocks", "none"]
)
@pytest.mark.parametrize("before", [95, 96, 97])
def test_hits_at_every_edge(node: Node, length: int, freedoms: tuple[str, ...], unit: int, before: int) -> None:
    """After a prompt that begins with the same tokens. The last token is always computed."""
    node.play(asks(before, freedoms=freedoms), SETTLE, asks(length, freedoms=freedoms), SETTLE)
    assert node.wrong == []
    whole = min(before // BLOCK_SIZE * BLOCK_SIZE, length - 1)
    assert node.ended[1].num_cached * BLOCK_SIZE == whole // unit * unit


@pytest.mark.parametrize("chunk", [8, 16, 24, 40, 64])
def test_whole_chunks_that_are_no_whole_blocks(stepping: ModuleType, platform: Platform, chunk: int) -> None:
    node = make(stepping, platform, chunk=chunk)
    node.play(asks(241), SETTLE, asks(242), SETTLE)
    assert node.wrong == []
    unit = {8: 16, 16: 16, 24: 48, 40: 80, 64: 64}[chunk]
    assert node.ended[1].num_cached * BLOCK_SIZE == 240 // unit * unit


def test_a_hit_above_the_last_token_is_cut(stepping: ModuleType) -> None:
    """vLLM's own lookup stops there; a later one may not. Control: without the cut nothing would be left to compute."""
    for cut in (True, False):
        node = make(stepping)
        cache = node.engine.scheduler.prefix_cache
        coordinator, found = node.manager.coordinator, []

        def whole(request: Any) -> Any:
            hit = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)  # noqa: B023
            found.append(hit[1])  # noqa: B023
            return node.manager.create_kv_cache_blocks(hit[0]), hit[1], 0  # noqa: B023

        cache._find = whole
        if not cut:
            node.manager.get_computed_blocks = whole
        node.play(asks(64), SETTLE)
        if cut:
            node.play(asks(64), SETTLE)
            assert (node.wrong, node.ended[1].num_cached, found) == ([], 2, [0, 64])
        else:
            with pytest.raises((AssertionError, ValueError)):
                node.play(asks(64), SETTLE)


@pytest.mark.parametrize("capped", [True, False])
def test_what_a_longer_output_would_leave_is_not_found_either(
    stepping: ModuleType, platform: Platform, capped: bool
) -> None:
    """Control: vLLM alone makes whole blocks of outputs findable."""
    trace = Trace(slots=4, chunk=16, blocks=40, ops=(asks(15, max_tokens=20), Run(30)))
    engine = stepping.engine(OURS, trace, platform, role=NodeRole.PREFILL)
    manager = engine.scheduler.kv_cache_manager
    if not capped:
        manager.coordinator.cache_blocks = engine.scheduler.prefix_cache._keep
    engine.play()
    assert len(manager.block_pool.cached_block_hash_to_block) == (0 if capped else 2)


@pytest.mark.parametrize(("scope", "salted"), [("a", True), ("b", True), ("b", False), ("", True)])
def test_clients_have_caches_of_their_own(
    stepping: ModuleType, node: Node, scope: str, salted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the salt a client learns from the time what another one has asked."""
    if not salted:
        monkeypatch.setattr(stepping, "salt", lambda scope, freedoms: "one salt")
    node.play(asks(100, scope="a"), SETTLE, asks(100, scope=scope), SETTLE)
    assert (node.ended[1].num_cached > 0) == (scope == "a" or not salted)


def test_a_prompt_that_may_not_read_leaves_nothing(node: Node) -> None:
    node.play(asks(100, freedoms=()), SETTLE)
    assert len(node.manager.block_pool.cached_block_hash_to_block) == 0
    node.play(asks(100), SETTLE, asks(100, freedoms=()), SETTLE)
    assert [node.ended[number].num_cached for number in (1, 2)] == [0, 0]
    assert node.wrong == []


def test_held_kv_is_never_evicted_and_released_kv_is_found_until_it_is(
    stepping: ModuleType, platform: Platform
) -> None:
    """Ten blocks: while the first prompt's KV waits for its reader, the others share the rest."""
    node = make(stepping, platform, blocks=10)
    node.play(asks(64, transfer_steps=30), Run(4), *(asks(64, scope=str(i)) for i in range(4)), Run(20))
    first = node.ended[0]
    assert not node.refusal(first)
    assert [node._at(first.blocks, at) for at in range(64)] == first.kv
    node.play(SETTLE, asks(65), SETTLE)
    assert node.ended[5].num_cached == 4
    node.play(*(asks(100, scope=str(i)) for i in range(4)), SETTLE, asks(65), SETTLE)
    assert node.ended[10].num_cached == 0
    assert node.refusal(first)
    assert node.wrong == []


@pytest.mark.parametrize("by_content", [False, True])
def test_a_block_that_comes_back_to_the_same_tokens_is_another(
    stepping: ModuleType, platform: Platform, by_content: bool
) -> None:
    """ABA: the blocks of a prompt go to another one, and then to one of the first one's tokens. Whoever reads with the
    first handle reads KV while it is written. Control: stamps of tokens alone let this pass."""
    node = make(stepping, platform, blocks=6)
    node.play(asks(64), SETTLE)
    first = node.ended[0]
    node.play(asks(80, common=1), SETTLE, asks(64, scope="b"), SETTLE)
    assert {*first.blocks} & {*node.ended[2].blocks}, "the blocks have come back"
    again = replace(first, blocks=node.ended[2].blocks)  # All of them, and in the same order.
    assert node.wrong == []
    assert again.kv == node.ended[2].kv
    if by_content:
        content = chained(stepping.tokens_of(asks(64)), BLOCK_SIZE).tobytes()
        node.table.own(again.blocks, content)
        again = replace(again, claim=replace(again.claim, stamps=content))
    assert bool(node.refusal(again)) == (not by_content)


def test_a_node_that_was_killed_has_other_stamps_in_its_next_life(stepping: ModuleType) -> None:
    """It died with half of a block written, and came back with a request of the same id and tokens. Control: without
    the generation in an owner's name, the handle of the first life would pass."""
    tokens = stepping.tokens_of(asks(64))
    lives = [stepping.REF, replace(stepping.REF, generation="b" * 16)]
    found = [stamps([(owner("r", life), 4)], tokens, BLOCK_SIZE) for life in lives]
    table = StampTable(8)
    table.own([1, 2, 3, 4], found[1])
    claim = Claim(stamps=found[0], first=0, engine_id="", request_id="", theirs=(1, 2, 3, 4), ours=(1, 2, 3, 4))
    assert "(4 are not)" in refusal(claim, table.rows[1:5])
    same = stamps([(owner("r", replace(lives[1], generation=lives[0].generation)), 4)], tokens, BLOCK_SIZE)
    table.own([1, 2, 3, 4], same)
    assert not refusal(claim, table.rows[1:5])


def test_an_aborted_prompt_leaves_what_it_computed(stepping: ModuleType, platform: Platform) -> None:
    """Its chunks are in flight or done, and a later prompt that takes them reads its stamps."""
    for steps in range(1, 7):
        node = make(stepping, platform)
        node.play(asks(100), Run(steps), Abort(0), asks(100), SETTLE)
        assert node.wrong == []
        assert node.ended[1].num_cached == min(2 * steps, 6)


def test_turns_of_a_conversation_take_all_whole_chunks_of_those_before(
    stepping: ModuleType, platform: Platform
) -> None:
    """Whole blocks of a turn's last chunk, which is shorter than that of the next turn, stay its own. Control: left in
    the cache, they are found between the whole chunks of a later turn."""
    for leaves_all in (False, True):
        node = make(stepping, platform, blocks=200)
        if leaves_all:
            node.manager.coordinator.cache_blocks = node.engine.scheduler.prefix_cache._keep
        node.play(*(op for length in range(40, 400, 40) for op in (asks(length), SETTLE)))
        assert ("its KV is not what it computes alone" in " ".join(node.wrong)) == leaves_all
        assert [one.num_cached for one in node.ended.values()] == [0, 2, 4, 6, 10, 12, 14, 16, 20]
        assert len(node.ended[8].owners) <= 9, "the handle stays small"


@pytest.mark.parametrize("is_on", [True, False])
def test_nodes_that_are_told_so_have_a_cache(stepping: ModuleType, is_on: bool) -> None:
    endpoint = NixlEndpoint(engine_id="e", host="127.0.0.1", port=1, tp_size=1)
    with environment():
        prefill, decode = (
            stepping.nodes.shared_arguments(cls(model="m", prefix_caching=is_on), [role], endpoint)
            for cls, role in ((PrefillConfig, NodeRole.PREFILL), (DecodeConfig, NodeRole.DECODE))
        )
    assert (prefill["enable_prefix_caching"], decode["enable_prefix_caching"]) == (is_on, is_on)
    assert prefill["prefix_caching_hash_algo"] == decode["prefix_caching_hash_algo"] == "sha256"
