"""How much a router carries, and how much later its clients get their tokens: real routers, fake nodes, a raw client.

Two paths, one after the other, on this machine: through `python -m router`, and straight from the fake nodes over a bare
gRPC stream per sample. A token's delay is from the moment at which its step was emitted to the one at which the client
has read it; what the router adds is the difference of the two paths. Router, nodes and clients share the machine's
cores. This module must not know command lines.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from corun import tiny
from corun.bench.fake_nodes import DIRECT_METHOD, MAX_NODES, read_code
from corun.client import Client
from corun.cluster import NodeState
from corun.errors import CorunError, InvalidArgumentError, UnavailableError
from corun.guard import stat_fields

GENERATE = "/corun.v1.ClusterService/Generate"
START_S = 60.0
END_S = 150.0
"""For the clients to get what is in flight and to read it."""
GOAL_MS = 5.0
"""Longest 99th percentile that a router may add."""
DELIVERED = 0.98
"""Part of the offered tokens that must have come for a load to count as carried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One measurement."""

    decode_nodes: int = 2
    slots: int = 256
    step_ms: float = 30.0
    seconds: float = 20.0
    output_tokens: int = 256
    prompt_tokens: int = 64
    client_processes: int = 1
    routers: int = 1
    ramp_s: float = 4.0
    warmup_s: float = 3.0
    router_arguments: tuple[str, ...] = ()
    direct: bool = True

    def __post_init__(self) -> None:
        for name, most in (("decode_nodes", MAX_NODES), ("client_processes", 64), ("routers", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidArgumentError(name, getattr(self, name), f"must be 1 to {most}")
        for name in ("slots", "step_ms", "seconds", "output_tokens", "prompt_tokens"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(name, getattr(self, name), "must be above 0")

    @property
    def offered(self) -> float:
        """Tokens a second with every slot in use."""
        return self.decode_nodes * self.slots * 1000 / self.step_ms


def measure(setup: Setup) -> dict[str, Any]:
    """One measurement of both paths, as plain values for JSON. Raises CorunError if a process does not do its part."""
    paths = {"router": _measure_router(setup)}
    result: dict[str, Any] = {"conditions": conditions(setup), "router": paths["router"]}
    if setup.direct:
        result["direct"] = _measure_direct(setup)
        found, base = result["router"]["latency_ms"], result["direct"]["latency_ms"]
        result["added_ms"] = {name: round(found[name] - base[name], 3) for name in found}
    return result


def search(setup: Setup, most: int = MAX_NODES) -> dict[str, Any]:
    """Measures with one decode node more each time, for as long as they are carried within the goal."""
    runs: list[dict[str, Any]] = []
    for decode_nodes in range(1, most + 1):
        runs.append(measure(replace(setup, decode_nodes=decode_nodes)))
        if not is_carried(runs[-1]):
            break
    carried = sum(map(is_carried, runs))
    return {"conditions": runs[0]["conditions"], "goal_ms": GOAL_MS, "carried_decode_nodes": carried, "runs": runs}


def is_carried(result: Mapping[str, Any]) -> bool:
    """Whether a router kept up, within the goal."""
    latency = result["added_ms"] if "added_ms" in result else result["router"]["latency_ms"]
    router = result["router"]
    return bool(router["tokens_per_s"] >= DELIVERED * router["offered_tokens_per_s"] and latency["p99"] <= GOAL_MS)


def conditions(setup: Setup) -> dict[str, Any]:
    """What a measurement was made with."""
    packages = ("grpcio", "protobuf", "uvloop", "corun")
    return {
        **asdict(setup),
        "cpus": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    ranked = sorted(seconds)
    if not ranked:
        raise UnavailableError("nothing came within the measured time")
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    last = len(ranked) - 1
    return {name: round(1000 * ranked[round(share * last)], 3) for name, share in shares.items()}


def _measure_router(setup: Setup) -> dict[str, Any]:
    with _Processes() as processes:
        model = str(tiny.ensure())
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(setup.routers)]
        for index, address in enumerate(addresses):
            words = ["--port", address.rpartition(":")[2], "--router-id", f"router-{index}", "--audit-fraction", "0"]
            processes.start("router", "router", *words, *setup.router_arguments)
        nodes = ["--model", model, "--routers", *addresses]
        processes.start("nodes", "corun.bench.fake_nodes", "--role", "prefill", *nodes, *processes.times("prefill"))
        for index in range(setup.decode_nodes):
            words = ["--role", "decode", "--index", str(index), *_step(setup), *processes.times(f"decode-{index}")]
            processes.start("nodes", "corun.bench.fake_nodes", *words, *nodes)
        for address in addresses:
            _await_nodes(address, 1 + setup.decode_nodes)
        return _Measurement(setup, processes, GENERATE, addresses).run()


def _measure_direct(setup: Setup) -> dict[str, Any]:
    with _Processes() as processes:
        model = str(tiny.ensure())
        for index in range(setup.decode_nodes):
            words = ["--role", "direct", "--index", str(index), *_step(setup), *processes.times(f"decode-{index}")]
            processes.start("nodes", "corun.bench.fake_nodes", *words, "--model", model)
        ports = [processes.path(f"decode-{index}.port") for index in range(setup.decode_nodes)]
        addresses = [f"127.0.0.1:{_await_text(path)}" for path in ports]
        return _Measurement(setup, processes, DIRECT_METHOD, addresses).run()


def _step(setup: Setup) -> list[str]:
    return ["--slots", str(setup.slots), "--step-ms", str(setup.step_ms)]


class _Processes:
    """The processes of one measurement, by kind, and a directory for what they write. All end with it."""

    def __init__(self) -> None:
        self._running: dict[str, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> _Processes:
        self._scratch = tempfile.TemporaryDirectory(prefix="corun-bench-")
        return self

    def __exit__(self, *error: object) -> None:
        for kind in list(self._running):
            self.end(kind)
        self._scratch.cleanup()

    def path(self, name: str) -> Path:
        return Path(self._scratch.name) / name

    def times(self, name: str) -> list[str]:
        return ["--times", str(self.path(f"{name}.times"))]

    def start(self, kind: str, module: str, *words: str) -> None:
        """Its log is kept for when it fails."""
        log = self.path(f"{kind}-{len(self._running.get(kind, ()))}.log")
        with log.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, "-m", module, *words], stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        self._running.setdefault(kind, []).append(child)

    def check(self) -> None:
        """Raises UnavailableError if one has ended."""
        for kind, children in self._running.items():
            for index, child in enumerate(children):
                if child.poll() is not None:
                    raise UnavailableError(f"a process of {kind} ended: {self._last_words(kind, index)}")

    def end(self, kind: str) -> None:
        """Tells all of a kind to end, and waits for them."""
        children = self._running.pop(kind)
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            try:
                child.wait(START_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def finish(self, kind: str) -> None:
        """Closes the inputs of all of a kind and waits until they have ended by themselves."""
        children = self._running.pop(kind)
        for child in children:
            assert child.stdin is not None
            child.stdin.close()
        for index, child in enumerate(children):
            try:
                code = child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code:
                raise UnavailableError(f"a process of {kind} failed ({code}): {self._last_words(kind, index)}")

    def cpu_s(self, kind: str) -> float:
        """CPU seconds that all of a kind have used, with all their threads."""
        fields = [stat_fields(child.pid) for child in self._running[kind]]
        # Numbers 14 and 15 of proc_pid_stat(5), which counts from 1 and the two fields before these.
        ticks = sum(int(found[11]) + int(found[12]) for found in fields if found is not None)
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mib(self, kind: str) -> float:
        """The largest resident memory that any of a kind has now."""
        fields = [stat_fields(child.pid) for child in self._running[kind]]
        pages = max(int(found[21]) for found in fields if found is not None)
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)

    def _last_words(self, kind: str, index: int) -> str:
        return self.path(f"{kind}-{index}.log").read_text(errors="replace").strip()[-2000:]


class _Measurement:
    """Loads one path and reads what its clients saw."""

    def __init__(self, setup: Setup, processes: _Processes, path: str, addresses: Sequence[str]) -> None:
        self._setup = setup
        self._processes = processes
        self._path = path
        self._addresses = addresses

    def run(self) -> dict[str, Any]:
        setup, processes = self._setup, self._processes
        for index in range(setup.client_processes):
            processes.start("clients", "corun.bench.router_load", *self._load(index))
        self._wait(setup.ramp_s + setup.warmup_s)
        kinds = [kind for kind in ("router", "nodes", "clients") if kind in processes._running]
        began, used = time.monotonic(), {kind: processes.cpu_s(kind) for kind in kinds}
        self._wait(setup.seconds)
        ended, used = time.monotonic(), {kind: processes.cpu_s(kind) - used[kind] for kind in kinds}
        rss = {kind: processes.rss_mib(kind) for kind in kinds}
        processes.finish("clients")
        processes.end("nodes")
        return self._figures(began, ended, used, rss)

    def _load(self, index: int) -> list[str]:
        """The options of one of the clients; each has a connection to every address, at least two."""
        setup, number = self._setup, self._setup.client_processes
        total = setup.decode_nodes * setup.slots
        addresses = [*self._addresses] * (-(-setup.decode_nodes // len(self._addresses)))
        options = {
            "path": self._path,
            "concurrency": total // number + (index < total % number),
            "prompt-tokens": setup.prompt_tokens,
            "output-tokens": setup.output_tokens,
            "ramp-s": setup.ramp_s,
            "seed": index,
            "output": self._processes.path(f"clients-{index}.json"),
        }
        named = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*named, "--addresses", *addresses]

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._processes.check()
            time.sleep(min(left, 0.5))

    def _figures(self, began: float, ended: float, used: Mapping[str, float], rss: Mapping[str, float]) -> dict[str, Any]:
        results = [
            json.loads(self._processes.path(f"clients-{index}.json").read_text())
            for index in range(self._setup.client_processes)
        ]
        errors = [error for result in results for error in result["errors"]]
        delays, number = self._delays(began, ended)
        firsts = [first - sent for result in results for sent, first in result["first"] if began <= sent <= ended]
        total = {name: sum(result[name] for result in results) for name in ("calls", "tokens", "messages")}
        return {
            "offered_tokens_per_s": round(self._setup.offered, 1),
            "tokens_per_s": round(number / (ended - began), 1),
            "latency_ms": quantiles(delays),
            "ttft_ms": quantiles(firsts or [0.0]),
            "cpu_s_per_1000_tokens": {kind: round(1000 * seconds / number, 4) for kind, seconds in used.items()},
            "cores": {kind: round(seconds / (ended - began), 3) for kind, seconds in used.items()},
            "rss_mib": dict(rss),
            "tokens_per_message": round(total["tokens"] / max(1, total["messages"]), 3),
            "samples": total["calls"],
            "tokens": total["tokens"],
            "wrong": len(errors),
            "first_errors": errors[:3],
        }

    def _delays(self, began: float, ended: float) -> tuple[list[float], int]:
        """Of the tokens whose steps were emitted within a time; and how many came within it."""
        emitted = [_doubles(self._processes.path(f"decode-{i}.times")) for i in range(self._setup.decode_nodes)]
        delays: list[float] = []
        number = 0
        for index in range(self._setup.client_processes):
            times = _doubles(self._processes.path(f"clients-{index}.times"))
            for came, code in zip(times[::2], times[1::2], strict=True):
                number += began <= came <= ended
                node, step = read_code(code)
                if began <= (at := emitted[node][step]) <= ended:
                    delays.append(came - at)
        return delays, number


def _doubles(path: Path) -> array.array[float]:
    found = array.array("d")
    found.frombytes(path.read_bytes())
    return found


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _await_nodes(address: str, number: int) -> None:
    """Waits until a router uses so many nodes."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(UnavailableError), Client(address, timeout_s=START_S, connect_timeout_s=START_S) as client:
            states = [node.state for node in client.get_cluster().nodes]
            if states.count(NodeState.READY) >= number:
                return
        time.sleep(0.1)
    raise UnavailableError(f"router {address} does not use {number} nodes after {START_S:g} s")


def _await_text(path: Path) -> str:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise UnavailableError(f"a fake node did not start within {START_S:g} s")
        time.sleep(0.05)
    return path.read_text()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
