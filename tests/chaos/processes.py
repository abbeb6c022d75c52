"""A real cluster for chaos: two routers, two prefill and two decode nodes, and a gateway.

All of them are processes, with TCP proxies in between. Owns the processes, which it starts again when they end, the
proxies, and the check of what is still held. Must not know which faults there are nor which requests the cluster gets.
Tests only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from corun import AsyncClient, ClusterStatus, CorunError, guard
from corun.models import tiny
from corun.processes import descendants, end_tree, living
from corun.types import NodeState
from tests.machine import command_line, free_port
from tests.proxy import CuttingProxy

SLOTS = 8
MAX_QUEUED_SAMPLES = 16
START_S = 900.0
"""The limit for four engines that start at once."""
GRACE_S = 40.0
"""The limit for a process to drain."""
END_S = 20.0
"""The limit for a guard to end the processes that are left."""
STATUS_S = 5.0
ROLES = {
    "p": ("prefill_node", "--chunk-size", "128", "--kv-check-fraction", "1"),
    "d": ("decode_node", "--slots", str(SLOTS)),
}
"""How nodes are started, by the first letter of their names."""


class Process:
    """One member of the cluster over all its lives. Each life runs under a guard, as `corun up` runs it."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, metrics_port: int = 0) -> None:
        self.name = name
        self.metrics_port = metrics_port
        """The port of its metrics; 0 if it serves none."""
        self.expected: int | None = None
        """The exit code that a fault is going to cause; None if the process must not end."""
        self.lives = 0
        """The number of lives started so far."""
        self.log = log
        self._argv = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(GRACE_S), *argv]
        self._guard: asyncio.subprocess.Process | None = None
        self._tree: dict[int, str] = {}

    @property
    def root(self) -> list[int]:
        """The pid of the process that serves gRPC; empty if it has just ended."""
        assert self._guard is not None
        return guard.children(self._guard.pid)[:1]

    @property
    def tree(self) -> list[int]:
        """The pids of the process and its descendants."""
        assert self._guard is not None
        self._tree |= descendants(self._guard.pid)
        return living(self._tree)

    @property
    def engine(self) -> list[int]:
        """The pids of the processes that compute, without the one that serves gRPC."""
        return [pid for pid in self.tree if "VLLM::" in command_line(pid)]

    async def start(self) -> None:
        """Start it in this session: Linux gives each session an equal share of a core, and idle engines spin."""
        with self.log.open("ab") as log:
            self._guard = await asyncio.create_subprocess_exec(*self._argv, stdout=log, stderr=log)
        self.lives, self.expected, self._tree = self.lives + 1, None, {}

    def send(self, number: signal.Signals, *pids: int, expect: int | None = None) -> None:
        """Send a signal to `pids`. expect: the exit code that follows, if there are processes to send to."""
        if expect is not None and pids:
            self.expected, _ = expect, self.tree
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def num_fds(self) -> int:
        number = 0
        for pid in self.tree:
            with suppress(FileNotFoundError, ProcessLookupError):  # The process has just ended.
                number += len(os.listdir(f"/proc/{pid}/fd"))
        return number

    async def ended(self) -> str:
        """Wait until it ends. Return what was wrong with that; empty if nothing was."""
        assert self._guard is not None
        code = await self._guard.wait()
        if left := living(self._tree):
            return f"{self.name} left {len(left)} processes"
        return "" if code == self.expected else f"{self.name} ended with {code}, not {self.expected}"

    async def stop(self) -> str:
        """Ask it to end; the guard makes sure that it does. Return what `ended` returns."""
        assert self._guard is not None
        self.expected, _ = 0, self.tree
        if self._guard.returncode is None:
            self._guard.terminate()
        return await asyncio.wait_for(self.ended(), GRACE_S + END_S)


class RealCluster:
    """The processes, and the proxies that clients and routers reach them through."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.addresses: dict[str, str] = {}
        """The routers' own addresses, without the proxies."""
        self.links: dict[str, CuttingProxy] = {}
        """The proxy in front of each process: clients reach routers through it, and routers reach nodes."""
        self.gateway = ""
        """The URL of the gateway, which reaches the routers through their proxies."""
        self.wrong_ends: list[str] = []
        self.hit: set[str] = set()
        """Members that a fault has hit and that are not in use again yet."""
        self._supervisors: list[asyncio.Task[None]] = []

    def names(self, roles: str = "rpd") -> list[str]:
        """Return the names of the processes of some roles: r for routers, p for prefill nodes, d for decode nodes."""
        return [name for name in self.processes if name[0] in roles]

    async def start(self) -> None:
        for process in self.processes.values():
            await process.start()
            self._supervisors.append(asyncio.create_task(self._supervise(process)))
        await self.whole(START_S)

    async def stop(self) -> list[str]:
        """End the gateway, then the routers, then the nodes. Return what went wrong."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.wait(self._supervisors)
        found = []
        for names in (self.names("g"), self.names("r"), self.names("pd")):
            found += await asyncio.gather(*(self.processes[name].stop() for name in names))
        found += [f"process {pid} still runs" for pid in descendants(os.getpid())]
        return [wrong for wrong in found if wrong]

    def end(self) -> None:
        """End every process that still runs, at once. A guard ends at its first signal, with all that it guards."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        end_tree(descendants(os.getpid()), 1.0)

    async def status(self, router: str) -> ClusterStatus | None:
        """Return the status that a router reports; None if it does not answer."""
        async with AsyncClient(self.addresses[router], timeout_s=STATUS_S) as client:
            try:
                return await client.get_cluster()
            except CorunError:
                return None

    async def in_use(self, name: str, replaced: str = "") -> bool:
        """Return whether a member is in use.

        A node is if every router that is not hit uses it in another generation than `replaced`. A router is if it uses
        every node that is not hit.
        """
        routers = [name] if name[0] == "r" else [router for router in self.names("r") if router not in self.hit]
        statuses = [await self.status(router) for router in routers]
        nodes = [name] if name[0] != "r" else [node for node in self.names("pd") if node not in self.hit]
        ready = [_ready(status) for status in statuses]
        return all(node in seen and seen[node] != replaced for seen in ready for node in nodes)

    async def serves(self) -> bool:
        """Return whether every router uses at least one prefill and one decode node."""
        statuses = [await self.status(router) for router in self.names("r")]
        return all({name[0] for name in _ready(status)} == {"p", "d"} for status in statuses)

    async def back(self, name: str, replaced: str, timeout_s: float) -> bool:
        """Wait until a member is in use again. Return False if that does not happen in time."""
        deadline = time.monotonic() + timeout_s
        while not await self.in_use(name, replaced):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    async def whole(self, timeout_s: float) -> None:
        """Wait until every router uses every node."""
        waits = (self.back(name, "", timeout_s) for name in self.names())
        assert all(await asyncio.gather(*waits)), f"the cluster was not whole within {timeout_s:.0f} s"

    async def generation(self, name: str) -> str:
        """Return the generation of a node that routers use; empty for a router, or if none uses the node in time."""
        deadline = time.monotonic() + END_S
        while name[0] != "r" and time.monotonic() < deadline:
            seen = [_ready(await self.status(router)) for router in self.names("r")]
            if found := [generations[name] for generations in seen if name in generations]:
                return found[0]
        return ""

    async def held(self) -> list[str]:
        """Return a text for each thing that routers and nodes still hold."""
        found = []
        for router in self.names("r"):
            status = await self.status(router)
            if status is None:
                found.append(f"{router} does not answer")
                continue
            found += [f"{router}: {status.queued_samples} samples wait"] * (status.queued_samples > 0)
            for node in status.nodes:
                name, load = f"{router}: {node.node.ref.node_id}", node.load
                used = (load.used_slots, load.used_kv_blocks, load.queued_prompt_tokens)
                found += [f"{name} holds {used} slots, KV blocks, prompt tokens"] * any(used)
                found += [f"{name} is {node.state.value}: {node.detail}"] * (node.state is not NodeState.READY)
        return found

    def fds(self) -> dict[str, int]:
        """Return the number of open file descriptors of each member with its children.

        "clients" is the number of this process, whose clients come and go.
        """
        own = len(os.listdir("/proc/self/fd"))
        return {"clients": own, **{name: process.num_fds() for name, process in self.processes.items()}}

    def reruns(self) -> int:
        """Return how many runs of samples failed at a node, by the routers' logs."""
        return sum(self.processes[name].log.read_text().count("an attempt of sample") for name in self.names("r"))

    async def _supervise(self, process: Process) -> None:
        while True:
            if wrong := await process.ended():
                self.wrong_ends.append(wrong)
            await process.start()


@asynccontextmanager
async def started(logs: Path, *, threads: int, careless: bool = False) -> AsyncIterator[RealCluster]:
    """Start a whole cluster. careless: its routers go on with a new run as if it were the old one."""
    cluster, model = RealCluster(), str(tiny.ensure())
    seed_key = logs / "seed.key"
    seed_key.write_text("c0ffee" * 4)
    async with AsyncExitStack() as stack:
        for name in ("r0", "r1", "p0", "p1", "d0", "d1"):
            port, metrics_port = free_port(), free_port()
            address = f"127.0.0.1:{port}"
            cluster.links[name] = link = await stack.enter_async_context(CuttingProxy(address))
            if name[0] == "r":
                cluster.addresses[name] = address
                words = ["tests.chaos.careless" if careless else "router", "--router-id", name]
                words += ["--seed-key-file", str(seed_key), "--max-queued-samples", str(MAX_QUEUED_SAMPLES)]
            else:
                words = [*ROLES[name[0]], "--model", model, "--threads", str(threads), "--node-id", name]
                words += ["--router", *cluster.addresses.values(), "--advertise", link.address]
            argv = [sys.executable, "-m", *words, "--port", str(port), "--metrics-port", str(metrics_port)]
            cluster.processes[name] = Process(name, argv, logs / f"{name}.log", metrics_port)
        _add_gateway(cluster, logs)
        try:
            await cluster.start()
            yield cluster
        finally:
            cluster.end()


def _add_gateway(cluster: RealCluster, logs: Path) -> None:
    port = free_port()
    routers = ",".join(cluster.links[name].address for name in cluster.names("r"))
    argv = [sys.executable, "-m", "corun", "gateway", "--router", routers, "--port", str(port)]
    cluster.processes["g0"] = Process("g0", argv, logs / "g0.log")
    cluster.gateway = f"http://127.0.0.1:{port}"


def _ready(status: ClusterStatus | None) -> dict[str, str]:
    """Return the generations of the nodes that a router uses, by node id."""
    nodes = status.nodes if status is not None else ()
    return {node.node.ref.node_id: node.node.ref.generation for node in nodes if node.state is NodeState.READY}
