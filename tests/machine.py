"""What tests need of this machine: command lines of processes that may end at any moment, and free ports.

Tests only.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from pathlib import Path

_FIRST, _END = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections."""
_ports = itertools.count(os.getpid() * 40)


def command_line(pid: int) -> str:
    """Its words, or the title that it gave itself; empty for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def free_port() -> int:
    """A TCP port that nobody listens on, another one at each call; a process that ends finds it free again."""
    for number in itertools.islice(_ports, _END - _FIRST):
        port = _FIRST + number % (_END - _FIRST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {_FIRST} to {_END} is free")
