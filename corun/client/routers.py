"""Which routers a client uses, which credentials it shows them and how long it waits for them.

This module must not know what is asked of a router.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from corun.errors import (
    CorunError,
    DeadlineError,
    InvalidArgumentError,
    UnavailableError,
    from_rpc_error,
)
from corun.rpc.channel import OPEN, Access, Channel

STATUS_TIMEOUT_S = 30.0
NOTICE_S = 1.0
"""The number of seconds that a client waits for a router before it logs a warning."""
MIN_RETRY_S = 0.05
MAX_RETRY_S = 2.0
_PROBE = "/grpc.health.v1.Health/Check"
_PROBE_S = 2.0
"""The number of seconds that one of several routers has to answer before the next one is asked."""

log = logging.getLogger(__name__)
"""The client's logger. If the caller installs no handler, Python prints its warnings to standard error."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The addresses of one cluster's routers, and how long to wait for one of them.

    Raises InvalidArgumentError unless both timeouts are finite and above 0.
    """

    addresses: tuple[str, ...]
    timeout_s: float
    connect_timeout_s: float
    access: Access = OPEN
    """The TLS files and the token that the client shows to the routers."""

    def __post_init__(self) -> None:
        check_timeout("timeout_s", self.timeout_s)
        check_timeout("connect_timeout_s", self.connect_timeout_s)

    @property
    def address(self) -> str:
        """All addresses as one text, for messages."""
        return ", ".join(self.addresses)

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def status_deadline(self, timeout_s: float | None = None) -> Deadline:
        return self.deadline(min(self.timeout_s, STATUS_TIMEOUT_S) if timeout_s is None else timeout_s)

    def connect_s(self, deadline: Deadline) -> float:
        """Return the number of seconds to wait for a connection."""
        return min(self.connect_timeout_s, deadline.remaining_s)

    def unreachable(self, waited_s: float) -> UnavailableError:
        return UnavailableError(f"no router answers at {self.address} (waited {waited_s:.3g} s{self._doubt})")

    @property
    def _doubt(self) -> str:
        """A hint for the message: gRPC does not distinguish a refused TLS handshake from a silent peer."""
        if self.access.tls is None:
            return ", without TLS"
        return ", over TLS: the certificates may not be those that the other side trusts"


class RouterSearch:
    """Plans the search for a router that answers: how long each router may take, and when the next one is asked."""

    def __init__(self, endpoint: Endpoint, wait_s: float) -> None:
        self._endpoint = endpoint
        self._wait_s = wait_s
        self._end = time.monotonic() + wait_s
        self._backoff = Backoff()
        self._is_silent = wait_s > 2 * NOTICE_S
        """Whether the warning about a long search is still to be logged. A short search logs none."""

    @property
    def probe_s(self) -> float:
        """The number of seconds that the next router may take to answer."""
        left = max(0.0, self._end - time.monotonic())
        if self._is_silent:
            return min(left, NOTICE_S)
        return left if len(self._endpoint.addresses) == 1 else min(left, _PROBE_S)

    def pause_s(self) -> float:
        """Return the number of seconds until the next router is asked.

        Raises UnavailableError when the time for the search is over.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._endpoint.unreachable(self._wait_s)
        if self._is_silent and self._wait_s - left >= NOTICE_S:
            self._is_silent = False
            log.warning("no router answers at %s yet: trying for another %.3g s", self._endpoint.address, left)
        return min(left, self._backoff.next_s())


class Router:
    """One router: its address, the channel to it, and the stub of its service on that channel."""

    def __init__(self, address: str, channel: Channel, stub: Any) -> None:
        self.address = address
        self.channel = channel
        self.stub = stub
        self.probe = channel.unary_unary(_PROBE, bytes, bytes)


class Routers:
    """A client's routers, and which of them is in use."""

    def __init__(self, routers: list[Router]) -> None:
        self.all = routers
        self.reached = False
        """Whether the current router has answered, and no call has found it gone since."""
        self._current = 0

    @property
    def current(self) -> Router:
        return self.all[self._current]

    def leave(self, router: Router) -> None:
        """Go on to the next router, unless another call has already left `router`."""
        if self.current is router:
            self._current = (self._current + 1) % len(self.all)
            self.reached = False

    def failed(self, router: Router, error: grpc.RpcError) -> CorunError:
        """Return the error to raise for a failed call. Leaves the router if it is unavailable."""
        typed = typed_error(error, router.address)
        if isinstance(typed, UnavailableError):
            self.leave(router)
        return typed


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
        if ":" not in each:  # gRPC would use the port of HTTPS.
            raise InvalidArgumentError("address", each, "must be host:port")
    return tuple(found)


def typed_error(error: grpc.RpcError, address: str) -> CorunError:
    """Return the typed error of a failed call. If the network may be the cause, it names the router's address."""
    typed = from_rpc_error(error)
    if isinstance(typed, UnavailableError):
        return UnavailableError(f"router {address}: {typed.message}", typed.retry_after_s)
    if isinstance(typed, DeadlineError):
        return DeadlineError(f"router {address}: {typed.message}")
    return typed


def check_timeout(field: str, seconds: float) -> None:
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise InvalidArgumentError(field, seconds, "must be finite and above 0")
