"""Measure how fast the queue moves while samples wait. This module is pure: callers pass the time, in seconds on any
clock."""

from __future__ import annotations

import math

MEMORY_S = 30.0
"""The seconds of waiting after which an earlier measurement counts only 1/e."""
SETTLE_S = 0.25
"""The seconds of waiting before anything counts. A short wait, while many slots become free at once, tells nothing."""


class Pace:
    """The mean time between two seats that are granted while samples wait. Idle times are left out, because they tell
    nothing about busy times."""

    def __init__(self) -> None:
        self._grants = 0.0
        self._busy_s = 0.0
        self._began: float | None = None
        """The time since which some sample has been waiting; None while none waits."""
        self._since: float | None = None
        """The time up to which the current period of waiting is in the sums; None before its first seat."""

    @property
    def interval_s(self) -> float:
        """The mean seconds between two seats; 0 while nothing is known."""
        return self._busy_s / self._grants if self._grants > 0 else 0.0

    def waits(self, now: float, *, anyone: bool) -> None:
        """Note whether any sample waits from `now` on."""
        if not anyone:
            self._began = self._since = None
        elif self._began is None:
            self._began = now
        else:
            self._pass(now)

    def granted(self, now: float) -> None:
        """Note that a sample got a seat. A seat does not count if no sample had been waiting."""
        if self._began is None:
            return
        if self._pass(now):
            self._grants += 1
        self._since = now

    def _pass(self, now: float) -> bool:
        """Add the time since the last update to the sums. Return False if that time does not count."""
        if self._began is None or self._since is None or now - self._began < SETTLE_S:
            return False
        kept = math.exp((self._since - now) / MEMORY_S)
        self._grants *= kept
        self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)
        self._since = now
        return True
