"""A progress bar on stderr. It is not shown for short work, nor when stderr is a file.

This module must not know what is counted.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY_S = 1.0
"""The number of seconds before the bar appears. Shorter work shows no bar."""


class ProgressBar:
    """A context manager that counts to `total`. shown=None shows the bar only if stderr is a terminal."""

    def __init__(self, total: int, label: str, *, shown: bool | None = None, delay_s: float = DELAY_S) -> None:
        self._total = total
        self._label = label
        self._done = 0
        self._shown = sys.stderr.isatty() if shown is None else shown
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

    def advance(self) -> None:
        with self._lock:
            self._done += 1
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0])

    def _show(self) -> None:
        bar = new_bar()
        with self._lock:
            if not self._shown:
                return
            bar.add_task(self._label, total=self._total, completed=self._done)
            bar.start()
            self._bar = bar


def new_bar() -> Progress:
    # Loading rich takes longer than loading the whole client. A program without a terminal never loads it.
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Rate(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    # Rich estimates by the last 30 s alone, in which slow work may have finished no item.
    return progress.Progress(*columns, console=Console(stderr=True), speed_estimate_period=math.inf)
