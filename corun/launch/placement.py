"""What of which machines the processes get: shares of GPUs and cores, and which of them are to be near each other.

Pure. Must not know Ray, nor how processes are started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corun.launch.members import Member


@dataclass(frozen=True, slots=True)
class Share:
    """What of a machine a process gets."""

    gpus: float = 0.0
    """Whole ones, all on one machine, or a part of one; 0: the machines have none."""
    cores: tuple[int, ...] = ()
    """Empty: all."""

    @property
    def is_part_of_gpu(self) -> bool:
        return 0 < self.gpus < 1


@dataclass(frozen=True, slots=True)
class Shares:
    """How much every process of one launch gets; it stays so for those that come later, since it may be part of their
    contract."""

    gpus: Mapping[str, float]
    """Per node, by pool."""
    cores: tuple[int, ...] = ()
    """Of the one machine, to be shared; empty: they are not."""
    cores_each: int = 0

    def of(self, member: Member, place: int) -> Share:
        """place: how many nodes were placed before it."""
        if member.is_router:
            return Share()
        start = place * self.cores_each % (len(self.cores) - self.cores_each + 1)
        return Share(gpus=self.gpus[member.pool], cores=self.cores[start : start + self.cores_each])


def share_out(nodes: Mapping[str, int], sizes: Mapping[str, int], *, gpus: float, cores: Sequence[int]) -> Shares:
    """nodes, sizes: per pool, how many there are, and the GPUs that each shares the model over. gpus: of all machines.
    cores: of the only machine, if nodes are to have some of their own; else none.

    With fewer GPUs than nodes, as many nodes as needed share one, unless a node needs several.
    """
    needed = sum(count * sizes[pool] for pool, count in nodes.items())
    per_gpu = math.ceil(needed / gpus) if gpus >= 1 and set(sizes.values()) == {1} else 1
    each = {pool: math.floor(1000 * size / per_gpu) / 1000 if gpus else 0.0 for pool, size in sizes.items()}
    own = () if gpus else tuple(cores)
    return Shares(gpus=each, cores=own, cores_each=max(1, len(own) // sum(nodes.values())) if own else 0)


def groups(starting: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Nodes that are to be near each other: the i-th prefill and decode node of a pool, where they start together."""
    found: dict[tuple[str, int], list[Member]] = {}
    for member in starting:
        found.setdefault((member.pool, member.index), []).append(member)
    return [tuple(group) for group in found.values()]
