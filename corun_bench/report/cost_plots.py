"""Figures of what determinism costs: padding, each constraint by itself, each kernel by itself.

As in `plots`, each function returns None if the results have no data for its figure. This module must not know where
figures go.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from corun_bench.metrics import Spread
from corun_bench.report.plot_kit import GREY, Look, add_legend, looks, panels, styled, wrap
from corun_bench.report.plot_parts import add_bar, add_spread_line, add_system_legend, plain_ticks
from corun_bench.report.views import STD, Results, in_order, is_ablation, padding_of
from corun_bench.results import Json, median_of, number, spread_of

MAX_PANELS = 2
"""The most numbers of rows for which kernels are drawn, with a panel for each."""
_KERNEL_COLOURS = {
    "fixed": "#009E73",
    "fixed-order": "#0072B2",
    "nosplitk": "#A9A9A9",
    "custom": "#CC79A7",
    "row-by-row": "#D55E00",
}
"""The colours of variants that are not systems; `std` and `bi` have the colours of those systems."""
_UNPADDED = (STD, "bi", "colocated+ladder", "pd-std")
"""Systems that do not pad the steps of a single request: they are lines without points in a padding sweep."""


@styled
def padding(results: Results) -> Figure | None:
    """Draw the output throughput of one request against the rows of a step; unpadded systems are level lines."""
    cells: dict[str, dict[int, list[Json]]] = {}
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
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    plain_ticks(ax.xaxis, widths)
    _log_ticks(ax)
    ax.set(xlabel="rows of a decode step, one of them in use", ylabel="output throughput\n(tokens/s)")
    add_system_legend(figure, results, drawn)
    return figure


def _padding_line(ax: Axes, name: str, cell: dict[int, list[Json]], look: Look) -> Artist | None:
    if name in _UNPADDED:
        level = median_of(list(itertools.chain(*cell.values())), "output_throughput")
        return ax.axhline(level, color=look.colour, linestyle=look.line) if level else None
    found = {rows: spread_of(runs, "output_throughput") for rows, runs in sorted(cell.items())}
    points = [(float(rows), value) for rows, value in found.items() if value and value.min > 0]
    return add_spread_line(ax, points, look) if points else None


def _log_ticks(ax: Axes) -> None:
    """Set the ticks so that a short logarithmic axis has several numbers, too."""
    low, high = ax.get_ylim()
    steps = (1, 1.5, 2, 3, 5, 7) if high < 12 * low else (1, 2, 5)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    plain_ticks(ax.yaxis, [tick for tick in ticks if low <= tick <= high])


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
            add_bar(ax, x, cell, known[name].colour, width=width * 0.92)
            _inside(ax, x, f"{cell.median:.2f}", known[name].colour, turned=len(cells) * len(systems) > 18)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle="--", zorder=0.9)
    ax.set_xticks(range(len(cells)), [wrap(name, max(8, 84 // len(cells))) for name in cells])
    ax.tick_params(axis="x", length=0)
    margin = max(0.5, 4 / len(systems) / len(cells))  # No bar is as wide as the page.
    ax.set_xlim(-margin, len(cells) - 1 + margin)
    ax.set_ylabel("output throughput\n(share of std)")
    ax.set_ylim(bottom=0)
    add_legend(figure, [Patch(facecolor=known[name].colour) for name in systems], systems)
    return figure


def _inside(ax: Axes, x: float, text: str, colour: str, *, turned: bool) -> None:
    """Write a number at the foot of a bar, where no whisker is."""
    ink = "white" if math.hypot(*to_rgb(colour)) < 1 else "#111111"
    at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    ax.annotate(text, (x, 0), (0, 4), fontsize=8, color=ink, rotation=90 if turned else 0, **at)


def _relative(results: Results, workload: str) -> dict[str, Spread]:
    """Return the throughput of STD, its ablations and colocated CoRun over STD's median; empty without STD."""
    base = median_of(results.runs_of(workload, STD), "output_throughput")
    names = [name for name in results.names if name in {STD, "colocated"} or is_ablation(name)]
    found = {name: spread_of(results.runs_of(workload, name), "output_throughput") for name in names}
    return {name: value.over(base) for name, value in found.items() if value and base}


@styled
def kernels(results: Results) -> Figure | None:
    """Draw the latency of each kernel and variant with its slowdown over STD: a panel per number of rows."""
    timed = [entry for entry in results.kernels if (number(entry, "median_us") or 0) > 0]
    rows = _few(sorted({number(entry, "rows") or 0 for entry in timed}))
    if not timed:
        return None
    names = list(dict.fromkeys(entry["kernel"] for entry in timed))
    variants = in_order(entry["variant"] for entry in timed)
    columns = min(len(rows), 2)
    height = 0.2 + len(names) * (0.12 + 0.15 * len(variants))
    figure, axes = panels(len(rows), columns=columns, height_in=height)
    for i, (ax, count) in enumerate(zip(axes, rows, strict=True)):
        of_rows = [entry for entry in timed if (number(entry, "rows") or 0) == count]
        _kernel_panel(ax, of_rows, names, variants)
        ax.set_title(f"{count:.0f} rows" if count != 1 else "1 row")
        ax.tick_params(labelleft=i % columns == 0)
    figure.supxlabel("latency (µs)", fontsize=9)
    handles = [_dot(_colour(variants, name)) for name in variants]
    seen = [words for words in _MARKS if words in {_bits(entry) for entry in timed}]
    add_legend(figure, [*handles, *(_dot(GREY, words) for words in seen)], [*variants, *seen])
    return figure


def _few(counts: list[float]) -> list[float]:
    """Return at most MAX_PANELS of the counts, the first and the last among them."""
    last = len(counts) - 1
    return counts if last < MAX_PANELS else [counts[round(i * last / (MAX_PANELS - 1))] for i in range(MAX_PANELS)]


def _colour(variants: Sequence[str], name: str) -> str:
    return _KERNEL_COLOURS.get(name) or looks(variants)[name].colour


_MARKS: dict[str, dict[str, Any]] = {
    "batch-invariant": {"marker": "o"},
    "position-invariant only": {"marker": "o", "fillstyle": "left", "markerfacecoloralt": "white"},
    "neither": {"marker": "o", "markerfacecolor": "white"},
    "bits not compared": {"marker": "x"},
}


def _bits(entry: Json) -> str:
    """Return what was measured of a kernel's bits, in the words of the legend."""
    if entry.get("batch_invariant") is None:
        return "bits not compared"
    if entry["batch_invariant"] is True:
        return "batch-invariant"
    return "position-invariant only" if entry.get("position_invariant") is True else "neither"


def _dot(colour: str, words: str = "batch-invariant", at: tuple[float, float] | None = None) -> Line2D:
    x, y = ([at[0]], [at[1]]) if at else ([], [])
    return Line2D(x, y, color=colour, linestyle="none", **_MARKS[words])


def _kernel_panel(ax: Axes, entries: Sequence[Json], names: Sequence[str], variants: Sequence[str]) -> None:
    bases = {entry["kernel"]: number(entry, "median_us") for entry in entries if entry["variant"] == STD}
    step = 0.76 / len(variants)
    for entry in entries:
        y = names.index(entry["kernel"]) + (variants.index(entry["variant"]) - (len(variants) - 1) / 2) * step
        _kernel_dot(ax, entry, y, _colour(variants, entry["variant"]), bases.get(entry["kernel"]))
    for y in range(1, len(names)):
        ax.axhline(y - 0.5, color="#e2e2e2", linewidth=0.7, zorder=0.5)
    ax.set_xscale("log")
    plain_ticks(ax.xaxis)
    low, high = ax.get_xlim()
    ax.set(xlim=(low, high * (high / low) ** 0.18), ylim=(len(names) - 0.5, -0.5))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_yticks(range(len(names)), [wrap(name, 26, 2) for name in names])
    ax.tick_params(axis="y", length=0)


def _kernel_dot(ax: Axes, entry: Json, y: float, colour: str, base: float | None) -> None:
    value = number(entry, "median_us") or 0.0
    low, high = number(entry, "min_us") or value, number(entry, "max_us") or value
    ax.plot([low, high], [y, y], color=colour, linewidth=1.2, alpha=0.6, solid_capstyle="butt")
    ax.add_line(_dot(colour, _bits(entry), (value, y)))
    if base and entry["variant"] != STD:
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7, "color": "#222222"}
        ax.annotate(f"{value / base:.2f}\N{MULTIPLICATION SIGN}", (high, y), (4, 0), **style)
