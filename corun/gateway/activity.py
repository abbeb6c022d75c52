"""The work that a gateway has in progress: how much it may be, and how it ends when the gateway is told to stop.

This module must not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corun.errors import OverloadedError
from corun.rpc.activity import Activity

RETRY_S = 1.0


class Prompts(Activity):
    """Counts the prompts in progress. A request that is still being read counts as one prompt."""

    def __init__(self, limit: int) -> None:
        super().__init__("the gateway", RETRY_S)
        self._limit = limit
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as one prompt for as long as the block runs.

        Raises UnavailableError while draining, and OverloadedError if there is no room.
        """
        self.check()
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
        with self.counted(count):
            yield

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn the cancellation of a request by `end` into an error that its client can be told."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise  # The client is gone.
            raise self.shutting_down() from None

    def end(self) -> None:
        """Cancel the running requests and refuse new ones."""
        self.draining = self._ended = True
        for task in self._tasks:
            task.cancel()
