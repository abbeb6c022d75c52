"""The queue of samples that wait for a slot: first in, first out, bounded, and every wait ends.

A sample's place is a ticket drawn on arrival. One that has to wait again, because a node had no room after all or
failed, keeps its ticket and so comes before everybody who arrived later. This module must not know nodes or gRPC.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

from corun.errors import CorunError, DeadlineError, OverloadedError, UnavailableError
from router.members import Seat
from router.placement import Need

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
_SMOOTHING = 0.1
"""Weight of the newest interval in the running mean between two grants."""


class Pool(Protocol):
    """Where seats come from."""

    def place(self, need: Need) -> Seat | None:
        """Claims room for a sample now; None if it has to wait."""

    def could_hold(self, num_tokens: int) -> bool:
        """Whether an empty node would have room for so many tokens."""

    def missing(self) -> str:
        """Why nobody can be placed at all; empty if somebody can."""


class Ticket:
    """One sample's place in the queue, from its arrival until it leaves."""

    __slots__ = ("granted", "is_waiting", "need", "order")

    def __init__(self, order: int, need: Need) -> None:
        self.order = order
        self.need = need
        self.is_waiting = False
        self.granted: asyncio.Future[Seat] | None = None
        """Set from when the ticket starts to wait until its seat is taken."""

    def __lt__(self, other: Ticket) -> bool:
        return self.order < other.order


class AdmissionQueue:
    """Gives seats to tickets in order. `pump` has to be called when the pool changes."""

    def __init__(self, pool: Pool, *, max_samples: int, max_tokens: int, node_wait_s: float) -> None:
        self.waiting = 0
        """Samples without a seat."""
        self.waiting_tokens = 0
        """Their prompt tokens."""
        self._pool = pool
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        self._node_wait_s = node_wait_s
        self._heap: list[Ticket] = []  # Also holds tickets that have left; they are dropped at the head.
        self._orders = itertools.count()
        self._giving_up: asyncio.TimerHandle | None = None
        self._granted_at = 0.0
        self._grant_interval_s = 0.0

    def enter(self, needs: Sequence[Need]) -> list[Ticket]:
        """Tickets for the samples of one request, some perhaps already with a seat.

        Raises OverloadedError, and takes none of them, if more would have to wait than the bounds allow.
        """
        tickets = [Ticket(next(self._orders), need) for need in needs]
        for ticket in tickets:
            self._push(ticket)
        self.pump()
        if self.waiting > self._max_samples or self.waiting_tokens > self._max_tokens:
            for ticket in tickets:
                self.leave(ticket)
            raise self._full(len(needs))
        return tickets

    async def seat(self, ticket: Ticket, deadline: float) -> Seat:
        """The ticket's seat, which now belongs to the caller. Whatever is raised, the ticket has left the queue.

        Raises:
            DeadlineError: no seat before `deadline`, on the loop's clock.
            UnavailableError: nodes are missing, and were for `node_wait_s` or until the deadline.
        """
        assert ticket.granted is not None
        timer = asyncio.get_running_loop().call_at(deadline, self._expire, ticket)
        try:
            seat = await ticket.granted
        except BaseException:  # A cancelled caller may have been given a seat in the same moment.
            self.leave(ticket)
            raise
        finally:
            timer.cancel()
        ticket.granted = None
        return seat

    def again(self, ticket: Ticket) -> None:
        """Puts a ticket whose seat was of no use back to its old place."""
        self._push(ticket)
        self.pump()

    def leave(self, ticket: Ticket) -> None:
        """Takes a ticket out for good; a seat that nobody has taken goes back. Harmless for a ticket that is out."""
        self._unqueue(ticket)
        granted, ticket.granted = ticket.granted, None
        if granted is not None and granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().close()

    def pump(self) -> None:
        """Seats tickets in order for as long as there is room for the first."""
        while (head := self._head()) is not None:
            if (seat := self._pool.place(head.need)) is not None:
                self._grant(head, seat)
            elif self._is_hopeless(head.need):
                self._fail(head, UnavailableError(f"no decode node has KV room for {head.need.total} tokens"))
            else:
                break
        self._watch_for_nodes()

    def _push(self, ticket: Ticket) -> None:
        ticket.is_waiting = True
        ticket.granted = asyncio.get_running_loop().create_future()
        self.waiting += 1
        self.waiting_tokens += ticket.need.num_prompt
        heapq.heappush(self._heap, ticket)

    def _unqueue(self, ticket: Ticket) -> None:
        if ticket.is_waiting:
            ticket.is_waiting = False
            self.waiting -= 1
            self.waiting_tokens -= ticket.need.num_prompt

    def _head(self) -> Ticket | None:
        while self._heap and not self._heap[0].is_waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def _grant(self, ticket: Ticket, seat: Seat) -> None:
        assert ticket.granted is not None
        self._unqueue(ticket)
        if ticket.granted.done():  # Its caller was cancelled a moment ago and has yet to leave.
            seat.close()
            return
        ticket.granted.set_result(seat)
        self._note_grant()

    def _fail(self, ticket: Ticket, error: CorunError) -> None:
        self._unqueue(ticket)
        if ticket.granted is not None and not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.is_waiting:
            missing = self._pool.missing()
            late = DeadlineError(f"no slot became free before the deadline; {self.waiting} samples are waiting")
            self._fail(ticket, UnavailableError(missing) if missing else late)
            self.pump()

    def _is_hopeless(self, need: Need) -> bool:
        return not self._pool.missing() and not self._pool.could_hold(need.total)

    def _watch_for_nodes(self) -> None:
        """Runs a clock while samples wait and nodes are missing."""
        is_stuck = self._head() is not None and bool(self._pool.missing())
        if is_stuck and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._node_wait_s, self._give_up)
        elif not is_stuck and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        missing = self._pool.missing()
        while missing and (head := self._head()) is not None:
            self._fail(head, UnavailableError(missing))

    def _full(self, samples: int) -> OverloadedError:
        retry_s = min(max(self.waiting * self._grant_interval_s, MIN_RETRY_S), MAX_RETRY_S)
        text = f"the queue has no room for {samples} more samples: {self.waiting} of at most {self._max_samples} wait"
        return OverloadedError(f"{text}, with {self.waiting_tokens} of at most {self._max_tokens} tokens", retry_s)

    def _note_grant(self) -> None:
        now = asyncio.get_running_loop().time()
        interval = min(now - self._granted_at, 1.0)  # An idle queue says nothing about a busy one.
        self._grant_interval_s += _SMOOTHING * (interval - self._grant_interval_s)
        self._granted_at = now
