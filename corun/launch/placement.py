"""What each process gets of its machine: shares of GPUs and cores; and which processes should be near each other.

This module is pure. It must not know Ray, nor how processes are started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.config.cluster_file import PoolSpec
from corun.errors import InvalidArgumentError
from corun.launch.members import ProcessSpec


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a machine that one process gets."""

    gpus: float = 0.0
    """The number of GPUs: whole GPUs of one machine, or a fraction of one GPU; 0: the machines have no GPUs."""
    cores: tuple[int, ...] = ()
    """The cores that the process may use; empty: all."""


class Shares:
    """The share of every process of one launch. Processes that start later get the same shares, since a share may be
    part of their contract.

    gpus: the number of GPUs of each node, by the name of its pool. cores: the cores of the only machine, which its
    nodes share if they have no GPUs; empty: cores are not shared.
    """

    def __init__(self, pools: Sequence[PoolSpec], gpus: Mapping[str, float], cores: Sequence[int]) -> None:
        self.gpus, self._cores = gpus, tuple(cores)
        self._cores_each = max(1, len(cores) // sum(map(_nodes, pools))) if cores else 0

    def of(self, member: ProcessSpec, place: int) -> Share:
        """Return the share of one process. place: the lowest number that no other node has, from 0 on."""
        if member.is_router:
            return Share()
        start = place * self._cores_each % (len(self._cores) - self._cores_each + 1)
        return Share(self.gpus[member.pool], self._cores[start : start + self._cores_each])


def on_joined(pools: Sequence[PoolSpec], *, has_gpus: bool, cores: Sequence[int]) -> Shares:
    """Return the shares on machines that may come and go.

    Each node gets as many whole GPUs as its tensor_parallel_size, or a fraction of them if its pool says how many nodes
    share a GPU. A node waits for GPUs that are not there yet. has_gpus: the machines have GPUs, now or later.
    """
    each = {pool.name: _gpus_each(pool) if has_gpus or pool.nodes_per_gpu else 0.0 for pool in pools}
    return Shares(pools, each, () if any(each.values()) else cores)


def on_own(pools: Sequence[PoolSpec], *, gpus: int, cores: Sequence[int], needs_gpus: bool) -> Shares:
    """Return the shares on this machine alone. needs_gpus: the engine runs on GPUs only.

    If there are fewer GPUs than nodes, as many nodes as necessary share a GPU. A pool is excepted if it says how many
    nodes share a GPU, or if each of its nodes needs several GPUs.

    Raises:
        InvalidArgumentError: a pool says how many GPUs it needs, and the machine has fewer.
    """
    fixed = [pool for pool in pools if pool.nodes_per_gpu or (pool.tensor_parallel_size > 1 and (gpus or needs_gpus))]
    sharing = [pool for pool in pools if pool not in fixed]
    needed = {
        pool.name: math.ceil(_nodes(pool) * pool.tensor_parallel_size / (pool.nodes_per_gpu or 1)) for pool in pools
    }
    left = gpus - sum(needed[pool.name] for pool in fixed)
    if left < 0 or (fixed and sharing and not left):
        first = fixed[0]
        name = "nodes_per_gpu" if first.nodes_per_gpu else "tensor_parallel_size"
        needs = ", ".join(f"{_nodes(pool)} nodes of pool {pool.name} need {needed[pool.name]}" for pool in pools)
        limit = f"must suit the GPUs of this machine: {needs}, it has {gpus}"
        value = first.nodes_per_gpu or first.tensor_parallel_size
        raise InvalidArgumentError(first.where("prefill", name), value, limit)
    per_gpu = max(1, math.ceil(sum(map(_nodes, sharing)) / left)) if left else 0
    part = math.floor(1000 / per_gpu) / 1000 if per_gpu else 0.0
    each = {pool.name: _gpus_each(pool) if pool in fixed else part for pool in pools}
    return Shares(pools, each, () if gpus else cores)


def _nodes(pool: PoolSpec) -> int:
    return pool.count("prefill") + pool.count("decode")


def _gpus_each(pool: PoolSpec) -> float:
    return math.floor(1000 * pool.tensor_parallel_size / (pool.nodes_per_gpu or 1)) / 1000


@dataclass(eq=False, slots=True)
class Group:
    """Bundles of GPUs for nodes that should be near each other. One bundle is never split over machines."""

    handle: Any
    """The handle of the bundles, for whoever keeps them."""
    members: list[ProcessSpec]
    """The node that each bundle is for, or was for last."""
    gpus: float
    """The number of GPUs in each bundle."""


def reuse(kept: Sequence[Group], starting: Mapping[ProcessSpec, float], occupying: Collection[ProcessSpec]) -> None:
    """Give bundles that no node uses to nodes that have none, in place.

    starting: the nodes that start now, with the number of GPUs that each needs. occupying: all other nodes that have
    started or are about to start.
    """
    known = {member for group in kept for member in group.members}
    for member in (member for member in starting if member not in known):
        for group in (group for group in kept if group.gpus == starting[member]):
            free = [i for i, last in enumerate(group.members) if last not in occupying and last not in starting]
            if free:
                group.members[free[0]] = member
                break


def groups(starting: Sequence[ProcessSpec]) -> list[tuple[ProcessSpec, ...]]:
    """Return the groups of nodes that should be near each other: the i-th prefill node and the i-th decode node of a
    pool, if they start together."""
    found: dict[tuple[str, int], list[ProcessSpec]] = {}
    for member in starting:
        found.setdefault((member.pool, member.index), []).append(member)
    return [tuple(group) for group in found.values()]
