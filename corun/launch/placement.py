"""What of which machines the processes get: shares of GPUs and cores, and which of them are to be near each other.

Pure. Must not know Ray, nor how processes are started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.config.cluster_file import PoolSpec
from corun.errors import InvalidArgumentError
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


def on_joined(pools: Sequence[PoolSpec], *, has_gpus: bool, cores: Sequence[int]) -> Shares:
    """Of machines that come and go: whole GPUs, as many as each node shares the model over, but where a pool says how
    many nodes share one. What is not there yet is waited for. has_gpus: the machines have some, now or later. cores: of
    the only machine, for nodes without GPUs to share; empty: they are not shared."""
    each = {pool.name: _gpus_each(pool) if has_gpus or pool.nodes_per_gpu else 0.0 for pool in pools}
    return _with_cores(each, pools, () if any(each.values()) else cores)


def on_own(pools: Sequence[PoolSpec], *, gpus: int, cores: Sequence[int], needs_gpus: bool) -> Shares:
    """Of this machine alone. cores: those that nodes without GPUs share; empty: they are not shared. needs_gpus: the
    engine runs on nothing else.

    With fewer GPUs than nodes, as many nodes as needed share one, unless a pool says how many, or needs several each.

    Raises:
        InvalidArgumentError: a pool says what it needs of GPUs, and there are fewer.
    """
    fixed = [pool for pool in pools if pool.nodes_per_gpu or (pool.tensor_parallel_size > 1 and (gpus or needs_gpus))]
    sharing = [pool for pool in pools if pool not in fixed]
    each = {pool.name: _gpus_each(pool) for pool in fixed}
    left = gpus - sum(_gpus_needed(pool) for pool in fixed)
    if left < 0 or (fixed and sharing and not left):
        raise InvalidArgumentError(*_too_few(fixed[0], pools, gpus))
    per_gpu = max(1, math.ceil(sum(map(_nodes, sharing)) / left)) if left else 0
    each |= {pool.name: math.floor(1000 / per_gpu) / 1000 if per_gpu else 0.0 for pool in sharing}
    return _with_cores(each, pools, () if gpus else cores)


def _with_cores(each: Mapping[str, float], pools: Sequence[PoolSpec], cores: Sequence[int]) -> Shares:
    cores_each = max(1, len(cores) // sum(map(_nodes, pools))) if cores else 0
    return Shares(gpus=each, cores=tuple(cores), cores_each=cores_each)


def _nodes(pool: PoolSpec) -> int:
    return pool.count("prefill") + pool.count("decode")


def _gpus_each(pool: PoolSpec) -> float:
    return math.floor(1000 * pool.tensor_parallel_size / (pool.nodes_per_gpu or 1)) / 1000


def _gpus_needed(pool: PoolSpec) -> int:
    return math.ceil(_nodes(pool) * pool.tensor_parallel_size / (pool.nodes_per_gpu or 1))


def _too_few(fixed: PoolSpec, pools: Sequence[PoolSpec], gpus: int) -> tuple[str, int, str]:
    """What to say of it: setting, value and limit."""
    name = "nodes_per_gpu" if fixed.nodes_per_gpu else "tensor_parallel_size"
    value = fixed.nodes_per_gpu or fixed.tensor_parallel_size
    needs = ", ".join(f"{_nodes(pool)} nodes of pool {pool.name} need {_gpus_needed(pool)}" for pool in pools)
    return fixed.where("prefill", name), value, f"must suit the GPUs of this machine: {needs}, it has {gpus}"


@dataclass(eq=False, slots=True)
class Group:
    """Bundles of GPUs, each never split over machines, for nodes that are near each other if they can be."""

    handle: Any
    """Of whoever keeps the bundles."""
    members: list[Member]
    """Whom each bundle is for, or was for last."""
    gpus: float
    """Of each bundle."""


def reuse(kept: Sequence[Group], starting: Mapping[Member, float], occupying: Collection[Member]) -> None:
    """Gives bundles that nobody has to nodes that have none, in place. starting: with the GPUs that each needs.
    occupying: those that have started or are about to, but for these."""
    known = {member for group in kept for member in group.members}
    for member in (member for member in starting if member not in known):
        for group in (group for group in kept if group.gpus == starting[member]):
            free = [i for i, last in enumerate(group.members) if last not in occupying and last not in starting]
            if free:
                group.members[free[0]] = member
                break


def groups(starting: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Nodes that are to be near each other: the i-th prefill and decode node of a pool, where they start together."""
    found: dict[tuple[str, int], list[Member]] = {}
    for member in starting:
        found.setdefault((member.pool, member.index), []).append(member)
    return [tuple(group) for group in found.values()]
