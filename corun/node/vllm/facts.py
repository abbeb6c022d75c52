"""Makes a node's contract from the observations of its engine's workers, vLLM's configuration and the model's files.

Owns: which files, libraries and plugins are facts. Must not know: how an engine is started (corun/node/vllm/start.py),
what changes a bit in a process (corun/node/vllm/pin.py, corun/node/vllm/worker.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from corun.config.extras import ENGINES
from corun.config.fields import NodeConfig
from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.node.vllm import pin
from corun.node.vllm.start import EngineFacts, vllm_distribution
from corun.types import NodeRole

PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.logits_processors", "vllm.platform_plugins")
"""The entry points that vLLM calls by itself (plugins/__init__.py, v1/sample/logits_processor/__init__.py)."""
CONFIG_FILES = ("config.json", "params.json")
QUANTIZATION_FILES = ("quant_config.json", "quantize_config.json", "quantization_config.json")
"""The endings of the names of the files from which vLLM reads a quantization (model_loader/weight_utils.py:
`get_quant_config`)."""
LIBRARIES = (
    # kernels, and the packages that compile them
    *("apache-tvm-ffi", "cuda-tile", "deep-ep", "deep-gemm", "fbgemm-gpu", "flash-attn", "flashinfer-cubin"),
    *("flashinfer-jit-cache", "flashinfer-python", "humming-kernels", "intel-openmp", "mkl", "nvidia-cublas"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "nvidia-cusparselt-cu13"),
    *("nvidia-cutlass-dsl", "nvidia-nccl-cu13", "nvidia-nvjitlink", "quack-kernels", "tilelang", "tokenspeed-triton"),
    *("torchao", "triton", "xformers"),
    # what decides which tokens a constrained row may draw (decode_node/grammar.py)
    "llguidance",
    # packages that turn a model's files into settings, or compute the model itself if vLLM has no code for it
    *("compressed-tensors", "transformers"),
)


def model_contract(llm: Any, config: NodeConfig, seen: Mapping[str, Any]) -> ModelContract:
    """Return the part of the contract that prefill and decode nodes share."""
    model = llm.vllm_config.model_config
    cache = llm.vllm_config.cache_config
    return ModelContract(
        weights_digest=seen["weights_digest"],
        tokenizer_digest=file_digest(Path(model.model) / "tokenizer.json"),
        tokenizers=metadata.version("tokenizers"),
        config_digest=config_digest(Path(model.model)),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization or "none",
        kv_cache_dtype=str(cache.cache_dtype),
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        tensor_parallel_size=config.tensor_parallel_size,
        engine=vllm_distribution(),
        torch=seen["torch"],
        kernels=_kernel_libraries(seen),
        plugins=_plugins(),
        device=seen["device"],
        driver=seen["driver"],
        cuda=seen["cuda"],
        cpu_isa=f"{seen['machine']} {seen['cpu_isa']}",
        cpu_features=tuple(seen["cpu_features"]),
        cpu_caches=tuple(seen["cpu_caches"]),
        threads=seen["threads"],
        blas_policy=pin.blas_policy(seen),
        environment=pin.environment(seen["variables"]),
    )


def prefill_contract(
    model: ModelContract, seen: Mapping[str, Any], chunk_size: int, buckets: tuple[int, ...]
) -> Contract:
    part = PrefillContract(
        attention_backend=seen["attention_backend"],
        runner=seen["runner"],
        chunk_size=chunk_size,
        buckets=buckets,
        split_policy=seen.get(pin.PROMPT_SPLITS, seen["split_policy"]),
        multiprocessors=seen["multiprocessors"],
        traced_tokens=seen["traced_tokens"],
        scorer=seen["scorer"],
    )
    return Contract(role=NodeRole.PREFILL, model=model, prefill=part, decode=None)


def decode_contract(model: ModelContract, seen: Mapping[str, Any], facts: EngineFacts) -> Contract:
    """Return a decode node's contract; `facts` holds the end tokens that its requests get."""
    part = DecodeContract(
        attention_backend=seen["attention_backend"],
        runner=seen["runner"],
        sampler=seen["sampler"],
        slots=seen["slots"],
        split_policy=seen["split_policy"],
        graph=seen.get("graph", "none"),
        multiprocessors=seen["multiprocessors"],
        traced_tokens=seen["traced_tokens"],
        eos_token_ids=facts.eos_token_ids,
    )
    return Contract(role=NodeRole.DECODE, model=model, prefill=None, decode=part)


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file, 64 hex digits; empty if the model has no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def config_digest(directory: Path) -> str:
    """Return SHA-256 over the files that vLLM reads a model's shape and quantization from; 64 hex digits."""
    names = sorted(file.name for file in directory.glob("*.json"))
    read = (name for name in names if name in CONFIG_FILES or name.endswith(QUANTIZATION_FILES))
    return hashlib.sha256("".join(f"{name} {file_digest(directory / name)}\n" for name in read).encode()).hexdigest()


def _kernel_libraries(seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the installed libraries as "name version", the kernel packages that vLLM found usable, and on a GPU how
    the compiler is told to make kernels (`base` has read it back)."""
    versions = {found.name: found.version for found in metadata.distributions()}
    installed = (f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    used = (f"{name} is used" for name in seen["kernel_packages"])
    told = (f"{name} {value}" for name, value in sorted(pin.GPU_INDUCTOR.items()) if seen["platform"] != "cpu")
    return (*installed, *used, *(f"inductor {setting}" for setting in told))


def _plugins() -> tuple[str, ...]:
    """Return the installed plugins that vLLM runs, except its own, as "group name object distribution version"."""
    found = [entry for group in PLUGIN_GROUPS for entry in metadata.entry_points(group=group)]
    owned = [(entry, entry.dist) for entry in found if entry.dist and entry.dist.name not in ENGINES.values()]
    return tuple(sorted(f"{one.group} {one.name} {one.value} {dist.name} {dist.version}" for one, dist in owned))
