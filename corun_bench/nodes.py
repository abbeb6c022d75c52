"""A cluster of plain processes on chosen GPUs: this module starts and stops them.

Owns: which node gets which GPU. Without a GPU the same nodes run on the CPU. Must not know: what is measured on it.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corun import Client, ClusterStatus, DeadlineError, UnavailableError
from corun.rpc.ports import reserve
from corun.types import NodeState, NodeStatus
from corun_bench.children import Processes
from corun_bench.systems import GPU_MEMORY, DecodeSplit

POLL_S = 0.5
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class NodePlan:
    """One node to start."""

    name: str
    module: str
    gpus: tuple[int, ...]

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes that the router knows it as."""
        return (f"{self.name}-prefill", f"{self.name}-decode") if self.module == "colocated_node" else (self.name,)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which nodes run, and where."""

    model: str
    """Directory of a checkpoint."""
    nodes: tuple[NodePlan, ...]
    """All nodes, in the order of their start. Nodes that share a GPU share its memory."""
    tensor_parallel_size: int = 1
    """GPUs of each node."""
    slots: int = 256
    chunk_size: int = 2048
    max_model_len: int
    """Most tokens of prompt and output together."""
    threads: int = 0
    """Threads of each engine on a CPU; 0: all cores."""
    kv_cache_gib: int = 1
    """KV cache of each engine on a CPU, in GiB."""
    decode_split: DecodeSplit = "none"
    """How decode nodes cut a row's KV; not for CPUs."""
    start_timeout_s: float = 400.0
    """The time limit for the start of all nodes together, in seconds."""

    @property
    def node_ids(self) -> set[str]:
        """The nodes that the router is going to know."""
        return {name for node in self.nodes for name in node.node_ids}

    def share(self, node: NodePlan) -> float:
        """Return the share of its GPUs' memory that a node takes."""
        neighbours = max(sum(gpu in other.gpus for other in self.nodes) for gpu in node.gpus)
        return round(GPU_MEMORY / neighbours, 2)

    def flags(self, node: NodePlan) -> list[str]:
        """Return the node's command line after `python -m <module>`, without the router's address."""
        found = ["--node-id", node.name, "--model", self.model, "--max-model-len", str(self.max_model_len)]
        found += ["--chunk-size", str(self.chunk_size)] if node.module != "decode_node" else []
        found += ["--slots", str(self.slots)] if node.module != "prefill_node" else []
        found += ["--threads", str(self.threads)] if self.threads else []
        found += ["--decode-split", self.decode_split] if node.module != "prefill_node" else []
        if has_gpu():
            found += ["--gpu-memory-utilization", str(self.share(node))]
            found += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        else:
            found += ["--kv-cache-gib", str(self.kv_cache_gib)]
        return found


@dataclass
class Nodes:
    """A router and nodes as processes."""

    topology: Topology
    processes: Processes
    port: int = field(default_factory=lambda: reserve("127.0.0.1"))
    router_flags: tuple[str, ...] = ()
    _stopped: threading.Event = field(default_factory=threading.Event)
    """Set by `stop`, which may be called in another thread while a start is in progress."""
    _starting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> Client:
        """Return a client of the cluster; settings: as `Client` has them."""
        return Client(self.address, **settings)

    def status(self) -> ClusterStatus | None:
        """Return the status of the cluster; None while the router does not answer."""
        try:
            with self.client(connect_timeout_s=2.0) as client:
                return client.get_cluster(timeout_s=5.0)
        except (UnavailableError, DeadlineError):
            return None

    def start(self) -> None:
        """Start the router and all nodes side by side; return when all are ready."""
        deadline = time.monotonic() + self.topology.start_timeout_s
        with self._starting:
            if not self._stopped.is_set():
                self.processes.start("router", "router", "--port", str(self.port), *self.router_flags)
                for node in self.topology.nodes:
                    self.start_node(node)
            self.wait(deadline)

    def start_node(self, node: NodePlan) -> None:
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, node.gpus))} if has_gpu() else {})
        self.processes.start(node.name, node.module, "--router", self.address, *self.topology.flags(node), env=env)

    def wait(self, deadline: float) -> None:
        """Wait until all nodes are ready. Raises UnavailableError or DeadlineError if one will not be."""
        while not self.all_ready():
            if self._stopped.is_set():
                raise UnavailableError("it was stopped while it started")
            self.check(deadline)
            self._stopped.wait(POLL_S)

    def all_ready(self) -> bool:
        ready = {status.node.ref.node_id for status in self._nodes() if status.state is NodeState.READY}
        return ready == self.topology.node_ids

    def stop(self) -> dict[str, int]:
        """Stop all processes and return their exit codes; -9 for a process that had to be killed.

        A start that is in progress is given up, and its processes are killed: they do not handle signals yet.
        """
        is_starting = self._starting.locked()
        self._stopped.set()

        def stop(name: str) -> int:
            if is_starting:
                return self.processes.kill(name, step_s=0.5)
            return self.processes.terminate(name, STOP_TIMEOUT_S)

        with self._starting:
            pass  # It starts no more processes.
        names = [name for name in self.processes.running if name != "router"]
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            codes = dict(zip(names, pool.map(stop, names), strict=True))
        return codes | {name: stop(name) for name in list(self.processes.running)}

    def _nodes(self) -> tuple[NodeStatus, ...]:
        found = self.status()
        return () if found is None else found.nodes

    def check(self, deadline: float) -> None:
        """Raise UnavailableError or DeadlineError if it makes no sense to wait longer."""
        self.processes.check()
        nodes = self._nodes()
        for status in nodes:
            if status.state is NodeState.REFUSED:
                raise UnavailableError(f"{status.node.ref.node_id} was refused: {status.detail}")
        if time.monotonic() > deadline:
            known = {status.node.ref.node_id for status in nodes}
            missing = [node.name for node in self.topology.nodes if not known.issuperset(node.node_ids)] or ["a pair"]
            tails = "\n".join(self.processes.tail(name) for name in missing if name in self.processes.running)
            raise DeadlineError(f"{', '.join(missing)} did not start in time:\n{tails}")


@functools.cache
def has_gpu() -> bool:
    """Return whether there is an NVIDIA driver, without loading torch."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
