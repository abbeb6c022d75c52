"""The work that a gateway has in progress: how much it may be, and how it ends when the gateway is told to stop.

This module must not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corun.errors import OverloadedError, UnavailableError

RETRY_S = 1.0


class Activity:
    """Counts the prompts in progress. A request that is still being read counts as one prompt."""

    def __init__(self, limit: int) -> None:
        self.running = 0
        self.draining = False
        self._limit = limit
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as one prompt for as long as the block runs.

        Raises UnavailableError while draining, and OverloadedError if there is no room.
        """
        if self.draining:
            raise _shutting_down()
        task = asyncio.current_task()
        assert task is not None
        with self.more(1):
            self._tasks.add(task)
            try:
                yield
            finally:
                self._tasks.discard(task)

    @contextmanager
    def more(self, count: int) -> Iterator[None]:
        """Count `count` more prompts for as long as the block runs: those of an admitted request beyond its first.

        Raises OverloadedError if there is no room.
        """
        if self.running + count > self._limit:
            limit = f"{self.running} of {self._limit} prompts are in progress"
            raise OverloadedError(f"the gateway has no room for {count} more: {limit}", RETRY_S)
        self.running += count
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= count
            if not self.running:
                self._idle.set()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the cancellation of a request by `end` into an error that its client can be told."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise  # The client is gone.
            raise _shutting_down() from None

    def end(self) -> None:
        """Cancel the running requests and refuse new ones."""
        self.draining = self._ended = True
        for task in self._tasks:
            task.cancel()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait until the running ones end. Return False if some still run after `grace_s`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:  # Python 3.10 has another TimeoutError, too.
            return False
        return True


def _shutting_down() -> UnavailableError:
    return UnavailableError("the gateway is shutting down", RETRY_S)
