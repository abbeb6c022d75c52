"""Parts that several figures share: bars and lines with their spread, plain ticks, legends of systems.

This module must not know which figures there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from corun_bench.metrics import Spread
from corun_bench.report.plot_kit import Look, add_legend, compact
from corun_bench.report.views import Results, in_order

HATCH = "////"
"""The hatch of a bar whose system's bits were seen to differ."""


def add_bar(ax: Axes, x: float, cell: Spread, colour: str, *, differs: bool = False, width: float = 0.8) -> None:
    ax.bar(x, cell.median, width, color=colour, edgecolor="white", linewidth=0, hatch=HATCH if differs else None)
    if cell.repeats > 1:
        whisker = [[cell.median - cell.min], [cell.max - cell.median]]
        ax.errorbar(x, cell.median, yerr=whisker, fmt="none", ecolor="#222222", elinewidth=0.9, capsize=2)


def add_line(ax: Axes, x: Sequence[float], y: Sequence[float], look: Look, *, marked: bool = False) -> Line2D:
    marker = look.marker if marked else None
    return ax.plot(x, y, color=look.colour, linestyle=look.line, solid_capstyle="butt", marker=marker)[0]


def add_spread_line(ax: Axes, points: Sequence[tuple[float, Spread]], look: Look) -> Artist:
    x, cells = [x for x, _ in points], [cell for _, cell in points]
    below, above = [cell.median - cell.min for cell in cells], [cell.max - cell.median for cell in cells]
    ax.errorbar(x, [c.median for c in cells], yerr=[below, above], fmt="none", ecolor=look.colour, capsize=2)
    return add_line(ax, x, [cell.median for cell in cells], look, marked=True)


def add_system_legend(figure: Figure, results: Results, drawn: dict[str, Artist]) -> None:
    names = in_order(drawn)
    add_legend(figure, [drawn[name] for name in names], [with_gpus(results, name) for name in names])


def plain_ticks(axis: Axis, at: Sequence[float] = ()) -> None:
    """Set short numbers on a logarithmic axis, at the places `at` if any are given."""
    if at:
        axis.set_major_locator(FixedLocator(list(at)))
    short_numbers(axis)
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def short_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))


def with_gpus(results: Results, system: str) -> str:
    """Return a system's name, with its number of GPUs if not all systems have the same number."""
    counts = {results.gpus(name) for name in results.names} - {0}
    gpus = results.gpus(system)
    return f"{system} ({gpus} GPU{'s' * (gpus > 1)})" if len(counts) > 1 and gpus else system
