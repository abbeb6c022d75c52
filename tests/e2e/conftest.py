"""One real cluster per test run: a router, a prefill node and a decode node as processes, on the tiny model."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from corun import Client, ClusterStatus, UnavailableError, tiny
from corun.cluster import NodeRole, NodeState
from corun.processes import descendants, end_tree

SLOTS = 8
CHUNK = 128
START_TIMEOUT_S = 240.0
ALL_CHECKED = ("--kv-check-fraction", "1.0")
"""Every prompt's KV is compared by digest after its transfer."""


@dataclass
class Processes:
    """Processes of one cluster; all of them are gone after `stop`."""

    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    commands: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def start(self, name: str, module: str, *flags: str) -> None:
        self.commands[name] = (module, *flags)
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                # In this session: Linux gives each session an equal share of a core, however many of its threads
                # only spin, and the engines share cores here.
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=log,
            )

    def restart(self, name: str) -> None:
        """One that has ended."""
        self.start(name, *self.commands[name])

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def terminate(self, name: str, timeout_s: float = 60.0) -> int:
        """SIGTERM, then the exit code; a process that does not end in time is killed with its descendants."""
        process = self.running.pop(name)
        tree = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        finally:
            self.kill(process, tree)

    def kill(self, process: subprocess.Popen[bytes], tree: Mapping[int, str]) -> None:
        """Ends whatever is left of a process and its descendants."""
        process.kill()
        process.wait()
        end_tree(tree, step_s=2.0)

    def stop(self) -> dict[str, int]:
        return {name: self.terminate(name) for name in list(self.running)}


@dataclass(frozen=True)
class Cluster:
    address: str
    model: str
    processes: Processes

    def client(self) -> Client:
        return Client(self.address)

    def status(self) -> ClusterStatus:
        with self.client() as client:
            return client.get_cluster()


def wait_until(check: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


def ready(cluster: Cluster) -> bool:
    try:
        nodes = cluster.status().nodes
    except UnavailableError:
        return False
    roles = {status.node.role for status in nodes if status.state is NodeState.READY}
    return roles == {NodeRole.PREFILL, NodeRole.DECODE}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With two threads per engine."""
    with started(tmp_path_factory.mktemp("cluster"), threads=2) as cluster:
        yield cluster


@contextmanager
def started(logs: Path, *, threads: int) -> Iterator[Cluster]:
    """A whole cluster, started in an order that nobody would choose: nodes first, router last."""
    processes = Processes(logs)
    model = str(tiny.ensure())
    port = _free_port()
    cluster = Cluster(f"127.0.0.1:{port}", model, processes)
    node = ("--model", model, "--router", cluster.address, "--threads", str(threads))
    try:
        processes.start("decode", "decode_node", *node, "--node-id", "d0", "--slots", str(SLOTS))
        processes.start("prefill", "prefill_node", *node, "--node-id", "p0", "--chunk-size", str(CHUNK), *ALL_CHECKED)
        seed_key = logs / "seed.key"
        seed_key.write_text("c0ffee" * 4)
        flags = ("--port", str(port), "--seed-key-file", str(seed_key), "--audit-fraction", "0")  # Tests count.
        processes.start("router", "router", *flags)
        wait_until(lambda: ready(cluster) or _anyone_died(processes), "the cluster is ready", START_TIMEOUT_S)
        assert not _anyone_died(processes), {name: processes.log(name)[-3000:] for name in processes.running}
        yield cluster
        assert processes.stop() == {"decode": 0, "prefill": 0, "router": 0}
    finally:
        for process in processes.running.values():
            processes.kill(process, descendants(process.pid))


def _anyone_died(processes: Processes) -> bool:
    return any(process.poll() is not None for process in processes.running.values())


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
