"""The client where a system lacks what only Unix has: its modules, its signals, and forks."""

from __future__ import annotations

import subprocess
import sys

from tests.corun.fake_router import FakeRouter

LACKING = """
import asyncio, grpc, os, signal, subprocess, sys
import grpc.aio, tyro
for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[name] = None
del os.fork, os.register_at_fork, signal.SIGHUP, signal.SIGKILL, signal.SIGCHLD, signal.pthread_sigmask
"""
GENERATE = """
from corun.cli import main
sys.exit(main(["generate", "hello", "--seed", "42", "--max-tokens", "4", "--router", sys.argv[1]]))
"""


def run(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_client_and_its_commands_need_nothing_that_only_unix_has(fake: FakeRouter) -> None:
    done = run(LACKING + GENERATE, fake.address)
    assert done.returncode == 0, done.stderr
    assert "seed           42" in done.stdout


def test_what_does_need_it_fails_there() -> None:
    """The control: the modules and signals are really missing."""
    assert "SIGHUP" in run(LACKING + "import corun.processes").stderr
    assert "resource" in run(LACKING + "import corun.rpc.server").stderr
