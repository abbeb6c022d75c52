"""The two paths of a measurement, each as processes of this machine: what its clients saw, and the CPU time it used.

This module must not know what a router may add.
"""

from __future__ import annotations

import array
import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.client.client import Client
from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.types import NodeState
from corun_bench.children import Processes
from corun_bench.router.fake_engines import MAX_NODES, read_code
from corun_bench.router.fake_nodes import DIRECT_METHOD

GENERATE_METHOD = "/corun.v1.ClusterService/Generate"
START_S = 60.0
DRAIN_S = 150.0
"""The time for clients to receive the samples in flight and to read them, in seconds."""
END_S = 30.0
"""The time for fake nodes to end after they are told to, in seconds: they write the times of their steps."""
_KINDS = {"router": "router", "client": "clients"}
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The parameters of a measurement."""

    decode_nodes: int = 2
    slots: int = 256
    step_ms: float = 30.0
    seconds: float = 20.0
    """The measured time; the warm-up and the end of the samples in flight come on top."""
    output_tokens: int = 256
    prompt_tokens: int = 64
    client_processes: int = 1
    processes: int = 1
    """The number of routers, each on a port of its own; clients use all of them."""
    ramp_s: float = 4.0
    """The time over which the first samples are sent, so that they do not end together."""
    warmup_s: float = 3.0
    """The time after the ramp before the measured time begins."""
    repeats: int = 1
    """How often both paths are measured, in turn; each figure is the median, counts are sums."""

    def __post_init__(self) -> None:
        counts = {"decode_nodes": MAX_NODES, "slots": 4096, "client_processes": 64, "processes": 64, "repeats": 1000}
        for name, most in counts.items():
            _check(name, getattr(self, name), 1, most)
        _check("output_tokens", self.output_tokens, 1, 4096)
        _check("prompt_tokens", self.prompt_tokens, 1, 4096)
        _check("client_processes", self.client_processes, 1, self.samples)
        for name in ("step_ms", "seconds"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(name, getattr(self, name), "must be above 0")

    @property
    def samples(self) -> int:
        """The number of samples in flight: one in every slot."""
        return self.decode_nodes * self.slots

    @property
    def offered(self) -> float:
        """The offered load in tokens per second."""
        return self.samples * 1000 / self.step_ms


def measure_router(setup: Setup) -> dict[str, Any]:
    """Measure the path through routers. Raises UnavailableError if a process does not do its part."""
    with _processes() as processes:
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(setup.processes)]
        for index, address in enumerate(addresses):
            port = address.rpartition(":")[2]
            # No audits: they would run samples again, as extra load that is not measured.
            flags = ("--port", port, "--router-id", f"r{index}", "--audit-fraction", "0")
            processes.start(f"router-{index}", "router", *flags)
        _start_node(processes, setup, "prefill", 0, addresses)
        for index in range(setup.decode_nodes):
            _start_node(processes, setup, "decode", index, addresses)
        for address in addresses:
            _await_nodes(processes, address, 1 + setup.decode_nodes)
        return _Measurement(setup, processes, GENERATE_METHOD, addresses).run()


def measure_direct(setup: Setup) -> dict[str, Any]:
    """Measure the path straight from the fake nodes. Raises UnavailableError if a process does not do its part."""
    with _processes() as processes:
        for index in range(setup.decode_nodes):
            _start_node(processes, setup, "direct", index)
        ports = [_await_text(processes, f"direct-{index}.port") for index in range(setup.decode_nodes)]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        return _Measurement(setup, processes, DIRECT_METHOD, addresses).run()


def _start_node(processes: Processes, setup: Setup, role: str, index: int, routers: Sequence[str] = ()) -> None:
    options = {
        "role": role,
        "index": index,
        "model": tiny.ensure(),
        "slots": setup.slots,
        "step-ms": setup.step_ms,
        "times": processes.logs / f"{role}-{index}.times",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ("--routers", *routers) if routers else ()
    processes.start(f"{role}-{index}", "corun_bench.router.fake_nodes", *words)


class _Measurement:
    """Loads one path and reads what its clients saw."""

    def __init__(self, setup: Setup, processes: Processes, method: str, addresses: Sequence[str]) -> None:
        self._setup = setup
        self._processes = processes
        self._method = method
        self._addresses = addresses

    def run(self) -> dict[str, Any]:
        setup, processes = self._setup, self._processes
        for index in self._clients:
            processes.start(f"client-{index}", "corun_bench.router.load", *self._options(index), stdin=subprocess.PIPE)
        for index in self._clients:  # Python takes long to start where cores are few.
            _await_text(processes, f"client-{index}.ready")
        processes.wait(setup.ramp_s + setup.warmup_s)
        began, before = time.monotonic(), _by_kind(processes.cpu_s())
        processes.wait(setup.seconds)
        ended, after = time.monotonic(), _by_kind(processes.cpu_s())
        used = {kind: sum(after[kind]) - sum(before[kind]) for kind in after}
        rss = {kind: max(sizes) for kind, sizes in _by_kind(processes.memory()).items()}
        processes.finish([f"client-{index}" for index in self._clients], DRAIN_S)
        for name in [name for name in processes.running if _kind(name) == "nodes"]:
            processes.terminate(name, END_S)
        return {**self._figures(began, ended, used), "rss_mib": rss}

    def _options(self, index: int) -> list[str]:
        """Return the options of one client. On both paths it has at least one connection per decode node."""
        setup, number = self._setup, self._setup.client_processes
        options = {
            "method": self._method,
            "concurrency": setup.samples // number + (index < setup.samples % number),
            "prompt-tokens": setup.prompt_tokens,
            "output-tokens": setup.output_tokens,
            "ramp-s": setup.ramp_s,
            "seed": index,
            "output": self._client_file(index, "json"),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        rounds = -(-setup.decode_nodes // len(self._addresses))
        return [*words, "--addresses", *[*self._addresses] * rounds]

    def _figures(self, began: float, ended: float, used: Mapping[str, float]) -> dict[str, Any]:
        results = [json.loads(self._client_file(index, "json").read_text()) for index in self._clients]
        errors = [error for result in results for error in result["errors"]]
        delays, came = self._delays(began, ended)
        firsts = [first - sent for result in results for sent, first in result["first"] if began <= sent <= ended]
        total = {name: sum(result[name] for result in results) for name in ("calls", "tokens", "messages")}
        seconds = ended - began
        return {
            "offered_tokens_per_s": round(self._setup.offered, 1),
            "tokens_per_s": round(came / seconds, 1),
            "latency_ms": quantiles(delays),
            "ttft_ms": quantiles(firsts),
            "cpu_s_per_1000_tokens": {kind: round(1000 * cpu / came, 4) for kind, cpu in used.items()},
            "cores": {kind: round(cpu / seconds, 3) for kind, cpu in used.items()},
            "tokens_per_message": round(total["tokens"] / total["messages"], 3),
            "samples": total["calls"],
            "tokens": total["tokens"],
            "wrong": len(errors),
            "errors": errors,
        }

    @property
    def _clients(self) -> range:
        return range(self._setup.client_processes)

    def _client_file(self, index: int, suffix: str) -> Path:
        return self._processes.logs / f"client-{index}.{suffix}"

    def _delays(self, began: float, ended: float) -> tuple[list[float], int]:
        """Return the delays of tokens whose steps were emitted in this time, and how many tokens came in it."""
        role = "direct" if self._method == DIRECT_METHOD else "decode"
        nodes = [_doubles(self._processes.logs / f"{role}-{index}.times") for index in range(self._setup.decode_nodes)]
        delays, number = [], 0
        for client in self._clients:
            times = _doubles(self._client_file(client, "times"))
            for came, code in zip(times[::2], times[1::2], strict=True):
                number += began <= came <= ended
                index, step = read_code(code)
                if began <= (emitted := nodes[index][step]) <= ended:
                    delays.append(came - emitted)
        return delays, number


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the quantiles in milliseconds. Raises UnavailableError if there is nothing to rank."""
    if not seconds:
        raise UnavailableError("nothing came in the time that was measured: it must be longer, or the load smaller")
    ranked, last = sorted(seconds), len(seconds) - 1
    return {name: round(1000 * ranked[round(share * last)], 3) for name, share in SHARES.items()}


def _doubles(path: Path) -> array.array[float]:
    found = array.array("d")
    found.frombytes(path.read_bytes())
    return found


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidArgumentError(name, value, f"must be {least} to {most}")


@contextlib.contextmanager
def _processes() -> Iterator[Processes]:
    """Give the block an empty set of processes. After the block no process is left, nor any file that they wrote."""
    with tempfile.TemporaryDirectory(prefix="corun-bench-") as scratch, Processes(Path(scratch)) as processes:
        yield processes


def _kind(process: str) -> str:
    return _KINDS.get(process.partition("-")[0], "nodes")


def _by_kind(values: Mapping[str, float]) -> dict[str, list[float]]:
    """Group numbers by the kind of their process."""
    found: dict[str, list[float]] = {}
    for process, value in values.items():
        found.setdefault(_kind(process), []).append(value)
    return found


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _await_nodes(processes: Processes, address: str, number: int) -> None:
    """Wait until a router uses this many nodes."""
    deadline = time.monotonic() + START_S
    with Client(address, timeout_s=START_S, connect_timeout_s=START_S) as client:
        while time.monotonic() < deadline:
            if [node.state for node in client.get_cluster().nodes].count(NodeState.READY) >= number:
                return
            processes.wait(0.1)
    raise UnavailableError(f"router {address} does not use {number} nodes after {START_S:g} s")


def _await_text(processes: Processes, name: str) -> str:
    """Wait for the file by which a process says that it is up; return its text."""
    deadline, path = time.monotonic() + START_S, processes.logs / name
    while not path.exists():
        if time.monotonic() > deadline:
            raise UnavailableError(f"{path.stem} did not start within {START_S:g} s")
        processes.wait(0.05)
    return path.read_text()
