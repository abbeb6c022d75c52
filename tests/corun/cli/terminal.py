"""A terminal of a given size with a command in it, and what stands on its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyte

WAIT_S = 60.0
"""The longest wait for what has to happen, in seconds: it ends what hangs and times nothing."""
ROOT = Path(__file__).parents[3]


class Terminal:
    """A context manager around a command. The process gets SIGKILL at the end if it still runs."""

    def __init__(self, *argv: str, columns: int = 80, lines: int = 24, **environment: str) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._main, self._side = pty.openpty()
        self.resize(columns, lines)
        self.before = self.modes()
        self.written = b""
        """All that was written, with its control sequences."""
        unset = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"}
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        # The first process of a session gets the first terminal that it opens, and with it Ctrl-C.
        opening = ("sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(self._side))
        self.process = subprocess.Popen(
            [*opening, sys.executable, "-m", "corun", *argv],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
            start_new_session=True,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)

    def modes(self) -> object:
        return termios.tcgetattr(self._side)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def text(self) -> str:
        """What stands on the screen, without spaces at the ends of lines."""
        return "\n".join(row.rstrip() for row in self.screen.display)

    def colours(self, word: str) -> set[str]:
        """Return the colours in which a word on the screen is written where it stands first."""
        row, line = next((row, line) for row, line in enumerate(self.screen.display) if word in line)
        start = line.index(word)
        return {self.screen.buffer[row][column].fg for column in range(start, start + len(word))}

    def until(self, condition: Callable[[], bool]) -> str:
        """Read what is written until a condition is true. Return the text on the screen."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to that; on the screen:\n{self.text}"
            self._read(0.05)
        return self.text

    def ended(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        self.until(lambda: self.process.poll() is not None)
        while self._read(0.0):
            pass
        return int(self.process.returncode)

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._main], [], [], timeout_s)[0]:
            return False
        with suppress(OSError):  # Nobody has the terminal any more.
            new = os.read(self._main, 65536)
            self.written += new
            self._stream.feed(new)
        return True
