"""Processes of one measurement on this machine: started by module name, watched, asked for what they use, ended.

All of them end with it, whatever happens. This module must not know what they do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corun.errors import UnavailableError
from corun.guard import stat_fields

END_S = 30.0
"""For processes that were told to end."""
_POLL_S = 0.25


class LocalProcesses:
    """Processes by kind, and a directory for what they write."""

    def __init__(self) -> None:
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> LocalProcesses:
        self._scratch = tempfile.TemporaryDirectory(prefix="corun-bench-")
        return self

    def __exit__(self, *error: object) -> None:
        for kind in list(self._running):
            self.end(kind)
        self._scratch.cleanup()

    @property
    def kinds(self) -> tuple[str, ...]:
        """That run."""
        return tuple(self._running)

    def path(self, name: str) -> Path:
        """Of a file in the directory."""
        return Path(self._scratch.name) / name

    def start(self, kind: str, module: str, *words: str) -> None:
        """Runs `python -m MODULE WORDS...`; its input stays open until `finish`, its log is kept for when it fails."""
        children = self._running.setdefault(kind, [])
        command = [sys.executable, "-m", module, *words]
        with self._log(kind, len(children)).open("wb") as log:
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log))

    def wait(self, seconds: float) -> None:
        """Raises UnavailableError if one ends meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _POLL_S))

    def check(self) -> None:
        """Raises UnavailableError if one has ended."""
        for kind, children in self._running.items():
            for index, child in enumerate(children):
                if (code := child.poll()) is not None:
                    raise self._failed(kind, index, code)

    def end(self, kind: str) -> None:
        """Tells all of a kind to end, and sees to it that they do."""
        children = self._running.pop(kind)
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            _await(child, END_S)

    def finish(self, kind: str, timeout_s: float) -> None:
        """Closes the inputs of all of a kind, and waits until they have ended by themselves. Raises UnavailableError if
        one failed, or did not in time."""
        for child in self._running[kind]:
            assert child.stdin is not None
            child.stdin.close()
        deadline = time.monotonic() + timeout_s
        for index, child in enumerate(self._running[kind]):
            if code := _await(child, deadline - time.monotonic()):
                raise self._failed(kind, index, code)
        del self._running[kind]

    def cpu_s(self, kind: str) -> float:
        """CPU seconds that all of a kind have used, with all their threads."""
        # Numbers 14 and 15 of proc_pid_stat(5), which counts from 1 and the two fields before these.
        ticks = sum(int(found[11]) + int(found[12]) for found in self._stats(kind))
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mib(self, kind: str) -> float:
        """Resident memory of the one of a kind that has most."""
        pages = max(int(found[21]) for found in self._stats(kind))
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)

    def _stats(self, kind: str) -> list[list[str]]:
        found = [stat_fields(child.pid) for child in self._running[kind]]
        return [fields for fields in found if fields is not None]

    def _failed(self, kind: str, index: int, code: int) -> UnavailableError:
        words = self._log(kind, index).read_text(errors="replace").strip()[-2000:]
        return UnavailableError(f"a process of {kind} ended with {code}: {words}")

    def _log(self, kind: str, index: int) -> Path:
        return self.path(f"{kind}-{index}.log")


def _await(child: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Its exit code; it is killed if it takes too long. Its input is closed."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        return child.wait(max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
