"""Figures of a result: throughput, phases over time, latencies, concurrency; padding, ablation, kernels.

Each function draws data of result files, and returns None if they have none for its figure. The figures are the
counterparts of those in the paper's evaluation. This module must not know where results come from or figures go.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from corun_bench.metrics import Mismatch, Spread
from corun_bench.report.looks import (
    BAD,
    GOOD,
    GREY,
    Look,
    add_legend,
    clean,
    compact,
    log_axis,
    looks,
    panels,
    short_numbers,
    styled,
    wrap,
)
from corun_bench.report.views import STD, Results, in_order, is_ablation, padding_of
from corun_bench.results import Json, mapping, median_of, number, numbers, spread_of

MAX_BINS = 240
"""The most points of a line over time; if there are more bins, neighbours are averaged."""
MAX_QUANTILES = 100
"""The most points of a distribution; if there are more samples, this many evenly spaced ones are drawn."""
_THROUGHPUT = "output_throughput"
_HATCH = "////"
"""The hatch of a bar whose system's bits were seen to differ."""
_UNPADDED = (STD, "bi", "colocated+ladder", "pd-std")
"""Systems that do not pad the steps of a single request: they are level lines in a padding sweep."""
_MARKS: dict[str, dict[str, Any]] = {
    "batch-invariant": {"marker": "o"},
    "position-invariant only": {"marker": "o", "fillstyle": "left", "markerfacecoloralt": "white"},
    "neither": {"marker": "o", "markerfacecolor": "white"},
    "bits not compared": {"marker": "x"},
}


@styled
def throughput(results: Results, *, per_gpu: bool = False) -> Figure | None:
    """Draw the output throughput: a panel per workload, a bar per system, whiskers over repeats.

    The bar of a system whose bits differed is hatched.
    """
    cells: dict[str, dict[str, Spread]] = {}
    for workload, name in itertools.product(results.workloads, _serving(results)):
        gpus = results.gpus(name) if per_gpu else 1
        if gpus and (found := spread_of(results.runs_of(workload, name), _THROUGHPUT)):
            cells.setdefault(workload, {})[name] = found.over(gpus)
    if not cells:
        return None
    systems = in_order(name for row in cells.values() for name in row)
    figure, axes = panels(len(cells), columns=2 if len(systems) > 8 else 3)
    for ax, (workload, row) in zip(axes, cells.items(), strict=True):
        _bars(ax, results, workload, {name: row.get(name) for name in systems})
        ax.set_title(_title(results, workload, cells))
    figure.supylabel(f"output throughput\n(tokens/s{' per GPU' * per_gpu}{_common(results, cells)})", fontsize=9)
    handles: list[Artist] = [Patch(facecolor=looks(results.names)[name].colour) for name in systems]
    labels = [_with_gpus(results, name) for name in systems]
    if any(results.mismatch(name, workload) for name in systems for workload in cells):
        handles.append(Patch(facecolor=GREY, edgecolor="white", hatch=_HATCH, linewidth=0))
        labels.append("bits differ")
        words = "under each bar: requests whose bits differed / requests run again in another crowd"
        figure.supxlabel(words, fontsize=8)
    add_legend(figure, handles, labels)
    return figure


def _bars(ax: Axes, results: Results, workload: str, row: dict[str, Spread | None]) -> None:
    known, again = looks(results.names), {name: results.mismatch(name, workload) for name in row}
    for x, (name, cell) in enumerate(row.items()):
        if cell:
            differs = bool((found := again[name]) and found.different_bits)
            _bar(ax, x, cell, known[name], compact(cell.median), differs=differs)
    ax.set_ylim(0, (max(cell.max for cell in row.values() if cell) or 1) * 1.15)
    labels = [_counts(again[name]) if cell else "" for name, cell in row.items()]
    ax.set_xticks(range(len(row)), labels, fontsize=7, rotation=90 if len(row) > 5 else 0)
    ax.tick_params(axis="x", length=0, pad=2)
    short_numbers(ax.yaxis)
    for name, label in zip(row, ax.get_xticklabels(), strict=True):
        label.set_color(BAD if (found := again[name]) and found.different_bits else GOOD)


def _bar(ax: Axes, x: float, cell: Spread, look: Look, text: str, *, differs: bool = False, width: float = 0.8) -> None:
    whisker = [[cell.median - cell.min], [cell.max - cell.median]] if cell.repeats > 1 else None
    hatch = _HATCH if differs else None
    ax.bar(x, cell.median, width, color=look.colour, edgecolor="white", linewidth=0, hatch=hatch, yerr=whisker)
    # A label must stay clear of its whisker.
    ax.annotate(text, (x, cell.max), (0, 2), textcoords="offset points", ha="center", fontsize=7)


def _counts(mismatch: Mismatch | None) -> str:
    return f"{mismatch.different_bits}/{mismatch.requests}" if mismatch else ""


def _serving(results: Results) -> list[str]:
    return [name for name in results.names if not is_ablation(name)]


def _with_gpus(results: Results, system: str) -> str:
    """Return a system's name, with its number of GPUs if not all systems have the same number."""
    counts = {results.gpus(name) for name in results.names} - {0}
    gpus = results.gpus(system)
    return f"{system} ({gpus} GPU{'s' * (gpus > 1)})" if len(counts) > 1 and gpus else system


def _title(results: Results, workload: str, workloads: Collection[str]) -> str:
    """Return a workload's name, with its requests in flight if they are not the same in all panels."""
    concurrency = results.concurrency(workload)
    differ = concurrency and not _common(results, workloads)
    return wrap(workload, 84 // min(3, len(workloads))) + (f"\n{compact(concurrency)} in flight" if differ else "")


def _common(results: Results, workloads: Iterable[str]) -> str:
    """Return the number of requests in flight as text if all workloads have the same; else an empty text."""
    concurrencies = {results.concurrency(workload) for workload in workloads} - {0.0}
    return f", {compact(concurrencies.pop())} in flight" if len(concurrencies) == 1 else ""


@styled
def timeline(results: Results, workload: str) -> Figure | None:
    """Draw prefill and decode throughput over time, one above the other, of the first repeat of each system."""
    lines = {name: line for name in _serving(results) if (line := _timeline_of(results, workload, name))}
    if not lines:
        return None
    figure, (prefill, decode) = panels(2, columns=1)
    decode.sharex(prefill)
    for ax, key in ((prefill, "prefill_tokens_per_s"), (decode, "decode_tokens_per_s")):
        for name, line in lines.items():
            _line(ax, *_binned(numbers(line, key), number(line, "bin_s") or 0.0), looks(results.names)[name])
        ax.set(ylabel=f"{key.partition('_')[0]}\n(tokens/s)", ylim=(0, None))
        short_numbers(ax.yaxis)
    prefill.tick_params(labelbottom=False)
    decode.set(xlabel="time since the first request (s)", xlim=(0, None))
    prefill.set_title(f"{clean(workload)}{_common(results, [workload])}")
    add_legend(figure, prefill.get_lines(), [_with_gpus(results, name) for name in lines])
    return figure


def _timeline_of(results: Results, workload: str, system: str) -> Json | None:
    for run in results.runs_of(workload, system):
        found = mapping(run, "timeline")
        keys = ("prefill_tokens_per_s", "decode_tokens_per_s")
        if (number(found, "bin_s") or 0) > 0 and any(numbers(found, key) for key in keys):
            return found
    return None


def _binned(values: Sequence[float], bin_s: float) -> tuple[list[float], list[float]]:
    """Return the middles of bins, and their means; neighbours are merged if there are too many."""
    size = max(1, math.ceil(len(values) / MAX_BINS))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    times = [(i * size + len(group) / 2) * bin_s for i, group in enumerate(groups)]
    return times, [statistics.fmean(group) for group in groups]


def _line(ax: Axes, x: Sequence[float], y: Sequence[float], look: Look) -> Line2D:
    return ax.plot(x, y, color=look.colour, linestyle=look.line)[0]


@styled
def latency_cdf(results: Results, metric: str) -> Figure | None:
    """Draw the distribution of `metric` ("ttft" or "tpot") over the requests of all repeats: a panel per workload."""
    times: dict[str, dict[str, list[float]]] = {}  # In ms.
    for workload, name in itertools.product(results.workloads, _serving(results)):
        runs = results.runs_of(workload, name)
        if samples := sorted(value for run in runs for value in numbers(run, f"{metric}s")):
            times.setdefault(workload, {})[name] = samples
    if not times:
        return None
    longest = max(samples[-1] for row in times.values() for samples in row.values())
    unit, scale = ("s", 1e-3) if longest >= 1000 else ("ms", 1.0)
    figure, axes = panels(len(times))
    known = looks(results.names)
    for ax, (workload, row) in zip(axes, times.items(), strict=True):
        for name, samples in row.items():
            line = _line(ax, *_distribution([at * scale for at in samples]), known[name])
            line.set_drawstyle("steps-post" if len(samples) <= MAX_QUANTILES else "default")
        _latency_axis(ax, sorted(at * scale for at in itertools.chain(*row.values())))
        ax.set_title(_title(results, workload, times))
    words = {"ttft": "time to first token", "tpot": "time per output token"}[metric]
    figure.supxlabel(f"{words} ({unit}{_common(results, times)})", fontsize=9)
    figure.supylabel("share of requests", fontsize=9)
    systems = in_order(name for row in times.values() for name in row)
    handles = [Line2D([], [], color=known[name].colour, linestyle=known[name].line) for name in systems]
    add_legend(figure, handles, [_with_gpus(results, name) for name in systems])
    return figure


def _distribution(samples: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the steps of the empirical distribution of sorted samples: the share of them that is at most x."""
    total = len(samples)
    ranks = [round(i * (total - 1) / (MAX_QUANTILES - 1)) for i in range(MAX_QUANTILES)]
    kept = range(total) if total <= MAX_QUANTILES else ranks
    return [samples[0], *(samples[i] for i in kept)], [0.0, *((i + 1) / total for i in kept)]


def _latency_axis(ax: Axes, ordered: Sequence[float]) -> None:
    low, high = ordered[len(ordered) // 20], ordered[-1]
    ax.set_ylim(0, 1.02)
    ax.grid(axis="x")
    if low > 0 and high > 100 * low:  # On a linear axis, most of the lines would coincide.
        log_axis(ax, ax.xaxis)
        ax.set_xlim(left=max(ordered[0], high / 1e4) / 1.1)
    else:
        ax.set_xlim(left=0)
        short_numbers(ax.xaxis)
        ax.xaxis.set_major_locator(MaxNLocator(5))


@styled
def scaling(results: Results) -> Figure | None:
    """Draw the output throughput against the requests in flight, for workloads that ran with several such numbers."""
    counts = {workload: [c for c in results.concurrencies(workload) if c > 0] for workload in results.workloads}
    counts = {workload: values for workload, values in counts.items() if len(values) > 1}
    if not counts:
        return None
    figure, axes = panels(len(counts), columns=2, height_in=2.3)
    drawn: dict[str, Artist] = {}
    for ax, (workload, values) in zip(axes, counts.items(), strict=True):
        for name in _serving(results):
            spreads = {c: spread_of(results.runs_of(workload, name, c), _THROUGHPUT) for c in values}
            if line := _spread_line(ax, spreads, looks(results.names)[name]):
                drawn[name] = line
        ax.set(ylim=(0, None), title=wrap(workload, 40))
        log_axis(ax, ax.xaxis, values, base=2)
        short_numbers(ax.yaxis)
    figure.supxlabel("requests in flight", fontsize=9)
    figure.supylabel("output throughput\n(tokens/s)", fontsize=9)
    _system_legend(figure, results, drawn)
    return figure


def _spread_line(ax: Axes, spreads: dict[float, Spread | None], look: Look) -> Artist | None:
    """Draw medians as a line, and the lowest and the highest repeats as whiskers; return None without a point."""
    points = {x: cell for x, cell in spreads.items() if cell}
    if not points:
        return None
    cells = points.values()
    whiskers = [[cell.median - cell.min for cell in cells], [cell.max - cell.median for cell in cells]]
    medians = [cell.median for cell in cells]
    drawn = ax.errorbar([*points], medians, whiskers, color=look.colour, linestyle=look.line, marker=look.marker)
    return drawn.lines[0]


def _system_legend(figure: Figure, results: Results, drawn: dict[str, Artist]) -> None:
    names = in_order(drawn)
    add_legend(figure, [drawn[name] for name in names], [_with_gpus(results, name) for name in names])


@styled
def padding(results: Results) -> Figure | None:
    """Draw the output throughput of one request against the rows of a step; unpadded systems are level lines."""
    cells: dict[str, dict[float, list[Json]]] = {}
    for run in results.runs:
        if rows := padding_of(run["workload"]):
            cells.setdefault(run["system"], {}).setdefault(rows, []).append(run)
    widths = sorted({rows for name, cell in cells.items() if name not in _UNPADDED for rows in cell})
    if not widths:
        return None
    figure, (ax,) = panels(1, height_in=2.3)
    known, drawn = looks(results.names), dict[str, Artist]()
    for name in in_order(cells):
        if line := _padding_line(ax, name, cells[name], known[name]):
            drawn[name] = line
    log_axis(ax, ax.xaxis, widths, base=2)
    log_axis(ax, ax.yaxis)
    ax.set(xlabel="rows of a decode step, one of them in use", ylabel="output throughput\n(tokens/s)")
    _system_legend(figure, results, drawn)
    return figure


def _padding_line(ax: Axes, name: str, cell: dict[float, list[Json]], look: Look) -> Artist | None:
    if name in _UNPADDED:
        level = median_of(list(itertools.chain(*cell.values())), _THROUGHPUT)
        return ax.axhline(level, color=look.colour, linestyle=look.line) if level else None
    found = {rows: spread_of(runs, _THROUGHPUT) for rows, runs in sorted(cell.items())}
    return _spread_line(ax, {rows: value for rows, value in found.items() if value and value.min > 0}, look)


@styled
def ablation(results: Results) -> Figure | None:
    """Draw output throughput as a share of STD's, with one more constraint per bar: a group of bars per workload."""
    cells = {w: row for w in results.workloads if (row := _relative(results, w)) and any(map(is_ablation, row))}
    systems = in_order(name for row in cells.values() for name in row)
    if not cells:
        return None
    figure, (ax,) = panels(1, height_in=2.2)
    known, width = looks(results.names), 0.84 / len(systems)
    for (i, row), (j, name) in itertools.product(enumerate(cells.values()), enumerate(systems)):
        if cell := row.get(name):
            x = i + (j - (len(systems) - 1) / 2) * width
            _bar(ax, x, cell, known[name], f"{cell.median:.2f}", width=width * 0.92)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle="--", zorder=0.9)
    ax.set_xticks(range(len(cells)), [wrap(name, max(8, 84 // len(cells))) for name in cells])
    ax.tick_params(axis="x", length=0)
    ax.set(xlim=(-0.6, len(cells) - 0.4), ylim=(0, None), ylabel="output throughput\n(share of std)")
    add_legend(figure, [Patch(facecolor=known[name].colour) for name in systems], systems)
    return figure


def _relative(results: Results, workload: str) -> dict[str, Spread]:
    """Return the throughput of STD, its ablations and colocated CoRun over STD's median; empty without STD."""
    base = median_of(results.runs_of(workload, STD), _THROUGHPUT)
    names = [name for name in results.names if name in {STD, "colocated"} or is_ablation(name)]
    found = {name: spread_of(results.runs_of(workload, name), _THROUGHPUT) for name in names}
    return {name: value.over(base) for name, value in found.items() if value and base}


@styled
def kernels(results: Results) -> Figure | None:
    """Draw the latency of each kernel and variant with its slowdown over STD: a panel per number of rows."""
    timed = [entry for entry in results.kernels if (number(entry, "median_us") or 0) > 0]
    if not timed:
        return None
    counts = sorted({number(entry, "rows") or 0 for entry in timed})
    rows = counts if len(counts) == 1 else [counts[0], counts[-1]]
    names = list(dict.fromkeys(entry["kernel"] for entry in timed))
    variants = in_order(entry["variant"] for entry in timed)
    height = 0.4 + len(names) * (0.12 + 0.15 * len(variants))
    figure, axes = panels(len(rows), columns=2, height_in=height)
    for ax, count in zip(axes, rows, strict=True):
        _kernel_panel(ax, [entry for entry in timed if (number(entry, "rows") or 0) == count], names, variants)
        ax.set_title(f"{count:.0f} rows" if count != 1 else "1 row")
        ax.tick_params(labelleft=ax is axes[0])
    figure.supxlabel("latency (µs)", fontsize=9)
    colours = looks(variants)
    handles = [_dot(colours[name].colour) for name in variants]
    seen = [words for words in _MARKS if words in {_bits(entry) for entry in timed}]
    add_legend(figure, [*handles, *(_dot(GREY, words) for words in seen)], [*variants, *seen])
    return figure


def _bits(entry: Json) -> str:
    """Return what was measured of a kernel's bits, in the words of the legend."""
    if entry.get("batch_invariant") is None:
        return "bits not compared"
    if entry["batch_invariant"] is True:
        return "batch-invariant"
    return "position-invariant only" if entry.get("position_invariant") is True else "neither"


def _dot(colour: str, words: str = "batch-invariant", x: Sequence[float] = (), y: Sequence[float] = ()) -> Line2D:
    return Line2D(x, y, color=colour, linestyle="none", **_MARKS[words])


def _kernel_panel(ax: Axes, entries: Sequence[Json], names: Sequence[str], variants: Sequence[str]) -> None:
    bases = {entry["kernel"]: number(entry, "median_us") for entry in entries if entry["variant"] == STD}
    step = 0.76 / len(variants)
    for entry in entries:
        y = names.index(entry["kernel"]) + (variants.index(entry["variant"]) - (len(variants) - 1) / 2) * step
        colour = looks(variants)[entry["variant"]].colour
        value = number(entry, "median_us") or 0.0
        low, high = number(entry, "min_us") or value, number(entry, "max_us") or value
        ax.plot([low, high], [y, y], color=colour, linewidth=1.2, alpha=0.6)
        ax.add_line(_dot(colour, _bits(entry), [value], [y]))
        if (base := bases.get(entry["kernel"])) and entry["variant"] != STD:
            text = f"{value / base:.2f}\N{MULTIPLICATION SIGN}"
            ax.annotate(text, (high, y), (4, 0), textcoords="offset points", va="center", fontsize=7)
    log_axis(ax, ax.xaxis)
    low, high = ax.get_xlim()
    ax.set_xlim(low, high * 1.8)  # Room for the slowdowns.
    ax.set_yticks(range(len(names)), [wrap(name, 24, 2) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
