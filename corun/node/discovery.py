"""Finds a node's routers: they are at every address that their configured names have now.

Owns: repeated lookups of the names, and one link for each address. Must not know: what is sent over a link. A name
tells where routers may be, but never that a router is gone: only the link can find out whether its router answers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LOOKUP_S = 3.0
"""The time between two lookups of a name: about as long as a cluster's DNS keeps an answer."""
LOOKUP_TIMEOUT_S = 5.0
"""The time after which a lookup counts as failed; an answer that comes later is used all the same."""
log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function from a host and a port to addresses, each ip:port or [ip]:port. It raises OSError if there are none."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """One router to join."""

    address: str
    """ip:port or [ip]:port."""
    name: str = ""
    """The host name that led to this address and that the router's certificate must match; empty for an IP address."""

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the IPv4 and IPv6 addresses of `host`, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in found})


class Routers:
    """The current addresses of `entries`, each host:port; `serve_each` keeps them up to date while it runs."""

    def __init__(self, entries: Sequence[str], resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._found = {entry: _given(entry) for entry in entries}  # entry -> the addresses of its last good lookup
        self._failing: set[str] = set()
        self._changed = asyncio.Event()

    def lists(self, address: str) -> bool:
        """Return whether an entry leads to `address` by its last answer. A failed lookup is no answer."""
        return any(router.address == address for router in self._listed())

    async def serve_each(self, serve: Callable[[RouterAddress], Coroutine[Any, Any, None]]) -> None:
        """Run `serve` once for each address, and again if it ends while its address is listed. Raises its error."""
        lookups = {asyncio.ensure_future(self._follow(entry)) for entry, found in self._found.items() if not found}
        links: dict[str, asyncio.Task[None]] = {}
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            while True:
                for router in self._listed():
                    if router.address not in links:
                        links[router.address] = asyncio.ensure_future(serve(router))
                await asyncio.wait({changed, *lookups, *links.values()}, return_when=asyncio.FIRST_COMPLETED)
                _raise_errors((*lookups, *links.values()))
                links = {address: link for address, link in links.items() if not link.done()}
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.ensure_future(self._changed.wait())
        finally:
            started = (changed, *lookups, *links.values())
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    def _listed(self) -> Iterator[RouterAddress]:
        """Yield all addresses. If several entries lead to one address, the first entry gives the name."""
        for found in self._found.values():
            yield from found

    async def _follow(self, entry: str) -> None:
        """Look a name up for ever, one lookup at a time, so that a resolver that hangs holds only one thread."""
        host, port = _split(entry)
        while True:
            lookup = asyncio.ensure_future(self._resolve(host, port))
            try:
                while not lookup.done():
                    await asyncio.wait((lookup,), timeout=LOOKUP_TIMEOUT_S)
                    if not lookup.done():
                        self._complain(entry, f"no answer within {LOOKUP_TIMEOUT_S:g} s")
                self._note(entry, host, lookup.result())
            except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a host name.
                self._complain(entry, str(error))
            finally:
                lookup.cancel()
            await asyncio.sleep(LOOKUP_S)

    def _note(self, entry: str, host: str, addresses: Sequence[str]) -> None:
        if not addresses:
            self._complain(entry, "it has no address")
            return
        if entry in self._failing:
            self._failing.discard(entry)
            log.info("router %s is found again, at %s", entry, ", ".join(addresses))
        found = tuple(RouterAddress(address, host.rstrip(".")) for address in addresses)
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


def _raise_errors(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
