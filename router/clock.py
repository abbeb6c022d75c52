"""The router's two clocks: the loop's own, and one that stands still whenever this router's event loop stands still.

While the loop stands still, messages from its peers wait to be read. When the loop goes on, its timers run before those
messages are read. So the silence of a peer is measured on this clock, never on the loop's clock: a delay of the router
itself must not count as the silence of a peer. This module must not know who is silent, or what follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

TICK_S = 0.1
LONGEST_TICK_S = 0.5
"""The most seconds that one tick counts. If a tick takes longer, the loop stood still; a busy loop is less late."""

log = logging.getLogger(__name__)


def loop_time() -> float:
    """Return the time of the running loop's clock, in seconds. Deadlines are on this clock."""
    return asyncio.get_running_loop().time()


class AwakeClock:
    """Counts the time for which the event loop runs. Make it inside the running loop; it ticks until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._made_at = self._ticked_at = self._loop.time()
        self._counted_s = 0.0
        self._ticking = self._loop.call_later(TICK_S, self._tick)

    @property
    def still_s(self) -> float:
        """The seconds for which the loop has stood still since the clock was made."""
        now = self._loop.time()
        return max(0.0, now - self._made_at - self._time_at(now))

    def time(self) -> float:
        """Return the seconds for which the loop has run since the clock was made. The value never goes back."""
        return self._time_at(self._loop.time())

    async def wait(self, futures: Sequence[asyncio.Future[Any]], timeout_s: float) -> None:
        """Wait until one of the futures is done, or until the loop has run for `timeout_s` seconds."""
        until = self.time() + timeout_s
        while (left := until - self.time()) > 0 and not any(future.done() for future in futures):
            await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def stop(self) -> None:
        """End the ticks. The clock must not be read after that."""
        self._ticking.cancel()

    def _time_at(self, now: float) -> float:
        # The next tick may be late already, because other timers run before it.
        return self._counted_s + min(now - self._ticked_at, LONGEST_TICK_S)

    def _tick(self) -> None:
        now = self._loop.time()
        if (passed := now - self._ticked_at) > LONGEST_TICK_S:
            log.warning("the event loop stood still for %.1f s", passed)
        self._counted_s += min(passed, LONGEST_TICK_S)
        self._ticked_at = now
        self._ticking = self._loop.call_later(TICK_S, self._tick)
