"""What routers carry, and the delay they add to their clients' tokens: real routers, fake nodes, one load generator.

Two paths are measured on this machine, one after the other: through `python -m router`, one or several at the same
nodes, with a stream for each connection, as the SDK has it, and straight from the fake nodes over a bare gRPC stream
per sample. `--separate` adds a third: through the routers with a stream for each sample, as other clients may have it.
A token's delay is the time from the emission of its step until the client has read it. Routers add the difference of
their path's quantiles and the bare path's. This difference may be negative: without a router, each node has to serve
its streams by itself. Meanwhile empty calls show how far the routers' event loops are behind. Routers, nodes and
clients share the machine's cores.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.table import Table

from corun.client.client import Client
from corun.client.progress import ProgressBar
from corun.errors import UnavailableError
from corun.models import tiny
from corun.rpc.ports import reserve
from corun.types import NodeState
from corun_bench import tables
from corun_bench.children import Processes
from corun_bench.conditions import cpu, load_average, versions
from corun_bench.fake_node import DIRECT_METHOD
from corun_bench.options import CapacityOptions, plain

GOAL_MS = 5.0
"""The longest delay that a router may add, in milliseconds."""
GOAL_AT = ("p50", "p90", "p99")
"""The quantiles at which the goal must hold: p99 alone is not enough, since the bare path may be late there, too."""
DELIVERED = 0.98
"""The share of the offered tokens that must come for a load to count as carried."""
METHODS = {"router": "", "separate": "/corun.v1.ClusterService/Generate", "direct": DIRECT_METHOD}
"""The paths, with the method of a stream for each sample; empty: the samples of a connection share a stream."""
START_S = 60.0
DRAIN_S = 150.0
"""The time for clients to receive the samples in flight and to read them, in seconds."""
END_S = 30.0
"""The time for fake nodes to end after they are told to, in seconds."""
PROBE_S, PROBE_TIMEOUT_S = 0.02, 30.0
"""The time between two empty calls, and the longest one, in seconds."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_KINDS = {"router": "router", "client": "clients"}


def measure(setup: CapacityOptions) -> dict[str, Any]:
    """Measure all paths; return plain values for JSON.

    Raises:
        InvalidArgumentError: an option is out of range.
        UnavailableError: a process does not do its part.
    """
    setup.check()
    found = conditions(setup)
    wanted = [path for path in METHODS if path != "separate" or setup.separate]
    runs: list[dict[str, dict[str, Any]]] = [{} for _ in range(setup.repeats)]
    with ProgressBar(setup.repeats * len(wanted), "paths", refresh_hz=1.0) as bar:
        for run, path in itertools.product(runs, wanted):
            run[path] = _measure_path(setup, path)
            bar.advance()
    paths = {path: _together([run[path] for run in runs]) for path in runs[0]}
    delays, base = paths["router"]["latency_ms"], paths["direct"]["latency_ms"]
    added = {name: round(delays[name] - base[name], 3) for name in SHARES}
    errors = [error for run in runs for path in run.values() for error in path.pop("errors")]
    result = {"conditions": found, **paths, "added_ms": added, "goal_ms": GOAL_MS, "errors": errors[:5]}
    return {**result, "carried": is_carried(result), "runs": runs}


def sweep(setup: CapacityOptions, routers: Sequence[int], decode_nodes: Sequence[int]) -> dict[str, Any]:
    """Measure with each of these numbers of routers and decode nodes, one after the other.

    What cannot be measured is in the result as a text. Raises UnavailableError if nothing was measured.
    """
    setups = [replace(setup, routers=number, decode_nodes=count) for number in routers for count in decode_nodes]
    for one in setups:
        one.check()
    runs, failures = [], []
    for one in setups:
        try:
            runs.append(measure(one))
        except UnavailableError as error:  # The load may be more than the machine carries.
            where = f"{_routers(one.routers)}, {one.decode_nodes} decode nodes"
            failures.append(f"{where}: {str(error).splitlines()[0]}")
    if not runs:
        raise UnavailableError("; ".join(failures))
    carried = {str(number): 0 for number in routers}
    for found in [run["conditions"] for run in runs if run["carried"]]:
        name = str(found["routers"])
        carried[name] = max(carried[name], found["decode_nodes"])
    first = runs[0]["conditions"]
    return {"conditions": first, "carried_decode_nodes": carried, "sweep": runs, "failures": failures}


def is_carried(result: Mapping[str, Any]) -> bool:
    """Return whether the router delivered the offered tokens, all of them right, and within the goal."""
    router, added = result["router"], result["added_ms"]
    kept_up = router["tokens_per_s"] >= DELIVERED * router["offered_tokens_per_s"]
    return bool(kept_up and not router["wrong"] and max(added[name] for name in GOAL_AT) <= GOAL_MS)


def conditions(setup: CapacityOptions) -> dict[str, Any]:
    return {
        **plain(setup, CapacityOptions),
        "engines": "fake",
        "cpus": len(os.sched_getaffinity(0)),
        "processor": cpu() or "unknown",
        "load_average": load_average(),
        **versions(("grpcio", "protobuf", "uvloop")),
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


def _measure_path(setup: CapacityOptions, path: str) -> dict[str, Any]:
    # After this block no process is left, nor any file that they wrote.
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as scratch, Processes(Path(scratch)) as processes:
        direct = path == "direct"
        ports = [reserve("127.0.0.1") for _ in range(setup.decode_nodes if direct else setup.routers)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        kind = "direct" if direct else "colocated" if setup.colocated else "decode"
        nodes = [(kind, index) for index in range(setup.decode_nodes)]
        for index, port in enumerate(() if direct else ports):
            # No audits: they would run samples again, as extra load that is not measured.
            flags = ("--router-id", f"r{index}", "--audit-fraction", "0")
            processes.start(f"router-{index}", "router", "--port", str(port), *flags)
        # Several, so that a larger load does not wait for one process of them.
        prefills = [("prefill", index) for index in range(-(-setup.decode_nodes // 2))] if kind == "decode" else []
        # A router knows a colocated node as two.
        num_known = 2 * len(nodes) if kind == "colocated" else len(prefills) + len(nodes)
        for role, index in [*prefills, *nodes]:
            options = {"role": role, "index": index, "model": str(tiny.ensure()), "slots": setup.slots}
            options |= {"step_ms": setup.step_ms_of(index), "routers": addresses, "port": ports[index] if direct else 0}
            processes.start(f"{role}-{index}", "corun_bench.fake_node", json.dumps(options))
        for address in () if direct else addresses:
            with Client(address, timeout_s=START_S, connect_timeout_s=START_S) as client:
                what = f"router {address} does not use all nodes"
                _await(processes, what, functools.partial(_are_ready, client, num_known))
        figures = _load(setup, processes, METHODS[path], addresses, () if direct else addresses)
        for name in [name for name in processes.running if not name.startswith("router")]:
            processes.terminate(name, END_S)  # The clients have ended.
        return figures


def _probe(addresses: Sequence[str], over: threading.Event) -> list[float]:
    """Make empty calls of routers, one after the other, until `over` is set. Return the time of each call in seconds.

    A call waits until all that is in its router's event loop has had its turn, so its time is the loop's lag and a
    little more. No addresses: nothing is called. Raises UnavailableError if a call fails.
    """
    times = []
    with ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(address)) for address in addresses]
        for stub in itertools.cycle([health_pb2_grpc.HealthStub(channel) for channel in channels]):
            if over.wait(PROBE_S):
                break
            began = time.monotonic()
            try:
                stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.RpcError as error:
                raise UnavailableError(f"an empty call of a router failed: {error}") from error
            times.append(time.monotonic() - began)
    return times


def _load(
    setup: CapacityOptions, processes: Processes, method: str, addresses: Sequence[str], routers: Sequence[str]
) -> dict[str, Any]:
    """Put the load on a path, and return its figures. routers: those that get empty calls meanwhile."""
    names = [f"client-{index}" for index in range(setup.client_processes)]
    for index, name in enumerate(names):
        options = {"setup": plain(setup, CapacityOptions), "index": index, "method": method, "addresses": addresses}
        options["output"] = str(processes.logs / f"{name}.json")
        processes.start(name, "corun_bench.load", json.dumps(options), stdin=subprocess.PIPE)
    for name in names:  # Python takes long to start where cores are few.
        _await(processes, f"{name} is not up", (processes.logs / f"{name}.ready").exists)
    processes.wait(setup.ramp_s + setup.warmup_s)
    began, before = time.monotonic(), _by_kind(processes.cpu_s())
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(_probe, routers, over)
        try:
            processes.wait(setup.seconds)
        finally:
            over.set()
    ended, after = time.monotonic(), _by_kind(processes.cpu_s())
    used = {kind: sum(after[kind]) - sum(before[kind]) for kind in after}
    rss = {kind: max(sizes) for kind, sizes in _by_kind(processes.memory()).items()}
    processes.finish(names, DRAIN_S)
    figures = _figures(setup, [processes.logs / f"{name}.json" for name in names], (began, ended), used)
    calls = {"empty_call_ms": quantiles(probing.result())} if routers else {}
    return {**figures, **calls, "rss_mib": rss}


def _figures(
    setup: CapacityOptions, clients: Sequence[Path], measured: tuple[float, float], used: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of one path. clients: the files of the load's results."""
    began, ended = measured
    results = [json.loads(path.read_text()) for path in clients]
    errors = [error for result in results for error in result["errors"]]
    firsts = [first - sent for result in results for sent, first in result["first"] if began <= sent <= ended]
    total = {name: sum(result[name] for result in results) for name in ("calls", "tokens", "messages")}
    times = [time for result in results for time in result["times"]]
    came = sum(began <= at <= ended for at, _ in times)
    delays = [delay for at, delay in times if began <= at - delay <= ended]
    gaps = [gap for result in results for at, gap in result["gaps"] if began <= at <= ended]
    seconds = ended - began
    latency = quantiles(delays)  # Raises if nothing came.
    return {
        "offered_tokens_per_s": round(setup.offered, 1),
        "tokens_per_s": round(came / seconds, 1),
        "latency_ms": latency,
        "itl_ms": quantiles(gaps),
        "ttft_ms": quantiles(firsts),
        "cpu_s_per_1000_tokens": {kind: round(1000 * cpu / came, 4) for kind, cpu in used.items()},
        "cores": {kind: round(cpu / seconds, 3) for kind, cpu in used.items()},
        "tokens_per_message": round(total["tokens"] / total["messages"], 3),
        "samples": total["calls"],
        "tokens": total["tokens"],
        "wrong": len(errors),
        "errors": errors,
    }


def quantiles(seconds: Sequence[float], shares: Mapping[str, float] = SHARES) -> dict[str, float]:
    """Return the quantiles in milliseconds. Raises UnavailableError if there is nothing to rank."""
    if not seconds:
        raise UnavailableError("nothing came in the time that was measured: it must be longer, or the load smaller")
    ranked, last = sorted(seconds), len(seconds) - 1
    return {name: round(1000 * ranked[round(share * last)], 3) for name, share in shares.items()}


def _by_kind(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Group numbers by the kind of their process, as its name begins."""
    found: dict[str, list[float]] = {}
    for process, value in values.items():
        found.setdefault(_KINDS.get(process.partition("-")[0], "nodes"), []).append(value)
    return found


def _are_ready(client: Client, number: int) -> bool:
    """Return whether a router uses this many nodes."""
    return [node.state for node in client.get_cluster(timeout_s=START_S).nodes].count(NodeState.READY) >= number


def _await(processes: Processes, trouble: str, is_so: Callable[[], bool]) -> None:
    """Wait for something while all processes run. Raises UnavailableError with `trouble` if it takes too long."""
    deadline = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > deadline:
            raise UnavailableError(f"{trouble} after {START_S:g} s")
        processes.wait(0.05)


def show(result: Mapping[str, Any]) -> None:
    """Print the conditions, and a table for each number of routers and nodes."""
    console = tables.console()
    given = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    console.print(f"conditions: {given}", soft_wrap=True)
    for run in result.get("sweep", (result,)):
        setup, router = run["conditions"], run["router"]
        nodes = f"{setup['decode_nodes']} x {setup['slots']} slots, a step of {setup['step_ms']:g} ms"
        console.print(f"{_routers(setup['routers'])}: {nodes}")
        paths = {path: run[path] for path in METHODS if path in run}
        console.print(_table(paths, run["added_ms"]))
        for path, figures in paths.items():
            used, cores = figures["cpu_s_per_1000_tokens"], figures["cores"]
            shown = ", ".join(f"{kind} {1000 * used[kind]:.1f} ({cores[kind]:.2f} cores)" for kind in used)
            console.print(f"{path}: CPU us per token: {shown}")
        console.print(f"router RSS {router['rss_mib']['router']:.0f} MiB")
        wrong = f"{router['wrong']} of {router['samples']} samples wrong"
        verdict = "carried" if run["carried"] else "not carried"
        console.print(f"{verdict}: {wrong}, goal {run['goal_ms']:g} ms added up to p99")
    for number, count in result.get("carried_decode_nodes", {}).items():
        console.print(f"{_routers(int(number))}: {count} decode nodes carried")
    for failure in result.get("failures", ()):
        console.print(f"not measured: {failure}", style="red", soft_wrap=True)


def _routers(number: int) -> str:
    return f"{number} router{'' if number == 1 else 's'}"


def _table(paths: Mapping[str, Mapping[str, Any]], added_ms: Mapping[str, float]) -> Table:
    names = [*(f"{name} ms" for name in SHARES), "ITL p99", "TTFT p99", "call p99"]
    table = tables.grid("", numbers=["tokens/s", *names])
    for path, figures in paths.items():
        rest = [figures[name]["p99"] for name in ("itl_ms", "ttft_ms", "empty_call_ms") if name in figures]
        times = (f"{each:.2f}" for each in [*figures["latency_ms"].values(), *rest])
        table.add_row(path, f"{figures['tokens_per_s']:.0f}", *times)
    table.add_row("added", "", *(f"{added_ms[name]:.2f}" for name in SHARES))
    return table
