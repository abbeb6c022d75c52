"""Numbers that a process keeps about its own work, cheap enough for every request.

The code that does the work writes them in the event loop, without a lock. This module must not know what shows them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The bounds, in seconds, for work that takes from milliseconds to minutes."""
STEPS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
"""The bounds, in seconds, for the time of a step, or of a token."""


class Histogram:
    """Counts how many values fell into each interval."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = tuple(bounds)  # The upper ends of the intervals, inclusive, ascending.
        self._counts = [0] * (len(self._bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper end with the number of values that are at most that; the last end is "+Inf"."""
        ends = [*(repr(bound) for bound in self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))


class Rate:
    """The rate of work in units per second. Older pieces of work count less and less."""

    _KEPT = 0.8
    """The share of the sums so far that is kept with every new piece of work."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def note(self, units: float, seconds: float) -> None:
        self._units = self._KEPT * self._units + units
        self._seconds = self._KEPT * self._seconds + seconds

    def seconds_for(self, units: float) -> float:
        """Return how many seconds so many units take; 0 while nothing is known."""
        return units * self._seconds / self._units if self._units else 0.0
