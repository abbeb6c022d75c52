"""Clusters of plain processes, as the benchmark starts them, for checks: with settings, restarts and times of a start.

Owns what no benchmark needs of `corun_bench.nodes`. Must not know what is checked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro

from corun import Client
from corun.config import cluster_file
from corun.models import tiny
from corun_bench import nodes
from corun_bench.children import Processes
from corun_bench.nodes import POLL_S, NodePlan

MAX_MODEL_LEN = 8192
FREEDOMS = {
    "rows": "smaller_steps",
    "packed": "packed_prefill",
    "chunks": "free_chunks",
    "cached": "prefix_caching",
    "mixed": "mixed_steps",
}
"""The settings that allow nodes other ways to compute the same bits, by the name of the freedom."""
CONFIGS = {f"{role}_node": cluster_file.CONFIGS[role] for role in cluster_file.NODES}


@dataclass(frozen=True, kw_only=True)
class Topology(nodes.Topology):
    """Which nodes run, where, and with which settings."""

    model: str
    """Directory of a checkpoint, or "tiny"."""
    nodes: tuple[NodePlan, ...] = field(init=False)
    """All nodes, prefill nodes first."""
    prefill_gpus: tuple[int, ...] | None = None
    """GPUs of the prefill nodes; there is one node for every tensor_parallel_size of them. By default 0, but none if
    there are colocated nodes."""
    decode_gpus: tuple[int, ...] | None = None
    """GPUs of the decode nodes, with the same default. Nodes that share a GPU share its memory."""
    colocated_gpus: tuple[int, ...] = ()
    """GPUs of the colocated nodes."""
    max_model_len: int = 0
    """Most tokens of prompt and output together; 0: the model's limit, at most 8192."""
    gpu_memory_utilization: float = 0.0
    """Share of a GPU's memory that each engine takes; 0: equal shares of 0.84."""
    freedoms: Literal["all", "none", "rows", "packed", "chunks", "cached", "mixed"] = "all"
    """Which other ways to compute the same bits the nodes may use, each where they have a certificate for it."""
    keep_certificates: bool = False
    """Whether nodes keep their certificates, and use those that an earlier start kept."""
    checks_all_kv: tyro.conf.Suppress[bool] = True
    """Whether nodes that compute prompts check all KV that they hand over."""
    node_flags: tyro.conf.Suppress[tuple[str, ...]] = ()
    """More flags of every node."""

    def __post_init__(self) -> None:
        """Share the GPUs out. Raises ValueError if some are left over, or if no node prefills, or none samples."""
        object.__setattr__(self, "nodes", self._plans())
        if self.model == "tiny":
            object.__setattr__(self, "model", str(tiny.ensure()))
        if not self.max_model_len:
            config = json.loads((Path(self.model) / "config.json").read_text())
            object.__setattr__(self, "max_model_len", min(MAX_MODEL_LEN, config["max_position_embeddings"]))

    def _plans(self) -> tuple[NodePlan, ...]:
        default, size = () if self.colocated_gpus else (0,), self.tensor_parallel_size
        gpus = {
            "prefill_node": default if self.prefill_gpus is None else self.prefill_gpus,
            "decode_node": default if self.decode_gpus is None else self.decode_gpus,
            "colocated_node": self.colocated_gpus,
        }
        for side, found in gpus.items():
            if not (found or gpus["colocated_node"] or side == "colocated_node"):
                raise ValueError(f"there must be a {side} or a colocated_node")
            if len(found) % size:
                raise ValueError(f"GPUs {found} cannot be shared out to nodes of {size}")
        return tuple(
            NodePlan(f"{module[0]}{place // size}", module, found[place : place + size])
            for module, found in gpus.items()
            for place in range(0, len(found), size)
        )

    def share(self, node: NodePlan) -> float:
        return self.gpu_memory_utilization or super().share(node)

    def flags(self, node: NodePlan) -> list[str]:
        found = [*super().flags(node), *self._switches(node), *self.node_flags]
        found += ["--kv-check-fraction", "1.0"] if self.checks_all_kv and node.module != "decode_node" else []
        return found + ([] if self.keep_certificates else ["--no-keep-certificates"])

    def _switches(self, node: NodePlan) -> list[str]:
        """Return the flags that switch off the freedoms that were not asked for, of those that such a node has."""
        known = {setting.name for setting in fields(CONFIGS[node.module])}
        off = [name for name in FREEDOMS if self.freedoms not in ("all", name) and FREEDOMS[name] in known]
        return [f"--no-{FREEDOMS[name].replace('_', '-')}" for name in off]


@dataclass
class Nodes(nodes.Nodes):
    """A router and nodes as processes, which can be restarted, and whose starts are timed."""

    topology: Topology
    token: str = ""
    """The token that this object's own calls show to the router."""
    on_up: Callable[[str], None] = lambda name: None
    """Called when a node has joined."""
    started: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """For each node, the seconds from each start of its process until it joined."""

    def client(self, **settings: Any) -> Client:
        return super().client(**{"timeout_s": 600.0, "token": self.token, **settings})

    def start_node(self, node: NodePlan) -> None:
        super().start_node(node)
        self.started[node.name] = time.monotonic()

    def restart(self, name: str, timeout_s: float) -> None:
        """Kill a node and start its next generation; return when the new one is ready."""
        deadline = time.monotonic() + timeout_s
        node = next(node for node in self.topology.nodes if node.name == name)
        old = self.generation(node)
        self.processes.kill(name, step_s=0.5)
        self.start_node(node)
        while self.generation(node) in ("", old):
            self.check(deadline)
            time.sleep(POLL_S)
        self.wait(deadline)

    def generation(self, node: NodePlan) -> str:
        """Return the generation of a node; empty while the router does not know the node."""
        refs = (status.node.ref for status in self._nodes())
        return next((ref.generation for ref in refs if ref.node_id in node.node_ids), "")

    def all_ready(self) -> bool:
        """Also note which nodes have joined since the last look."""
        is_ready = super().all_ready()
        found = {status.node.ref.node_id for status in self._nodes()}
        here = {node.name for node in self.topology.nodes if found.issuperset(node.node_ids)}
        for name in here & self.started.keys():
            self.seconds.setdefault(name, []).append(round(time.monotonic() - self.started.pop(name), 1))
            self.on_up(name)
        return is_ready


@contextmanager
def running(topology: Topology, logs: Path, **settings: Any) -> Iterator[Nodes]:
    """Start a cluster that is ready inside the block; after the block no process is left, whatever happens.

    settings: fields of `Nodes`.
    """
    cluster = Nodes(topology, Processes(logs), **settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
