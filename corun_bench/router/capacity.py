"""A router's capacity, and the delay it adds to its clients' tokens: real routers, fake nodes, a raw client.

Two paths are measured on this machine, one after the other: through `python -m router`, and straight from the fake
nodes over a bare gRPC stream per sample. A token's delay is the time from the emission of its step until the client has
read it. The router adds the difference of the two paths' quantiles. This difference may be negative: without a router,
each node has to serve its streams by itself. Routers, nodes and clients share the machine's cores. This module must not
know command lines, or how a path is measured (`paths`).
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import corun
from corun_bench.conditions import cpu
from corun_bench.router.fake_engines import MAX_NODES
from corun_bench.router.paths import SHARES, Setup, measure_direct, measure_router

__all__ = ["Setup", "conditions", "is_carried", "measure", "search"]

GOAL_MS = 5.0
"""The longest delay that a router may add, in milliseconds."""
GOAL_AT = ("p50", "p90", "p99")
"""The quantiles at which the goal must hold: p99 alone is not enough, since the bare path may be late there, too."""
DELIVERED = 0.98
"""The share of the offered tokens that must come for a load to count as carried."""


def measure(setup: Setup) -> dict[str, Any]:
    """Measure both paths; return plain values for JSON. Raises UnavailableError if a process does not do its part."""
    found = conditions(setup)
    runs = [{"router": measure_router(setup), "direct": measure_direct(setup)} for _ in range(setup.repeats)]
    paths = {path: _together([run[path] for run in runs]) for path in ("router", "direct")}
    delays, base = paths["router"]["latency_ms"], paths["direct"]["latency_ms"]
    added = {name: round(delays[name] - base[name], 3) for name in SHARES}
    errors = [error for run in runs for path in run.values() for error in path.pop("errors")]
    result = {"conditions": found, **paths, "added_ms": added, "goal_ms": GOAL_MS, "errors": errors[:5]}
    return {**result, "carried": is_carried(result), "runs": runs}


def search(setup: Setup) -> dict[str, Any]:
    """Measure with one more decode node each time, as long as the router carries them."""
    runs: list[dict[str, Any]] = []
    for decode_nodes in range(1, MAX_NODES + 1):
        runs.append(measure(replace(setup, decode_nodes=decode_nodes)))
        if not runs[-1]["carried"]:
            break
    carried = [run["conditions"]["decode_nodes"] for run in runs if run["carried"]]
    return {"conditions": runs[0]["conditions"], "carried_decode_nodes": max(carried, default=0), "searched": runs}


def is_carried(result: Mapping[str, Any]) -> bool:
    """Return whether the router delivered the offered tokens, all of them right, and within the goal."""
    router, added = result["router"], result["added_ms"]
    kept_up = router["tokens_per_s"] >= DELIVERED * router["offered_tokens_per_s"]
    return bool(kept_up and not router["wrong"] and max(added[name] for name in GOAL_AT) <= GOAL_MS)


def conditions(setup: Setup) -> dict[str, Any]:
    """Return the conditions of a measurement."""
    packages = ("grpcio", "protobuf", "uvloop")
    return {
        **asdict(setup),
        "engines": "fake",
        "cpus": len(os.sched_getaffinity(0)),
        "processor": cpu() or "unknown",
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "corun": corun.__version__,
        **{package: version(package) for package in packages},
    }


def _together(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several runs of one path as one: counts are added up, all other numbers are medians."""
    found: dict[str, Any] = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if name in ("samples", "tokens", "wrong"):
            found[name] = sum(values)
        elif name != "errors":
            found[name] = _together(values) if isinstance(first, Mapping) else statistics.median(values)
    return found
