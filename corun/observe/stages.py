"""The stages of a process's start: lines in its log that say what it is doing, which its supervisor reads.

This module owns the form of these lines. It must not know which stages there are, but for the last.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LAST = "joining the routers"
"""The last stage of a start. A process in an earlier one has never had work."""
_MARK = "stage: "
_MOST_BYTES = 2**20
"""The most bytes of a log that are read in one go."""


def enter(stage: str) -> None:
    """Write to the log what this process does from now on.

    It does not use Python's own stderr, which vLLM replaces in its processes.
    """
    with suppress(OSError):  # Nobody reads the log any more.
        os.write(2, f"{_MARK}{stage}\n".encode())


class Reader:
    """Follows the stages in one log."""

    def __init__(self, log: Path) -> None:
        self._log, self._start, self._offset, self._stage = log, 0, 0, ""

    def stage(self, start: int) -> str:
        """Return the last stage that was entered after `start`, an offset in the log in bytes; empty: none."""
        if self._start != start:
            self._start, self._offset, self._stage = start, start, ""
        try:
            with self._log.open("rb") as log:
                log.seek(self._offset)
                found = log.read(_MOST_BYTES)
        except OSError:  # The log is gone: its directory may get cleared.
            return self._stage
        text, newline, rest = found.rpartition(b"\n")
        is_too_long = not newline and len(rest) == _MOST_BYTES  # Skip it: the line has no end.
        self._offset += len(rest) if is_too_long else len(text) + len(newline)
        for line in text.decode("utf-8", "replace").splitlines():
            if line.startswith(_MARK):
                self._stage = line.removeprefix(_MARK)
        return self._stage
