"""A clock that stands still whenever this router's own event loop does.

While a loop stands still, what its peers send waits to be read; when it goes on, its timers come before that. So how
long a peer has been silent is measured on this clock, never on the loop's: a router that was late itself says nothing
about others. This module must not know who is silent, or what follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

TICK_S = 0.1
LONGEST_TICK_S = 0.5
"""For how long a tick counts at most. After one that takes longer the loop stood still; a busy one is less late."""

log = logging.getLogger(__name__)


class AwakeClock:
    """Counts the time for which the running loop runs. It ticks from its making, inside that loop, until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._made_at = self._ticked_at = self._loop.time()
        self._counted_s = 0.0
        self._ticking = self._loop.call_later(TICK_S, self._tick)

    @property
    def still_s(self) -> float:
        """Seconds for which the loop has stood still since the clock was made."""
        now = self._loop.time()
        return max(0.0, now - self._made_at - self._time_at(now))

    def time(self) -> float:
        """Seconds for which the loop has run since the clock was made; never goes back."""
        return self._time_at(self._loop.time())

    async def wait(self, futures: Sequence[asyncio.Future[Any]], timeout_s: float) -> None:
        """Waits until one of the futures is done, or the loop has run for `timeout_s` seconds."""
        until = self.time() + timeout_s
        while (left := until - self.time()) > 0 and not any(future.done() for future in futures):
            await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """Ends the ticks. The clock must not be asked after that."""
        self._ticking.cancel()

    def _time_at(self, now: float) -> float:
        # The tick that is under way may be late already, with other timers ahead of it.
        return self._counted_s + min(now - self._ticked_at, LONGEST_TICK_S)

    def _tick(self) -> None:
        now = self._loop.time()
        if (passed := now - self._ticked_at) > LONGEST_TICK_S:
            log.warning("the event loop stood still for %.1f s", passed)
        self._counted_s += min(passed, LONGEST_TICK_S)
        self._ticked_at = now
        self._ticking = self._loop.call_later(TICK_S, self._tick)
