"""Process trees of this machine: which processes descend from which, and how to end a whole tree.

This module works on Linux only (/proc). It must not know what the processes are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from corun.guard import children, stat_fields

_STEP_S = 5.0


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


def living(tree: Mapping[int, str]) -> list[int]:
    """Return the processes of a tree that have not ended."""
    return [pid for pid, started in tree.items() if _start_time(pid) == started]


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that the main threads of a process's living descendants have used so far."""
    fields = [stat_fields(descendant, f"task/{descendant}/") for descendant in descendants(pid)]
    # These are fields 14 and 15 of proc_pid_stat(5). It counts from 1, and includes the pid and the name.
    return sum(int(found[11]) + int(found[12]) for found in fields if found is not None) / os.sysconf("SC_CLK_TCK")


def _start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; None if it has ended, reaped or not."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]
