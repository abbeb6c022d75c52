"""Writing the messages of one call as they come, without waking a task for each, and how long a call waits for that.

This module owns the one write in flight, and the timer for a client that may send nothing or take nothing. The code
that fills a source starts the write itself; messages that come while a write is in flight wait in the source. A task
that awaits every write would be woken twice per message, through all its coroutines. With hundreds of streams and one
message per stream and decode step, that would be most of a router's work. This module must not know any service of
ours.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio

from corun.errors import DeadlineError


class LateClientError(DeadlineError):
    """A client sends nothing, or takes no message, so it may not take this error either."""


class Patience:
    """Ends waits for a client that take longer than `timeout_s`. Each wait is one `with patience.expecting(…)`.

    Make it and wait in the call's own task, one wait after the other.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None  # None: the call does not wait.
        self._is_over = False  # Whether a wait took too long, and the call's task was cancelled for it.

    @contextmanager
    def expecting(self, failed: str) -> Iterator[None]:
        """Wait for the client in this context. Raises LateClientError if it is late.

        The error says what the client did not do (`failed`).
        """
        self.begin()
        try:
            yield
        except asyncio.CancelledError:
            if self._is_over:
                raise LateClientError(f"the client {failed} for {self._timeout_s:g} s") from None
            raise
        finally:
            self.end()

    def begin(self) -> None:
        """Note that the call waits for its client from now on."""
        self._timer = self._loop.call_later(self._timeout_s, self._give_up)

    def end(self) -> None:
        """Note that the call no longer waits for its client."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._is_over = True
        assert self._task is not None  # This object was made in a task.
        self._task.cancel()  # The task waits in `expecting` and nowhere else.


class Source(ABC):
    """The messages of one call, which are pulled one after the other."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the message that was pulled last was the last one of the call."""

    @abstractmethod
    def listen(self, ready: Callable[[], None] | None) -> None:
        """Call `ready` from now on whenever there is something to pull. None stops this."""

    @abstractmethod
    def pull(self) -> bytes | None:
        """Return the next message, or None if there is none yet. Raises the error that ends the call."""


class Pump:
    """Writes a source's messages to a call until the source has ended or the client is gone."""

    def __init__(self, source: Source, context: grpc.aio.ServicerContext[Any, Any], wait: Patience) -> None:
        self._source = source
        self._context = context
        self._wait = wait
        self._writing: Coroutine[Any, Any, None] | None = None
        self._sent: asyncio.Future[Any] | None = None  # The future that the write in flight waits for.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Write until the source has ended. Raises what the source raises, and CancelledError if the client is gone."""
        self._wait.end()  # Nothing is in flight yet.
        self._source.listen(self._next)
        try:
            self._next()
            await self._over
        finally:
            self._source.listen(None)
            if self._sent is not None:
                self._sent.cancel()  # A cancelled task does the same to what it awaits.

    def _next(self) -> None:
        """Write the next message, if there is one and none is in flight."""
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
        """Run the write until it has to wait, as a task would."""
        assert self._writing is not None
        try:
            self._sent = self._writing.send(None)
        except StopIteration:
            self._end_write()
            if not self._source.has_ended:
                self._next()
            elif not self._over.done():
                self._over.set_result(None)
        except (asyncio.CancelledError, grpc.aio.BaseError) as error:
            error.__traceback__ = None  # The future has the error, and this frame has the future: a cycle.
            self._end_write()
            self._over.cancel()  # The client is gone; gRPC's own cancellation may still be on its way.
        except Exception as error:
            self._end_write()
            if not self._over.done():
                self._over.set_exception(error)
        else:
            self._sent.add_done_callback(self._advance)

    def _end_write(self) -> None:
        self._writing = self._sent = None
        self._wait.end()
