"""Where a node's routers are: at every address that their configured names have now.

Owns: looking names up again and again, and one link for each address. Must not know: what is said over a link. A name
says where routers may be, never that one is gone: only the link itself finds out whether its router still answers.
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
"""Between two lookups of a name: about as long as a cluster's DNS keeps an answer."""
LOOKUP_TIMEOUT_S = 5.0
"""Longest lookup before it counts as failed; what it answers later is taken all the same."""
log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host and a port to addresses, each ip:port or [ip]:port; raises OSError if the host has none."""


@dataclass(frozen=True, slots=True)
class RouterAddress:
    """One router to join."""

    address: str
    """ip:port or [ip]:port."""
    name: str = ""
    """The host that it was found by, and whose certificate it has to show; empty if that was an IP address."""

    def __str__(self) -> str:
        return f"{self.address} ({self.name})" if self.name else self.address


async def resolve(host: str, port: int) -> Sequence[str]:
    """Addresses of `host`, of IPv4 and IPv6, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}" for family, *_, (ip, *_) in found})


class Routers:
    """The addresses of `entries`, each host:port, as they come and go while `serve_each` runs."""

    def __init__(self, entries: Sequence[str], resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._found = {entry: _given(entry) for entry in entries}  # What each entry led to the last time it did.
        self._failing: set[str] = set()
        self._changed = asyncio.Event()

    def lists(self, address: str) -> bool:
        """Whether an entry leads to `address`, by the last answer for it. A failed lookup is no answer."""
        return any(router.address == address for router in self._listed())

    async def serve_each(self, serve: Callable[[RouterAddress], Coroutine[Any, Any, None]]) -> None:
        """Runs `serve` once for each address, and again if it ends while its address is listed. Ends with its error."""
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
        """Of entries that lead to the same address, the first gives the name."""
        for found in self._found.values():
            yield from found

    async def _follow(self, entry: str) -> None:
        """Looks a name up for ever, one lookup at a time: a resolver that hangs holds one thread, not one more each."""
        host, port = _split(entry)
        while True:
            lookup = asyncio.ensure_future(self._resolve(host, port))
            try:
                while not lookup.done():
                    await asyncio.wait((lookup,), timeout=LOOKUP_TIMEOUT_S)
                    if not lookup.done():
                        self._complain(entry, f"no answer within {LOOKUP_TIMEOUT_S:g} s")
                self._note(entry, host, lookup.result())
            except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a host's name.
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
        """Once, until the name is found again. Routers that it led to before stay."""
        if entry not in self._failing:
            self._failing.add(entry)
            log.warning("router %s is not found, and is looked for until it is: %s", entry, why)


def _split(entry: str) -> tuple[str, int]:
    host, _, port = entry.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _given(entry: str) -> tuple[RouterAddress, ...]:
    """The address itself, where an entry is one: nothing is to be looked up then."""
    try:
        ipaddress.ip_address(_split(entry)[0])
    except ValueError:
        return ()
    return (RouterAddress(entry),)


def _raise_errors(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
