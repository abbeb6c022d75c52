"""Fixed slots on vLLM's own scheduler: random traces, and the same traces on the stock one, which breaks the rules."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings

from corun.types import NodeRole
from tests.loading import load
from tests.traces import CPU, GPU, Abort, Arrive, Platform, Record, Run, Trace, decode_traces, in_order
from tests.traces import violations as common_violations

FIXED = "decode_node.scheduler.FixedSlotScheduler"
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


def violations(record: Record, slots: int) -> Iterator[str]:
    yield from common_violations(record)
    for step in record.steps:
        if step.running > slots:
            yield "more requests than slots"
        if any(row.tokens != 1 for row in step.rows.values()):
            yield "not one token each"
        if any(row.start < record.requests[n].prompt - 1 for n, row in step.rows.items()):
            yield "a prompt token is computed"
        if any(record.requests[n].fails for n in step.rows):
            yield "runs without its KV"
    if not in_order([number for step in record.steps for number in step.loads]):
        yield "not first come, first served"


@PLATFORMS
def test_every_step_is_one_token_for_each_slot(stepping: ModuleType, platform: Platform) -> None:
    @examples(400)
    @given(decode_traces())
    def check(trace: Trace) -> None:
        record = stepping.play(FIXED, trace, platform, role=NodeRole.DECODE)
        assert list(violations(record, trace.slots)) == []

    check()


@PLATFORMS
def test_the_stock_scheduler_breaks_the_rules(stepping: ModuleType, platform: Platform) -> None:
    """The same traces: a check that cannot fail proves nothing."""
    found: set[str] = set()

    @examples(300)
    @given(decode_traces())
    def watch(trace: Trace) -> None:
        record = stepping.play(STOCK, trace, platform, role=NodeRole.DECODE)
        found.update(violations(record, trace.slots))

    watch()
    assert found >= {"more KV promised than exists", "KV of others behind a sequence"}


@PLATFORMS
def test_kv_is_read_while_all_slots_run_and_slots_are_taken_in_order(stepping: ModuleType, platform: Platform) -> None:
    """Of two whose KV has arrived, the first that came gets the slot, though its KV arrived last."""
    ops = (
        Arrive(prompt=16, max_tokens=12),
        Arrive(prompt=16, max_tokens=2, transfer_steps=6),
        Arrive(prompt=16, max_tokens=2, transfer_steps=1),
    )
    record = stepping.play(FIXED, Trace(1, 1, 9, ops), platform, role=NodeRole.DECODE)
    assert list(violations(record, 1)) == []
    assert [step.loads for step in record.steps if step.loads] == [(0, 1, 2)]
    rows = [number for step in record.steps for number in step.rows]
    assert rows == sorted(rows)
    stock = stepping.play(STOCK, Trace(1, 1, 9, (ops[0], Run(4), *ops[1:])), platform, role=NodeRole.DECODE)
    busy = [step for step in stock.steps if 0 in step.rows]
    assert not any(step.loads for step in busy), "the stock scheduler reads nothing while its slots are full"


@PLATFORMS
def test_a_slot_that_is_free_is_taken_at_once(stepping: ModuleType, platform: Platform) -> None:
    """While KV that takes eight steps is read, other samples decode: no step of two slots has fewer rows than two."""
    ops = (Arrive(prompt=16, max_tokens=10, transfer_steps=8),) * 12
    record = stepping.play(FIXED, Trace(2, 2, 99, ops), platform, role=NodeRole.DECODE)
    assert list(violations(record, 2)) == []
    begun = next(i for i, step in enumerate(record.steps) if step.rows)
    ended = max(i for i, step in enumerate(record.steps) if len(step.rows) == 2)
    idle = [i for i, step in enumerate(record.steps[begun:ended]) if step.running < 2]
    assert idle == []


@PLATFORMS
def test_without_the_rule_more_would_run_than_there_are_slots(
    stepping: ModuleType, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = load("decode_node.scheduler").FixedSlotScheduler
    monkeypatch.delattr(fixed, "_try_promote_blocked_waiting_request")
    with pytest.raises(RuntimeError, match="up to 2 requests"):
        stepping.play(FIXED, Trace(2, 2, 99, (Arrive(prompt=9, max_tokens=9),) * 3), platform, role=NodeRole.DECODE)


@PLATFORMS
def test_zeroing_what_is_read_breaks_the_rules(
    stepping: ModuleType, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves out the blocks that it begins to read into: the read may be done before they are zeroed."""
    manager = load("vllm.v1.core.kv_cache_manager").KVCacheManager
    trace = Trace(slots=2, chunk=2, blocks=9, ops=(Arrive(prompt=40, max_tokens=20),) * 2)
    assert list(violations(stepping.play(FIXED, trace, platform, role=NodeRole.DECODE), 2)) == []
    monkeypatch.setattr(manager, "get_zeroing_block_ids_in_range", lambda *_: [])
    record = stepping.play(FIXED, trace, platform, role=NodeRole.DECODE)
    assert set(violations(record, 2)) == {"KV is zeroed that somebody needs"}


@PLATFORMS
def test_recomputing_failed_loads_breaks_the_rules(stepping: ModuleType, platform: Platform) -> None:
    """vLLM's other policy: it would compute the prompt here, were the step not refused."""
    trace = Trace(slots=4, chunk=4, blocks=20, ops=(Arrive(prompt=40, max_tokens=4, fails=True),))
    record = stepping.play(STOCK, trace, platform, role=NodeRole.DECODE, kv_load_failure_policy="recompute")
    assert {"not one token each", "a prompt token is computed"} <= set(violations(record, 4))
    with pytest.raises(RuntimeError, match="decode step"):
        stepping.play(FIXED, trace, platform, role=NodeRole.DECODE, kv_load_failure_policy="recompute")


@PLATFORMS
def test_two_samples_that_would_outgrow_the_kv(stepping: ModuleType, platform: Platform) -> None:
    """Both prompts fit five blocks, both outputs do not: the stock scheduler preempts one and recomputes its prompt."""
    trace = Trace(slots=2, chunk=2, blocks=5, ops=(Arrive(prompt=32, max_tokens=24),) * 2)
    records = [stepping.play(scheduler, trace, platform, role=NodeRole.DECODE) for scheduler in (FIXED, STOCK)]
    assert list(violations(records[0], 2)) == []
    assert max(len(step.rows) for step in records[0].steps) == 1
    assert {"preempted", "a prompt token is computed"} <= set(violations(records[1], 2))


@PLATFORMS
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_frees_at_every_stage(stepping: ModuleType, platform: Platform, steps: int, fails: bool) -> None:
    """Waiting, while its KV is read, and while it decodes; one slot, so another request follows it."""
    first = Arrive(prompt=33, max_tokens=9, transfer_steps=3, fails=fails)
    ops = (first, Arrive(prompt=16, max_tokens=2), Run(steps) if steps else Abort(1), Abort(0))
    record = stepping.play(FIXED, Trace(1, 1, 9, ops), platform, role=NodeRole.DECODE)
    assert list(violations(record, 1)) == []
