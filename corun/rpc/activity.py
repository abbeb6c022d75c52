"""What a server has in progress, and its drain: it takes nothing new, and waits until nothing runs.

This module must not know what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from corun.errors import UnavailableError


class Activity:
    """Counts the work in progress.

    what: the server in words. away_s: the seconds after which a client that a draining server refuses should come back.
    """

    def __init__(self, what: str, away_s: float) -> None:
        self.running = 0
        self.draining = False
        self._what = what
        self._away_s = away_s
        self._idle = asyncio.Event()
        self._idle.set()

    def shutting_down(self) -> UnavailableError:
        """Return the error that refuses or ends work because the server is about to end."""
        return UnavailableError(f"{self._what} is shutting down", self._away_s)

    def check(self) -> None:
        """Raise UnavailableError while draining."""
        if self.draining:
            raise self.shutting_down()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count new work for as long as the block runs. Raises UnavailableError while draining."""
        self.check()
        with self.counted():
            yield

    @contextmanager
    def counted(self, count: int = 1) -> Iterator[None]:
        """Count `count` more for as long as the block runs, also in a drain: work that runs may need it to end."""
        self.running += count
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= count
            if not self.running:
                self._idle.set()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new work and wait for what runs. Return False if it takes longer than `grace_s` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:  # Python 3.10 has another TimeoutError, too.
            return False
        return True
