"""Processes of this machine: which descend from which, how to end a whole tree, and a guard that leaves none behind.

    python -I processes.py PARENT_PID GRACE_S COMMAND...

As a script, this is the guard of one command: none of its processes outlives the process that asked for it. The guard
owns the command's whole process tree. The first SIGTERM asks the command to end and gives it GRACE_S seconds. A second
SIGTERM, or the parent's death, kills it at once, since a restart needs its ports and its GPU. When the command has
ended, all processes that it left behind are killed, including orphans. The guard exits with the command's exit code, or
with 128 + the signal that killed it.

This module works on Linux only (/proc), and uses the standard library alone, so the guard starts in milliseconds. It
must not know what the processes are.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_KILL_TIMEOUT_S = 10.0
# The longest that the wait sleeps, in case a signal is ever missed.
_WAKE_S = 1.0
_STEP_S = 5.0


def children(pid: int) -> list[int]:
    """Return the children of a process, ascending, including ended ones that were not reaped yet.

    The kernel's own lists are read, one a thread. A scan of /proc would look up every process of the machine, and in
    the kernel each look-up can hold up whoever reaps that process: guards and engines were seen to spin for minutes.
    The scan is left for kernels without the lists (CONFIG_PROC_CHILDREN).
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return sorted(child for child in pids if (fields := stat_fields(child)) is not None and int(fields[1]) == pid)
    found: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return sorted(found)


def stat_fields(pid: int, thread: str = "") -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, …; None if there is no such process.

    thread: "task/TID/" to get the fields of one thread.
    """
    try:
        # The text is "pid (name) state ppid …". The name may hold spaces, parentheses, and part of a character.
        return Path(f"/proc/{pid}/{thread}stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def descendants(pid: int) -> dict[int, str]:
    """Return every living descendant of a process with its start time.

    A process id and its start time together never name another process.
    """
    tree: dict[int, str] = {}
    for child in children(pid):
        if (started := _start_time(child)) is not None:
            tree[child] = started
            tree |= descendants(child)
    return tree


def started(pids: Iterable[int]) -> dict[int, str]:
    """Return the given processes that are alive, with their start times."""
    return {pid: at for pid in pids if (at := _start_time(pid)) is not None}


def living(tree: Mapping[int, str]) -> list[int]:
    """Return the processes of a tree that have not ended."""
    return [pid for pid, started in tree.items() if _start_time(pid) == started]


def end_tree(tree: Mapping[int, str], step_s: float = _STEP_S) -> None:
    """Wait for processes to end. After each `step_s` seconds, go on to SIGTERM, SIGTERM again, then SIGKILL."""
    for number in (None, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            for pid in living(tree):
                with suppress(ProcessLookupError):  # The process has ended in the meantime.
                    os.kill(pid, number)
        deadline = time.monotonic() + step_s
        while living(tree) and time.monotonic() < deadline:
            time.sleep(0.02)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that the main threads of a process's living descendants have used so far."""
    fields = [stat_fields(descendant, f"task/{descendant}/") for descendant in descendants(pid)]
    # These are fields 14 and 15 of proc_pid_stat(5). It counts from 1, and includes the pid and the name.
    return sum(int(found[11]) + int(found[12]) for found in fields if found is not None) / os.sysconf("SC_CLK_TCK")


def _start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; None if it has ended, reaped or not."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def main(arguments: Sequence[str]) -> int:
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP_SIGNALS, signal.SIGCHLD})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # The parent died before it could be watched.
        return 1
    guard = os.getpid()
    # preexec_fn is safe in a process without threads.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(guard))  # noqa: PLW1509
    code = _wait(child.pid, parent, grace_s)
    child.returncode = code
    end_children(guard)
    return code if code >= 0 else 128 - code


def end_children(pid: int) -> None:
    """Kill and reap the children of this process, and the orphans that they leave to it."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while _reap({}) and time.monotonic() < deadline:
        for child in children(pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def _wait(child: int, parent: int, grace_s: float) -> int:
    """Wait for the command and return its exit code; negative if a signal killed it."""
    kill_at: float | None = None
    ended: dict[int, int] = {}
    while _reap(ended) and child not in ended:
        left = _WAKE_S if kill_at is None else min(_WAKE_S, max(0.0, kill_at - time.monotonic()))
        received = signal.sigtimedwait({*_STOP_SIGNALS, signal.SIGCHLD}, left)
        if received is not None and received.si_signo in _STOP_SIGNALS:
            if kill_at is None:
                os.kill(child, signal.SIGTERM)
            kill_at = time.monotonic() + (grace_s if kill_at is None else 0.0)
        # The kernel sends the same signal when only a thread of the parent ends, so check who the parent is now.
        if os.getppid() != parent or (kill_at is not None and time.monotonic() >= kill_at):
            os.kill(child, signal.SIGKILL)
            kill_at = time.monotonic() + _KILL_TIMEOUT_S
    return ended[child]


def _reap(ended: dict[int, int]) -> bool:
    """Reap the children that have ended, and note their exit codes by pid; a subreaper gets orphans, too. Return
    whether others are left: the list of `children` may miss one that gets this process as its parent at that moment."""
    try:
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = os.waitstatus_to_exitcode(result[1])
    except ChildProcessError:
        return False
    return True


def _die_with(guard: int) -> None:
    """Prepare the child process before it becomes the command: it dies when the guard dies."""
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
