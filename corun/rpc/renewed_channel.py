"""Channels over TLS whose certificates may be renewed while they are in use.

A gRPC channel uses the certificates that it was made with for every reconnection. So once the files have changed, new
calls use a new channel. Calls in progress finish on the old channel, whose connection stays up. This module must not
know addresses, options or services.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from corun.config.fields import TlsConfig
from corun.rpc.certificates import Identity, identity


class RenewedChannel:
    """A blocking channel. Old channels are kept until this one is closed; gRPC disconnects idle ones.

    make: returns a channel with the given certificates.
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
        """Return the channel for new calls. It is a new one if the files have changed."""
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
    """An asyncio channel. An old channel is closed when its last call has ended."""

    def __init__(self, tls: TlsConfig, make: Callable[[Identity], Any]) -> None:
        super().__init__(tls, make)
        self._calls: dict[Any, int] = {}  # The number of calls in progress, by channel.
        self._closing: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> AsyncRenewedChannel:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:  # type: ignore[override]
        await asyncio.gather(*(link.close(grace) for link in (*self._old, self._link)), *self._closing)

    def count(self, call: Any) -> Any:
        """Count a call of the current channel until the call ends."""
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
    """A method that uses the channel that is current at the time of each call."""

    def __init__(self, channel: RenewedChannel, kind: str, args: Any, kwargs: Any) -> None:
        self._channel = channel
        self._kind = kind
        self._args, self._kwargs = args, kwargs
        self._link: Any = None
        self._made: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._current()(*args, **kwargs)

    def future(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as `future` of gRPC's blocking methods does."""
        return self._current().future(*args, **kwargs)

    def _current(self) -> Any:
        link = self._channel.current()
        if link is not self._link:
            self._link, self._made = link, getattr(link, self._kind)(*self._args, **self._kwargs)
        return self._made
