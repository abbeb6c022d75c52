"""The look of every figure: one colour per system, fonts, panels, legends, and files with the same bytes each time.

Owns style and output. This module must not know what a figure shows. It does not use pyplot, so no figure stays open.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image  # Pillow comes with matplotlib, which writes PNG with it.

WIDTH_IN = 8.0
DPI = 150
CHAR_EM = 0.62
"""The width of a character, as a share of the font size; most characters are narrower."""
GREY = "#6b6b6b"
BAD = "#b3261e"
GOOD = "#1a7f37"

_TINTS = 10
_LINE_IN, _LEGEND_LINE_IN, _CHAR_IN = 0.16, 0.19, 0.062
_FONT = "DejaVu Sans"  # Comes with matplotlib, so text has the same size on every machine.
_STYLE: Any = {
    "font.family": _FONT,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e2e2e2",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.9,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "corun bench",
    "text.parse_math": False,  # A "$" in a name is a plain dollar sign.
}


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
}
_VARIANTS = tuple(Look(colour, "X", _DASH_DOT) for colour in ("#332288", "#44AA99", "#6A5ACD", "#117799"))
_FOREIGN = tuple(
    Look(colour, "h", _DOTTED) for colour in ("#882255", "#999933", "#AA4499", "#661100", "#DDCC77", "#117733")
)

_DECIMALS = re.compile(r"(\.\d\d)\d+")  # A hundredth of a point is enough.
_P = ParamSpec("_P")
_T = TypeVar("_T")


def styled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return the function, run in the style of all figures; a figure that it returns gets the height that it needs."""

    @functools.wraps(function)
    def in_style(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with mpl.rc_context(_STYLE):
            made = function(*args, **kwargs)
            if isinstance(made, Figure):
                _make_room(made)
            return made

    return in_style


def _make_room(figure: Figure) -> None:
    """Make a figure higher by the space of its titles and turned labels, so that its panels keep their height."""
    rows: dict[int, float] = {}
    for ax in figure.axes:
        grid = ax.get_subplotspec()
        row = grid.rowspan.start if grid else 0
        turned = max((len(label.get_text()) for label in ax.get_xticklabels() if label.get_rotation()), default=0)
        needed = _LINE_IN * (ax.get_title().count("\n") + bool(ax.get_title())) + _CHAR_IN * turned
        rows[row] = max(rows.get(row, 0.0), needed)
    figure.set_figheight(figure.get_figheight() + sum(rows.values()))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each system. An unknown system gets a look by its name, or the next one that is free."""
    given: dict[str, Look] = {name: _KNOWN[name] for name in names if name in _KNOWN}
    for name in sorted(set(names) - set(given)):
        choices = _VARIANTS if name.startswith("cluster:") else _FOREIGN
        start = hashlib.sha256(name.encode("utf-8", "replace")).digest()[0]
        probed = [choices[(start + i) % len(choices)] for i in range(len(choices))]
        given[name] = next((look for look in probed if look not in given.values()), probed[0])
    return given


def panels(count: int, *, columns: int = 3, height_in: float = 1.7) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, each `height_in` inches high, row by row."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
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
    columns = next(n for n in range(len(texts), 0, -1) if n == 1 or _legend_width(texts, n) < 72 * WIDTH_IN)
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE_IN * math.ceil(len(texts) / columns))
    figure.legend(list(handles), texts, loc="outside upper center", ncols=columns, handlelength=2.2, columnspacing=1.6)


def _legend_width(texts: Sequence[str], columns: int) -> float:
    """Return the width in points. Columns are filled one after the other; the first may have one label more."""
    rows, longer = divmod(len(texts), columns)
    starts = [i * rows + min(i, longer) for i in range(columns + 1)]
    widest = (max(len(text) for text in texts[a:b]) for a, b in itertools.pairwise(starts))
    return float(mpl.rcParams["legend.fontsize"]) * sum(CHAR_EM * chars + 4.6 for chars in widest)


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
def png_of(figure: Figure) -> bytes:
    """Return the figure as PNG with a palette, which takes a third of the bytes."""
    image = Image.open(io.BytesIO(_printed(figure, "png", {"Software": None}))).convert("RGB")
    buffer = io.BytesIO()
    paletted = image.quantize(palette=_palette(), dither=Image.Dither.NONE)
    paletted.save(buffer, "png", optimize=True, dpi=(DPI, DPI))
    return buffer.getvalue()


@functools.lru_cache
def _palette() -> Image.Image:
    """Return greys, and a few tints of every colour that a figure may have, for smooth edges."""
    found = {look.colour for look in (*_KNOWN.values(), *_VARIANTS, *_FOREIGN)} | {BAD, GOOD}
    shades = [(8 * i, 8 * i, 8 * i) for i in range(32)]
    for rgb in (to_rgb(colour) for colour in sorted(found)):
        shades += [_tint(rgb, 1 - i / _TINTS) for i in range(_TINTS)]
    flat = [value for shade in (*shades, (255, 255, 255)) for value in shade]
    image = Image.new("P", (1, 1))
    image.putpalette(flat + [255] * (3 * 256 - len(flat)))
    return image


def _tint(rgb: tuple[float, float, float], share: float) -> tuple[int, int, int]:
    """Return a colour that covers white by `share`, in 8 bits per channel."""
    red, green, blue = (round(255 * (1 - share * (1 - value))) for value in rgb)
    return red, green, blue


@styled
def svg_of(figure: Figure) -> str:
    """Return the figure as SVG, with the same bytes each time and without comments, which would hold our texts."""
    text = _printed(figure, "svg", dict.fromkeys(("Creator", "Date", "Format", "Type"))).decode()
    text = re.sub(r"<!--.*?-->\n?|<metadata>.*?</metadata>\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'( d| x| y)="[^"]*"', lambda found: _DECIMALS.sub(r"\1", found[0]), text)
    return re.sub(r"^\s+|\s+$", "", text, flags=re.MULTILINE) + "\n"


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg; make the directory if it does not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = directory / f"{name}.png", directory / f"{name}.svg"
    png.write_bytes(png_of(figure))
    svg.write_text(svg_of(figure), encoding="utf-8", newline="\n")
    return [png, svg]


def _printed(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    if isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # A second layout would move things a little, and take a while.
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=metadata)
    return buffer.getvalue()
