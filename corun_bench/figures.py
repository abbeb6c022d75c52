"""Figures of a result: throughput, phases over time, latencies, concurrency, goodput; padding, ablation, kernels.

The figures are the counterparts of those in the paper's evaluation. Each function draws data of result files, and
returns None if they have none for its figure. One colour stands for one system in every figure. A figure's files have
the same bytes each time. This module must not use pyplot, so that no figure stays open.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from corun_bench.results import (
    STD,
    Json,
    Results,
    Spread,
    good_share,
    in_order,
    is_ablation,
    mapping,
    median_of,
    number,
    numbers,
    padding_of,
    spread_of,
)
from corun_bench.tables import compact

MAX_POINTS = 100
"""The most points of a distribution; if there are more samples, this many quantiles are drawn."""
WIDTH_IN, DPI = 8.0, 150
GREY, BAD, GOOD = "#6b6b6b", "#b3261e", "#1a7f37"
_FONT = "DejaVu Sans"  # That of the style.
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


@dataclass(frozen=True, slots=True)
class Look:
    """How one system is drawn, in every figure."""

    colour: str
    marker: str = "o"
    line: Literal["-"] | tuple[float, tuple[float, ...]] = "-"


_DASHED, _DOTTED = (0, (5, 1.6)), (0, (1.2, 1.4))
# Okabe and Ito's palette, whose colours people with any colour vision can tell apart; Tol's palette for other names.
_KNOWN = {
    "std": Look("#555555", "s"),
    "bi": Look("#E69F00", "^"),
    "colocated": Look("#009E73", "o"),
    "colocated+ladder": Look("#8BC34A", "p"),
    "pd-std": Look("#CC79A7", "v", _DASHED),
    "cluster": Look("#004E7C", "D"),
    "cluster:1p1d": Look("#0072B2", "D"),
    "cluster:shared": Look("#56B4E9", "P"),
    "cluster:colocated": Look("#0A9396", "X"),
    "std+nosplit": Look("#A9A9A9", "<", _DASHED),
    "std+isolated": Look("#D55E00", ">", _DASHED),
    # Variants of kernels; `std` and `bi` look like those systems.
    "fixed": Look("#009E73"),
    "fixed-order": Look("#0072B2"),
    "nosplitk": Look("#A9A9A9"),
    "custom": Look("#CC79A7"),
    "row-by-row": Look("#D55E00"),
}
_OTHERS = ("#332288", "#44AA99", "#882255", "#999933", "#AA4499", "#661100", "#DDCC77", "#117733", "#6A5ACD")


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each system; systems without a look of their own get one in the order of their names."""
    others = sorted(set(names) - set(_KNOWN))
    spare = itertools.cycle(_OTHERS)
    return _KNOWN | {name: Look(colour, "h", _DOTTED) for name, colour in zip(others, spare, strict=False)}


def throughput(results: Results, *, per_gpu: bool = False) -> Figure | None:
    """Draw the output throughput: a panel per workload, a bar per system, whiskers over repeats.

    The bar of a system whose bits differed is hatched. per_gpu: draw it if systems have different numbers of GPUs, and
    cannot be compared directly.
    """
    if per_gpu and len({results.gpus(name) for name in results.names} - {0}) < 2:
        return None
    cells: dict[str, dict[str, Spread]] = {}
    for workload, name in itertools.product(results.workloads, _serving(results)):
        gpus = results.gpus(name) if per_gpu else 1
        if gpus and (found := spread_of(results.runs_of(workload, name), _THROUGHPUT)):
            cells.setdefault(workload, {})[name] = found.over(gpus)
    if not cells:
        return None
    systems = in_order(name for row in cells.values() for name in row)
    known = looks(results.names)
    handles: dict[str, Artist] = {_with_gpus(results, name): Patch(facecolor=known[name].colour) for name in systems}
    figure, axes = _panels(len(cells), columns=2 if len(systems) > 8 else 3)
    for ax, (workload, row) in zip(axes, cells.items(), strict=True):
        again = {name: results.mismatch(name, workload) if name in row else None for name in systems}
        differ = {name: bool(found and found["different_bits"]) for name, found in again.items()}
        for x, name in enumerate(systems):
            if cell := row.get(name):
                hatch = _HATCH if differ[name] else None
                _bar(ax, x, cell, known[name], compact(cell.median), hatch=hatch)
        ax.set_ylim(0, (max(cell.max for cell in row.values()) or 1) * 1.15)
        counts = [f"{found['different_bits']}/{found['requests']}" if found else "" for found in again.values()]
        ax.set_xticks(range(len(systems)), counts, fontsize=7, rotation=90 if len(systems) > 5 else 0)
        ax.tick_params(axis="x", length=0, pad=2)
        for name, label in zip(systems, ax.get_xticklabels(), strict=True):
            label.set_color(BAD if differ[name] else GOOD)
        _short_numbers(ax.yaxis)
        ax.set_title(_title(results, workload, cells))
    figure.supylabel(f"output throughput\n(tokens/s{' per GPU' * per_gpu}{_common(results, cells)})", fontsize=9)
    if any(results.mismatch(name, workload) for name in systems for workload in cells):
        handles["bits differ"] = Patch(facecolor=GREY, edgecolor="white", hatch=_HATCH, linewidth=0)
        words = "under each bar: requests whose bits differed / requests run again in another crowd"
        figure.supxlabel(words, fontsize=8)
    _legend(figure, handles)
    return figure


def timeline(results: Results, workload: str) -> Figure | None:
    """Draw prefill and decode throughput over time, one above the other, of the first repeat of each system."""
    keys = ("prefill_tokens_per_s", "decode_tokens_per_s")
    lines: dict[str, Json] = {}
    for name in _serving(results):
        for found in (mapping(run, "timeline") for run in results.runs_of(workload, name)):
            if (number(found, "bin_s") or 0) > 0 and any(numbers(found, key) for key in keys):
                lines.setdefault(name, found)
    if not lines:
        return None
    figure, (prefill, decode) = _panels(2, columns=1)
    decode.sharex(prefill)
    known, handles = looks(results.names), dict[str, Artist]()
    for ax, key in ((prefill, keys[0]), (decode, keys[1])):
        for name, line in lines.items():
            values, bin_s = numbers(line, key), number(line, "bin_s") or 0.0
            middles = [(i + 0.5) * bin_s for i in range(len(values))]
            drawn = ax.plot(middles, values, color=known[name].colour, linestyle=known[name].line)
            handles[_with_gpus(results, name)] = drawn[0]
        ax.set(ylabel=f"{key.partition('_')[0]}\n(tokens/s)", ylim=(0, None))
        _short_numbers(ax.yaxis)
    prefill.tick_params(labelbottom=False)
    decode.set(xlabel="time since the first request (s)", xlim=(0, None))
    prefill.set_title(f"{clean(workload)}{_common(results, [workload])}")
    _legend(figure, handles)
    return figure


def latencies(results: Results, *, key: str, words: str) -> Figure | None:
    """Draw the distribution of a latency over the requests of all repeats: a panel per workload."""
    times: dict[str, dict[str, list[float]]] = {}  # In ms.
    for workload, name in itertools.product(results.workloads, _serving(results)):
        if samples := [value for run in results.runs_of(workload, name) for value in numbers(run, key)]:
            times.setdefault(workload, {})[name] = samples
    if not times:
        return None
    longest = max(max(samples) for row in times.values() for samples in row.values())
    unit, scale = ("s", 1e-3) if longest >= 1000 else ("ms", 1.0)
    figure, axes = _panels(len(times))
    known, handles = looks(results.names), dict[str, Artist]()
    for ax, (workload, row) in zip(axes, times.items(), strict=True):
        for name, samples in row.items():
            points = samples if len(samples) <= MAX_POINTS else np.quantile(samples, np.linspace(0, 1, MAX_POINTS))
            line = ax.ecdf(np.array(points) * scale, color=known[name].colour, linestyle=known[name].line)
            handles[_with_gpus(results, name)] = line
        ax.set_ylim(0, 1.02)
        ordered = sorted(at * scale for at in itertools.chain(*row.values()))
        low, high = ordered[len(ordered) // 20], ordered[-1]
        if low > 0 and high > 100 * low:  # On a linear axis, most of the lines would coincide.
            _log_axis(ax, ax.xaxis)
            ax.set_xlim(left=max(ordered[0], high / 1e4) / 1.1)
        else:
            ax.set_xlim(left=0)
            _short_numbers(ax.xaxis)
        ax.grid(axis="x")
        ax.set_title(_title(results, workload, times))
    figure.supxlabel(f"{words} ({unit}{_common(results, times)})", fontsize=9)
    figure.supylabel("share of requests", fontsize=9)
    _legend(figure, handles)
    return figure


def scaling(results: Results) -> Figure | None:
    """Draw the output throughput against the requests in flight, for workloads that ran with several such numbers."""
    counts = {workload: [c for c in results.concurrencies(workload) if c > 0] for workload in results.workloads}
    counts = {workload: values for workload, values in counts.items() if len(values) > 1}
    if not counts:
        return None
    panels = {
        workload: {
            name: {c: spread_of(results.runs_of(workload, name, c), _THROUGHPUT) for c in values}
            for name in _serving(results)
        }
        for workload, values in counts.items()
    }
    figure, axes = _curves(results, panels, "requests in flight", "output throughput\n(tokens/s)")
    for ax, values in zip(axes, counts.values(), strict=True):
        ax.set_ylim(0, None)
        _log_axis(ax, ax.xaxis, values, base=2)
        _short_numbers(ax.yaxis)
    return figure


def goodput(results: Results) -> Figure | None:
    """Draw the share of good requests against the arrival rate, for workloads that ran at several rates."""
    cells: dict[str, dict[str, dict[float, Spread]]] = {}
    for workload, name in itertools.product(results.workloads, _serving(results)):
        runs = results.runs_of(workload, name, results.concurrency(workload))
        for rate in {number(run, "request_rate") or 0.0 for run in runs} - {0.0}:
            if found := good_share(run for run in runs if number(run, "request_rate") == rate):
                cells.setdefault(_at_any_rate(workload), {}).setdefault(name, {})[rate] = found
    panels = {
        workload: {name: dict(sorted(points.items())) for name, points in lines.items()}
        for workload, lines in cells.items()
        if len({*itertools.chain(*lines.values())}) > 1
    }
    if not panels:
        return None
    figure, axes = _curves(results, panels, "requests a second", "share of good requests")
    for ax in axes:
        ax.set(xlim=(0, None), ylim=(0, 1.05))
        _short_numbers(ax.xaxis)
    return figure


def _at_any_rate(workload: str) -> str:
    """Return what a workload's name shares with those of its runs at other arrival rates."""
    return ",".join(part for part in workload.split(",") if not part.startswith("rate="))


def padding(results: Results) -> Figure | None:
    """Draw the output throughput of one request against the rows of a step; unpadded systems are level lines."""
    cells: dict[str, dict[float, list[Json]]] = {}
    for run in results.runs:
        if rows := padding_of(run["workload"]):
            cells.setdefault(run["system"], {}).setdefault(rows, []).append(run)
    widths = sorted({rows for name, cell in cells.items() if name not in _UNPADDED for rows in cell})
    if not widths:
        return None
    figure, (ax,) = _panels(1, height_in=2.3)
    known, handles = looks(results.names), dict[str, Artist]()
    for name in in_order(cells):
        line: Artist | None = None
        if name not in _UNPADDED:
            found = {rows: spread_of(runs, _THROUGHPUT) for rows, runs in sorted(cells[name].items())}
            line = _spread_line(ax, {rows: cell for rows, cell in found.items() if cell and cell.min > 0}, known[name])
        elif level := median_of(itertools.chain(*cells[name].values()), _THROUGHPUT):
            line = ax.axhline(level, color=known[name].colour, linestyle=known[name].line)
        if line:
            handles[_with_gpus(results, name)] = line
    _log_axis(ax, ax.xaxis, widths, base=2)
    _log_axis(ax, ax.yaxis)
    ax.set(xlabel="rows of a decode step, one of them in use", ylabel="output throughput\n(tokens/s)")
    _legend(figure, handles)
    return figure


def ablation(results: Results) -> Figure | None:
    """Draw output throughput as a share of STD's, with one more constraint per bar: a group of bars per workload."""
    names = [name for name in results.names if name in {STD, "colocated"} or is_ablation(name)]
    cells: dict[str, dict[str, Spread]] = {}
    for workload in results.workloads:
        base = median_of(results.runs_of(workload, STD), _THROUGHPUT)
        found = {name: spread_of(results.runs_of(workload, name), _THROUGHPUT) for name in names}
        row = {name: cell.over(base) for name, cell in found.items() if cell and base}
        if any(map(is_ablation, row)):
            cells[workload] = row
    if not cells:
        return None
    systems = in_order(name for row in cells.values() for name in row)
    figure, (ax,) = _panels(1, height_in=2.2)
    known, width = looks(results.names), 0.84 / len(systems)
    for (i, row), (j, name) in itertools.product(enumerate(cells.values()), enumerate(systems)):
        if cell := row.get(name):
            x = i + (j - (len(systems) - 1) / 2) * width
            _bar(ax, x, cell, known[name], f"{cell.median:.2f}", width=width * 0.92)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle="--", zorder=0.9)
    ax.set_xticks(range(len(cells)), [wrap(name, max(8, 84 // len(cells))) for name in cells])
    ax.tick_params(axis="x", length=0)
    ax.set(xlim=(-0.6, len(cells) - 0.4), ylim=(0, None), ylabel="output throughput\n(share of std)")
    _legend(figure, {name: Patch(facecolor=known[name].colour) for name in systems})
    return figure


def kernels(results: Results) -> Figure | None:
    """Draw the latency of each kernel and variant with its slowdown over STD, at the fewest and at the most rows."""
    timed = [entry for entry in results.kernels if (number(entry, "median_us") or 0) > 0]
    if not timed:
        return None
    counts = sorted({number(entry, "rows") or 0 for entry in timed})
    rows = counts if len(counts) == 1 else [counts[0], counts[-1]]
    names = list(dict.fromkeys(entry["kernel"] for entry in timed))
    variants = in_order(entry["variant"] for entry in timed)
    height = 0.4 + len(names) * (0.12 + 0.15 * len(variants))
    figure, axes = _panels(len(rows), columns=2, height_in=height)
    for ax, count in zip(axes, rows, strict=True):
        _kernel_panel(ax, [entry for entry in timed if (number(entry, "rows") or 0) == count], names, variants)
        ax.set_title(f"{count:.0f} rows" if count != 1 else "1 row")
        ax.tick_params(labelleft=ax is axes[0])
    figure.supxlabel("latency (µs)", fontsize=9)
    seen = {_bits(entry) for entry in timed}
    # A variant is a colour and what is known of bits a shape, so no two entries look alike.
    handles: dict[str, Artist] = {name: Patch(facecolor=looks(variants)[name].colour) for name in variants}
    _legend(figure, handles | {words: _dot(GREY, words) for words in _MARKS if words in seen})
    return figure


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
    _log_axis(ax, ax.xaxis)
    low, high = ax.get_xlim()
    ax.set_xlim(low, high * 1.8)  # Room for the slowdowns.
    ax.set_yticks(range(len(names)), [wrap(name, 24, 2) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")


def _bits(entry: Json) -> str:
    """Return what was measured of a kernel's bits, in the words of the legend."""
    if entry.get("batch_invariant") is None:
        return "bits not compared"
    if entry["batch_invariant"] is True:
        return "batch-invariant"
    return "position-invariant only" if entry.get("position_invariant") is True else "neither"


def _dot(colour: str, words: str = "batch-invariant", x: Sequence[float] = (), y: Sequence[float] = ()) -> Line2D:
    return Line2D(x, y, color=colour, linestyle="none", **_MARKS[words])


def _bar(
    ax: Axes, x: float, cell: Spread, look: Look, text: str, *, hatch: str | None = None, width: float = 0.8
) -> None:
    whisker = [[cell.median - cell.min], [cell.max - cell.median]] if cell.repeats > 1 else None
    ax.bar(x, cell.median, width, color=look.colour, edgecolor="white", linewidth=0, hatch=hatch, yerr=whisker)
    # A label must stay clear of its whisker.
    ax.annotate(text, (x, cell.max), (0, 2), textcoords="offset points", ha="center", fontsize=7)


def _curves(
    results: Results, panels: Mapping[str, Mapping[str, Mapping[float, Spread | None]]], x_words: str, y_words: str
) -> tuple[Figure, list[Axes]]:
    """Draw a panel for each workload, and in it a line for each system; return the figure and the panels."""
    figure, axes = _panels(len(panels), columns=2, height_in=2.3)
    known, handles = looks(results.names), dict[str, Artist]()
    for ax, (workload, lines) in zip(axes, panels.items(), strict=True):
        for name, points in lines.items():
            if line := _spread_line(ax, points, known[name]):
                handles[_with_gpus(results, name)] = line
        ax.set_title(wrap(workload, 40))
    figure.supxlabel(x_words, fontsize=9)
    figure.supylabel(y_words, fontsize=9)
    _legend(figure, handles)
    return figure, axes


def _spread_line(ax: Axes, spreads: Mapping[float, Spread | None], look: Look) -> Artist | None:
    """Draw medians as a line, and the lowest and the highest repeats as whiskers; return None without a point."""
    points = {x: cell for x, cell in spreads.items() if cell}
    if not points:
        return None
    cells = points.values()
    whiskers = [[cell.median - cell.min for cell in cells], [cell.max - cell.median for cell in cells]]
    medians = [cell.median for cell in cells]
    drawn = ax.errorbar([*points], medians, whiskers, color=look.colour, linestyle=look.line, marker=look.marker)
    return drawn.lines[0]


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


def _panels(count: int, *, columns: int = 3, height_in: float = 1.9) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, each about `height_in` inches high, row by row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH_IN, rows * height_in + 0.3), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in grid[count:]:
        spare.remove()
    return figure, grid[:count]


def _legend(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """Add one legend above all panels, in as many rows as its labels need."""
    texts = [clean(label, 40) for label in handles]
    columns = min(len(texts), max(1, 110 // (max(map(len, texts)) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(texts) // columns))
    figure.legend(list(handles.values()), texts, loc="outside upper center", ncols=columns)


def _log_axis(ax: Axes, axis: Axis, at: Sequence[float] = (), *, base: float = 10) -> None:
    """Make an axis logarithmic, with short numbers, at the places `at` if any are given."""
    (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log", base=base)
    axis.set_major_locator(FixedLocator(list(at)) if at else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    _short_numbers(axis)


def _short_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def clean(text: object, limit: int = 80) -> str:
    """Return a text as one line of at most `limit` characters, all of which the font has."""
    font = font_manager.get_font(font_manager.findfont(_FONT))
    flat = " ".join(str(text).split())
    shown = flat if len(flat) <= limit else flat[: limit - 1] + "…"
    return "".join(char if font.get_char_index(ord(char)) else "\N{REPLACEMENT CHARACTER}" for char in shown)


def wrap(text: object, width: int = 24, lines: int = 3) -> str:
    """Return a long name in several lines, which may also end after a comma."""
    parts = clean(text).replace(",", ",\v").removesuffix("\v")
    wrapped = textwrap.wrap(parts, width, max_lines=lines, placeholder="…", replace_whitespace=False)
    return "\n".join(wrapped).replace("\v", "") or "(no name)"


_FIGURES: dict[str, Callable[..., Figure | None]] = {
    "throughput": throughput,
    "throughput-per-gpu": partial(throughput, per_gpu=True),
    "timeline": timeline,
    "ttft": partial(latencies, key="ttfts", words="time to first token"),
    "tpot": partial(latencies, key="tpots", words="time per output token"),
    "scaling": scaling,
    "goodput": goodput,
    "padding": padding,
    "ablation": ablation,
    "kernels": kernels,
}
"""All figures in the order of the page, which has the words about them."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure that was written."""

    kind: str
    workload: str
    """The workload that it shows, if it shows one of several."""
    svg: str
    paths: list[Path]


def write(results: Results, directory: Path) -> list[Chart]:
    """Draw all figures for which the results have data, and write each as a PNG and as an SVG file."""
    made = []
    with mpl.rc_context(fname=Path(__file__).with_suffix(".mplstyle")):
        for kind, draw in _FIGURES.items():
            for place, workload in enumerate(results.workloads if draw is timeline else [""], start=1):
                figure = draw(results, workload) if workload else draw(results)
                if figure is not None:
                    slug = re.sub(r"[^a-z0-9]+", "-", workload.lower()).strip("-")[:40] or "workload"
                    name = f"{kind}-{place}-{slug}" if workload else kind
                    made.append(Chart(kind, workload, *_save(figure, directory, name)))
    return made


def _save(figure: Figure, directory: Path, name: str) -> tuple[str, list[Path]]:
    """Write a figure's files; return its SVG element and the paths.

    The file has the same bytes each time. It is without comments, which would hold our texts, and without ids of
    groups, which all figures share and nothing refers to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = directory / f"{name}.png", directory / f"{name}.svg"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"<!--.*?-->\n?|<metadata>.*?</metadata>\n?", "", buffer.getvalue().decode(), flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", re.sub(r"^\s+|\s+$", "", text, flags=re.MULTILINE)) + "\n"
    svg.write_text(text, encoding="utf-8", newline="\n")
    figure.savefig(png, metadata={"Software": None})
    return text[text.index("<svg") :], [png, svg]
