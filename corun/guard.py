"""Runs one command so that nothing of it outlives the process that asked for it.

    python -I guard.py PARENT_PID GRACE_S COMMAND...

Owns the command's whole process tree. The first SIGTERM asks the command to end and gives it GRACE_S seconds; a second
one, or the parent's death, ends it at once: whoever starts it again needs its ports and its GPU. When the command has
ended, whatever it left behind is killed, also children whose own parent died without them. Exits as the command did, or
with 128 + the signal that killed it.
A script of the standard library alone: it starts in milliseconds and must not know what it runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_KILL_TIMEOUT_S = 10.0
# Wakes the wait now and then, should a signal ever be missed.
_WAKE_S = 1.0


def main(arguments: Sequence[str]) -> int:
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP_SIGNALS, signal.SIGCHLD})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # It died before it could be watched.
        return 1
    guard = os.getpid()
    # preexec_fn is safe in a process without threads.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(guard))  # noqa: PLW1509
    code = _wait(child.pid, parent, grace_s)
    child.returncode = code
    end_children(guard)
    return code if code >= 0 else 128 - code


def children(pid: int) -> list[int]:
    """The children of a process, ascending, with those that have ended and were not reaped."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(child for child in pids if (fields := stat_fields(child)) is not None and int(fields[1]) == pid)


def stat_fields(pid: int, thread: str = "") -> list[str] | None:
    """What /proc/PID/stat says after the name: state, parent, …; None if there is no such process.

    thread: "task/TID/" for those of one thread.
    """
    try:
        # "pid (name) state ppid …": the name may hold spaces and parentheses.
        return Path(f"/proc/{pid}/{thread}stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def end_children(pid: int, timeout_s: float = _KILL_TIMEOUT_S) -> None:
    """Kills and reaps this process's children, and those that they leave to it in turn."""
    deadline = time.monotonic() + timeout_s
    while (found := children(pid)) and time.monotonic() < deadline:
        for child in found:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def _wait(child: int, parent: int, grace_s: float) -> int:
    """The command's exit code; negative for a signal."""
    kill_at: float | None = None
    while (code := _reap().get(child)) is None:
        left = _WAKE_S if kill_at is None else min(_WAKE_S, max(0.0, kill_at - time.monotonic()))
        received = signal.sigtimedwait({*_STOP_SIGNALS, signal.SIGCHLD}, left)
        if received is not None and received.si_signo in _STOP_SIGNALS:
            if kill_at is None:
                os.kill(child, signal.SIGTERM)
            kill_at = time.monotonic() + (grace_s if kill_at is None else 0.0)
        # A thread of the parent may end without it, which sends the same signal: what tells is who the parent is.
        if os.getppid() != parent or (kill_at is not None and time.monotonic() >= kill_at):
            os.kill(child, signal.SIGKILL)
            kill_at = time.monotonic() + _KILL_TIMEOUT_S
    return code


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended; as a subreaper this process gets orphans too."""
    ended = {}
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = os.waitstatus_to_exitcode(result[1])
    return ended


def _die_with(guard: int) -> None:
    """In the command's process, before it is the command."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.getppid() != guard:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
