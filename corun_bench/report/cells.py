"""The parts of tables: text in cells, rows and sections, and numbers as text.

Must not know which tables there are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from corun_bench.metrics import Mismatch
from corun_bench.report.plot_kit import compact
from corun_bench.results import Json, leaves

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Text, and its kind, which decides its colour: "", "good", "bad" or "dim"."""

    text: str
    kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of a table; `system` names what the row is about."""

    system: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Rows under one heading."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table. `columns` leaves out the first column, which names the system."""

    columns: tuple[str, ...]
    sections: tuple[Section, ...]


def flat(values: Json) -> list[tuple[str, str]]:
    """Return nested objects as dotted names and their values as text, without empty values."""
    return [(name, _plain(value)) for name, value in leaves(values) if value not in (None, "", [], {}, ())]


def number_cell(value: float | None) -> Cell:
    return Cell(text=NOTHING if value is None else digits(value))


def range_cell(low: float | None, high: float | None) -> Cell:
    return Cell(text=NOTHING if low is None or high is None else f"{digits(low)} … {digits(high)}", kind="dim")


def digits(value: float) -> str:
    """Return a number in few characters, but with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else compact(value)


def count_cell(value: int) -> Cell:
    return Cell(text=str(value) if value else NOTHING)


def share_cell(value: float | None) -> Cell:
    return Cell(text=NOTHING if value is None else f"{value:.1%}")


def ratio_cell(value: float | None, base: float | None) -> Cell:
    return Cell(text=NOTHING if value is None or not base else f"{value / base:.2f}")


def bits_cell(mismatch: Mismatch | None) -> Cell:
    if mismatch is None:
        return Cell(text="not run again", kind="dim")
    text = f"{mismatch.different_bits} of {mismatch.requests}"
    return Cell(text=text, kind="bad" if mismatch.different_bits else "good")


def failed_cell(count: int) -> Cell:
    return Cell(text=str(count), kind="bad" if count else "dim")


def yes_cell(value: object) -> Cell:
    words = {True: Cell(text="yes", kind="good"), False: Cell(text="no", kind="bad")}
    return words[value] if isinstance(value, bool) else Cell(text="not measured", kind="dim")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value)
