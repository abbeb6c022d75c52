"""The queue of samples that wait for a slot: bounded by count, tokens and time, and every wait ends.

Who is next and who is shed is said by `router.lanes`; nothing here touches a sample that has a seat. A ticket, drawn on
arrival, is a place: who has to wait again, because a node had no room after all or failed, keeps it. This module must
not know nodes or gRPC.
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
"""The least while nodes are missing."""
_SPREAD = 0.5
"""Part by which retry delays differ, so that those who are refused together do not come back together."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly however many there are."""


class Pool(Protocol):
    """Where seats come from."""

    def place(self, need: Need) -> Seat | None:
        """Claims room for a sample now; None if it has to wait."""

    def most_tokens(self) -> int:
        """Tokens of the largest sample for which an empty node in use has room; 0 while none is in use."""

    def awaited(self, num_tokens: int) -> str:
        """Which nodes would have room for so many tokens but cannot be used now, in words; empty if none would."""

    def missing(self) -> str:
        """Why nobody can be placed at all; empty if somebody can."""


class AdmissionQueue:
    """Gives seats to tickets in order. `pump` or `pump_soon` has to be called when the pool changes.

    max_wait_s: longest wait that a newcomer may have to expect, but one of the lowest class; 0: any.
    node_wait_s: longest wait while nodes are missing, or aside for a node that cannot be used.
    """

    def __init__(
        self, pool: Pool, *, max_samples: int, max_tokens: int, node_wait_s: float, max_wait_s: float = 0.0
    ) -> None:
        self.refused = 0
        """Requests for which there was no room, or none any more, since the router started."""
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
        """What the pool said when those aside were last looked at."""
        self._pumping: asyncio.Handle | None = None
        self._pace = Pace()

    @property
    def waiting(self) -> int:
        """Samples without a seat."""
        return self._lanes.waiting

    @property
    def in_line(self) -> int:
        """Those of them that a node in use could hold."""
        return self._lanes.in_line

    @property
    def waiting_tokens(self) -> int:
        """Their prompt tokens."""
        return self._lanes.waiting_tokens

    @property
    def next_need(self) -> Need | None:
        """Of the sample that is next; None if nobody waits."""
        head = self._lanes.head()
        return None if head is None else head.need

    def more_follow(self, kv_key: str) -> bool:
        """Whether somebody waits who may get this KV, too."""
        return bool(kv_key) and kv_key in self._lanes.waiting_for

    @contextmanager
    def arriving(
        self, samples: int, tokens: int, deadline: float, *, caller: Caller, priority: Priority
    ) -> Iterator[None]:
        """Counts samples that have yet to `enter`. Raises OverloadedError at once, before any work is done for them, if
        they would be refused there, or not be seated before `deadline` or within `max_wait_s`."""
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
        """Tickets for the samples of one request, some perhaps already with a seat.

        Raises OverloadedError, and takes none of them, if more would have to wait than the bounds allow, and nobody
        has to go for them.
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
        """The ticket's seat, which now belongs to the caller. Whatever is raised, the ticket has left the queue.

        Raises:
            DeadlineError: no seat before `deadline`, on the loop's clock.
            OverloadedError: the request had to go for others.
            UnavailableError: nodes are missing, or the only ones that could hold it cannot be used, and that was so for
                `node_wait_s` or until the deadline.
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

    def again(self, ticket: Ticket, *, ran: bool = False) -> None:
        """Puts a ticket whose seat was of no use back to its old place; one that `ran` before everybody who has not:
        no class reaches into a request that is running."""
        ticket.ran = ticket.ran or ran
        self._push(ticket)
        self.pump()

    def leave(self, ticket: Ticket) -> None:
        """Takes a ticket out for good; a seat that nobody has taken goes back. Harmless for a ticket that is out."""
        was_waiting = ticket.is_waiting
        self._lanes.remove(ticket)
        ticket.party = ()  # Else tickets would hold each other until they are found by the garbage collector.
        granted, ticket.granted = ticket.granted, None
        if granted is not None and granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().close()
        if was_waiting:
            self.pump_soon()  # What it waited for may be more than the next one needs.

    def pump_soon(self) -> None:
        """Pumps once what runs now is done: by then, who lost its seat in it has queued up again."""
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def pump(self) -> None:
        """Seats tickets in order for as long as there is room for the first, or no node in use that could have any."""
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
        self._pace.waits(_now(), anyone=self.in_line > 0 and not is_stuck)  # An outage says nothing about the pace.
        self._watch_for_nodes(is_stuck=is_stuck)
        self._watch_aside()

    def _pump_now(self) -> None:
        self._pumping = None
        self.pump()

    def _ticket(self, need: Need, caller: Caller, priority: Priority) -> Ticket:
        return Ticket(next(self._orders), need, caller, priority, self._size(1, need.num_prompt))

    def _size(self, samples: int, tokens: int) -> int:
        """Parts of both bounds together, in a unit that makes them integers."""
        return samples * self._max_tokens + tokens * self._max_samples

    def _push(self, ticket: Ticket) -> None:
        ticket.granted = asyncio.get_running_loop().create_future()
        self._lanes.add(ticket)

    def _grant(self, ticket: Ticket, seat: Seat) -> None:
        assert ticket.granted is not None
        if ticket.granted.done():  # Its caller was cancelled a moment ago and has yet to leave.
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
        """Why a sample waits aside, in words."""
        nodes = self._pool.awaited(need.total) or "the one that was waited for is gone"
        return f"no decode node in use has KV room for {need.total} tokens: {nodes}"

    def _look_aside(self) -> None:
        """Lets those come back that a node in use could hold by now."""
        most = self._pool.most_tokens() if self.waiting > self.in_line else 0
        if most > self._most_tokens:
            self._lanes.come_back(most)
        self._most_tokens = most

    def _watch_aside(self) -> None:
        """Runs a clock for the one that has waited aside longest."""
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
        """Runs a clock while samples wait and nodes are missing."""
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
        """Sheds requests until the queue is within its bounds; none if that would not do."""
        parties: list[Sequence[Ticket]] = []
        while not self._has_room() and (victim := self._lanes.victim(newcomer)) is not None:
            parties.append([ticket for ticket in victim.party if ticket.is_waiting])
            for ticket in parties[-1]:
                self._lanes.remove(ticket)
        if not self._has_room():
            for ticket in itertools.chain.from_iterable(reversed(parties)):  # Back to where they were: oldest first.
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
        """retry_s: None: when all who wait now have their seats."""
        self.refused += 1
        retry_s = self.in_line * self._pace.interval_s if retry_s is None else retry_s
        least = MISSING_RETRY_S if self._pool.missing() else MIN_RETRY_S
        spread = 1 + _SPREAD * (self.refused * _GOLDEN % 1)
        return OverloadedError(text, min(max(retry_s, least), MAX_RETRY_S / (1 + _SPREAD)) * spread)


def _now() -> float:
    return asyncio.get_running_loop().time()
