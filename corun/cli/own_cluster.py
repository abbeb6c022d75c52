"""A cluster that a command starts for itself on this machine, and that ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corun.config.cluster_file import PoolSpec, toml
from corun.errors import UnavailableError
from corun.models import checked

START_TIMEOUT_S, STOP_TIMEOUT_S = 1800.0, 120.0
"""The longest start, as on Kubernetes: a machine that other work keeps busy takes ten times as long as a quiet one."""
_UP = (sys.executable, "-m", "corun", "up")
_READY = "ready: "
_PREFILL: dict[str, Any] = {"chunk_size": 256, "packed_prefill": False, "free_chunks": False}
_DECODE: dict[str, Any] = {"slots": 8, "smaller_steps": False}
"""Settings for a short start. To look for other ways to the same bits, and to test itself with large chunks, takes a
node on a laptop longer than a short chat lasts."""


@contextmanager
def own_cluster(model: str, replicas: Mapping[str, int], say: Callable[[str], None]) -> Iterator[str]:
    """Run `corun up` with one pool for as long as the block runs. Yield the address of its router.

    model: a path, an id on the hub, or a name. replicas: the number of nodes of each role, by default one of each side.
    say: gets each line that it prints until it is ready. What it prints on stderr goes to this process's.

    Raises:
        InvalidArgumentError: the model is a path without a model.
        UnavailableError: the cluster does not start, or this is not Linux.
    """
    pool = PoolSpec(
        common={"model": checked(model)},
        router={"port": 0},
        prefill=_PREFILL,
        decode=_DECODE,
        colocated={**_PREFILL, **_DECODE, "mixed_steps": False},
        replicas=dict(replicas),
    )
    if sys.platform != "linux":
        raise UnavailableError("clusters run on Linux only: name a running one with --router HOST:PORT")
    from corun import processes  # It uses signals that other systems lack.  # noqa: PLC0415

    # A guard ends the cluster if this process dies of a closed terminal or a signal. The cluster has its own session:
    # Ctrl-C reaches only this process, which then ends the cluster in order.
    guard = (sys.executable, "-I", processes.__file__, str(os.getpid()), str(STOP_TIMEOUT_S))
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(toml(pool))
        file.flush()
        command = [*guard, *_UP, file.name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
            try:
                yield _wait_until_ready(up, say)
            finally:
                up.terminate()
                up.wait()  # The guard kills what does not end in time. Without it, orphans would be left.


def _wait_until_ready(up: subprocess.Popen[str], say: Callable[[str], None]) -> str:
    """Return the router's address, which `corun up` prints when its cluster can be used."""
    assert up.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        up.terminate()

    watchdog = threading.Timer(START_TIMEOUT_S, end)
    watchdog.start()
    try:
        for line in up.stdout:
            say(line.rstrip())
            if line.startswith(_READY):
                return line.removeprefix(_READY).partition(",")[0]
    finally:
        watchdog.cancel()
    code = up.wait(STOP_TIMEOUT_S)
    if is_late.is_set():
        raise UnavailableError(
            f"the cluster was not ready after {START_TIMEOUT_S:g} s: this machine is slow or busy (corun up waits more)"
        )
    raise UnavailableError(f"the cluster did not start (exit code {code})")
