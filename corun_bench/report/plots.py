"""Figures of a result: throughput, phases over time, latencies, concurrency; padding, ablation, kernels.

Each function draws data of result files, and returns None if they have none for its figure. The figures are the
counterparts of those in the paper's evaluation; the last three come from `cost_plots`. This module must not know where
results come from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from corun_bench.metrics import Mismatch, Spread
from corun_bench.report.cost_plots import ablation, kernels, padding
from corun_bench.report.plot_kit import (
    BAD,
    CHAR_EM,
    GOOD,
    GREY,
    WIDTH_IN,
    add_legend,
    clean,
    compact,
    looks,
    panels,
    save,
    styled,
    wrap,
)
from corun_bench.report.plot_parts import (
    HATCH,
    add_bar,
    add_line,
    add_spread_line,
    add_system_legend,
    plain_ticks,
    short_numbers,
    with_gpus,
)
from corun_bench.report.views import Results, is_ablation
from corun_bench.results import Json, mapping, number, numbers, spread_of

__all__ = ["ablation", "kernels", "latency_cdf", "padding", "save", "scaling", "throughput", "timeline"]

MAX_BINS = 240
"""The most points of a line over time; if there are more bins, neighbours are averaged."""
MAX_QUANTILES = 100
"""The most points of a distribution; if there are more samples, this many evenly spaced ones are drawn."""


@styled
def throughput(results: Results, *, per_gpu: bool = False) -> Figure | None:
    """Draw the output throughput: a panel per workload, a bar per system, whiskers over repeats.

    The bar of a system whose bits differed is hatched.
    """
    shown = [name for name in results.names if not is_ablation(name)]
    cells = {w: {s: _output(results, w, s, per_gpu) for s in shown} for w in results.workloads}
    cells = {workload: row for workload, row in cells.items() if any(row.values())}
    systems = [name for name in shown if any(row[name] for row in cells.values())]
    if not cells:
        return None
    figure, axes = panels(len(cells), columns=2 if len(systems) > 8 else 3)
    for ax, (workload, row) in zip(axes, cells.items(), strict=True):
        _bars(ax, results, workload, {name: row[name] for name in systems})
        ax.set_title(_title(results, workload, cells))
    unit = f"tokens/s{' per GPU' if per_gpu else ''}{_common(results, cells)}"
    figure.supylabel(f"output throughput\n({unit})", fontsize=9)
    handles: list[Artist] = [Patch(facecolor=looks(results.names)[name].colour) for name in systems]
    labels = [with_gpus(results, name) for name in systems]
    if any(results.mismatch(name, workload) for name in systems for workload in cells):
        handles.append(Patch(facecolor=GREY, edgecolor="white", hatch=HATCH, linewidth=0))
        labels.append("bits differ")
        figure.supxlabel(
            "under each bar: requests whose bits differed / requests run again in another crowd", fontsize=8
        )
    add_legend(figure, handles, labels)
    return figure


def _output(results: Results, workload: str, system: str, per_gpu: bool) -> Spread | None:
    gpus = results.gpus(system) if per_gpu else 1
    found = spread_of(results.runs_of(workload, system), "output_throughput")
    return found.over(gpus) if found and gpus else None


def _bars(ax: Axes, results: Results, workload: str, row: dict[str, Spread | None]) -> None:
    known = looks(results.names)
    top = max(cell.max for cell in row.values() if cell)
    again = {name: results.mismatch(name, workload) for name, cell in row.items() if cell}
    turned = _too_wide([_counts(mismatch) for mismatch in again.values()], len(row), ax)
    for x, (name, cell) in enumerate(row.items()):
        if cell:
            add_bar(ax, x, cell, known[name].colour, differs=bool((m := again[name]) and m.different_bits))
            # A label must stay clear of its whisker.
            ax.annotate(
                compact(cell.median), (x, cell.max), (0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    middle, slots = (len(row) - 1) / 2, max(len(row) + 0.2, _width_in(ax) / 0.9)  # No bar is as wide as the page.
    ax.set(xlim=(middle - slots / 2, middle + slots / 2), ylim=(0, (top or 1) * 1.15))
    ax.set_xticks(range(len(row)), ["" if name not in again else _counts(again[name]) for name in row], fontsize=7)
    ax.tick_params(axis="x", length=0, pad=2)
    short_numbers(ax.yaxis)
    for name, label in zip(row, ax.get_xticklabels(), strict=True):
        label.set(color=_verdict(again.get(name)), rotation=90 if turned else 0)


def _counts(mismatch: Mismatch | None) -> str:
    return f"{mismatch.different_bits}/{mismatch.requests}" if mismatch else ""


def _verdict(mismatch: Mismatch | None) -> str:
    if mismatch is None:
        return GREY
    return BAD if mismatch.different_bits else GOOD


def _too_wide(labels: Sequence[str], bars: int, ax: Axes) -> bool:
    return max((len(label) for label in labels), default=0) * 7 * CHAR_EM > 72 * _width_in(ax) / bars - 2


def _width_in(ax: Axes) -> float:
    """Return the approximate width of a panel, in inches."""
    grid = ax.get_subplotspec()
    columns = grid.get_gridspec().ncols if grid else 1
    return (WIDTH_IN - 0.5 - 0.4 * columns) / columns


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
    lines = {name: line for name in results.names if (line := _timeline_of(results, workload, name))}
    if not lines:
        return None
    figure, (prefill, decode) = panels(2, columns=1, height_in=1.75)
    decode.sharex(prefill)
    for ax, key in ((prefill, "prefill_tokens_per_s"), (decode, "decode_tokens_per_s")):
        for name, line in lines.items():
            times, values = _binned(numbers(line, key), number(line, "bin_s") or 0.0)
            add_line(ax, times, values, looks(results.names)[name])
        ax.set_ylabel(f"{key.partition('_')[0]}\n(tokens/s)")
        ax.set_ylim(bottom=0)
        short_numbers(ax.yaxis)
    prefill.tick_params(labelbottom=False)
    decode.set_xlabel("time since the first request (s)")
    decode.set_xlim(left=0)
    prefill.set_title(f"{clean(workload)}{_common(results, [workload])}")
    add_legend(figure, prefill.get_lines(), [with_gpus(results, name) for name in lines])
    return figure


def _timeline_of(results: Results, workload: str, system: str) -> Json | None:
    for run in [] if is_ablation(system) else results.runs_of(workload, system):
        found = mapping(run, "timeline")
        keys = ("prefill_tokens_per_s", "decode_tokens_per_s")
        if (number(found, "bin_s") or 0) > 0 and any(numbers(found, key) for key in keys):
            return found
    return None


def _binned(values: Sequence[float], bin_s: float) -> tuple[list[float], list[float]]:
    """Return the middles of bins, and their means; neighbours are merged if there are too many."""
    size = max(1, math.ceil(len(values) / MAX_BINS))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    starts = itertools.accumulate((len(group) for group in groups), initial=0)
    times = [(start + len(group) / 2) * bin_s for start, group in zip(starts, groups, strict=False)]
    return times, [statistics.fmean(group) for group in groups]


@styled
def latency_cdf(results: Results, metric: str) -> Figure | None:
    """Draw the distribution of `metric` ("ttft" or "tpot") over the requests of all repeats: a panel per workload."""
    words = {"ttft": "time to first token", "tpot": "time per output token"}[metric]
    shown = [name for name in results.names if not is_ablation(name)]
    times = {w: {s: _samples(results.runs_of(w, s), f"{metric}s") for s in shown} for w in results.workloads}
    unit, scale = _time_unit(itertools.chain(*(row.values() for row in times.values())))
    cells = {w: {s: [t * scale for t in samples] for s, samples in row.items()} for w, row in times.items()}
    cells = {workload: row for workload, row in cells.items() if any(row.values())}
    if not cells:
        return None
    figure, axes = panels(len(cells))
    known = looks(results.names)
    for ax, (workload, row) in zip(axes, cells.items(), strict=True):
        for name, samples in row.items():
            if samples:
                line = add_line(ax, *_distribution(samples), known[name])
                line.set_drawstyle("steps-post" if len(samples) <= MAX_QUANTILES else "default")
        _latency_axis(ax, sorted(itertools.chain(*row.values())))
        ax.set_title(_title(results, workload, cells))
    figure.supxlabel(f"{words} ({unit}{_common(results, cells)})", fontsize=9)
    figure.supylabel("share of requests", fontsize=9)
    systems = [name for name in shown if any(row[name] for row in cells.values())]
    handles = [Line2D([], [], color=known[name].colour, linestyle=known[name].line) for name in systems]
    add_legend(figure, handles, [with_gpus(results, name) for name in systems])
    return figure


def _samples(runs: Sequence[Json], key: str) -> list[float]:
    return sorted(value for run in runs for value in numbers(run, key))


def _time_unit(times: Iterable[Sequence[float]]) -> tuple[str, float]:
    """Return the unit in which to show times in ms, and how much 1 ms is in it. Each sequence is sorted."""
    return ("s", 1e-3) if max((found[-1] for found in times if found), default=0) >= 1000 else ("ms", 1.0)


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
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
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
    figure, axes = panels(len(counts), columns=2 if len(counts) > 1 else 1, height_in=2.3)
    drawn: dict[str, Artist] = {}
    for ax, (workload, values) in zip(axes, counts.items(), strict=True):
        for name in (name for name in results.names if not is_ablation(name)):
            points = [(c, s) for c in values if (s := _output_at(results, workload, name, c))]
            if points:
                drawn[name] = add_spread_line(ax, points, looks(results.names)[name])
        ax.set(ylim=(0, None), title=wrap(workload, 40))
        ax.set_xscale("log", base=2)
        plain_ticks(ax.xaxis, values)
        short_numbers(ax.yaxis)
    figure.supxlabel("requests in flight", fontsize=9)
    figure.supylabel("output throughput\n(tokens/s)", fontsize=9)
    add_system_legend(figure, results, drawn)
    return figure


def _output_at(results: Results, workload: str, system: str, concurrency: float) -> Spread | None:
    return spread_of(results.runs_of(workload, system, concurrency), "output_throughput")
