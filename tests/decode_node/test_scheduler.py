"""Fixed slots on vLLM's own scheduler: random traces, and the same traces on the stock one, which breaks the rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given

from corun.types import NodeRole
from decode_node.slots import SlotTable
from tests.loading import load
from tests.traces import (
    ANY_PLATFORM,
    BLOCK_SIZE,
    Abort,
    Arrive,
    Engines,
    Platform,
    Record,
    Run,
    Step,
    Trace,
    decode_traces,
    examples,
    group_traces,
    in_order,
)
from tests.traces import violations as common_violations

FIXED = "decode_node.scheduler.FixedSlotScheduler"
STOCK = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


def violations(record: Record, slots: int) -> Iterator[str]:
    yield from common_violations(record)
    for step in record.steps:
        if step.running > slots:
            yield "more requests than slots"
        if any(row.tokens != 1 for row in step.rows.values()):
            yield "not one token each"
        if any(row.start < record.requests[n].prompt - 1 for n, row in step.rows.items()):
            yield "a prompt token is computed"
        # A copy is refused in the step that it is made in, and then what the row draws is lost ("wrong output").
        if any(record.requests[n].fails and not record.requests[n].own for n in step.rows):
            yield "runs without its KV"
    drew = {number for number, tokens in record.outputs.items() if tokens}
    if not drew <= set(record.read) or len(set(record.read)) < len(record.read):
        yield "a read is not told once"
    if any(record.requests[n].fails for n in record.read):
        yield "a failed read is told as done"
    if not in_order([number for step in record.steps for number in step.loads]):
        yield "not first come, first served"


def on(stepping: ModuleType, platform: Platform) -> Engines:
    return Engines(stepping, platform, NodeRole.DECODE, FIXED)


@pytest.fixture
def engines(stepping: ModuleType, platform: Platform) -> Engines:
    return on(stepping, platform)


def checked(engines: Engines, trace: Trace, **settings: Any) -> Record:
    """Play a trace, in which no rule may be broken."""
    record = engines.play(trace, **settings)
    assert list(violations(record, trace.slots)) == []
    return record


def test_every_step_is_one_token_for_each_slot(stepping: ModuleType) -> None:
    @examples(150)
    @given(decode_traces(), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        checked(on(stepping, platform), trace)

    check()


def test_the_stock_scheduler_breaks_the_rules(stepping: ModuleType) -> None:
    """The same traces: a check that cannot fail proves nothing."""
    found: set[str] = set()

    @examples(100)
    @given(decode_traces(), ANY_PLATFORM)
    def watch(trace: Trace, platform: Platform) -> None:
        record = on(stepping, platform).play(trace, STOCK)
        found.update(violations(record, trace.slots))

    watch()
    assert found >= {"more KV promised than exists", "KV of others behind a sequence"}


class Turn:
    """Gives turns on the GPU by a pattern, which is repeated, in place of a lock file."""

    def __init__(self, pattern: tuple[bool, ...]) -> None:
        self.pattern = pattern
        self._asked = 0
        self.steps = 0

    def wait(self) -> bool:
        self._asked += 1
        return self.pattern[self._asked % len(self.pattern)]

    def note_step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("pattern", [(True, False, True), (True, True, False, False)])
def test_turns_break_no_rule(stepping: ModuleType, pattern: tuple[bool, ...]) -> None:
    @examples(60)
    @given(decode_traces(), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        engine = on(stepping, platform).engine(trace)
        engine.scheduler.turn = turn = Turn(pattern)
        record = engine.play()
        assert list(violations(record, trace.slots)) == []
        assert turn.steps == sum(bool(step.rows) for step in record.steps)

    check()


def test_outputs_leave_and_kv_is_read_while_prefill_has_the_gpu(engines: Engines) -> None:
    """So a sample waits for one turn, not for one to be heard, one until its KV is read and one for its slot."""
    engine = engines.engine(Trace(2, 1, 9, ()))
    engine.scheduler.turn = turn = Turn((True,))
    engine._arrive(Arrive(prompt=16, max_tokens=12))
    while not turn.steps:
        engine.step()
    turn.pattern = (False,)
    engine._arrive(Arrive(prompt=16, max_tokens=2, transfer_steps=2))
    begun = len(engine.record.steps)
    for _ in range(6):
        engine.step()
    assert not any(step.rows for step in engine.record.steps[begun:])
    assert len(engine.record.outputs[0]) == turn.steps, "what was drawn has left"
    assert engine.record.read == [0, 1]
    turn.pattern = (True,)
    waited = len(engine.record.steps)
    engine.play()
    assert set(engine.record.steps[waited].rows) == {0, 1}, "the next turn is the new sample's, too"
    assert list(violations(engine.record, 2)) == []


def test_kv_is_read_while_all_slots_run_and_slots_are_taken_in_order(engines: Engines) -> None:
    """The slot goes to the first that came of two whose KV has arrived, though its KV arrived last."""
    ops = (
        Arrive(prompt=16, max_tokens=12),
        Arrive(prompt=16, max_tokens=2, transfer_steps=6),
        Arrive(prompt=16, max_tokens=2, transfer_steps=1),
    )
    record = checked(engines, Trace(1, 1, 9, ops))
    assert [step.loads for step in record.steps if step.loads] == [(0, 1, 2)]
    rows = [number for step in record.steps for number in step.rows]
    assert rows == sorted(rows)
    assert record.read == [0, 2, 1], "each is told when it was read"
    stock = engines.play(Trace(1, 1, 9, (ops[0], Run(4), *ops[1:])), STOCK)
    busy = [step for step in stock.steps if 0 in step.rows]
    assert not any(step.loads for step in busy), "the stock scheduler reads nothing while its slots are full"


def rows_per_step(record: Record, number: int) -> float:
    """Return in which part of the steps a request has a row, from its first to its last."""
    steps = [at for at, step in enumerate(record.steps) if number in step.rows]
    return len(steps) / (steps[-1] - steps[0] + 1)


MASKED = (
    Arrive(prompt=16, max_tokens=60),
    *(Arrive(prompt=16, max_tokens=20, mask_s=0.03) for _ in range(3)),
    *(Arrive(prompt=16, max_tokens=20, mask_s=0.0003) for _ in range(3)),
)
"""A free sample, three whose masks take longer than a step may give to them, and three with short ones."""


def test_rows_with_long_masks_take_turns_and_hold_up_no_free_row(engines: Engines) -> None:
    record = checked(engines, Trace(7, 7, 99, MASKED))
    assert rows_per_step(record, 0) == 1
    took = [sum(MASKED[number].mask_s for number in step.rows) for step in record.steps if 0 in step.rows]
    assert max(took) < 0.07, "one long mask in a step, one of a row that begins, and the short ones"
    assert max(sum(took[at : at + 10]) for at in range(len(took))) < 10 * 0.02 + 0.05
    slow = [sum(number in step.rows for step in record.steps[:30]) for number in (1, 2, 3)]
    assert max(slow) - min(slow) <= 3, "they take turns"


def test_without_turns_all_long_masks_are_in_each_step(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("decode_node.scheduler"), "MASKS_S", 1.0)
    record = engines.play(Trace(7, 7, 99, MASKED))
    assert max(sum(MASKED[number].mask_s for number in step.rows) for step in record.steps) > 0.08


def test_rows_with_long_masks_alone_go_on_in_every_step(engines: Engines) -> None:
    """A step without any row would help nobody. In the second step the other one begins."""
    record = checked(engines, Trace(2, 2, 9, tuple(Arrive(prompt=16, max_tokens=9, mask_s=5.0) for _ in range(2))))
    assert [len(step.rows) for step in record.steps if step.rows] == [1, 2] + [1] * 15


@pytest.mark.parametrize("place", range(4))
def test_rows_that_all_have_masks_take_turns_while_there_is_no_time_for_any(engines: Engines, place: int) -> None:
    """After a mask of twenty steps' time. If the row of the newest mask went on, all others would wait for as long.
    With two steps in flight, a mask is known to be made two steps later here."""
    times = [0.4 if number == place else 0.0003 for number in range(4)]
    record = checked(engines, Trace(4, 4, 60, tuple(Arrive(prompt=16, max_tokens=20, mask_s=time) for time in times)))
    places = ([at for at, step in enumerate(record.steps) if number in step.rows] for number in range(4))
    waits = [later - earlier for found in places for earlier, later in itertools.pairwise(found)]
    assert max(waits) <= 2 * 4


def play_group(engines: Engines, trace: Trace) -> Record:
    """Play a trace on the node's own leases: what they grant must end, however the engine shares blocks, and no rule
    may be broken."""
    engine = engines.engine(trace)
    engine.table = SlotTable(slots=trace.slots, kv_blocks=trace.blocks, block_size=BLOCK_SIZE)
    record: Record = engine.play()
    assert group_violations(record, trace.slots) == set()
    return record


def group_violations(record: Record, slots: int) -> set[str]:
    """Return the violations, without the order of reads: who waits for another's read is passed by."""
    return set(violations(record, slots)) - {"not first come, first served"}


def test_samples_of_a_prompt_share_its_blocks_and_all_that_is_granted_ends(stepping: ModuleType) -> None:
    shared = 0

    @examples(150)
    @given(group_traces(), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        nonlocal shared
        record = play_group(on(stepping, platform), trace)
        whole = sum(-(-record.requests[n].prompt // BLOCK_SIZE) for step in record.steps for n in step.loads)
        shared += whole - sum(step.read_blocks for step in record.steps)

    check()
    assert shared > 375, "the traces have hits"


def test_eight_samples_read_their_prompt_once(engines: Engines) -> None:
    """The first reads seven blocks, the others wait for it and read the last one, which decode writes to."""
    ops = (Arrive(prompt=100, max_tokens=5, transfer_steps=3, group=1),) * 8
    record = play_group(engines, Trace(8, 8, 6 + 8 + 1, ops))
    assert len(record.requests) == 8, "all have leases, though the prompt's blocks are there once"
    assert sum(step.read_blocks for step in record.steps) == 7 + 7
    first = next(i for i, step in enumerate(record.steps) if step.loads)
    assert record.steps[first].loads == (0,)
    assert sorted(n for step in record.steps[first + 1 :] for n in step.loads) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("prompt", [1, 16, 17, 32, 33, 47, 48, 49])
def test_the_block_of_the_last_position_is_never_shared(engines: Engines, prompt: int) -> None:
    """Also if the prompt ends with its block: decode computes the last position again."""
    ops = (Arrive(prompt=prompt, max_tokens=3, group=1), Run(9), Arrive(prompt=prompt, max_tokens=3, group=1))
    record = play_group(engines, Trace(2, 2, 20, ops))
    blocks = -(-prompt // BLOCK_SIZE)
    assert [step.read_blocks for step in record.steps if step.loads] == [blocks, blocks - (prompt - 1) // BLOCK_SIZE]


def test_a_failed_read_leaves_nothing_to_find_and_who_waited_reads_itself(engines: Engines) -> None:
    fails = Arrive(prompt=49, max_tokens=3, transfer_steps=3, fails=True, group=1)
    ops = (fails, Arrive(prompt=49, max_tokens=3, group=1), Arrive(prompt=49, max_tokens=3, group=1))
    record = play_group(engines, Trace(4, 4, 20, ops))
    assert [step.read_blocks for step in record.steps if step.loads] == [4, 4, 1]
    assert record.finished == {0: "error", 1: "length", 2: "length"}


def test_samples_of_another_key_or_of_none_share_nothing(engines: Engines) -> None:
    first, *others = (Arrive(prompt=49, max_tokens=3, group=group) for group in (1, 0, 0, 2))
    record = play_group(engines, Trace(4, 4, 30, (first, Run(9), *others)))
    assert [step.read_blocks for step in record.steps if step.loads] == [4, 12]


def test_blocks_that_are_found_and_held_by_nobody_take_room(engines: Engines) -> None:
    """Four of nine blocks are still read into for an aborted sample. There is room for the next one, which finds three
    of its five blocks, and for nobody else, though the other's prompt would fit."""
    once, again = (Arrive(prompt=49, max_tokens=tokens, group=1) for tokens in (3, 31))
    aborted, other = Arrive(prompt=49, max_tokens=15, transfer_steps=9), Arrive(prompt=16, max_tokens=31)
    record = play_group(engines, Trace(4, 4, 9, (once, Run(9), aborted, Run(2), Abort(1), again, other)))
    assert [step.loads for step in record.steps if step.loads] == [(0,), (1,), (2,), (3,)]


def test_a_node_without_a_prefix_cache_shares_nothing(engines: Engines) -> None:
    ops = (Arrive(prompt=49, max_tokens=3, group=1, transfer_steps=2),) * 3
    record = checked(engines, Trace(4, 4, 30, ops), caching=False)
    assert [step.read_blocks for step in record.steps if step.loads] == [12], "and nobody waits for another's read"


def test_if_what_decode_wrote_could_be_found_others_would_decode_from_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: vLLM's own rule lets the last whole block be found, whose last position decode computes."""
    fixed = load("decode_node.scheduler").FixedSlotScheduler
    monkeypatch.setattr(fixed, "shared_tokens", lambda self, request: request.num_prompt_tokens)
    monkeypatch.setattr(engines.stepping, "_salt", lambda arrival: "one salt")
    ops = (Arrive(prompt=48, max_tokens=20, group=1), Run(9), Arrive(prompt=49, max_tokens=3, group=1))
    record = engines.play(Trace(4, 4, 20, ops))
    assert "decodes from another KV than its prompt's" in group_violations(record, 4)


def test_if_blocks_could_be_found_before_they_are_read_others_would_decode_from_them(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: blocks are let be found when their read begins, and nobody waits for it."""
    fixed = load("decode_node.scheduler").FixedSlotScheduler

    def admissible(self: Any) -> list[Any]:
        for request in self.skipped_waiting:
            self._let_find(request, self.shared_tokens(request))
        return list(self.waiting)

    monkeypatch.setattr(fixed, "admissible", admissible)
    slow = Arrive(prompt=49, max_tokens=3, transfer_steps=9, group=1)
    record = engines.play(Trace(4, 4, 20, (slow, Run(2), Arrive(prompt=49, max_tokens=3, group=1))))
    assert "decodes from another KV than its prompt's" in group_violations(record, 4)


@pytest.mark.parametrize("group", [0, 1])
def test_a_step_admits_no_more_than_its_part_of_a_crowd(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Prompts of four blocks each, three of which are found in a group: with or without it, two in a step."""
    ops = (Arrive(prompt=49, max_tokens=20, group=group), Run(4), *(Arrive(prompt=49, max_tokens=20, group=group),) * 6)
    trace = Trace(8, 8, 99, ops)
    assert [step.loads for step in _loading(play_group(engines, trace))] == [(0,), (1, 2, 3, 4, 5, 6)]
    monkeypatch.setattr(load("decode_node.scheduler"), "ADMITTED_BLOCKS", 11)
    record = play_group(engines, trace)
    assert list(violations(record, 8)) == []
    assert [step.loads for step in _loading(record)] == [(0,), (1, 2), (3, 4), (5, 6)]


def test_outputs_of_any_length_are_admitted_together(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of an output is looked at when its request is admitted."""
    monkeypatch.setattr(load("decode_node.scheduler"), "ADMITTED_BLOCKS", 4)
    record = play_group(engines, Trace(8, 8, 99, (Arrive(prompt=16, max_tokens=90),) * 4))
    assert list(violations(record, 8)) == []
    assert [step.loads for step in _loading(record)] == [(0, 1, 2, 3)]


def test_a_prompt_with_more_blocks_than_a_step_admits_is_admitted_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("decode_node.scheduler"), "ADMITTED_BLOCKS", 3)
    ops = (Arrive(prompt=16, max_tokens=9), Arrive(prompt=90, max_tokens=9), Arrive(prompt=16, max_tokens=9))
    record = play_group(engines, Trace(8, 8, 99, ops))
    assert list(violations(record, 8)) == []
    assert [step.loads for step in _loading(record)] == [(0,), (1,), (2,)]


def _loading(record: Record) -> list[Step]:
    return [step for step in record.steps if step.loads]


def test_a_slot_that_is_free_is_taken_at_once(engines: Engines) -> None:
    """While KV that takes eight steps is read, other samples decode: no step of two slots has fewer rows than two."""
    record = checked(engines, Trace(2, 2, 99, (Arrive(prompt=16, max_tokens=10, transfer_steps=8),) * 12))
    begun = next(i for i, step in enumerate(record.steps) if step.rows)
    ended = max(i for i, step in enumerate(record.steps) if len(step.rows) == 2)
    idle = [i for i, step in enumerate(record.steps[begun:ended]) if step.running < 2]
    assert idle == []


def test_without_the_rule_more_would_run_than_there_are_slots(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = load("decode_node.scheduler").FixedSlotScheduler
    monkeypatch.delattr(fixed, "_try_promote_blocked_waiting_request")
    with pytest.raises(RuntimeError, match="up to 2 requests"):
        engines.play(Trace(2, 2, 99, (Arrive(prompt=9, max_tokens=9),) * 3))


def test_zeroing_what_is_read_breaks_the_rules(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves out the blocks that it begins to read into: the read may be done before they are zeroed."""
    manager = load("vllm.v1.core.kv_cache_manager").KVCacheManager
    trace = Trace(slots=2, chunk=2, blocks=9, ops=(Arrive(prompt=40, max_tokens=20),) * 2)
    checked(engines, trace)
    monkeypatch.setattr(manager, "get_zeroing_block_ids_in_range", lambda *_: [])
    record = engines.play(trace)
    assert set(violations(record, 2)) == {"KV is zeroed that somebody needs"}


def test_recomputing_failed_loads_breaks_the_rules(engines: Engines) -> None:
    """vLLM's other policy: it would compute the prompt here, were the step not refused."""
    trace = Trace(slots=4, chunk=4, blocks=20, ops=(Arrive(prompt=40, max_tokens=4, fails=True),))
    record = engines.play(trace, STOCK, kv_load_failure_policy="recompute")
    assert {"not one token each", "a prompt token is computed"} <= set(violations(record, 4))
    with pytest.raises(RuntimeError, match="decode step"):
        engines.play(trace, kv_load_failure_policy="recompute")


def test_two_samples_that_would_outgrow_the_kv(engines: Engines) -> None:
    """Both prompts fit five blocks, both outputs do not: the stock scheduler preempts one and recomputes its prompt."""
    trace = Trace(slots=2, chunk=2, blocks=5, ops=(Arrive(prompt=32, max_tokens=24),) * 2)
    records = [engines.play(trace, name, caching=False) for name in (FIXED, STOCK)]
    assert list(violations(records[0], 2)) == []
    assert max(len(step.rows) for step in records[0].steps) == 1
    assert {"preempted", "a prompt token is computed"} <= set(violations(records[1], 2))


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_frees_at_every_stage(engines: Engines, steps: int, fails: bool) -> None:
    """Waiting, while its KV is read, and while it decodes; one slot, so another request follows it."""
    first = Arrive(prompt=33, max_tokens=9, transfer_steps=3, fails=fails)
    ops = (first, Arrive(prompt=16, max_tokens=2), Run(steps) if steps else Abort(1), Abort(0))
    checked(engines, Trace(1, 1, 9, ops))
