"""The event loop of blocking clients, in one daemon thread that starts with the first call and runs until the program
ends.

All blocking clients share it, since gRPC wakes every event loop of a process for each event of any of them. This module
must not know what else runs on the loop.
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
from typing import Any, TypeVar

from corun.client.routers import Routers
from corun.errors import CorunError, UnavailableError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for all threads of the process.

    The garbage collector may close a client or a stream at any moment in any thread, also in one that holds the lock or
    that just starts. So nothing but the start of the thread takes the lock, and nothing is open before that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._refusal = ""
        """Why nothing can run any more; empty while it can."""
        self._not_to_free: list[Routers] | None = None
        """In a forked child: what would wait for gRPC's threads, which do not exist there, if it were freed."""
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):  # Windows forks no process.
            os.register_at_fork(after_in_child=self._lose)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop, in the context of the calling thread. Cancelling the future cancels the work.

        Raises RuntimeError if the thread cannot be started, and UnavailableError if the program ends, or in a process
        that was forked after the thread started: this thread and those of gRPC do not exist in it.
        """
        try:
            return asyncio.run_coroutine_threadsafe(work, self._running_loop())
        except (CorunError, RuntimeError):
            work.close()
            raise

    def close(self, routers: Routers) -> None:
        """Close a client's routers, and wait until they are closed. In the loop's own thread, where the garbage
        collector may call this, wait for nothing."""
        closing = self.abandon(routers)
        if closing is not None and threading.current_thread() is not self._thread:
            with suppress(CancelledError):
                closing.result()

    def abandon(self, routers: Routers) -> Future[None] | None:
        """Close a client's routers without waiting for them. Return None if nothing can be open."""
        routers.is_closed = True
        if self._not_to_free is not None:
            self._not_to_free.append(routers)
        elif self._loop is not None:
            with suppress(CorunError, RuntimeError):
                return self.submit(routers.close())
        return None

    def end(self) -> None:
        """Cancel everything that runs on the loop, and wait until the thread has ended."""
        with self._lock:
            is_running = self._loop is not None and not self._refusal
            # A program that ends starts no thread: what it finalizes last would wait for one for ever.
            self._refusal = self._refusal or "the program ends"
        if is_running and self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            with self._lock:
                if self._loop is None and not self._refusal:
                    self._start()
        if self._loop is None or self._refusal:
            raise UnavailableError(self._refusal)
        return self._loop

    def _start(self) -> None:
        logging.getLogger("asyncio").addFilter(is_no_late_wake)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(loop,), name="corun-client", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The system has no room for another thread. The next call tries again.
            loop.close()
            raise
        self._loop, self._thread = loop, thread

    def _lose(self) -> None:
        """Note in a forked child that the thread does not exist here."""
        self._lock = threading.Lock()
        if self._loop is not None:
            self._refusal = "this process was forked after a client was used: gRPC does not survive that"
            self._not_to_free = []


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


def is_no_late_wake(record: logging.LogRecord) -> bool:
    """Drop the errors that asyncio logs when gRPC wakes several loops for one event, and one comes too late for it or
    is closed."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, (BlockingIOError, RuntimeError)) and "PollerCompletionQueue" in record.getMessage())
