"""The Ray that processes are placed with: started for one launch alone and on loopback, or joined.

Owns its life, its environment and the import of ray. Must not know what is placed.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corun.errors import UnavailableError
from corun.launch.members import LOOPBACK
from corun.launch.signals import StopSignals
from corun.processes import descendants, end_tree

NAMESPACE = "corun"
AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
"""Ray sets it where it starts with a token; who joins has to know."""

_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Leaves CUDA_VISIBLE_DEVICES alone.
    "RAY_memory_monitor_refresh_ms": "0",  # An actor holds no memory worth killing it for.
}
_LOCAL_RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Else Ray listens on the outward interface.
    # What Ray would do to its workers, the processes would inherit: run after all others, be the first out of memory.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
}
# What Ray adds to the environment of its workers: not the processes' business, and OMP_NUM_THREADS could move bits.
_ADDED_BY_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


def api() -> Any:
    """ray. It reads its environment when it is imported, so that has to be set before."""
    import ray  # noqa: PLC0415

    return ray


def own_host() -> str:
    """The address of this machine, as Ray knows it."""
    return str(api().util.get_node_ip_address())


def living() -> set[str]:
    """Ray's ids of the machines that live; one that comes back has another, at the same address too."""
    return {node["NodeID"] for node in api().nodes() if node["Alive"]}


def hosts() -> dict[str, str]:
    """Ray's ids of the machines that live, by address."""
    return {node["NodeManagerAddress"]: node["NodeID"] for node in reversed(api().nodes()) if node["Alive"]}


def on(node_id: str) -> dict[str, Any]:
    """Options of an actor that has to be on one machine."""
    strategy = api().util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"scheduling_strategy": strategy(node_id, soft=False)}


def here() -> dict[str, Any]:
    """Options of an actor that has to be on this machine."""
    return on(api().get_runtime_context().get_node_id())


def environment() -> dict[str, str]:
    """This process's, without what Ray added to it."""
    return {key: value for key, value in os.environ.items() if key not in _ADDED_BY_RAY}


@contextmanager
def started(address: str | None, signals: StopSignals) -> Iterator[None]:
    """A Ray to place actors with: a running one, or one that is started here and leaves no process and no file behind.

    Raises UnavailableError if it cannot be started or joined.
    """
    os.environ.update(_RAY_ENVIRONMENT if address else _RAY_ENVIRONMENT | _LOCAL_RAY_ENVIRONMENT)
    scratch = "" if address else tempfile.mkdtemp(prefix="corun-ray-", dir="/tmp")  # A socket's path must be short.
    local = {
        "num_cpus": 1,
        "object_store_memory": 80 * 2**20,  # Ray takes no less; nothing is stored.
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
    """A running Ray. host: the address of this machine there; empty: Ray finds out."""
    # On loopback it was started by `started`: only with the same environment, Ray leaves that address as it is.
    os.environ.update(_RAY_ENVIRONMENT | _LOCAL_RAY_ENVIRONMENT if host == LOOPBACK else _RAY_ENVIRONMENT)
    _init(address, {"_node_ip_address": host} if host else {})
    try:
        yield
    finally:
        api().shutdown()


def _init(address: str | None, options: dict[str, Any]) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        # Without an address Ray would take the one in RAY_ADDRESS.
        api().init(address or "local", namespace=NAMESPACE, **quiet, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        is_told = address is None or AUTH_MODE_VARIABLE in os.environ
        hint = "" if is_told else f"; if it has a token, set {AUTH_MODE_VARIABLE}=token"
        raise UnavailableError(f"Ray did not start: {error}{hint}") from error
