"""How long a call waits for its client, which may send nothing or take nothing.

This module owns the timer of a call and the error of a late client. It must not know gRPC.
"""

from __future__ import annotations

import asyncio

from corun.errors import DeadlineError


class LateClientError(DeadlineError):
    """A client sends nothing, or takes no message, so it may not take this error either."""


class Expecting:
    """Marks the waits for a client, one after the other.

    It is a class and not a generator function for speed, since it is entered for every message.
    """

    __slots__ = ("_late", "_patience", "_time")

    def __init__(self, patience: Patience, late: str) -> None:
        self._patience = patience
        self._late = late
        self._time = asyncio.get_running_loop().time

    def begin(self) -> None:
        self._patience.since = self._time()

    def end(self) -> None:
        self._patience.since = None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end()
        if kind is asyncio.CancelledError and self._patience.is_over:
            raise LateClientError(self._late) from None


class Patience:
    """Ends waits for a client that take longer than `timeout_s`.

    All waits of a call share one timer, since there are as many waits as messages. Make it, enter it and wait in the
    call's own task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.since: float | None = None
        """When the wait in progress began, on the loop's clock. None: the call does not wait for its client."""
        self.is_over = False
        """Whether a wait took too long, and the call's task was cancelled for it."""

    def __enter__(self) -> Patience:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def expecting(self, failed: str) -> Expecting:
        """Return a context within which the call waits for the client.

        The context raises DeadlineError if the client is late. The error says what the client did not do (`failed`).
        """
        return Expecting(self, f"the client {failed} for {self._timeout_s:g} s")

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self.since is None else self.since
        if now < since + self._timeout_s:
            self._timer = self._loop.call_at(since + self._timeout_s, self._look)
            return
        self.is_over = True
        assert self._task is not None  # This object was made in a task.
        self._task.cancel()  # While `since` is set, the task waits in `expecting` and nowhere else.
