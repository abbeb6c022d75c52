"""The life of a node process, around a role without an engine: serve, drain, stop, and what ends it early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.channel import channel
from corun.cluster import NodeLoad, NodeRole
from corun.config import PrefillConfig
from corun.errors import UnavailableError
from corun.node import agent as agent_module
from corun.node.main import Role, live, node_info, node_ref
from tests.node.scripted_router import DEADLINE_S, INFO, Router, serving, until

SERVICE = "corun.v1.PrefillService"


class Engine:
    def __init__(self, finding: str) -> None:
        self.facts = SimpleNamespace(finding=finding)
        self.on_death: Callable[[], None] = lambda: None
        self.stopped = False

    async def close(self) -> None:
        self.stopped = True


class Service:
    """Busy while `busy`; its load cannot be had after `failure`."""

    def __init__(self) -> None:
        self.draining = False
        self.busy = False
        self.failure: Exception | None = None

    async def load(self) -> NodeLoad:
        if self.failure:
            raise self.failure
        return NodeLoad(queued_prompt_tokens=int(self.busy))


class Life:
    """A node under way, with the router it registered with."""

    def __init__(self, router: Router, address: str, finding: str = "") -> None:
        self.router = router
        self.engine = Engine(finding)
        self.service = Service()
        self.stop = asyncio.Event()
        config = PrefillConfig(model="/models/tiny", router=(address,), drain_grace_s=DEADLINE_S)
        role = Role(
            engine=self.engine,
            service=self.service,
            service_name=SERVICE,
            register=lambda *_: None,
            info=lambda address: replace(INFO, address=address, finding=finding),
        )
        self.task = asyncio.create_task(live(config, role, self.stop))

    @property
    def address(self) -> str:
        return self.router.registered[0].address

    async def health(self, service: str = SERVICE) -> Any:
        async with channel(self.address) as connection:
            stub = health_pb2_grpc.HealthStub(connection)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def end(self) -> None:
        """Returns when the node has; raises what it raised."""
        await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)


@asynccontextmanager
async def living(monkeypatch: pytest.MonkeyPatch, finding: str = "") -> AsyncIterator[Life]:
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    router = Router()
    async with serving(router) as server:
        life = Life(router, server.address, finding)
        await until(lambda: life.task.done() or len(router.beats) > 0)
        yield life
        life.service.busy = False
        life.stop.set()
        await asyncio.wait((life.task,), timeout=DEADLINE_S)


@pytest.fixture
async def life(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    async with living(monkeypatch) as life:
        yield life


async def test_a_node_that_fails_its_self_test_says_so_and_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    async with living(monkeypatch, finding="the KV of layer 3 moved") as life:
        assert life.router.registered[0].finding == "the KV of layer 3 moved"
        assert [await life.health(), await life.health("")] == ["NOT_SERVING", "NOT_SERVING"]
        life.stop.set()
        await life.end()
        assert life.engine.stopped


async def test_a_node_registers_when_it_serves(life: Life) -> None:
    assert [await life.health(), await life.health("")] == ["SERVING", "SERVING"]
    assert not life.router.beats[-1].draining


async def test_a_node_drains_before_it_stops(life: Life) -> None:
    """Running work ends first; meanwhile routers see a draining node, and health says so."""
    life.service.busy = True
    life.stop.set()
    await until(lambda: life.router.beats[-1].draining)
    assert life.service.draining
    assert [await life.health(), await life.health("")] == ["NOT_SERVING", "NOT_SERVING"]
    assert not life.engine.stopped
    life.service.busy = False
    await life.end()
    assert life.engine.stopped
    with pytest.raises(grpc.aio.AioRpcError):
        await life.health()


async def test_a_dead_engine_ends_the_node(life: Life) -> None:
    """At once, whatever is running: a supervisor starts a new generation."""
    life.service.busy = True
    life.engine.on_death()
    with pytest.raises(UnavailableError, match="the engine died"):
        await life.end()
    assert life.engine.stopped


async def test_a_node_that_cannot_tell_its_load_ends(life: Life) -> None:
    """An idle engine's death is only seen by asking it. A node that stays up without membership is of no use."""
    life.service.failure = RuntimeError("the engine is dead")
    with pytest.raises(UnavailableError, match="the engine died"):
        await life.end()
    assert life.engine.stopped


def test_every_life_has_its_own_generation() -> None:
    config = PrefillConfig(model="/models/tiny", node_id="p0")
    refs = [node_ref(config, NodeRole.PREFILL) for _ in range(3)]
    assert {ref.node_id for ref in refs} == {"p0"}
    assert len({ref.generation for ref in refs}) == 3
    unnamed = node_ref(PrefillConfig(model="/models/tiny"), NodeRole.PREFILL)
    assert "prefill" in unnamed.node_id


def test_a_node_is_reached_where_it_listens_or_where_it_says() -> None:
    facts = SimpleNamespace(kv_blocks=1, block_size=16, max_model_len=64, vocab_size=8, finding="")
    engine = SimpleNamespace(facts=facts, contract=SimpleNamespace(canonical_json=lambda: "{}"))
    for advertise, reached in (("", "10.0.0.7:4000"), ("proxy:1", "proxy:1")):
        config = PrefillConfig(model="/models/tiny", advertise=advertise)
        info = node_info(config, node_ref(config, NodeRole.PREFILL), NodeRole.PREFILL, engine)
        assert info("10.0.0.7:4000").address == reached
