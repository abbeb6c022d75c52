"""A node's membership: it registers with every router and keeps sending heartbeats to it.

Owns: the retry and heartbeat loop of one node. Must not know: engines, slots, how routers are found. The start order
does not matter: a node tries a router until it is there, and a restarted router asks for a new registration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    from_rpc_error,
)
from corun.node.discovery import Resolve, RouterAddress, Routers, resolve
from corun.rpc import codec
from corun.rpc.channel import OPEN, Access, channel
from corun.types import NodeInfo, NodeLoad
from corun.v1 import registry_service_pb2 as pb
from corun.v1 import registry_service_pb2_grpc

RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0
HEARD_POLL_S = 0.01
log = logging.getLogger(__name__)


class NodeAgent:
    """Keeps one node registered with every router at `routers` (host:port) while `run` runs."""

    def __init__(
        self,
        info: NodeInfo,
        routers: Sequence[str],
        load: Callable[[], Awaitable[NodeLoad]],
        access: Access = OPEN,
        resolve: Resolve = resolve,
    ) -> None:
        self.draining = False
        self.stuck = ""
        """The reason why the node takes no work now. Code that changes this or `draining` must call `tell`."""
        self._access = access
        self._info = info
        self._routers = Routers(routers, resolve)
        self._load = load
        self._said: dict[str, str] = {}  # router address -> the last complaint about it, so that it is logged once
        self._last_load = NodeLoad()
        self._news = 0
        self._told = asyncio.Event()  # set by the next call of `tell`, which also replaces it
        self.on_quarantine: Callable[[str], None] = lambda reason: None
        """Called when a router says that this generation must not be used any more."""
        """Called when a router says how much room it would use here if there was room."""
        self._heard: dict[str, int] = {}  # router address -> the number of the last news that this router knows

    async def run(self) -> None:
        """Run until cancelled."""
        await self._routers.serve_each(self._serve)

    def tell(self) -> None:
        """Send a heartbeat to all routers at once, because there is news."""
        self._news += 1
        told, self._told = self._told, asyncio.Event()
        told.set()

    async def heard(self, timeout_s: float) -> bool:
        """Wait until every router that has this node knows the last news (`tell`); False if one did not in time.

        These are all routers that took the last registration or heartbeat, listed or not. A router that is still being
        looked for, or does not answer, does not have this node and needs no news.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while late := [router for router, news in self._heard.items() if news < self._news]:
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("not told within %g s: %s", timeout_s, ", ".join(late))
                return False
            await asyncio.sleep(HEARD_POLL_S)
        return True

    async def _serve(self, router: RouterAddress) -> None:
        """Keep the node registered with one router until the router neither answers nor is listed any more."""
        try:
            link = channel(router.address, access=self._access, name=router.name)
        except InvalidArgumentError as error:  # The certificates are being replaced; they are read again soon.
            self._complain(router, error)
            await asyncio.sleep(RETRY_S)
            return
        async with link:
            stub = registry_service_pb2_grpc.RegistryServiceStub(link)  # type: ignore[no-untyped-call]
            while True:
                if not await self._hold(stub, router):
                    break
                await asyncio.sleep(RETRY_S)
        self._said.pop(router.address, None)
        log.info("left router %s: its name leads elsewhere, and it does not answer", router)

    async def _hold(self, stub: registry_service_pb2_grpc.RegistryServiceStub, router: RouterAddress) -> bool:
        """Register and send heartbeats until a call fails or the router asks anew. Return whether to try again."""
        registered = False
        try:
            interval = await self._register(stub, router)
            registered = True
            await self._beat(stub, router, interval)
        except grpc.RpcError as failure:
            self._complain(router, from_rpc_error(failure))
        finally:
            self._heard.pop(router.address, None)
        # One failed heartbeat may be a network fault. A router is gone only if it also takes no new registration.
        return registered or self._routers.lists(router.address)

    async def _register(self, stub: registry_service_pb2_grpc.RegistryServiceStub, router: RouterAddress) -> float:
        """Register and return the heartbeat interval in seconds."""
        request = pb.RegisterRequest(node=codec.node_info_to_proto(self._info))
        answer = await stub.Register(request, timeout=CALL_TIMEOUT_S)
        if answer.quarantined:
            self._note_quarantine(router, answer.quarantined)
        else:
            log.info("registered with router %s at %s", answer.router_id, router)
            self._said.pop(router.address, None)
        self._heard[router.address] = -1
        return float(answer.heartbeat_interval_ms) / 1000

    async def _beat(
        self, stub: registry_service_pb2_grpc.RegistryServiceStub, router: RouterAddress, interval: float
    ) -> None:
        """Send heartbeats until the router asks for a new registration. Raises grpc.RpcError when it is gone."""
        ref = codec.node_ref_to_proto(self._info.ref)
        while True:
            load = codec.node_load_to_proto(await self._current_load())
            news, told = self._news, self._told
            request = pb.HeartbeatRequest(ref=ref, load=load, draining=self.draining, stuck=self.stuck)
            try:
                answer = await stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as failure:
                if isinstance(from_rpc_error(failure), NotFoundError):
                    return
                raise
            self._heard[router.address] = news
            self._note_quarantine(router, answer.quarantined)
            await _sleep(interval, told)

    async def _current_load(self) -> NodeLoad:
        """Return the engine's load; the last known load if the engine is stuck or if news must not wait for it."""
        if not self.stuck:
            asking, told = asyncio.ensure_future(self._load()), asyncio.ensure_future(self._told.wait())
            try:
                await asyncio.wait((asking, told), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._last_load = asking.result()
            finally:
                told.cancel()
                asking.cancel()
        return self._last_load

    def _note_quarantine(self, router: RouterAddress, reason: str) -> None:
        if reason:
            self._complain(router, DataLossError(reason))
            self.on_quarantine(f"router {router} says: {reason}")

    def _complain(self, router: RouterAddress, error: CorunError) -> None:
        text = str(error)
        if self._said.get(router.address) != text:
            lasting = isinstance(error, (ContractMismatchError, DataLossError, UnauthenticatedError))
            level = logging.ERROR if lasting else logging.INFO
            log.log(level, "router %s: %s", router, text)
        self._said[router.address] = text


async def _sleep(seconds: float, told: asyncio.Event) -> None:
    """Sleep for `seconds` seconds, or until there is news."""
    news = asyncio.ensure_future(told.wait())
    try:
        await asyncio.wait((news,), timeout=seconds)  # wait_for may lose a cancellation that comes with the news.
    finally:
        news.cancel()
