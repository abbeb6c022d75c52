"""Two result files side by side, with what makes them hard to compare: the work of `corun bench compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from corun_bench import tables
from corun_bench.results import Json, Load, Spread, leaves, load_of, median_of, merge, mismatch_rate, spread_of

THROUGHPUT = "output_throughput"
LATENCIES = {"TTFT p50": "median_ttft_ms", "TTFT p99": "p99_ttft_ms", "TPOT p50": "median_tpot_ms"}


def compare(first: Json, second: Json) -> dict[str, Any]:
    """Return the comparison as plain values for JSON.

    {"differing": {condition: [a, b]}, "rows": [{"workload", "max_concurrency", "request_rate", "system",
     metric: [a, b], …, "ratio": […] | None}]}
    A ratio is [median, smallest, largest]. A metric that a file does not have is None.
    """
    both = [merge({"": one}) for one in (first, second)]
    rows = []
    for cell in dict.fromkeys((*load_of(run), run["system"]) for one in both for run in one.runs):
        workload, concurrency, rate, system = cell
        runs = [[run for run in one.runs if (*load_of(run), run["system"]) == cell] for one in both]
        again = [one.mismatch(system, workload) for one in both]
        rows.append(
            {
                "workload": workload,
                "max_concurrency": round(concurrency) or None,
                "request_rate": rate or None,
                "system": system,
                "repeats": [len(runs[0]), len(runs[1])],
                "ratio": ratio(*(spread_of(of_file, THROUGHPUT) for of_file in runs)),
                **{key: [median_of(of_file, key) for of_file in runs] for key in (THROUGHPUT, *LATENCIES.values())},
                "mismatch_rate": [mismatch_rate(found) if found else None for found in again],
            }
        )
    return {"differing": differing(first, second), "rows": rows}


def differing(first: Json, second: Json) -> dict[str, list[str]]:
    """Return what makes two results hard to compare: hardware, versions, model, settings of systems that both have."""
    systems = [{row["system"] for row in one["systems"]} for one in (first, second)]

    def conditions(result: Json) -> dict[str, str]:
        found = {name: result["conditions"].get(name) for name in ("hardware", "versions", "model")}
        for row in result["systems"]:
            if row["system"] in systems[0] & systems[1]:
                found |= {f"{row['system']}: {name}": row.get(name) for name in ("gpus", "slots", "settings")}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in leaves(found)}

    a, b = conditions(first), conditions(second)
    pairs = {name: [a.get(name, "none"), b.get(name, "none")] for name in sorted(a.keys() | b.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def ratio(a: Spread | None, b: Spread | None) -> list[float] | None:
    """Return b / a as [ratio of the medians, smallest, largest]; None if one is missing, or a repeat of `a` gave 0."""
    if a is None or b is None or a.min <= 0:
        return None
    return [b.median / a.median, b.min / a.max, b.max / a.min]


def show(comparison: Mapping[str, Any]) -> None:
    """Print the warnings, then the table."""
    console = tables.console()
    for name, (a, b) in comparison["differing"].items():
        console.print(f"warning: {name} differs: {a} != {b}", style="yellow", soft_wrap=True)
    heads = (f"{name} ms" for name in LATENCIES)
    table = tables.grid("workload", "system", "output tok/s", "b/a", *heads, "mismatches")
    table.title, table.title_justify = "a → b", "left"
    for row in comparison["rows"]:
        found = row["ratio"]
        rate = "-" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"
        latencies = [_pair(row[key], "{:.1f}") for key in LATENCIES.values()]
        speed, mismatches = _pair(row[THROUGHPUT], "{:.1f}"), _pair(row["mismatch_rate"], "{:.2%}")
        title = tables.title_of(Load(row["workload"], row["max_concurrency"] or 0, row["request_rate"] or 0))
        table.add_row(title, row["system"], speed, rate, *latencies, mismatches)
    console.print(table)


def _pair(values: list[float | None], form: str) -> str:
    return " → ".join("-" if value is None else form.format(value) for value in values)
