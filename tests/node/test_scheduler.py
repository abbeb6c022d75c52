"""What both roles' schedulers share."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from corun.types import NodeRole
from tests.loading import load
from tests.traces import ANY_PLATFORM, CPU, Arrive, Platform, Run, Trace, decode_traces, examples

SCHEDULERS = {
    NodeRole.PREFILL: "prefill_node.scheduler.PrefillScheduler",
    NodeRole.DECODE: "decode_node.scheduler.FixedSlotScheduler",
}


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("role", SCHEDULERS)
def test_blocks_are_zeroed_where_a_cpu_computes(
    stepping: ModuleType, monkeypatch: pytest.MonkeyPatch, role: NodeRole, on_cpu: bool
) -> None:
    """A GPU's runner ends of blocks to be zeroed: vLLM makes it ready for them with such models only that need it."""
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: False)
    monkeypatch.setattr(load("corun.node.vllm.scheduler"), "current_platform", platform)
    trace = Trace(slots=2, chunk=16, blocks=9, ops=())
    scheduler = stepping.engine(SCHEDULERS[role], trace, CPU, role=role).scheduler
    assert scheduler.needs_kv_cache_zeroing is on_cpu


@pytest.mark.parametrize("role", SCHEDULERS)
def test_a_step_gets_the_interpreter_back_at_once(stepping: ModuleType, role: NodeRole) -> None:
    sys.setswitchinterval(0.005)  # Python's own.
    stepping.engine(SCHEDULERS[role], Trace(slots=2, chunk=16, blocks=9, ops=()), CPU, role=role)
    assert sys.getswitchinterval() < 0.001


def free_by_ids(scheduler: Any, admitted: Iterable[Any]) -> int:
    """The definition of `free_blocks`, over lists of block ids."""
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for request in admitted:
        held = [block for group in scheduler.kv_cache_manager.get_block_ids(request.request_id) for block in group]
        free -= max(0, scheduler.blocks_of(request) - len(held))
    return free


def test_free_blocks_are_counted_without_a_list_of_them(stepping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step of random traces. A count that forgets what requests hold already is seen to differ."""
    base = load("corun.node.vllm.scheduler").ReservingScheduler
    count, found, forgetful = base.free_blocks, set(), set()

    def watched(scheduler: Any, admitted: Iterable[Any]) -> int:
        requests, free = list(admitted), scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        counted, expected = count(scheduler, requests), free_by_ids(scheduler, requests)
        found.add(counted == expected)
        forgetful.add(free - sum(map(scheduler.blocks_of, requests)) == expected)
        return int(counted)

    monkeypatch.setattr(base, "free_blocks", watched)

    @examples(100)
    @given(decode_traces(), ANY_PLATFORM)
    def check(trace: Trace, platform: Platform) -> None:
        stepping.play(SCHEDULERS[NodeRole.DECODE], trace, platform, role=NodeRole.DECODE)

    check()
    assert (found, forgetful) == ({True}, {True, False})


def test_nothing_is_counted_while_nobody_waits(stepping: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that admits nobody must not cost the more the more requests run."""
    scheduler = stepping.engine(SCHEDULERS[NodeRole.DECODE], Trace(2, 2, 9, ()), CPU, role=NodeRole.DECODE).scheduler
    counted: list[int] = []

    def count(admitted: list[Any]) -> int:
        counted.append(len(admitted))
        return 9

    monkeypatch.setattr(scheduler, "free_blocks", count)
    request = SimpleNamespace(num_prompt_tokens=1, max_tokens=1, cache_salt=None, block_hashes=[], num_tokens=1)
    for running, waiting in ((1, 0), (2, 0), (1, 2)):
        scheduler.running, scheduler.waiting = [request] * running, [request] * waiting
        assert scheduler.admissible() == [request] * waiting
    assert counted == [1], "only where somebody waits"


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("role", SCHEDULERS)
def test_a_request_with_an_id_that_is_known_ends_alone(stepping: ModuleType, role: NodeRole, steps: int) -> None:
    """An assertion of vLLM's would end the engine. The request that had the id first goes on, in whatever state."""
    arrival = Arrive(prompt=20, max_tokens=1 if role is NodeRole.PREFILL else 4, transfer_steps=3)
    engine = stepping.engine(
        SCHEDULERS[role], Trace(slots=2, chunk=16, blocks=9, ops=(arrival, Run(steps))), CPU, role=role
    )
    taken: list[Any] = []
    take = engine._take
    engine._take = lambda output: taken.append(output) or take(output)
    add, again = engine.scheduler.add_request, list[Any]()
    engine.scheduler.add_request = lambda request: again.append(copy.copy(request)) or add(request)
    drain = engine._drain
    engine._drain = lambda: add(*again) or drain()
    record = engine.play()
    refused = [output for output in taken if str(output.finish_reason) == "error"]
    assert [(output.request_id, output.new_token_ids) for output in refused] == [("0", [])]
    assert record.outputs[0] == [7] * arrival.max_tokens
    assert (record.stuck, record.left_over) == (False, [])
