"""Chaos over real engines: two routers, nodes of all kinds, and a gateway, and the faults that hit them.

All of them are processes, with TCP proxies in between. Owns the processes, which it starts again when they end, the
proxies, and the check of what is still held. Must not know which requests the cluster gets. Tests only.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from corun import AsyncClient, ClusterStatus, CorunError, processes
from corun.models import tiny
from corun.processes import descendants, end_tree, living
from tests.chaos.faults import Kind, Target, nodes, within
from tests.chaos.report import Usage
from tests.chaos.run import Chaos, say
from tests.chaos.traffic import Case, answered, make_cases
from tests.machine import command_line, entries, free_port, resident_mib
from tests.proxy import CuttingProxy
from tests.scraping import scrape

SLOTS = 8
MAX_QUEUED_SAMPLES = 16
START_S = 900.0
"""The limit for all engines, which start at once."""
GRACE_S = 40.0
"""The limit for a process to drain."""
END_S = 20.0
"""The limit for a guard to end the processes that are left."""
STATUS_S = 5.0
SETTLE_S = 5.0
"""The wait before a measurement, because channels to replaced processes are closed a little later."""
NUM_CASES = 24
LONGEST_STOP_S = 12.0
"""The longest stop of a process: longer than the time after which a silent node is lost."""
LONGEST_DELAY_S = 0.5
PREFILL, DECODE = ("--chunk-size", "128", "--kv-check-fraction", "1"), ("--slots", str(SLOTS))
ROLES = {
    "p": ("prefill_node", *PREFILL),
    "d": ("decode_node", *DECODE),
    "c": ("colocated_node", *PREFILL, *DECODE),
}
"""How nodes are started, by the first letter of their names."""
_HELD_KV = ("corun_prefill_held_kv_blocks", "corun_decode_reserved_kv_blocks")


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
        self._argv = [sys.executable, "-I", processes.__file__, str(os.getpid()), str(GRACE_S), *argv]
        self._guard: asyncio.subprocess.Process | None = None
        self._tree: dict[int, str] = {}

    @property
    def root(self) -> list[int]:
        """The pid of the process that serves gRPC; empty if it has just ended."""
        assert self._guard is not None
        return processes.children(self._guard.pid)[:1]

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

    async def usage(self) -> Usage:
        """Return the measures of the process now."""
        root, tree = self.root, self.tree
        told: Mapping[str, float] = {}
        if self.metrics_port:
            with suppress(OSError):  # A process that did not come back answers nothing; the report says so elsewhere.
                told = await scrape(self.metrics_port)
        tasks = told.get("corun_tasks")
        return Usage(
            life=self.lives,
            memory_mib=resident_mib(*root),
            engine_mib=resident_mib(*(pid for pid in tree if pid not in root)),
            fds=entries("fd", *tree),
            threads=entries("task", *tree),
            tasks=None if tasks is None else int(tasks),
            kv_blocks=int(sum(told.get(name, 0) for name in _HELD_KV)),
        )

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


class Processes(Target):
    """The processes, and the proxies that clients and routers reach them through."""

    pause_s = 3.0
    think_s = 0.3
    request_timeout_s = 300.0
    burst = 3 * (MAX_QUEUED_SAMPLES + 2 * SLOTS)

    def __init__(self) -> None:
        super().__init__()
        self.processes: dict[str, Process] = {}
        self.links: dict[str, CuttingProxy] = {}
        """The proxy in front of each process: clients reach routers through it, and routers reach nodes."""
        self.addresses: list[str] = []
        self._own: dict[str, str] = {}
        self._supervisors: list[asyncio.Task[None]] = []

    def names(self, roles: str = "rpdc") -> list[str]:
        return [name for name in self.processes if name[0] in roles]

    async def cases(self) -> list[Case]:
        async with AsyncClient(self.addresses) as client:
            return [await answered(client, case) for case in make_cases(NUM_CASES)]

    async def start(self) -> None:
        for process in self.processes.values():
            await process.start()
            self._supervisors.append(asyncio.create_task(self._supervise(process)))
        waits = (self.back(name, (1, ""), START_S) for name in self.names())
        assert all(await asyncio.gather(*waits)), f"the cluster was not whole within {START_S:.0f} s"

    async def stop(self) -> list[str]:
        """End the gateway, then the routers, then the nodes. Return what went wrong."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.wait(self._supervisors)
        found = []
        for names in (self.names("g"), self.names("r"), self.names("pdc")):
            found += await asyncio.gather(*(self.processes[name].stop() for name in names))
        found += [f"process {pid} still runs" for pid in descendants(os.getpid())]
        return [wrong for wrong in found if wrong]

    def end(self) -> None:
        """End every process that still runs, at once. A guard ends at its first signal, with all that it guards."""
        for supervisor in self._supervisors:
            supervisor.cancel()
        end_tree(descendants(os.getpid()), 1.0)

    async def status(self, router: str) -> ClusterStatus | None:
        async with AsyncClient(self._own[router], timeout_s=STATUS_S) as client:
            try:
                return await client.get_cluster()
            except CorunError:
                return None

    async def mark(self, name: str, *, replaces: bool) -> tuple[int, str]:
        """Return the number of lives that the member must have had when it is back, and the generation that must go."""
        return self.processes[name].lives + replaces, await super().mark(name, replaces=replaces)

    async def back(self, name: str, mark: tuple[int, str], timeout_s: float) -> bool:
        lives, replaced = mark
        process = self.processes[name]
        return await within(timeout_s, lambda: process.lives >= lives) and await super().back(name, replaced, timeout_s)

    async def usage(self) -> dict[str, Usage]:
        await asyncio.sleep(SETTLE_S)
        return {name: await process.usage() for name, process in self.processes.items()}

    def reruns(self) -> int:
        return sum(self.processes[name].log.read_text().count("an attempt of sample") for name in self.names("r"))

    async def _supervise(self, process: Process) -> None:
        while True:
            if wrong := await process.ended():
                self.wrong_ends.append(wrong)
            await process.start()


@asynccontextmanager
async def under_chaos(
    logs: Path, seed: int, pairs: int, colocated: int, *, careless: bool = False
) -> AsyncIterator[Chaos]:
    """Start a whole cluster for one run: two routers, so many pairs, and so many colocated nodes.

    careless: its routers go on with a new run as if it were the old one.
    """
    cluster, model = Processes(), str(tiny.ensure())
    seed_key = logs / "seed.key"
    seed_key.write_text("c0ffee" * 4)
    async with AsyncExitStack() as stack:
        for name in ("r0", "r1", *nodes(pairs, colocated)):
            port, metrics_port = free_port(), free_port()
            address = f"127.0.0.1:{port}"
            cluster.links[name] = link = await stack.enter_async_context(CuttingProxy(address))
            if name[0] == "r":
                cluster.addresses.append(address)
                cluster._own[name] = address
                words = ["tests.chaos.careless" if careless else "router", "--router-id", name]
                words += ["--seed-key-file", str(seed_key), "--max-queued-samples", str(MAX_QUEUED_SAMPLES)]
            else:
                words = [*ROLES[name[0]], "--model", model, "--threads", "1", "--node-id", name]
                words += ["--router", *cluster.addresses, "--advertise", link.address]
            argv = [sys.executable, "-m", *words, "--port", str(port), "--metrics-port", str(metrics_port)]
            cluster.processes[name] = Process(name, argv, logs / f"{name}.log", metrics_port)
        cluster.routers = [cluster.links[name].address for name in cluster.names("r")]
        port = free_port()
        argv = [sys.executable, "-m", "corun", "gateway", "--router", ",".join(cluster.routers), "--port", str(port)]
        cluster.processes["g0"] = Process("g0", argv, logs / "g0.log")
        cluster.gateway = f"http://127.0.0.1:{port}"
        try:
            await cluster.start()
            say("the cluster is ready")
            yield Chaos(cluster, seed)
        finally:
            cluster.end()


async def kill(cluster: Processes, name: str, strength: float) -> None:
    cluster.processes[name].send(signal.SIGKILL, *cluster.processes[name].root, expect=128 + signal.SIGKILL)


async def kill_engine(cluster: Processes, name: str, strength: float) -> None:
    """Kill one of the engine's processes. The node has to notice it, and ends."""
    engine = cluster.processes[name].engine
    cluster.processes[name].send(signal.SIGKILL, engine[int(strength * len(engine))], expect=1)


async def terminate(cluster: Processes, name: str, strength: float) -> None:
    cluster.processes[name].send(signal.SIGTERM, *cluster.processes[name].root, expect=0)


async def stop_tree(cluster: Processes, name: str, strength: float) -> None:
    await _stop(cluster, name, cluster.processes[name].tree, strength)


async def stop_parent(cluster: Processes, name: str, strength: float) -> None:
    """Stop the process that serves gRPC while the engine goes on."""
    await _stop(cluster, name, cluster.processes[name].root, strength)


async def stop_engine(cluster: Processes, name: str, strength: float) -> None:
    """Stop the engine while the process that serves gRPC goes on answering."""
    await _stop(cluster, name, cluster.processes[name].engine, strength)


async def _stop(cluster: Processes, name: str, pids: Sequence[int], strength: float) -> None:
    process = cluster.processes[name]
    process.send(signal.SIGSTOP, *pids)
    try:
        await asyncio.sleep(LONGEST_STOP_S * strength)
    finally:
        process.send(signal.SIGCONT, *pids)


async def cut(cluster: Processes, name: str, strength: float) -> None:
    cluster.links[name].cut()


async def delay(cluster: Processes, name: str, strength: float) -> None:
    cluster.links[name].delay_s = LONGEST_DELAY_S * strength
    await asyncio.sleep(LONGEST_STOP_S / 2)
    cluster.links[name].delay_s = 0.0


async def silence(cluster: Processes, name: str, strength: float) -> None:
    cluster.links[name].silence(LONGEST_STOP_S * strength)
    await asyncio.sleep(LONGEST_STOP_S * strength)


Processes.kinds = {
    "kill": Kind(fault=kill, roles="rpdc", weight=6, replaces=True),
    "kill engine": Kind(fault=kill_engine, roles="pdc", weight=2, replaces=True),
    "terminate": Kind(fault=terminate, roles="rpdc", weight=4, replaces=True),
    "stop tree": Kind(fault=stop_tree, roles="rpdc", weight=4),
    "stop parent": Kind(fault=stop_parent, roles="pdc", weight=2),
    "stop engine": Kind(fault=stop_engine, roles="pdc", weight=0),
    "cut": Kind(fault=cut, roles="rpdc", weight=5, is_mild=True),
    "delay": Kind(fault=delay, roles="rpdc", weight=3, is_mild=True),
    "silence": Kind(fault=silence, roles="rpdc", weight=3),
    "burst": Kind(weight=3),
    "vanish": Kind(weight=3),
    "blackout": Kind(fault=kill, roles="rpd", weight=1, replaces=True, all_of_role=True),
}
