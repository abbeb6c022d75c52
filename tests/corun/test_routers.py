"""Which router a client uses while several of its calls look for one."""

from __future__ import annotations

import asyncio
from typing import Any

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


class Looking:
    """A client of two routers, and the probes that its calls have sent to each."""

    def __init__(self) -> None:
        self.routers = Routers([FIRST, SECOND], Access(), lambda channel: None)
        self.probes: dict[str, list[Probe]] = {FIRST: [], SECOND: []}
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
    looking = Looking()
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
    looking = Looking()
    one, other = looking.call(), looking.call()
    await until(lambda: len(looking.probes[FIRST]) == 2)
    looking.probes[FIRST][0].end(StatusCode.OK)
    assert (await one).address == FIRST
    looking.probes[FIRST][1].end(StatusCode.DEADLINE_EXCEEDED)
    assert (await other).address == FIRST
    await looking.routers.close()
