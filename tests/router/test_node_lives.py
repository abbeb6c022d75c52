"""What a router and its clients see of nodes whose engines get stuck, that drain, or that are told to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from corun.cluster import NodeRole, NodeState
from corun.errors import UnavailableError
from corun.params import SamplingParams
from tests.fakes import FakeCluster, Output, cluster, expected, generate
from tests.living import LiveNode, ending, start_node

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=200, logprobs=True)


class Pool:
    """Live nodes and a router."""

    def __init__(self, fake: FakeCluster) -> None:
        self.fake = fake
        self.nodes: list[LiveNode] = []

    def add(self, node_id: str, **settings: Any) -> LiveNode:
        role = NodeRole.PREFILL if node_id.startswith("p") else NodeRole.DECODE
        node = start_node(self.fake.model, role, node_id, self.fake.kv, [self.fake.address], **settings)
        self.nodes.append(node)
        return node

    async def busy_decode(self) -> LiveNode:
        """The decode node that runs something, once it has drawn tokens."""
        decodes = [node for node in self.nodes if isinstance(node.engine.connected, list)]
        await self.fake.until(lambda: any(node.service._tokens > 10 for node in decodes))
        return next(node for node in decodes if node.service._tokens > 10)


@contextlib.asynccontextmanager
async def pool(model: str, *names: str, router: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pool]:
    async with cluster(model, prefills=0, decodes=0, **(router or {})) as fake:
        made = Pool(fake)
        async with ending(made.nodes):
            for name in names:
                made.add(name, **settings)
            await fake.ready(*names)
            yield made
            await fake.idle()


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
            await nodes.fake.until(lambda: d1.service._tokens + d2.service._tokens > 10)
            stuck, other = (d1, d2) if d1.service._tokens else (d2, d1)
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
            counted = stuck.service._tokens
            assert stuck.engine._running
            stuck.engine.go_on()
            await nodes.fake.until(lambda: not stuck.engine._running)
            assert stuck.service._tokens == counted
            assert len(stuck.service._table) == 0
            await nodes.fake.ready(name)
            other.engine.stop()
            assert right(await generate(nodes.fake, PROMPT, PARAMS, seed=9), 9)

    async def test_the_only_decode_engine(self, model: str) -> None:
        """A sample waits for it, as for any node, and begins again from its prompt."""
        async with pool(model, "p1", "d1") as nodes:
            p1, d1 = nodes.nodes
            run = asyncio.ensure_future(generate(nodes.fake, PROMPT, PARAMS, seed=8))
            await nodes.fake.until(lambda: d1.service._tokens > 10)
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
