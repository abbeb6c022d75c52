"""Prefill steps on vLLM's own scheduler: random traces, and the same on the stock one, which breaks the rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.types import NodeRole
from tests.loading import load
from tests.traces import (
    ANY_PLATFORM,
    CPU,
    Abort,
    Arrive,
    Platform,
    Record,
    Row,
    Run,
    Step,
    Trace,
    examples,
    in_order,
    prefill_traces,
)
from tests.traces import violations as common_violations

OURS = "prefill_node.scheduler.PrefillScheduler"
ONE_PROMPT = "tests.prefill_node.schedulers.OnePromptScheduler"
STOCK = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
PACKED = ("packed",)
FREE = ("packed", "chunks")
MIXED = ((), PACKED, PACKED, FREE, FREE, ("chunks",))


def violations(record: Record, trace: Trace) -> Iterator[str]:
    yield from common_violations(record)
    steps = [prompts_of(step, record) for step in record.steps]
    last = {number: at for at, prompts in enumerate(steps) for number in prompts}
    if not in_order(list(dict.fromkeys(itertools.chain(*steps)))):
        yield "not first come, first served"
    for at, (step, prompts) in enumerate(zip(record.steps, steps, strict=True)):
        if prompts:
            yield from step_violations(step, prompts, record, trace)
            if any(last.get(number, 0) > at for number in set(range(max(prompts))).difference(prompts)):
                yield "a prompt was overtaken"
    for number, request in enumerate(record.requests):
        if not request.freedoms:
            done = rows_of(number, record)
            if done != own_rows(request, trace.chunk)[: len(done)]:
                yield "chunk boundaries depend on others"


def step_violations(step: Step, prompts: list[int], record: Record, trace: Trace) -> Iterator[str]:
    if len(prompts) < len(step.rows):
        yield "a decode row is in a prefill step"
    if len(prompts) > 1 and not all("packed" in record.requests[n].freedoms for n in prompts):
        yield "a prompt that must be alone shares its step"
    if sum(step.rows[n].tokens for n in prompts) > trace.budget:
        yield "the step is too long"
    for number in prompts:
        row, request = step.rows[number], record.requests[number]
        whole = row.start % trace.chunk == 0 and row.tokens == own_chunk(number, step, record, trace)
        if not whole and "chunks" not in request.freedoms:
            yield "no chunk of the contract"
    has_more = any(step.rows[n].tokens > trace.chunk for n in prompts)
    if has_more and any(step.rows[n].tokens < own_chunk(n, step, record, trace) for n in prompts):
        yield "a prompt has more than a chunk, and another less"


def own_chunk(number: int, step: Step, record: Record, trace: Trace) -> int:
    """Return the tokens of a prompt's chunk as the contract cuts it from where the step begins."""
    return min(trace.chunk, record.requests[number].prompt - step.rows[number].start)


def prompts_of(step: Step, record: Record) -> list[int]:
    """The prompts of a step in its order; rows beyond the prompt are decode."""
    return [n for n, row in step.rows.items() if row.start < record.requests[n].prompt]


def rows_of(number: int, record: Record) -> list[Row]:
    return [step.rows[number] for step in record.steps if number in step.rows]


def own_rows(request: Arrive, chunk: int) -> list[Row]:
    """All that is computed of a request, from its own length alone: chunks of its prompt, then token by token."""
    starts = range(0, request.prompt, chunk)
    prompt = [Row(start, min(chunk, request.prompt - start)) for start in starts]
    return prompt + [Row(request.prompt + i, 1) for i in range(request.max_tokens)]


def play(stepping: ModuleType, scheduler: str, trace: Trace, platform: Platform, **options: Any) -> Record:
    found: Record = stepping.play(scheduler, trace, platform, role=NodeRole.PREFILL, **options)
    return found


@pytest.mark.parametrize("longest_output", [1, 12])
def test_isolated_prompts_get_the_steps_that_they_always_got(stepping: ModuleType, longest_output: int) -> None:
    """Step by step, those of the scheduler that knows nothing but one prompt a step, whatever the room of a step.

    With one token of output: a prefill node's traces, with KV that is held until it is read or its lease ends. With
    more: the colocated form of the paper, where requests go on to decode in the same engine.
    """

    @examples(120)
    @given(prefill_traces(longest_output=longest_output), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        has_connector = longest_output == 1
        record = play(stepping, OURS, trace, platform, connector=has_connector)
        assert list(violations(record, trace)) == []
        assert all(len(prompts_of(step, record)) < 2 for step in record.steps)
        plain = play(
            stepping, ONE_PROMPT, replace(trace, budget=trace.chunk), platform, connector=has_connector, caching=False
        )
        assert record == plain

    check()


@pytest.mark.parametrize("longest_output", [1, 12])
def test_each_prompt_gets_what_its_request_allows(stepping: ModuleType, longest_output: int) -> None:
    shared: list[bool] = []

    @examples(200)
    @given(prefill_traces(longest_output=longest_output, freedoms=MIXED), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        record = play(stepping, OURS, trace, platform, connector=longest_output == 1)
        assert list(violations(record, trace)) == []
        shared.extend(len(prompts_of(step, record)) > 1 for step in record.steps)

    check()
    assert sum(shared) > 40


def test_cached_kv_makes_chunks_fewer_and_nothing_else(stepping: ModuleType) -> None:
    """All prompts begin alike, so most of them have cached KV, of which the choice knows nothing."""
    hits: list[bool] = []

    @examples(200)
    @given(prefill_traces(freedoms=[(*may, "cached") for may in MIXED], scope=st.just("a")), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        record = play(stepping, OURS, trace, platform)
        assert list(violations(record, trace)) == []
        hits.extend(rows_of(n, record)[0].start > 0 for n in range(len(record.requests)) if rows_of(n, record))

    check()
    assert sum(hits) > 120


def test_the_stock_scheduler_breaks_the_rules(stepping: ModuleType) -> None:
    """The same traces: a check that cannot fail proves nothing."""
    found: set[str] = set()

    @examples(60)
    @given(prefill_traces(longest_output=12, freedoms=MIXED), ANY_PLATFORM)
    def watch(trace: Trace, platform: Platform) -> None:
        record = play(stepping, STOCK, trace, platform, connector=False)
        found.update(violations(record, trace))

    watch()
    assert found >= {
        "a prompt that must be alone shares its step",
        "a decode row is in a prefill step",
        "no chunk of the contract",
        "chunk boundaries depend on others",
        "more KV promised than exists",
        "KV of others behind a sequence",
    }


@pytest.mark.parametrize(
    ("prompts", "steps"),
    [
        # Whole chunks: what does not fit waits, and nobody passes it.
        ([(10, PACKED), (10, PACKED), (40, PACKED), (5, PACKED)], [[10, 10, 16], [16, 5], [8]]),
        ([(16, PACKED), (16, PACKED), (9, PACKED), (1, PACKED)], [[16, 16], [9, 1]]),
        # Cut anywhere: the step is filled, and the rest comes first in the next one.
        ([(16, FREE), (16, FREE), (9, FREE), (1, FREE)], [[16, 16, 8], [1, 1]]),
        ([(16, FREE), (16, FREE), (9, PACKED), (1, FREE)], [[16, 16], [9, 1]]),
        # What nobody else can use goes to those that may be cut anywhere, in their order.
        ([(70, FREE)], [[40], [30]]),
        ([(70, FREE), (5, FREE)], [[35, 5], [35]]),
        ([(20, PACKED), (30, FREE), (5, FREE)], [[16, 19, 5], [4, 11]]),
        ([(70, PACKED)], [[16], [16], [16], [16], [6]]),
        ([(30, ("chunks",)), (70, ())], [[30], [16], [16], [16], [16], [6]]),
        # A prompt alone ends the step before it, and is the next one.
        ([(5, FREE), (20, ()), (5, FREE), (5, FREE)], [[5], [16], [4], [5, 5]]),
        ([(5, ()), (5, PACKED), (5, PACKED), (5, ())], [[5], [5, 5], [5]]),
        ([(5, ("chunks",)), (5, ("chunks",))], [[5], [5]]),
    ],
)
def test_the_steps_of_some_prompts(
    stepping: ModuleType, prompts: list[tuple[int, tuple[str, ...]]], steps: list[list[int]]
) -> None:
    """The tokens that prompts get, in chunks of 16 and steps of 40."""
    ops = tuple(Arrive(prompt=prompt, freedoms=freedoms) for prompt, freedoms in prompts)
    record = play(stepping, OURS, Trace(slots=8, chunk=16, blocks=40, ops=ops, budget=40), CPU)
    assert [[row.tokens for row in step.rows.values()] for step in record.steps if step.rows] == steps


CACHED = (*PACKED, "cached")


@pytest.mark.parametrize(
    ("packs", "steps"), [(True, [[16, 16, 5], [4, 4, 16, 4], [4]]), (False, [[16, 16, 5], [4], [4], [16], [4], [4]])]
)
def test_a_prompt_with_context_is_alone_where_contexts_must_not_be_packed(
    stepping: ModuleType, monkeypatch: pytest.MonkeyPatch, packs: bool, steps: list[list[int]]
) -> None:
    """A prompt of more than a chunk that may use the cache may find its context there; the last one does."""
    monkeypatch.setattr(load("prefill_node.scheduler"), "packs_contexts", lambda config: packs)
    cached = Arrive(prompt=20, freedoms=CACHED, scope="one")
    ops = (*(Arrive(prompt=20, freedoms=PACKED),) * 2, Arrive(prompt=5, freedoms=PACKED), cached, cached)
    record = play(stepping, OURS, Trace(slots=8, chunk=16, blocks=40, ops=ops, budget=40), CPU)
    assert [[row.tokens for row in step.rows.values()] for step in record.steps if step.rows] == steps


def test_no_trace_packs_a_context_where_that_must_not_be(stepping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[bool] = []

    @examples(100)
    @given(prefill_traces(freedoms=(PACKED, CACHED, (*FREE, "cached")), scope=st.just("a")), ANY_PLATFORM)
    def check(packs: bool, trace: Trace, platform: Platform) -> None:
        monkeypatch.setattr(load("prefill_node.scheduler"), "packs_contexts", lambda config: packs)
        record = play(stepping, OURS, trace, platform, connector=True)
        packed = [step for step in record.steps if len(prompts_of(step, record)) > 1]
        shared.extend(row.start > 0 for step in packed for row in step.rows.values())

    check(False)
    assert set(shared) == {False}
    check(True)
    assert set(shared) == {False, True}


def test_a_step_has_as_many_prompts_as_there_is_kv_for(stepping: ModuleType, platform: Platform) -> None:
    """Five blocks are two prompts of two blocks each. The one that would still fit does not pass the third."""
    ops = (*(Arrive(prompt=20, freedoms=FREE, transfer_steps=5),) * 3, Arrive(prompt=3, freedoms=FREE))
    record = play(stepping, OURS, Trace(slots=8, chunk=64, blocks=5, ops=ops, budget=200), platform)
    assert [list(step.rows) for step in record.steps if step.rows] == [[0, 1], [2, 3]]
    assert not record.left_over


def test_a_prompt_alone_is_not_starved_by_prompts_that_keep_coming(stepping: ModuleType, platform: Platform) -> None:
    several = (Arrive(prompt=40, freedoms=FREE),) * 3
    ops = (*several, Arrive(prompt=20), *several, Run(1), *several, Run(1), *several)
    record = play(stepping, OURS, Trace(slots=8, chunk=16, blocks=60, ops=ops, budget=40), platform)
    steps = [list(step.rows) for step in record.steps if step.rows]
    assert steps[:6] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [3], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("breaks", "message"), [("adds", r"the prefill step of \['0'\] holds \['0', '1'\]"), ("cuts", "no chunk of the")]
)
def test_another_step_than_chosen_is_refused(
    stepping: ModuleType, monkeypatch: pytest.MonkeyPatch, breaks: str, message: str
) -> None:
    ops = (Arrive(prompt=10), Arrive(prompt=10))
    engine = stepping.engine(OURS, Trace(8, 16, 40, ops, budget=40), CPU, role=NodeRole.PREFILL)
    scheduler = engine.scheduler
    if breaks == "adds":
        shows = scheduler.showing_waiting
        monkeypatch.setattr(scheduler, "showing_waiting", lambda shown: shows([*scheduler.waiting]))
    else:
        monkeypatch.setattr(scheduler, "_mamba_block_aligned_split", lambda *_: 8)
    with pytest.raises(RuntimeError, match=message):
        engine.play()


def test_a_context_beside_others_is_refused_where_it_must_not_be(
    stepping: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("prefill_node.scheduler")
    monkeypatch.setattr(module, "packs_contexts", lambda config: False)
    ops = (Arrive(prompt=20, freedoms=PACKED), Arrive(prompt=20, freedoms=PACKED))
    engine = stepping.engine(OURS, Trace(8, 16, 40, ops, budget=40), CPU, role=NodeRole.PREFILL)
    monkeypatch.setattr(engine.scheduler, "_may_share", lambda request: True)
    with pytest.raises(RuntimeError, match=r"prompt 0 has 16 tokens of context, and shares the step of \['0', '1'\]"):
        engine.play()


def test_prompts_say_when_their_computation_began(stepping: ModuleType, platform: Platform) -> None:
    """Prompts of one step began together, and later ones later; vLLM's answer to each carries it."""
    began = load("corun.node.kv.handle").BEGAN_PARAM
    ops = (*(Arrive(prompt=30, freedoms=PACKED),) * 2, Arrive(prompt=30))
    engine = stepping.engine(OURS, Trace(8, 16, 40, ops, budget=40), platform, role=NodeRole.PREFILL)
    found: dict[str, float] = {}
    take = engine._take

    def watched(output: Any) -> None:
        if output.kv_transfer_params:
            found[output.request_id] = output.kv_transfer_params[began]
        take(output)

    engine._take = watched
    engine.play()
    assert sorted(found) == ["0", "1", "2"]
    assert 0 < found["1"] - found["0"] < found["2"] - found["0"]


class Turn:
    """Notes whether the GPU is held."""

    is_held = False

    def hold(self, busy: bool) -> None:
        self.is_held = busy


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("freedoms", [(), FREE], ids=["alone", "packed"])
def test_the_gpu_is_held_while_prompts_are_computed(
    stepping: ModuleType, platform: Platform, aborted: bool, freedoms: tuple[str, ...]
) -> None:
    prompts = [Arrive(prompt=40, freedoms=freedoms), Arrive(prompt=5, freedoms=freedoms)]
    ops = (*prompts, Run(1), *((Abort(0), Abort(1)) if aborted else ()), Run(2), *prompts, Run(30))
    trace = Trace(chunk=16, slots=2, blocks=40, ops=ops, budget=20)
    engine = stepping.engine(OURS, trace, platform, role=NodeRole.PREFILL)
    turn = engine.scheduler.turn = Turn()
    execute, steps = engine.worker.execute, []

    def watched(output: Any, requests: Any) -> Any:
        steps.append(output.total_num_scheduled_tokens)
        assert turn.is_held or not output.total_num_scheduled_tokens
        return execute(output, requests)

    engine.worker.execute = watched
    engine.play()
    assert sum(steps) >= (45 if aborted else 90)
    assert not turn.is_held


def test_the_gpu_is_given_back_when_the_last_prompt_is_aborted(stepping: ModuleType) -> None:
    """vLLM schedules no further step then."""
    engine = stepping.engine(OURS, Trace(chunk=16, slots=2, blocks=40, ops=()), CPU, role=NodeRole.PREFILL)
    turn = engine.scheduler.turn = Turn()
    turn.is_held = True
    engine.scheduler.finish_requests((), load("vllm.v1.request").RequestStatus.FINISHED_ABORTED)
    assert not turn.is_held


def test_a_prompt_waits_for_the_kv_that_others_hold(stepping: ModuleType, platform: Platform) -> None:
    """Five blocks: the second prompt starts once the first one's KV was read; the third, which fits, does not pass."""
    held = Arrive(prompt=50, transfer_steps=12)
    trace = Trace(slots=4, chunk=64, blocks=5, ops=(held, Arrive(prompt=60), Arrive(prompt=3)))
    record = play(stepping, OURS, trace, platform)
    order = [number for step in record.steps for number in step.rows]
    assert order == [0, 1, 2]
    waited = [i for i, step in enumerate(record.steps) if step.rows]
    assert waited[1] - waited[0] > 12
    assert not record.left_over


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("freedoms", [(), FREE], ids=["alone", "packed"])
def test_an_abort_frees_at_every_stage(
    stepping: ModuleType, platform: Platform, steps: int, freedoms: tuple[str, ...]
) -> None:
    """Waiting, between chunks, with its last chunk in flight, and with its KV held for a reader."""
    prompts = (Arrive(prompt=40, transfer_steps=3, freedoms=freedoms), Arrive(prompt=8, freedoms=freedoms))
    trace = Trace(2, 16, 9, (*prompts, Run(steps) if steps else Abort(1), Abort(0)), budget=20)
    record = play(stepping, OURS, trace, platform)
    assert list(violations(record, trace)) == []
