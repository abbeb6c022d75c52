"""What the processes get of GPUs and cores, and which of them are near each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from corun.config.cluster_file import NODES, ClusterSpec, PoolSpec
from corun.errors import InvalidArgumentError
from corun.launch.members import ProcessSpec, members
from corun.launch.placement import Group, Share, groups, on_joined, on_own, reuse, takes_turns


def pool(nodes: int, name: str = "main", *, size: int = 1, per_gpu: int | None = None) -> PoolSpec:
    common = {"model": "m", "tensor_parallel_size": size}
    return PoolSpec(name=name, common=common, replicas={"prefill": nodes - 1}, nodes_per_gpu=per_gpu)


def colocated(nodes: int, pairs: int = 0, name: str = "main", **common: int) -> PoolSpec:
    counts = {"colocated": nodes, "prefill": pairs, "decode": pairs}
    return PoolSpec(name=name, common={"model": "m", **common}, replicas=counts)


def each(pools: tuple[PoolSpec, ...], gpus: Mapping[tuple[str, str], float]) -> list[float]:
    """Return the shares of the roles that have nodes, without repetitions within a pool."""
    found = [[gpus[pool.name, role] for role in NODES if pool.count(role)] for pool in pools]
    return [share for shares in found for share in dict.fromkeys(shares)]


def own(gpus: int, *pools: PoolSpec, needs_gpus: bool = True) -> list[float]:
    return each(pools, on_own(pools, gpus=gpus, cores=(), needs_gpus=needs_gpus).gpus)


def joined(*pools: PoolSpec, has_gpus: bool = True) -> list[float]:
    return each(pools, on_joined(pools, has_gpus=has_gpus, cores=()).gpus)


@pytest.mark.parametrize(
    ("gpus", "nodes", "share"),
    [(0, 2, 0.0), (1, 2, 0.5), (1, 3, 0.333), (2, 2, 1.0), (8, 2, 1.0), (2, 3, 0.5), (3, 4, 0.5)],
)
def test_nodes_share_the_gpus_of_this_machine(gpus: int, nodes: int, share: float) -> None:
    assert own(gpus, pool(nodes), needs_gpus=False) == [share]
    assert not gpus or nodes <= gpus * int(1 / share)  # So all of them find room.


def test_pools_that_say_what_their_nodes_need() -> None:
    assert own(4, pool(2, size=2)) == [2.0]  # A node of several GPUs shares none.
    assert own(9, pool(2, "a"), pool(2, "b", size=4)) == [0.5, 4.0]
    assert own(0, pool(2, size=2), needs_gpus=False) == [0.0]  # An engine for CPUs has processes instead.
    assert own(2, pool(2, per_gpu=1)) == [1.0]
    # A joined Ray gives whole GPUs, however few it has now.
    assert joined(pool(8), pool(2, "b", size=4)) == [1.0, 4.0]
    assert joined(pool(8), has_gpus=False) == [0.0]
    for shared in (joined(pool(3, per_gpu=3)), joined(pool(3, per_gpu=3), has_gpus=False), own(4, pool(3, per_gpu=3))):
        assert shared == [0.333]


def test_colocated_nodes_have_gpus_of_their_own() -> None:
    assert own(1, colocated(1)) == [1.0]
    assert own(4, colocated(4)) == [1.0]
    assert own(2, colocated(1, pairs=1)) == [0.5, 1.0]
    assert own(3, colocated(1, pairs=1)) == [1.0]
    assert own(4, colocated(2, tensor_parallel_size=2)) == [2.0]
    assert own(0, colocated(1), needs_gpus=False) == [0.0]
    assert joined(colocated(1), colocated(1, pairs=1, name="b", tensor_parallel_size=4)) == [1.0, 4.0]
    pinned = PoolSpec(common={"model": "m"}, replicas={"colocated": 2}, nodes_per_gpu=2)
    assert own(1, pinned) == [0.5], "as the pool says"


def test_a_pair_on_one_gpu_takes_turns() -> None:
    assert takes_turns([pool(2)], 1)
    assert not takes_turns([pool(2)], 2)
    assert not takes_turns([pool(2)], 0)
    assert not takes_turns([colocated(1)], 1)


@pytest.mark.parametrize(
    ("gpus", "pools", "message"),
    [
        (1, [colocated(2)], "colocated = 2: .*: 2 nodes of pool main need 2, it has 1|replicas = 2"),
        (0, [colocated(1)], ".*: 1 node of pool main needs 1, it has 0"),
        (1, [colocated(1, pairs=1)], ".*: 3 nodes of pool main need 3, it has 1"),
        (3, [pool(2, size=2)], "tensor_parallel_size = 2: must suit .*: 2 nodes of pool main need 4, it has 3"),
        (0, [pool(2, size=2)], "tensor_parallel_size = 2: .* it has 0"),
        (1, [pool(3, per_gpu=2)], "nodes_per_gpu = 2: .*: 3 nodes of pool main need 2, it has 1"),
        (0, [pool(2, per_gpu=2)], "nodes_per_gpu = 2"),
        (4, [pool(2, "a"), pool(2, "b", size=2)], "2 nodes of pool a need 2, 2 nodes of pool b need 4, it has 4"),
    ],
)
def test_too_few_gpus_are_an_error_at_once(gpus: int, pools: list[PoolSpec], message: str) -> None:
    """On this machine alone no more will come."""
    with pytest.raises(InvalidArgumentError, match=message):
        own(gpus, *pools)


@pytest.mark.parametrize(
    ("cores", "nodes", "expected"),
    [
        (2, 2, [(0,), (1,)]),
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (5, 2, [(0, 1), (2, 3)]),
        (1, 2, [(0,), (0,)]),
        (2, 3, [(0,), (1,), (0,)]),
    ],
)
def test_cores_are_shared_equally(cores: int, nodes: int, expected: list[tuple[int, ...]]) -> None:
    found = on_own([pool(nodes)], gpus=0, cores=range(cores), needs_gpus=False)
    router, *placed = members(ClusterSpec(pools=(pool(nodes),)))
    assert [found.of(member, place).cores for place, member in enumerate(placed)] == expected
    # One more later gets as many: how many it has may be part of its contract.
    assert len(found.of(placed[0], nodes).cores) == len(expected[0])
    assert found.of(router, 0) == Share()


def test_pairs_are_near_each_other() -> None:
    counts = {"prefill": 2, "decode": 3, "colocated": 2}
    pools = (PoolSpec(name=name, common={"model": "m"}, replicas=counts) for name in "ab")
    found = groups([member for member in members(ClusterSpec(pools=tuple(pools))) if not member.is_router])
    expected = [["prefill-0", "decode-0"], ["prefill-1", "decode-1"], ["decode-2"], ["colocated-0"], ["colocated-1"]]
    assert [[member.name for member in group] for group in found] == [
        [f"{pool}.{name}" for name in group] for pool, group in itertools.product("ab", expected)
    ]


def test_a_bundle_that_nobody_has_is_used_again() -> None:
    """Two pairs, then `scale prefill=3 decode=1`: all GPUs are in bundles, and one of them is free."""
    prefill, decode = (
        [ProcessSpec("main", role, i, f"{role}-{i}") for i in range(3)] for role in ("prefill", "decode")
    )
    kept = [Group(None, [prefill[index], decode[index]], 1.0) for index in range(2)]
    running = {prefill[0], prefill[1], decode[0]}
    reuse(kept, {prefill[2]: 0.5}, running)  # Not of that size.
    reuse(kept, {prefill[2]: 1.0}, {*running, decode[1]})  # Not free.
    reuse(kept, {decode[1]: 1.0}, running)  # Has one.
    assert [group.members for group in kept] == [[prefill[0], decode[0]], [prefill[1], decode[1]]]
    reuse(kept, {prefill[2]: 1.0}, running)
    assert [group.members for group in kept] == [[prefill[0], decode[0]], [prefill[1], prefill[2]]]
