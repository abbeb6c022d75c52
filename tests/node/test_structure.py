"""What an engine is refused every freedom for, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.vllm.structure import one_kernel_gates, refused
from corun.types import Freedom
from tests.loading import load

ALL = {Freedom.PACKED, Freedom.CHUNKS, Freedom.MIXED, Freedom.SCORES}


class Linear:
    pass


class GateLinear(Linear):
    pass


class OneKernelGate(GateLinear):
    pass


class Router(GateLinear):
    """A subclass of vLLM's."""


class FusedProjection(Linear):
    def __init__(self, few_rows: bool) -> None:
        self._use_min_latency_gemm = few_rows


def engine(*, modules: tuple[Any, ...] = (Linear(),), **changes: Any) -> tuple[Any, Any]:
    """The parts of a `VllmConfig` that are read, and a model."""
    values: dict[str, Any] = {
        "mode": "VLLM_COMPILE",
        "backend": "inductor",
        "rms_norm": ["native"],
        "fused_add_rms_norm": ["native"],
        "compile_sizes": [],
        "ranges": 1,
        "use_mla": False,
        "head_size": 128,
        **changes,
    }
    compilation = SimpleNamespace(
        mode=SimpleNamespace(name=values["mode"]),
        backend=values["backend"],
        compile_sizes=values["compile_sizes"],
        get_compile_ranges=lambda: [None] * values["ranges"],
    )
    priority = SimpleNamespace(rms_norm=values["rms_norm"], fused_add_rms_norm=values["fused_add_rms_norm"])
    config = SimpleNamespace(
        compilation_config=compilation,
        kernel_config=SimpleNamespace(ir_op_priority=priority),
        model_config=SimpleNamespace(use_mla=values["use_mla"], get_head_size=lambda: values["head_size"]),
    )
    return config, SimpleNamespace(modules=lambda: modules)


@pytest.mark.parametrize(
    "changes",
    [{}, {"head_size": 256}, {"rms_norm": []}, {"modules": (OneKernelGate(), FusedProjection(few_rows=False))}],
)
def test_nothing_is_known_against_a_compiled_engine(changes: dict[str, Any]) -> None:
    assert refused(*engine(**changes)) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "NONE"}, "norms run eagerly"),
        ({"backend": "eager"}, "norms run eagerly"),
        ({"rms_norm": ["vllm_c", "native"]}, "rms_norm is computed by 'vllm_c'"),
        ({"fused_add_rms_norm": ["oink"]}, "fused_add_rms_norm is computed by 'oink'"),
        ({"compile_sizes": [1]}, "compile_sizes"),
        ({"ranges": 2}, "compile_ranges_endpoints"),
        ({"modules": (Linear(), Router())}, "its router (GateLinear)"),
        ({"head_size": 64}, "its heads have 64 numbers"),
        ({"use_mla": True, "mode": "NONE"}, "norms run eagerly"),
        ({"use_mla": True, "modules": (GateLinear(),)}, "its router (GateLinear)"),
        (
            {"use_mla": True, "modules": (FusedProjection(few_rows=True),)},
            "(FusedProjection) has another kernel for up to 16",
        ),
        ({"use_mla": True, "head_size": 576}, "MLA computes contexts, and prompts of few tokens, in other ways"),
    ],
)
def test_what_is_known_refuses_all(changes: dict[str, Any], reason: str) -> None:
    found = refused(*engine(**changes))
    assert found.keys() == ALL
    assert all(reason in words for words in found.values())


def test_gates_with_one_kernel_are_those_that_took_the_place_of_vllms() -> None:
    assert one_kernel_gates(engine(modules=(Linear(), OneKernelGate()))[1])
    assert not one_kernel_gates(engine(modules=(Linear(), GateLinear(), Router()))[1])


def test_vllm_has_what_is_read() -> None:
    """The names, in the vLLM that is installed."""
    compilation = load("vllm.config.compilation")
    assert compilation.CompilationMode.VLLM_COMPILE.name == "VLLM_COMPILE"
    made = compilation.CompilationConfig(compile_ranges_endpoints=[2048])
    assert len(made.get_compile_ranges()) == 1
    priority = load("vllm.config.kernel").IrOpPriorityConfig()
    assert hasattr(priority, "rms_norm")
    assert hasattr(priority, "fused_add_rms_norm")
    assert load("vllm.model_executor.layers.fused_moe.router.gate_linear").GateLinear.__name__ == "GateLinear"
