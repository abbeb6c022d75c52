"""Tables of a report: cells of text, made of a result's numbers, and the table that `corun bench` prints.

Owns which numbers stand side by side, and what they are compared with. This module must not know HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

from rich import box
from rich.table import Table as Printed
from rich.text import Text

from corun_bench.metrics import aggregate_throughput
from corun_bench.report.looks import compact
from corun_bench.report.views import STD, Results, in_order, is_ablation
from corun_bench.results import Json, leaves, mapping, median_of, number, spread_of, whole

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "e2e"}
_STYLES = {"good": "green", "bad": "red", "dim": "dim"}


class Cell(NamedTuple):
    """Text, and its kind, which decides its colour: "", "good", "bad" or "dim"."""

    text: str
    kind: str = ""


class Row(NamedTuple):
    """A line of a table. `system` names what the row is about; its cells have the names of their columns."""

    system: str
    cells: tuple[Cell, ...]


class Section(NamedTuple):
    """Rows under one heading."""

    title: str
    rows: list[Row]


class Table(NamedTuple):
    """A table. `columns` leaves out the first column, which names the system."""

    columns: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """All repeats of one system on one workload at one concurrency, and the baseline's."""

    results: Results
    system: str
    workload: str
    runs: list[Json]
    base: list[Json]

    def per_gpu(self) -> float | None:
        value, gpus = median_of(self.runs, "output_throughput"), self.results.gpus(self.system)
        return value / gpus if value is not None and gpus else None

    def range(self) -> Cell:
        found = spread_of(self.runs, "output_throughput")
        return range_cell(found.min, found.max) if found and found.repeats > 1 else Cell(NOTHING)

    def ratio(self) -> Cell:
        return ratio_cell(*(median_of(runs, "output_throughput") for runs in (self.runs, self.base)))

    def bits(self) -> Cell:
        return bits_cell(self.results, self.system, self.workload)


_Columns = dict[str, Callable[[_Group], Cell]]


def _median(key: str, shown: Callable[[float | None], Cell] | None = None) -> Callable[[_Group], Cell]:
    return lambda group: (shown or number_cell)(median_of(group.runs, key))


def _throughput_columns(baseline: str) -> _Columns:
    return {
        "output tokens/s": _median("output_throughput"),
        "min … max": _Group.range,
        f"{TIMES} {baseline}": _Group.ratio,
    }


def summary(results: Results, baseline: str) -> Table:
    """Return a row per system over the workloads that all systems ran: the paper's weighted throughput, and bits."""
    systems = [name for name in results.names if not is_ablation(name) and _tasks(results, name)]
    of_all = [set(_tasks(results, name)) for name in systems]
    shared = [name for name in results.workloads if all(name in ran for ran in of_all)]
    base = aggregate(results, baseline, shared)
    rows = []
    for name in systems:
        value, gpus = aggregate(results, name, shared), results.gpus(name)
        failed = sum(whole(run, "failed") for run in results.runs if run["system"] == name)
        cells = {
            "GPUs": count_cell(gpus),
            "workloads": count_cell(len(shared)),
            "output tokens/s": number_cell(value),
            f"{TIMES} {baseline}": ratio_cell(value, base),
            "per GPU": number_cell(value / gpus if value and gpus else None),
            "bits differ": bits_cell(results, name),
            "failed": failed_cell(failed),
        }
        rows.append((name, cells))
    return _table({"": rows}, keep_empty=True)


def aggregate(results: Results, system: str, workloads: Sequence[str]) -> float | None:
    """Return the paper's aggregate of medians over repeats; None unless the system ran all of the workloads."""
    tasks = _tasks(results, system)
    if not workloads or not all(workload in tasks for workload in workloads):
        return None
    return aggregate_throughput(tasks[workload] for workload in workloads)


def _tasks(results: Results, system: str) -> dict[str, dict[str, float]]:
    """Return output throughput and duration of each workload that the system ran, as medians over repeats."""
    found = {}
    for workload in results.workloads:
        runs = results.runs_of(workload, system)
        throughput, duration = median_of(runs, "output_throughput"), median_of(runs, "duration")
        if throughput is not None and duration:
            found[workload] = {"output_throughput": throughput, "duration": duration}
    return found


def throughputs(results: Results, baseline: str) -> Table:
    """Return the throughput of each system on each workload, and whether its bits stayed the same."""
    columns: _Columns = {
        "GPUs": lambda group: count_cell(results.gpus(group.system)),
        **_throughput_columns(baseline),
        "per GPU": lambda group: number_cell(group.per_gpu()),
        "bits differ": _Group.bits,
        "total tokens/s": _median("total_token_throughput"),
        "decode peak tokens/s": _median("peak_decode_tokens_per_s"),
        "slots in use": _median("slot_occupancy", share_cell),
        "padding": _median("padding_waste", share_cell),
        "repeats": lambda group: count_cell(len(group.runs)),
        "failed": lambda group: failed_cell(sum(whole(run, "failed") for run in group.runs)),
    }
    return _by_workload(results, baseline, columns)


def latencies(results: Results, baseline: str) -> Table:
    """Return the latencies in ms, each a median over repeats."""
    columns = {
        f"{title} {statistic}": _median(f"{statistic}_{key}_ms")
        for key, title in _LATENCIES.items()
        for statistic in ("mean", "median", "p90", "p99")
    }
    return _by_workload(results, baseline, columns)


def printed(results: Results, baseline: str) -> Printed:
    """Return the few columns that fit a terminal, speed beside determinism; a workload is named in its first row."""
    latency = {
        f"{_LATENCIES[key]} {statistic} ms": _median(f"{statistic}_{key}_ms")
        for key in ("ttft", "tpot")
        for statistic in ("median", "p99")
    }
    more: _Columns = {**latency, "padding": _median("padding_waste", share_cell), "bits differ": _Group.bits}
    table = _by_workload(results, baseline, {**_throughput_columns(baseline), **more})
    made = Printed("workload", "system", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        made.add_column(column, justify="right")
    for section in table.sections:
        for i, row in enumerate(section.rows):
            cells = (Text(cell.text, _STYLES.get(cell.kind, "")) for cell in row.cells)
            made.add_row(Text("" if i else section.title), Text(row.system), *cells)
    return made


def _by_workload(results: Results, baseline: str, columns: _Columns) -> Table:
    """Return a table with a section per workload and concurrency."""
    sections: dict[str, list[tuple[str, dict[str, Cell]]]] = {}
    for workload in dict.fromkeys(run["workload"] for run in results.runs):
        for concurrency in results.concurrencies(workload):
            base = results.runs_of(workload, baseline, concurrency)
            title = workload + (f", {compact(concurrency)} in flight" if concurrency else "")
            for name in results.names:
                if runs := results.runs_of(workload, name, concurrency):
                    group = _Group(results=results, system=name, workload=workload, runs=runs, base=base)
                    cells = {column: cell(group) for column, cell in columns.items()}
                    sections.setdefault(title, []).append((name, cells))
    return _table(sections)


def _table(sections: dict[str, list[tuple[str, dict[str, Cell]]]], *, keep_empty: bool = False) -> Table:
    """Return a table of (row's name, cells by column), without the columns that are empty in all rows."""
    rows = [cells for section in sections.values() for _, cells in section]
    if not rows:
        return Table()
    full = [keep_empty or any(cells[column].text != NOTHING for cells in rows) for column in rows[0]]
    made = (
        Section(title, [Row(name, tuple(compress(cells.values(), full))) for name, cells in section])
        for title, section in sections.items()
    )
    return Table(tuple(compress(rows[0], full)), tuple(made))


def systems(results: Results) -> Table:
    """Return start-up, memory, handoffs and identity of each system; sizes are in MiB."""
    entries = sorted(results.systems, key=lambda entry: results.names.index(entry["system"]))
    return _table({"": [(entry["system"], _system_cells(entry)) for entry in entries]})


def _system_cells(entry: Json) -> dict[str, Cell]:
    gpus, memory, handoff = (mapping(entry, name) for name in ("gpus", "memory", "handoff"))
    sizes = [value for process in memory if (value := number(memory, process)) is not None]
    split = f"{whole(gpus, 'total')} ({whole(gpus, 'prefill')} + {whole(gpus, 'decode')})"
    fingerprint = str(entry.get("fingerprint") or NOTHING)
    return {
        "GPUs (prefill + decode)": Cell(split if gpus else NOTHING),
        "slots": number_cell(number(entry, "slots")),
        "ready after s": number_cell(number(entry, "ready_s")),
        "RSS MiB": Cell(f"{sum(sizes):,.0f}" if sizes else NOTHING),
        "of which": Cell(_listed(memory), "dim"),
        "GPU memory": Cell(_listed(mapping(entry, "gpu_memory"))),
        "handoffs": number_cell(number(handoff, "count")),
        "failed": failed_cell(whole(handoff, "failed")) if handoff else Cell(NOTHING),
        "handoff ms": number_cell(number(handoff, "mean_ms")),
        "handoff GB/s": number_cell(number(handoff, "gb_per_s")),
        "fingerprint": Cell(fingerprint if len(fingerprint) <= 24 else f"{fingerprint[:23]}…", "dim"),
    }


def kernels(results: Results) -> Table:
    """Return the latency of each kernel and variant, and which of the paper's properties its bits have."""
    entries = results.kernels
    of_std = [entry for entry in entries if entry["variant"] == STD]
    bases = {(entry["kernel"], number(entry, "rows")): number(entry, "median_us") for entry in of_std}
    order = in_order(entry["variant"] for entry in entries)
    sections: dict[str, list[tuple[str, dict[str, Cell]]]] = {entry["kernel"]: [] for entry in entries}
    for entry in sorted(entries, key=lambda entry: order.index(entry["variant"])):
        rows, value = number(entry, "rows"), number(entry, "median_us")
        cells = {
            "rows": number_cell(rows),
            "median µs": number_cell(value),
            "min … max": range_cell(number(entry, "min_us"), number(entry, "max_us")),
            f"{TIMES} {STD}": ratio_cell(value, bases.get((entry["kernel"], rows))),
            "batch-invariant": yes_cell(entry.get("batch_invariant")),
            "position-invariant": yes_cell(entry.get("position_invariant")),
        }
        sections[entry["kernel"]].append((entry["variant"], cells))
    return _table(sections, keep_empty=True)


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


def digits(value: float) -> str:
    """Return a number in few characters, but with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else compact(value)


def number_cell(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else digits(value))


def range_cell(low: float | None, high: float | None) -> Cell:
    return Cell(NOTHING if low is None or high is None else f"{digits(low)} … {digits(high)}", "dim")


def count_cell(value: int) -> Cell:
    return Cell(str(value) if value else NOTHING)


def share_cell(value: float | None) -> Cell:
    return Cell(NOTHING if value is None else f"{value:.1%}")


def ratio_cell(value: float | None, base: float | None) -> Cell:
    return Cell(NOTHING if value is None or not base else f"{value / base:.2f}")


def bits_cell(results: Results, system: str, workload: str | None = None) -> Cell:
    found = results.mismatch(system, workload)
    if found is None:
        return Cell("not run again", "dim")
    return Cell(f"{found.different_bits} of {found.requests}", "bad" if found.different_bits else "good")


def failed_cell(count: int) -> Cell:
    return Cell(str(count), "bad" if count else "dim")


def yes_cell(value: object) -> Cell:
    words = {True: Cell("yes", "good"), False: Cell("no", "bad")}
    return words[value] if isinstance(value, bool) else Cell("not measured", "dim")
