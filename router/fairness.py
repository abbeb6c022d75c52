"""Whose turn it is among the clients that wait: each gets tokens in proportion to its weight, its own samples in order.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996): a client's next sample starts
at a virtual time, and every sample that is served moves that on by its cost over the client's weight; the earliest
start is next. Time is that of the last sample served, and whoever comes anew starts now: idling saves up nothing. What
leaves unserved costs nothing. Every operation takes O(log clients). Pure: this module must not know what a sample is,
seats, clocks or priorities.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

MAX_IDLE = 1024
"""Clients without a waiting sample that are remembered for what they were served ahead of others."""


class Place:
    """One waiting sample of one client."""

    __slots__ = ("client", "cost", "order", "size", "weight")

    def __init__(self, order: int, client: str, *, weight: int, cost: int, size: int) -> None:
        self.order = order
        """Of arrival; of one client's samples, the lowest is first."""
        self.client = client
        self.weight = weight
        self.cost = cost
        """Tokens that serving it takes."""
        self.size = size
        """What it takes of the queue's bounds, in the caller's unit."""


P = TypeVar("P", bound=Place)


class Line(Generic[P]):
    """One client's samples."""

    __slots__ = ("client", "first", "places", "size", "start", "weight")

    def __init__(self, client: str, weight: int, start: float, first: int) -> None:
        self.client = client
        self.weight = weight
        self.start = start
        """Virtual time at which its next sample starts."""
        self.first = first
        """Order of its first sample, by which clients with equal starts go; perhaps of one that has left."""
        self.places: OrderedDict[int, P] = OrderedDict()  # By order: samples leave at both ends and in between.
        self.size = 0

    def __lt__(self, other: Line[P]) -> bool:
        return (self.start, self.first) < (other.start, other.first)

    @property
    def share(self) -> float:
        """How much of the queue it takes, for its weight."""
        return self.size / self.weight

    @property
    def newest(self) -> P:
        return self.places[next(reversed(self.places))]


class FairQueue(Generic[P]):
    """The waiting samples of many clients."""

    def __init__(self) -> None:
        self.weights = 0
        """Of all clients with waiting samples, summed."""
        self._count = 0
        self._lines: dict[str, Line[P]] = {}
        self._heap: list[Line[P]] = []
        """Every line once. No start is before `_now`: an empty line that comes first is no longer ahead of anybody."""
        self._sizes: list[tuple[float, str]] = []
        """(-share, client), for each line at least once with no less than its share."""
        self._now = 0.0
        self._idle = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[P]:
        """Every sample, client by client."""
        for line in self._lines.values():
            yield from line.places.values()

    def add(self, place: P) -> None:
        """Takes a sample in, behind those of its client that came before."""
        line = self._lines.get(place.client) or self._open(place)
        if not line.places:
            self._idle -= 1
            self.weights += line.weight
        line.places[place.order] = place
        line.size += place.size
        self._count += 1
        self._note_size(line)

    def sort(self, client: str) -> None:
        """Puts a client's samples in the order of their arrival, after old ones have been added again."""
        if (line := self.line(client)) is not None:
            line.places = OrderedDict(sorted(line.places.items()))

    def head(self) -> P | None:
        """The sample whose turn it is."""
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
        """Takes the head out, at its client's cost."""
        line = self._heap[0]
        assert next(iter(line.places)) == place.order, "only the head is served"
        self.remove(place)
        self._now = line.start
        line.start += place.cost / line.weight
        line.first = next(iter(line.places), line.first)
        heapq.heapreplace(self._heap, line)

    def remove(self, place: P) -> None:
        """Takes a sample out that is not served."""
        line = self._lines[place.client]
        del line.places[place.order]
        line.size -= place.size
        self._count -= 1
        if not line.places:
            self._idle += 1
            self.weights -= line.weight

    def line(self, client: str) -> Line[P] | None:
        """What waits of one client; None if nothing does."""
        line = self._lines.get(client)
        return line if line is not None and line.places else None

    def largest(self) -> Line[P] | None:
        """The client that takes most of the queue for its weight."""
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
