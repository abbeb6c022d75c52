"""The settings that can change a bit: they are set in one place before the device starts and read back afterwards.

Owns: the list of such settings for each platform and role, which other environment variables enter the contract, and
the comparison of all of them with the report of the engine's processes. Must not import vLLM or torch, since it runs
before them: a worker that has loaded torch hands in `torch.backends`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError, UnavailableError
from corun.types import NodeRole

Switch = bool | str | tuple[bool, bool]


def cpu_settings(cores: Sequence[int]) -> dict[str, str]:
    """Return the pinned environment of a CPU engine that computes on `cores`.

    Attention's split-KV depends on the batch, so a decode step must not use it (paper, Section IV-B). An isolated
    prefill could, but then one engine could not do both. vLLM: `envs.py`, `v1/attention/backends/cpu_attn.py`.
    """
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_SGL_KERNEL": "0",  # other kernels for small batches
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
        "TORCHDYNAMO_DISABLE": "1",
        # MKL sums in an order that neither the alignment of its inputs nor the load of the machine can change.
        "MKL_CBWR": "AUTO",
        "MKL_DYNAMIC": "FALSE",
    }


def gpu_settings() -> dict[str, str]:
    """Return the pinned environment of a GPU engine. vLLM: `envs.py`, `model_executor/layers/batch_invariant.py`."""
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_BATCH_INVARIANT": "0",  # It would use other kernels than those that were checked.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it draws its own randomness
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
        "NVIDIA_TF32_OVERRIDE": "0",
        # With such small workspaces cuBLAS cannot split K, so a row's bits do not depend on the number of rows.
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
        # These settings choose kernels by timing them: another start could choose another order of summation.
        "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE": "0",
        "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING": "0",
        "PYTORCH_TUNABLEOP_ENABLED": "0",
        "VLLM_MOE_SKIP_PADDING": "0",  # idle rows would change what the experts compute
        "VLLM_MARLIN_USE_ATOMIC_ADD": "0",  # Atomic adds sum in the order of arrival.
        **ALL_REDUCE,
    }


ALL_REDUCE = {
    # These implementations depend on the message's size, or sum in the NVLink switch (NVLS, NVLink multicast).
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    # With one tree over one channel, every element is summed in the same order of ranks at any place in the batch.
    "NCCL_ALGO": "allreduce:tree",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_P2P_NET_DISABLE": "1",
}

PIECE_TOKENS = 2048
SPLITS = {"none": 1, "own-length": 16}
"""The most pieces that attention cuts the KV of one row into, by the value of `decode_split`."""
SPLIT_POLICY = {
    SPLITS["none"]: "none",
    SPLITS["own-length"]: f"own-length {PIECE_TOKENS} max {SPLITS['own-length']}",
}
"""How attention cuts KV on a GPU, in the contract's words, by the most pieces (corun/node/vllm/attention.py)."""
PROMPT_SPLITS = "prompt_split_policy"
"""The key, in what a colocated node's worker observes, of how attention cuts KV in steps of prompts."""

# These settings change no bits. vLLM keeps the caller's request ids, so that a KV handle names the prefill that the
# router asked for.
PLUMBING = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # no pickle between the engine's processes (v1/serial_utils.py)
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# UCX turns off GET over cuda_ipc if NVML shows no NVLink. Then KV would come over TCP, 200 times slower.
GPU_PLUMBING = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}

CPU_SWITCHES: dict[str, Switch] = {
    "mkldnn.enabled": True,
    "mkldnn.matmul.fp32_precision": "ieee",
    "mkldnn.conv.fp32_precision": "ieee",
    "mkldnn.rnn.fp32_precision": "ieee",
}
"""The switches of a CPU engine, by their names under `torch.backends`. For TF32, only torch's `fp32_precision` is used:
its older `allow_tf32` flags cannot be read once both have been used."""
GPU_SWITCHES: dict[str, Switch] = {
    "cuda.preferred_blas_library": "cublaslt",
    "cuda.matmul.fp32_precision": "ieee",
    "cudnn.conv.fp32_precision": "ieee",
    "cudnn.rnn.fp32_precision": "ieee",
    # Allow neither partial sums in 16 bits nor split-K.
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (False, False),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (False, False),
    "cuda.matmul.allow_fp16_accumulation": False,
    "cudnn.benchmark": False,
    "cudnn.deterministic": True,
}
SWITCHES = {"cpu": CPU_SWITCHES, "cuda": GPU_SWITCHES}

# With these settings, no kernel whose bits could differ is chosen by timing. Kernels that could run side by side are
# always combined, where vLLM would time both ways: on an H200 all kernels between matrix products and attention then
# take three quarters of the time in a step of prompts. `TORCHINDUCTOR_DETERMINISTIC` does not help: Dynamo resets what
# it sets after the first compiled frame (torch/_dynamo/convert_frame.py, torch.use_deterministic_algorithms).
GPU_INDUCTOR = {"deterministic": True, "combo_kernels": True, "benchmark_combo_kernel": False}

MUST_BE_UNSET = (
    "OMP_DYNAMIC",  # It makes the number of threads depend on the load.
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DISABLE_ADDMM_CUDA_LT",
    "VLLM_TUNED_CONFIG_FOLDER",  # It reads kernel settings from files that the contract does not cover.
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)
"""The variables that no contract allows."""

LD_PRELOAD = "LD_PRELOAD"
"""The variable that may replace any function of any library. On CPUs vLLM adds torch's OpenMP and an allocator to it
(platforms/cpu.py)."""
WATCHED = (
    *("VLLM_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "ATEN_", "DISABLE_ADDMM_CUDA_LT"),
    *("CUBLAS", "CUDNN_", "NCCL_", "TRITON_", "FLASHINFER_", "DG_", "NVIDIA_TF32_OVERRIDE"),
    *("OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "GLIBC_TUNABLES", LD_PRELOAD),
    *("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT", "CUTE_DSL_ARCH", "INKLING_", "LAMPORT_"),
)
"""The prefixes of the names of variables that may change a bit. Those that are set enter the contract, except
`HARMLESS`."""
HARMLESS = (
    "*_VERSION",  # labels of container images, like the next line
    *("PYTORCH_BUILD_*", "PYTORCH_HOME", "TORCH_HOME", "TORCH_CUDA_ARCH_LIST", "VLLM_BUILD_*", "VLLM_IMAGE_TAG"),
    # logs, and timeouts
    *("VLLM_LOG*", "VLLM_CONFIGURE_LOGGING", "VLLM_DISABLE_LOG_LOGO", "VLLM_DEBUG_*", "VLLM_USAGE_*"),
    *("VLLM_DO_NOT_TRACK", "VLLM_*_TIMEOUT_S", "VLLM_*_TIMEOUT_SECONDS", "VLLM_RINGBUFFER_WARNING_INTERVAL"),
    *("TORCH_LOGS*", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_*"),
    *("TORCH_NCCL_*", "NCCL_DEBUG*", "NCCL_ASYNC_ERROR_HANDLING", "CUBLAS*_LOG*", "CUDNN_LOG*", "FLASHINFER_LOG*"),
    *("MKL_VERBOSE*", "ONEDNN_VERBOSE*", "DNNL_VERBOSE*", "OMP_DISPLAY_*", "KMP_SETTINGS"),
    # caches
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE*", "VLLM_MEDIA_CACHE*", "VLLM_XLA_CACHE_PATH"),
    *("VLLM_DISABLE_COMPILE_CACHE", "VLLM_COMPILE_CACHE_SAVE_FORMAT", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"),
    *("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "TRITON_CACHE_*", "TRITON_HOME", "DG_JIT_CACHE_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUBIN_DIR"),
    # addresses, secrets, the size of the KV pool
    *("VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_PORT*", "VLLM_SERVICE_*", "VLLM_RPC_BASE_PATH", "VLLM_API_KEY"),
    "VLLM_NIXL_SIDE_CHANNEL_PORT",  # The connector sets it to the node's own.
    *("NCCL_SOCKET_*", "NCCL_IB_*", "VLLM_CPU_KVCACHE_SPACE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    # where threads run; the number of threads is read back
    *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "KMP_AFFINITY", "KMP_BLOCKTIME"),
    "KMP_TPAUSE",
    # read back as a switch of torch
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
    # set by vLLM in every worker (env_override.py, platforms/cpu.py, v1/worker/cpu_worker.py)
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"),
    *("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_DIST_IDENT"),
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    # set by vLLM and torch in GPU workers (utils/jit_monitor.py, torch/_inductor/cpp_builder.py)
    *("TRITON_PRINT_AUTOTUNING", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"),
)
PTXAS = "TRITON_PTXAS_PATH"
"""The variable that a GPU's worker sets itself (`use_ptxas_of_torch`). It counts only if the user set it before."""

_pinned: dict[str, str] = {}


def pin(settings: Mapping[str, str]) -> None:
    """Set each variable for this process and its children. Raises InvalidArgumentError if the environment already holds
    another value, which is refused because it may change bits."""
    for name, value in settings.items():
        found = os.environ.setdefault(name, value)
        if found != value:
            raise InvalidArgumentError(f"environment variable {name}", found, f"must be unset or {value!r}")
        _pinned[name] = value


def use_ptxas_of_torch(installed: Path) -> None:
    """Let Triton make all kernels with torch's ptxas, not with its own, unless the user has chosen one.

    Torch does the same in a process that compiles, but not in one that finds its kernels in a cache
    (torch/_inductor/runtime/compile_tasks.py). So caches, and the moment, would decide which of two versions makes a
    kernel. Call this before Triton compiles anything. installed: the directory of torch's package.
    """
    if (found := installed / "bin" / "ptxas").is_file():
        os.environ.setdefault(PTXAS, str(found))


def own_gpus_first(visible: str, devices: int) -> str:
    """Return CUDA_VISIBLE_DEVICES with this node's GPUs first and the machine's other GPUs after them.

    Only a process that sees the peer's GPU can read the peer's KV over NVLink. A list that names GPUs by UUID is not
    changed.
    """
    own = [name.strip() for name in visible.split(",")]
    if not all(name.isdecimal() for name in own):
        return visible
    return ",".join([*own, *(str(index) for index in range(devices) if str(index) not in own)])


def set_switches(backends: Any, platform: str) -> None:
    """Set every switch of "cpu" or "cuda" in `torch.backends`. Call this before the first matrix product of the
    process."""
    for name, value in SWITCHES[platform].items():
        owner, attribute = _find(backends, name)
        if callable(getattr(owner, attribute)):
            getattr(owner, attribute)(value)
        else:
            setattr(owner, attribute, value)


def read_switches(backends: Any, platform: str) -> dict[str, str]:
    """Return every switch of "cpu" or "cuda" as torch holds it now."""
    found = {}
    for name in SWITCHES[platform]:
        owner, attribute = _find(backends, name)
        value = getattr(owner, attribute)
        if callable(value):  # It sets its argument. Without an argument it returns a member of an enumeration.
            value = value().name.lower()
        elif attribute.endswith("_precision_reduction"):  # The switch is a pair; its second half has another name.
            value = (value, getattr(owner, f"{attribute}_split_k"))
        found[name] = str(value)
    return found


def _find(backends: Any, name: str) -> tuple[Any, str]:
    """Return the object under `torch.backends` that holds a switch, and the attribute's name."""
    *path, attribute = name.split(".")
    return functools.reduce(getattr, path, backends), attribute


def watched(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a bit or are pinned, in the order of their names."""
    return {name: variables[name] for name in sorted(variables) if name in GPU_PLUMBING or _may_move_a_bit(name)}


def _may_move_a_bit(name: str) -> bool:
    return name.startswith(WATCHED) and not any(fnmatchcase(name, harmless) for harmless in HARMLESS)


def environment(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that are not pinned but enter the contract: "NAME=value", in the order of the names. Raises
    InvalidArgumentError if one must be unset, or if its path is no file: no contract can cover a directory."""
    late = {PTXAS} - set(os.environ)
    names = sorted(name for name in variables if _may_move_a_bit(name) and name not in {*_pinned, *late})
    free = {name: variables[name] for name in names}
    if unfit := next((name for name in MUST_BE_UNSET if name in free), None):
        raise InvalidArgumentError(f"environment variable {unfit}", free[unfit], "must be unset")
    found = []
    for name, value in free.items():
        parts = value.replace(":", " ").split() if name == LD_PRELOAD else [value]
        found.append(f"{name}={' '.join(_content(name, part) for part in parts)}")
    return tuple(found)


def _content(name: str, value: str) -> str:
    """Return the value, or the digest of a file that it names: the same path may hold another file elsewhere."""
    path = Path(value).expanduser()
    if not path.is_absolute():
        return value
    if not path.is_file():
        raise InvalidArgumentError(f"environment variable {name}", value, "must be unset, or name a file")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def refuse_changed(seen: Mapping[str, Any]) -> None:
    """Compare the pinned settings with a worker's report after loading (corun/node/vllm/worker.py: `observe`). Raises
    UnavailableError if a variable, vLLM's reading of it, a switch of torch or the number of its threads differs."""
    for name, value in _pinned.items():
        refuse_other(f"environment variable {name}", seen["variables"].get(name, "(unset)"), value)
        refuse_other(f"vllm.envs.{name}", seen["vllm_envs"].get(name, value), value)
    for name, switch in SWITCHES[seen["platform"]].items():
        refuse_other(f"torch.backends.{name}", seen["switches"].get(name, "(unknown)"), str(switch))
    if cores := _pinned.get("VLLM_CPU_OMP_THREADS_BIND"):
        refuse_other("torch.get_num_threads()", str(seen["threads"]), str(len(cores.split(","))))


def refuse_other(name: str, found: str, expected: str) -> None:
    """Raise UnavailableError if a setting does not have the value that it was set to."""
    if found != expected:
        raise UnavailableError(f"{name} is {found!r} in the engine, but was set to {expected!r}")


def blas_policy(seen: Mapping[str, Any]) -> str:
    """Return in words how matrix products are computed, from the settings that were read back."""
    variables, switches = seen["variables"], seen["switches"]
    if seen["platform"] == "cpu":
        return f"fp32 {switches['mkldnn.matmul.fp32_precision']}, MKL_CBWR {variables.get('MKL_CBWR')}"
    sums = switches["cuda.matmul.allow_bf16_reduced_precision_reduction"]
    workspaces = f"{variables.get('CUBLAS_WORKSPACE_CONFIG')} and {variables.get('CUBLASLT_WORKSPACE_SIZE')} KiB"
    library, fp32 = switches["cuda.preferred_blas_library"], switches["cuda.matmul.fp32_precision"]
    return f"{library}, workspaces {workspaces}, fp32 {fp32}, 16-bit sums and split-K {sums}"


def cores(role: NodeRole, threads: int) -> list[int]:
    """Return `threads` of the cores that this process may use; all of them for 0.

    A decode node counts up from the lowest core and a prefill node down from the highest. So on one machine they
    overlap as little as possible, and the first core of each, which runs the engine's busiest thread, is not the
    other's first core. Raises InvalidArgumentError if fewer cores are available.
    """
    available = sorted(os.sched_getaffinity(0))
    if threads > len(available):
        raise InvalidArgumentError("threads", threads, f"must be at most {len(available)}, the cores available here")
    ordered = available if role is NodeRole.DECODE else available[::-1]
    return ordered[: threads or None]
