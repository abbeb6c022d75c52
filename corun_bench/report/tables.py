"""Tables of a report: cells of text, made of a result's numbers.

Owns which numbers stand side by side, and what they are compared with. This module must not know HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from corun_bench.metrics import aggregate_throughput
from corun_bench.report.cells import (
    NOTHING,
    TIMES,
    Cell,
    Row,
    Section,
    Table,
    bits_cell,
    count_cell,
    failed_cell,
    flat,
    number_cell,
    range_cell,
    ratio_cell,
    share_cell,
    yes_cell,
)
from corun_bench.report.plot_kit import compact
from corun_bench.report.views import STD, Results, in_order, is_ablation
from corun_bench.results import Json, mapping, median_of, number, spread_of, whole

_LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "e2e"))
_STATISTICS = ("mean", "median", "p90", "p99")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """All repeats of one system on one workload at one concurrency, and the baseline's."""

    results: Results
    system: str
    workload: str
    runs: list[Json]
    base: list[Json]


_Column = tuple[str, Callable[[_Group], Cell]]


def summary(results: Results, baseline: str) -> Table:
    """Return a row per system over the workloads that all systems ran: the paper's weighted throughput, and bits."""
    systems = [name for name in results.names if not is_ablation(name) and _tasks(results, name)]
    of_all = [set(_tasks(results, name)) for name in systems]
    shared = [name for name in results.workloads if all(name in ran for ran in of_all)]
    columns = ("GPUs", "workloads", "output tokens/s", f"{TIMES} {baseline}", "per GPU", "bits differ", "failed")
    rows = [_summary_row(results, name, shared, baseline) for name in systems]
    return Table(columns=columns, sections=(Section(title="", rows=tuple(rows)),) if rows else ())


def _summary_row(results: Results, system: str, shared: Sequence[str], baseline: str) -> Row:
    value, base = aggregate(results, system, shared), aggregate(results, baseline, shared)
    gpus = results.gpus(system)
    failed = sum(whole(run, "failed") for run in results.runs if run["system"] == system)
    per_gpu = value / gpus if value and gpus else None
    cells = (
        count_cell(gpus),
        count_cell(len(shared)),
        number_cell(value),
        ratio_cell(value, base),
        number_cell(per_gpu),
    )
    return Row(system=system, cells=(*cells, bits_cell(results.mismatch(system)), failed_cell(failed)))


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
    return _by_workload(
        results,
        baseline,
        (
            ("GPUs", lambda group: count_cell(results.gpus(group.system))),
            ("output tokens/s", _median("output_throughput")),
            ("min … max", _range),
            (f"{TIMES} {baseline}", _against_base),
            ("per GPU", _per_gpu),
            ("bits differ", _bits),
            ("total tokens/s", _median("total_token_throughput")),
            ("decode peak tokens/s", _median("peak_decode_tokens_per_s")),
            ("slots in use", lambda group: share_cell(median_of(group.runs, "slot_occupancy"))),
            ("padding", _padding),
            ("repeats", lambda group: count_cell(len(group.runs))),
            ("failed", lambda group: failed_cell(sum(whole(run, "failed") for run in group.runs))),
        ),
    )


def latencies(results: Results, baseline: str) -> Table:
    """Return the latencies in ms, each a median over repeats."""
    columns = [
        (f"{title} {statistic}", _median(f"{statistic}_{key}_ms"))
        for key, title in _LATENCIES
        for statistic in _STATISTICS
    ]
    return _by_workload(results, baseline, columns)


def overview(results: Results, baseline: str) -> Table:
    """Return the few columns that fit a terminal: speed beside determinism."""
    throughput: list[_Column] = [
        ("output tokens/s", _median("output_throughput")),
        ("min … max", _range),
        (f"{TIMES} {baseline}", _against_base),
    ]
    latency: list[_Column] = [
        (f"{title} {statistic} ms", _median(f"{statistic}_{key}_ms"))
        for key, title in _LATENCIES[:2]
        for statistic in ("median", "p99")
    ]
    return _by_workload(results, baseline, [*throughput, *latency, ("padding", _padding), ("bits differ", _bits)])


def _by_workload(results: Results, baseline: str, columns: Sequence[_Column]) -> Table:
    """Return a table with a section per workload and concurrency."""
    sections = [
        Section(
            title=title,
            rows=tuple(Row(system=group.system, cells=tuple(cell(group) for _, cell in columns)) for group in found),
        )
        for title, found in _groups(results, baseline)
    ]
    return _without_empty(Table(columns=tuple(title for title, _ in columns), sections=tuple(sections)))


def _without_empty(table: Table) -> Table:
    """Return the table without the columns that are empty in all rows."""
    rows = [row.cells for section in table.sections for row in section.rows]
    full = [any(cells[i].text != NOTHING for cells in rows) for i in range(len(table.columns))]
    sections = (
        replace(section, rows=tuple(replace(row, cells=tuple(compress(row.cells, full))) for row in section.rows))
        for section in table.sections
    )
    return Table(columns=tuple(compress(table.columns, full)), sections=tuple(sections))


def _groups(results: Results, baseline: str) -> list[tuple[str, list[_Group]]]:
    found = []
    for workload in dict.fromkeys(run["workload"] for run in results.runs):
        for concurrency in results.concurrencies(workload):
            base = results.runs_of(workload, baseline, concurrency)
            runs = {name: results.runs_of(workload, name, concurrency) for name in results.names}
            groups = [
                _Group(results=results, system=name, workload=workload, runs=repeats, base=base)
                for name, repeats in runs.items()
                if repeats
            ]
            found.append((workload + (f", {compact(concurrency)} in flight" if concurrency else ""), groups))
    return found


def systems(results: Results) -> Table:
    """Return start-up, memory, handoffs and identity of each system; sizes are in MiB."""
    entries = sorted(results.systems, key=lambda entry: results.names.index(entry["system"]))
    cells = [
        {**_start_cells(entry), **_handoff_cells(mapping(entry, "handoff")), **_name_cells(entry)} for entry in entries
    ]
    rows = [Row(system=entry["system"], cells=tuple(row.values())) for entry, row in zip(entries, cells, strict=True)]
    if not rows:
        return Table(columns=(), sections=())
    return _without_empty(Table(columns=tuple(cells[0]), sections=(Section(title="", rows=tuple(rows)),)))


def _start_cells(entry: Json) -> dict[str, Cell]:
    gpus, memory = mapping(entry, "gpus"), mapping(entry, "memory")
    sizes = [value for process in memory if (value := number(memory, process)) is not None]
    split = f"{whole(gpus, 'total')} ({whole(gpus, 'prefill')} + {whole(gpus, 'decode')})"
    return {
        "GPUs (prefill + decode)": Cell(text=split if gpus else NOTHING),
        "slots": number_cell(number(entry, "slots")),
        "ready after s": number_cell(number(entry, "ready_s")),
        "RSS MiB": Cell(text=f"{sum(sizes):,.0f}" if sizes else NOTHING),
        "of which": Cell(text=_listed(memory), kind="dim"),
        "GPU memory": Cell(text=_listed(mapping(entry, "gpu_memory"))),
    }


def _handoff_cells(handoff: Json) -> dict[str, Cell]:
    return {
        "handoffs": number_cell(number(handoff, "count")),
        "failed": failed_cell(whole(handoff, "failed")) if handoff else Cell(text=NOTHING),
        "handoff ms": number_cell(number(handoff, "mean_ms")),
        "handoff GB/s": number_cell(number(handoff, "gb_per_s")),
    }


def _name_cells(entry: Json) -> dict[str, Cell]:
    fingerprint = str(entry.get("fingerprint") or NOTHING)
    return {"fingerprint": Cell(text=fingerprint if len(fingerprint) <= 24 else f"{fingerprint[:23]}…", kind="dim")}


def _listed(values: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in flat(values)) or NOTHING


def kernels(results: Results) -> Table:
    """Return the latency of each kernel and variant, and which of the paper's properties its bits have."""
    entries = results.kernels
    of_std = [entry for entry in entries if entry["variant"] == STD]
    bases = {(entry["kernel"], number(entry, "rows")): number(entry, "median_us") for entry in of_std}
    columns = ("rows", "median µs", "min … max", f"{TIMES} {STD}", "batch-invariant", "position-invariant")
    sections = [
        Section(
            title=kernel,
            rows=tuple(
                Row(system=entry["variant"], cells=_kernel_cells(entry, bases))
                for variant in in_order(entry["variant"] for entry in entries)
                for entry in entries
                if (entry["kernel"], entry["variant"]) == (kernel, variant)
            ),
        )
        for kernel in dict.fromkeys(entry["kernel"] for entry in entries)
    ]
    return Table(columns=columns, sections=tuple(sections))


def _kernel_cells(entry: Json, bases: dict[tuple[str, float | None], float | None]) -> tuple[Cell, ...]:
    rows, value = number(entry, "rows"), number(entry, "median_us")
    between = range_cell(number(entry, "min_us"), number(entry, "max_us"))
    base = bases.get((entry["kernel"], rows))
    invariant = (yes_cell(entry.get(f"{kind}_invariant")) for kind in ("batch", "position"))
    return (number_cell(rows), number_cell(value), between, ratio_cell(value, base), *invariant)


def _median(key: str) -> Callable[[_Group], Cell]:
    return lambda group: number_cell(median_of(group.runs, key))


def _range(group: _Group) -> Cell:
    found = spread_of(group.runs, "output_throughput")
    return range_cell(found.min, found.max) if found and found.repeats > 1 else range_cell(None, None)


def _against_base(group: _Group) -> Cell:
    return ratio_cell(*(median_of(runs, "output_throughput") for runs in (group.runs, group.base)))


def _per_gpu(group: _Group) -> Cell:
    value, gpus = median_of(group.runs, "output_throughput"), group.results.gpus(group.system)
    return number_cell(value / gpus if value is not None and gpus else None)


def _padding(group: _Group) -> Cell:
    return share_cell(median_of(group.runs, "padding_waste"))


def _bits(group: _Group) -> Cell:
    return bits_cell(group.results.mismatch(group.system, group.workload))
