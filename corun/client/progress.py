"""A progress bar on stderr. It is not shown for short work, nor when stderr is a file.

This module must not know what is counted.
"""

from __future__ import annotations

import sys
import threading
import time
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
        self._began = 0.0

    def __enter__(self) -> ProgressBar:
        self._began = time.monotonic()
        if self._shown and self._total:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._shown = False
            if self._bar is not None:
                self._bar.stop()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done, left=self._left())

    def _show(self) -> None:
        bar = _new_bar()
        with self._lock:
            if not self._shown:
                return
            bar.add_task(self._label, total=self._total, completed=self._done, left=self._left())
            bar.start()
            self._bar = bar

    def _left(self) -> str:
        return left(self._done, self._total, time.monotonic() - self._began)


def left(done: int, total: int, elapsed_s: float) -> str:
    """Return in words how long the rest takes at the average pace so far; empty if nothing, or all, is done.

    Rich's own estimate uses the last 30 seconds only. Slow work may have finished no item in them.
    """
    if not done or done >= total:
        return ""
    rest_s = elapsed_s / done * (total - done)
    if rest_s < 90:
        return f"about {max(1, round(rest_s))} s left"
    if rest_s < 90 * 60:
        return f"about {round(rest_s / 60)} min left"
    return f"about {round(rest_s / 3600)} h left"


def _new_bar() -> Progress:
    # Loading rich takes longer than loading the whole client. A program without a terminal never loads it.
    from rich import progress  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[left]}"),
    )
    return progress.Progress(*columns, console=Console(stderr=True))
