"""What the user of `corun up` is told. This module must not know the cluster."""

from __future__ import annotations

import sys
import time
from contextlib import suppress


class Progress:
    """Prints lines with the time since the start on stderr. `change` prints a repeated line only once."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._said: dict[str, str] = {}

    @property
    def quiet_s(self) -> float:
        """The time in seconds since the last line."""
        return time.monotonic() - self._last

    def __call__(self, text: str) -> None:
        self._last = time.monotonic()
        with suppress(BrokenPipeError):  # Nobody reads stderr any more, but the cluster must still be stopped.
            print(f"[{self._last - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def change(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self(f"{subject}: {text}")
