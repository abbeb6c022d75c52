"""Parts of a picture in text: a bar of a share, a curve of the last values, and numbers that fit a column.

This module must not know what they are about.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

GAUGE_WIDTH = 24
_BARS = "▁▂▃▄▅▆▇█"


def cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def label(name: str) -> tuple[str, str]:
    return f"{name:<9}", "bold"


def curve_of(values: Sequence[float], *, is_ascii: bool) -> Text:
    """Return the last values as columns. The highest column is the largest of these values."""
    shown, most = values[-GAUGE_WIDTH:], max(values[-GAUGE_WIDTH:], default=0.0)
    bars = "_.-=+*#@" if is_ascii else _BARS
    curve = "".join(bars[min(7, int(8 * value / most))] if value > 0 else " " for value in shown)
    return Text(curve.rjust(GAUGE_WIDTH), "green")


def bar_of(part: int, whole: int, width: int, *, is_ascii: bool) -> Text:
    """Return a bar: green for what is used. It is full only if all is, and empty only if nothing is."""
    full = round(width * part / whole) if whole else 0
    full = min(max(full, part > 0), width - (part < whole)) if whole else 0
    used, rest = ("#", ".") if is_ascii else ("█", "░")
    return Text.assemble((used * full, "green"), (rest * (width - full), "dim"))


def share_of(part: float, whole: float) -> float | None:
    """Return a part of a whole; None if there is no whole."""
    return part / whole if whole else None


def short(number: int) -> str:
    """Return a number in at most five characters, as 12.3k."""
    for limit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * limit:
            return f"{number / limit:.0f}{letter}" if number >= 100 * limit else f"{number / limit:.1f}{letter}"
    return str(number)
