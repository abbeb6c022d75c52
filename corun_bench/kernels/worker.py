"""The process that measures: `python -m corun_bench.kernels.worker JSON RESULTS` writes JSON lines.

A kernel library reads its environment when its device starts, so each environment has a process of its own. Every
result is written at once, so that a crash loses nothing that was measured before. Must not know what other processes
measure.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from corun.node.vllm import pin
from corun_bench.conditions import cpu, smi
from corun_bench.kernels import attention, invariance, ops
from corun_bench.kernels.ops import Kernel, Place, UnavailableKernelError
from corun_bench.kernels.plan import RANK, Task, described, empty
from corun_bench.kernels.timing import durations_us

_SMI_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
# On a CPU this many inputs take turns, so that they do not stay in its caches.
_TURNS = 3
_BUILDERS: Mapping[str, Callable[[Task, Place, int], Kernel]] = {
    "attention": attention.build,
    "all_reduce": ops.build_all_reduce,
}

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What to measure, and how."""

    device: str
    """The device, "cuda" or "cpu"."""
    repeats: int
    """The number of timed launches."""
    draws: int
    """The number of random batches whose bits are compared."""
    budget_s: float
    """The longest time for the launches of one row count, in seconds."""
    seed: int
    pinned: bool
    ranks: int
    meeting: str
    """The file through which the ranks find each other."""
    tasks: tuple[Task, ...]


def main(arguments: Sequence[str]) -> int:
    content = json.loads(arguments[0])
    with Path(arguments[1]).open("w", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        if "facts" in content:
            write(facts(content["facts"]))
        else:
            tasks = tuple(
                Task(**{**task, "shape": tuple(task["shape"]), "rows": tuple(task["rows"])})
                for task in content.pop("tasks")
            )
            measure_all(Spec(tasks=tasks, **content), int(os.environ.get(RANK, "0")), write)
    return 0


def facts(device: str) -> dict[str, Any]:
    """Return the facts about the device and the software. device: "auto" takes a GPU if there is one."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    found: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "torch": torch.__version__}
    if not on_gpu:
        return {**found, "name": cpu() or platform.machine(), "devices": 1, "threads": torch.get_num_threads()}
    major, minor = torch.cuda.get_device_capability()
    return {
        **found,
        "name": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "compute_capability": f"{major}.{minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": [", ".join(row) for row in smi(f"--query-gpu={_SMI_QUERY}")],
        "vllm_batch_invariant_matmul": "matmul_persistent (bi)" if major == 8 else "cuBLAS without split-K (nosplitk)",
    }


def measure_all(spec: Spec, rank: int, write: Write) -> None:
    """Measure every task of a spec; rank 0 writes the results."""
    if spec.pinned:
        pin.set_switches(torch.backends, spec.device)
    device = torch.device(spec.device, rank) if spec.device == "cuda" else torch.device("cpu")
    if spec.device == "cuda":
        torch.cuda.set_device(device)
    if spec.ranks > 1:
        ops.join(device, rank, spec.ranks, spec.meeting)
    with torch.inference_mode():
        for task in spec.tasks:
            for line in measure(task, spec, Place(device=device, seed=spec.seed)):
                if rank == 0:
                    write(line)
    if spec.ranks > 1:
        ops.leave()


def measure(task: Task, spec: Spec, place: Place) -> Iterable[dict[str, Any]]:
    """Yield a line per row count: what was measured, why it failed, or why it does not run here."""
    pool = max(*task.rows, task.places) + 1
    try:
        kernel = _BUILDERS.get(task.op, ops.build)(task, place, pool)
    except Exception as error:  # A library may raise anything; the row names it.
        yield from (_failed(task, rows, error) for rows in task.rows)
        _leave_others(error, spec)
        return
    for rows in task.rows:
        try:
            yield {"row": _measured(task, rows, kernel, spec, place, pool)}
        except Exception as error:
            yield _failed(task, rows, error)
            _leave_others(error, spec)


def _leave_others(error: Exception, spec: Spec) -> None:
    """Raise the error again to end this rank: the others are in another collective and would wait for it."""
    if spec.ranks > 1 and not isinstance(error, UnavailableKernelError):  # This error comes on all ranks.
        raise error


def _measured(task: Task, rows: int, kernel: Kernel, spec: Spec, place: Place, pool: int) -> dict[str, Any]:
    found = invariance.measure(
        kernel.prepare, rows=rows, pool=pool, draws=spec.draws, seed=spec.seed, places=task.places
    )
    times = _times(task, rows, kernel, spec, place, pool)
    return {
        **described(task, rows),
        "implementation": kernel.implementation,
        "median_us": round(statistics.median(times), 3),
        "min_us": round(min(times), 3),
        "max_us": round(max(times), 3),
        "repeats": len(times),
        "batch_invariant": found.batch.verdict,
        "position_invariant": found.position.verdict,
        "repeatable": found.repeat.verdict,
        "batch_equal": [found.batch.equal, found.batch.compared],
        "position_equal": [found.position.equal, found.position.compared],
        "error": "",
    }


def _times(task: Task, rows: int, kernel: Kernel, spec: Spec, place: Place, pool: int) -> list[float]:
    chance = random.Random(spec.seed)
    idle = [invariance.IDLE] * max(0, task.places - rows)
    turns = 1 if spec.device == "cuda" else _TURNS
    launches = [kernel.prepare([*chance.sample(range(pool), rows), *idle]) for _ in range(turns)]
    together = (lambda: ops.barrier(place.device)) if spec.ranks > 1 else None
    return durations_us(launches, repeats=spec.repeats, budget_s=spec.budget_s, before=together)


def _failed(task: Task, rows: int, error: Exception) -> dict[str, Any]:
    if isinstance(error, UnavailableKernelError):
        return {"unavailable": {"kernel": task.kernel, "variant": task.variant, "rows": rows, "reason": str(error)}}
    text = " ".join(str(error).split())[:300]
    return {"row": empty(task, rows, f"{type(error).__name__}: {text}")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
