"""A Ray cluster of several hosts on this machine, each a `ray start` on a loopback address, and a `corun up` on it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from corun import Client, CorunError, processes
from corun.processes import descendants, end_tree, living
from corun.types import ClusterStatus, NodeState
from tests.machine import command_line, free_port, wait_for

START_S = 90.0
END_S = 60.0
_SETTINGS = ("--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block")
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0" * 32,  # Otherwise Ray keeps one in the user's home.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
}


def guarded(argv: Sequence[str]) -> list[str]:
    """Return a command line that ends with this process, however this one ends, along with all that it started."""
    return [sys.executable, "-I", processes.__file__, str(os.getpid()), str(END_S), *argv]


class Hosts:
    """The hosts by name. The last part of a host's address is its number. Everything on a host can be ended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.everything: dict[int, str] = {}
        """All processes of hosts and launches that were ever seen."""
        self._scratch = tempfile.mkdtemp(prefix="corun-hosts-", dir="/tmp")  # A socket's path must be short.
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}  # Last parts of addresses; a host that comes back gets its old one.
        self.address = f"127.0.0.11:{free_port()}"

    def start(self) -> None:
        """Start Ray's head, on the first host."""
        port = self.address.rpartition(":")[2]
        flags = (f"--port={port}", f"--temp-dir={self._scratch}", "--include-dashboard=false", "--num-gpus=0")
        self._start("head", "--head", *flags)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **_ENVIRONMENT}

    def add(self, **gpus: int) -> None:
        """Add hosts by name, each with a number of GPUs. They are only a number: nothing computes on them."""
        for name, number in gpus.items():  # One by one: hosts that start at once take each other's ports.
            self._start(name, f"--address={self.address}", f"--num-gpus={number}")

    @property
    def trees(self) -> dict[int, str]:
        """The processes that run on all hosts."""
        return {pid: at for name in self._hosts for pid, at in self.tree(name).items()}

    def _start(self, name: str, *flags: str) -> None:
        self._numbers.setdefault(name, 11 + len(self._numbers))
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        address = f"--node-ip-address=127.0.0.{self._numbers[name]}"
        path = self.directory / f"{name}.log"
        with path.open("wb") as log:
            argv = guarded([*ray, *flags, address, *_SETTINGS])
            self._hosts[name] = subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: b"Ray runtime started" in path.read_bytes(), f"{name} is part of the Ray cluster")

    def tree(self, name: str) -> dict[int, str]:
        """Return the processes that run on a host."""
        found = descendants(self._hosts[name].pid)
        self.everything |= found
        return found

    def of(self, pid: int) -> str:
        """Return the host that a process is on; empty if it does not run."""
        return next((name for name in self._hosts if pid in self.tree(name)), "")

    def lose(self, name: str) -> None:
        """End all that runs on a host at once, as if its power was cut."""
        tree = self.tree(name)
        host = self._hosts.pop(name)
        for pid in (host.pid, *tree):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.wait()

    def kill_raylet(self, name: str) -> dict[int, str]:
        """Kill Ray on a host, and nothing else. Return the processes that ran there."""
        tree = self.tree(name)
        for pid in tree:
            if command_line(pid).partition(" ")[0].endswith("/raylet"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return tree

    def end(self) -> None:
        for name, host in self._hosts.items():
            self.tree(name)
            host.kill()
            host.wait()
        end_tree(self.everything, 2.0)
        shutil.rmtree(self._scratch, ignore_errors=True)


class Up:
    """A `corun up` on hosts, in a process of its own.

    `port = 0` in its file is replaced by free ports that no connection takes before its routers start.
    """

    def __init__(self, hosts: Hosts, toml: str, *, fake: bool = True) -> None:
        self._hosts = hosts
        self.logs, self._output = hosts.directory / "logs", hosts.directory / "up.log"
        file = hosts.directory / "cluster.toml"
        file.write_text(toml.replace("port = 0\n", f"port = {_two_ports()}\n"))
        self.runtime_dir = hosts.directory / "run"
        self.runtime_dir.mkdir(mode=0o700)
        argv = [str(file), hosts.address, str(self.logs), "fake" if fake else "real"]
        with self._output.open("wb") as output:
            words = guarded([sys.executable, "-m", "tests.fleet.up", *argv])
            self.process = subprocess.Popen(words, env=self.environment, stdout=output, stderr=output)

    @property
    def environment(self) -> dict[str, str]:
        return {**self._hosts.environment, "XDG_RUNTIME_DIR": str(self.runtime_dir)}

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Wait until the output of `corun up` matches `pattern`; return the match."""
        expression = re.compile(pattern, re.MULTILINE)
        wait_for(lambda: expression.search(self.output) or self.process.poll() is not None, pattern, timeout_s)
        found = expression.search(self.output)
        assert found, self.output
        return found

    @property
    def address(self) -> str:
        """The addresses of the routers, separated by commas, once the cluster is ready."""
        return self.wait_for(r"^ready: (\S+), fingerprint")[1]

    def pid(self, name: str) -> int:
        """Return the pid of the guard of process `name`, in the last life that `corun up` reported."""
        pattern = rf"\] {re.escape(name)}: process (\d+)"
        self.wait_for(pattern)
        return int(re.findall(pattern, self.output)[-1])

    def kill(self, name: str) -> None:
        """Kill process `name`, and nothing of what guards it and starts it again."""
        for pid in descendants(self.pid(name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def host(self, name: str) -> str:
        """Return the host that process `name` is on, once `corun up` has reported it."""
        wait_for(lambda: self._hosts.of(self.pid(name)), f"{name} runs")
        return self._hosts.of(self.pid(name))

    def scale(self, *counts: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `corun scale` as a user does."""
        argv = [sys.executable, "-m", "corun", "scale", *counts, "--timeout-s", str(timeout_s)]
        return subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=timeout_s + 60, check=False
        )

    def ready(self) -> dict[str, str]:
        """Return the generations of the nodes that the first router uses, by node id."""
        nodes = self.status().nodes
        return {n.node.ref.node_id: n.node.ref.generation for n in nodes if n.state is NodeState.READY}

    def status(self) -> ClusterStatus:
        with Client(self.address.partition(",")[0]) as client:
            return client.get_cluster()

    def is_back(self, name: str, replaced: str) -> bool:
        """Return whether a node is in use in another generation than `replaced`."""
        try:
            return self.ready().get(name, replaced) != replaced
        except CorunError:
            return False

    def stop(self) -> None:
        """End it as Ctrl-C does, and check that nothing of it is left on any host."""
        ours = {pid: at for pid, at in self._hosts.trees.items() if "processes.py" in command_line(pid)}
        ours |= {child: at for pid in ours for child, at in descendants(pid).items()}
        assert len(ours) >= 6, "at least three processes, each under a guard"
        self.process.terminate()
        assert self.process.wait(2 * END_S) == 0, self.output
        wait_for(lambda: not living(ours), "every process has ended", END_S)


def _two_ports() -> int:
    """Return the first of two free ports in a row, because routers count up from it."""
    for _ in range(100):
        first = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", first + 1))
            return first
    raise AssertionError("no two free ports in a row")


@contextmanager
def hosts(directory: Path) -> Iterator[Hosts]:
    """Start a Ray cluster with one host, `head`. All of it ends with the block."""
    directory.mkdir(exist_ok=True)
    found = Hosts(directory)
    try:
        found.start()
        yield found
    finally:
        found.end()


@contextmanager
def up(ray: Hosts, toml: str, *, fake: bool = True) -> Iterator[Up]:
    """Start a `corun up` on the hosts of `ray`. It ends with the block."""
    started = Up(ray, toml, fake=fake)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            ray.everything |= descendants(started.process.pid)
            started.process.kill()
            started.process.wait()
