"""A node follows its routers' names, joins those they lead to, sends heartbeats, comes back, and never gives up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from corun.cli import issue_certs
from corun.config.fields import TlsConfig
from corun.errors import ContractMismatchError, CorunError, NotFoundError, UnavailableError
from corun.node import membership
from corun.node.membership import NodeAgent, RouterAddress, Routers, resolve
from corun.rpc import codec
from corun.rpc.auth import Gate
from corun.rpc.channel import OPEN, Access
from corun.types import FreedomStatus, NodeLoad
from corun.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.answers import until
from tests.node.scripted_router import DEADLINE_S, INFO, Names, Router, serving
from tests.secrets import Secrets


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(membership, "RETRY_S", 0.01)
    monkeypatch.setattr(membership, "LOOKUP_S", 0.005)
    caplog.set_level(logging.INFO, logger=membership.__name__)


class Served:
    """The routers that `serve_each` serves now."""

    def __init__(self) -> None:
        self.now: list[RouterAddress] = []

    async def serve(self, router: RouterAddress) -> None:
        self.now.append(router)
        try:
            await asyncio.Event().wait()
        finally:
            self.now.remove(router)

    @property
    def addresses(self) -> list[str]:
        return sorted(router.address for router in self.now)


@contextlib.asynccontextmanager
async def following(names: Any, *entries: str) -> AsyncIterator[tuple[Served, Routers]]:
    served, routers = Served(), Routers(entries, names)
    task = asyncio.create_task(routers.serve_each(served.serve))
    try:
        yield served, routers
        assert not task.done(), "it gave up"
    finally:
        task.cancel()
        await asyncio.wait((task,))
    assert served.now == []


class TestNames:
    async def test_a_link_for_each_address_of_each_name(self) -> None:
        names = Names(**{"a.svc.": ["10.0.0.1:50051", "[fd00::1]:50051"], "b": ["10.0.0.9:7"]})  # type: ignore[arg-type]
        async with following(names, "a.svc.:50051", "b:7", "192.0.2.1:5", "[::1]:6") as (served, _):
            await until(lambda: len(served.now) == 5)
            assert set(names.asked) == {("a.svc.", 50051), ("b", 7)}, "an address is not looked up"
            assert {(router.address, router.name) for router in served.now} == {
                ("10.0.0.1:50051", "a.svc"),  # A certificate's name has no last dot.
                ("[fd00::1]:50051", "a.svc"),
                ("10.0.0.9:7", "b"),
                ("192.0.2.1:5", ""),
                ("[::1]:6", ""),
            }

    async def test_one_link_for_an_address_with_two_names(self) -> None:
        names = Names(a=["10.0.0.1:1"], b=["10.0.0.1:1", "10.0.0.2:1"])
        async with following(names, "a:1", "b:1", "10.0.0.2:1") as (served, routers):
            await names.look_again()
            assert served.addresses == ["10.0.0.1:1", "10.0.0.2:1"]
            names.at["a"] = ["10.0.0.3:1"]
            await until(lambda: len(served.now) == 3)
            assert routers.lists("10.0.0.1:1")  # It is still listed by its other name.

    @pytest.mark.parametrize("failure", [OSError("no such name"), UnicodeError("label too long"), []], ids=str)
    async def test_a_lookup_that_fails_changes_nothing_and_is_said_once(
        self, failure: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        names = Names(a=failure)
        async with following(names, "a:1") as (served, routers):
            await names.look_again()
            names.at["a"] = ["10.0.0.1:1"]
            await until(lambda: len(served.now) == 1)
            names.at["a"] = failure
            await names.look_again()
            assert routers.lists("10.0.0.1:1")
            assert served.addresses == ["10.0.0.1:1"]
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
        assert "router a:1 is not found, and is looked for until it is: " in caplog.records[0].getMessage()
        assert caplog.records[1].getMessage() == "router a:1 is found again, at 10.0.0.1:1"

    async def test_a_lookup_that_hangs_is_not_repeated_and_holds_up_no_other(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Each lookup would hold a thread of the process."""
        monkeypatch.setattr(membership, "LOOKUP_TIMEOUT_S", 0.005)
        slow, quick = Names(a=["10.0.0.1:1"]), Names(b=["10.0.0.2:1"])
        slow.hang = True

        async def both(host: str, port: int) -> Any:
            return await (slow if host == "a" else quick)(host, port)

        async with following(both, "a:1", "b:1") as (served, _):
            await quick.look_again()
            await until(lambda: bool(caplog.records))
            assert served.addresses == ["10.0.0.2:1"]
            assert (slow.hanging, len(slow.asked)) == (1, 1)
            slow.hang = False  # The answer that it gives in the end counts.
            await until(lambda: len(served.now) == 2)
        assert caplog.records[0].getMessage().endswith("no answer within 0.005 s")

    async def test_the_systems_resolver(self) -> None:
        found = await resolve("localhost", 50051)
        assert "127.0.0.1:50051" in found or "[::1]:50051" in found
        assert await resolve("::1", 7) == ["[::1]:7"]
        with pytest.raises(OSError, match=r"."):
            await resolve("no-such-host.invalid", 1)


@contextlib.asynccontextmanager
async def running(
    *routers: str, names: Any = resolve, load: Callable[[], NodeLoad] = NodeLoad, access: Access = OPEN
) -> AsyncIterator[NodeAgent]:
    async def current() -> NodeLoad:
        return load()

    async with joined(NodeAgent(INFO, routers, current, access, names)) as agent:
        yield agent


@contextlib.asynccontextmanager
async def joined(agent: NodeAgent) -> AsyncIterator[NodeAgent]:
    task = asyncio.create_task(agent.run())
    try:
        yield agent
        assert not task.done(), "the agent gave up"
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def more_beats(router: Router) -> None:
    seen = len(router.beats)
    await until(lambda: len(router.beats) > seen + 1)


async def test_registers_once_and_heartbeats_with_the_load_of_the_moment() -> None:
    router, tokens = Router(), iter(range(10**9))

    def load() -> NodeLoad:
        return NodeLoad(queued_prompt_tokens=5, tokens=next(tokens), leases=3)

    async with serving(router) as server, running(f"localhost:{server.port}", load=load) as agent:
        await more_beats(router)
        agent.draining = True
        await until(lambda: router.beats[-1].draining)
    assert router.registered == [INFO]
    assert {codec.node_ref_from_proto(beat.ref) for beat in router.beats} == {INFO.ref}
    loads = [codec.node_load_from_proto(beat.load) for beat in router.beats]
    assert loads == [NodeLoad(queued_prompt_tokens=5, tokens=i, leases=3) for i in range(len(loads))]
    assert not router.beats[0].draining


@pytest.mark.parametrize(
    "failure",
    [
        NotFoundError("node p0 is not registered"),  # The answer of a restarted router, which never saw this node.
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
        await more_beats(router)
        router.refuse_beat = failure
        await until(lambda: len(router.registered) >= 2)
        router.refuse_beat = None
        await more_beats(router)
    assert set(router.registered) == {INFO}


async def test_an_answer_that_cannot_be_read_ends_no_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another program may answer at an address where a router was. The node serves its other routers."""
    made: Any = RegistryServiceStub
    unreadable = {"Register", "Heartbeat"}  # gRPC gives None for the first answer of each.

    async def answered(name: str, call: Any, *args: Any, **options: Any) -> Any:
        answer = await call(*args, **options)
        if name not in unreadable:
            return answer
        unreadable.remove(name)
        return None

    def stub(link: Any) -> Any:
        found = made(link)
        for name in unreadable:
            setattr(found, name, partial(answered, name, getattr(found, name)))
        return found

    monkeypatch.setattr(membership, "RegistryServiceStub", stub)
    router = Router()
    async with serving(router) as server, running(server.address):
        await more_beats(router)
    assert not unreadable
    assert f"router {server.address}: the answer cannot be read" in caplog.text


async def test_a_router_that_goes_away_and_comes_back() -> None:
    """Even in the middle of a call: the node registers with the new one."""
    first, second = Router(), Router()
    first.hang = True
    async with contextlib.AsyncExitStack() as stack:
        async with serving(first) as server:
            await stack.enter_async_context(running(server.address))
            await asyncio.wait_for(first.hanging.wait(), DEADLINE_S)
        async with serving(second, server.port):
            await more_beats(second)
            assert second.registered == [INFO]


async def test_a_refusal_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Another contract: an operator has to see it, and the node keeps asking, since the cluster may change."""
    router, calls = Router(), iter(range(10**9))
    differences = {"model.dtype": ("bfloat16", "float32")}

    async def register(request: Any, context: Any) -> Any:
        if next(calls) < 5:
            raise ContractMismatchError("another contract", differences)
        return await Router.Register(router, request, context)

    router.Register = register  # type: ignore[method-assign]
    async with serving(router) as server, running(server.address):
        await more_beats(router)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"router {server.address}: another contract: model.dtype: bfloat16 != float32"]
    assert "registered with router r0" in caplog.text


async def test_a_router_that_asks_for_heartbeats_without_a_pause_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    """They would follow each other as fast as the two processes can."""
    router = Router()
    router.interval_ms = 0
    async with serving(router) as server, running(server.address):
        await until(lambda: len(router.registered) >= 3)
        assert router.beats == []
        router.interval_ms = 5
        await more_beats(router)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"router {server.address}: heartbeat_interval_ms = 0: must be at least 1",
        f"registered with router r0 at {server.address}",
    ]


async def test_news_travel_at_once_to_the_routers_that_have_the_node() -> None:
    """Not with the next heartbeat: that may be a minute away. It does not matter whether these routers are listed, and
    those that are only looked for, or do not answer, are waited for only so long."""
    router, other, gone = Router(), Router(), Router()
    router.interval_ms = other.interval_ms = 60_000
    async with serving(gone) as server:
        nobody = server.address
    async with serving(router) as first, serving(other) as second:
        names = Names(a=[first.address, second.address, nobody], b=OSError("no such name"))
        async with running("a:1", "b:1", names=names) as agent:
            await until(lambda: bool(router.beats and other.beats))
            names.at["a"] = [nobody]
            await names.look_again()
            agent.stuck = "its engine is stuck"
            agent.tell()
            assert await agent.heard(DEADLINE_S)
            for one in (router, other):
                assert [beat.stuck for beat in one.beats] == ["", "its engine is stuck"]
            router.hang = True
            agent.tell()
            assert not await agent.heard(0.1)
            await until(lambda: agent._heard[second.address] == agent._news)


async def test_news_do_not_wait_for_the_load_of_an_engine_that_is_busy() -> None:
    """They come with the last load that is known, also if the engine is asked only after them."""
    router, asked, is_busy = Router(), 0, False
    router.interval_ms = 60_000

    async def load() -> NodeLoad:
        nonlocal asked
        asked += 1
        while is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return NodeLoad(tokens=asked)

    async with serving(router) as server, joined(NodeAgent(INFO, [server.address], load)) as agent:
        await until(lambda: len(router.beats) == 1)
        is_busy = agent.draining = True
        for _ in range(2):
            agent.tell()
            assert await agent.heard(1.0)
    assert [(beat.draining, beat.load.tokens) for beat in router.beats] == [(False, 1), (True, 1), (True, 1)]


async def test_what_changed_of_the_node_is_told_by_another_registration() -> None:
    """It comes with the news, and heartbeats go on."""
    router = Router()
    router.interval_ms = 60_000
    changed = replace(INFO, freedoms=(FreedomStatus(name="packed", refused="other KV"),), certificate="c" * 64)
    async with serving(router) as server, running(server.address) as agent:
        await until(lambda: len(router.beats) == 1)
        agent.describe(changed)
        await until(lambda: (len(router.registered), len(router.beats)) == (2, 2))  # A beat follows a registration.
        agent.tell()
        await until(lambda: len(router.beats) == 3)
        assert (router.registered, agent.info) == ([INFO, changed], changed)


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
        await more_beats(router)  # Other routers may have yet to be told.


async def test_routers_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    one, two, again = Router(), Router(), Router()
    names = Names(a=OSError("no such name"))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running("a:1", names=names))
        await names.look_again()
        async with serving(one) as first:
            names.at["a"] = [first.address]
            await more_beats(one)
            second = await stack.enter_async_context(serving(two))
            names.at["a"] = [first.address, second.address]
            await more_beats(two)
            await more_beats(one)
        names.at["a"] = [second.address]
        await until(lambda: f"left router {first.address} (a)" in caplog.text)
        async with serving(again, first.port):  # No name says that this is a router of ours.
            await names.look_again()
            assert (again.registered, len(one.registered), len(two.registered)) == ([], 1, 1)
            names.at["a"] = [first.address, second.address]
            await more_beats(again)


async def test_a_router_that_answers_is_never_left() -> None:
    """A router that drains is no longer listed, but its requests still need the node. One failed heartbeat is not its
    end."""
    router, other = Router(), Router()
    async with serving(router) as server, serving(other) as elsewhere:
        names = Names(a=[server.address])
        async with running("a:1", names=names):
            await more_beats(router)
            for answer in (OSError("try again"), [elsewhere.address], [], [server.address], [elsewhere.address]):
                names.at["a"] = answer
                await names.look_again()
                await more_beats(router)
            assert len(router.registered) == 1
            router.refuse_beat = grpc.StatusCode.UNAVAILABLE
            await until(lambda: len(router.registered) > 1)
            router.refuse_beat = None
            await more_beats(router)


def replace_text(file: Path, text: str) -> str:
    """Return what was in it."""
    old = file.read_text()
    file.write_text(text)
    return old


class TestTls:
    """The certificate has to fit the configured name: an address that DNS gives has no certificate of its own."""

    @pytest.fixture
    def secrets(self, tmp_path: Path) -> Secrets:
        issue_certs.make(tmp_path, ["routers.corun"])
        return Secrets(tmp_path)

    @pytest.mark.parametrize(
        ("name", "tls_name", "joins"),
        [("routers.corun", "", True), ("pods.corun", "routers.corun", True), ("impostor.corun", "", False)],
    )
    async def test_the_configured_name_or_tls_name_is_looked_for_in_it(
        self, secrets: Secrets, name: str, tls_name: str, joins: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        router, tls = Router(), secrets.tls_of("member")
        access = Access(
            tls=TlsConfig(ca=tls.ca, cert=tls.cert, key=tls.key, name=tls_name), token=secrets.token("cluster")
        )
        async with serving(router, tls=tls, mutual=True, gate=Gate(cluster=secrets.token("cluster"))) as server:
            names = Names(**{name: [server.address]})  # type: ignore[arg-type]
            async with running(f"{name}:1", names=names, access=access):
                await until(lambda: len(router.beats) > 1 if joins else f"({name}): " in caplog.text)
                await asyncio.sleep(0 if joins else 0.1)
                assert bool(router.registered) == joins

    async def test_files_that_are_being_replaced_keep_no_router_out(
        self, secrets: Secrets, caplog: pytest.LogCaptureFixture
    ) -> None:
        router, tls = Router(), secrets.tls_of("member")
        key = Path(secrets.path("member.key"))
        async with serving(router, tls=tls, gate=Gate(cluster=secrets.token("cluster"))) as server:
            names = Names(**{"routers.corun": OSError("not yet")})  # type: ignore[arg-type]
            async with running("routers.corun:1", names=names, access=secrets.member):
                good = replace_text(key, "half a key")
                names.at["routers.corun"] = [server.address]
                await until(lambda: "tls_key" in caplog.text)
                replace_text(key, good)
                await more_beats(router)
