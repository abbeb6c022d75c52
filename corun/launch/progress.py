"""What the user of `corun up` is told. Must not know the cluster."""

from __future__ import annotations

import sys
import time
from contextlib import suppress


class Progress:
    """Lines with the time since the start, on stderr; what is repeated is said once."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._said: dict[str, str] = {}

    @property
    def quiet_s(self) -> float:
        """How long nothing was said, in seconds."""
        return time.monotonic() - self._last

    def __call__(self, text: str) -> None:
        self._last = time.monotonic()
        with suppress(BrokenPipeError):  # Nobody reads any more; the cluster still has to be ended.
            print(f"[{self._last - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def change(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self(f"{subject}: {text}")

    def forget(self, subject: str) -> None:
        """It may be said again."""
        self._said.pop(subject, None)
