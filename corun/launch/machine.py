"""What this machine has: engine, packages, GPUs, memory, cores, limits; and how large a model's weights are.

This module only reads, and imports nothing heavy. It must not know what a cluster needs (`corun.launch.preflight`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from corun.config.extras import ENGINES, installed_engine
from corun.errors import UnavailableError
from corun.models import NOT_NEEDED, TINY

PACKAGES = ("vllm", "torch", "nixl", "ray", "tokenizers", "safetensors", "aiohttp", "uvloop", "prometheus_client")
"""The packages that the processes of a cluster import."""
MIB = 2**20
TINY_BYTES = 64 * MIB
_SMI_TIMEOUT_S = 20.0
_HUB_TIMEOUT_S = 10.0
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


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


def here() -> Machine:
    """Return what this machine has now."""
    engine = installed_engine()
    return Machine(
        engine=engine,
        engine_version=metadata.version(ENGINES[engine]) if engine else "",
        missing=tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None),
        gpus=tuple(_gpus()),
        memory=min([_available(), *_left_in_container()]),
        shared_memory=_free("/dev/shm"),
        cores=len(os.sched_getaffinity(0)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def _gpus() -> Iterator[int]:
    """Yield the memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, as nvidia-smi counts GPUs. Yield nothing
    where there is no driver."""
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else {one.strip() for one in visible.split(",")}
    for line in done.stdout.splitlines():
        index, uuid, memory = (word.strip() for word in line.split(","))
        if wanted is None or {index, uuid} & wanted:
            yield int(memory) * MIB


def _available() -> int:
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) * 1024


def _left_in_container() -> Iterator[int]:
    """Yield the memory in bytes that the container's limit leaves; nothing where there is no limit."""
    for limit, used in zip(_LIMITS, _USED, strict=True):
        with suppress(OSError, ValueError):  # "max" is no limit.
            yield max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))


def _free(path: str) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


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


def weights(model: str) -> Weights:
    """Return how large a model is. model: a directory, an id on the hub, or the built-in model.

    Raises:
        UnavailableError: the model has no weights, or it is not on this machine and the hub does not answer.
    """
    if model == TINY:
        return Weights(size=TINY_BYTES)
    if (path := Path(model).expanduser()).is_dir():
        return _of_directory(path)
    return _of_hub(model)


def _of_directory(path: Path) -> Weights:
    for pattern in ("*.safetensors", "*.bin"):
        if size := sum(file.stat().st_size for file in path.glob(pattern)):
            return Weights(size=size, stored_as=_stored_as(path))
    raise UnavailableError(f"there are no weights in {path}")


def _stored_as(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(config.get("torch_dtype") or config.get("dtype") or "")


def _of_hub(model: str) -> Weights:
    # This package comes with the engine, which a client does not have.
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415

    try:
        return _of_directory(Path(snapshot_download(model, local_files_only=True, ignore_patterns=NOT_NEEDED)))
    except (OSError, ValueError, UnavailableError):
        pass  # The model is not on this machine, or not completely.
    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=_HUB_TIMEOUT_S).siblings or []
    except Exception as error:  # The hub's client raises its own errors and those of its HTTP library.
        raise UnavailableError(f"{model} is not on this machine, and the hub does not answer: {error}") from error
    size = sum(
        file.size or 0 for file in files if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename
    )
    if not size:
        raise UnavailableError(f"{model} has no safetensors on the hub")
    cache = next(
        path for path in (Path(constants.HF_HUB_CACHE), *Path(constants.HF_HUB_CACHE).parents) if path.exists()
    )
    return Weights(size=size, to_fetch=size, room=_free(str(cache)))
