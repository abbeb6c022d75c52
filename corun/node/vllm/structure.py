"""Parts of a loaded engine whose kernels follow the number of rows of a step, by name: no freedom with them.

Owns: the names. Each was read in vLLM's source or measured; a test by steps may miss them, since it sees only some of
all numbers of rows and lengths. Must not know: how steps are run. It imports no engine, but reads what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from corun.types import Freedom

HEAD_SIZES = (128, 256)
"""The head sizes for which FlashAttention 3 has key tiles of one length for every query length (hopper/tile_size.h).
With 64, tiles are 128 or 192 keys long, by the longest query of the step."""
GATE = "GateLinear"
"""vLLM's router layer, which has other kernels for up to 16 and 32 rows (fused_moe/router/gate_linear.py)."""


def refused(config: Any, model: Any) -> dict[Freedom, str]:
    """Return which freedoms of a prefill node on a GPU are refused by name, with the reason.

    config: the engine's `VllmConfig`. model: the loaded module.
    """
    found: dict[Freedom, str] = {}
    if contexts := _of_contexts(config):
        found[Freedom.PACKED] = contexts
    if reason := next(_of_all(config, model), ""):
        found = dict.fromkeys((Freedom.PACKED, Freedom.CHUNKS, Freedom.MIXED, Freedom.SCORES), reason)
    return found


def _of_all(config: Any, model: Any) -> Iterator[str]:
    """Yield the reasons that concern every freedom of a prefill node."""
    compilation = config.compilation_config
    if compilation.mode.name != "VLLM_COMPILE" or compilation.backend != "inductor":
        yield "norms run eagerly, and vLLM's own kernels for them follow the number of rows"
    priority = config.kernel_config.ir_op_priority
    for name in ("rms_norm", "fused_add_rms_norm"):
        if (kernels := getattr(priority, name)) and kernels[0] != "native":
            yield f"{name} is computed by {kernels[0]!r}, not by what the compiler makes for every number of rows"
    if compilation.compile_sizes or len(compilation.get_compile_ranges()) > 1:
        yield "the compiler made other kernels for some numbers of rows (compile_sizes, compile_ranges_endpoints)"
    if any(GATE in {kind.__name__ for kind in type(module).__mro__} for module in model.modules()):
        yield f"its router ({GATE}) has other kernels for few rows"
    model_config = config.model_config
    if not model_config.use_mla and (size := model_config.get_head_size()) not in HEAD_SIZES:
        sizes = " and ".join(map(str, HEAD_SIZES))
        yield f"its heads have {size} numbers: attention's tiles are known not to follow the query length for {sizes}"


def _of_contexts(config: Any) -> str:
    """Return why several prompts with context must not share a step; empty if they may.

    MLA computes contexts in pieces of its workspace divided by the number of contexts in the step, and multiplies the
    contexts of all prompts together, with as many rows as they have tokens (attention/mla_attention.py).
    """
    return "MLA cuts a prompt's context by how many contexts share the step" if config.model_config.use_mla else ""
