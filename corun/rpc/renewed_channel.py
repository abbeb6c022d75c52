"""Channels over TLS whose certificates may be renewed while they are in use.

gRPC's channels keep, for every reconnection, the certificates that they were made with. So new calls go over a new
channel once the files have changed; calls in progress end on the old one, whose connection stands. Must not know
addresses, options or services.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from corun.config.fields import TlsConfig
from corun.rpc.certificates import Identity, identity


class RenewedChannel:
    """A blocking channel. Old ones stay until this one is closed; gRPC disconnects those that are idle.

    make: a channel with the given certificates.
    """

    def __init__(self, tls: TlsConfig, make: Callable[[Identity], Any]) -> None:
        self._identity = identity(tls)
        self._make = make
        self._used = self._identity.current()
        self._link = make(self._used)
        self._old: list[Any] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current(), name)

    def __enter__(self) -> RenewedChannel:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def current(self) -> Any:
        """The channel for new calls."""
        with self._lock:
            found = self._identity.current()
            if found is not self._used:
                old, self._used, self._link = self._link, found, self._make(found)
                self._retire(old)
            return self._link

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def close(self) -> None:
        for link in (*self._old, self._link):
            link.close()

    def _method(self, kind: str, args: Any, kwargs: Any) -> Any:
        return _Method(self, kind, args, kwargs)

    def _retire(self, link: Any) -> None:
        self._old.append(link)


class AsyncRenewedChannel(RenewedChannel):
    """An asyncio channel. An old one is closed when its last call has ended."""

    def __init__(self, tls: TlsConfig, make: Callable[[Identity], Any]) -> None:
        super().__init__(tls, make)
        self._calls: dict[Any, int] = {}  # by channel
        self._closing: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> AsyncRenewedChannel:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:  # type: ignore[override]
        await asyncio.gather(*(link.close(grace) for link in (*self._old, self._link)), *self._closing)

    def count(self, call: Any) -> Any:
        """Notes a call of the current channel, until it ends."""
        link = self._link
        self._calls[link] = self._calls.get(link, 0) + 1
        call.add_done_callback(lambda _: self._ended(link))
        return call

    def _method(self, kind: str, args: Any, kwargs: Any) -> Any:
        method = _Method(self, kind, args, kwargs)
        return lambda *given, **named: self.count(method(*given, **named))

    def _ended(self, link: Any) -> None:
        self._calls[link] -= 1
        if not self._calls[link]:
            del self._calls[link]
            self._close_old()

    def _retire(self, link: Any) -> None:
        super()._retire(link)
        self._close_old()

    def _close_old(self) -> None:
        for link in [link for link in self._old if link not in self._calls]:
            self._old.remove(link)
            closing = asyncio.ensure_future(link.close(None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _Method:
    """A method of whatever channel is the current one when it is called."""

    def __init__(self, channel: RenewedChannel, kind: str, args: Any, kwargs: Any) -> None:
        self._channel = channel
        self._kind = kind
        self._args, self._kwargs = args, kwargs
        self._link: Any = None
        self._made: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._current()(*args, **kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """As of gRPC's blocking methods."""
        return self._current().future(*args, **kwargs)

    def _current(self) -> Any:
        link = self._channel.current()
        if link is not self._link:
            self._link, self._made = link, getattr(link, self._kind)(*self._args, **self._kwargs)
        return self._made
