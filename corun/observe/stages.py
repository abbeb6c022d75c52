"""What a process that starts is doing: lines of its log, which its supervisor reads.

Owns the form of these lines. Must not know which stages there are.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MARK = "stage: "
_MOST_BYTES = 2**20
"""Of a log that are looked at in one go."""


def enter(stage: str) -> None:
    """Say what this process does from now on. Past Python's own stderr, which vLLM replaces in its processes."""
    with suppress(OSError):  # Nobody reads any more.
        os.write(2, f"{_MARK}{stage}\n".encode())


class Reader:
    """Follows one log."""

    def __init__(self, log: Path) -> None:
        self._log, self._start, self._offset, self._stage = log, 0, 0, ""

    def stage(self, start: int) -> str:
        """The last stage that was entered behind `start`, a place in the log in bytes; empty: none."""
        if self._start != start:
            self._start, self._offset, self._stage = start, start, ""
        for line in self._new_lines():
            if line.startswith(_MARK):
                self._stage = line.removeprefix(_MARK)
        return self._stage

    def _new_lines(self) -> list[str]:
        """Nothing, if the log is gone: its directory may be one that is cleared now and then."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._offset)
                found = log.read(_MOST_BYTES)
        except OSError:
            return []
        text, newline, rest = found.rpartition(b"\n")
        is_too_long = not newline and len(rest) == _MOST_BYTES  # No end of the line is in sight.
        self._offset += len(rest) if is_too_long else len(text) + len(newline)
        return text.decode("utf-8", "replace").splitlines()
