"""The order of the waiting samples, and which requests are shed when too many wait.

First come the samples that ran and whose node failed, then the priority classes in order. Within a class, first come
the samples that had a seat and could not use it, in the order of their first seat; then clients share by tokens
(`router.fairness`).

To make room for a newcomer, a request of a lower class may be shed, lowest class first, or one of the newcomer's own
class. Within a class it is the newest request of the client that takes most of that class. Among the samples with which
the newcomer itself waits, that happens only while the newcomer's client takes less. A request of which a sample has had
a seat is never shed.

A sample steps aside when it is its turn but only nodes that cannot be used now could hold it. It keeps its place and
its part of the queue's bounds, and blocks no other sample until it comes back. In each class, samples aside are shed
before those in line.
This module is pure: it must not know nodes, clocks or what a seat is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from corun.rpc.auth import Caller
from corun.types import Priority
from router.fairness import FairQueue, Line, Place
from router.placement import Need

if TYPE_CHECKING:
    import asyncio

    from router.nodes.members import Seat


class Ticket(Place):
    """One sample's place in the queue, from its arrival until it leaves."""

    __slots__ = ("aside_at", "granted", "is_waiting", "need", "party", "priority", "ran", "turn")

    def __init__(self, order: int, need: Need, caller: Caller, priority: Priority, size: int) -> None:
        super().__init__(order, caller.name, weight=caller.weight, cost=need.total, size=size)
        self.need = need
        self.priority = priority
        self.party: Sequence[Ticket] = ()
        """All tickets of the same request."""
        self.turn: int | None = None
        """The number of the ticket's first seat, counting all seats granted; None before it. It is the ticket's place
        if it has to wait again."""
        self.ran = False
        """Whether a run of the sample has begun, so that its client may have output."""
        self.is_waiting = False
        self.aside_at: float | None = None
        """The time since which the ticket waits aside, on the caller's clock; None if it is not aside."""
        self.granted: asyncio.Future[Seat] | None = None
        """The future of the ticket's seat. It exists from when the ticket starts to wait until its seat is taken."""


class Returned:
    """Tickets that had a seat and wait again, in the order of their first seats."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Ticket]] = []  # It also holds tickets that have left; they are dropped at the head.
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ticket: Ticket) -> None:
        assert ticket.turn is not None
        heapq.heappush(self._heap, (ticket.turn, ticket))
        self._count += 1

    def head(self) -> Ticket | None:
        while self._heap and not self._heap[0][1].is_waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def serve(self, ticket: Ticket) -> None:
        """Remove the head."""
        assert self._heap[0][1] is ticket
        heapq.heappop(self._heap)
        self._count -= 1

    def remove(self, ticket: Ticket) -> None:
        self._count -= 1
        if self._heap[0][1] is ticket:  # The ticket may be added again, and must not be in the heap twice.
            heapq.heappop(self._heap)


class Lane:
    """The waiting tickets of one class."""

    def __init__(self) -> None:
        self.fresh: FairQueue[Ticket] = FairQueue()
        """The tickets that never had a seat."""
        self.returned = Returned()
        self.aside: FairQueue[Ticket] = FairQueue()

    def __len__(self) -> int:
        """Return the number of tickets in line, without those aside."""
        return len(self.fresh) + len(self.returned)

    def head(self) -> Ticket | None:
        return self.returned.head() or self.fresh.head()


class Lanes:
    """All waiting tickets, ordered by class."""

    def __init__(self) -> None:
        self.waiting = 0
        """The number of waiting samples, including those aside."""
        self.waiting_tokens = 0
        """The prompt tokens of all waiting samples."""
        self.waiting_for: Counter[str] = Counter()
        """The number of waiting samples that may get the same KV, by KV key. The empty key is that of samples that
        share no KV."""
        self._front = Returned()
        self._lanes = {priority: Lane() for priority in Priority}

    def head(self) -> Ticket | None:
        """Return the ticket whose turn it is; None if none waits in line."""
        heads = itertools.chain([self._front.head()], (lane.head() for lane in self._lanes.values()))
        return next((head for head in heads if head is not None), None)

    def add(self, ticket: Ticket) -> None:
        ticket.is_waiting = True
        self.waiting += 1
        self.waiting_tokens += ticket.need.num_prompt
        self.waiting_for[ticket.need.kv_key] += 1
        self._place(ticket).add(ticket)

    def serve(self, ticket: Ticket) -> None:
        """Remove the head and charge its cost to its client."""
        self._leave(ticket)
        self._place(ticket).serve(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket. It does nothing if the ticket does not wait."""
        if ticket.is_waiting:
            self._leave(ticket)
            self._place(ticket).remove(ticket)

    @property
    def in_line(self) -> int:
        """The number of samples that wait in line, without those aside."""
        return self.waiting - sum(len(lane.aside) for lane in self._lanes.values())

    def aside(self) -> Iterator[Ticket]:
        """Yield the tickets that stepped aside, in no order."""
        return itertools.chain.from_iterable(lane.aside for lane in self._lanes.values())

    def step_aside(self, head: Ticket, now: float) -> None:
        """Move the head aside, so that the tickets behind it go first until it comes back."""
        self.remove(head)
        head.aside_at = now
        self.add(head)

    def come_back(self, most_tokens: int) -> None:
        """Put the samples aside that need at most `most_tokens` tokens back to their old places in line."""
        able = [ticket for ticket in self.aside() if ticket.need.total <= most_tokens]
        for ticket in able:
            self.remove(ticket)
            ticket.aside_at = None
            self.add(ticket)
        for priority, client in dict.fromkeys((ticket.priority, ticket.client) for ticket in able):
            self._lanes[priority].fresh.sort(client)

    def victim(self, newcomer: Ticket) -> Ticket | None:
        """Return a ticket whose request is the next to be shed for the newcomer; None if no request may be. The
        newcomer must already be waiting. A newcomer aside takes no place in line, so only tickets aside are shed for
        it."""
        place = self._place(newcomer)
        for priority in reversed(Priority):
            lane = self._lanes[priority]
            for queue in (lane.aside, lane.fresh) if newcomer.aside_at is None else (lane.aside,):
                line = queue.largest()
                if queue is place:
                    own = queue.line(newcomer.client)
                    is_smaller = line is not None and own is not None and own.share < line.share
                    return _sheddable(line) if is_smaller else None
                if (victim := _sheddable(line)) is not None:
                    return victim
        return None

    def may_shed(self, size: int, caller: Caller, priority: Priority) -> bool:
        """Return False only if certainly no request could be shed for a newcomer of this size. The newcomer is not yet
        in the queue."""
        if any(len(lane.fresh) + len(lane.aside) for other, lane in self._lanes.items() if _is_lower(other, priority)):
            return True
        if len(self._lanes[priority].aside):
            return True
        fresh = self._lanes[priority].fresh
        own, largest = fresh.line(caller.name), fresh.largest()
        size += own.size if own else 0
        return largest is not None and largest is not own and size / caller.weight < largest.share

    def ahead(self, samples: int, caller: Caller, priority: Priority) -> float:
        """Return how many samples get seats up to and including the newcomer's last one, if no others arrive."""
        higher = sum(len(lane) for other, lane in self._lanes.items() if _is_lower(priority, other))
        lane = self._lanes[priority]
        own = lane.fresh.line(caller.name)
        weights = lane.fresh.weights + (0 if own else caller.weight)
        mine = samples + (len(own.places) if own else 0)
        in_lane = min(len(lane.fresh) + samples, mine * weights / caller.weight)
        return len(self._front) + higher + len(lane.returned) + in_lane

    def _leave(self, ticket: Ticket) -> None:
        ticket.is_waiting = False
        self.waiting -= 1
        self.waiting_tokens -= ticket.need.num_prompt
        self.waiting_for[ticket.need.kv_key] -= 1
        if not self.waiting_for[ticket.need.kv_key]:
            del self.waiting_for[ticket.need.kv_key]

    def _place(self, ticket: Ticket) -> FairQueue[Ticket] | Returned:
        lane = self._lanes[ticket.priority]
        if ticket.aside_at is not None:
            return lane.aside
        if ticket.ran:
            return self._front
        return lane.fresh if ticket.turn is None else lane.returned


def _is_lower(one: Priority, other: Priority) -> bool:
    order = list(Priority)
    return order.index(one) > order.index(other)


def _sheddable(line: Line[Ticket] | None) -> Ticket | None:
    """Return the newest of a client's tickets if no sample of its request has had a seat; otherwise None."""
    if line is None or any(ticket.turn is not None for ticket in line.newest.party):
        return None
    return line.newest
