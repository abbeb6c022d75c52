"""What both nodes' vLLM workers add: digests of what was loaded, observed settings, KV release, NIXL connections.

Runs inside the engine's worker processes; its methods are called by name through `collective_rpc` and return plain
values. Must not know: gRPC, routers.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    # Importing the CPU worker would replace parts of torch.cuda.
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

CHUNK_BYTES = 64 * 1024 * 1024


class NodeWorker(PlatformWorker):  # type: ignore[misc]
    """A stock worker that can tell what it loaded and manage the KV it holds."""

    weights_digest = ""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self.weights_digest = weights_digest(self.model_runner.get_model())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        # vLLM's connector moves the CPU worker's main thread, which computes, to one reserved core
        # (nixl/base_worker.py): with all cores given to computation that would put two threads on that core.
        bound = os.sched_getaffinity(0)
        super().initialize_from_config(kv_cache_config)
        os.sched_setaffinity(0, bound)

    def observe(self) -> dict[str, Any]:
        """Everything this process can see that may change a bit, after loading."""
        backend = self.model_runner.attn_groups[0][0].backend
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        return {
            "weights_digest": self.weights_digest,
            "attention_backend": backend.get_name(),
            "kv_cache_kinds": sorted({type(group.kv_cache_spec).__name__ for group in groups}),
            "runner": type(self.model_runner).__name__,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "cpu_isa": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            **self._observe_device(),
        }

    def _observe_device(self) -> dict[str, Any]:
        if current_platform.is_cpu():
            split = "on" if envs.VLLM_CPU_ATTN_SPLIT_KV else "off"
            return {"device": _cpu_model(), "driver": "", "cuda": "", "attention_split_kv": split}
        return {
            "device": torch.cuda.get_device_name(self.device),
            "driver": _nvidia_driver(),
            "cuda": torch.version.cuda or "",
            "attention_split_kv": f"max {self._max_splits()} in graphs",
            "graph": self._graphs(),
        }

    def _max_splits(self) -> int:
        return int(self.vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph)

    def _graphs(self) -> str:
        compilation = self.vllm_config.compilation_config
        return f"{compilation.cudagraph_mode.name} {sorted(compilation.cudagraph_capture_sizes)}"

    def release_kv(self, request_id: str) -> None:
        """Frees the KV of a finished prefill that no decode node will read."""
        get_kv_transfer_group().release(request_id)

    def held_kv(self) -> list[str]:
        """The finished prefills whose KV waits to be read."""
        return list(get_kv_transfer_group().held())

    def handoffs(self) -> dict[str, float]:
        """Count, bytes, seconds and failures of the KV reads since start."""
        return asdict(get_kv_transfer_group().handoffs)

    def connect(self, engine_id: str, host: str, port: int, tp_size: int) -> bool:
        """Begins the NIXL handshake with a prefill engine; True once it is complete. Call again until then."""
        return bool(get_kv_transfer_group().connect(engine_id, host, port, tp_size))


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor as loaded, in name order; 64 hex digits.

    Chunks are hashed in parallel threads (hashlib releases the GIL), since one thread would need 10 s for 16 GB.
    """
    total = hashlib.sha256()
    tensors = sorted([*model.named_parameters(), *model.named_buffers()])
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for name, tensor in tensors:
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            for digest in pool.map(lambda chunk: hashlib.sha256(chunk).digest(), _chunks(tensor)):
                total.update(digest)
    return total.hexdigest()


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(CHUNK_BYTES):
            yield memoryview(part.cpu().numpy())


def _cpu_model() -> str:
    return _first_field("/proc/cpuinfo", ("model name", "Model", "Processor")) or platform.processor()


def _nvidia_driver() -> str:
    with open("/proc/driver/nvidia/version") as file:
        return file.readline().split("  ")[1].strip()


def _first_field(path: str, names: Iterable[str]) -> str:
    with open(path) as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    found = {name.strip(): value.strip() for name, value in fields.items()}
    return next((found[name] for name in names if name in found), "")
