"""Whether a cluster would start on this machine: what it needs, and what the machine has. `corun up --check` shows it,
and `corun scale` asks for the memory.

This module starts nothing, loads nothing and imports nothing heavy. The memory that is needed is an estimate from the
size of the weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from corun.config.cluster_file import NODES, ClusterSpec, PoolSpec
from corun.config.extras import ENGINES, VLLM_VERSION, how_to_get, installed_engine
from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.members import LOOPBACK, ROUTER, free_ports, members, with_free_ports
from corun.launch.placement import INSTEAD, TURNS, on_own, takes_turns
from corun.models import NOT_NEEDED, SMOLLM2, TINY, smollm2
from corun.models.files import cache
from corun.observe.nvidia_smi import smi

PACKAGES = ("vllm", "torch", "nixl", "ray", "tokenizers", "safetensors", "aiohttp", "uvloop", "prometheus_client")
"""The packages that the processes of a cluster import."""
MIB, GIB = 2**20, 2**30
TINY_BYTES = 64 * MIB
PROCESS_BYTES = 3 * GIB // 2
"""The memory that a CPU engine takes in addition to weights and KV: torch, vLLM and its buffers."""
GPU_BYTES = 2 * GIB
"""The least GPU memory that an engine takes in addition to weights: CUDA's context, captured graphs, activations and
some KV."""
SHARED_BYTES = 256 * MIB
"""The shared memory of Ray's store and of the processes of one engine."""
OPEN_FILES = 4096
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_HUB_TIMEOUT_S = 10.0
CGROUP = Path("/sys/fs/cgroup")
_CONTAINER = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_"),
)
"""The files below `CGROUP` with a container's limit of memory, what it uses and what of that is for what, and how the
names in the last one begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A snapshot of one machine. Sizes are in bytes."""

    engine: str = ""
    """The extra whose engine is installed, cpu or gpu; empty: none."""
    engine_version: str = ""
    missing: tuple[str, ...] = ()
    """The names in `PACKAGES` that cannot be imported."""
    gpus: tuple[int, ...] = ()
    """The memory of each GPU."""
    memory: int = 0
    """The main memory that is still available, within the limit of the container."""
    shared_memory: int = 0
    """The free space in /dev/shm."""
    cores: int = 1
    open_files: int = 0
    """The most files that one process may open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a model, in bytes."""

    size: int
    """The size of the weights as they are stored."""
    stored_as: str = ""
    """The type of the stored weights, as in bfloat16; empty: not known."""
    to_fetch: int = 0
    """The size that must still be fetched from the hub; 0 if the weights are on this machine."""
    room: int = 0
    """The free disk space where fetched weights would be put. It is set only if there is something to fetch."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a cluster needs."""

    what: str
    needs: str
    has: str
    state: Literal["ok", "slow", "fails"]


def here() -> Machine:
    """Return what this machine has now."""
    engine = installed_engine()
    return Machine(
        engine=engine,
        engine_version=metadata.version(ENGINES[engine]) if engine else "",
        missing=tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None),
        gpus=tuple(_gpu_memories()),
        memory=_free_memory(),
        shared_memory=_free("/dev/shm"),
        cores=len(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def _free_memory() -> int:
    """Return the bytes of main memory that are still available, within the limit of the container."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for limit, used, stat, prefix in _CONTAINER:
        with suppress(OSError, ValueError):  # "max" is no limit.
            free = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            # Files that were read count as used, but the kernel gives their memory back. MemAvailable has them, too.
            parts = dict(line.split() for line in (CGROUP / stat).read_text().splitlines())
            files = (parts.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
            memory.append(max(0, free + sum(map(int, files))))
    return min(memory)


def _gpu_memories() -> Iterator[int]:
    """Yield the memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, as nvidia-smi counts GPUs. Yield nothing
    where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else {one.strip() for one in visible.split(",")}
    for index, uuid, memory in smi("--query-gpu=index,uuid,memory.total"):
        if wanted is None or {index, uuid} & wanted:
            # A GPU that shares the machine's memory has no number here.
            yield int(memory) * MIB if memory.isdecimal() else _free_memory()


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def weights(model: str) -> Weights:
    """Return how large a model is. model: a directory, an id on the hub, or a name of `corun.models.NAMED`.

    Raises:
        UnavailableError: the model has no weights, or it is not on this machine and the hub does not answer.
    """
    if model == TINY:
        return Weights(size=TINY_BYTES)
    if model == SMOLLM2:
        return _of_smollm2()
    if (path := Path(os.path.expanduser(model))).is_dir():
        return _of_directory(path)
    # This package comes with the engine, which a client does not have.
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415

    with suppress(OSError, ValueError, UnavailableError):  # The model is not on this machine, or not completely.
        return _of_directory(Path(snapshot_download(model, local_files_only=True, ignore_patterns=NOT_NEEDED)))
    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=_HUB_TIMEOUT_S).siblings or []
    except Exception as error:  # The hub's client raises its own errors and those of its HTTP library.
        raise UnavailableError(f"{model} is not on this machine, and the hub does not answer: {error}") from error
    names = [file for file in files if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename]
    if not (size := sum(file.size or 0 for file in names)):
        raise UnavailableError(f"{model} has no safetensors on the hub")
    return Weights(size=size, to_fetch=size, room=_room(Path(constants.HF_HUB_CACHE)))


def _of_smollm2() -> Weights:
    size = smollm2.WEIGHTS_SIZE
    if smollm2.is_whole(smollm2.path()):
        return Weights(size=size, stored_as="bfloat16")
    # While it is converted, the fetched file, what is in it and the weights are there together.
    return Weights(size=size, stored_as="bfloat16", to_fetch=2 * smollm2.SIZE + size, room=_room(cache()))


def _room(directory: Path) -> int:
    """Return the free space where a directory is, or will be."""
    return _free(str(next(at for at in (directory, *directory.parents) if at.exists())))


def _of_directory(path: Path) -> Weights:
    size = next(
        (size for kind in ("safetensors", "bin") if (size := sum(f.stat().st_size for f in path.glob(f"*.{kind}")))), 0
    )
    if not size:
        raise UnavailableError(f"there are no weights in {path}")
    config = None
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = config if isinstance(config, dict) else {}
    return Weights(size=size, stored_as=str(config.get("torch_dtype") or config.get("dtype") or ""))


def look(spec: ClusterSpec, machine: Machine | None = None, weigh: Callable[[str], Weights] = weights) -> list[Finding]:
    """Return what a cluster needs and what a machine, by default this one, has. weigh: returns the size of a model."""
    machine = machine or here()
    needs = f"vLLM {VLLM_VERSION}"
    if machine.engine:
        has, is_right = f"{ENGINES[machine.engine]} {machine.engine_version}", machine.engine_version.split("+")[0]
        found = [_finding("engine", needs, has, is_right == VLLM_VERSION)]
    else:
        found = [_finding("engine", needs, f"none; {how_to_get('cpu')}", is_ok=False)]
    has = f"not {', '.join(machine.missing)}" if machine.missing else "all"
    found.append(_finding("packages", "those of a cluster", has, not machine.missing))
    loaded: dict[str, int] = {}
    for pool in spec.pools:
        finding, size = _model(pool, weigh)
        found.append(finding)
        if size is not None:
            loaded[pool.name] = size
    found += _gpus(spec, machine, loaded)
    is_on_gpu = machine.engine == "gpu"
    nodes = [(pool, role) for pool in spec.pools for role in NODES for _ in range(pool.count(role))]
    if len(loaded) == len(spec.pools):  # Otherwise the finding about the model says that its size is not known.
        memory = _memory(nodes, loaded, is_on_gpu)
        has = f"{_gib(machine.memory)} free"
        found.append(_finding("memory", f"about {_gib(memory)}", has, machine.memory >= memory))
    threads = [1] if is_on_gpu else [pool.config(role).threads or 1 for pool, role in nodes]
    needs = f"{sum(threads)}, one a thread of the CPU nodes" if sum(threads) > 1 else "1"
    otherwise: Literal["slow", "fails"] = "fails" if max(threads) > machine.cores else "slow"
    found.append(_finding("cores", needs, str(machine.cores), machine.cores >= sum(threads), otherwise))
    has = f"{_gib(machine.shared_memory)} free"
    found.append(_finding("/dev/shm", _gib(SHARED_BYTES), has, machine.shared_memory >= SHARED_BYTES))
    is_enough = machine.open_files >= OPEN_FILES
    found.append(_finding("open files", f"{OPEN_FILES} a process", str(machine.open_files), is_enough, "slow"))
    taken = [*_taken_ports(spec)]
    return [*found, _finding("ports", "free ones", "; ".join(taken) or "free", not taken)]


def lacking_memory(
    before: ClusterSpec, after: ClusterSpec, free: int | None = None, weigh: Callable[[str], Weights] = weights
) -> str:
    """Return what a running cluster lacks of this machine's memory for the nodes that `after` has more; empty: nothing.

    free: the bytes that are available; None: what this machine has now. Where a model's size is not known, nothing is.
    """
    nodes = [
        (pool, role)
        for pool in after.pools
        for role in NODES
        for _ in range(before.pool(pool.name).count(role), pool.count(role))
    ]
    names = {pool.name for pool, _ in nodes}
    sizes = {pool.name: _model(pool, weigh)[1] for pool in after.pools if pool.name in names}
    loaded = {name: size for name, size in sizes.items() if size is not None}
    if len(loaded) < len(names):
        return ""
    needs, free = _memory(nodes, loaded, installed_engine() == "gpu"), _free_memory() if free is None else free
    return f"needs about {_gib(needs)} of memory more, and this machine has {_gib(free)} free" if needs > free else ""


def _memory(nodes: Sequence[tuple[PoolSpec, str]], loaded: Mapping[str, int], is_on_gpu: bool) -> int:
    """Return the main memory in bytes that nodes need. loaded: the bytes of the weights of each pool."""
    # CPU engines keep weights and KV in the main memory.
    in_memory = sum(loaded[pool.name] + pool.config(role).kv_cache_gib * GIB for pool, role in nodes)
    return len(nodes) * PROCESS_BYTES + (0 if is_on_gpu else in_memory)


def _model(pool: PoolSpec, weigh: Callable[[str], Weights]) -> tuple[Finding, int | None]:
    """Return the finding about a pool's model, and the bytes of its weights in the type that they are loaded as; None
    if the model cannot be had."""
    what = f"model of {pool.name}"
    try:
        found = weigh(pool.model)
    except UnavailableError as error:
        return _finding(what, pool.model, str(error), is_ok=False), None
    stored, asked = _SIZES.get(found.stored_as, 0), _SIZES.get(pool.config("decode").dtype, 0)
    loaded = found.size * asked // stored if stored and asked else found.size
    if found.to_fetch:
        needs = f"{_gib(found.to_fetch)} of disk, to fetch it"
        return _finding(what, needs, f"{_gib(found.room)} free", found.room > found.to_fetch), loaded
    return _finding(what, pool.model, f"{_gib(found.size)} of weights"), loaded


def _gpus(spec: ClusterSpec, machine: Machine, loaded: dict[str, int]) -> Iterator[Finding]:
    """Find out how many GPUs there are, and whether each pool's share of their memory holds its model."""
    gpus = machine.gpus
    if machine.engine != "gpu":
        unused = f", unused; {how_to_get('gpu')}" if gpus else ""
        why = "the engine is for CPUs" if machine.engine else "there is no engine yet"
        yield _finding("GPUs", f"none: {why}", f"{len(gpus)}{unused}")
        return
    try:
        shares = on_own(spec.pools, gpus=len(gpus), cores=(), needs_gpus=True).gpus
    except InvalidArgumentError as error:
        yield _finding("GPUs", error.limit, str(len(gpus)), is_ok=False)
        return
    yield _finding("GPUs", "at least 1", str(len(gpus)), bool(gpus))
    if takes_turns(spec.pools, len(gpus)):
        yield _finding("GPU in turns", INSTEAD, TURNS, False, "slow")
    for pool in (pool for pool in spec.pools if gpus and pool.name in loaded):
        needs = loaded[pool.name] // pool.tensor_parallel_size + GPU_BYTES
        parts = (
            min(1.0, shares[pool.name, role]) * pool.config(role).gpu_memory_utilization
            for role in NODES
            if pool.count(role)
        )
        has = int(min(gpus) * min(parts))
        what = f"GPU memory of {pool.name}"
        yield _finding(what, f"about {_gib(needs)} a node", f"{_gib(has)} a node", has >= needs)


def _taken_ports(spec: ClusterSpec) -> Iterator[str]:
    """Yield a text for each port that another process listens on."""
    try:
        with_free_ports(spec)
    except InvalidArgumentError as error:
        yield str(error)
    for member in members(spec):
        for name, port in spec.pool(member.pool).ports(member.role, member.index).items():
            try:
                _ = (member.role, name) == (ROUTER, "port") or free_ports(LOOPBACK, port)
            except InvalidArgumentError:
                yield f"{name} {port} of {member.name} is taken"


def _finding(
    what: str, needs: str, has: str, is_ok: bool = True, otherwise: Literal["slow", "fails"] = "fails"
) -> Finding:
    return Finding(what, needs, has, "ok" if is_ok else otherwise)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
