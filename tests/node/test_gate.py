"""The router layer that vLLM makes in place of its own, in the vLLM that is installed."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corun.node.vllm import structure
from tests.loading import load


@pytest.fixture
def gate() -> Iterator[ModuleType]:
    module = load("corun.node.vllm.gate")
    yield module
    module.op_registry_oot.pop(structure.GATE, None)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(load("vllm.distributed.parallel_state"), "_TP", alone)


def made(gate: ModuleType, torch: Any, **given: Any) -> Any:
    return gate.GateLinear(32, 8, params_dtype=torch.bfloat16, **given)


def test_a_model_gets_it_for_a_gate_linear(gate: ModuleType, torch: Any) -> None:
    assert type(made(gate, torch)).__name__ == structure.GATE
    gate.use_one_kernel()
    gate.use_one_kernel()
    layer = made(gate, torch)
    assert type(layer).__name__ == structure.ONE_KERNEL
    assert structure.one_kernel_gates(torch.nn.ModuleList([layer]))


FEW_ROWS = ("allow_ll_bf16_gemm", "allow_dsv3_router_gemm")
OTHERS = (
    *("allow_specialized_router_gemm", "allow_cublas_router_gemm"),
    *("allow_fp32_router_gemm", "allow_bf16x3_router_gemm"),  # for 32-bit weights
)


def switches(layer: Any) -> dict[str, bool]:
    names = {name for name in (*vars(layer), *dir(type(layer))) if name.startswith("allow_") and name.endswith("_gemm")}
    return {name: getattr(layer, name) for name in names}


def test_no_kernel_for_few_rows_is_switched_on(gate: ModuleType, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when the layer is made nor when it is told the type of its results; all switches of vLLM's are known."""
    monkeypatch.setattr(gate.GateLinear.__init__.__globals__["current_platform"], "is_cuda", lambda: True)
    monkeypatch.setattr(
        gate.GateLinear.__init__.__globals__["current_platform"], "is_device_capability", lambda *_: True
    )
    kernel = load("vllm.model_executor.kernels.linear.cute_dsl.ll_bf16")
    monkeypatch.setattr(kernel, "is_available", lambda: True)
    on_a_hopper = dict.fromkeys((*FEW_ROWS, *OTHERS[:2]), True) | dict.fromkeys(OTHERS[2:], False)
    for stays_off in (False, True):
        if stays_off:
            gate.use_one_kernel()
        told = gate.GateLinear(7168, 256, params_dtype=torch.bfloat16)
        told.set_out_dtype(torch.float32)
        for layer in (told, gate.GateLinear(7168, 256, params_dtype=torch.bfloat16, out_dtype=torch.float32)):
            assert switches(layer) == on_a_hopper | (dict.fromkeys(FEW_ROWS, False) if stays_off else {})
