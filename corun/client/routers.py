"""Which routers a client uses, which of them answers, and how long the client waits for one; the options of a caller.

This module must not know what is asked of a router.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

import grpc

from corun.config.fields import TlsConfig, check_address, checked
from corun.errors import (
    CancelledByPeerError,
    CorunError,
    DeadlineError,
    InvalidArgumentError,
    UnavailableError,
    from_rpc_error,
    is_answered,
)
from corun.rpc.channel import Access, Channel, channel

Tracked = TypeVar("Tracked", bound=Any)

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_S = 600.0
"""The deadline of one prompt in seconds, from the call to its last token."""
DEFAULT_CONNECT_TIMEOUT_S = 20.0
"""The number of seconds that a router has to become reachable. They are part of a call's deadline."""
MAX_TIMEOUT_S = 1e9
"""The longest deadline in seconds, 31 years. gRPC counts nanoseconds in 64 bits, and takes what overflows for past."""
NOTICE_S = 1.0
"""The number of seconds that a client waits for a router before it logs a warning."""
MIN_RETRY_S = 0.05
MAX_RETRY_S = 2.0
_PROBE = "/grpc.health.v1.Health/Check"
_PROBE_S = 2.0
"""The number of seconds that one of several routers has to answer before the next one is asked."""
_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)

log = logging.getLogger(__name__)
"""The client's logger. If the caller installs no handler, Python prints its warnings to standard error."""


class NoRouterError(UnavailableError):
    """No router has answered in time: the address may be wrong, or nothing may run there."""


class Deadline:
    """A moment by which a call must have ended."""

    def __init__(self, timeout_s: float) -> None:
        check_timeout("timeout_s", timeout_s)
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Backoff:
    """Delays between tries. They grow, and they are random, so that a router's clients do not all return at once."""

    def __init__(self) -> None:
        self._longest_s = MIN_RETRY_S

    def next_s(self) -> float:
        longest_s, self._longest_s = self._longest_s, min(2 * self._longest_s, MAX_RETRY_S)
        return random.uniform(longest_s / 2, longest_s)


class RouterLink:
    """One router: its address, the channel to it, and the stub of its service on that channel."""

    def __init__(self, address: str, channel: Channel, stub: Any) -> None:
        self.address = address
        self.channel = channel
        self.stub = stub
        self.probe = channel.unary_unary(_PROBE, bytes, bytes)


class Routers:
    """A client's routers, which of them is in use, and what waits for one of them.

    stub: makes the stub of the routers' service on a channel.
    """

    def __init__(self, addresses: Sequence[str], access: Access, stub: Callable[[Channel], Any]) -> None:
        channels = [channel(each, access=access) for each in addresses]
        self._all = [RouterLink(each, link, stub(link)) for each, link in zip(addresses, channels, strict=True)]
        self._next = 0  # The index of the one to ask next.
        self._reached: RouterLink | None = None
        """The router that has answered, and that no call has found gone since."""
        self._in_progress: WeakSet[Any] = WeakSet()
        # gRPC does not distinguish a refused TLS handshake from a silent peer.
        over_tls = "over TLS: the certificates may not be those that the other side trusts"
        self._doubt = over_tls if access.tls else "without TLS: a router that has it needs tls_ca"
        self.is_closed = False

    async def close(self) -> None:
        """Close the connections and end everything that is tracked."""
        self.is_closed = True
        for each in list(self._in_progress):  # gRPC only ends the calls that a task awaits directly.
            each.cancel()
        for router in self._all:
            await router.channel.close()

    def track(self, call: Tracked) -> Tracked:
        """Let `close` end a call or a future, which its caller keeps as long as it is in progress.

        A call of grpc.aio that has a done callback refers to itself. It would keep its connection after `close`, until
        Python's garbage collector runs.
        """
        self._in_progress.add(call)
        return call

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the end of a tracked call by `close` into an error: gRPC cancels whoever waits for the call."""
        try:
            yield
        except asyncio.CancelledError:
            # Python 3.10 does not say whether the task itself was cancelled.
            if not self.is_closed or getattr(asyncio.current_task(), "cancelling", int)():
                raise
            raise closed() from None

    async def pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the client is closed."""
        sleep = self.track(asyncio.ensure_future(asyncio.sleep(seconds)))
        try:
            await asyncio.wait((sleep,))  # To await `sleep` itself would cancel the caller's task with it.
        finally:
            sleep.cancel()

    async def reach(self, wait_s: float) -> RouterLink:
        """Return the first router that answers anything, and that same one until a call finds it gone.

        Raises NoRouterError if no router answers in `wait_s` seconds.
        """
        end, backoff, is_silent = time.monotonic() + wait_s, Backoff(), wait_s > 2 * NOTICE_S
        while self._reached is None and not self.is_closed:
            router, probe_s = self._all[self._next], max(0.0, end - time.monotonic())
            if is_silent or len(self._all) > 1:
                probe_s = min(probe_s, NOTICE_S if is_silent else _PROBE_S)
            answer = self.track(router.probe(b"", timeout=probe_s))
            try:
                has_answered = await answer.code() not in _NO_ANSWER
            finally:
                answer.cancel()
            self._reached = self._reached or (router if has_answered else None)  # Another call may have found one.
            left = end - time.monotonic()
            if self._reached is not None:
                break
            self._leave(router)
            if left <= 0:
                raise NoRouterError(f"no router answers at {self._names} (waited {wait_s:.3g} s, {self._doubt})")
            if is_silent and wait_s - left >= NOTICE_S:
                is_silent = False
                log.warning("no router answers at %s yet: trying for another %.3g s", self._names, left)
            await self.pause(min(left, backoff.next_s()))
        if self.is_closed or self._reached is None:
            raise closed()
        return self._reached

    def failed(self, router: RouterLink, error: grpc.RpcError) -> CorunError:
        """Return the typed error of a failed call. If the network may be the cause, it names the router's address.

        Leaves the router if it is unavailable, but not one that has answered if there is no other. To look for it again
        would help nobody, and its connection may have more calls than it has room for: a probe would wait behind them.
        """
        typed = from_rpc_error(error)
        at_router = f"router {router.address}: {typed.message}"
        if isinstance(typed, UnavailableError):
            if len(self._all) > 1 or not is_answered(error):
                self._leave(router)
            return UnavailableError(at_router, typed.retry_after_s)
        return DeadlineError(at_router) if isinstance(typed, DeadlineError) else typed

    def _leave(self, router: RouterLink) -> None:
        """Ask the next router from now on, unless another call has already left `router`."""
        if self._all[self._next] is router:
            self._next = (self._next + 1) % len(self._all)
        if self._reached is router:
            self._reached = None

    @property
    def _names(self) -> str:
        return ", ".join(router.address for router in self._all)


def closed() -> CancelledByPeerError:
    """Return the error of a call that its client ended by `close`."""
    return CancelledByPeerError("the client is closed")


def read_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses in a text such as "a:1,b:2", or in a sequence of such texts.

    Raises InvalidArgumentError unless each address is host:port.
    """
    given = [address] if isinstance(address, str) else address
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in given):
        raise InvalidArgumentError("address", address, "must be host:port, or several")
    found = [part.strip() for each in given for part in each.split(",")]
    if not found or not all(found):
        raise InvalidArgumentError("address", address, "must be host:port, or several")
    for each in found:
        if each.lower().startswith(("http://", "https://")):
            raise InvalidArgumentError("address", each, "must be host:port without http: routers speak gRPC")
        check_address("address", each)  # Without a port, gRPC would use that of HTTPS.
    return tuple(found)


def check_timeout(field: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidArgumentError(field, seconds, f"must be above 0 and at most {MAX_TIMEOUT_S:g}")


TIMEOUT = checked(check_timeout)
"""The metadata of a setting that is a timeout."""


@dataclass(frozen=True, kw_only=True)  # Without slots, so that a class with slots can have these options, too.
class CallerOptions:
    """How a process that is no member of a cluster calls its routers."""

    router: str = DEFAULT_ADDRESS
    """host:port of the router; several routers of one cluster, with commas in between, are tried in turn."""
    timeout_s: float = field(default=DEFAULT_TIMEOUT_S, metadata=TIMEOUT)
    """Longest time for one call, in seconds."""
    connect_timeout_s: float = field(default=DEFAULT_CONNECT_TIMEOUT_S, metadata=TIMEOUT)
    """Longest wait for a router to be reachable, in seconds."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the router's certificate; turns TLS on for the router."""
    tls_cert: str = ""
    """PEM file of the caller's certificate, for a router that wants one."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_name: str = ""
    """Name that the router's certificate carries, if it is not the router's address."""

    def arguments(self, token: str) -> dict[str, Any]:
        """Return the arguments of a client that shows `token`. Raises InvalidArgumentError for an unfit file."""
        files = {"ca": self.tls_ca, "cert": self.tls_cert, "key": self.tls_key, "name": self.tls_name}
        tls = TlsConfig(**files) if any(files.values()) else None
        times = {"timeout_s": self.timeout_s, "connect_timeout_s": self.connect_timeout_s}
        return {"address": self.router, "tls": tls, "token": token, **times}
