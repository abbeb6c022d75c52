"""`corun bench kernels`: what each kernel costs, and whether its bits depend on the batch, on this machine's device."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from corun.config.extras import needs_extra

_WIDTH = 110  # The width of the output in a file or a pipe.
_YES_NO = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Measure the time and the batch invariance of kernels.

    A kernel is batch-invariant if a row's bits do not depend on the batch that it is computed in, and
    position-invariant if they do not depend on the row's place in the batch.

    examples:
      corun bench kernels                                        the built-in tiny model's shapes
      corun bench kernels --model /models/Qwen3-8B -o kernels.json
      corun bench kernels --kernels matmul --rows 1 256

    The exit code is 1 if a kernel failed. A kernel that the device does not have is listed, and is not a failure.
    """

    model: str = "tiny"
    """Directory with the config.json to take the shapes from; no weights are read. "tiny" is built in."""
    rows: tuple[int, ...] = (1, 16, 64, 256, 2048)
    """Batch sizes to measure, in rows."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to measure; auto: a GPU if there is one."""
    kernels: tuple[Literal["mean", "rms_norm", "softmax", "matmul", "attention", "all_reduce"], ...] = ()
    """Kernels to measure; by default all."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks; the shapes of one of them are measured."""
    slots: int = 256
    """Rows that the variant "fixed" always computes: the slots of a decode step."""
    context: int = 0
    """Tokens of the longest sequence that attention reads; 0: 2048 on a GPU, 512 on a CPU."""
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ()
    """Types of the inputs; by default bfloat16 on a GPU, both on a CPU."""
    ranks: int = 0
    """Ranks of the all-reduce; 0: every GPU, up to 8, or three processes on a CPU."""
    repeats: int = 0
    """Timed launches of each kernel at each row count; 0: 100 on a GPU, 10 on a CPU."""
    draws: int = 3
    """Random batches whose bits are compared, at each row count."""
    budget_s: float = 2.0
    """Most seconds for the timed launches of one row count; a slow kernel gets fewer launches, but at least three."""
    seed: int = 0
    """Seed of the random inputs."""
    timeout_s: float = 1800.0
    """Longest time for one process, in seconds; there are about ten processes."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PATH")] = None
    """JSON file to write the report to."""

    def run(self) -> int:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        progress = Console(stderr=True)
        with needs_extra("corun bench kernels", "gpu"):
            kernels = importlib.import_module("corun_bench.kernels.runner")
        options = {name: getattr(self, name) for name in kernels.Options.__slots__}
        report = kernels.measure(kernels.Options(**options), lambda text: progress.print(text, style="dim"))
        if self.output is not None:
            self.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        show(report, console)
        print(json.dumps(report))
        return 1 if any(row["error"] for row in report["kernels"]) else 0


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the conditions, the tables, and what could not be measured."""
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
    ordered = sorted(enumerate(rows), key=lambda pair: _key(rows, *pair))
    previous = None
    for _, row in ordered:
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


def _key(rows: Sequence[Mapping[str, Any]], index: int, row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a sort key: kernels in the report's order, then row counts, then variants in the report's order."""
    first = next(place for place, other in enumerate(rows) if other["kernel"] == row["kernel"])
    return first, row["rows"], index


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
