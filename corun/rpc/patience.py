"""How long a call waits for its client, which may send nothing or take nothing.

This module owns the timer of a call and the error of a late client. It must not know gRPC.
"""

from __future__ import annotations

import asyncio

from corun.errors import DeadlineError


class LateClientError(DeadlineError):
    """A client sends nothing, or takes no message, so it may not take this error either."""


class Patience:
    """Ends waits for a client that take longer than `timeout_s`. Each wait is one `with patience.expecting(…)`.

    All waits of a call share one timer, since there are as many waits as messages. Make it and wait in the call's own
    task, one wait after the other, and close it in the end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._failed = ""
        self._since: float | None = None  # When the wait in progress began. None: the call does not wait.
        self._is_over = False  # Whether a wait took too long, and the call's task was cancelled for it.
        self._timer = self._loop.call_later(timeout_s, self._look)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def expecting(self, failed: str) -> Patience:
        """Return this object as the context of waits for the client.

        The context raises LateClientError if the client is late. The error says what the client did not do (`failed`).
        """
        self._failed = failed
        return self

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end()
        if kind is asyncio.CancelledError and self._is_over:
            raise LateClientError(f"the client {self._failed} for {self._timeout_s:g} s") from None

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self._since is None else self._since
        if now < since + self._timeout_s:
            self._timer = self._loop.call_at(since + self._timeout_s, self._look)
            return
        self._is_over = True
        assert self._task is not None  # This object was made in a task.
        self._task.cancel()  # While `_since` is set, the task waits in `expecting` and nowhere else.
