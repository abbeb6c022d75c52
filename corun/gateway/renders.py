"""Render chats in a few threads of their own, in turns of the clients.

A template is a stranger's program, and a thread that runs it cannot be ended. So one client gets one thread at a time,
and what waits is bounded. This module must not know chats.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from corun.errors import DeadlineError, OverloadedError

THREADS = 2
WAITING = 1024
"""The most chats that may wait. A client with a token may have half of them."""
RETRY_S = 1.0
T = TypeVar("T")
_Turn = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Renders:
    """The chats that are rendered, and those that wait. Clients without a token cannot be told apart, so they share
    all threads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(THREADS, "chats")
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()  # By token; the first one is next.
        self._running: list[str] = []  # The token of each running thread.

    async def run(self, token: str, render: Callable[[], T]) -> T:
        """Return what `render` returns. Raises its error, OverloadedError if too many wait, and DeadlineError."""
        self._check_room(token)
        turn: _Turn = render, asyncio.get_running_loop().create_future()
        self._waiting.setdefault(token, deque()).append(turn)
        self._begin()
        try:
            found: T = await asyncio.wait_for(turn[1], self._timeout_s)
            return found
        except asyncio.TimeoutError:
            raise DeadlineError(f"the chat was not rendered in {self._timeout_s:g} s") from None
        finally:
            with suppress(KeyError, ValueError):  # It has had its turn.
                self._waiting[token].remove(turn)

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def _check_room(self, token: str) -> None:
        count, own = sum(map(len, self._waiting.values())), len(self._waiting.get(token, ()))
        if count >= WAITING or (token and own >= WAITING // 2):
            raise OverloadedError(f"{count} chats wait to be rendered, {own} of this client", RETRY_S)

    def _begin(self) -> None:
        """Give free threads to the next clients."""
        for token in list(self._waiting):
            turns = self._waiting[token]
            while turns and len(self._running) < THREADS and not (token and token in self._running):
                self._submit(token, *turns.popleft())
                self._waiting.move_to_end(token)
            if not turns:
                del self._waiting[token]

    def _submit(self, token: str, render: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        def end(job: Future[Any]) -> None:
            with suppress(RuntimeError):  # The gateway has ended, and its loop is closed.
                loop.call_soon_threadsafe(self._end, token, answer, job)

        loop = answer.get_loop()
        self._running.append(token)
        self._pool.submit(render).add_done_callback(end)

    def _end(self, token: str, answer: asyncio.Future[Any], job: Future[Any]) -> None:
        self._running.remove(token)
        if not answer.done():
            error = job.exception()
            answer.set_result(job.result()) if error is None else answer.set_exception(error)
        self._begin()
