"""The queue of samples that wait for room on nodes: who is next, who is refused, and the end of every wait. A score is
one of them that needs no decode node.

Order: first the samples that ran and lost their node, then the priority classes. Within a class, first the samples that
had a placement and could not use it, in the order of their first placements; then the clients share by tokens
(`FairShare`). The order is a key that each entry gets once, so the queue is one heap.

Bounds: a request is refused on arrival if its client would hold too much of the queue (`CLIENT_PART`), or if its
samples would wait too long. No client can keep the others out, so nobody who waits is sent away for a newcomer.

A sample steps aside while nodes are missing, or while only nodes that cannot be used now could hold it: it keeps its
place and blocks no other. This module must not know gRPC, or how nodes are chosen.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from corun.config.fields import RouterConfig
from corun.errors import CorunError, DeadlineError, OverloadedError, UnavailableError
from corun.rpc.auth import ANYONE, Caller
from corun.types import Priority
from router.clock import loop_time
from router.nodes.node import PrefillPlacement
from router.nodes.registry import Registry
from router.placement import Need

T = TypeVar("T")

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
MISSING_RETRY_S = 1.0
"""The shortest retry delay while nodes are missing."""
PACE_MEMORY = 128
"""The number of placements over which the pace is the mean."""
CLIENT_PART = 2
"""A client's part of the queue plus that of all may be this many times its bounds. So one client alone may fill it to
its bounds, and n of them may each hold 2 / (n + 1) of that: there is always room for another."""
MAX_CLIENTS = 1024
"""The number of clients after which those without a waiting sample are forgotten."""
_SPREAD = 0.5
"""The fraction by which retry delays differ, so that clients refused together do not come back together."""
_GOLDEN = 0.6180339887498949  # Its multiples, modulo 1, are spread evenly however many there are.
_CLASSES = {priority: number for number, priority in enumerate(Priority, start=1)}
_RAN = 0
"""The class of samples that have run, before all others: a client may already have output of theirs."""


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One sample, or score, in the queue, from its arrival until it leaves."""

    number: int
    """The entry's number in the order of arrival."""
    need: Need
    caller: Caller
    priority: Priority
    start: float
    """The virtual time at which the sample starts among its class (`FairShare`)."""
    first_placement: int | None = None
    """The number of the entry's first placement among all placements; None before it."""
    ran: bool = False
    """Whether an attempt has begun, so that the client may have output."""
    is_waiting: bool = False
    granted: asyncio.Future[PrefillPlacement] | None = None
    """The future of the placement, from the start of a wait until the placement is taken."""

    @property
    def rank(self) -> int:
        """The number of the entry's class."""
        return _RAN if self.ran else _CLASSES[self.priority]

    @property
    def key(self) -> tuple[int, bool, float, int]:
        """The entry's place in the order: class, whether it never had a placement, place among such, and number."""
        if self.first_placement is None:
            return self.rank, True, self.start, self.number
        return self.rank, False, self.first_placement, self.number

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller of a waiting entry was cancelled a moment ago, so that the entry is about to leave."""
        return self.granted is not None and self.granted.done()


class FairShare:
    """The shares of the clients of one class: tokens in proportion to their weights, each client's samples in order.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A sample starts, in virtual time, where the
    one before it of its client ends: after its tokens divided by the client's weight. The earliest start is next, and
    it is the current time. A client that comes back starts at the current time, so idling saves up nothing. Samples
    that leave unserved cost nothing once none of their client's samples waits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: Counter[str] = Counter()
        """The number of samples by client that have not had a placement."""
        self._ends: dict[str, float] = {}  # The virtual time at which each client's newest sample ends.
        self._served: dict[str, float] = {}  # The same, of its last sample that was served.
        self._weights: dict[str, int] = {}  # Of the clients with waiting samples; a file may change them meanwhile.

    @property
    def weights(self) -> int:
        """The sum of the weights of the clients with waiting samples."""
        return sum(self._weights.values())

    def enter(self, caller: Caller, tokens: int) -> float:
        """Add a sample, and return its start."""
        if not self.waiting[caller.name] and len(self._ends) >= MAX_CLIENTS:
            self._ends = {name: end for name, end in self._ends.items() if name in self.waiting}
            self._served = {name: end for name, end in self._served.items() if name in self.waiting}
        self._weights[caller.name] = caller.weight
        self.waiting[caller.name] += 1
        start = max(self.now, self.end(caller.name))
        self._ends[caller.name] = start + tokens / caller.weight
        return start

    def leave(self, entry: QueueEntry, *, is_served: bool) -> None:
        """Remove a sample that has not had a placement before. is_served: it has got one now."""
        name = entry.caller.name
        if is_served:
            self.now = max(self.now, entry.start)
            end = entry.start + entry.need.total / entry.caller.weight
            self._served[name] = max(end, self._served.get(name, 0.0))  # One that waited aside is served late.
        _add(self.waiting, name, -1)
        if name not in self.waiting:
            del self._weights[name]
            self._ends[name] = self._served.get(name, 0.0)

    def end(self, name: str) -> float:
        """Return the virtual time at which a client's newest sample ends."""
        return self._ends.get(name, 0.0)

    def forget(self, name: str, end: float) -> None:
        """Let a client's newest samples, which have left and began after `end`, cost nothing, served or not."""
        self._ends[name], self._served[name] = end, min(end, self._served.get(name, 0.0))


class Pace:
    """The mean time between two placements while samples wait, in seconds on any clock."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._count = 0
        self._last: float | None = None
        """The time of the last placement, or since which samples wait; None while none waits."""

    def interval_s(self, now: float) -> float:
        """Return the mean seconds between placements: more if the next is late, 0 while nothing is known."""
        late_s = 0.0 if self._last is None else now - self._last - self._mean_s
        return self._mean_s + max(0.0, late_s) / (self._count + 1) if self._count else 0.0

    def waits(self, now: float, *, anyone: bool) -> None:
        """Note whether any sample waits from `now` on. Idle times are left out: they tell nothing of busy ones."""
        self._last = (now if self._last is None else self._last) if anyone else None

    def granted(self, now: float) -> None:
        """Note a placement. It does not count if no sample had been waiting."""
        if self._last is not None:
            self._count = min(self._count + 1, PACE_MEMORY)
            self._mean_s += (now - self._last - self._mean_s) / self._count
            self._last = now


class SampleQueue:
    """Gives placements to entries in order. `pump` or `pump_soon` has to be called when the pool changes."""

    def __init__(self, pool: Registry, config: RouterConfig) -> None:
        self.refused = 0
        """The number of refused requests, since the router started."""
        self.waiting = 0
        """The number of samples without a placement."""
        self.tokens_to_compute = 0
        """The prompt tokens of all samples without a placement, those of samples that share their KV once."""
        self._pool = pool
        self._config = config
        self._heap: list[tuple[tuple[int, bool, float, int], QueueEntry]] = []
        """The entries in line, and some that have left: those are dropped when they are first."""
        self._aside: dict[QueueEntry, asyncio.TimerHandle] = {}
        """The entries aside, each with the timer that ends its wait."""
        self._shares = {priority: FairShare() for priority in Priority}
        self._samples_of: Counter[str] = Counter()  # By client, as the next one.
        self._tokens_of: Counter[str] = Counter()
        self._waiting_for: Counter[str] = Counter()  # Samples by KV key.
        self._ranks: Counter[int] = Counter()  # Samples by rank.
        self._arriving: Counter[str] = Counter()  # Samples by client that have yet to enter.
        self._numbers = itertools.count()
        self._placements = itertools.count()
        self._pumping: asyncio.Handle | None = None
        self._is_missing = False  # Whether nodes were missing, and samples waited, when `pump` last looked.
        self._pace = Pace()

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens of all samples without a placement."""
        return self._tokens_of.total()

    @property
    def head(self) -> QueueEntry | None:
        """The first entry in line; None if none waits there."""
        while self._heap and not self._is_in_line(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    @property
    def in_line(self) -> int:
        """The number of samples that wait in line, without those aside."""
        return self.waiting - len(self._aside)

    def callers(self) -> Iterator[Caller]:
        """Yield the client of each sample that has no placement. It takes time for each, so it is for people only."""
        in_line = (entry for _, entry in self._heap if self._is_in_line(entry))
        # An entry that has left and come back may be in the heap twice.
        return (entry.caller for entry in dict.fromkeys(itertools.chain(in_line, self._aside)))

    def more_follow(self, kv_key: str) -> bool:
        """Return whether a waiting sample may get the KV with this key, too."""
        return bool(kv_key) and self._waiting_for[kv_key] > 0

    @contextmanager
    def arriving(
        self, samples: int, tokens: int, deadline: float, *, caller: Caller, priority: Priority
    ) -> Iterator[None]:
        """Count samples that have yet to `enter`. Raises OverloadedError at once, before any work is done for them, if
        `enter` would refuse them, or if they would not be placed before `deadline` or within `max_wait_s`. tokens: the
        least number of prompt tokens of each."""
        if self.in_line or (self._aside and self._is_missing):
            self._check_wait(samples, deadline, caller, priority)
        if (self.waiting or self._arriving.total()) and not self._has_room(caller, samples, samples * tokens):
            raise self._full()
        _add(self._arriving, caller.name, samples)
        try:
            yield
        finally:
            _add(self._arriving, caller.name, -samples)

    def enter(
        self, needs: Sequence[Need], *, caller: Caller = ANYONE, priority: Priority = Priority.NORMAL
    ) -> list[QueueEntry]:
        """Queue the samples of one request and return their entries. Some may already have a placement. Raises
        OverloadedError, and queues none of them, if more samples would have to wait than there is room for."""
        share = self._shares[priority]
        end = share.end(caller.name)
        entries = [
            QueueEntry(next(self._numbers), need, caller, priority, share.enter(caller, need.total)) for need in needs
        ]
        for entry in entries:
            self._wait(entry)
        self.pump()
        if any(entry.is_waiting for entry in entries) and not self._has_room(caller):
            for entry in entries:
                self.leave(entry)
            share.forget(caller.name, end)
            raise self._full()
        return entries

    async def place(self, entry: QueueEntry, deadline: float) -> PrefillPlacement:
        """Wait for the entry's placement and return it. It then belongs to the caller. If this raises anything, the
        entry has left the queue.

        Raises DeadlineError at `deadline`, on the loop's clock, or UnavailableError if the entry waits aside then or
        for `node_wait_s`.
        """
        assert entry.granted is not None
        timer = asyncio.get_running_loop().call_at(deadline, self._expire, entry)
        try:
            placement = await entry.granted
        except BaseException:  # A cancelled caller may have been given a placement at the same moment.
            self.leave(entry)
            raise
        finally:
            timer.cancel()
        entry.granted = None
        return placement

    def again(self, entry: QueueEntry, *, ran: bool = False) -> None:
        """Put an entry whose placement was of no use back to its old place. If it `ran`, it goes before all that have
        not run, of any class, because a running request must not wait for other classes."""
        entry.ran = entry.ran or ran
        self._wait(entry)
        self.pump()

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry, unless it has left, and give back a placement that its caller has not taken."""
        if entry.is_waiting:
            self._remove(entry)
            self.pump_soon()  # The next entry may need less room than this one.
        granted, entry.granted = entry.granted, None
        if granted is not None and granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().close()

    def run(self, entry: QueueEntry, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start the work of an entry. The entry leaves when the work ends, even if that is cancelled before its first
        step."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.leave(entry))
        return task

    def pump_soon(self) -> None:
        """Call `pump` after the code that runs now. By then, samples that lost placements in it have queued again."""
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def settle(self) -> None:
        """Do at once what `pump_soon` has promised, if anything."""
        if self._pumping is not None:
            self._pumping.cancel()
            self._pump_now()

    def _pump_now(self) -> None:
        self._pumping = None
        self.pump()

    def pump(self) -> None:
        """Place entries in order, until the first one has to wait for room on a node in use. An entry that no node in
        use could ever hold steps aside, or fails if no other node could hold it either. An abandoned entry leaves. A
        later call that `pump_soon` has promised still comes: what it is to see may change before it."""
        most_tokens = self._pool.most_tokens() if self._aside else 0
        for entry in [entry for entry in self._aside if entry.need.total <= most_tokens]:
            self._aside.pop(entry).cancel()
            self._line_up(entry)
        self._is_missing = bool(self.waiting and self._pool.missing())  # Asked once: it goes through all nodes.
        while (head := self.head) is not None:
            if head.is_abandoned:  # A placement would be given back at once, and everybody would hear of it.
                self._remove(head)
            elif not self._is_missing and (placement := self._pool.place(head.need)) is not None:
                self._grant(head, placement)
            elif not self._is_missing and head.need.total <= self._pool.most_tokens():
                break
            elif self._is_missing or self._pool.awaited(head.need.total):
                self._aside[head] = asyncio.get_running_loop().call_later(
                    self._config.node_wait_s, self._fail_aside, head
                )
            else:
                self._fail_aside(head)
        self._pace.waits(loop_time(), anyone=self.in_line > 0)

    def _is_in_line(self, entry: QueueEntry) -> bool:
        return entry.is_waiting and entry not in self._aside

    def _wait(self, entry: QueueEntry) -> None:
        """Let an entry wait in line."""
        entry.granted = asyncio.get_running_loop().create_future()
        self._count(entry, 1)
        self._line_up(entry)

    def _line_up(self, entry: QueueEntry) -> None:
        if len(self._heap) > 2 * self.waiting + 64:  # Entries that left far behind the head.
            self._heap = [item for item in self._heap if self._is_in_line(item[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (entry.key, entry))

    def _remove(self, entry: QueueEntry, *, is_placed: bool = False) -> None:
        """End an entry's wait."""
        self._count(entry, -1)
        if entry in self._aside:
            self._aside.pop(entry).cancel()
        if entry.first_placement is None:
            self._shares[entry.priority].leave(entry, is_served=is_placed)

    def _count(self, entry: QueueEntry, sign: int) -> None:
        entry.is_waiting = sign > 0
        self.waiting += sign
        self._ranks[entry.rank] += sign
        _add(self._samples_of, entry.caller.name, sign)
        _add(self._tokens_of, entry.caller.name, sign * entry.need.num_prompt)
        key = entry.need.kv_key
        _add(self._waiting_for, key, sign)
        if not key or self._waiting_for[key] == (sign > 0):  # It is the first with this key, or was the last one.
            self.tokens_to_compute += sign * entry.need.num_prompt

    def _grant(self, entry: QueueEntry, placement: PrefillPlacement) -> None:
        assert entry.granted is not None
        self._remove(entry, is_placed=True)
        if entry.first_placement is None:
            entry.first_placement = next(self._placements)
        entry.granted.set_result(placement)
        self._pace.granted(loop_time())

    def _fail(self, entry: QueueEntry, error: CorunError) -> None:
        self._remove(entry)
        if entry.granted is not None and not entry.granted.done():
            entry.granted.set_exception(error)

    def _fail_aside(self, entry: QueueEntry) -> None:
        """End the wait of an entry that no node in use could hold."""
        if not (lacks := self._pool.missing()):
            others = self._pool.awaited(entry.need.total) or "no other node could hold them either"
            lacks = f"no decode node in use has KV room for {entry.need.total} tokens: {others}"
        self._fail(entry, UnavailableError(lacks))

    def _expire(self, entry: QueueEntry) -> None:
        if entry in self._aside:
            self._fail_aside(entry)
        elif entry.is_waiting:
            late = f"no room became free before the deadline; {self.waiting} samples are waiting"
            self._fail(entry, DeadlineError(late))
            self.pump_soon()

    def _has_room(self, caller: Caller, samples: int = 0, tokens: int = 0) -> bool:
        """Return whether this client may let so much more wait than it does now."""
        arriving = self._arriving.total() + self._arriving[caller.name]
        both = self.waiting + self._samples_of[caller.name] + arriving + 2 * samples
        both_tokens = self.waiting_tokens + self._tokens_of[caller.name] + 2 * tokens
        return (
            both <= CLIENT_PART * self._config.max_queued_samples
            and both_tokens <= CLIENT_PART * self._config.max_queued_tokens
        )

    def _full(self) -> OverloadedError:
        room = f"{self.waiting + self._arriving.total()} of at most {self._config.max_queued_samples} wait"
        held = f"{self.waiting_tokens} of at most {self._config.max_queued_tokens} tokens"
        return self._refusal(f"the queue has no room for more samples of this client: {room}, with {held}")

    def _check_wait(self, samples: int, deadline: float, caller: Caller, priority: Priority) -> None:
        """Raise OverloadedError if the last of so many new samples would wait too long, not counting missing nodes."""
        share, rank = self._shares[priority], _CLASSES[priority]
        longest, most_s = deadline - loop_time(), self._config.max_queue_wait_s
        if most_s and priority is not Priority.LOW:
            longest = min(longest, most_s)
        ranks = self._ranks if self._is_missing else self._ranks - Counter(entry.rank for entry in self._aside)
        weights = share.weights + (0 if (own := share.waiting[caller.name]) else caller.weight)
        ahead = min(ranks[rank] + samples, (own + samples) * weights / caller.weight)
        ahead += sum(number for other, number in ranks.items() if other < rank)
        if (wait := ahead * self._pace.interval_s(loop_time())) > longest:
            text = f"the wait for room would be about {wait:.1f} s, with {ahead:.0f} samples to go"
            raise self._refusal(f"{text}: longer than {max(0.0, longest):.1f} s", wait - longest)

    def _refusal(self, text: str, retry_s: float | None = None) -> OverloadedError:
        """Count a refusal and return its error. retry_s: seconds until the client should retry; None means the time in
        which all waiting samples should get their placements."""
        self.refused += 1
        retry_s = self.waiting * self._pace.interval_s(loop_time()) if retry_s is None else retry_s
        least = MISSING_RETRY_S if self._pool.missing() else MIN_RETRY_S
        spread = 1 + _SPREAD * (self.refused * _GOLDEN % 1)
        return OverloadedError(text, min(max(retry_s, least), MAX_RETRY_S / (1 + _SPREAD)) * spread)


def _add(counts: Counter[str], key: str, amount: int) -> None:
    """Add to a count, and forget the key when the count is 0."""
    counts[key] += amount
    if not counts[key]:
        del counts[key]
