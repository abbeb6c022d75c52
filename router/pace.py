"""How fast the queue moves, measured while it has to. Pure: it is told the time, in seconds on any clock."""

from __future__ import annotations

import math

MEMORY_S = 30.0
"""Of waiting, after which what was seen counts 1/e."""
SETTLE_S = 0.25
"""Of waiting before anything counts: who waits for an instant, while many slots become free at once, says nothing."""


class Pace:
    """The mean time between two samples that get seats while others wait; idle times say nothing about busy ones."""

    def __init__(self) -> None:
        self._grants = 0.0
        self._busy_s = 0.0
        self._began: float | None = None
        """Since when somebody has been waiting; None while nobody does."""
        self._since: float | None = None
        """Up to when this time of waiting is in the sums, from its first seat on."""

    @property
    def interval_s(self) -> float:
        """0 while nothing is known."""
        return self._busy_s / self._grants if self._grants > 0 else 0.0

    def waits(self, now: float, *, anyone: bool) -> None:
        """Somebody waits from now on, or nobody does."""
        if not anyone:
            self._began = self._since = None
        elif self._began is None:
            self._began = now
        else:
            self._pass(now)

    def granted(self, now: float) -> None:
        """A sample got a seat. One that never had to wait for it does not count."""
        if self._began is None:
            return
        if self._pass(now):
            self._grants += 1
        self._since = now

    def _pass(self, now: float) -> bool:
        """Takes the time since the last seat in; False if it does not count."""
        if self._began is None or self._since is None or now - self._began < SETTLE_S:
            return False
        kept = math.exp((self._since - now) / MEMORY_S)
        self._grants *= kept
        self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)
        self._since = now
        return True
