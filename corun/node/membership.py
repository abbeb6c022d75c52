"""A node's membership: it finds its routers, registers with every one, and keeps sending heartbeats to it.

Owns: repeated lookups of the routers' names, one link for each address that they have now, the retry and heartbeat
loop of each link, and what the node says of itself. Must not know: engines, slots. The start order does not matter: a
node tries a router until it is there, and a restarted router asks for a new registration. A name tells where routers
may be, but never that a router is gone: only the link can find out whether its router answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnauthenticatedError,
    from_rpc_error,
)
from corun.rpc import codec
from corun.rpc.channel import OPEN, Access, channel
from corun.types import NodeInfo, NodeLoad
from corun.v1 import registry_service_pb2 as pb
from corun.v1.registry_service_pb2_grpc import RegistryServiceStub

RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0
HEARD_POLL_S = 0.01
LOOKUP_S = 3.0
"""The time between two lookups of a name: about as long as a cluster's DNS keeps an answer."""
LOOKUP_TIMEOUT_S = 5.0
"""The time after which a lookup counts as failed; an answer that comes later is used all the same."""
log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from a host and a port to addresses, each ip:port or [ip]:port. It raises OSError if there are none."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the IPv4 and IPv6 addresses of `host`, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in found})


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """One router to join."""

    address: str
    """ip:port or [ip]:port."""
    name: str = ""
    """The host name that led to this address and that the router's certificate must match; empty for an IP address."""

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


class Routers:
    """The current addresses of `entries`, each host:port; `serve_each` keeps them up to date while it runs."""

    def __init__(self, entries: Sequence[str], resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._found = {entry: _given(entry) for entry in entries}
        """The addresses of each entry's last good lookup. If several lead to one address, the first gives the name."""
        self._failing: set[str] = set()
        self._changed = asyncio.Event()

    def lists(self, address: str) -> bool:
        """Return whether an entry leads to `address` by its last answer. A failed lookup is no answer."""
        return any(router.address == address for router in itertools.chain(*self._found.values()))

    async def serve_each(self, serve: Callable[[RouterAddress], Coroutine[Any, Any, None]]) -> None:
        """Run `serve` once for each address, and again if it ends while its address is listed. Raises its error."""
        lookups = {asyncio.ensure_future(self._follow(entry)) for entry, found in self._found.items() if not found}
        links: dict[str, asyncio.Task[None]] = {}
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            while True:
                for router in itertools.chain(*self._found.values()):
                    if router.address not in links:
                        links[router.address] = asyncio.ensure_future(serve(router))
                await asyncio.wait({changed, *lookups, *links.values()}, return_when=asyncio.FIRST_COMPLETED)
                for ended in (*lookups, *links.values()):
                    if ended.done() and not ended.cancelled():
                        ended.result()
                links = {address: link for address, link in links.items() if not link.done()}
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.ensure_future(self._changed.wait())
        finally:
            started = (changed, *lookups, *links.values())
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _follow(self, entry: str) -> None:
        """Look a name up for ever, one lookup at a time, so that a resolver that hangs holds only one thread."""
        host, port = _split(entry)
        while True:
            lookup = asyncio.ensure_future(self._resolve(host, port))
            try:
                while not (await asyncio.wait((lookup,), timeout=LOOKUP_TIMEOUT_S))[0]:
                    self._complain(entry, f"no answer within {LOOKUP_TIMEOUT_S:g} s")
                if found := tuple(RouterAddress(address, host.rstrip(".")) for address in lookup.result()):
                    self._note(entry, found)
                else:
                    self._complain(entry, "it has no address")
            except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a host name.
                self._complain(entry, str(error))
            finally:
                lookup.cancel()
            await asyncio.sleep(LOOKUP_S)

    def _note(self, entry: str, found: tuple[RouterAddress, ...]) -> None:
        if entry in self._failing:
            self._failing.discard(entry)
            log.info("router %s is found again, at %s", entry, ", ".join(router.address for router in found))
        if found != self._found[entry]:
            self._found[entry] = found
            self._changed.set()

    def _complain(self, entry: str, why: str) -> None:
        """Log once that a name is not found, until it is found again. Routers that it led to before stay listed."""
        if entry not in self._failing:
            self._failing.add(entry)
            log.warning("router %s is not found, and is looked for until it is: %s", entry, why)


def _split(entry: str) -> tuple[str, int]:
    host, _, port = entry.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _given(entry: str) -> tuple[RouterAddress, ...]:
    """Return the entry's address if the entry is an IP address, which needs no lookup; else nothing."""
    try:
        ipaddress.ip_address(_split(entry)[0])
    except ValueError:
        return ()
    return (RouterAddress(entry),)


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
        self.info = info
        """What the node says of itself. Code changes it with `describe`."""
        self._access = access
        self._routers = Routers(routers, resolve)
        self._load = load
        self._said: dict[str, str] = {}  # router address -> the last complaint about it, so that it is logged once
        self._last_load = NodeLoad()
        self._news = 0
        self._told = asyncio.Event()  # set by the next call of `tell`, which also replaces it
        self.on_quarantine: Callable[[str], None] = lambda reason: None
        """Called when a router says that this generation must not be used any more."""
        self._heard: dict[str, int] = {}  # router address -> the number of the last news that this router knows

    async def run(self) -> None:
        """Run until cancelled."""
        await self._routers.serve_each(self._serve)

    def tell(self) -> None:
        """Send a heartbeat to all routers at once, because there is news."""
        self._news += 1
        told, self._told = self._told, asyncio.Event()
        told.set()

    def describe(self, info: NodeInfo) -> None:
        """Register anew with all routers, because the node has lost a freedom. All else must be as it was."""
        self.info = info
        self.tell()

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
            stub = RegistryServiceStub(link)  # type: ignore[no-untyped-call]
            while True:
                if not await self._hold(stub, router):
                    break
                await asyncio.sleep(RETRY_S)
        self._said.pop(router.address, None)
        log.info("left router %s: its name leads elsewhere, and it does not answer", router)

    async def _hold(self, stub: RegistryServiceStub, router: RouterAddress) -> bool:
        """Register and send heartbeats until a call fails or the router asks anew. Return whether to try again."""
        registered, info = False, self.info
        try:
            answer = await self._register(stub, router, info)
            self._heard[router.address] = -1
            registered = True
            await self._beat(stub, router, info, answer.heartbeat_interval_ms / 1000)
        except grpc.RpcError as failure:
            self._complain(router, from_rpc_error(failure))
        except (InternalError, InvalidArgumentError) as error:  # Something else may answer where the router was.
            self._complain(router, error)
        finally:
            self._heard.pop(router.address, None)
        # One failed heartbeat may be a network fault. A router is gone only if it also takes no new registration.
        return registered or self._routers.lists(router.address)

    async def _register(self, stub: RegistryServiceStub, router: RouterAddress, info: NodeInfo) -> Any:
        """Register with one router and return its answer. Raises InvalidArgumentError if heartbeats had no pause."""
        request = pb.RegisterRequest(node=codec.node_info_to_proto(info))
        answer = codec.readable(await stub.Register(request, timeout=CALL_TIMEOUT_S))
        if not answer.heartbeat_interval_ms:
            raise InvalidArgumentError("heartbeat_interval_ms", answer.heartbeat_interval_ms, "must be at least 1")
        if not answer.quarantined:
            log.info("registered with router %s at %s", answer.router_id, router)
            self._said.pop(router.address, None)
        self._note_quarantine(router, answer.quarantined)
        return answer

    async def _beat(self, stub: RegistryServiceStub, router: RouterAddress, info: NodeInfo, interval_s: float) -> None:
        """Send heartbeats until the router asks for a new registration. Raises grpc.RpcError when it is gone.

        info: what the router knows of the node. If that changes, the router learns it after the news of the heartbeat.
        """
        ref = codec.node_ref_to_proto(info.ref)
        told = asyncio.ensure_future(self._told.wait())
        try:
            while True:
                load = codec.node_load_to_proto(await self._current_load(told))
                told.cancel()
                news, told = self._news, asyncio.ensure_future(self._told.wait())
                request = pb.HeartbeatRequest(ref=ref, load=load, draining=self.draining, stuck=self.stuck)
                answer = codec.readable(await stub.Heartbeat(request, timeout=CALL_TIMEOUT_S))
                self._heard[router.address] = news
                self._note_quarantine(router, answer.quarantined)
                if info is not self.info:
                    info = self.info
                    await self._register(stub, router, info)
                await asyncio.wait((told,), timeout=interval_s)  # wait_for may lose a cancellation that comes with it.
        except grpc.RpcError as failure:
            if not isinstance(from_rpc_error(failure), NotFoundError):
                raise
        finally:
            told.cancel()

    async def _current_load(self, told: asyncio.Future[Any]) -> NodeLoad:
        """Return the engine's load; the last known load if the engine is stuck, or takes longer than until there is
        news (`told`), which must not wait for it."""
        if not self.stuck:
            asking = asyncio.ensure_future(self._load())
            try:
                await asyncio.wait((asking, told), return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    self._last_load = asking.result()
            finally:
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
