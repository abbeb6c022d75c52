"""The look of every figure: one colour per system, fonts, panels, legends, and files with the same bytes each time.

This module must not know what a figure shows. It does not use pyplot, so no figure stays open.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

WIDTH_IN, DPI = 8.0, 150
GREY, BAD, GOOD = "#6b6b6b", "#b3261e", "#1a7f37"
_FONT = "DejaVu Sans"  # Comes with matplotlib, so text has the same size on every machine.
_STYLE: Any = {
    "font.family": _FONT,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e2e2e2",
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2,
    "svg.fonttype": "path",
    "svg.hashsalt": "corun bench",
    "text.parse_math": False,  # A "$" in a name is a plain dollar sign.
}
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Look:
    """How one system is drawn, in every figure."""

    colour: str
    marker: str = "o"
    line: Literal["-"] | tuple[float, tuple[float, ...]] = "-"


_DASHED, _DOTTED, _DASH_DOT = (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (5, 1.4, 1.2, 1.4))
# Okabe and Ito's palette, whose colours people with any colour vision can tell apart; Tol's palette for unknown names.
_KNOWN = {
    "std": Look("#555555", "s"),
    "bi": Look("#E69F00", "^"),
    "colocated": Look("#009E73", "o"),
    "colocated+ladder": Look("#8BC34A", "p"),
    "pd-std": Look("#CC79A7", "v", _DASHED),
    "cluster": Look("#004E7C", "D"),
    "cluster:1p1d": Look("#0072B2", "D"),
    "cluster:shared": Look("#56B4E9", "P"),
    "std+nosplit": Look("#A9A9A9", "<", _DASHED),
    "std+isolated": Look("#D55E00", ">", _DASHED),
    # Variants of kernels; `std` and `bi` look like those systems.
    "fixed": Look("#009E73"),
    "fixed-order": Look("#0072B2"),
    "nosplitk": Look("#A9A9A9"),
    "custom": Look("#CC79A7"),
    "row-by-row": Look("#D55E00"),
}
_PLACEMENTS = tuple(Look(colour, "X", _DASH_DOT) for colour in ("#332288", "#44AA99", "#6A5ACD", "#117799"))
_FOREIGN = tuple(
    Look(colour, "h", _DOTTED) for colour in ("#882255", "#999933", "#AA4499", "#661100", "#DDCC77", "#117733")
)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each system. An unknown system gets a look by its name, or the next one that is free."""
    given: dict[str, Look] = {name: _KNOWN[name] for name in names if name in _KNOWN}
    for name in sorted(set(names) - set(given)):
        choices = _PLACEMENTS if name.startswith("cluster:") else _FOREIGN
        start = hashlib.sha256(name.encode("utf-8", "replace")).digest()[0]
        probed = [choices[(start + i) % len(choices)] for i in range(len(choices))]
        given[name] = next((look for look in probed if look not in given.values()), probed[0])
    return given


def styled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function, run in the style of all figures."""

    @functools.wraps(function)
    def in_style(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with mpl.rc_context(_STYLE):
            return function(*args, **kwargs)

    return in_style


def panels(count: int, *, columns: int = 3, height_in: float = 1.9) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, each about `height_in` inches high, row by row."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH_IN, rows * height_in + 0.3), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for spare in grid[count:]:
        spare.remove()
    return figure, grid[:count]


def add_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Add one legend above all panels, in as many rows as its labels need."""
    texts = [clean(label, 40) for label in labels]
    texts = [f"\u200a{text}" if text.startswith("_") else text for text in texts]  # A leading "_" hides a label.
    columns = min(len(texts), max(1, 110 // (max(map(len, texts)) + 8)))
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(texts) // columns))
    figure.legend(list(handles), texts, loc="outside upper center", ncols=columns)


def log_axis(ax: Axes, axis: Axis, at: Sequence[float] = (), *, base: float = 10) -> None:
    """Make an axis logarithmic, with short numbers, at the places `at` if any are given."""
    (ax.set_xscale if axis is ax.xaxis else ax.set_yscale)("log", base=base)
    axis.set_major_locator(FixedLocator(list(at)) if at else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    short_numbers(axis)


def short_numbers(axis: Axis) -> None:
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


def compact(value: float) -> str:
    """Return a number in few characters, as for a tick or a bar: 0.53, 7.4, 128, 12.3k, 1.2M."""
    for limit, unit, suffix in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{_three_digits(value / unit)}{suffix}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    if abs(value) >= 100 or value == round(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}"


@styled
def svg_of(figure: Figure) -> str:
    """Return the figure as SVG, with the same bytes each time and without comments, which would hold our texts."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = re.sub(r"<!--.*?-->\n?|<metadata>.*?</metadata>\n?", "", buffer.getvalue().decode(), flags=re.DOTALL)
    return re.sub(r"^\s+|\s+$", "", text, flags=re.MULTILINE) + "\n"


@styled
def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; make the directory if it does not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = directory / f"{name}.png", directory / f"{name}.svg"
    svg.write_text(svg_of(figure), encoding="utf-8", newline="\n")
    figure.savefig(png, metadata={"Software": None})
    return [png, svg]
