"""Which router a client uses while several of its calls look for one."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc import StatusCode

from corun.client.routers import RouterLink, Routers
from corun.rpc.channel import Access
from tests.answers import until

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
WAIT_S = 30.0


class Probe:
    """A probe of a router, which ends when a test says how."""

    def __init__(self) -> None:
        self._ending: asyncio.Future[StatusCode] = asyncio.get_running_loop().create_future()

    async def code(self) -> StatusCode:
        return await self._ending

    def cancel(self) -> None:
        """The test has ended it already."""

    def end(self, code: StatusCode) -> None:
        self._ending.set_result(code)


class UnavailableCallError(grpc.RpcError):
    """The error of a call that failed with UNAVAILABLE."""

    def __init__(self, *, is_answered: bool) -> None:
        self._is_answered = is_answered

    def code(self) -> StatusCode:
        return StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "nodes failed 3 runs"

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [("grpc-status-details-bin", b"")] if self._is_answered else []


class Looking:
    """A client of routers, and the probes that its calls have sent to each."""

    def __init__(self, *addresses: str) -> None:
        self.routers = Routers(addresses, Access(), lambda channel: None)
        self.probes: dict[str, list[Probe]] = {address: [] for address in addresses}
        for link in self.routers._all:
            link.probe = self._sending(link.address)

    def _sending(self, address: str) -> Any:
        def send(request: bytes, timeout: float) -> Probe:
            self.probes[address].append(Probe())
            return self.probes[address][-1]

        return send

    def call(self) -> asyncio.Task[RouterLink]:
        return asyncio.ensure_future(asyncio.wait_for(self.routers.reach(WAIT_S), WAIT_S))


async def test_a_router_is_used_because_it_answered_and_not_because_another_one_did() -> None:
    """One call finds the first router gone while another call's probe of it is under way, and is answered."""
    looking = Looking(FIRST, SECOND)
    one, other = looking.call(), looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 2)
    looking.probes[FIRST][0].end(StatusCode.UNAVAILABLE)
    await until(lambda: len(looking.probes[SECOND]) == 1)
    looking.probes[FIRST][1].end(StatusCode.OK)
    assert (await other).address == FIRST
    looking.probes[SECOND][0].end(StatusCode.UNAVAILABLE)
    assert (await one).address == FIRST, "the answer that the other call got counts for this one, too"
    await looking.routers.close()


async def test_a_probe_that_fails_late_leaves_no_router_that_another_call_has_reached() -> None:
    looking = Looking(FIRST, SECOND)
    one, other = looking.call(), looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 2)
    looking.probes[FIRST][0].end(StatusCode.OK)
    assert (await one).address == FIRST
    looking.probes[FIRST][1].end(StatusCode.DEADLINE_EXCEEDED)
    assert (await other).address == FIRST
    await looking.routers.close()


async def test_the_only_router_is_not_looked_for_after_its_own_answer() -> None:
    """A probe waits behind the calls that have no room on the connection yet. With thousands of them it waits for
    minutes, and the router would count as gone."""
    looking = Looking(FIRST)
    first = looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 1)
    looking.probes[FIRST][0].end(StatusCode.OK)
    looking.routers.failed(await first, UnavailableCallError(is_answered=True))
    assert (await looking.call()).address == FIRST
    looking.routers.failed(await looking.call(), UnavailableCallError(is_answered=False))
    again = looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 2)
    looking.probes[FIRST][1].end(StatusCode.OK)
    assert (await again).address == FIRST
    await looking.routers.close()


async def test_another_router_is_asked_after_the_answer_of_one_that_cannot_help() -> None:
    looking = Looking(FIRST, SECOND)
    first = looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 1)
    looking.probes[FIRST][0].end(StatusCode.OK)
    looking.routers.failed(await first, UnavailableCallError(is_answered=True))
    other = looking.call()
    await until(lambda: len(looking.probes[SECOND]) == 1)
    looking.probes[SECOND][0].end(StatusCode.OK)
    assert (await other).address == SECOND
    await looking.routers.close()
