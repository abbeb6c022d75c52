"""Isolated prefill on vLLM's own scheduler: random traces, and the same on the stock one, which breaks the rules."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from corun.types import NodeRole
from tests.loading import load
from tests.traces import CPU, GPU, Abort, Arrive, Platform, Record, Row, Run, Trace, in_order, prefill_traces
from tests.traces import violations as common_violations

ISOLATED = "prefill_node.scheduler.IsolatedPrefillScheduler"
STOCK = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
PLATFORMS = pytest.mark.parametrize("platform", [CPU, GPU], ids=["cpu", "gpu"])


def examples(count: int) -> settings:
    """Always the same traces: a failure is one for everybody."""
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.fixture(scope="module")
def stepping() -> ModuleType:
    return load("tests.stepping")


def violations(record: Record, chunk: int) -> Iterator[str]:
    yield from common_violations(record)
    firsts = []
    for step in record.steps:
        prompts = [n for n, row in step.rows.items() if row.start < record.requests[n].prompt]
        if prompts and len(step.rows) > 1:
            yield "a prompt is not alone in its step"
        firsts += [n for n in prompts if step.rows[n].start == 0]
    if not in_order(firsts):
        yield "not first come, first served"
    for number, request in enumerate(record.requests):
        done = [step.rows[number] for step in record.steps if number in step.rows]
        expected = own_rows(request, chunk)
        if done != expected[: len(done)]:
            yield "chunk boundaries depend on others"


def own_rows(request: Arrive, chunk: int) -> list[Row]:
    """All that is computed of a request, from its own length alone: chunks of its prompt, then token by token."""
    starts = range(0, request.prompt, chunk)
    prompt = [Row(start, min(chunk, request.prompt - start)) for start in starts]
    return prompt + [Row(request.prompt + i, 1) for i in range(request.max_tokens)]


@PLATFORMS
@pytest.mark.parametrize("longest_output", [1, 12])
def test_prompts_are_isolated(stepping: ModuleType, platform: Platform, longest_output: int) -> None:
    """With one token of output: a prefill node's traces, with KV that is held until it is read or its lease ends.

    With more: the colocated form of the paper, where requests go on to decode in the same engine.
    """

    @examples(300)
    @given(prefill_traces(longest_output=longest_output))
    def check(trace: Trace) -> None:
        has_connector = longest_output == 1
        record = stepping.play(ISOLATED, trace, platform, role=NodeRole.PREFILL, connector=has_connector)
        assert list(violations(record, trace.chunk)) == []

    check()


@PLATFORMS
def test_the_stock_scheduler_breaks_the_rules(stepping: ModuleType, platform: Platform) -> None:
    """The same traces: a check that cannot fail proves nothing."""
    found: set[str] = set()

    @examples(300)
    @given(prefill_traces(longest_output=12))
    def watch(trace: Trace) -> None:
        record = stepping.play(STOCK, trace, platform, role=NodeRole.PREFILL, connector=False)
        found.update(violations(record, trace.chunk))

    watch()
    assert found >= {
        "a prompt is not alone in its step",
        "chunk boundaries depend on others",
        "more KV promised than exists",
        "KV of others behind a sequence",
    }


@PLATFORMS
def test_two_samples_that_would_outgrow_the_kv(stepping: ModuleType, platform: Platform) -> None:
    """Both prompts fit five blocks, both outputs do not: the stock scheduler starts both and preempts one."""
    trace = Trace(slots=2, chunk=64, blocks=5, ops=(Arrive(prompt=32, max_tokens=24),) * 2)
    records = [
        stepping.play(scheduler, trace, platform, role=NodeRole.PREFILL, connector=False)
        for scheduler in (ISOLATED, STOCK)
    ]
    assert list(violations(records[0], 64)) == []
    assert "preempted" in set(violations(records[1], 64))


@PLATFORMS
def test_a_prompt_waits_for_the_kv_that_others_hold(stepping: ModuleType, platform: Platform) -> None:
    """Five blocks: the second prompt starts once the first one's KV was read; the third, which fits, does not pass."""
    held = Arrive(prompt=50, transfer_steps=12)
    trace = Trace(slots=4, chunk=64, blocks=5, ops=(held, Arrive(prompt=60), Arrive(prompt=3)))
    record = stepping.play(ISOLATED, trace, platform, role=NodeRole.PREFILL)
    order = [number for step in record.steps for number in step.rows]
    assert order == [0, 1, 2]
    waited = [i for i, step in enumerate(record.steps) if step.rows]
    assert waited[1] - waited[0] > 12
    assert not record.left_over


@PLATFORMS
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_at_every_stage(stepping: ModuleType, platform: Platform, steps: int) -> None:
    """Waiting, between chunks, with its last chunk in flight, and with its KV held for a reader."""
    ops = (Arrive(prompt=40, transfer_steps=3), Arrive(prompt=8), Run(steps) if steps else Abort(1), Abort(0))
    record = stepping.play(ISOLATED, Trace(2, 16, 9, ops), platform, role=NodeRole.PREFILL)
    assert list(violations(record, 16)) == []


class Turn:
    """Notes whether the GPU is held."""

    is_held = False

    def hold(self, busy: bool) -> None:
        self.is_held = busy


@PLATFORMS
@pytest.mark.parametrize("aborted", [False, True])
def test_the_gpu_is_held_while_prompts_are_computed(stepping: ModuleType, platform: Platform, aborted: bool) -> None:
    prompts = [Arrive(prompt=40, max_tokens=1), Arrive(prompt=5, max_tokens=1)]
    ops = (*prompts, Run(1), *((Abort(0), Abort(1)) if aborted else ()), Run(2), *prompts, Run(30))
    engine = stepping.engine(ISOLATED, Trace(chunk=16, slots=2, blocks=40, ops=ops), platform, role=NodeRole.PREFILL)
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
    engine = stepping.engine(ISOLATED, Trace(chunk=16, slots=2, blocks=40, ops=()), CPU, role=NodeRole.PREFILL)
    turn = engine.scheduler.turn = Turn()
    turn.is_held = True
    engine.scheduler.finish_requests((), load("vllm.v1.request").RequestStatus.FINISHED_ABORTED)
    assert not turn.is_held
