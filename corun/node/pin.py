"""Environment settings that can move a bit, set in one place before the device starts and checked.

Owns: the list of such settings for each platform and role. Must not know: vLLM's or torch's Python API, so that it can
run before either is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from corun.cluster import NodeRole
from corun.errors import InvalidArgumentError


def cpu_settings(role: NodeRole, cores: Sequence[int]) -> dict[str, str]:
    """Pinned environment of a CPU engine that computes on `cores`.

    Attention's split-KV depends on the batch; an isolated prefill always is its own batch and keeps it (paper,
    Section IV-A), a decode step must not have it (Section IV-B). vLLM: `envs.py`, `v1/attention/backends/cpu_attn.py`.
    """
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_ATTN_SPLIT_KV": "1" if role is NodeRole.PREFILL else "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "TORCHDYNAMO_DISABLE": "1",
    }


def gpu_settings(role: NodeRole) -> dict[str, str]:
    """Pinned environment of a GPU engine. vLLM: `envs.py`."""
    return {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_BATCH_INVARIANT": "0",
        "NVIDIA_TF32_OVERRIDE": "0",
    }


# Not about bits. Request ids stay the caller's, so that a KV handle names the prefill that the router asked for.
PLUMBING = {
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def pin(settings: Mapping[str, str]) -> None:
    """Sets each variable for this process and its children.

    Raises:
        InvalidArgumentError: the environment already holds another value; it would change bits, so it is refused.
    """
    for name, value in settings.items():
        found = os.environ.setdefault(name, value)
        if found != value:
            raise InvalidArgumentError(f"environment variable {name}", found, f"must be unset or {value!r}")


def cores(role: NodeRole, threads: int) -> list[int]:
    """`threads` of the cores this process may use; all of them for 0.

    A decode node counts up and a prefill node down: on one machine they meet as late as possible, and the first core
    of each, which carries the engine's busiest thread, is not the other's.

    Raises:
        InvalidArgumentError: fewer cores are available.
    """
    available = sorted(os.sched_getaffinity(0))
    if threads > len(available):
        raise InvalidArgumentError("threads", threads, f"must be at most {len(available)}, the cores available here")
    ordered = available if role is NodeRole.DECODE else available[::-1]
    return ordered[: threads or None]
