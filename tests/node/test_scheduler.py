"""What both roles' schedulers share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from corun.types import NodeRole
from tests.loading import load
from tests.traces import CPU, Trace

SCHEDULERS = {
    NodeRole.PREFILL: "prefill_node.scheduler.PrefillScheduler",
    NodeRole.DECODE: "decode_node.scheduler.FixedSlotScheduler",
}


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("role", SCHEDULERS)
def test_blocks_are_zeroed_where_a_cpu_computes(monkeypatch: pytest.MonkeyPatch, role: NodeRole, on_cpu: bool) -> None:
    """A GPU's runner ends of blocks to be zeroed: vLLM makes it ready for them with such models only that need it."""
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: False)
    monkeypatch.setattr(load("corun.node.vllm.scheduler"), "current_platform", platform)
    trace = Trace(slots=2, chunk=16, blocks=9, ops=())
    scheduler = load("tests.stepping").engine(SCHEDULERS[role], trace, CPU, role=role).scheduler
    assert scheduler.needs_kv_cache_zeroing is on_cpu
