"""Routers are added to, and taken from, nodes that are running: DNS is all that changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.node import membership as routers_module
from corun.node.membership import NodeAgent
from corun.params import SamplingParams
from corun.rpc.channel import channel
from corun.testing.cluster import WAIT_S
from router.service import CLUSTER_SERVICE
from tests.clusters import FakeCluster, cluster, generate
from tests.node.scripted_router import Names
from tests.router.asking import right

PARAMS = SamplingParams(max_tokens=60, logprobs=True)
SLOTS = 3


@pytest.fixture(autouse=True)
def quick_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers_module, "LOOKUP_S", 0.01)


@contextlib.asynccontextmanager
async def routers(
    model: str, *, slots: int = SLOTS, kv_blocks: int = 1000, **config: Any
) -> AsyncIterator[tuple[FakeCluster, FakeCluster, Names]]:
    """Two routers, and a prefill and a decode node that look for them by a name, which leads to the first."""
    async with cluster(model, prefills=0, decodes=0, **config) as one, cluster(model, prefills=0, decodes=0) as two:
        names = Names(routers=[one.address])
        nodes = (
            await one.add_prefill(join=False),
            await one.add_decode(join=False, slots=slots, kv_blocks=kv_blocks),
        )
        nodes[1].engine.step_ms = 3
        for node in nodes:
            node.agent = NodeAgent(node.info, ["routers:50051"], node.service.load, resolve=names)
            node.join()
        await one.ready("p1", "d1")
        yield one, two, names


async def is_serving(fake: FakeCluster) -> bool:
    async with channel(fake.address) as link:
        request = health_pb2.HealthCheckRequest(service=CLUSTER_SERVICE)
        answer = await health_pb2_grpc.HealthStub(link).Check(request, timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def start(fake: FakeCluster, seed: int, params: SamplingParams = PARAMS) -> asyncio.Task[None]:
    """A request whose output is checked."""

    async def run() -> None:
        (output,) = await generate(fake, (seed, 4), params, seed=seed, timeout_s=60.0)
        assert right(output, (seed, 4), params, seed)

    return asyncio.create_task(run())


async def test_a_router_that_joins_busy_nodes_serves_by_their_registration_alone(model: str) -> None:
    async with routers(model) as (one, two, names):
        running = start(one, 99)
        await one.until(lambda: one.nodes[1].leases == 1)
        assert not await is_serving(two)
        names.at["routers"] = [one.address, two.address]
        await two.ready("p1", "d1")
        assert await is_serving(two)
        await asyncio.gather(running, start(two, 1))


async def test_a_router_whose_samples_fill_the_kv_leaves_some_to_larger_ones_of_another(
    model: str,
) -> None:
    """However long its small ones go on: 6 of them fill the node, a large one needs two thirds of it."""
    large = SamplingParams(max_tokens=240, min_tokens=240, logprobs=True)
    async with routers(model, slots=20, kv_blocks=24) as (one, two, names):
        names.at["routers"] = [one.address, two.address]
        await two.ready("p1", "d1")
        seeds, is_over = itertools.count(), False

        async def go_on() -> None:
            while not is_over:
                await start(one, next(seeds) % 200)

        crowd = [asyncio.create_task(go_on()) for _ in range(12)]
        await one.until(lambda: one.nodes[1].leases == 6)
        await asyncio.gather(*(start(two, seed, large) for seed in (200, 201)))
        is_over = True
        await asyncio.gather(*crowd)


async def test_a_router_in_its_drain_keeps_its_nodes_though_it_is_not_listed(model: str) -> None:
    async with routers(model, heartbeat_timeout_ms=1000) as (one, two, names):
        one.nodes[1].engine.step_ms = 15  # Two rounds of 60 tokens: the drain lasts longer than a node may be silent.
        runs = [start(one, seed) for seed in range(2 * SLOTS)]
        await one.until(lambda: one.nodes[1].leases == one.router.queue.waiting == SLOTS)  # All have been taken.
        names.at["routers"] = [two.address]
        await one.router.drain()
        await asyncio.gather(*runs)
        assert [one.detail("p1"), one.detail("d1")] == ["", ""]
        await two.ready("p1", "d1")
