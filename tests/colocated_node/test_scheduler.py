"""Steps of prompts and samples in one engine, on vLLM's own scheduler: random traces of both, and what breaks a rule.

What a prompt, or a sample, may have done with it on a node of one role, it may here: each half of a record is judged by
the rules of that role's scheduler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from colocated_node.shares import prompt_blocks
from corun.node.kv.handle import STEPS_PARAM
from corun.types import NodeRole
from decode_node.slots import SlotTable
from tests.decode_node.test_scheduler import FIXED
from tests.decode_node.test_scheduler import group_violations as sample_violations
from tests.loading import load
from tests.prefill_node.test_scheduler import FREE, OURS, PACKED, examples
from tests.prefill_node.test_scheduler import violations as prompt_violations
from tests.traces import (
    BLOCK_SIZE,
    CPU,
    GPU,
    MAX_LEN,
    Abort,
    Arrive,
    Engines,
    Join,
    Platform,
    Record,
    Row,
    Run,
    Trace,
    colocated_traces,
    decode_traces,
    prefill_traces,
)

COLOCATED = "colocated_node.scheduler.ColocatedScheduler"
MIXED = (*FREE, "mixed")
AT_ONCE = (*MIXED, "scores", "cached")
"""What lets a sample begin in its prompt's last step."""
ALL = ((), PACKED, FREE, ("chunks",), ("packed", "mixed"), ("mixed",), MIXED, (*MIXED, "scores"), AT_ONCE, ("cached",))
LONGEST_WAIT = 2
"""The most steps from one row of a sample to its next, or without a prompt while one is unfinished."""
PLENTY = 1000
"""More blocks than all requests of a trace need."""


@pytest.fixture
def scheduler() -> Any:
    return load("colocated_node.scheduler").ColocatedScheduler


def on(stepping: ModuleType, platform: Platform) -> Engines:
    return Engines(stepping, platform, None, COLOCATED)


@pytest.fixture
def engines(stepping: ModuleType, platform: Platform) -> Engines:
    return on(stepping, platform)


def play(engines: Engines, trace: Trace) -> Record:
    """Play a trace with the leases that the node would give to its samples."""
    engine = engines.engine(trace)
    kv_blocks = trace.blocks - prompts_share(trace)
    engine.table = SlotTable(slots=trace.slots, kv_blocks=kv_blocks, block_size=BLOCK_SIZE)
    record: Record = engine.play()
    return record


def prompts_share(trace: Trace) -> int:
    return prompt_blocks(trace.blocks, BLOCK_SIZE, MAX_LEN)


def half(record: Record, *, reads: bool) -> Record:
    """Return what happened to the samples alone, or to the prompts alone."""
    numbers = {number for number, request in enumerate(record.requests) if request.reads == reads}
    others = set(range(len(record.requests))) - numbers
    return replace(
        record,
        steps=[replace(step, rows={n: row for n, row in step.rows.items() if n in numbers}) for step in record.steps],
        outputs={n: tokens for n, tokens in record.outputs.items() if n in numbers},
        aborted=record.aborted | others,  # Nothing is expected of them.
    )


def violations(record: Record, trace: Trace) -> set[str]:
    samples, prompts = half(without_tails(record), reads=True), half(record, reads=False)
    whole = replace(trace, budget=trace.budget + trace.slots)
    found = sample_violations(samples, trace.slots) | set(prompt_violations(prompts, whole))
    for place, step in enumerate(record.steps):
        of_prompts = [n for n in step.rows if not record.requests[n].reads]
        if any(step.rows[n].tokens > trace.chunk for n in of_prompts) and decodes_around(place, record):
            found.add("samples wait for more of a prompt than its chunk")
        if len(of_prompts) < len(step.rows) and not all("mixed" in record.requests[n].freedoms for n in of_prompts):
            found.add("a row beside a prompt that does not allow it")
        if len(step.rows) - len(of_prompts) > trace.slots:
            found.add("more rows than slots")
        if sum(row.tokens for row in step.rows.values()) > whole.budget:
            found.add("more tokens than a step may have")
        if step.prompt_blocks > prompts_share(trace):
            found.add("prompts use the samples' blocks")
    return found | set(waits(record))


def without_tails(record: Record) -> Record:
    """Return a record in which samples that began as they may in their prompts' last step have a row as any other."""
    return replace(
        record, steps=[replace(step, rows=dict(rows_without_tails(step.rows, record))) for step in record.steps]
    )


def rows_without_tails(rows: dict[int, Any], record: Record) -> Iterator[tuple[int, Any]]:
    for number, row in rows.items():
        request, prompt = record.requests[number], rows.get(record.prompt_of.get(number, -1))
        length = request.prompt
        begins_beside = (
            request.with_prompt
            and {"chunks", "mixed", "scores"} <= {*request.freedoms}
            and (prompt is not None and prompt.start + prompt.tokens == length)
            and (row.start, row.start + row.tokens) == ((length - 1) // BLOCK_SIZE * BLOCK_SIZE, length)
        )
        yield number, Row(length - 1, 1) if begins_beside else row


def decodes_around(place: int, record: Record) -> bool:
    """Return whether a sample had rows before a step and has some after it."""
    before = set[int]().union(*(step.rows for step in record.steps[:place]))
    after = set[int]().union(*(step.rows for step in record.steps[place + 1 :]))
    return any(record.requests[n].reads for n in before & after)


def waits(record: Record) -> Iterator[str]:
    """Yield who waits too long. Both kinds may have a step in turn, or none does."""
    at: dict[int, list[int]] = {}
    for place, step in enumerate(record.steps):
        for number in step.rows:
            at.setdefault(number, []).append(place)
    with_prompts = [any(not record.requests[n].reads for n in step.rows) for step in record.steps]
    for number, places in at.items():
        gaps = [(a, b) for a, b in itertools.pairwise(places) if b - a > LONGEST_WAIT]
        if gaps and record.requests[number].reads:
            yield "a sample waits for its next row"
        for first, last in gaps:
            between = with_prompts[first : last + 1]
            if not record.requests[number].reads and any(not (a or b) for a, b in itertools.pairwise(between)):
                yield "an unfinished prompt waits for samples"


def checked(engines: Engines, trace: Trace) -> Record:
    """Play a trace, in which no rule may be broken."""
    record = play(engines, trace)
    assert violations(record, trace) == set()
    return record


def test_prompts_and_samples_each_get_what_they_may_have(engines: Engines) -> None:
    mixed = turns = 0

    @examples(150)
    @given(colocated_traces(ALL))
    def check(trace: Trace) -> None:
        nonlocal mixed, turns
        record = checked(engines, trace)
        kinds = [{record.requests[n].reads for n in step.rows} for step in record.steps]
        mixed += kinds.count({True, False})
        turns += sum(a | b == {True, False} and len(a) == len(b) == 1 for a, b in itertools.pairwise(kinds))

    check()
    assert min(mixed, turns) > 100


def at(record: Record, number: int) -> list[int]:
    """Return the steps in which a request has a row."""
    return [place for place, step in enumerate(record.steps) if number in step.rows]


def rows_of(record: Record) -> list[dict[int, Any]]:
    return [step.rows for step in record.steps]


def test_prompts_alone_get_the_steps_of_a_prefill_node(engines: Engines) -> None:
    """A prefill node of as many blocks as are for prompts here, with steps of as many tokens. Nothing is cached: the
    prefix cache has all blocks that are free, and here are more of them."""

    @examples(60)
    @given(prefill_traces(freedoms=[may for may in ALL if "cached" not in may]))
    def check(trace: Trace) -> None:
        # With several steps in flight, an engine that reads KV gets the blocks of aborted prompts back a step later.
        blocks, times = (trace.blocks, 2) if engines.platform is CPU else (PLENTY, 8)
        whole = (trace.budget or trace.chunk) + trace.slots
        one = replace(engines, role=NodeRole.PREFILL, scheduler=OURS).play(replace(trace, blocks=blocks, budget=whole))
        both = engines.play(replace(trace, blocks=times * blocks))
        assert rows_of(both) == rows_of(one)
        assert (both.outputs, both.finished, both.left_over) == (one.outputs, one.finished, [])

    check()


def test_samples_alone_get_the_steps_of_a_decode_node(engines: Engines) -> None:
    @examples(60)
    @given(decode_traces())
    def check(trace: Trace) -> None:
        trace = replace(trace, blocks=PLENTY, budget=64)
        one = replace(engines, role=NodeRole.DECODE, scheduler=FIXED).play(replace(trace, budget=0))
        ops = tuple(replace(op, reads=True) if isinstance(op, Arrive) else op for op in trace.ops)
        both = engines.play(replace(trace, ops=ops))
        assert rows_of(both) == rows_of(one)
        assert [step.loads for step in both.steps] == [step.loads for step in one.steps]
        assert (both.outputs, both.finished, both.read) == (one.outputs, one.finished, one.read)
        assert both.left_over == []

    check()


def sample(prompt: int, max_tokens: int, **others: Any) -> Arrive:
    return Arrive(prompt=prompt, max_tokens=max_tokens, reads=True, **others)


def test_without_the_freedom_prompts_and_rows_take_turns(engines: Engines) -> None:
    ops = (sample(16, 30), Run(4), *(Arrive(prompt=40, freedoms=FREE),) * 6)
    record = checked(engines, Trace(slots=2, chunk=16, blocks=48, ops=ops, budget=16))
    kinds = [{record.requests[n].reads for n in step.rows} for step in record.steps]
    first, last = kinds.index({False}), len(kinds) - kinds[::-1].index({False})
    assert kinds[first:last:2].count({False}) == len(kinds[first:last:2]) > 10
    assert {True, False} not in kinds


def test_prompts_that_take_turns_with_rows_get_whole_steps(engines: Engines) -> None:
    """Rows that are not in a step take nothing of it: four prompts of 11 tokens fill one of 40 + 4."""
    ops = (sample(16, 30), Run(4), *(Arrive(prompt=11, freedoms=PACKED),) * 4)
    record = checked(engines, Trace(slots=4, chunk=16, blocks=60, ops=ops, budget=40))
    steps = [step for step in record.steps if any(not record.requests[n].reads for n in step.rows)]
    assert [sum(row.tokens for row in step.rows.values()) for step in steps] == [44]


def test_with_it_rows_ride_in_every_step_and_prompts_get_all_that_they_leave(engines: Engines) -> None:
    """A step that is a few tokens short is padded to a full one. And reads begin beside prompts."""
    prompts = (Arrive(prompt=100, freedoms=MIXED),) * 3
    ops = (sample(16, 30), sample(16, 30), Run(4), *prompts, Run(1), sample(20, 3))
    record = checked(engines, Trace(slots=4, chunk=16, blocks=60, ops=ops, budget=40))
    steps = [step for step in record.steps if any(not record.requests[n].reads for n in step.rows)]
    totals = [sum(row.tokens for row in step.rows.values()) for step in steps]
    assert set(totals[:6]) <= {43, 44}, "of 40 + 4; one token is kept for the sample whose KV may arrive"
    assert totals[0] == 44
    assert all(any(record.requests[n].reads for n in step.rows) for step in steps)
    began = next(place for place, step in enumerate(record.steps) if 5 in step.loads)
    assert record.steps[began] in steps[:3], "the read begins while prompts fill their part of each step"


def test_a_sample_of_an_own_prompt_begins_in_the_step_that_copies_its_kv(engines: Engines) -> None:
    """With a peer's prompt, it begins when the result of the step that read is there."""
    later = 1 + engines.platform.async_scheduling
    for own, steps in ((True, 0), (False, later)):
        ops = (Run(2), sample(33, 3, own=own))
        record = checked(engines, Trace(slots=2, chunk=16, blocks=48, ops=ops, budget=16))
        assert record.read == [0]
        loaded, began = (next(at for at, step in enumerate(record.steps) if getattr(step, part)) for part in LOAD_ROW)
        assert began - loaded == steps


LOAD_ROW = ("loads", "rows")


@pytest.mark.parametrize("prompt", [1, 16, 17, 33, 100])
@pytest.mark.parametrize("freedoms", [(), (*MIXED, "cached")], ids=["turns", "mixed"])
def test_a_sample_that_comes_with_its_prompt_begins_in_the_step_after_it(
    engines: Engines, prompt: int, freedoms: tuple[str, ...]
) -> None:
    """Before the result of the prompt's last step is there, and in vain waits nobody behind it. Later ones find blocks
    of the first in the prefix cache."""
    one = sample(prompt, 3, own=True, with_prompt=1, freedoms=freedoms)
    ops = (one, sample(40, 3), one, Run(3), one)
    record = checked(engines, Trace(slots=4, chunk=16, blocks=60, ops=ops, budget=40))
    places = [at(record, n) for n in range(7)]
    assert [places[n][0] for n in (0, 3, 5)] == [places[n + 1][-1] + 1 for n in (0, 3, 5)]
    assert sorted(record.read) == [0, 2, 3, 5]


@pytest.mark.parametrize("prompt", [1, 16, 17, 33, 100])
def test_a_sample_draws_in_its_prompts_last_step_if_all_allow_it(engines: Engines, prompt: int) -> None:
    """It computes the tokens behind the whole blocks itself, and copies nothing. So its first token comes a step
    earlier. A long prompt that is found in the cache may end sooner than was known when the step was planned."""
    one = sample(prompt, 3, own=True, with_prompt=1, freedoms=AT_ONCE)
    record = checked(engines, Trace(slots=4, chunk=16, blocks=60, ops=(one, Run(20), one), budget=40))
    places = [at(record, n) for n in range(4)]
    late = prompt == 100
    assert (places[0][0] - places[1][-1], places[2][0] - places[3][-1]) == (0, late)
    assert record.steps[places[0][0]].rows[0].start == (prompt - 1) // 16 * 16
    assert sum(step.read_blocks for step in record.steps) == late
    assert [len(record.outputs[number]) for number in (0, 2)] == [3, 3]
    assert sorted(record.read) == [0, 2]


def test_samples_beside_their_prompts_take_slots_and_tokens_that_are_free(engines: Engines) -> None:
    """Five pairs come at once for four slots: the last begins later, and no step is longer than it may be."""
    one = sample(30, 40, own=True, with_prompt=1, freedoms=AT_ONCE)
    record = checked(engines, Trace(slots=4, chunk=32, blocks=120, ops=(one,) * 5, budget=100))
    first = [at(record, n)[0] for n in range(0, 10, 2)]
    ended = [at(record, n)[-1] for n in range(1, 10, 2)]
    # The third prompt is found in the cache in the step that computes the first.
    assert [begun == end for begun, end in zip(first, ended, strict=True)] == [True, True, False, True, False]
    assert max(sum(row.tokens for row in step.rows.values()) for step in record.steps) <= 104


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("freedoms", [(), AT_ONCE], ids=["turns", "at once"])
def test_samples_that_join_a_prompt_begin_with_it_or_in_the_step_that_is_made_next(
    engines: Engines, steps: int, freedoms: tuple[str, ...]
) -> None:
    """They come whenever its KV is there or is being computed, and before its other readers have read."""
    one = sample(100, 3, own=True, with_prompt=2, group=1, freedoms=freedoms, transfer_steps=30)
    ops = (one, Run(steps) if steps else Join(0, 3), *(Join(0, 3),) * 3)
    trace = Trace(slots=8, chunk=32, blocks=80, ops=ops, budget=120)
    engine = engines.engine(trace)
    made, add = list[int](), engine._add
    engine._add = lambda arrival: (made.append(len(engine.record.steps)), add(arrival))
    record = engine.play()
    assert violations(record, trace) == set()
    places = [at(record, n) for n in range(len(made))]
    last = places[2][-1]
    samples = [n for n in range(len(made)) if n != 2]
    assert len(samples) == 5 + (not steps)
    is_beside = places[0][0] == last
    assert [places[n][0] for n in samples] == [max(last + (not is_beside or made[n] > last), made[n]) for n in samples]
    assert sorted(record.read) == samples


def test_as_many_samples_begin_beside_their_prompt_as_slots_and_tokens_allow(engines: Engines) -> None:
    """Each takes 14 tokens of the step, which has room for 36 + 4 with those of the prompt, and one has to wait for a
    slot."""
    one = sample(30, 3, own=True, with_prompt=5, group=1, freedoms=AT_ONCE)
    for budget, slots, expected in ((120, 4, [0, 0, 0, 0]), (54, 4, [0, 0, 1, 1]), (120, 2, [0, 0])):
        record = checked(engines, Trace(slots=slots, chunk=32, blocks=120, ops=(one,), budget=budget))
        places = [at(record, n) for n in range(len(record.requests))]
        prompt = record.prompt_of[0]
        assert [places[n][0] - places[prompt][-1] for n in range(slots)] == expected
        assert max(sum(row.tokens for row in step.rows.values()) for step in record.steps) <= budget + slots


def test_samples_that_begin_beside_their_prompts_are_no_more_blocks_than_a_step_admits(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows wait while a step admits samples. The first is admitted whatever its length."""
    for name in ("decode_node.scheduler", "colocated_node.scheduler"):
        monkeypatch.setattr(load(name), "ADMITTED_BLOCKS", 4, raising=False)
    one = sample(30, 9, own=True, with_prompt=5, group=1, freedoms=AT_ONCE)
    record = checked(engines, Trace(slots=8, chunk=32, blocks=120, ops=(one,), budget=120))
    began = [at(record, n)[0] for n in range(5)]
    assert max(began.count(place) for place in began) == 2


@pytest.mark.parametrize(("prompt", "copied"), [(16, 1), (33, 0), (40, 1), (48, 1), (100, 1)])
def test_a_sample_copies_only_the_last_block_of_its_own_prompt(engines: Engines, prompt: int, copied: int) -> None:
    """Blocks have 16 tokens. The others are read where they are: they are not copied, and are nobody's in addition."""
    one = sample(prompt, 3, own=True, with_prompt=1, freedoms=FREE)
    trace = Trace(slots=4, chunk=16, blocks=60, ops=(one,), budget=40)
    record = checked(engines, trace)
    assert [sum(step.read_blocks for step in record.steps), record.read] == [copied, [0]]
    least = min(step.free for step in record.steps)
    assert trace.blocks - least <= -(-prompt // 16) + 2, "the last block twice, and one of the output"
    without = engines.engine(trace, caching=False).play()
    assert sum(step.read_blocks for step in without.steps) == -(-prompt // 16), "vLLM shares no blocks then"


def played_with_one_copy(engine: Any) -> Record:
    """Play a trace in which all samples have the same six blocks of their prompt, and no rule may be broken."""
    held: list[set[tuple[int, ...]]] = []
    schedule = engine.scheduler.schedule

    def watched() -> Any:
        output = schedule()
        samples = [name for name in engine.scheduler.requests if engine.record.requests[int(name)].reads]
        tables = [engine.scheduler.kv_cache_manager.get_block_ids(name)[0][:6] for name in samples]
        held.append({tuple(table) for table in tables if len(table) == 6})
        return output

    engine.scheduler.schedule = watched
    record: Record = engine.play()
    assert (violations(record, engine._trace), max(map(len, held))) == (set(), 1)
    return record


@pytest.mark.parametrize("freedoms", [FREE, AT_ONCE], ids=["after", "at once"])
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "a peer's"])
def test_samples_of_one_prompt_read_the_same_blocks_in_place(
    engines: Engines, is_own: bool, freedoms: tuple[str, ...]
) -> None:
    """Though their prompt was computed twice, without the cache: the leases count these blocks once. The first may also
    have read them from a peer. A third finds its prompt computed elsewhere, and reads only the last block."""
    uncached = tuple(name for name in freedoms if name != "cached")
    one = sample(100, 60, own=True, with_prompt=1, group=1, freedoms=uncached)
    first, samples = (one, [0, 2, 4]) if is_own else (sample(100, 60, group=1), [0, 1, 3])
    ops = (first, Run(12), one, Run(12), sample(100, 20, group=1))
    engine = engines.engine(Trace(slots=4, chunk=16, blocks=60, ops=ops, budget=40))
    record = played_with_one_copy(engine)
    assert sorted(record.read) == samples
    last = next(step for step in record.steps if samples[-1] in step.loads)
    assert last.read_blocks == len(last.loads)
    assert engine.scheduler._in_place == {}


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("first", [{"transfer_steps": 6}, {"own": True}, None], ids=["a peer's", "own", "with another"])
@pytest.mark.parametrize("freedoms", [(*MIXED, "scores"), FREE, AT_ONCE], ids=["at once", "after", "cached"])
def test_no_sample_begins_while_another_one_gets_the_blocks_of_their_prompt_elsewhere(
    engines: Engines, freedoms: tuple[str, ...], first: dict[str, Any] | None, steps: int
) -> None:
    """The leases count the blocks once. With a second copy, a sample that has a lease could be without room."""
    one = sample(100, 30, own=True, with_prompt=1, group=1, freedoms=freedoms)
    before = one if first is None else sample(100, 30, group=1, **first)
    ops = (one, before) if not steps else (before, Run(steps), one)
    if "cached" in freedoms:  # Only the first block is.
        ops = (sample(17, 1, own=True, with_prompt=1, freedoms=freedoms), Run(8), *ops)
    engine = engines.engine(Trace(slots=4, chunk=104, blocks=60, ops=ops, budget=220))
    played_with_one_copy(engine)


def test_a_checked_prompt_is_told_how_many_samples_were_in_its_steps(engines: Engines) -> None:
    """A difference that is found later names them."""
    ops = (sample(40, 60), sample(40, 60), Run(6), Arrive(prompt=100, freedoms=MIXED))
    engine = engines.engine(Trace(slots=4, chunk=16, blocks=60, ops=ops, budget=40))
    schedule = engine.scheduler.schedule
    told: list[list[int]] = []

    def watched() -> Any:
        output = schedule()
        if (prompt := engine.scheduler.requests.get("2")) and "2" in output.num_scheduled_tokens:
            told.append(prompt.kv_transfer_params[STEPS_PARAM][-1])
        return output

    engine.scheduler.schedule = watched
    engine.play()
    assert told == [[16, 1, 16, 2]] * 6 + [[4, 1, 4, 2]]


def test_what_is_read_in_place_is_the_prompts_until_that_is_gone(engines: Engines) -> None:
    """Its other reader comes late, or never: then its lease ends. So prompts have no more than their part of all
    blocks, and each sample finds the room that it was promised."""
    one = sample(100, 30, own=True, with_prompt=1, freedoms=MIXED, transfer_steps=20)
    record = checked(engines, Trace(slots=4, chunk=16, blocks=64, ops=(one,) * 6, budget=40))
    assert sorted(record.finished) == [*range(len(record.requests))]
    assert len(record.requests) == 6, "three pairs get leases"


def test_blocks_that_several_prompts_begin_with_are_prompts_once(engines: Engines) -> None:
    """Four samples read the same 15 blocks in place. Counted for each of them, prompts would seem to hold far less than
    they do, and take what is promised to samples: these wait until a reader of the prompts comes."""
    alike = sample(250, 60, own=True, with_prompt=1, freedoms=AT_ONCE, scope="a", common=240)
    held = [Arrive(prompt=150 + 16 * i, freedoms=MIXED, transfer_steps=400, common=1 + i) for i in range(5)]
    ops = (*((alike, Run(3)) * 4), *held, Run(70), sample(300, 210), sample(300, 210), Run(200))
    trace = Trace(slots=8, chunk=64, blocks=96, ops=ops, budget=200)
    record, share = checked(engines, trace), prompts_share(trace)
    assert max(step.prompt_blocks for step in record.steps) <= share
    last = len(record.requests) - 1
    assert at(record, last)[0] < 150


@pytest.mark.parametrize("kept", [False, True])
def test_no_step_is_asked_for_while_there_are_only_samples_whose_prompts_have_yet_to_come(
    engines: Engines, kept: bool
) -> None:
    """A step without anything in it would keep the prompt waiting. A pair comes first, then when all has ended, then
    beside another pair. kept: whether KV of a prompt that has finished before is here all the time."""
    one = sample(40, 3, own=True, with_prompt=1)
    before = (Arrive(prompt=20, transfer_steps=400), Run(10)) if kept else ()
    trace = Trace(slots=2, chunk=16, blocks=48, ops=(*before, one, Run(30), one, Run(1), one), budget=16)
    engine = engines.engine(trace)
    add, asked = engine.scheduler.add_request, list[bool]()

    def watched(request: Any) -> None:
        add(request)
        asked.append(engine.scheduler.has_requests())

    engine.scheduler.add_request = watched
    record = engine.play()
    assert violations(record, trace) == set()
    assert asked == [*([True] if kept else []), False, True, False, True, True, True]
    engine.scheduler.connector.has_pending_push_work = lambda: True
    assert engine.scheduler.has_requests(), "vLLM has a reason of its own"


def test_kv_is_kept_for_a_sample_that_came_with_it_however_long_that_waits_for_room(
    engines: Engines, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other readers have read it, or its lease has ended, while another sample has the room."""
    ops = (sample(300, 50, own=True), Run(2), sample(40, 300, own=True, with_prompt=1), Run(7), Abort(0))
    trace = Trace(slots=2, chunk=16, blocks=40, ops=ops, budget=16)
    record = engines.play(trace)
    assert violations(record, trace) == set()
    assert record.finished[1] == "length"
    monkeypatch.setattr(scheduler, "_free_blocks", super(scheduler, scheduler)._free_blocks)
    without = engines.play(trace)
    assert {"wrong output", "decodes from another KV than its prompt's"} & violations(without, trace)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_a_sample_of_another_prompt_than_the_one_that_has_the_id_ends_alone(engines: Engines, steps: int) -> None:
    """A router used the id again. Else the sample would begin from that prompt's KV, whose stamps it would be told."""
    before, waits = sample(300, 50, own=True), sample(40, 300, own=True, with_prompt=1)
    ops = (before, Run(2), waits, Run(steps))
    engine = engines.engine(Trace(slots=2, chunk=16, blocks=40, ops=ops, budget=16))
    drain = engine._drain

    def come_and_drain() -> None:
        engine.record.prompt_of[3] = 2
        engine._add(sample(40, 3, own=True, with_prompt=1, common=1))
        drain()

    engine._drain = come_and_drain
    record = engine.play()
    assert (record.finished[1], record.finished[3]) == ("length", "error")
    assert record.outputs[3] == []
    assert (record.stuck, record.left_over) == (False, [])


def test_a_sample_whose_prompt_is_given_up_is_told_nothing_and_leaves_nothing(engines: Engines) -> None:
    for run, which in itertools.product(range(6), range(2)):
        ops = (
            sample(40, 5, own=True, with_prompt=1),
            Run(run),
            Abort(which),
            sample(40, 5, own=True, with_prompt=1),
        )
        trace = Trace(slots=2, chunk=16, blocks=48, ops=ops, budget=16)
        engine = engines.engine(trace)
        record = engine.play()
        assert violations(record, trace) == set()
        assert record.finished[2] == "length"
        assert engine.scheduler._with_prompt == {}


def test_without_a_free_slot_own_kv_is_copied_early(engines: Engines) -> None:
    """So that its prompt's blocks are free for the next prompt, as with a peer's. Who waits longest gets the slot."""
    ops = (sample(33, 9, own=True), Run(3), sample(33, 3, own=True), Run(2), sample(33, 3, own=True))
    trace = Trace(slots=1, chunk=16, blocks=48, ops=ops, budget=16)
    record = engines.play(trace)  # A table would give no lease to the last one.
    assert violations(record, trace) == set()
    began = [at(record, n)[0] for n in range(3)]
    loaded = [next(at for at, step in enumerate(record.steps) if n in step.loads) for n in range(3)]
    assert began == sorted(began)
    assert began[0] == loaded[0]
    assert max(loaded[1:]) < began[1]


@pytest.mark.parametrize("first", [{"own": True, "mask_s": 0.0003}, {}], ids=["constrained", "a peer's"])
def test_who_has_to_wait_for_kv_keeps_a_slot(engines: Engines, first: dict[str, Any]) -> None:
    ops = (sample(40, 5, **first), sample(40, 24, own=True))
    record = engines.play(Trace(slots=1, chunk=16, blocks=48, ops=ops, budget=16))
    began = [at(record, n)[0] for n in range(2)]
    assert began[0] < began[1]


def test_slots_that_become_free_together_are_each_given_once(
    engines: Engines, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(slots=2, chunk=16, blocks=60, ops=(sample(33, 5, own=True),) * 6, budget=64)
    record = checked(engines, trace)
    assert max(step.running for step in record.steps) == 2
    promote = scheduler._try_promote_blocked_waiting_request

    def promoted(self: Any, request: Any) -> bool:
        free, found = self._free_slots, promote(self, request)
        self._free_slots = free
        return bool(found)

    monkeypatch.setattr(scheduler, "_try_promote_blocked_waiting_request", promoted)
    with pytest.raises(RuntimeError, match="a decode step holds one token for up to 2 requests"):
        engines.play(trace)


def test_the_work_of_a_step_does_not_grow_with_rows_times_waiting_samples(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 rows and 44 samples that waited for a slot, a step once looked 45 times at each row: 1.1 ms."""
    module, looks = load("colocated_node.scheduler"), list[Any]()
    look = module.is_prompt
    monkeypatch.setattr(module, "is_prompt", lambda request: looks.append(request) or look(request))
    counts = {}
    for waiting in (10, 40):
        trace = Trace(slots=8, chunk=16, blocks=800, ops=(sample(33, 90, own=True),) * (8 + waiting), budget=64)
        engine = engines.engine(trace)
        for op in trace.ops:
            engine._arrive(op)
        for _ in range(20):
            engine.step()
        assert len(engine.scheduler.skipped_waiting) == waiting, "they wait for slots, not for room"
        looks.clear()
        engine.step()
        counts[waiting] = len(looks)
    assert counts[40] - counts[10] <= 4 * 30


def test_room_for_prompts_is_counted_only_while_one_waits(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than all else that a step of rows needs of this scheduler, and samples may wait in every step."""
    cls = load("colocated_node.scheduler").ColocatedScheduler
    count, counted = cls.room, list[int]()
    monkeypatch.setattr(cls, "room", lambda self, started: counted.append(1) or count(self, started))
    trace = Trace(slots=4, chunk=16, blocks=14, ops=(sample(33, 90),) * 4, budget=64)
    engine = engines.engine(trace)
    for op in trace.ops:
        engine._arrive(op)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.waiting, "samples wait for room"
    assert not counted
    engine._arrive(Arrive(prompt=20, max_tokens=1))
    engine.step()
    assert counted


@pytest.mark.parametrize("prompt", [1, 17, 40])
def test_a_sample_that_runs_renews_no_lease(engines: Engines, prompt: int) -> None:
    """It has a copy of its own. While it waits for a slot, it does."""
    engine = engines.engine(Trace(slots=1, chunk=16, blocks=48, ops=(), budget=16))
    nixl = engine.scheduler.connector.connector_scheduler
    engine._arrive(sample(prompt, 20, own=True))
    assert nixl._heartbeat_by_engine
    for _ in range(4):
        engine.step()
    assert engine.record.outputs[0]
    assert nixl._heartbeat_by_engine == {}


def test_samples_of_an_own_prompt_share_what_the_first_copies(engines: Engines) -> None:
    """The others begin as soon as the first is known to have it, each with a copy of the block that decode writes to;
    of 97 tokens, that block needs none."""
    for prompt, copied in ((100, 7 + 7), (97, 7)):
        ops = (sample(prompt, 5, own=True, group=1),) * 8
        record = checked(engines, Trace(slots=8, chunk=16, blocks=60, ops=ops, budget=16))
        assert sum(step.read_blocks for step in record.steps) == copied
        assert sorted(record.read) == list(range(8))
        began = [at(record, n)[0] for n in range(8)]
        assert {at - began[0] for at in began[1:]} == {1 + engines.platform.async_scheduling}


def test_if_nobody_waited_for_a_copy_each_would_make_its_own(
    stepping: ModuleType, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the result of the step that copies is not there when the next one is chosen."""
    monkeypatch.setattr(scheduler, "being_read", super(scheduler, scheduler).being_read)
    ops = (sample(100, 5, own=True, group=1),) * 2
    record = play(on(stepping, GPU), Trace(slots=8, chunk=16, blocks=60, ops=ops, budget=16))
    assert sum(step.read_blocks for step in record.steps) == 7 + 7


def test_a_copy_that_is_refused_ends_its_own_sample_only(engines: Engines) -> None:
    ops = (sample(40, 9, own=True), Run(3), sample(40, 9, own=True, fails=True), sample(40, 9, own=True), Run(20))
    record = checked(engines, Trace(slots=3, chunk=16, blocks=48, ops=ops, budget=16))
    assert record.finished == {0: "length", 1: "error", 2: "length"}
    assert sorted(record.read) == [0, 2]


def test_what_is_leased_gets_room_whatever_prompts_hold(engines: Engines) -> None:
    """Prompts that nobody reads for long fill their part; all samples with leases begin at once, and end."""
    held = (Arrive(prompt=64, freedoms=MIXED, transfer_steps=300),) * 9
    ops = (*held, Run(8), *(sample(40, 20),) * 9, Run(60), Run(1))
    trace = Trace(slots=8, chunk=64, blocks=48, ops=ops, budget=200)
    record, share = checked(engines, trace), prompts_share(trace)
    samples = {n for n, request in enumerate(record.requests) if request.reads}
    assert len(samples) == 6, "24 blocks of 4 each"
    ended = max(place for place, step in enumerate(record.steps) if samples & step.rows.keys())
    assert samples <= {n for step in record.steps[: ended + 1] for n in step.rows}
    assert ended < 60
    assert record.steps[ended].prompt_blocks in range(share - 4, share + 1), "prompts still hold their blocks"


# Schedulers that break one rule each.

Break = Callable[[pytest.MonkeyPatch, Any, Any], None]


def patch(name: str, value: Any, *, of_module: bool = False) -> Break:
    """Give the scheduler, or its module, something else by this name."""
    return lambda monkeypatch, module, cls: monkeypatch.setattr(
        module if of_module else cls, name, value, raising=False
    )


def fixed(value: bool) -> property:
    """An attribute that stays what it is."""
    return property(lambda self: value, lambda self, given: None)


def show_all_prompts(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any) -> None:
    def choose(self: Any) -> list[Any]:
        return [*(one for one in self.started() if one.num_computed_tokens < one.num_prompt_tokens), *self.unstarted()]

    monkeypatch.setattr(cls, "choose", choose)
    monkeypatch.setattr(cls, "check_prompts", lambda *_, **__: None)


def check_no_slots(monkeypatch: pytest.MonkeyPatch, cls: Any) -> None:
    """Let steps have more rows than slots."""
    check = cls._check_step

    def unchecked(self: Any, *step: Any) -> None:
        slots, self.slots = self.slots, PLENTY
        check(self, *step)
        self.slots = slots

    monkeypatch.setattr(cls, "_check_step", unchecked)


def take_any_slot(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any) -> None:
    def count(self: Any, taken: int) -> None:
        self._free_slots = PLENTY if self._takes_rows else 0

    monkeypatch.setattr(cls, "_count_free_slots", count)
    check_no_slots(monkeypatch, cls)


def begin_anyway(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any) -> None:
    """Any sample of an own prompt begins at once, with a free slot or without."""
    admissible = cls.admissible

    def marked(self: Any) -> list[Any]:
        chosen: list[Any] = admissible(self)
        for request in chosen:
            request.kv_transfer_params[module.handle.AT_ONCE_PARAM] = self._is_own(request)
        return chosen

    monkeypatch.setattr(cls, "admissible", marked)
    check_no_slots(monkeypatch, cls)


def tell_too_early(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any) -> None:
    """Samples that came with their prompts begin after its first chunk."""
    tell = cls._tell_of_prompts

    def told(self: Any) -> None:
        requests = self.requests
        begun = {name: one for name, one in requests.items() if one.num_computed_tokens}
        names = ("request_id", "num_prompt_tokens", "prompt_token_ids", "kv_transfer_params")
        prompts = [{name: getattr(request, name) for name in names} for request in begun.values()]
        ended = {one["request_id"]: SimpleNamespace(**one, num_computed_tokens=PLENTY) for one in prompts}
        self.requests = {**requests, **ended}
        tell(self)
        self.requests = requests

    monkeypatch.setattr(cls, "_tell_of_prompts", told)


def read_any_prompt(monkeypatch: pytest.MonkeyPatch, module: Any, cls: Any) -> None:
    """Samples read in place what another prompt has computed."""
    in_place = cls.in_place

    def of_another(self: Any, request: Any) -> Any:
        count = len(in_place(self, request))
        others = [one.request_id for one in self.requests.values() if module.is_prompt(one)]
        held = [self.kv_cache_manager.get_blocks(name).blocks for name in reversed(others)]
        return next((blocks[0][:count] for blocks in held if blocks and len(blocks[0]) >= count), ()) if count else ()

    monkeypatch.setattr(cls, "in_place", of_another)


CONTROLS: dict[str, tuple[Break, str]] = {
    "rows ride with any prompt": (
        patch("freedoms", lambda request: MIXED, of_module=True),
        "a row beside a prompt that does not allow it",
    ),
    "all prompts run": (show_all_prompts, "a prompt that must be alone shares its step"),
    "prompts get the tokens of rows": (
        patch("budget", property(lambda self: getattr(self, "_step_tokens", 1000), lambda *_: None)),
        "more tokens than a step may have",
    ),
    "prompts get all of a step beside rows": (
        patch("has_rows", False),
        "samples wait for more of a prompt than its chunk",
    ),
    "rows beyond the slots": (take_any_slot, "more rows than slots"),
    "prompts never yield": (patch("_had_prompts", fixed(False)), "a sample waits for its next row"),
    "samples never yield": (patch("_had_prompts", fixed(True)), "an unfinished prompt waits for samples"),
    "prompts take all blocks": (
        patch("room", lambda self, _: self.free_blocks([*self.running, *self.skipped_waiting])),
        "prompts use the samples' blocks",
    ),
    "what prompts hold is forgotten": (
        patch("room", lambda self, started: self._prompt_blocks - sum(map(self.reserved_for, started))),
        "prompts use the samples' blocks",
    ),
    "copies begin beyond the slots": (begin_anyway, "more rows than slots"),
    "refused copies are told as done": (patch("LACKS_KV", (), of_module=True), "a failed read is told as done"),
    "rows begin before their prompts end": (tell_too_early, "decodes from another KV than its prompt's"),
    "samples outlive their prompts": (
        patch("finish_requests", lambda self, *args: super(type(self), self).finish_requests(*args)),
        "left over",
    ),
    "rows begin before their KV is there": (
        patch("_is_own", lambda self, request: True),
        "decodes from another KV than its prompt's",
    ),
    "another prompt is read in place": (read_any_prompt, "decodes from another KV than its prompt's"),
    "what decode writes is found": (
        patch("shared_tokens", lambda self, request: request.num_prompt_tokens),
        "decodes from another KV than its prompt's",
    ),
}


@pytest.mark.parametrize(("broken", "expected"), CONTROLS.values(), ids=CONTROLS)
def test_a_scheduler_that_breaks_a_rule_is_found(
    stepping: ModuleType, scheduler: Any, monkeypatch: pytest.MonkeyPatch, broken: Break, expected: str
) -> None:
    """The same traces: a check that cannot fail proves nothing. Some traces end with the scheduler's own refusal."""
    broken(monkeypatch, load("colocated_node.scheduler"), scheduler)
    found: set[str] = set()

    @examples(150)
    @given(colocated_traces(ALL))
    def watch(trace: Trace) -> None:
        if expected not in found:
            with suppress(RuntimeError):
                found.update(violations(play(on(stepping, GPU), trace), trace))

    watch()
    assert expected in found


def test_a_sample_that_would_be_preempted_is_refused(
    stepping: ModuleType, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "admissible", lambda self: [*self.unread()])
    ops = (sample(32, 24),) * 4
    with pytest.raises(RuntimeError, match="would be preempted"):
        on(stepping, CPU).play(Trace(slots=4, chunk=8, blocks=10, ops=ops, budget=8))


def with_rows(showing: Any) -> Any:
    """Show the stock scheduler the samples, too, in every step."""

    @contextmanager
    def shown(self: Any, chosen: Any) -> Iterator[None]:
        takes_rows, self._takes_rows = self._takes_rows, True
        with showing(self, chosen):
            yield
        self._takes_rows = takes_rows

    return shown


def test_rows_beside_prompts_that_may_not_have_them_are_refused(
    stepping: ModuleType, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other prompts, or other chunks, are refused as on a prefill node (`check_prompts`)."""
    ops = (sample(16, 30), Run(3), Arrive(prompt=40), Arrive(prompt=40))
    engine = on(stepping, CPU).engine(Trace(slots=2, chunk=16, blocks=48, ops=ops, budget=40))
    monkeypatch.setattr(scheduler, "_showing_only", with_rows(scheduler._showing_only))
    with pytest.raises(RuntimeError, match=r"holds rows of \['0'\]"):
        engine.play()


@pytest.mark.parametrize(
    "prompt", [Arrive(prompt=40), Arrive(prompt=1, freedoms=("mixed",))], ids=["alone", "of one token, with rows"]
)
def test_other_prompts_than_chosen_are_refused(
    stepping: ModuleType, monkeypatch: pytest.MonkeyPatch, prompt: Arrive
) -> None:
    engine = on(stepping, CPU).engine(Trace(2, 16, 48, (prompt, prompt), budget=40))
    shows = engine.scheduler.showing_waiting
    monkeypatch.setattr(engine.scheduler, "showing_waiting", lambda shown: shows([*engine.scheduler.waiting]))
    with pytest.raises(RuntimeError, match=r"the prefill step of \['0'\] holds"):
        engine.play()


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("freedoms", [(), MIXED], ids=["turns", "mixed"])
def test_an_abort_of_either_frees_at_every_stage(engines: Engines, steps: int, freedoms: tuple[str, ...]) -> None:
    ops = (
        sample(33, 9, transfer_steps=3, group=1),
        Arrive(prompt=40, transfer_steps=3, freedoms=freedoms),
        sample(33, 9, group=1),
        Arrive(prompt=20, freedoms=freedoms),
        Run(steps) if steps else Abort(2),
        Abort(0),
        Abort(1),
    )
    checked(engines, Trace(slots=1, chunk=16, blocks=48, ops=ops, budget=16))
