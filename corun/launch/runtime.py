"""The Ray that places the processes: either started on loopback for one launch, or a running Ray that is joined.

This module owns the life of that Ray, its environment, the import of ray, and the signals that end a launch. It must
not know what is placed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.members import LOOPBACK
from corun.processes import descendants, end_tree

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMESPACE = "corun"
AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
"""The variable that Ray sets where it starts with a token. A process that joins needs the same value."""

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray leaves CUDA_VISIBLE_DEVICES unchanged.
    "RAY_memory_monitor_refresh_ms": "0",  # Ray must not kill an actor for its memory: it holds little.
}
_LOCAL_RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Otherwise Ray listens on the public interface.
    # The processes would inherit what Ray does to its workers: lower CPU priority, and first to be killed when memory
    # runs out.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
}
# Variables that Ray adds to the environment of its workers. The processes do not need them, and OMP_NUM_THREADS could
# change bits of the output.
_ADDED_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")
_CONNECT_TIMEOUT_S = 10.0


class StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP. One asks for the end, two ask for a quick end, the third ends this process.

    The handler raises no exception: an exception inside gRPC's or Ray's code could leave their locks held.
    """

    def __init__(self) -> None:
        self.count = 0
        # A signal that the parent process set to be ignored (nohup) stays ignored.
        self._before = {n: signal.getsignal(n) for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Install the handlers, again if other code has replaced them."""
        for number in self._before:
            signal.signal(number, self._received if self.count < 2 else signal.SIG_DFL)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.install()


def api() -> Any:
    """Return the module ray. It reads its environment when it is imported, so the environment must be set before."""
    import ray  # noqa: PLC0415

    return ray


def own_host() -> str:
    """Return the address of this machine, as Ray knows it."""
    return str(api().util.get_node_ip_address())


def living() -> set[str]:
    """Return Ray's ids of the machines that are alive. A machine that comes back has a new id, even at the same
    address."""
    return {node["NodeID"] for node in api().nodes() if node["Alive"]}


def hosts() -> dict[str, str]:
    """Return Ray's id of each machine that is alive, by the address of the machine."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in reversed(api().nodes()) if node["Alive"]}


def on(node_id: str) -> dict[str, Any]:
    """Return the options of an actor that must run on one given machine."""
    strategy = api().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"scheduling_strategy": strategy(node_id, soft=False)}


def environment() -> dict[str, str]:
    """Return the environment of this process, without the variables that Ray added."""
    return {key: value for key, value in os.environ.items() if key not in _ADDED_BY_RAY}


@contextmanager
def started(address: str | None, signals: StopSignals) -> Iterator[None]:
    """Join a running Ray, or start a local one that leaves no process and no file behind.

    Raises UnavailableError if Ray cannot be started or joined, and InvalidArgumentError for an empty address.
    """
    os.environ.update(_RAY_ENVIRONMENT if address else _RAY_ENVIRONMENT | _LOCAL_RAY_ENVIRONMENT)
    scratch = "" if address else tempfile.mkdtemp(prefix="corun-ray-", dir="/tmp")  # A socket's path must be short.
    local = {
        "num_cpus": 1,
        "object_store_memory": 80 * 2**20,  # This is Ray's minimum; nothing is stored.
        "include_dashboard": False,
        "_node_ip_address": LOOPBACK,
        "_temp_dir": scratch,
    }
    try:
        _init(address, {} if address else local)
        signals.install()
        yield
    finally:
        begun = {} if address else descendants(os.getpid())
        api().shutdown()
        end_tree(begun)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def joined(address: str, host: str = "") -> Iterator[None]:
    """Join a running Ray for as long as the block runs, in which SIGTERM ends this process as Ctrl-C does. host: the
    address of this machine in that Ray; empty: Ray finds the address itself."""
    # A Ray on loopback was started by `started`. Ray keeps the loopback address only with the same environment.
    os.environ.update(_RAY_ENVIRONMENT | _LOCAL_RAY_ENVIRONMENT if host == LOOPBACK else _RAY_ENVIRONMENT)
    _init(address, {"_node_ip_address": host} if host else {})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's handler prints the stack of its own code.
    try:
        yield
    finally:
        api().shutdown()


def _check_listens(address: str) -> None:
    """Raise UnavailableError if the address is host:port and nothing listens there. Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not (port.isascii() and port.isdigit()):
        return  # It is auto or local, or of a form that Ray knows.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, ValueError) as error:  # Python also refuses endless numbers, and some names.
        raise UnavailableError(f"nothing listens at {address}: {error}") from error


def _init(address: str | None, options: dict[str, Any]) -> None:
    if address == "":
        raise InvalidArgumentError("ray_address", address, "must be HOST:PORT, or auto")
    _check_listens(address or "local")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        # Without an address, Ray would use the one in RAY_ADDRESS.
        api().init(address or "local", namespace=NAMESPACE, **quiet, **options)
    except Exception as error:  # Some of Ray's own are no more than that (ray/_private/node.py).
        is_told = address is None or AUTH_MODE_VARIABLE in os.environ
        hint = "" if is_told else f"; if it has a token, set {AUTH_MODE_VARIABLE}=token"
        raise UnavailableError(f"Ray did not start: {error}{hint}") from error
