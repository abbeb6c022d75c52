"""The queue of samples that wait for a slot. It is bounded by count, tokens and time, and every wait ends.

`router.lanes` decides which sample is next and which request is shed. Nothing here touches a sample that has a seat. A
sample gets a ticket on arrival, which is its place in the queue. It keeps that place if it has to wait again because a
node had no room after all or failed. This module must not know nodes or gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from corun.errors import CorunError, DeadlineError, OverloadedError, UnavailableError
from corun.rpc.auth import ANYONE, Caller
from corun.types import Priority
from router.lanes import Lanes, Ticket
from router.nodes.members import Seat
from router.pace import Pace
from router.placement import Need

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
MISSING_RETRY_S = 1.0
"""The shortest retry delay while nodes are missing."""
_SPREAD = 0.5
"""The fraction by which retry delays differ, so that clients refused together do not come back together."""
_GOLDEN = 0.6180339887498949
"""The golden ratio's fraction. Its multiples, modulo 1, are spread evenly however many there are."""


class Pool(Protocol):
    """The source of seats."""

    def place(self, need: Need) -> Seat | None:
        """Claim room for a sample now. Return None if the sample has to wait."""

    def most_tokens(self) -> int:
        """Return the tokens of the largest sample for which an empty node in use has room; 0 while none is in use."""

    def awaited(self, num_tokens: int) -> str:
        """Return in words which nodes could hold `num_tokens` tokens but cannot be used now; empty if none could."""

    def missing(self) -> str:
        """Return why no sample can be placed at all; empty if samples can be placed."""


class AdmissionQueue:
    """Gives seats to tickets in order. `pump` or `pump_soon` has to be called when the pool changes.

    max_wait_s: the longest wait that a newcomer may expect before it is refused; 0 means no limit. It does not apply to
        the lowest class.
    node_wait_s: the longest wait while nodes are missing, or while a sample waits aside for a node that cannot be used.
    """

    def __init__(
        self, pool: Pool, *, max_samples: int, max_tokens: int, node_wait_s: float, max_wait_s: float = 0.0
    ) -> None:
        self.refused = 0
        """The number of refused or shed requests, since the router started."""
        self._pool = pool
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        self._node_wait_s = node_wait_s
        self._lanes = Lanes()
        self._arriving = 0
        self._orders = itertools.count()
        self._turns = itertools.count()
        self._giving_up: asyncio.TimerHandle | None = None
        self._giving_up_aside: asyncio.TimerHandle | None = None
        self._most_tokens = 0
        """The pool's `most_tokens` when the samples aside were last checked."""
        self._pumping: asyncio.Handle | None = None
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        """The number of samples without a seat."""
        return self._lanes.waiting

    @property
    def in_line(self) -> int:
        """The number of samples that wait in line, without those aside."""
        return self._lanes.in_line

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens of all samples without a seat."""
        return self._lanes.waiting_tokens

    @property
    def next_need(self) -> Need | None:
        """The need of the sample that is next; None if none waits in line."""
        head = self._lanes.head()
        return None if head is None else head.need

    def more_follow(self, kv_key: str) -> bool:
        """Return whether a waiting sample may get the KV with this key, too."""
        return bool(kv_key) and kv_key in self._lanes.waiting_for

    @contextmanager
    def arriving(
        self, samples: int, tokens: int, deadline: float, *, caller: Caller, priority: Priority
    ) -> Iterator[None]:
        """Count samples that have yet to `enter`. Raises OverloadedError at once, before any work is done for them, if
        `enter` would refuse them, or if they would not be seated before `deadline` or within `max_wait_s`."""
        if self.in_line:
            self._check_wait(samples, deadline, caller, priority)
        if (self.waiting or self._arriving) and not self._has_room(self._arriving + samples, tokens):
            size = self._size(samples, tokens)
            if not self._lanes.may_shed(size, caller, priority):
                raise self._full(samples)
        self._arriving += samples
        try:
            yield
        finally:
            self._arriving -= samples

    def enter(
        self, needs: Sequence[Need], *, caller: Caller = ANYONE, priority: Priority = Priority.NORMAL
    ) -> list[Ticket]:
        """Queue the samples of one request and return their tickets. Some may already have a seat.

        Raises OverloadedError, and queues none of them, if more samples would have to wait than the bounds allow and no
        other request may be shed for them.
        """
        party = [self._ticket(need, caller, priority) for need in needs]
        for ticket in party:
            ticket.party = party
            self._push(ticket)
        self.pump()
        waits = [ticket for ticket in party if ticket.is_waiting]
        if waits and not self._has_room() and not self._make_room(waits[0]):
            for ticket in party:
                self.leave(ticket)
            raise self._full(len(needs))
        return party

    async def seat(self, ticket: Ticket, deadline: float) -> Seat:
        """Wait for the ticket's seat and return it. The seat then belongs to the caller. If this raises anything, the
        ticket has left the queue.

        Raises:
            DeadlineError: there was no seat before `deadline`, on the loop's clock.
            OverloadedError: the request was shed for others.
            UnavailableError: for `node_wait_s` or until the deadline, nodes were missing, or the only nodes that could
                hold the sample could not be used.
        """
        assert ticket.granted is not None
        timer = asyncio.get_running_loop().call_at(deadline, self._expire, ticket)
        try:
            seat = await ticket.granted
        except BaseException:  # A cancelled caller may have been given a seat at the same moment.
            self.leave(ticket)
            raise
        finally:
            timer.cancel()
        ticket.granted = None
        return seat

    def again(self, ticket: Ticket, *, ran: bool = False) -> None:
        """Put a ticket whose seat was of no use back to its old place. If it `ran`, it goes before all tickets that
        have not run, of any class, because a running request must not wait for other classes."""
        ticket.ran = ticket.ran or ran
        self._push(ticket)
        self.pump()

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket for good, and give back a seat that its caller has not taken. It does nothing to a ticket
        that has left already."""
        was_waiting = ticket.is_waiting
        self._lanes.remove(ticket)
        ticket.party = ()  # Otherwise the tickets would refer to each other until the garbage collector finds them.
        granted, ticket.granted = ticket.granted, None
        if granted is not None and granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().close()
        if was_waiting:
            self.pump_soon()  # The next ticket may need less room than this one.

    def pump_soon(self) -> None:
        """Call `pump` after the code that runs now. By then, samples that lost their seats in it have queued again."""
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def pump(self) -> None:
        """Seat tickets in order, until the first one has to wait for room on a node in use, or nodes are missing. A
        ticket that no node in use could ever hold does not block the others: it steps aside, or fails if no other node
        could hold it either."""
        self._look_aside()
        while (head := self._lanes.head()) is not None:
            if (seat := self._pool.place(head.need)) is not None:
                self._grant(head, seat)
            elif self._pool.missing() or head.need.total <= self._pool.most_tokens():
                break
            elif self._pool.awaited(head.need.total):
                self._lanes.step_aside(head, _now())
            else:
                self._fail(head, UnavailableError(f"no decode node has KV room for {head.need.total} tokens"))
        is_stuck = self.in_line > 0 and bool(self._pool.missing())
        self._pace.waits(_now(), anyone=self.in_line > 0 and not is_stuck)  # An outage tells nothing about the pace.
        self._watch_for_nodes(is_stuck=is_stuck)
        self._watch_aside()

    def _pump_now(self) -> None:
        self._pumping = None
        self.pump()

    def _ticket(self, need: Need, caller: Caller, priority: Priority) -> Ticket:
        return Ticket(next(self._orders), need, caller, priority, self._size(1, need.num_prompt))

    def _size(self, samples: int, tokens: int) -> int:
        """Return the sum of the fractions of both bounds that this takes, in a unit that makes it an integer."""
        return samples * self._max_tokens + tokens * self._max_samples

    def _push(self, ticket: Ticket) -> None:
        ticket.granted = asyncio.get_running_loop().create_future()
        self._lanes.add(ticket)

    def _grant(self, ticket: Ticket, seat: Seat) -> None:
        assert ticket.granted is not None
        if ticket.granted.done():  # The caller was cancelled a moment ago, but the ticket has not left the queue yet.
            self._lanes.remove(ticket)
            seat.close()
            return
        self._lanes.serve(ticket)
        ticket.turn = next(self._turns) if ticket.turn is None else ticket.turn
        ticket.granted.set_result(seat)
        self._pace.granted(_now())

    def _fail(self, ticket: Ticket, error: CorunError) -> None:
        self._lanes.remove(ticket)
        if ticket.granted is not None and not ticket.granted.done():
            ticket.granted.set_exception(error)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.is_waiting:
            missing = self._pool.missing() or ("" if ticket.aside_at is None else self._lacks(ticket.need))
            late = DeadlineError(f"no slot became free before the deadline; {self.waiting} samples are waiting")
            self._fail(ticket, UnavailableError(missing) if missing else late)
            self.pump_soon()

    def _lacks(self, need: Need) -> str:
        """Return why a sample waits aside, in words."""
        nodes = self._pool.awaited(need.total) or "the one that was waited for is gone"
        return f"no decode node in use has KV room for {need.total} tokens: {nodes}"

    def _look_aside(self) -> None:
        """Put the samples aside that a node in use could now hold back in line."""
        most = self._pool.most_tokens() if self.waiting > self.in_line else 0
        if most > self._most_tokens:
            self._lanes.come_back(most)
        self._most_tokens = most

    def _watch_aside(self) -> None:
        """Run a timer for the sample that has waited aside longest."""
        if self.waiting > self.in_line and self._giving_up_aside is None:
            since = min(ticket.aside_at or 0.0 for ticket in self._lanes.aside())
            at = since + self._node_wait_s
            self._giving_up_aside = asyncio.get_running_loop().call_at(at, self._give_up_aside)

    def _give_up_aside(self) -> None:
        self._giving_up_aside = None
        over = _now() - self._node_wait_s
        for ticket in [ticket for ticket in self._lanes.aside() if (ticket.aside_at or 0.0) <= over]:
            self._fail(ticket, UnavailableError(self._lacks(ticket.need)))
        self._watch_aside()

    def _watch_for_nodes(self, *, is_stuck: bool) -> None:
        """Run a timer while samples wait and nodes are missing."""
        if is_stuck and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._node_wait_s, self._give_up)
        elif not is_stuck and self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        missing = self._pool.missing()
        while missing and (head := self._lanes.head()) is not None:
            self._fail(head, UnavailableError(missing))

    def _has_room(self, samples: int = 0, tokens: int = 0) -> bool:
        return self.waiting + samples <= self._max_samples and self.waiting_tokens + tokens <= self._max_tokens

    def _make_room(self, newcomer: Ticket) -> bool:
        """Shed requests until the queue is within its bounds. If that is not possible, shed none and return False."""
        parties: list[Sequence[Ticket]] = []
        while not self._has_room() and (victim := self._lanes.victim(newcomer)) is not None:
            parties.append([ticket for ticket in victim.party if ticket.is_waiting])
            for ticket in parties[-1]:
                self._lanes.remove(ticket)
        if not self._has_room():
            for ticket in itertools.chain.from_iterable(reversed(parties)):  # Put them back, the oldest first.
                self._lanes.add(ticket)
            return False
        for party in parties:
            self._shed(party)
        return True

    def _shed(self, party: Sequence[Ticket]) -> None:
        error = self._refusal("the queue is full: the request has to go for one of a higher class or a smaller client")
        for ticket in party:
            self._fail(ticket, error)

    def _check_wait(self, samples: int, deadline: float, caller: Caller, priority: Priority) -> None:
        longest = deadline - _now()
        if self._max_wait_s and priority is not Priority.LOW:
            longest = min(longest, self._max_wait_s)
        ahead = self._lanes.ahead(samples, caller, priority)
        wait = ahead * self._pace.interval_s
        if wait > longest:
            text = f"the wait for a slot would be about {wait:.1f} s, with {ahead:.0f} samples to go"
            raise self._refusal(f"{text}: longer than {max(0.0, longest):.1f} s", wait - longest)

    def _full(self, samples: int) -> OverloadedError:
        waiting = self.waiting + self._arriving
        text = f"the queue has no room for {samples} more samples: {waiting} of at most {self._max_samples} wait"
        return self._refusal(f"{text}, with {self.waiting_tokens} of at most {self._max_tokens} tokens")

    def _refusal(self, text: str, retry_s: float | None = None) -> OverloadedError:
        """Count a refusal and return its error. retry_s: seconds until the client should retry; None means the time in
        which all samples in line should get their seats."""
        self.refused += 1
        retry_s = self.in_line * self._pace.interval_s if retry_s is None else retry_s
        least = MISSING_RETRY_S if self._pool.missing() else MIN_RETRY_S
        spread = 1 + _SPREAD * (self.refused * _GOLDEN % 1)
        return OverloadedError(text, min(max(retry_s, least), MAX_RETRY_S / (1 + _SPREAD)) * spread)


def _now() -> float:
    return asyncio.get_running_loop().time()
