"""A node follows its routers' names: it joins the routers they lead to, and leaves those neither listed nor there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corun.cli import issue_certs
from corun.config.fields import TlsConfig
from corun.node import discovery as routers_module
from corun.node import membership as agent_module
from corun.node.discovery import RouterAddress, Routers, resolve
from corun.node.membership import NodeAgent
from corun.rpc.auth import Gate
from corun.rpc.channel import OPEN, Access
from corun.types import NodeLoad
from tests.node.scripted_router import INFO, Names, Router, kept_running, serving, until
from tests.secrets import Secrets


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    monkeypatch.setattr(routers_module, "LOOKUP_S", 0.005)


class Served:
    """The routers that `serve_each` serves now, and has served before. Links end when a test says so."""

    def __init__(self) -> None:
        self.now: list[RouterAddress] = []
        self.begun = 0
        self.ends: dict[str, asyncio.Future[None]] = {}

    async def serve(self, router: RouterAddress) -> None:
        self.begun += 1
        self.now.append(router)
        self.ends[router.address] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[router.address]
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


@contextlib.asynccontextmanager
async def running(names: Names, *entries: str, access: Access = OPEN) -> AsyncIterator[NodeAgent]:
    async def load() -> NodeLoad:
        return NodeLoad()

    async with kept_running(NodeAgent(INFO, entries, load, access, names)) as agent:
        yield agent


class TestNames:
    async def test_a_link_for_each_address_of_each_name(self) -> None:
        names = Names(a=["10.0.0.1:50051", "[fd00::1]:50051"], b=["10.0.0.9:7"])
        async with following(names, "a:50051", "b:7", "192.0.2.1:5", "[::1]:6") as (served, _):
            await until(lambda: len(served.now) == 5)
            assert set(names.asked) == {("a", 50051), ("b", 7)}  # An address is not looked up.
            assert {(router.address, router.name) for router in served.now} == {
                ("10.0.0.1:50051", "a"),
                ("[fd00::1]:50051", "a"),
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

    async def test_a_full_name_is_checked_without_its_last_dot(self) -> None:
        names = Names(**{"a.svc.": ["10.0.0.1:1"]})  # type: ignore[arg-type]
        async with following(names, "a.svc.:1") as (served, _):
            await until(lambda: len(served.now) == 1)
            assert served.now == [RouterAddress("10.0.0.1:1", "a.svc")]

    async def test_a_link_stands_until_it_ends_itself(self) -> None:
        """Only the link knows whether its router still answers."""
        names = Names(a=["10.0.0.1:1", "10.0.0.2:1"])
        async with following(names, "a:1") as (served, routers):
            await until(lambda: len(served.now) == 2)
            names.at["a"] = ["10.0.0.2:1"]
            await until(lambda: not routers.lists("10.0.0.1:1"))
            await names.look_again()
            assert served.addresses == ["10.0.0.1:1", "10.0.0.2:1"]
            served.ends["10.0.0.1:1"].set_result(None)
            await until(lambda: len(served.now) == 1)
            await names.look_again()
            assert served.addresses == ["10.0.0.2:1"]
            names.at["a"] = ["10.0.0.1:1", "10.0.0.2:1"]
            await until(lambda: len(served.now) == 2)

    async def test_a_link_that_ends_while_its_address_is_listed_is_made_again(self) -> None:
        names = Names(a=["10.0.0.1:1"])
        async with following(names, "a:1") as (served, _):
            for number in (1, 2, 3):
                await until(lambda number=number: served.begun == number)
                assert len(served.now) == 1
                served.ends["10.0.0.1:1"].set_result(None)

    @pytest.mark.parametrize("failure", [OSError("no such name"), UnicodeError("label too long"), []], ids=str)
    async def test_a_lookup_that_fails_changes_nothing_and_is_said_once(
        self, failure: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        names = Names(a=failure)
        with caplog.at_level(logging.INFO, logger=routers_module.__name__):
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
        monkeypatch.setattr(routers_module, "LOOKUP_TIMEOUT_S", 0.005)
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

    async def test_an_error_of_a_link_ends_all(self) -> None:
        served, routers = Served(), Routers(["10.0.0.1:1", "a:1"], Names(a=["10.0.0.2:1"]))
        task = asyncio.create_task(routers.serve_each(served.serve))
        await until(lambda: len(served.now) == 2)
        served.ends["10.0.0.2:1"].set_exception(RuntimeError("the engine died"))
        with pytest.raises(RuntimeError, match="the engine died"):
            await task
        assert served.now == []

    async def test_the_systems_resolver(self) -> None:
        found = await resolve("localhost", 50051)
        assert "127.0.0.1:50051" in found or "[::1]:50051" in found
        assert await resolve("::1", 7) == ["[::1]:7"]
        with pytest.raises(OSError, match=r"."):
            await resolve("no-such-host.invalid", 1)


class TestMembership:
    async def test_a_real_name(self) -> None:
        router = Router()
        async with serving(router) as server:
            agent = NodeAgent(INFO, [f"localhost:{server.port}"], _no_load)
            task = asyncio.create_task(agent.run())
            await until(lambda: len(router.beats) >= 3)
            task.cancel()
            await asyncio.wait((task,))
        assert router.registered == [INFO]

    async def test_routers_come_and_go(self, caplog: pytest.LogCaptureFixture) -> None:
        one, two = Router(), Router()
        names = Names(a=OSError("no such name"))
        caplog.set_level(logging.INFO, logger=agent_module.__name__)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(running(names, "a:1"))
            await names.look_again()
            async with serving(one) as first:
                names.at["a"] = [first.address]
                await until(lambda: len(one.beats) > 2)
                second = await stack.enter_async_context(serving(two))
                names.at["a"] = [first.address, second.address]
                await until(lambda: len(two.beats) > 2)
                seen = len(one.beats)
                await until(lambda: len(one.beats) > seen)
            names.at["a"] = [second.address]
            await until(lambda: "left router" in caplog.text)
            assert f"left router {first.address} (a)" in caplog.text
            again = Router()
            async with serving(again, first.port):  # No name says that this is a router of ours.
                await names.look_again()
                assert (again.registered, len(one.registered), len(two.registered)) == ([], 1, 1)
                names.at["a"] = [first.address, second.address]
                await until(lambda: len(again.beats) > 1)

    async def test_a_router_that_answers_is_never_left(self) -> None:
        """A router that drains is no longer listed, but its requests still need the node."""
        router, other = Router(), Router()
        async with serving(router) as server, serving(other) as elsewhere:
            names = Names(a=[server.address])
            async with running(names, "a:1") as agent:
                await until(lambda: len(router.beats) > 1)
                for answer in (OSError("try again"), [elsewhere.address], [], [server.address], [elsewhere.address]):
                    names.at["a"] = answer
                    await names.look_again()
                    seen = len(router.beats)
                    await until(lambda seen=seen: len(router.beats) > seen + 1)  # type: ignore[misc]
                agent.draining = True
                agent.tell()
                assert await agent.heard(5)
                assert router.beats[-1].draining
        assert len(router.registered) == 1

    async def test_one_failed_heartbeat_is_not_the_end_of_a_router_that_is_not_listed(self) -> None:
        import grpc

        router, other = Router(), Router()
        async with serving(router) as server, serving(other) as elsewhere:
            names = Names(a=[server.address])
            async with running(names, "a:1"):
                await until(lambda: len(router.beats) > 1)
                names.at["a"] = [elsewhere.address]
                await until(lambda: len(other.beats) > 1)
                router.refuse_beat = grpc.StatusCode.UNAVAILABLE
                await until(lambda: len(router.registered) > 1)
                router.refuse_beat = None
                seen = len(router.beats)
                await until(lambda: len(router.beats) > seen + 1)

    async def test_a_listed_router_that_does_not_answer_is_tried_for_ever(self) -> None:
        router = Router()
        async with serving(router) as server:
            names = Names(a=[server.address])
        async with running(names, "a:1"):
            await names.look_again()
            names.at["a"] = OSError("no answer")  # The router is not known to be gone: DNS may have failed.
            await names.look_again()
            await asyncio.sleep(0.05)
            async with serving(router, server.port):
                await until(lambda: len(router.beats) > 1)

    async def test_news_wait_for_the_routers_that_have_the_node(self) -> None:
        """It does not matter whether these are listed. Routers that are only looked for are not waited for."""
        router, gone = Router(), Router()
        async with serving(gone) as server:
            nobody = server.address
        async with serving(router) as server:
            names = Names(a=[server.address, nobody], b=OSError("no such name"))
            async with running(names, "a:1", "b:1") as agent:
                await until(lambda: len(router.beats) > 1)
                names.at["a"] = [nobody]
                await names.look_again()
                agent.stuck = "its engine is stuck"
                agent.tell()
                assert await agent.heard(5)
                assert router.beats[-1].stuck
                router.hang = True
                await router.hanging.wait()
                agent.tell()
                assert not await agent.heard(0.05)


async def _no_load() -> NodeLoad:
    return NodeLoad()


def replace_key(secrets: Secrets, text: str) -> str:
    """Replace the members' key; return the old one."""
    key = Path(secrets.path("member.key"))
    old = key.read_text()
    key.write_text(text)
    return old


class TestTls:
    """The certificate has to fit the configured name: an address that DNS gives has no certificate of its own."""

    @pytest.fixture
    def secrets(self, tmp_path: Path) -> Secrets:
        issue_certs.make(tmp_path, ["routers.corun"])
        return Secrets(tmp_path)

    @contextlib.asynccontextmanager
    async def joining(self, secrets: Secrets, name: str, tls_name: str = "") -> AsyncIterator[Router]:
        router, tls = Router(), secrets.tls_of("member")
        gate = Gate(cluster=secrets.token("cluster"))
        async with serving(router, tls=tls, mutual=True, gate=gate) as server:
            shown = TlsConfig(ca=tls.ca, cert=tls.cert, key=tls.key, name=tls_name)
            access = Access(tls=shown, token=secrets.token("cluster"))
            async with running(Names(**{name: [server.address]}), f"{name}:1", access=access):  # type: ignore[arg-type]
                yield router

    async def test_the_configured_name(self, secrets: Secrets) -> None:
        async with self.joining(secrets, "routers.corun") as router:
            await until(lambda: len(router.beats) > 1)

    async def test_another_name_is_refused(self, secrets: Secrets, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger=agent_module.__name__)
        async with self.joining(secrets, "impostor.corun") as router:
            await until(lambda: "(impostor.corun): " in caplog.text)
            await asyncio.sleep(0.1)
            assert router.registered == []

    async def test_tls_name_comes_first(self, secrets: Secrets) -> None:
        async with self.joining(secrets, "pods.corun", tls_name="routers.corun") as router:
            await until(lambda: len(router.beats) > 1)

    async def test_files_that_are_being_replaced_keep_no_router_out(
        self, secrets: Secrets, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, logger=agent_module.__name__)
        router, tls = Router(), secrets.tls_of("member")
        async with serving(router, tls=tls, gate=Gate(cluster=secrets.token("cluster"))) as server:
            names = Names(**{"routers.corun": OSError("not yet")})  # type: ignore[arg-type]
            async with running(names, "routers.corun:1", access=secrets.member):
                good = replace_key(secrets, "half a key")
                names.at["routers.corun"] = [server.address]
                await until(lambda: "tls_key" in caplog.text)
                replace_key(secrets, good)
                await until(lambda: len(router.beats) > 1)
