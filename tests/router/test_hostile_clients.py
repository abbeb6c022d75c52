"""Clients that read too slowly or ask with deadlines too short, and nodes that say too much, at a real router."""

from __future__ import annotations

import asyncio

import pytest

from corun.errors import CorunError, DeadlineError, OverloadedError
from corun.params import SamplingParams
from corun.rpc import codec
from corun.types import NodeState
from router.attempt import Attempt, NodeFaultError
from router.nodes import admission
from router.nodes.registry import Registry
from tests.clusters import cluster, generate
from tests.fuzz.http2 import Connection, call, hello, widen
from tests.router.test_registry import info

PROMPT = (5, 6, 7)
GENERATE = b"/corun.v1.ClusterService/Generate"
RESOURCE_EXHAUSTED = 8
WAIT_S = 20.0


async def test_a_client_that_reads_too_slowly_gives_its_slots_back(model: str) -> None:
    """Long before its samples would have ended; others are served, and it learns why when it reads."""
    async with cluster(model, max_unsent_tokens=50) as fake:
        link = await Connection.open(fake.address, hello(0))
        fake.nodes[1].engine.step_ms = 5.0  # 2.5 s for each of them.
        params = SamplingParams(max_tokens=500, n=8)
        link.send(call(1, GENERATE, codec.generate_request(PROMPT, params, seed=1).SerializeToString()))
        await fake.until(lambda: fake.nodes[1].leases == params.n)
        await fake.until(lambda: not fake.held())
        assert fake.nodes[1].drawn_tokens < 8 * 500
        in_time = await generate(fake, PROMPT, SamplingParams(max_tokens=200, n=2), timeout_s=WAIT_S)
        assert [len(output.token_ids) for output in in_time] == [200, 200]
        link.send(widen(0, 1 << 24) + widen(1, 1 << 24))
        assert await link.until_ended(1, WAIT_S) == RESOURCE_EXHAUSTED
        link.close()


async def test_short_deadlines_take_no_node_out(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC may end a call on a node a little before the loop's clock says that the sample's time is over."""
    faults: list[CorunError] = []
    monkeypatch.setattr(Registry, "note_fault", lambda _, member, error: faults.append(error))

    async def early(attempt: Attempt) -> None:
        await asyncio.sleep(attempt.task.deadline - asyncio.get_running_loop().time() - 0.02)
        raise NodeFaultError(attempt.placement.decode, DeadlineError("Deadline Exceeded"))

    monkeypatch.setattr(Attempt, "reserve", early)
    async with cluster(model) as fake:
        with pytest.raises(DeadlineError):
            await generate(fake, PROMPT, SamplingParams(max_tokens=2), timeout_s=0.6)
        await fake.idle()
    assert faults == []


async def test_nodes_are_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_NODES", 1)
    async with cluster(model, prefills=0, decodes=0) as fake:
        members = fake.router.registry
        members.register(info(model, "d1"))
        members.register(info(model, "d1"))
        with pytest.raises(OverloadedError, match="1 nodes are known here"):
            members.register(info(model, "d2"))
        assert [status.state for status in members.statuses()] == [NodeState.JOINING]
