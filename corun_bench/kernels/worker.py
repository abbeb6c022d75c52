"""A process that measures kernels: `python -m corun_bench.kernels.worker JSON RESULTS` writes JSON lines.

Each result is written at once, so that a crash loses nothing that was measured before. A launch is timed on cold
inputs. This module must not know what other processes measure.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from corun.node.vllm import pin
from corun.observe.nvidia_smi import smi
from corun_bench.conditions import cpu
from corun_bench.kernels.attention import attention
from corun_bench.kernels.functions import FUNCTIONS, Kernel, Place, UnavailableKernelError, of_rows
from corun_bench.kernels.invariance import IDLE, Launch, invariance, verdict
from corun_bench.kernels.plan import RANK, Task
from corun_bench.options import KernelOptions

_RANK_TIMEOUT = timedelta(minutes=5)
_SMI_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
# On a CPU this many inputs take turns, so that they do not stay in its caches.
_TURNS = 3
_WARM_UPS = _FEWEST = 3
# More than the L2 cache of any GPU: what a launch reads comes from memory, as a model's weights do.
_FLUSH_BYTES = 256 << 20
# About a millisecond. While the GPU waits, the host queues the launch and both events: launching is not timed.
_HEAD_START_CYCLES = 2_000_000


def main(arguments: Sequence[str]) -> int:
    spec = json.loads(arguments[0])
    with Path(arguments[1]).open("w", encoding="utf-8") as file:
        for line in [facts(spec["facts"])] if "facts" in spec else measure_all(spec):
            file.write(json.dumps(line) + "\n")
            file.flush()
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


def measure_all(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure every task of a process group; yield the results of rank 0.

    spec: the options, the tasks, the number of ranks, and the file through which the ranks find each other.
    """
    options, ranks, rank = KernelOptions(**spec["options"]), spec["ranks"], int(os.environ.get(RANK, "0"))
    tasks = [Task(**{**task, "shape": tuple(task["shape"]), "rows": tuple(task["rows"])}) for task in spec["tasks"]]
    if any(task.variant == "nosplitk" for task in tasks):
        pin.set_switches(torch.backends, options.device)
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        backend, method = "nccl" if device.type == "cuda" else "gloo", f"file://{spec['meeting']}"
        distributed.init_process_group(backend, init_method=method, rank=rank, world_size=ranks, timeout=_RANK_TIMEOUT)
    with torch.inference_mode():
        for task in tasks:
            for line in measure_task(task, options, Place(device=device, seed=options.seed), ranks):
                if rank == 0:
                    yield line
    if ranks > 1:
        distributed.destroy_process_group()


def measure_task(task: Task, options: KernelOptions, place: Place, ranks: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a line per row count: what was measured, why it failed, or why it does not run here."""
    pool = max(*task.rows, task.places) + 1
    kernel: Kernel | None = None
    for rows in task.rows:
        try:
            kernel = kernel or build(task, place, pool)
            yield {"row": _measured(task, rows, kernel, options, place, pool, ranks)}
        except UnavailableKernelError as error:  # This error comes on all ranks.
            named = {"kernel": task.kernel, "variant": task.variant, "rows": rows, "reason": str(error)}
            yield {"unavailable": named}
        except Exception as error:  # A library may raise anything; the row names it.
            text = " ".join(str(error).split())[:300]
            yield {"row": task.row(rows, error=f"{type(error).__name__}: {text}")}
            if ranks > 1:  # This rank ends: the others are in another collective and would wait for it.
                raise


def build(task: Task, place: Place, pool: int) -> Kernel:
    """Return the kernel of a task, with `pool` different rows."""
    if task.op == "attention":
        return attention(task, place, pool)
    if task.op == "all_reduce":  # Every rank has its own values.
        place = replace(place, seed=place.seed + 1 + distributed.get_rank())
    return of_rows(task, place, pool, FUNCTIONS[task.op])


def _measured(
    task: Task, rows: int, kernel: Kernel, options: KernelOptions, place: Place, pool: int, ranks: int
) -> dict[str, Any]:
    implementation, prepare = kernel
    found = invariance(prepare, rows=rows, pool=pool, draws=options.draws, seed=options.seed, places=task.places)
    chance = random.Random(options.seed)
    idle = [IDLE] * max(0, task.places - rows)
    turns = 1 if place.device.type == "cuda" else _TURNS
    launches = [prepare([*chance.sample(range(pool), rows), *idle]) for _ in range(turns)]

    def barrier() -> None:
        """Wait for all ranks; on a GPU return at once and let the stream wait for them."""
        distributed.all_reduce(torch.zeros(1, device=place.device))

    before = barrier if ranks > 1 else None
    times = durations_us(launches, repeats=options.repeats, budget_s=options.budget_s, before=before)
    return task.row(
        rows,
        implementation=implementation,
        median_us=round(statistics.median(times), 3),
        min_us=round(min(times), 3),
        max_us=round(max(times), 3),
        repeats=len(times),
        batch_invariant=verdict(found["batch"]),
        position_invariant=verdict(found["position"]),
        repeatable=verdict(found["repeat"]),
        batch_equal=found["batch"],
        position_equal=found["position"],
    )


def durations_us(
    launches: Sequence[Launch], *, repeats: int, budget_s: float, before: Callable[[], None] | None = None
) -> list[float]:
    """Time up to `repeats` launches, and at least three, on cold inputs; return the microseconds of each.

    launches: the same kernel on different inputs, which take turns. budget_s: the time in seconds; if all repeats would
    take longer, there are fewer. before: called ahead of each launch. With it the budget does not count, because every
    rank of a collective must repeat equally often.
    """
    output = launches[0]()
    started = time.perf_counter()
    for number in range(_WARM_UPS):
        output = launches[number % len(launches)]()
    if output.is_cuda:
        torch.cuda.synchronize()
    each_s = (time.perf_counter() - started) / _WARM_UPS
    count = repeats if before else max(_FEWEST, min(repeats, int(budget_s / max(each_s, 1e-9))))
    turns = [launches[number % len(launches)] for number in range(count)]
    if output.is_cuda:
        return _on_gpu(turns, output.device, before)
    found = []
    for launch in turns:
        if before:
            before()
        started = time.perf_counter()
        launch()
        found.append((time.perf_counter() - started) * 1e6)
    return found


def _on_gpu(turns: Sequence[Launch], device: torch.device, before: Callable[[], None] | None) -> list[float]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    pairs = []
    for launch in turns:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        if before:
            before()
        start.record()
        launch()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
