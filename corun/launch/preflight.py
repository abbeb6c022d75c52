"""Whether a cluster would start on this machine: what it needs, and what the machine has. `corun up --check` shows it.

This module starts nothing and loads nothing. The memory that is needed is an estimate from the size of the weights.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.config.extras import ENGINES, VLLM_VERSION, how_to_get
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.machine import Machine, Weights, here, weights
from corun.launch.members import LOOPBACK, ROUTER, members, with_free_ports
from corun.launch.placement import on_own

GIB = 2**30
PROCESS_BYTES = 3 * GIB // 2
"""The memory that a CPU engine takes in addition to weights and KV: torch, vLLM and its buffers."""
GPU_BYTES = 2 * GIB
"""The least GPU memory that an engine takes in addition to weights: CUDA's context, captured graphs, activations and
some KV."""
SHARED_BYTES = 256 * 2**20
"""The shared memory of Ray's store and of the processes of one engine."""
OPEN_FILES = 4096
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NODES = ("prefill", "decode")

State = Literal["ok", "slow", "fails"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a cluster needs."""

    what: str
    needs: str
    has: str
    state: State


def look(spec: ClusterSpec, machine: Machine | None = None, weigh: Callable[[str], Weights] = weights) -> list[Finding]:
    """Return what a cluster needs and what a machine, by default this one, has. weigh: returns the size of a model."""
    return [*_Preflight(spec, machine or here(), weigh).findings()]


def failing(found: Sequence[Finding]) -> list[str]:
    """Return the names of the findings that would make the start fail."""
    return [one.what for one in found if one.state == "fails"]


class _Preflight:
    def __init__(self, spec: ClusterSpec, machine: Machine, weigh: Callable[[str], Weights]) -> None:
        self._spec, self._machine, self._weigh = spec, machine, weigh
        self._weights: dict[str, Weights] = {}  # By pool name, for pools whose model is available.

    def findings(self) -> Iterator[Finding]:
        machine = self._machine
        yield self._engine()
        has = f"not {', '.join(machine.missing)}" if machine.missing else "all"
        yield Finding("packages", "those of a cluster", has, _ok(not machine.missing))
        for pool in self._spec.pools:
            yield self._model(pool)
        yield from self._gpus()
        yield from self._memory()
        yield self._cores()
        has = f"{_gib(machine.shared_memory)} free"
        yield Finding("/dev/shm", _gib(SHARED_BYTES), has, _ok(machine.shared_memory >= SHARED_BYTES))
        few: State = "ok" if machine.open_files >= OPEN_FILES else "slow"
        yield Finding("open files", f"{OPEN_FILES} a process", str(machine.open_files), few)
        taken = [*_taken_ports(self._spec)]
        yield Finding("ports", "free ones", "; ".join(taken) or "free", _ok(not taken))

    def _engine(self) -> Finding:
        needs, engine, version = f"vLLM {VLLM_VERSION}", self._machine.engine, self._machine.engine_version
        if not engine:
            return Finding("engine", needs, f"none; {how_to_get('cpu')}", "fails")
        return Finding("engine", needs, f"{ENGINES[engine]} {version}", _ok(version.split("+")[0] == VLLM_VERSION))

    def _model(self, pool: PoolSpec) -> Finding:
        what = f"model of {pool.name}"
        try:
            found = self._weights[pool.name] = self._weigh(pool.model)
        except UnavailableError as error:
            return Finding(what, pool.model, str(error), "fails")
        if found.to_fetch:
            needs, has = f"{_gib(found.to_fetch)} of disk, to fetch it", f"{_gib(found.room)} free"
            return Finding(what, needs, has, _ok(found.room > found.to_fetch))
        return Finding(what, pool.model, f"{_gib(found.size)} of weights", "ok")

    def _gpus(self) -> Iterator[Finding]:
        """Find out how many GPUs there are, and whether each pool's share of their memory holds its model."""
        gpus = self._machine.gpus
        if self._machine.engine == "cpu":
            unused = f", unused; {how_to_get('gpu')}" if gpus else ""
            yield Finding("GPUs", "none: the engine is for CPUs", f"{len(gpus)}{unused}", "ok")
            return
        try:
            shares = on_own(self._spec.pools, gpus=len(gpus), cores=(), needs_gpus=True).gpus
        except InvalidArgumentError as error:
            yield Finding("GPUs", error.limit, str(len(gpus)), "fails")
            return
        yield Finding("GPUs", "at least 1", str(len(gpus)), _ok(bool(gpus)))
        for pool in self._spec.pools if gpus else ():
            if pool.name in self._weights:
                yield self._gpu_memory(pool, shares[pool.name])

    def _gpu_memory(self, pool: PoolSpec, gpus_each: float) -> Finding:
        config = pool.config("decode")
        needs = self._loaded(pool) // config.tensor_parallel_size + GPU_BYTES
        has = int(min(self._machine.gpus) * min(1.0, gpus_each) * config.gpu_memory_utilization)
        what = f"GPU memory of {pool.name}"
        return Finding(what, f"about {_gib(needs)} a node", f"{_gib(has)} a node", _ok(has >= needs))

    def _memory(self) -> Iterator[Finding]:
        """Find out whether the main memory is large enough. CPU engines keep weights and KV there."""
        if len(self._weights) < len(self._spec.pools):
            return  # The finding about the model already says that its size is not known.
        needs = sum(pool.count(role) * self._each(pool, role) for pool in self._spec.pools for role in _NODES)
        has = self._machine.memory
        yield Finding("memory", f"about {_gib(needs)}", f"{_gib(has)} free", _ok(has >= needs))

    def _each(self, pool: PoolSpec, role: str) -> int:
        """Return the main memory in bytes that one node needs."""
        if self._machine.engine == "gpu":
            return PROCESS_BYTES
        kv: int = pool.config(role).kv_cache_gib * GIB
        return PROCESS_BYTES + kv + self._loaded(pool)

    def _loaded(self, pool: PoolSpec) -> int:
        """Return the size in bytes of the weights in the type that they are loaded as."""
        found = self._weights[pool.name]
        stored, asked = _SIZES.get(found.stored_as, 0), _SIZES.get(pool.config("decode").dtype, 0)
        return found.size * asked // stored if stored and asked else found.size

    def _cores(self) -> Finding:
        nodes = sum(pool.count(role) for pool in self._spec.pools for role in _NODES)
        needed = 1 if self._machine.engine == "gpu" else nodes
        state: State = "ok" if self._machine.cores >= needed else "slow"
        return Finding("cores", f"{needed}, one a CPU node" if needed > 1 else "1", str(self._machine.cores), state)


def _taken_ports(spec: ClusterSpec) -> Iterator[str]:
    """Yield a text for each port that another process listens on."""
    try:
        with_free_ports(spec)
    except InvalidArgumentError as error:
        yield str(error)
    for member in members(spec):
        for name, port in spec.pool(member.pool).ports(member.role, member.index).items():
            if (member.role, name) != (ROUTER, "port") and _is_taken(port):
                yield f"{name} {port} of {member.name} is taken"


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return True
    return False


def _ok(is_ok: bool) -> State:
    return "ok" if is_ok else "fails"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
