"""What a router and its clients see of nodes whose engines get stuck, that drain, or that are told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import DataLossError, UnavailableError
from corun.node.life import Life
from corun.params import SamplingParams
from corun.rpc.channel import channel
from corun.testing.cluster import WAIT_S, router_config
from corun.testing.engines import expected
from corun.testing.nodes import LocalNode
from corun.types import NodeRef, NodeState
from router.service import CLUSTER_SERVICE
from tests.clusters import FakeCluster, Output, cluster, generate

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=200, logprobs=True)


PATIENT = {"heartbeat_timeout_ms": 20_000}
"""Here nobody is to be lost because the machine is busy."""


class Pool:
    """Live nodes and a router."""

    def __init__(self, fake: FakeCluster) -> None:
        fake.ends_quarantined = True
        self.fake = fake
        self.nodes = fake.nodes
        self.addresses = [fake.address]

    async def add(self, node_id: str, **settings: Any) -> None:
        common: dict[str, Any] = {"router": tuple(self.addresses), "engine_timeout_s": 0.2, "drain_grace_s": 2.0}
        if node_id.startswith("p"):
            await self.fake.add_prefill(node_id, **{**common, **settings})
        else:
            await self.fake.add_decode(node_id, **{**common, "lease_ttl_ms": 20_000, **settings})

    async def busy_and_other(self, *names: str) -> tuple[LocalNode, LocalNode]:
        """Two decode nodes, the one first that runs something, once it has drawn tokens."""
        one, two = (node for node in self.nodes if node.ref.node_id in names)
        await self.fake.until(lambda: one.drawn_tokens + two.drawn_tokens > 10)
        return (one, two) if one.drawn_tokens else (two, one)

    async def until_ready(self, expected: bool) -> None:
        """Waits until the router's health says of its public service whether it is ready."""
        status = health_pb2.HealthCheckResponse.SERVING if expected else health_pb2.HealthCheckResponse.NOT_SERVING
        request = health_pb2.HealthCheckRequest(service=CLUSTER_SERVICE)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        async with channel(self.fake.address) as link:
            health = health_pb2_grpc.HealthStub(link)
            while (await health.Check(request, timeout=WAIT_S)).status != status:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def pool(model: str, *names: str, router: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pool]:
    async with cluster(model, prefills=0, decodes=0, **{**PATIENT, **(router or {})}) as fake:
        made = Pool(fake)
        for name in names:
            await made.add(name, **settings)
        await fake.ready(*names)
        yield made
        fake.kv.held.clear()  # What a stuck node keeps for a router that has given it up ends with its lease.


def right(outputs: list[Output], seed: int, params: SamplingParams = PARAMS) -> bool:
    ids, logprobs, _ = expected(PROMPT, params, seed)
    return [(output.token_ids, output.logprobs) for output in outputs] == [(ids, logprobs)]


class TestStuckEngine:
    async def test_a_decode_engine(self, model: str) -> None:
        """Its streams go on elsewhere; it gets nothing until it answers, and then no late token reaches anybody."""
        async with pool(model, "p1", "d1", "d2") as nodes:
            d1, d2 = nodes.nodes[1:]
            d1.engine.step_ms = d2.engine.step_ms = 3
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8))
            await nodes.fake.until(lambda: d1.drawn_tokens + d2.drawn_tokens > 10)
            stuck, other = (d1, d2) if d1.drawn_tokens else (d2, d1)
            stuck.engine.stop()
            (output,) = outputs = await run
            assert right(outputs, 8)
            assert output.receipt.decode_node == other.ref
            name = stuck.ref.node_id
            await nodes.fake.until(lambda: "its engine is stuck" in nodes.fake.detail(name))
            assert nodes.fake.state(name) is NodeState.JOINING
            for seed in range(4):
                (output,) = await generate(nodes.fake, PROMPT, SamplingParams(max_tokens=3), seed=seed)
                assert output.receipt.decode_node == other.ref
            counted = stuck.drawn_tokens
            assert stuck.engine._running
            stuck.engine.go_on()
            await nodes.fake.until(lambda: not stuck.engine._running)
            assert stuck.drawn_tokens == counted
            assert len(stuck.service._table) == 0
            await nodes.fake.ready(name)
            other.engine.stop()
            assert right(await generate(nodes.fake, PROMPT, PARAMS, seed=9), 9)

    async def test_the_only_decode_engine(self, model: str) -> None:
        """A sample waits for it, as for any node, and begins again from its prompt."""
        async with pool(model, "p1", "d1") as nodes:
            p1, d1 = nodes.nodes
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8))
            await nodes.fake.until(lambda: d1.drawn_tokens > 10)
            d1.engine.stop()
            await nodes.fake.until(lambda: "its engine is stuck" in nodes.fake.router.registry.missing())
            d1.engine.go_on()
            assert right(await run, 8)
            assert len(p1.engine.prefilled) == 2

    async def test_a_prefill_engine(self, model: str) -> None:
        """The prompts that it has are computed elsewhere; what it ends up with is released."""
        async with pool(model, "p1", "p2", "d1") as nodes:
            p1, p2 = nodes.nodes[:2]
            p1.engine.stop()
            p2.engine.stop()
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8))
            await nodes.fake.until(lambda: bool(p1.engine.prefilled or p2.engine.prefilled))
            stuck, other = (p1, p2) if p1.engine.prefilled else (p2, p1)
            other.engine.go_on()
            (output,) = outputs = await run
            assert right(outputs, 8)
            assert output.receipt.prefill_node == other.ref
            assert "its engine is stuck" in nodes.fake.detail(stuck.ref.node_id)
            stuck.engine.go_on()
            await nodes.fake.ready(stuck.ref.node_id)
            assert stuck.engine.released

    async def test_a_sample_whose_kv_is_at_a_stuck_node(self, model: str) -> None:
        """It was prefilled, and waits in its slot for a KV that will not come."""
        async with pool(model, "p1", "p2", "d1", router={"step_timeout_s": 60.0}) as nodes:
            p1, p2, d1 = nodes.nodes
            d1.engine.hanging = True  # Answers, but steps nothing: as one whose requests all wait for KV.
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8))
            await nodes.fake.until(lambda: len(d1.engine._running) == 1)
            stuck, other = (p1, p2) if p1.engine.prefilled else (p2, p1)
            stuck.engine.stop()
            await nodes.fake.until(lambda: bool(other.engine.prefilled))
            d1.engine.hanging = False
            (output,) = outputs = await run
            assert right(outputs, 8)
            assert output.receipt.prefill_node == other.ref
            stuck.engine.go_on()
            await nodes.fake.ready(stuck.ref.node_id)

    async def test_nothing_can_be_started_at_a_stuck_node(self, model: str) -> None:
        """Not even by a router that has not heard of it yet."""
        async with pool(model, "p1", "d1") as nodes:
            d1 = nodes.nodes[1]
            d1.engine.stop()
            await nodes.fake.until(lambda: bool(d1.service.closed))
            member = nodes.fake.router.registry._decodes["d1"]
            with pytest.raises(UnavailableError, match="decode node d1: its engine is stuck"):
                await member.client.connect(nodes.nodes[0].engine.endpoint, 5.0)
            d1.engine.go_on()
            await nodes.fake.ready("d1")


@contextlib.asynccontextmanager
async def two_routers(model: str) -> AsyncIterator[tuple[Pool, FakeCluster]]:
    """A pool of five nodes, and a second router over it."""
    fake, other = (FakeCluster(model, router_config(**PATIENT)) for _ in range(2))
    try:
        await asyncio.gather(fake.add_router(), other.add_router())
        pool = Pool(fake)
        pool.addresses.append(other.address)
        for name in NAMES:
            await pool.add(name)
        await asyncio.gather(fake.ready(*NAMES), other.ready(*NAMES))
        yield pool, other
    finally:
        await fake.close()
        await other.close()


NAMES = ("p1", "p2", "d1", "d2", "d3")


async def mismatch(pool: Pool) -> list[LocalNode]:
    """A sample of the first router moves from an engine that gets stuck to one that lies; returns who is suspected."""
    decodes = pool.nodes[2:5]
    for node in decodes:
        node.engine.step_ms = 3
    run = asyncio.ensure_future(generate(pool.fake, PROMPT, PARAMS, seed=8, request_id="lied"))
    await pool.fake.until(lambda: any(node.drawn_tokens > 10 for node in decodes))
    for node in decodes:
        node.engine.corrupt = True
    next(node for node in decodes if node.drawn_tokens).engine.stop()
    with pytest.raises(DataLossError):
        await run
    out: dict[NodeRef, str] = pool.fake.router.registry._quarantined
    return [node for node in pool.nodes if node.ref in out]


class TestQuarantine:
    async def test_every_router_stops_using_them_and_they_end(self, model: str) -> None:
        """Told by the nodes themselves, before they are gone: that is what their state at the other router says."""
        async with two_routers(model) as (pool, other):
            suspects = await mismatch(pool)
            assert 3 <= len(suspects) <= 4
            names = [node.ref.node_id for node in suspects]
            await other.until(lambda: all("gave other bits" in other.detail(name) for name in names))
            assert {other.state(name) for name in names} <= {NodeState.DRAINING, NodeState.JOINING}
            for node in suspects:
                with pytest.raises(DataLossError, match="gave other bits for sample 0 of request 'lied': restart it"):
                    await node.end()
                assert node.engine.closed
            await self.come_back(pool, other, names)

    async def come_back(self, pool: Pool, other: FakeCluster, names: list[str]) -> None:
        """Started again, they are new generations, which have tested themselves."""
        for node in pool.nodes:
            node.engine.corrupt = False
        for name in names:
            await pool.add(name)
        for router in (pool.fake, other):
            await router.ready(*NAMES)
            assert right(await generate(router, PROMPT, PARAMS, seed=9), 9)

    async def test_streams_of_other_routers_move_away(self, model: str) -> None:
        async with two_routers(model) as (pool, other):
            for node in pool.nodes[2:]:
                node.engine.step_ms = 5
            run = asyncio.ensure_future(generate(other, PROMPT, PARAMS, seed=9))
            await other.until(lambda: any(node.drawn_tokens > 5 for node in pool.nodes[2:]))
            busy = next(node for node in pool.nodes[2:] if node.drawn_tokens)
            pool.fake.router.registry.quarantine([busy.ref], "sample 0 of request 'x'")
            (output,) = outputs = await run
            assert right(outputs, 9)
            assert output.receipt.decode_node != busy.ref

    async def test_a_node_in_its_drain_hears_it_too(self, model: str) -> None:
        async with two_routers(model) as (pool, other):
            d1 = pool.nodes[2]
            run = asyncio.ensure_future(generate(other, PROMPT, PARAMS, seed=9))
            await other.until(lambda: any(node.drawn_tokens > 5 for node in pool.nodes[2:]))
            d1 = next(node for node in pool.nodes[2:] if node.drawn_tokens)
            d1.engine.hanging = True  # Its drain will take long.
            d1.stop.set()
            pool.fake.router.registry.quarantine([d1.ref], "sample 0 of request 'x'")
            assert right(await run, 9)
            await d1.end()

    async def test_without_that_the_other_router_goes_on(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The control: nodes that do not listen are used by whoever saw no mismatch."""
        monkeypatch.setattr(Life, "_note_quarantine", lambda self, reason: None)
        async with two_routers(model) as (pool, other):
            suspects = await mismatch(pool)
            lying = {node.ref for node in suspects if not node.engine.stopped}
            used = []
            for seed in range(6):
                outputs = await generate(other, PROMPT, PARAMS, seed=seed)
                used += [outputs[0].receipt.decode_node, outputs[0].receipt.prefill_node]
            assert lying & set(used)


class TestDrain:
    async def test_a_decode_node_finishes_its_streams(self, model: str) -> None:
        async with pool(model, "p1", "d1", "d2", drain_grace_s=30.0) as nodes:
            for node in nodes.nodes[1:]:
                node.engine.step_ms = 5
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            busy, other = await nodes.busy_and_other("d1", "d2")
            busy.stop.set()
            await nodes.fake.until(lambda: nodes.fake.state(busy.ref.node_id) is NodeState.DRAINING)
            (output,) = await generate(nodes.fake, PROMPT, SamplingParams(max_tokens=2), seed=1)
            assert output.receipt.decode_node == other.ref
            (output,) = outputs = await run
            assert right(outputs, 8)
            assert output.receipt.decode_node == busy.ref
            await busy.end()

    async def test_a_decode_node_hands_over_what_takes_too_long(self, model: str) -> None:
        """By failover: the client sees one right stream."""
        async with pool(model, "p1", "d1", "d2", drain_grace_s=0.1) as nodes:
            for node in nodes.nodes[1:]:
                node.engine.step_ms = 5
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            busy, other = await nodes.busy_and_other("d1", "d2")
            busy.stop.set()
            (output,) = outputs = await run
            assert right(outputs, 8)
            assert output.receipt.decode_node == other.ref
            await busy.end()

    async def test_a_prefill_node_waits_until_its_kv_is_pulled(self, model: str) -> None:
        async with pool(model, "p1", "d1", drain_grace_s=30.0) as nodes:
            p1, d1 = nodes.nodes
            d1.engine.hanging = True  # Answers, but reads nothing yet.
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            await nodes.fake.until(lambda: len(d1.engine._running) == 1)
            p1.stop.set()
            await nodes.fake.until(lambda: nodes.fake.state("p1") is NodeState.DRAINING)
            await asyncio.sleep(0.2)
            assert not p1.life.done()
            d1.engine.hanging = False
            assert right(await run, 8)
            await p1.end()
            assert len(p1.engine.prefilled) == 1

    async def test_a_prefill_node_finishes_what_it_computes(self, model: str) -> None:
        async with pool(model, "p1", "d1", drain_grace_s=30.0) as nodes:
            p1 = nodes.nodes[0]
            p1.engine.delay_s = 0.3
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            await nodes.fake.until(lambda: p1.service.queued_prompts)
            p1.stop.set()
            assert right(await run, 8)
            await p1.end()
            assert len(p1.engine.prefilled) == 1

    async def test_it_does_not_wait_for_ever(self, model: str) -> None:
        async with pool(model, "p1", "p2", "d1", drain_grace_s=0.1) as nodes:
            p1, p2, d1 = nodes.nodes
            d1.engine.hanging = True
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            await nodes.fake.until(lambda: len(d1.engine._running) == 1)
            holder = p1 if p1.engine.prefilled else p2
            holder.stop.set()
            await holder.end()
            nodes.fake.kv.held.clear()  # It was that process's.
            d1.engine.hanging = False
            assert right(await run, 8)

    async def test_a_node_that_was_told_to_end_is_gone(self, model: str, caplog: pytest.LogCaptureFixture) -> None:
        """It is not lost: somebody wanted it so. A decode node's stream ends, a prefill node falls silent."""
        caplog.set_level(logging.INFO)
        async with pool(model, "p1", "d1", router={"heartbeat_timeout_ms": 1000}) as nodes:
            for node in nodes.nodes:
                name = node.ref.node_id
                node.stop.set()
                await node.end()
                await nodes.fake.until(lambda name=name: nodes.fake.state(name) is NodeState.LOST)  # type: ignore[misc]
                assert nodes.fake.detail(name) == "gone as planned"
                assert f"node {node.ref} is gone as planned" in caplog.text
            assert "lost" not in caplog.text
            assert "(p1 is gone as planned); no decode" in nodes.fake.router.registry.missing()

    async def test_a_node_whose_engine_died_is_lost(self, model: str) -> None:
        """It takes no new work then, as in a drain, and says why."""
        async with pool(model, "p1", "d1") as nodes:
            d1 = nodes.nodes[1]
            d1.engine.on_death()
            await nodes.fake.until(lambda: "the engine died" in nodes.fake.detail("d1"))
            with pytest.raises(UnavailableError, match="the engine died"):
                await d1.end()
            await nodes.fake.until(lambda: nodes.fake.state("d1") is NodeState.LOST)
            assert nodes.fake.detail("d1") != "gone as planned"

    async def test_readiness_of_a_router_ends_when_its_last_pair_drains(self, model: str) -> None:
        """While what runs is finished; it comes back with the next node."""
        async with pool(model, "p1", "d1", drain_grace_s=30.0) as nodes:
            d1 = nodes.nodes[1]
            d1.engine.step_ms = 5
            await nodes.until_ready(True)
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8, timeout_s=60))
            await nodes.fake.until(lambda: d1.drawn_tokens > 5)
            d1.stop.set()
            await nodes.until_ready(False)
            assert not run.done()
            assert right(await run, 8)
            await d1.end()
            await nodes.add("d1")
            await nodes.until_ready(True)
