"""What the processes get of GPUs and cores, and which of them are near each other."""

from __future__ import annotations

import itertools

import pytest

from corun.launch.members import members
from corun.launch.placement import Share, Shares, groups, share_out
from corun.spec import ClusterSpec, PoolSpec


def shares(gpus: float, nodes: int, *, size: int = 1, cores: int = 0) -> Shares:
    return share_out({"main": nodes}, {"main": size}, gpus=gpus, cores=range(cores))


@pytest.mark.parametrize(
    ("gpus", "nodes", "share"),
    [(0, 2, 0.0), (1, 2, 0.5), (1, 3, 0.333), (2, 2, 1.0), (8, 2, 1.0), (2, 3, 0.5), (3, 4, 0.5)],
)
def test_share_of_gpu(gpus: float, nodes: int, share: float) -> None:
    found = shares(gpus, nodes).gpus["main"]
    assert found == share
    assert not gpus or nodes <= gpus * int(1 / found)  # So all of them find room.


def test_a_node_of_several_gpus_shares_none() -> None:
    assert shares(1, 2, size=2).gpus == {"main": 2.0}
    two = share_out({"a": 2, "b": 2}, {"a": 1, "b": 4}, gpus=2, cores=())
    assert two.gpus == {"a": 1.0, "b": 4.0}


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
    found = shares(0, nodes, cores=cores)
    _, *placed = members(ClusterSpec(pools=(PoolSpec(common={"model": "m"}, replicas={"prefill": nodes - 1}),)))
    assert [found.of(member, place).cores for place, member in enumerate(placed)] == expected
    # One more later gets as many: how many it has may be part of its contract.
    assert len(found.of(placed[0], nodes).cores) == len(expected[0])


def test_a_router_gets_nothing_of_its_own() -> None:
    router, *_ = members(ClusterSpec(pools=(PoolSpec(common={"model": "m"}),)))
    assert shares(4, 2).of(router, 0) == Share()


def test_pairs_are_near_each_other() -> None:
    pools = (PoolSpec(name=name, common={"model": "m"}, replicas={"prefill": 2, "decode": 3}) for name in "ab")
    found = groups([member for member in members(ClusterSpec(pools=tuple(pools))) if not member.is_router])
    expected = [["prefill-0", "decode-0"], ["prefill-1", "decode-1"], ["decode-2"]]
    assert [[member.name for member in group] for group in found] == [
        [f"{pool}.{name}" for name in group] for pool, group in itertools.product("ab", expected)
    ]
