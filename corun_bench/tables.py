"""Tables of a report: cells of text, made of a result's numbers, and the table that `corun bench` prints.

Owns which numbers stand side by side, and what they are compared with. This module must not know HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as Printed
from rich.text import Text

from corun_bench.results import (
    STD,
    Json,
    Load,
    Results,
    in_order,
    is_ablation,
    leaves,
    load_of,
    mapping,
    median_of,
    number,
    numbers,
    spread_of,
    whole,
)

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
GOOD = "good requests/s"
"""The column of requests that kept all limits of `--goodput`; it is there where a run had limits."""
WIDTH = 200
"""The least width of what is printed, in characters: a file has no width, and a narrow terminal would cut cells."""
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "e2e"}
_STYLES = {"good": "green", "bad": "red", "dim": "dim"}


class Cell(NamedTuple):
    """Text, and its kind, which decides its colour: "", "good", "bad" or "dim"."""

    text: str
    kind: str = ""


Rows = list[tuple[str, dict[str, Cell]]]
"""The name of each row, and its cells by column."""
Table = dict[str, Rows]
"""The rows of each section, by its title; all rows have the same columns."""


def _without_empty(table: Table) -> Table:
    """Return a table without the columns that are empty in all rows."""
    full = {column for rows in table.values() for _, row in rows for column in row if row[column].text != NOTHING}
    return {
        title: [(name, {column: cell for column, cell in row.items() if column in full}) for name, row in rows]
        for title, rows in table.items()
    }


def summary(results: Results, baseline: str) -> Table:
    """Return a row per system over the workloads that all systems ran: the paper's weighted throughput, and bits."""
    ran = {name: tasks for name in results.names if not is_ablation(name) and (tasks := _tasks(results, name))}
    shared = [workload for workload in results.workloads if all(workload in tasks for tasks in ran.values())]
    base = aggregate(results, baseline, shared)
    rows: Rows = []
    for name in ran:
        value, gpus = aggregate(results, name, shared), results.gpus(name)
        cells = {
            "GPUs": _cell(gpus or None, "d"),
            "workloads": _cell(len(shared) or None, "d"),
            "output tokens/s": _cell(value),
            f"{TIMES} {baseline}": _cell(_over(value, base), ".2f"),
            "per GPU": _cell(_over(value, gpus)),
            "bits differ": _bits(results, name),
            "failed": _failed([run for run in results.runs if run["system"] == name]),
        }
        rows.append((name, cells))
    return {"": rows} if rows else {}


def aggregate(results: Results, system: str, workloads: Sequence[str]) -> float | None:
    """Return the paper's aggregate (Section V) of medians over repeats: throughputs, weighted by the workloads' times.

    It is None unless the system ran all of the workloads.
    """
    tasks = _tasks(results, system)
    if not workloads or not all(workload in tasks for workload in workloads):
        return None
    seconds = sum(tasks[workload][1] for workload in workloads)
    return sum(tasks[workload][0] * tasks[workload][1] for workload in workloads) / seconds


def _tasks(results: Results, system: str) -> dict[str, tuple[float, float]]:
    """Return output throughput and duration of each workload that the system ran, as medians over repeats."""
    found = {}
    for workload in results.workloads:
        runs = results.runs_of(workload, system)
        throughput, duration = median_of(runs, "output_throughput"), median_of(runs, "duration")
        if throughput is not None and duration:
            found[workload] = throughput, duration
    return found


def throughputs(results: Results, baseline: str) -> Table:
    """Return the throughput of each system on each workload, and whether its bits stayed the same."""

    def cells(system: str, workload: str, runs: list[Json], base: list[Json]) -> dict[str, Cell]:
        value, gpus = median_of(runs, "output_throughput"), results.gpus(system)
        return {
            "GPUs": _cell(gpus or None, "d"),
            **_speed(runs, base, baseline),
            "per GPU": _cell(_over(value, gpus)),
            "bits differ": _bits(results, system, workload),
            "total tokens/s": _cell(median_of(runs, "total_token_throughput")),
            GOOD: _cell(median_of(runs, "request_goodput")),
            "decode peak tokens/s": _cell(median_of(runs, "peak_decode_tokens_per_s")),
            "slots in use": _cell(median_of(runs, "slot_occupancy"), ".1%"),
            "padding": _cell(median_of(runs, "padding_waste"), ".1%"),
            "repeats": _cell(len(runs) or None, "d"),
            "failed": _failed(runs),
        }

    return _by_workload(results, baseline, cells)


def latencies(results: Results, baseline: str) -> Table:
    """Return the latencies in ms, each a median over repeats."""

    def cells(system: str, workload: str, runs: list[Json], base: list[Json]) -> dict[str, Cell]:
        return _latency(runs, _LATENCIES, ("mean", "median", "p90", "p99"))

    return _by_workload(results, baseline, cells)


def printed(results: Results, baseline: str) -> Printed:
    """Return the few columns that fit a terminal, speed beside determinism; a workload is named in its first row."""

    def cells(system: str, workload: str, runs: list[Json], base: list[Json]) -> dict[str, Cell]:
        return {
            **_speed(runs, base, baseline),
            **_latency(runs, ("ttft", "tpot"), ("median", "p99"), unit=" ms"),
            GOOD: _cell(median_of(runs, "request_goodput")),
            "padding": _cell(median_of(runs, "padding_waste"), ".1%"),
            "bits differ": _bits(results, system, workload),
        }

    return as_rich(_by_workload(results, baseline, cells), "workload", "system")


def as_rich(table: Table, *names: str) -> Printed:
    """Return a table for a terminal. names: the heads of the columns of section titles and of row names."""
    made = grid(*names, numbers=columns(table))
    for title, rows in table.items():
        for i, (name, row) in enumerate(rows):
            texts = (Text(cell.text, _STYLES.get(cell.kind, "")) for cell in row.values())
            made.add_row(Text("" if i else title), Text(name), *texts)
    return made


def grid(*names: str, numbers: Iterable[str] = ()) -> Printed:
    """Return an empty table for a terminal. names, numbers: the heads of its columns; numbers stand on the right."""
    # A long name goes on in the next line, since a workload without its end could be another one.
    heads = [Column(name, overflow="fold") for name in names] + [Column(name, justify="right") for name in numbers]
    return Printed(*heads, box=box.SIMPLE_HEAD, pad_edge=False)


def console(*, stderr: bool = False) -> Console:
    """Return where results are printed: as they are, on at least `WIDTH` characters."""
    found = Console(stderr=stderr, highlight=False, markup=False)
    found.width = max(found.width, WIDTH)
    return found


def columns(table: Table) -> list[str]:
    """Return the columns of a table, without the first, which has the names of the rows."""
    return list(next(iter(table.values()))[0][1]) if table else []


def _by_workload(results: Results, baseline: str, cells: Callable[..., dict[str, Cell]]) -> Table:
    """Return a table with a section per workload and load.

    cells: makes a row of a system, a workload, the repeats of the one on the other, and the baseline's repeats.
    """
    sections: dict[str, Rows] = {}
    order = list(dict.fromkeys(run["workload"] for run in results.runs))
    for load in sorted({load_of(run) for run in results.runs}, key=lambda load: (order.index(load.workload), *load)):
        runs = [run for run in results.runs if load_of(run) == load]
        of = {name: [run for run in runs if run["system"] == name] for name in results.names}
        rows = [(name, cells(name, load.workload, own, of.get(baseline, []))) for name, own in of.items() if own]
        sections[title_of(load)] = rows
    return _without_empty(sections)


def title_of(load: Load) -> str:
    """Return the name of a workload with its load."""
    title = load.workload + (f", {_digits(load.concurrency)} in flight" if load.concurrency else "")
    return title + (f", {load.rate:g} a second" if load.rate and "rate=" not in load.workload else "")


def systems(results: Results) -> Table:
    """Return start-up, memory, handoffs and identity of each system; sizes are in MiB."""
    rows: Rows = []
    for entry in sorted(results.systems, key=lambda entry: results.names.index(entry["system"])):
        gpus, memory, handoff = (mapping(entry, name) for name in ("gpus", "memory", "handoff"))
        sizes = [value for process in memory if (value := number(memory, process)) is not None]
        split = f"{whole(gpus, 'total')} ({whole(gpus, 'prefill')} + {whole(gpus, 'decode')})"
        fingerprint = str(entry.get("fingerprint") or NOTHING)
        cells = {
            "GPUs (prefill + decode)": Cell(split if gpus else NOTHING),
            "slots": _cell(number(entry, "slots")),
            "ready after s": _cell(number(entry, "ready_s")),
            "RSS MiB": _cell(sum(sizes) if sizes else None, ",.0f"),
            "of which": Cell(_listed(memory), "dim"),
            "GPU memory": Cell(_listed(mapping(entry, "gpu_memory"))),
            "handoffs": _cell(number(handoff, "count")),
            "failed": _failed([handoff]) if handoff else Cell(NOTHING),
            "handoff ms": _cell(number(handoff, "mean_ms")),
            "handoff GB/s": _cell(number(handoff, "gb_per_s")),
            "fingerprint": Cell(fingerprint if len(fingerprint) <= 24 else f"{fingerprint[:23]}…", "dim"),
        }
        rows.append((entry["system"], cells))
    return _without_empty({"": rows} if rows else {})


def kernels(entries: Sequence[Json]) -> Table:
    """Return the latency of each kernel and variant, and which of the paper's properties its bits have."""
    of_std = [entry for entry in entries if entry["variant"] == STD]
    bases = {(entry["kernel"], number(entry, "rows")): number(entry, "median_us") for entry in of_std}
    order = in_order(entry["variant"] for entry in entries)
    sections: dict[str, Rows] = {entry["kernel"]: [] for entry in entries}
    for entry in sorted(entries, key=lambda entry: (number(entry, "rows") or 0, order.index(entry["variant"]))):
        rows, value = number(entry, "rows"), number(entry, "median_us")
        cells = {
            "rows": _cell(rows),
            "median µs": Cell("failed", "bad") if entry.get("error") else _cell(value),
            "min … max": _range(number(entry, "min_us"), number(entry, "max_us")),
            f"{TIMES} {STD}": _cell(_over(value, bases.get((entry["kernel"], rows))), ".2f"),
            "batch-invariant": _invariant(entry, "batch"),
            "position-invariant": _invariant(entry, "position"),
        }
        sections[entry["kernel"]].append((entry["variant"], cells))
    return sections


def flat(values: Json) -> list[tuple[str, str]]:
    """Return nested objects as dotted names and their values as text, without empty values."""
    return [(name, _plain(value)) for name, value in leaves(values) if value not in (None, "", [], {}, ())]


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in flat(values)) or NOTHING


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)


def _latency(runs: list[Json], keys: Iterable[str], statistics: Sequence[str], *, unit: str = "") -> dict[str, Cell]:
    return {
        f"{_LATENCIES[key]} {statistic}{unit}": _cell(median_of(runs, f"{statistic}_{key}_ms"))
        for key in keys
        for statistic in statistics
    }


def _speed(runs: list[Json], base: list[Json], baseline: str) -> dict[str, Cell]:
    found = spread_of(runs, "output_throughput")
    several = found is not None and found.repeats > 1
    return {
        "output tokens/s": _cell(found.median if found else None),
        "min … max": _range(found.min, found.max) if found and several else Cell(NOTHING),
        f"{TIMES} {baseline}": _cell(_over(*(median_of(rows, "output_throughput") for rows in (runs, base))), ".2f"),
    }


def compact(value: float) -> str:
    """Return a number in few characters, as for a tick or a bar: 0.53, 7.4, 128, 12.3k, 1.2M."""
    for limit, unit, suffix in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{compact(value / unit)}{suffix}"
    if abs(value) >= 100 or value == round(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}"


def _digits(value: float) -> str:
    """Return a number in few characters, but with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else compact(value)


def _cell(value: float | None, form: str = "") -> Cell:
    """Return a number as text, or a dash for None. form: a format of Python; empty: few characters."""
    return Cell(NOTHING if value is None else format(value, form) if form else _digits(value))


def _over(value: float | None, unit: float | None) -> float | None:
    """Return a number in multiples of another one; None if one is missing, or the other is 0."""
    return None if value is None or not unit else value / unit


def _range(low: float | None, high: float | None) -> Cell:
    return Cell(NOTHING if low is None or high is None else f"{_digits(low)} … {_digits(high)}", "dim")


def _bits(results: Results, system: str, workload: str | None = None) -> Cell:
    found = results.mismatch(system, workload)
    if found is None:
        return Cell("not run again", "dim")
    different = found["different_bits"]
    return Cell(f"{different} of {found['requests']}", "bad" if different else "good")


def _failed(rows: Sequence[Json]) -> Cell:
    count = sum(whole(row, "failed") for row in rows)
    return Cell(str(count), "bad" if count else "dim")


def _invariant(entry: Json, of: str) -> Cell:
    """Return yes, or no with the number of rows that kept their bits."""
    again = " (nor twice)" if entry.get("repeatable") is False else ""
    if entry.get(f"{of}_invariant") is None:
        return Cell("not measured" + again, "dim")
    if entry[f"{of}_invariant"] is True:
        return Cell("yes" + again, "good")
    counts = numbers(entry, f"{of}_equal")
    return Cell("no" + (f" {counts[0]:.0f}/{counts[1]:.0f}" if len(counts) == 2 else "") + again, "bad")
