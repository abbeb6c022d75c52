"""Writing the messages of one call as they come, without waking a task for each.

Owns one write in flight: whoever fills a source writes from there, and what comes meanwhile waits in the source. A task
that awaits every write is woken twice per message, through all its coroutines; with hundreds of streams and a message
on each per decode step, that is most of what a router would do. This module must not know any service of ours.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import grpc.aio


class Source(ABC):
    """Messages of one call, which are pulled one after the other."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """The message that was pulled last was the call's last."""

    @abstractmethod
    def listen(self, ready: Callable[[], None] | None) -> None:
        """Calls `ready` from now on whenever there is something to pull; None ends that."""

    @abstractmethod
    def pull(self) -> bytes | None:
        """The next message; None: there is none yet. Raises what ends the call."""


class Wait(Protocol):
    """Is told for how long a call waits for its client."""

    def begin(self) -> None:
        """From now on."""

    def end(self) -> None:
        """Until now."""


class Pump:
    """Writes a source's messages to a call until the source has ended or the client is gone."""

    def __init__(self, source: Source, context: grpc.aio.ServicerContext[Any, Any], wait: Wait) -> None:
        self._source = source
        self._context = context
        self._wait = wait
        self._writing: Coroutine[Any, Any, None] | None = None
        self._sent: asyncio.Future[Any] | None = None  # What the write in flight waits for.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises what the source raises, and CancelledError when the client is gone."""
        self._wait.end()  # Nothing is in flight yet.
        self._source.listen(self._next)
        try:
            self._next()
            await self._over
        finally:
            self._source.listen(None)
            if self._sent is not None:
                self._sent.cancel()  # As a task that is cancelled does to what it awaits.

    def _next(self) -> None:
        """Writes the next message, if there is one and none is in flight."""
        if self._writing is not None or self._over.done():
            return
        try:
            message = self._source.pull()
        except Exception as error:
            self._over.set_exception(error)
            return
        if message is not None:
            self._writing = self._context.write(message)
            self._wait.begin()
            self._advance()

    def _advance(self, _: object = None) -> None:
        """Runs the write as far as it gets, as a task would."""
        assert self._writing is not None
        self._sent = None
        try:
            self._sent = self._writing.send(None)
        except StopIteration:
            self._written()
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self._failed(None)  # The client is gone; gRPC's own cancellation may be yet to come.
        except Exception as error:
            self._failed(error)
        else:
            self._sent.add_done_callback(self._advance)

    def _written(self) -> None:
        self._writing = None
        self._wait.end()
        if not self._source.has_ended:
            self._next()
        elif not self._over.done():
            self._over.set_result(None)

    def _failed(self, error: Exception | None) -> None:
        """error: None if the call was cancelled."""
        self._writing = None
        self._wait.end()
        if self._over.done():
            return
        if error is None:
            self._over.cancel()
        else:
            self._over.set_exception(error)
