"""What tests look up on this machine may be gone when they do."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress

from tests.machine import STRIDE, command_line, free_port


def test_a_process_that_has_ended_has_no_command_line() -> None:
    words = [sys.executable, "-c", "print(1, flush=True); input()"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert command_line(process.pid).split(" ")[:2] == words[:2]
    process.communicate(b"\n")
    assert command_line(process.pid) == ""


def test_a_port_is_given_once_and_never_one_in_use() -> None:
    first = free_port()
    with socket.socket() as taken:
        with suppress(OSError):  # Somebody else has it: so much the better.
            taken.bind(("127.0.0.1", first + STRIDE))
        ports = {first, *(free_port() for _ in range(20))}
    assert len(ports) == 21
    assert first + STRIDE not in ports
