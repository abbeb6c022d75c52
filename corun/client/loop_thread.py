"""The event loop of blocking clients: one daemon thread that runs while a client of the process is in use.

All blocking clients share it, since gRPC wakes every event loop of a process for each event of any of them. This module
must not know what runs on the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from corun.errors import CancelledByPeerError, UnavailableError

T = TypeVar("T")


class User(Protocol):
    """A client whose coroutines run on the loop."""

    is_closed: bool

    async def close(self) -> None: ...


class LoopThread:
    """Starts the thread for its first user, and ends it when the last user has closed. All threads may call it."""

    def __init__(self) -> None:
        # The garbage collector may close a user in any thread: in one that holds the lock, and in one that just starts.
        # So the lock may be taken twice, and nobody waits for another thread while holding it.
        self._lock = threading.RLock()
        self._users: set[User] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_lost = False
        self._has_ended = False
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._lose)

    def submit(self, user: User, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop, in the context of the calling thread. Cancelling the future cancels the work.

        Raises CancelledByPeerError if the user is closed or the interpreter ends, RuntimeError if the thread cannot be
        started, and UnavailableError in a process that was forked after a user was there: the thread and those of gRPC
        do not exist in it.
        """
        with self._lock:
            # An interpreter that ends starts no thread: what it finalizes last would wait for one for ever.
            if user.is_closed or self._is_lost or self._has_ended:
                work.close()
                raise _unusable(self._is_lost)
            starting = None
            if self._loop is None:
                logging.getLogger("asyncio").addFilter(_is_no_late_wake)
                self._loop = asyncio.new_event_loop()
                starting = threading.Thread(target=_serve, args=(self._loop,), name="corun-client", daemon=True)
                self._thread = starting
            self._users.add(user)
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        if starting is not None:
            try:
                starting.start()
            except RuntimeError:  # The system has no room for another thread. The next call tries again.
                work.close()
                with self._lock:
                    if self._loop is not None:
                        self._loop.close()
                    self._loop = self._thread = None
                    self._users.clear()
                raise
        return answer

    def close(self, user: User) -> None:
        """Close the user. If it was the last one, wait until the thread has ended. In the loop's own thread, where the
        garbage collector may call it, wait for nothing."""
        closing = self.abandon(user)
        if closing is None or threading.current_thread() is self._thread:
            return
        with suppress(CancelledError):  # Another thread has closed it at the same time.
            closing.result()
        self._leave(user)
        with self._lock:
            ending = self._thread if self._loop is None else None
        if ending is not None and ending.is_alive():
            ending.join()

    def abandon(self, user: User) -> Future[None] | None:
        """Close the user without waiting for it. Return None if there is nothing to close."""
        with self._lock:
            user.is_closed = True
            if self._loop is None or user not in self._users or self._is_lost:
                return None
            closing = asyncio.run_coroutine_threadsafe(user.close(), self._loop)
        closing.add_done_callback(lambda _: self._leave(user))
        return closing

    def end(self) -> None:
        """Cancel everything that runs on the loop, and wait until the thread has ended."""
        with self._lock:
            self._has_ended = True
            thread = self._thread
            self._stop_loop()
        if thread is not None and thread.is_alive() and not self._is_lost:
            thread.join()

    def _leave(self, user: User) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._stop_loop()

    def _stop_loop(self) -> None:
        if self._loop is not None and not self._is_lost:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
            self._users.clear()

    def _lose(self) -> None:
        """Note in a forked child that the thread does not exist here. Its users are kept: nothing can close them."""
        self._lock = threading.RLock()
        self._is_lost = self._thread is not None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is told to stop, then cancel what is left on it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(_cancel_rest())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _is_no_late_wake(record: logging.LogRecord) -> bool:
    """Drop the errors that asyncio logs when gRPC wakes several loops for one event, and one comes too late for it or
    is closed."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, (BlockingIOError, RuntimeError)) and "PollerCompletionQueue" in record.getMessage())


def _unusable(is_lost: bool) -> CancelledByPeerError | UnavailableError:
    if is_lost:
        return UnavailableError("this process was forked after a client was used: gRPC does not survive that")
    return CancelledByPeerError("the client is closed")
