"""What tests need of this machine: command lines of processes that may end at any moment, free ports, and patience.

Tests only.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_FIRST, _END = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections."""
STRIDE = 8
"""The distance of the ports that one process gives. Workers of pytest-xdist run side by side, and a port is taken only
after it was given, so each of up to this many workers has ports of its own, also in the processes that it starts."""
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_ports = itertools.count(os.getpid() * 40 * STRIDE + _worker % STRIDE, STRIDE)


def command_line(pid: int) -> str:
    """Its words, or the title that it gave itself; empty for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def resident_mib(*pids: int) -> float:
    """Return the resident memory of processes that still run."""
    pages = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def entries(folder: str, *pids: int) -> int:
    """Return the number of entries in a folder of /proc for processes that still run: "fd" or "task"."""
    count = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            count += len(os.listdir(f"/proc/{pid}/{folder}"))
    return count


def free_port() -> int:
    """A TCP port that nobody listens on, another one at each call; a process that ends finds it free again."""
    for number in itertools.islice(_ports, (_END - _FIRST) // STRIDE):
        port = _FIRST + number % (_END - _FIRST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {_FIRST} to {_END} is free")


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Look again and again until the condition holds. Fails with `what` if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.05)
