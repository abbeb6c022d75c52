"""Turns on a GPU that prefill and decode engines share: prefill goes first, and decode waits, but only up to a limit.

Processes on one GPU get equal slices of its time, however much work their steps do, so decode steps of a few requests
would halve the speed of prefill. Therefore a prefill engine holds a lock on the GPU's lock file while it computes, and
a decode engine puts off each step during that time, up to a limit. A process that ends releases its lock. Turns affect
only speed, no bit. Must not know: vLLM, what a step is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from corun.node.scratch import own_folder

POLL_S = 0.0005
LOOK_S = 0.005
"""The longest wait for a turn before a step without rows, in seconds. It delays what was drawn or read by no more."""
log = logging.getLogger(__name__)


def lock_file(gpu: str, base: Path | None = None) -> Path | None:
    """Return the lock file of a GPU, by its UUID, for the engines of one user on one machine.

    Return None if there can be none: then engines take no turns, which costs only speed.
    """
    try:
        return own_folder(base) / f"gpu-{gpu}"
    except OSError as error:
        log.warning("engines on one GPU take no turns: %s", error)
        return None


class _Lock:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _take(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _leave(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class PrefillTurn(_Lock):
    """A prefill engine's side of the lock; several prefill engines may hold it at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_held = False

    def hold(self, busy: bool) -> None:
        """Take the lock if this engine is busy; release it if not."""
        if busy and not self.is_held:
            # A decode engine that tests the lock at this moment makes this fail; the next call tries again.
            self.is_held = self._take(fcntl.LOCK_SH)
        elif not busy and self.is_held:
            self._leave()
            self.is_held = False


class DecodeTurn(_Lock):
    """A decode engine's side of the lock.

    longest_s: the longest time between the starts of two steps while prefill computes; 0: do not wait.
    """

    def __init__(self, path: Path, longest_s: float) -> None:
        super().__init__(path)
        self._longest_s = longest_s
        self._last_step = -longest_s

    def wait(self) -> bool:
        """Wait until a step may begin, for up to `LOOK_S`. Return whether it may: no prefill engine computes, or the
        last step began `longest_s` ago."""
        give_up = time.monotonic() + LOOK_S
        while time.monotonic() < self._last_step + self._longest_s and not self._is_free():
            if time.monotonic() >= give_up:
                return False
            time.sleep(POLL_S)
        return True

    def note_step(self) -> None:
        """Remember that a step begins now."""
        self._last_step = time.monotonic()

    def _is_free(self) -> bool:
        if not self._take(fcntl.LOCK_EX):
            return False
        self._leave()
        return True
