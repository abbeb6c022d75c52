"""A progress bar on stderr: how much is done, at which rate, and the time that is left.

It is not shown for short work, nor when stderr is no terminal. This module must not know what is counted.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S = 1.0
"""The number of seconds before the bar appears. Shorter work shows no bar."""
BAR_WIDTH, LABEL_WIDTH = 14, 20
"""The widths that leave room for large numbers on a line of 80 columns."""
STYLES = (
    *("bar.complete", "bar.finished", "progress.data.speed", "progress.download", "progress.elapsed"),
    *("progress.percentage", "progress.remaining"),
)
"""The styles in which rich would show colours that mean nothing here, such as red."""


class ProgressBar:
    """A context manager that counts to `total`. shown=None shows the bar only if stderr is a terminal.

    refresh_hz: how often the bar is drawn in a second. Drawing takes the interpreter for about a millisecond.
    """

    def __init__(
        self, total: int, label: str, *, shown: bool | None = None, delay_s: float = DELAY_S, refresh_hz: float = 10.0
    ) -> None:
        self._total = total
        self._label = label
        self._refresh_hz = refresh_hz
        self._done = 0
        # Python has no stderr in a process that began with it closed.
        self._shown = (sys.stderr is not None and sys.stderr.isatty()) if shown is None else shown
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressBar:
        if self._shown and self._total:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._shown = False
            if self._bar is not None:
                self._bar.stop()

    @property
    def is_shown(self) -> bool:
        """Whether the bar is shown, or will be if the work is not short."""
        return self._shown

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0], count)

    def _show(self) -> None:
        bar = new_bar(refresh_hz=self._refresh_hz)
        with self._lock:
            if not self._shown:
                return
            bar.add_task(self._label, total=self._total, completed=self._done)
            bar.start()
            self._bar = bar


def new_bar(*, unit: Literal["items", "bytes", "share"] = "items", refresh_hz: float = 10.0) -> Progress:
    """Return a bar of rich for the tasks that are added to it. unit: what is shown of their counts. A share is of one
    whole, has no rate, and is a guess.

    What is printed while the bar is shown stands above it. If stdout is no terminal, what is printed there goes there.
    """
    # Loading rich takes longer than loading the whole client. A program without a terminal never loads it.
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Column  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415
    from rich.theme import Theme  # noqa: PLC0415

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{in_figures(speed)}/s")

    counts: dict[str, tuple[progress.ProgressColumn, ...]] = {
        "items": (progress.MofNCompleteColumn(), Rate()),
        "bytes": (progress.DownloadColumn(), progress.TransferSpeedColumn()),
        "share": (progress.TaskProgressColumn(),),
    }
    label = Column(no_wrap=True, overflow="ellipsis", max_width=LABEL_WIDTH)
    columns = (
        progress.TextColumn("{task.description}", table_column=label),
        progress.BarColumn(BAR_WIDTH),
        *counts[unit],
        progress.TimeElapsedColumn(),
        *((progress.TextColumn("about"),) if unit == "share" else ()),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    return progress.Progress(
        *columns,
        console=Console(stderr=True, theme=Theme(dict.fromkeys(STYLES, "none") | dict.fromkeys(STYLES[:2], "green"))),
        # Rich estimates by the last 30 s alone, in which slow work may have finished no item.
        speed_estimate_period=math.inf,
        refresh_per_second=refresh_hz,
        transient=unit == "share",  # What is left of a bar should be true.
        redirect_stdout=sys.stdout.isatty(),
    )


def in_figures(number: float) -> str:
    """Return a number with the three figures that count, and never with an exponent."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 0.001 or not number else "<0.001"
