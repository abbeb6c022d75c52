"""Starts and stops systems: one context manager per system, inside which its target can be driven.

Owns: the order in which engines start, and the facts read from a running system. Must not know workloads or metrics.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corun.errors import UnavailableError
from corun_bench import conditions
from corun_bench.children import Processes
from corun_bench.client import ClusterTarget, OpenAiTarget
from corun_bench.driver import Target
from corun_bench.engines import Engine, IndependentEngines, PlainProxy
from corun_bench.nodes import NodePlan, Nodes, Topology
from corun_bench.systems import CLUSTERS, PAIRED, Machine, System

START_TIMEOUT_S = 600.0
READS_KNOWN_S = 8.0
"""A decode node reports its KV reads within this time, in seconds."""
POLL_S = 0.25
ROUTER_FLAGS = ("--audit-fraction", "0", "--max-queue-wait-s", "0")
"""Flags that turn off audits, so that the cluster does no other work, and let no request be refused for a long wait."""


@dataclass(kw_only=True)
class RunningSystem:
    """A system that is running and ready."""

    name: str
    target: Target
    """What requests go to. No more is known of a server that this benchmark did not start."""
    settings: dict[str, Any]
    pads: bool = False
    slots: int = 0
    gpus: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0, "total": 0})
    ready_s: float | None = None
    """The time from the start of the first process until the system was ready, in seconds."""
    processes: Processes = field(default_factory=lambda: Processes(Path()))
    fingerprint: str = ""
    engines: list[Engine] = field(default_factory=list)
    nodes: Nodes | None = None
    sent: int = 0

    def described(self) -> dict[str, Any]:
        """Return the system's part of a result file."""
        return {
            "system": self.name,
            "gpus": self.gpus,
            "slots": self.slots,
            "handoff": None,
            "pads": self.pads,
            "ready_s": self.ready_s,
            **self.memory(),
            "fingerprint": self.fingerprint,
            "settings": self.settings,
        }

    def check(self) -> None:
        """Raise UnavailableError if a process of the system has ended, or an engine has died in its process."""
        self.processes.check()
        for engine in self.engines:
            engine.check()

    def memory(self) -> dict[str, Any]:
        """Return the resident memory of each process with all that it started, and the memory of each GPU, in MiB."""
        gpus = conditions.gpu_memory(self.processes.owners()) if self.processes.running else {}
        return {"memory": self.processes.memory(), "gpu_memory": gpus}

    async def handoffs(self) -> dict[str, Any] | None:
        """Return the cluster's KV reads since its start; wait a little until those of all requests are known."""
        if self.nodes is None:
            return None
        deadline = time.monotonic() + READS_KNOWN_S
        while True:
            status = await asyncio.to_thread(self.nodes.status)
            reads = [node.load.kv_reads for node in status.nodes] if status else []
            count = sum(read.count for read in reads)
            if count >= self.sent or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        seconds, size = sum(read.seconds for read in reads), sum(read.bytes for read in reads)
        return {
            "count": count,
            "bytes": size,
            "failed": sum(read.failed for read in reads),
            "mean_ms": round(1e3 * seconds / count, 3) if count else None,
            "gb_per_s": round(size / seconds / 1e9, 2) if seconds else None,
        }


def up(system: System, machine: Machine, logs: Path) -> AbstractAsyncContextManager[RunningSystem]:
    """Start a system that is ready inside the block; after the block no process of it is left, whatever happens.

    logs: a directory, for a file per process.
    Raises UnavailableError or DeadlineError if it does not start; the message ends with a log.
    """
    start = _cluster if system.kind in CLUSTERS else _engines
    return start(system, machine, logs)


@asynccontextmanager
async def foreign(url: str, model: str) -> AsyncIterator[RunningSystem]:
    """Give a server with OpenAI's API to the block. model: empty for the first that it lists."""
    async with OpenAiTarget(url, model=model).connected() as target:
        yield RunningSystem(name=url, target=target, settings={"url": url})


@asynccontextmanager
async def _engines(system: System, machine: Machine, logs: Path) -> AsyncIterator[RunningSystem]:
    began = time.monotonic()
    processes = Processes(logs)
    engines: list[Engine] = []

    async def ready(waited_for: list[Engine]) -> None:
        starting = [engine for engine in waited_for if not engine.facts]
        await asyncio.gather(*(engine.ready(began + START_TIMEOUT_S) for engine in starting))

    async with AsyncExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corun-bench-")))
        for settings in system.engines(machine):
            # Stock vLLM measures what memory is free while it starts: engines on one GPU start one after the other.
            await ready([engine for engine in engines if {*engine.settings.gpus} & {*settings.gpus}])
            engine = Engine(f"{settings.role}-{len(engines)}", settings, processes, sockets)
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        await ready(engines)
        prefill, decode = ([one for one in engines if one.settings.role == role] for role in ("prefill", "decode"))
        yield RunningSystem(
            name=system.name,
            pads=system.pads,
            target=PlainProxy(prefill, decode) if system.kind in PAIRED else IndependentEngines(engines),
            slots=sum(engine.facts["max_num_seqs"] for engine in engines if engine not in prefill),
            gpus=system.gpus(machine),
            ready_s=round(time.monotonic() - began, 1),
            processes=processes,
            settings={**system.describe(machine), "engine": engines[-1].facts},
            engines=engines,
        )


@asynccontextmanager
async def _cluster(system: System, machine: Machine, logs: Path) -> AsyncIterator[RunningSystem]:
    began = time.monotonic()
    plans = [
        NodePlan(f"{kind[0]}{index}", f"{kind}_node", machine.device(place) or (place,))
        for kind, places in system.places(machine)._asdict().items()
        for index, place in enumerate(places)
    ]
    topology = Topology(
        model=machine.model,
        nodes=tuple(plans),
        tensor_parallel_size=machine.tensor_parallel_size,
        slots=system.slots_on(machine),
        chunk_size=machine.chunk_size,
        max_model_len=machine.max_model_len,
        kv_cache_gib=machine.kv_cache_gib,
        decode_split=CLUSTERS[system.kind],
        threads=0 if machine.gpus else max(1, len(machine.cores) // 2),
        start_timeout_s=START_TIMEOUT_S,
    )
    nodes = Nodes(topology, Processes(logs), router_flags=ROUTER_FLAGS)
    try:
        await asyncio.to_thread(nodes.start)
        status = await asyncio.to_thread(nodes.status)
        if status is None:
            raise UnavailableError("the router does not answer")
        facts = {
            one.node.ref.node_id: {"kv_blocks": one.node.kv_blocks, "slots": one.node.slots} for one in status.nodes
        }
        async with aclosing(ClusterTarget(nodes.address)) as target:
            yield RunningSystem(
                name=system.name,
                target=target,
                slots=sum(node.node.slots for node in status.nodes),
                gpus=system.gpus(machine),
                ready_s=round(time.monotonic() - began, 1),
                processes=nodes.processes,
                settings={**system.describe(machine), "nodes": facts},
                fingerprint=status.fingerprint,
                nodes=nodes,
            )
    finally:
        await asyncio.to_thread(nodes.stop)
