"""How fast the queue moves, measured while it has to. Pure: it is told the time, in seconds on any clock."""

from __future__ import annotations

import math

MEMORY_S = 30.0
"""Of waiting, after which what was seen counts 1/e."""


class Pace:
    """The mean time between two samples that get seats while others wait; idle times say nothing about busy ones."""

    def __init__(self) -> None:
        self._grants = 0.0
        self._busy_s = 0.0
        self._since: float | None = None
        """Up to when the current time of waiting is in the sums; None while nobody waits."""

    @property
    def interval_s(self) -> float:
        """0 while nothing is known."""
        return self._busy_s / self._grants if self._grants > 0 else 0.0

    def waits(self, now: float, *, anyone: bool) -> None:
        """Somebody waits from now on, or nobody does."""
        if self._since is not None:
            self._pass(now)
        self._since = now if anyone else None

    def granted(self, now: float) -> None:
        """A sample got a seat. One that never had to wait for it does not count."""
        if self._since is not None:
            self._pass(now)
            self._grants += 1

    def _pass(self, now: float) -> None:
        assert self._since is not None
        kept = math.exp((self._since - now) / MEMORY_S)
        self._grants *= kept
        self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)
        self._since = now
