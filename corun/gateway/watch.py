"""Looks at the cluster while somebody watches: one question a second for each token, however many watch with it.

This module owns who watches, and when the routers are asked. A router decides what a token may see. This module must
not know HTTP or what a view looks like.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from corun.errors import CorunError, OverloadedError, UnauthenticatedError
from corun.gateway.clients import Clients
from corun.gateway.definitions import WINDOW_S
from corun.gateway.failures import typed
from corun.gateway.view import View, view_of, waiting
from corun.observe.rates import History, Look

INTERVAL_S = 1.0
"""The time in seconds from one question to the next."""
LINGER_S = 15.0
"""How long the questions go on after the last look, in seconds, so that a page that is loaded again, also one without
scripts, finds rates."""
ANSWER_S = 5.0
"""The longest time in seconds that a router has to answer."""
FIRST_S = 2.0
"""How long a page waits for the first answer, in seconds, before it says that there is none yet."""
MAX_WATCHERS = 256
MAX_WATCHERS_OF_TOKEN = 64
"""The most who may watch at a time: of all tokens, and with one of them. Those without a token cannot be told apart."""
MAX_TOKENS = 64
"""The most tokens with which routers are asked at a time. Each takes the gateway some milliseconds a second."""
RETRY_S = 5.0


class _Source:
    """What one token sees: a task that asks while somebody looks."""

    def __init__(self, token: str, clients: Clients) -> None:
        self.view = waiting("Asking a router for the cluster's state.")
        self.event = ""
        """The view as it is sent to all."""
        self.number = 0
        """The number of the view; 0 before the first answer."""
        self.error: CorunError | None = None
        """Why there are no more views."""
        self.looked_at = time.monotonic()
        self._token = token
        self._clients = clients
        self._history = History(WINDOW_S)
        self._changed = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    async def changed(self, after: int) -> None:
        """Wait for a view with another number, or until there are no more."""
        while self.number == after and self.error is None:
            await self._changed.wait()

    def end(self, error: CorunError) -> None:
        """End with an error, which everybody is told who watches."""
        self.error = self.error or error
        self.task.cancel()
        self._tell()

    async def _run(self) -> None:
        try:
            while self.error is None and time.monotonic() - self.looked_at < LINGER_S:
                began = time.monotonic()
                await self._look()
                self.event = self.view.event()
                self.number += 1
                self._tell()
                if self.error is None:
                    await asyncio.sleep(max(0.0, began + INTERVAL_S - time.monotonic()))
        except Exception as error:
            self.error = typed(error)
            self._tell()

    async def _look(self) -> None:
        try:
            with self._clients.lease(self._token) as client:
                status = await client.get_cluster(samples=True, contracts=False, timeout_s=ANSWER_S)
        except UnauthenticatedError as error:
            self._clients.forget(self._token)
            self.error = error
        except CorunError as error:
            alert = "bad", f"The cluster does not answer: {error}"
            known = view_of(self._history) if self._history.looks else waiting("")
            self.view = replace(known, state="no answer", colour="bad", alerts=(alert,))
        else:
            self._history.add(Look(time.monotonic(), status))
            self.view = view_of(self._history)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Watch:
    """All who watch the cluster through one gateway."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._sources: dict[str, _Source] = {}
        self._watchers: Counter[str] = Counter()
        self._ended: CorunError | None = None

    async def view(self, token: str) -> View:
        """Return what a token sees now, after at most `FIRST_S` seconds. Raises the error of a router that refuses the
        token, and OverloadedError if too many tokens are in use."""
        source = self._source(token)
        if not source.number:
            first = asyncio.ensure_future(source.changed(0))
            try:
                await asyncio.wait((first,), timeout=FIRST_S)
            finally:
                first.cancel()
        if source.error is not None:
            raise source.error
        return source.view

    async def events(self, token: str) -> AsyncGenerator[str, None]:
        """Yield views as JSON, the newest whenever it is taken, until their reader has enough. Who reads slowly misses
        some. Raises as `view` does."""
        with self._counted(token):
            sent: tuple[_Source | None, int] = None, 0
            while True:
                source = self._source(token)
                await source.changed(sent[1] if source is sent[0] else 0)
                if source.error is not None:
                    raise source.error
                sent = source, source.number
                yield source.event

    def end(self, error: CorunError) -> None:
        """End all questions, also those to come, and tell everybody who watches."""
        self._ended = error
        for source in list(self._sources.values()):
            source.end(error)

    def _source(self, token: str) -> _Source:
        source = self._sources.get(token)
        if source is None or source.task.done():  # A task is forgotten a turn of the loop after it is done.
            if self._ended is not None:
                raise self._ended
            if len(self._sources) >= MAX_TOKENS:
                raise OverloadedError(f"{len(self._sources)} different tokens watch the cluster", RETRY_S)
            source = self._sources[token] = _Source(token, self._clients)
            source.task.add_done_callback(lambda _: self._forget(token))
        source.looked_at = time.monotonic()
        return source

    def _forget(self, token: str) -> None:
        if (source := self._sources.get(token)) is not None and source.task.done():
            del self._sources[token]

    @contextmanager
    def _counted(self, token: str) -> Iterator[None]:
        for count, limit in ((self._watchers.total(), MAX_WATCHERS), (self._watchers[token], MAX_WATCHERS_OF_TOKEN)):
            if count >= limit:
                raise OverloadedError(f"{count} of {limit} watch the cluster already", RETRY_S)
        self._watchers[token] += 1
        try:
            yield
        finally:
            self._watchers[token] -= 1
            self._watchers += Counter()  # Drop the tokens with which nobody watches.
