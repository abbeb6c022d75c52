"""The systems that are measured: what their names mean, and which engines or nodes each runs on which GPUs.

This module is pure. It must not know how anything is started, nor vLLM: `corun_bench.engine` turns settings into vLLM's
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from corun.errors import InvalidArgumentError
from corun.params import whole_number

KINDS = {
    "std": "stock vLLM",
    "std+nosplit": "std without split-KV in decode attention (ablation)",
    "std+isolated": "std+nosplit with isolated prefill (ablation)",
    "bi": "stock vLLM, batch-invariant (VLLM_BATCH_INVARIANT=1)",
    "colocated": "the paper's CoRun in one engine without a cluster: isolated prefill, fixed-shape decode (ablation)",
    "colocated+ladder": "colocated, with smaller decode steps where they were found to give the same bits (ablation)",
    "pd-std": "stock vLLM, prefill and decode apart over NIXL, behind a plain proxy",
    "cluster": "this project: prefill nodes, decode nodes, colocated nodes or a mix of them, and a router",
    "cluster+own-length": "cluster, with rows that attention cuts by their own length (decode_split)",
}
"""The kinds of systems, each with what it is, in the order in which they are shown."""
LADDER = "colocated+ladder"
NEEDS_GPU = {
    "bi": "vLLM has no batch-invariant mode on a CPU",
    "cluster+own-length": "attention cuts no row on a CPU",
}
"""The kinds that do not run on a CPU, each with the reason."""
TEMPERATURE = 0.6
"""The sampling temperature of every request to every system; the paper's determinism test uses it too."""
DecodeSplit = Literal["none", "own-length"]
CLUSTERS: dict[str, DecodeSplit] = {"cluster": "none", "cluster+own-length": "own-length"}
"""The kinds that are a cluster of this project, each with the `decode_split` of its nodes."""
PAIRED = ("pd-std", *CLUSTERS)
"""The kinds whose prefill and decode run in separate processes."""
SHARED = "shared"
"""The placement with a prefill and a decode process on every GPU."""
COLOCATED = "colocated"
"""The placement with a colocated node on every GPU."""
GPU_MEMORY = 0.84
"""The share of a GPU's memory for all engines on it together; graphs, NIXL and CUDA contexts come on top."""
_COUNTS = re.compile(r"(?=.)(?:(\d{1,5})p)?(?:(\d{1,5})d)?(?:(\d{1,5})c)?")


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The options that are the same for all systems."""

    model: str = "tiny"
    """Directory of a checkpoint; "tiny" is built in."""
    gpus: tuple[int, ...] = ()
    """GPUs of every system; none: the CPU."""
    tensor_parallel_size: int = 1
    """GPUs of each engine."""
    slots: int = 256
    """Decode slots of engines with fixed shapes; on a CPU, the most sequences of every engine at once."""
    chunk_size: int = 2048
    """Prompt tokens of one prefill step of this project's engines; stock vLLM keeps its own default."""
    max_model_len: int = 8192
    """Most tokens of one request, prompt and output together."""
    kv_cache_gib: int = 1
    """KV cache of each engine on a CPU, in GiB."""


@dataclass(frozen=True, kw_only=True)
class Machine(SharedOptions):
    """The shared options on this machine: the model is a directory, and no longer than it can be."""

    cores: tuple[int, ...] = ()
    """The cores of the CPU, if it computes; else empty."""

    @property
    def num_devices(self) -> int:
        """The number of places for an engine: groups of tensor_parallel_size GPUs, or the one CPU."""
        return max(1, len(self.gpus) // self.tensor_parallel_size)

    def device(self, index: int) -> tuple[int, ...]:
        """Return the GPUs of a place; none on a CPU."""
        size = self.tensor_parallel_size
        return self.gpus[index * size : (index + 1) * size]


@dataclass(frozen=True, kw_only=True)
class EngineSettings(Machine):
    """One vLLM engine of a system that is not the cluster: its part of the machine, and what it does there."""

    kind: str
    role: str = "both"
    """The engine's role: both, prefill or decode."""
    gpu_memory_utilization: float

    @property
    def is_ours(self) -> bool:
        """Whether the engine keeps the contract of the cluster's nodes."""
        return self.kind.startswith("colocated")


@dataclass(frozen=True, kw_only=True, order=True)
class NodeCounts:
    """The nodes of a cluster, by kind, as in "2p1d", "1p1d2c" and "1d3c"."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @classmethod
    def parse(cls, text: str) -> NodeCounts:
        """Read a placement. Raises InvalidArgumentError for one that is none, or that lacks a side."""
        if (counts := cls.find(text)) is None:
            raise InvalidArgumentError("placements", text, "must be numbers of nodes, as in 2p1d, 3c or 1p1d2c")
        if not counts.serves:
            raise InvalidArgumentError("placements", text, "must have a node that prefills and one that decodes")
        return counts

    @classmethod
    def find(cls, text: str) -> NodeCounts | None:
        """Return the numbers of nodes that a text has; None for another text."""
        if (found := _COUNTS.fullmatch(text)) is None:
            return None
        prefill, decode, colocated = (int(number or 0) for number in found.groups())
        return cls(prefill=prefill, decode=decode, colocated=colocated)

    @property
    def name(self) -> str:
        return "".join(f"{count}{kind[0]}" for kind, count in asdict(self).items() if count)

    @property
    def engines(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def serves(self) -> bool:
        """Whether there is a node for each of the two roles."""
        return bool(self.prefill + self.colocated and self.decode + self.colocated)


class Places(NamedTuple):
    """The places of a system's engines. Prefill and decode have the same ones where a stock engine does both."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    colocated: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A system by its name, as in "std", "cluster:2p1d1c", "cluster:colocated", "colocated::512" (512 slots)."""

    name: str
    kind: str
    placement: str = ""
    """The placement of the nodes: their `NodeCounts`, "shared", "colocated", or empty for the pairs that the GPUs
    allow."""
    slots: int = 0
    """The number of slots; 0: the machine's."""

    @classmethod
    def parse(cls, name: str) -> System:
        """Read a system's name. Raises InvalidArgumentError for an unknown one."""
        kind, _, rest = name.partition(":")
        placement, _, slots = rest.partition(":")
        if kind not in KINDS:
            raise InvalidArgumentError("systems", name, f"must be one of {', '.join(KINDS)}")
        counts = NodeCounts.find(placement)
        if placement and (kind not in PAIRED or not (counts or placement in (SHARED, COLOCATED))):
            limit = f"must be shared or XpYd, as in cluster:2p1d or cluster:1d1c, and only {', '.join(PAIRED)} have one"
            raise InvalidArgumentError("systems", name, limit)
        if kind not in CLUSTERS and (placement == COLOCATED or (counts and counts.colocated)):
            limit = "must be without colocated nodes: only clusters have them, as in cluster:colocated, cluster:1p1d1c"
            raise InvalidArgumentError("systems", name, limit)
        if slots and whole_number(slots) is None:
            raise InvalidArgumentError("systems", name, "must end in a number of slots, as in cluster:1p1d:512")
        return cls(name=name, kind=kind, placement=placement, slots=int(slots or 0))

    @property
    def pads(self) -> bool:
        """Whether every decode step has a row for each slot. Stock steps have no empty rows. In systems with steps of
        several sizes, only the engines know how many rows are empty."""
        return self.kind == "colocated"

    def slots_on(self, machine: Machine) -> int:
        return self.slots or machine.slots

    def places(self, machine: Machine) -> Places:
        """Return the places of its engines.

        Raises InvalidArgumentError if the machine has too few places, or if nobody would prefill or decode.
        """
        if not machine.gpus and (reason := NEEDS_GPU.get(self.kind)):
            raise InvalidArgumentError("systems", self.name, f"needs a GPU: {reason}")
        devices = machine.num_devices
        everywhere = tuple(range(devices))
        if self.kind not in PAIRED or self.placement == SHARED:
            return Places(everywhere, everywhere)
        if self.placement == COLOCATED:
            return Places((), (), everywhere)
        if (counts := NodeCounts.find(self.placement)) is None:
            if devices == 1:
                return Places((0,), (0,))
            return Places(everywhere[: devices // 2], everywhere[devices // 2 :])
        if not counts.serves:
            raise InvalidArgumentError("systems", self.name, "must have a node for prefill and one for decode")
        if not machine.gpus:
            return Places((0,) * counts.prefill, (0,) * counts.decode, (0,) * counts.colocated)
        if counts.engines > devices:
            limit = f"must leave a GPU to each engine; there are {devices} places"
            raise InvalidArgumentError("systems", self.name, limit)
        colocated = counts.prefill + counts.decode  # The first of them.
        paired = everywhere[: counts.prefill], everywhere[counts.prefill : colocated]
        return Places(*paired, everywhere[colocated : counts.engines])

    def gpus(self, machine: Machine) -> dict[str, int]:
        """Return how many GPUs (or CPUs) prefill, decode and both together use."""
        prefill, decode, colocated = (set(places) for places in self.places(machine))
        size = machine.tensor_parallel_size
        return {
            "prefill": len(prefill | colocated) * size,
            "decode": len(decode | colocated) * size,
            "total": len(prefill | decode | colocated) * size,
        }

    def engines(self, machine: Machine) -> list[EngineSettings]:
        """Return the engines of a system other than the cluster, in the order of their start."""
        prefill, decode, _ = self.places(machine)
        if self.kind in PAIRED:
            roles = [("prefill", place) for place in prefill] + [("decode", place) for place in decode]
            share = round(GPU_MEMORY / (2 if {*prefill} & {*decode} else 1), 2)
        else:
            roles, share = [("both", place) for place in decode], GPU_MEMORY
        cores, half = machine.cores, len(machine.cores) // 2
        # A half of the cores each for prefill and decode, since sharing slows both down many times over.
        cores_of = {"both": cores, "prefill": cores[half:], "decode": cores[:half] or cores}
        # 0: a stock engine on a GPU has as many slots as vLLM gives it, unless the system's name says how many.
        is_stock = not self.kind.startswith("colocated")
        slots = self.slots if machine.gpus and is_stock else self.slots_on(machine)
        own = asdict(machine) | {"slots": slots, "kind": self.kind, "gpu_memory_utilization": share}
        return [
            EngineSettings(**own | {"role": role, "gpus": machine.device(place), "cores": cores_of[role]})
            for role, place in roles
        ]

    def describe(self, machine: Machine) -> dict[str, Any]:
        """Return the description of the system for the result file."""
        places = self.places(machine)
        devices = {name: [machine.device(place) for place in found] for name, found in places._asdict().items()}
        if self.kind not in PAIRED:
            devices = {"engines": devices["decode"]}
        return {"what": KINDS[self.kind], **{name: found for name, found in devices.items() if found}}


def parse_systems(names: Sequence[str]) -> list[System]:
    """Read the systems of a command line, separated by spaces or commas; each may be named once."""
    found = [System.parse(name) for group in names for name in group.split(",") if name]
    if not found:
        raise InvalidArgumentError("systems", list(names), "must name at least one")
    if len({system.name for system in found}) < len(found):
        raise InvalidArgumentError("systems", list(names), "must name each only once")
    return found
