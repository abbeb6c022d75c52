"""The table that `corun bench` prints: a row per workload and system, speed beside determinism."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from corun.bench import results
from corun.bench.metrics import Spread

STD = "std"
NOTHING = "-"


def table(result: results.Result) -> Table:
    """Medians over repeats; the ratio is to std on the same workload."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("workload", "system", "output tok/s", "x std", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "padding"):
        made.add_column(name, justify="left" if name in ("workload", "system") else "right")
    made.add_column("bits differ", justify="right")
    cells = _by_concurrency(result)
    found = {(row["workload"], row["system"]): row for row in result["mismatches"]}
    previous = ""
    for (workload, concurrency, system), runs in cells.items():
        label = workload if concurrency in (None, 0) else f"{workload} at {concurrency}"
        made.add_row(
            "" if label == previous else label,
            system,
            _range(results.spread_of(runs, "output_throughput")),
            _ratio(runs, cells.get((workload, concurrency, STD), [])),
            *(_number(results.spread_of(runs, name)) for name in ("median_ttft_ms", "p99_ttft_ms")),
            *(_number(results.spread_of(runs, name)) for name in ("median_tpot_ms", "p99_tpot_ms")),
            _share(results.spread_of(runs, "padding_waste")),
            _bits(found.get((workload, system))),
        )
        previous = label
    return made


def _by_concurrency(result: results.Result) -> dict[tuple[str, Any, str], list[dict[str, Any]]]:
    """Runs by workload, concurrency and system; workloads stay together, in the file's order."""
    cells: dict[tuple[str, Any, str], list[dict[str, Any]]] = {}
    names = list(dict.fromkeys(run["workload"] for run in result["runs"]))
    for run in sorted(result["runs"], key=lambda run: (names.index(run["workload"]), run["max_concurrency"] or 0)):
        cells.setdefault((run["workload"], run["max_concurrency"], run["system"]), []).append(run)
    return cells


def _range(found: Spread | None) -> str:
    if found is None:
        return NOTHING
    return f"{found.median:.0f}" + (f" ({found.min:.0f}-{found.max:.0f})" if found.max > found.min else "")


def _ratio(runs: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    mine, theirs = (results.spread_of(each, "output_throughput") for each in (runs, base))
    return NOTHING if mine is None or theirs is None or not theirs.median else f"{mine.median / theirs.median:.2f}"


def _number(found: Spread | None) -> str:
    return NOTHING if found is None else f"{found.median:.3g}" if found.median < 100 else f"{found.median:.0f}"


def _share(found: Spread | None) -> str:
    return NOTHING if found is None else f"{found.median:.0%}"


def _bits(row: dict[str, Any] | None) -> str:
    return NOTHING if row is None or not row["requests"] else f"{row['different_bits']} of {row['requests']}"
