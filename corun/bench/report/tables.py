"""Tables of a report: cells of text, made of a result's numbers.

Owns which numbers stand side by side, and what they are compared with. This module must not know HTML.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corun.bench.report.plot_kit import compact
from corun.bench.report.views import (
    STD,
    Json,
    Mismatch,
    Results,
    in_order,
    is_ablation,
    mapping,
    median,
    number,
    spread,
    whole,
)

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"

_LATENCIES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "e2e"))
_STATISTICS = ("mean", "median", "p90", "p99")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Text, and whether it is something to be glad or sorry about: "", "good", "bad" or "dim"."""

    text: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of a table; `system` is what the row is about."""

    system: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows under one heading."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns but the first, which is the system's."""

    columns: tuple[str, ...]
    sections: tuple[Section, ...]


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
    """Each system over all workloads that every system ran: the paper's time-weighted throughput, and bits."""
    systems = [name for name in results.names if not is_ablation(name) and _weights(results, name)]
    of_all = [set(_weights(results, name)) for name in systems]
    shared = [name for name in results.workloads if all(name in ran for ran in of_all)]
    columns = ("GPUs", "workloads", "output tokens/s", f"{TIMES} {baseline}", "per GPU", "bits differ", "failed")
    rows = [_summary_row(results, name, shared, baseline) for name in systems]
    return Table(columns=columns, sections=(Section(title="", rows=tuple(rows)),) if rows else ())


def _summary_row(results: Results, system: str, shared: Sequence[str], baseline: str) -> Row:
    value, base = aggregate(results, system, shared), aggregate(results, baseline, shared)
    gpus = results.gpus(system)
    failed = sum(whole(run, "failed") for run in results.runs if run["system"] == system)
    per_gpu = value / gpus if value and gpus else None
    cells = (_count(gpus), _count(len(shared)), _cell(value), _ratio(value, base), _cell(per_gpu))
    return Row(system=system, cells=(*cells, _bits(results.mismatch(system)), _failed(failed)))


def aggregate(results: Results, system: str, workloads: Sequence[str]) -> float | None:
    """Throughput weighted by time (paper, Section V): all tokens over all seconds. None unless it ran all of them."""
    weights = _weights(results, system)
    if not workloads or not all(workload in weights for workload in workloads):
        return None
    tokens = sum(throughput * duration for throughput, duration in (weights[workload] for workload in workloads))
    return tokens / sum(weights[workload][1] for workload in workloads)


def _weights(results: Results, system: str) -> dict[str, tuple[float, float]]:
    """Output throughput and duration of each workload that the system ran, medians over repeats."""
    found = {}
    for workload in results.workloads:
        runs = results.runs_of(workload, system)
        throughput, duration = median(runs, "output_throughput"), median(runs, "duration")
        if throughput is not None and duration:
            found[workload] = (throughput, duration)
    return found


def throughputs(results: Results, baseline: str) -> Table:
    """What each system made of each workload, and whether its bits held."""
    return _by_workload(
        results,
        baseline,
        (
            ("GPUs", lambda group: _count(results.gpus(group.system))),
            ("output tokens/s", lambda group: _cell(median(group.runs, "output_throughput"))),
            ("min … max", _range),
            (f"{TIMES} {baseline}", _against_base),
            ("per GPU", _per_gpu),
            ("bits differ", lambda group: _bits(results.mismatch(group.system, group.workload))),
            ("total tokens/s", lambda group: _cell(median(group.runs, "total_token_throughput"))),
            ("decode peak tokens/s", lambda group: _cell(median(group.runs, "peak_decode_tokens_per_s"))),
            ("slots in use", lambda group: _share(median(group.runs, "slot_occupancy"))),
            ("padding", lambda group: _share(median(group.runs, "padding_waste"))),
            ("repeats", lambda group: _count(len(group.runs))),
            ("failed", lambda group: _failed(sum(whole(run, "failed") for run in group.runs))),
        ),
    )


def latencies(results: Results, baseline: str) -> Table:
    """Latencies in ms, each a median over repeats, and how the KV cache was handed over."""
    columns: list[_Column] = [
        (f"{title} {statistic}", _latency(f"{statistic}_{key}_ms"))
        for key, title in _LATENCIES
        for statistic in _STATISTICS
    ]
    columns += [("handoff ms", _handoff("mean_ms")), ("handoff GB/s", _handoff("gb_per_s"))]
    return _by_workload(results, baseline, columns)


def _by_workload(results: Results, baseline: str, columns: Sequence[_Column]) -> Table:
    """A section per workload and concurrency; a column that is empty in all of them is left out."""
    groups = _groups(results, baseline)
    of_all = [group for _, found in groups for group in found]
    full = [(title, cell) for title, cell in columns if any(cell(group).text != NOTHING for group in of_all)]
    sections = [
        Section(
            title=title,
            rows=tuple(Row(system=group.system, cells=tuple(cell(group) for _, cell in full)) for group in found),
        )
        for title, found in groups
    ]
    return Table(columns=tuple(title for title, _ in full), sections=tuple(sections))


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
    """Start-up, memory and identity of each system; sizes in MiB."""
    columns = ("GPUs (prefill + decode)", "slots", "ready after s", "RSS MiB", "of which", "GPU memory", "fingerprint")
    entries = sorted(results.systems, key=lambda entry: results.names.index(entry["system"]))
    rows = tuple(Row(system=entry["system"], cells=_system_cells(entry)) for entry in entries)
    return Table(columns=columns, sections=(Section(title="", rows=rows),) if rows else ())


def _system_cells(entry: Json) -> tuple[Cell, ...]:
    gpus, memory = mapping(entry, "gpus"), mapping(entry, "memory")
    sizes = [value for process in memory if (value := number(memory, process)) is not None]
    split = f"{whole(gpus, 'total')} ({whole(gpus, 'prefill')} + {whole(gpus, 'decode')})"
    fingerprint = str(entry.get("fingerprint") or NOTHING)
    return (
        Cell(text=split if gpus else NOTHING),
        _cell(number(entry, "slots")),
        _cell(number(entry, "ready_s")),
        Cell(text=f"{sum(sizes):,.0f}" if sizes else NOTHING),
        Cell(text=", ".join(f"{name} {value}" for name, value in flat(memory)) or NOTHING, kind="dim"),
        Cell(text=", ".join(f"{name} {value}" for name, value in flat(mapping(entry, "gpu_memory"))) or NOTHING),
        Cell(text=fingerprint if len(fingerprint) <= 24 else f"{fingerprint[:23]}…", kind="dim"),
    )


def kernels(results: Results) -> Table:
    """Latency of each kernel and variant, and which of the paper's properties its bits were measured to have."""
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
    low, high = number(entry, "min_us"), number(entry, "max_us")
    between = f"{_digits(low)} … {_digits(high)}" if low is not None and high is not None else NOTHING
    base = bases.get((entry["kernel"], rows))
    invariant = (_yes(entry.get(f"{kind}_invariant")) for kind in ("batch", "position"))
    return (_cell(rows), _cell(value), Cell(text=between, kind="dim"), _ratio(value, base), *invariant)


def flat(values: Json, prefix: str = "") -> list[tuple[str, str]]:
    """Nested objects as dotted names and their values, as text."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{key}.")
        elif value not in (None, "", [], ()):
            found.append((f"{prefix}{key}", _plain(value)))
    return found


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)


def _cell(value: float | None) -> Cell:
    return Cell(text=NOTHING if value is None else _digits(value))


def _digits(value: float) -> str:
    """A number with three digits or all before the point, whichever are more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else compact(value)


def _count(value: int) -> Cell:
    return Cell(text=str(value) if value else NOTHING)


def _share(value: float | None) -> Cell:
    return Cell(text=NOTHING if value is None else f"{value:.1%}")


def _ratio(value: float | None, base: float | None) -> Cell:
    return Cell(text=NOTHING if value is None or not base else f"{value / base:.2f}")


def _bits(mismatch: Mismatch | None) -> Cell:
    if mismatch is None:
        return Cell(text="not run again", kind="dim")
    text = f"{mismatch.different_bits} of {mismatch.requests}"
    return Cell(text=text, kind="bad" if mismatch.different_bits else "good")


def _failed(count: int) -> Cell:
    return Cell(text=str(count), kind="bad" if count else "dim")


def _yes(value: object) -> Cell:
    words = {True: Cell(text="yes", kind="good"), False: Cell(text="no", kind="bad")}
    return words[value] if isinstance(value, bool) else Cell(text="not measured", kind="dim")


def _range(group: _Group) -> Cell:
    found = spread(group.runs, "output_throughput")
    several = found and found.count > 1
    return Cell(text=f"{_digits(found.low)} … {_digits(found.high)}" if found and several else NOTHING, kind="dim")


def _against_base(group: _Group) -> Cell:
    return _ratio(median(group.runs, "output_throughput"), median(group.base, "output_throughput"))


def _per_gpu(group: _Group) -> Cell:
    value, gpus = median(group.runs, "output_throughput"), group.results.gpus(group.system)
    return _cell(value / gpus if value is not None and gpus else None)


def _latency(key: str) -> Callable[[_Group], Cell]:
    return lambda group: _cell(median(group.runs, key))


def _handoff(key: str) -> Callable[[_Group], Cell]:
    return lambda group: _cell(median([mapping(run, "handoff") for run in group.runs], key))
