"""Fair queueing of the waiting clients. Each client gets tokens in proportion to its weight, its own samples in order.

This is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996). A client's next sample
starts at a virtual time; each served sample moves that time on by its cost divided by the client's weight. The client
with the earliest start is next. The current virtual time is the start of the last sample served. A new client starts at
the current time, so a client saves up nothing while it is idle. A sample that leaves without being served costs
nothing. Every operation takes O(log clients). This module is pure: it must not know what a sample is, seats, clocks or
priorities.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_IDLE = 1024
"""The number of clients without a waiting sample that are remembered, because they were served ahead of others."""


class Place:
    """One waiting sample of one client."""

    __slots__ = ("client", "cost", "order", "size", "weight")

    def __init__(self, order: int, client: str, *, weight: int, cost: int, size: int) -> None:
        self.order = order
        """The place's number in the order of arrival. Within one client, the lowest number is first."""
        self.client = client
        self.weight = weight
        self.cost = cost
        """The tokens that serving the sample takes."""
        self.size = size
        """The part of the queue's bounds that the sample takes, in the caller's unit."""


P = TypeVar("P", bound=Place)


class Line(Generic[P]):
    """The waiting samples of one client."""

    __slots__ = ("client", "first", "places", "size", "start", "weight")

    def __init__(self, client: str, weight: int, start: float, first: int) -> None:
        self.client = client
        self.weight = weight
        self.start = start
        """The virtual time at which the client's next sample starts."""
        self.first = first
        """The order number of the client's first sample, which sorts clients with equal starts. That sample may have
        left already."""
        self.places: OrderedDict[int, P] = OrderedDict()  # By order number; samples leave at both ends and in between.
        self.size = 0

    def __lt__(self, other: Line[P]) -> bool:
        return (self.start, self.first) < (other.start, other.first)

    @property
    def share(self) -> float:
        """The part of the queue's bounds that the client takes, divided by its weight."""
        return self.size / self.weight

    @property
    def newest(self) -> P:
        return self.places[next(reversed(self.places))]


class FairQueue(Generic[P]):
    """The waiting samples of many clients."""

    def __init__(self) -> None:
        self.weights = 0
        """The sum of the weights of all clients with waiting samples."""
        self._count = 0
        self._lines: dict[str, Line[P]] = {}
        self._heap: list[Line[P]] = []
        """Every line once. No start is before `_now`, so an empty line at the head is no longer ahead of any other."""
        self._sizes: list[tuple[float, str]] = []
        """Pairs (-share, client). Every line is here at least once with a share that is not below its current one."""
        self._now = 0.0
        self._idle = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[P]:
        """Yield every sample, client by client."""
        for line in self._lines.values():
            yield from line.places.values()

    def add(self, place: P) -> None:
        """Add a sample behind the earlier samples of its client."""
        line = self._lines.get(place.client) or self._open(place)
        if not line.places:
            self._idle -= 1
            self.weights += line.weight
        line.places[place.order] = place
        line.size += place.size
        self._count += 1
        self._note_size(line)

    def sort(self, client: str) -> None:
        """Sort a client's samples by arrival, after older samples have been added again."""
        if (line := self.line(client)) is not None:
            line.places = OrderedDict(sorted(line.places.items()))

    def head(self) -> P | None:
        """Return the sample whose turn it is; None if none waits."""
        while self._heap:
            line = self._heap[0]
            if not line.places:
                self._forget(heapq.heappop(self._heap))
            elif (first := next(iter(line.places))) != line.first:
                line.first = first
                heapq.heapreplace(self._heap, line)
            else:
                return line.places[first]
        return None

    def serve(self, place: P) -> None:
        """Remove the head and charge its cost to its client."""
        line = self._heap[0]
        assert next(iter(line.places)) == place.order, "only the head is served"
        self.remove(place)
        self._now = line.start
        line.start += place.cost / line.weight
        line.first = next(iter(line.places), line.first)
        heapq.heapreplace(self._heap, line)

    def remove(self, place: P) -> None:
        """Remove a sample without charging its cost to its client."""
        line = self._lines[place.client]
        del line.places[place.order]
        line.size -= place.size
        self._count -= 1
        if not line.places:
            self._idle += 1
            self.weights -= line.weight

    def line(self, client: str) -> Line[P] | None:
        """Return the waiting samples of one client; None if it has none."""
        line = self._lines.get(client)
        return line if line is not None and line.places else None

    def largest(self) -> Line[P] | None:
        """Return the line of the client with the largest `share`; None if no sample waits."""
        while self._sizes:
            size, client = self._sizes[0]
            line = self.line(client)
            if line is None:
                heapq.heappop(self._sizes)
            elif -line.share != size:
                heapq.heapreplace(self._sizes, (-line.share, client))
            else:
                return line
        return None

    def _open(self, place: P) -> Line[P]:
        if self._idle >= MAX_IDLE:
            self._forget_idle()
        line: Line[P] = Line(place.client, place.weight, self._now, place.order)
        self._lines[place.client] = line
        self._idle += 1
        heapq.heappush(self._heap, line)
        return line

    def _forget(self, line: Line[P]) -> None:
        del self._lines[line.client]
        self._idle -= 1

    def _forget_idle(self) -> None:
        self._heap = [line for line in self._heap if line.places]
        heapq.heapify(self._heap)
        self._lines = {line.client: line for line in self._heap}
        self._idle = 0

    def _note_size(self, line: Line[P]) -> None:
        heapq.heappush(self._sizes, (-line.share, line.client))
        if len(self._sizes) > 64 + 4 * len(self._lines):
            self._sizes = [(-line.share, line.client) for line in self._lines.values() if line.places]
            heapq.heapify(self._sizes)
