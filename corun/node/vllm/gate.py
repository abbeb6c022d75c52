"""The router layer of a mixture of experts, with one kernel for every number of rows.

Owns: the layer that vLLM makes in place of its own `GateLinear`, through its plug-in point for layers. vLLM's has other
kernels for up to 8 or 16 rows (model_executor/layers/fused_moe/router/gate_linear.py), so a token's experts could
follow its company. Must not know: models, which freedoms follow from that (corun/node/vllm/structure.py).
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear


def _stays_off() -> Any:
    return property(lambda layer: False, lambda layer, wanted: None)


class OneKernelGate(GateLinear):  # type: ignore[misc]
    """Computes every number of rows by the one matrix product that vLLM has for many: what switches the kernels for few
    rows on, when the layer is made and when it is told its results' type, stays off.

    The switches of vLLM's kernels for 32-bit weights are left as they are: a compiled graph in vLLM's cache may have
    them in it. Such weights are refused every freedom (corun/node/vllm/blas.py)."""

    allow_ll_bf16_gemm = _stays_off()
    allow_dsv3_router_gemm = _stays_off()


def use_one_kernel() -> None:
    """Let vLLM make `OneKernelGate` wherever a model asks for a `GateLinear`, unless a plug-in has taken its place."""
    if GateLinear.__name__ not in op_registry_oot:
        PluggableLayer.register_oot(OneKernelGate, name=GateLinear.__name__)
