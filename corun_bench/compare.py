"""Two result files side by side, with what makes them hard to compare: the work of `corun bench compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from corun_bench import results
from corun_bench.metrics import Spread

THROUGHPUT = "output_throughput"
LATENCIES = {"TTFT p50": "median_ttft_ms", "TTFT p99": "p99_ttft_ms", "TPOT p50": "median_tpot_ms"}


def compare(first: results.Result, second: results.Result) -> dict[str, Any]:
    """Return the comparison as plain values for JSON.

    {"differing": {condition: [a, b]}, "rows": [{"workload", "system", metric: [a, b], …, "ratio": […] | None}]}
    A ratio is [median, smallest, largest]. A metric that a file does not have is None.
    """
    a, b = results.group(first["runs"]), results.group(second["runs"])
    rates = results.mismatch_rates(first), results.mismatch_rates(second)
    rows = [
        {
            "workload": workload,
            "system": system,
            **_metrics(a.get((workload, system), []), b.get((workload, system), [])),
            "mismatch_rate": [rate.get((workload, system)) for rate in rates],
        }
        for workload, system in dict.fromkeys([*a, *b])
    ]
    differing = results.differing_conditions(first, second)
    return {"differing": {name: list(pair) for name, pair in differing.items()}, "rows": rows}


def ratio(a: Spread | None, b: Spread | None) -> list[float] | None:
    """Return b / a as [ratio of the medians, smallest, largest]; None if one is missing, or a repeat of `a` gave 0."""
    if a is None or b is None or a.min <= 0:
        return None
    return [b.median / a.median, b.min / a.max, b.max / a.min]


def show(comparison: Mapping[str, Any]) -> None:
    """Print the warnings, then the table."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200  # A file has no width.
    for name, (a, b) in comparison["differing"].items():
        console.print(f"warning: {name} differs: {a} != {b}", style="yellow", soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="a → b", title_justify="left")
    for name in ("workload", "system", "output tok/s", "b/a", *(f"{name} ms" for name in LATENCIES), "mismatches"):
        table.add_column(name, overflow="fold")
    for row in comparison["rows"]:
        table.add_row(*_cells(row))
    console.print(table)


def _metrics(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {key: [results.median_of(runs, key) for runs in (a, b)] for key in (THROUGHPUT, *LATENCIES.values())}
    speeds = results.spread_of(a, THROUGHPUT), results.spread_of(b, THROUGHPUT)
    return {"repeats": [len(a), len(b)], "ratio": ratio(*speeds), **medians}


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = row["ratio"]
    rate = "-" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
    latencies = [_pair(row[key], "{:.1f}") for key in LATENCIES.values()]
    speed, mismatches = _pair(row[THROUGHPUT], "{:.1f}"), _pair(row["mismatch_rate"], "{:.2%}")
    return [row["workload"], row["system"], speed, rate, *latencies, mismatches]


def _pair(values: list[float | None], form: str) -> str:
    return " → ".join("-" if value is None else form.format(value) for value in values)
