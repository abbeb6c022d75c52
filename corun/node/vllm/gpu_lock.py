"""Taking turns on a GPU that prefill and decode engines share: prefill goes first, and decode waits, but not for long.

Processes on one GPU get equal slices of its time, whatever their steps are worth, so that decode steps of a few
requests would halve the speed of prefill. Therefore a prefill engine holds a lock on a file of the GPU's while it
computes, and a decode engine puts its steps off meanwhile, each up to a limit. A process that ends lets go of its lock.
Only speed depends on it, no bit. Must not know: vLLM, what a step is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from pathlib import Path

POLL_S = 0.0005
log = logging.getLogger(__name__)


def lock_file(gpu: str, directory: Path | None = None) -> Path | None:
    """That of a GPU, by its UUID; for the engines of one user on one machine. The directory is made.

    None if somebody else has made it, or it cannot be made: then engines take no turns, which costs only speed.
    """
    found = directory or Path(tempfile.gettempdir()) / f"corun-{os.getuid()}"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = found.stat(follow_symlinks=False).st_uid
    except OSError as error:
        log.warning("engines on one GPU take no turns: %s", error)
        return None
    if owner != os.getuid():
        log.warning("engines on one GPU take no turns: %s is another user's", found)
        return None
    return found / f"gpu-{gpu}"


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

    def close(self) -> None:
        os.close(self._descriptor)


class PrefillTurn(_Lock):
    """A prefill engine's side; several may hold it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_held = False

    def hold(self, busy: bool) -> None:
        """Says whether this engine computes."""
        if busy and not self.is_held:
            self.is_held = self._take(fcntl.LOCK_SH)  # Else a decode engine looks right now; there is a next time.
        elif not busy and self.is_held:
            self._leave()
            self.is_held = False


class DecodeTurn(_Lock):
    """A decode engine's side. longest_s: between the starts of two steps while prefill computes; 0: no waiting."""

    def __init__(self, path: Path, longest_s: float) -> None:
        super().__init__(path)
        self._longest_s = longest_s
        self._last_step = 0.0

    def wait(self) -> None:
        """Returns when no prefill engine computes, or when the last step was long enough ago."""
        deadline = self._last_step + self._longest_s
        while time.monotonic() < deadline and not self._is_free():
            time.sleep(POLL_S)
        self._last_step = time.monotonic()

    def _is_free(self) -> bool:
        if not self._take(fcntl.LOCK_EX):
            return False
        self._leave()
        return True
