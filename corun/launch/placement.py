"""What each process gets of its machine: shares of GPUs and cores; and which processes should be near each other.

This module is pure. It must not know Ray, nor how processes are started.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.config.cluster_file import COLOCATED, NODES, PoolSpec
from corun.errors import InvalidArgumentError
from corun.launch.members import ProcessSpec

TURNS = "the one GPU has two copies of the weights, whose engines take turns"
INSTEAD = (
    "a colocated node (--colocated 1, or [pools.NAME.colocated]) has one copy, more room for KV, and no turns; with"
    " long prompts it was at 0.99 of stock vLLM's speed, and the two at 0.91 (Qwen3-8B, one H200, 2048 in, 64 out)"
)


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

    gpus: the number of GPUs of each node, by the name of its pool and its role. cores: the cores of the only machine,
    which its nodes share if they have no GPUs; empty: cores are not shared.
    """

    def __init__(self, pools: Sequence[PoolSpec], gpus: Mapping[tuple[str, str], float], cores: Sequence[int]) -> None:
        self.gpus, self._cores = gpus, tuple(cores)
        self._cores_each = max(1, len(cores) // sum(map(_nodes, pools))) if cores else 0

    def of(self, member: ProcessSpec, place: int) -> Share:
        """Return the share of one process. place: the lowest number that no other node has, from 0 on."""
        if member.is_router:
            return Share()
        start = place * self._cores_each % (len(self._cores) - self._cores_each + 1)
        return Share(self.gpus[member.pool, member.role], self._cores[start : start + self._cores_each])


def on_joined(pools: Sequence[PoolSpec], *, has_gpus: bool, cores: Sequence[int]) -> Shares:
    """Return the shares on machines that may come and go.

    Each node gets as many whole GPUs as its tensor_parallel_size, or a fraction of them if its pool says how many nodes
    share a GPU. A node waits for GPUs that are not there yet. has_gpus: the machines have GPUs, now or later.
    """
    each = {
        (pool.name, role): _gpus_each(pool) if has_gpus or pool.nodes_per_gpu else 0.0
        for pool in pools
        for role in NODES
    }
    return Shares(pools, each, () if any(each.values()) else cores)


def on_own(pools: Sequence[PoolSpec], *, gpus: int, cores: Sequence[int], needs_gpus: bool) -> Shares:
    """Return the shares on this machine alone. needs_gpus: the engine runs on GPUs only.

    If there are fewer GPUs than nodes, as many nodes as necessary share a GPU. Three kinds of nodes are excepted: those
    of a pool that says how many nodes share a GPU, those that need several GPUs, and colocated nodes, which have no
    other engine to take turns with.

    Raises:
        InvalidArgumentError: a pool says how many GPUs it needs, and the machine has fewer.
    """
    has_gpus = gpus > 0 or needs_gpus
    fixed = {pool.name: _with_own_gpus(pool) if has_gpus or pool.nodes_per_gpu else () for pool in pools}
    needed = {pool.name: _gpus_needed(pool, fixed[pool.name]) for pool in pools}
    sharing = sum(_nodes(pool) - _nodes(pool, fixed[pool.name]) for pool in pools)
    left = gpus - sum(needed.values())
    if left < 0 or (any(needed.values()) and sharing and not left):
        raise _too_few(pools, gpus, next(pool for pool in pools if needed[pool.name]))
    per_gpu = max(1, math.ceil(sharing / left)) if left else 0
    part = math.floor(1000 / per_gpu) / 1000 if per_gpu else 0.0
    each = {
        (pool.name, role): _gpus_each(pool) if role in fixed[pool.name] else part for pool in pools for role in NODES
    }
    return Shares(pools, each, () if gpus else cores)


def _with_own_gpus(pool: PoolSpec) -> tuple[str, ...]:
    """Return the roles of a pool whose nodes do not share the GPUs that are left."""
    return NODES if pool.nodes_per_gpu or pool.tensor_parallel_size > 1 else (COLOCATED,)


def _too_few(pools: Sequence[PoolSpec], gpus: int, first: PoolSpec) -> InvalidArgumentError:
    """Return the error that names what each pool needs. first: a pool that says how many GPUs it needs."""
    name, value = COLOCATED, first.count(COLOCATED)
    if first.nodes_per_gpu:
        name, value = "nodes_per_gpu", first.nodes_per_gpu
    elif first.tensor_parallel_size > 1:
        name, value = "tensor_parallel_size", first.tensor_parallel_size
    where = first.where(COLOCATED, "replicas") if name == COLOCATED else first.where("prefill", name)
    needs = ", ".join(
        f"{_nodes(pool)} node{'s' * (_nodes(pool) > 1)} of pool {pool.name} need{'s' * (_nodes(pool) == 1)} "
        f"{_gpus_needed(pool, NODES)}"
        for pool in pools
    )
    return InvalidArgumentError(where, value, f"must suit the GPUs of this machine: {needs}, it has {gpus}")


def takes_turns(pools: Iterable[PoolSpec], gpus: int) -> bool:
    """Return whether prefill and decode nodes share the only GPU, as `TURNS` says."""
    return gpus == 1 and any(pool.count("prefill") and pool.count("decode") for pool in pools)


def _nodes(pool: PoolSpec, roles: Sequence[str] = NODES) -> int:
    return sum(pool.count(role) for role in roles)


def _gpus_needed(pool: PoolSpec, roles: Sequence[str]) -> int:
    """Return how many GPUs the nodes of these roles need if they share no more than their pool says."""
    return math.ceil(_nodes(pool, roles) * pool.tensor_parallel_size / (pool.nodes_per_gpu or 1))


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
    pool, if they start together. A colocated node is near itself."""
    found: dict[tuple[str, bool, int], list[ProcessSpec]] = {}
    for member in starting:
        found.setdefault((member.pool, member.role == COLOCATED, member.index), []).append(member)
    return [tuple(group) for group in found.values()]
