"""Membership against scripted routers: registers, heartbeats, comes back, and never gives up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from corun.errors import ContractMismatchError, CorunError, NotFoundError, UnavailableError
from corun.node import membership as agent_module
from corun.node.membership import NodeAgent
from corun.rpc import codec
from corun.types import NodeLoad
from tests.node.scripted_router import DEADLINE_S, INFO, Router, kept_running, serving, until


@contextlib.asynccontextmanager
async def running(*routers: str, load: Callable[[], NodeLoad] = NodeLoad) -> AsyncIterator[NodeAgent]:
    async def current() -> NodeLoad:
        return load()

    async with kept_running(NodeAgent(INFO, routers, current)) as agent:
        yield agent


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)


async def test_registers_once_and_heartbeats() -> None:
    router, load = Router(), NodeLoad(queued_prompt_tokens=5, tokens=2**40, slots_in_use=(1, 3))
    async with serving(router) as server, running(server.address, load=lambda: load):
        await until(lambda: len(router.beats) >= 3)
    assert router.registered == [INFO]
    for beat in router.beats:
        assert codec.node_ref_from_proto(beat.ref) == INFO.ref
        assert codec.node_load_from_proto(beat.load) == load
        assert not beat.draining


async def test_heartbeats_carry_the_load_of_the_moment_and_draining() -> None:
    router, tokens = Router(), iter(range(10**9))
    async with serving(router) as server, running(server.address, load=lambda: NodeLoad(tokens=next(tokens))) as agent:
        await until(lambda: len(router.beats) >= 2)
        agent.draining = True
        await until(lambda: router.beats[-1].draining)
    assert [beat.load.tokens for beat in router.beats] == list(range(len(router.beats)))


async def test_registers_again_when_it_is_not_known() -> None:
    """A restarted router answers NOT_FOUND: it has never seen this node."""
    router = Router()
    async with serving(router) as server, running(server.address):
        await until(lambda: len(router.beats) >= 1)
        router.refuse_beat = NotFoundError("node p0 is not registered")
        await until(lambda: len(router.registered) == 2)
        router.refuse_beat = None
        seen = len(router.beats)
        await until(lambda: len(router.beats) > seen + 1)
        assert len(router.registered) == len(set(map(id, router.registered)))
    assert set(router.registered) == {INFO}


@pytest.mark.parametrize(
    "failure",
    [
        UnavailableError("not now"),
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
    ],
    ids=str,
)
async def test_a_failed_heartbeat_leads_to_a_new_registration(failure: CorunError | grpc.StatusCode) -> None:
    """grpc.aio reports CANCELLED of the other side as a CancelledError: it must not end the agent."""
    router = Router()
    async with serving(router) as server, running(server.address):
        await until(lambda: len(router.beats) >= 1)
        router.refuse_beat = failure
        await until(lambda: len(router.registered) >= 2)
        router.refuse_beat = None
        seen = len(router.beats)
        await until(lambda: len(router.beats) > seen + 1)


async def test_a_router_that_is_not_there_yet() -> None:
    async with serving(Router()) as server:
        address, port = server.address, server.port
    router = Router()
    async with running(address):
        await asyncio.sleep(0.1)
        async with serving(router, port):
            await until(lambda: len(router.beats) >= 1)
    assert router.registered == [INFO]


async def test_a_router_that_goes_away_and_comes_back() -> None:
    """Even in the middle of a call: the node registers with the new one."""
    first, second = Router(), Router()
    first.hang = True
    async with contextlib.AsyncExitStack() as stack:
        async with serving(first) as server:
            await stack.enter_async_context(running(server.address))
            await asyncio.wait_for(first.hanging.wait(), DEADLINE_S)
        async with serving(second, server.port):
            await until(lambda: len(second.beats) >= 1)
            assert second.registered == [INFO]


async def test_a_router_that_is_away_does_not_hold_up_another() -> None:
    async with serving(Router()) as server:
        gone = server.address
    router = Router()
    async with serving(router) as server, running(gone, server.address):
        await until(lambda: len(router.beats) >= 5)
    assert router.registered == [INFO]


async def test_a_refusal_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Another contract: an operator has to see it, and the node keeps asking, since the cluster may change."""
    router = Router()
    router.refuse_register = ContractMismatchError("another contract", {"model.dtype": ("bfloat16", "float32")})
    calls = 0

    async def count(request: Any, context: Any) -> Any:
        nonlocal calls
        calls += 1
        return await Router.Register(router, request, context)

    router.Register = count  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, logger=agent_module.__name__):
        async with serving(router) as server, running(server.address):
            await until(lambda: calls >= 5)
            router.refuse_register = None
            await until(lambda: len(router.beats) >= 1)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        f"router {server.address}: another contract: model.dtype: bfloat16 != float32"
    ]
    assert any("registered with router r0" in record.getMessage() for record in caplog.records)


async def test_news_travel_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the next heartbeat: that may be a second away."""
    router = Router()
    router.interval_ms = 60_000
    async with serving(router) as server, running(server.address) as agent:
        await until(lambda: len(router.beats) == 1)
        agent.stuck = "its engine is stuck"
        agent.tell()
        assert await agent.heard(DEADLINE_S)
        assert [beat.stuck for beat in router.beats] == ["", "its engine is stuck"]


async def test_a_router_that_does_not_answer_is_waited_for_only_so_long() -> None:
    router, other = Router(), Router()
    async with serving(router) as first, serving(other) as second, running(first.address, second.address) as agent:
        await until(lambda: bool(router.beats and other.beats))
        router.hang = True
        await router.hanging.wait()
        agent.tell()
        assert not await agent.heard(0.1)
        await until(lambda: agent._heard[second.address] == agent._news)


@pytest.mark.parametrize("call", ["Register", "Heartbeat"])
async def test_a_quarantine_is_heard_from_either_call(call: str) -> None:
    router = Router()
    router.quarantined = "gave other bits" if call == "Heartbeat" else ""
    router.quarantined_at_once = "gave other bits" if call == "Register" else ""
    heard: list[str] = []
    async with serving(router) as server, running(server.address) as agent:
        agent.on_quarantine = heard.append
        await until(lambda: bool(heard))
        assert heard[0] == f"router {server.address} says: gave other bits"
        seen = len(router.beats)
        await until(lambda: len(router.beats) > seen)  # Other routers may have yet to be told.
