"""Parts of a loaded engine whose kernels follow the number of rows of a step, by name: no freedom with them.

Owns: the names. Each was read in vLLM's source or measured; a test by steps may miss them, since it sees only some of
all numbers of rows and lengths. Must not know: how steps are run. It imports no engine, but reads what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from corun.types import Freedom, FreedomStatus

HEAD_SIZES = (128, 256)
"""The head sizes for which FlashAttention 3 has key tiles of one length for every query length (hopper/tile_size.h).
With 64, tiles are 128 or 192 keys long, by the longest query of the step."""
CONTEXTS_ALONE = FreedomStatus(
    name=Freedom.CONTEXTS.value,
    refused="each runs alone, since beside others vLLM's MLA may leave out what was computed or cached before",
)
"""What a certificate of `packed` says where contexts must not be packed (`packs_contexts`)."""
GATE, ONE_KERNEL = "GateLinear", "OneKernelGate"
"""vLLM's router layer, which has other kernels for few rows, and the one in its place (corun/node/vllm/gate.py)."""


def refused(config: Any, model: Any) -> dict[Freedom, str]:
    """Return which freedoms of a prefill node on a GPU are refused by name, with the reason.

    config: the engine's `VllmConfig`. model: the loaded module.
    """
    if reason := next(_reasons(config, model), ""):
        return dict.fromkeys((Freedom.PACKED, Freedom.CHUNKS, Freedom.MIXED, Freedom.SCORES), reason)
    if config.model_config.use_mla:
        return dict(_of_mla())
    return {}


def _of_mla() -> Iterator[tuple[Freedom, str]]:
    """Yield what is refused to MLA alone. Whole prompts may be packed: how a chunk is computed follows from its own
    length, whatever is beside it.

    Up to 512 tokens it is computed as rows are, in the latent space. A longer one is not, and the part of its attention
    that lies before it is summed apart (v1/attention/backends/mla/flashattn_mla.py: `reorder_batch_threshold`;
    v1/attention/backends/utils.py: `split_decodes_and_prefills`).
    """
    reason = "MLA computes a chunk by its length, and apart from what is before it: another cut is another sum"
    yield Freedom.CHUNKS, reason
    yield Freedom.SCORES, reason
    yield Freedom.MIXED, "rows of MLA beside prompts have not been looked at"


def packs_contexts(config: Any) -> bool:
    """Return whether a prompt may share a step if a part of it was computed, or found in the cache, before that step.

    With MLA it must not. vLLM 0.26 takes the first prompts of a step for those with context, but its runner orders them
    by their numbers of tokens alone: a context would be left out of the sum (model_executor/layers/attention/
    mla_attention.py: `prefill_tokens_with_context`; v1/worker/gpu/model_runner.py: `sort_batch_req_ids`). The pieces of
    a context also follow from how many contexts the step has.
    """
    return not config.model_config.use_mla


def has_one_tile(config: Any) -> bool:
    """Return whether FlashAttention 3 has key tiles of one length for every query length (hopper/tile_size.h)."""
    model = config.model_config
    has_other = model.use_mla or model.get_sliding_window() is not None or config.cache_config.cache_dtype != "auto"
    return not has_other and model.get_head_size() in HEAD_SIZES


def one_kernel_gates(model: Any) -> bool:
    """Return whether a loaded model has router layers with one kernel for every number of rows."""
    return any(type(module).__name__ == ONE_KERNEL for module in model.modules())


def _reasons(config: Any, model: Any) -> Iterator[str]:
    """Yield the reasons, each of which concerns every freedom of a prefill node."""
    compilation = config.compilation_config
    if compilation.mode.name != "VLLM_COMPILE" or compilation.backend != "inductor":
        yield "norms run eagerly, and vLLM's own kernels for them follow the number of rows"
    priority = config.kernel_config.ir_op_priority
    for name in ("rms_norm", "fused_add_rms_norm"):
        if (kernels := getattr(priority, name)) and kernels[0] != "native":
            yield f"{name} is computed by {kernels[0]!r}, not by what the compiler makes for every number of rows"
    if compilation.compile_sizes or len(compilation.get_compile_ranges()) > 1:
        yield "the compiler made other kernels for some numbers of rows (compile_sizes, compile_ranges_endpoints)"
    for module in model.modules():
        if type(module).__name__ != ONE_KERNEL and GATE in {kind.__name__ for kind in type(module).__mro__}:
            yield f"its router ({GATE}) has other kernels for few rows"
        # models/deepseek_v2.py: `DeepSeekV2FusedQkvAProjLinear`, with the published DeepSeek-V3's sizes in 16 bits.
        if getattr(module, "_use_min_latency_gemm", False):
            yield f"a product of its attention ({type(module).__name__}) has another kernel for up to 16 rows"
    model_config = config.model_config
    if not model_config.use_mla and (size := model_config.get_head_size()) not in HEAD_SIZES:
        sizes = " and ".join(map(str, HEAD_SIZES))
        yield f"its heads have {size} numbers: attention's tiles are known not to follow the query length for {sizes}"
