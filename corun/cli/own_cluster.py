"""A cluster that a command starts for itself on this machine, and that ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from corun.errors import UnavailableError

START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 120.0
_READY = "ready: "


@contextmanager
def own_cluster(words: Sequence[str], say: Callable[[str], None]) -> Iterator[str]:
    """Run `corun up` with `words` for as long as the block runs. Yield the address of its router.

    say: gets each line that it prints until it is ready. What it prints on stderr goes to this process's.

    Raises UnavailableError if the cluster does not start.
    """
    command = [sys.executable, "-m", "corun", "up", *words, "--port", "0"]
    # The cluster has its own session: Ctrl-C reaches only this process, which then ends the cluster in order.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        try:
            yield _wait_until_ready(up, say)
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                up.kill()


def _wait_until_ready(up: subprocess.Popen[str], say: Callable[[str], None]) -> str:
    """Return the router's address, which `corun up` prints when its cluster can be used."""
    assert up.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, up.terminate)
    watchdog.start()
    try:
        for line in up.stdout:
            say(line.rstrip())
            if line.startswith(_READY):
                return line.removeprefix(_READY).partition(",")[0]
    finally:
        watchdog.cancel()
    raise UnavailableError(f"the cluster did not start (exit code {up.wait(STOP_TIMEOUT_S)})")
