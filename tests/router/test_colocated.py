"""Colocated nodes as a router sees them: a prefill and a decode node with one engine, which come and go together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corun.errors import DataLossError, UnavailableError
from corun.params import SamplingParams
from corun.testing.engines import expected
from corun.types import GONE_AS_PLANNED, NodeInfo, NodeLoad, NodeRole, NodeState
from router.nodes.registry import Registry
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import PROMPT
from tests.router.test_placement import NEED
from tests.router.test_registry import info

P, D = NodeRole.PREFILL, NodeRole.DECODE
SIDES = "c0-prefill", "c0-decode"


async def add_colocated(fake: FakeCluster, node_id: str = "c0") -> None:
    """Start the two sides of a colocated node, and wait until they are READY."""
    await fake.add_prefill(f"{node_id}-prefill", engine_id=f"engine of {node_id}")
    await fake.add_decode(f"{node_id}-decode", engine_id=f"engine of {node_id}")
    await fake.ready(f"{node_id}-prefill", f"{node_id}-decode")


def sides(model: str) -> tuple[NodeInfo, NodeInfo]:
    """Return what the sides of a colocated node tell routers."""
    prefill, decode = (info(model, name, role) for name, role in zip(SIDES, (P, D), strict=True))
    return replace(prefill, engine_id="e"), replace(decode, engine_id="e")


def states(registry: Registry) -> dict[str, tuple[NodeState, str]]:
    return {status.node.ref.node_id: (status.state, status.detail) for status in registry.statuses()}


@pytest.mark.parametrize("first", [0, 1])
async def test_if_one_side_is_lost_so_is_the_other_at_once(registry: Registry, model: str, first: int) -> None:
    for node in (*sides(model), info(model, "d1")):
        registry.register(node)
    registry.lose(registry._nodes()[first], "its process died")
    found = states(registry)
    assert [found[name] for name in SIDES] == [(NodeState.LOST, "its process died")] * 2
    assert found["d1"][0] is NodeState.JOINING
    for node in sides(model):  # It was the network: both come back.
        registry.register(node)
    assert {state for state, _ in states(registry).values()} == {NodeState.JOINING}


async def test_a_new_generation_of_one_side_ends_both_old_ones_and_no_new_one(registry: Registry, model: str) -> None:
    for node in sides(model):
        registry.register(node)
    new = [replace(node, ref=replace(node.ref, generation="1" * 16), engine_id="f") for node in sides(model)]
    registry.register(new[0])
    assert [state for state, _ in states(registry).values()] == [NodeState.JOINING, NodeState.LOST]
    registry.register(new[1])
    assert [state for state, _ in states(registry).values()] == [NodeState.JOINING] * 2


async def test_a_colocated_node_that_drained_is_gone_as_planned_with_both_sides(registry: Registry, model: str) -> None:
    for node in sides(model):
        registry.register(node)
        registry.heartbeat(node.ref, NodeLoad(), draining=True)
    registry.lose(registry._nodes()[1], "its step stream ended")
    assert set(states(registry).values()) == {(NodeState.LOST, GONE_AS_PLANNED)}


@pytest.mark.parametrize("is_lost", [False, True])
async def test_wrong_bits_of_one_side_put_both_out(registry: Registry, model: str, is_lost: bool) -> None:
    prefill, decode = sides(model)
    other = info(model, "d1")
    for node in (prefill, decode, other):
        registry.register(node)
    if is_lost:
        registry.lose(registry._nodes()[0], "no heartbeat")
    registry.quarantine((prefill.ref, other.ref), "a sample")
    assert {state for state, _ in states(registry).values()} == {NodeState.REFUSED}
    for node in (prefill, decode):
        with pytest.raises(DataLossError, match="gave other bits for a sample"):
            registry.heartbeat(node.ref, NodeLoad(), draining=False)


@pytest.mark.parametrize("order", [1, -1])
async def test_a_finding_of_one_side_refuses_both_whichever_comes_first(
    registry: Registry, model: str, order: int
) -> None:
    prefill, decode = sides(model)
    for node in (prefill, replace(decode, finding="the logits moved"))[::order]:
        if node.finding or order < 0:
            with pytest.raises(UnavailableError, match="the logits moved"):
                registry.register(node)
        else:
            registry.register(node)
    found = states(registry)
    assert found["c0-decode"][0] is NodeState.REFUSED
    assert found["c0-prefill"][0] is (NodeState.LOST if order > 0 else NodeState.REFUSED)
    assert all("the logits moved" in detail for _, detail in found.values())


@pytest.mark.parametrize("lent", ["prefill", "decode"])
async def test_a_colocated_node_lends_one_side(model: str, lent: str) -> None:
    """The other side of the pair is a plain node, because the colocated node's own one has no room."""
    async with cluster(model, prefills=0, decodes=0, slots=1) as fake:
        await add_colocated(fake)
        if lent == "prefill":
            await fake.add_decode("d1")
            await fake.ready("d1")
            fake.router.registry._decodes["c0-decode"].room.take(NEED)
            pair = "c0-prefill", "d1"
        else:
            await fake.add_prefill("p1")
            await fake.ready("p1")
            room = fake.router.registry._prefills["c0-prefill"].room
            for _ in range(4):
                room.take(1000)
            pair = "p1", "c0-decode"
        (output,) = await generate(fake, PROMPT, seed=9)
        assert (output.receipt.prefill_node.node_id, output.receipt.decode_node.node_id) == pair
        assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), 9)[0]
        if lent == "prefill":
            fake.router.registry._decodes["c0-decode"].room.give(NEED)
        else:
            for _ in range(4):
                room.give(1000)
