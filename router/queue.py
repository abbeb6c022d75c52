"""The queue of samples that wait for a slot: who is next, who is refused, and the end of every wait.

Order: first the samples that ran and lost their node, then the priority classes. Within a class, first the samples that
had a placement and could not use it, in the order of their first placements; then the clients share by tokens
(`FairShare`). The order is a key that each entry gets once, so the queue is one heap.

Bounds: a request is refused on arrival if its client would hold too much of the queue (`CLIENT_PART`), or if its
samples would wait too long. No client can keep the others out, so nobody who waits is sent away for a newcomer.

A sample steps aside when only nodes that cannot be used now could hold it: it keeps its place and blocks no other.
This module must not know nodes or gRPC.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corun.errors import CorunError, DeadlineError, OverloadedError, UnavailableError
from corun.rpc.auth import ANYONE, Caller
from corun.types import Priority
from router.placement import Need

if TYPE_CHECKING:
    from router.nodes.node import Placement
    from router.nodes.registry import Registry

MIN_RETRY_S = 0.1
MAX_RETRY_S = 30.0
MISSING_RETRY_S = 1.0
"""The shortest retry delay while nodes are missing."""
PACE_MEMORY = 128
"""The number of placements over which the pace is the mean."""
CLIENT_PART = 2
"""What a client holds of the queue and what all hold, together, may be this many times its bounds. So one client alone
may fill it to its bounds, and n of them may each hold 2 / (n + 1) of that: there is always room for another."""
MAX_CLIENTS = 1024
"""The number of clients after which those without a waiting sample are forgotten."""
_SPREAD = 0.5
"""The fraction by which retry delays differ, so that clients refused together do not come back together."""
_GOLDEN = 0.6180339887498949
"""The golden ratio's fraction. Its multiples, modulo 1, are spread evenly however many there are."""
_CLASSES = {priority: number for number, priority in enumerate(Priority, start=1)}
_RAN = 0
"""The class of samples that have run, before all others: a client may already have output of theirs."""
Key = tuple[int, bool, float, int]


@dataclass(eq=False, slots=True)
class QueueEntry:
    """One sample in the queue, from its arrival until it leaves."""

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
    aside_at: float | None = None
    """The time since which the entry waits aside, on the loop's clock; None if it waits in line."""
    granted: asyncio.Future[Placement] | None = None
    """The future of the placement, from the start of a wait until the placement is taken."""

    @property
    def is_in_line(self) -> bool:
        return self.is_waiting and self.aside_at is None

    @property
    def key(self) -> Key:
        """The entry's place in the order: class, whether it never had a placement, place among such, and number."""
        rank = _RAN if self.ran else _CLASSES[self.priority]
        is_fresh = self.first_placement is None
        return rank, is_fresh, self.start if self.first_placement is None else self.first_placement, self.number


class FairShare:
    """The shares of the clients of one class: tokens in proportion to their weights, each client's samples in order.

    This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A sample starts, in virtual time, where the
    one before it of its client ends: after its tokens divided by the client's weight. The earliest start is next, and
    it is the current time. A client that comes back starts at the current time, so idling saves up nothing. Samples
    that leave unserved cost nothing once none of their client's samples waits.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.weights = 0
        """The sum of the weights of the clients with waiting samples."""
        self.waiting: Counter[str] = Counter()
        """The number of samples by client that have not had a placement."""
        self._ends: dict[str, float] = {}
        """The virtual time at which each client's newest sample ends."""
        self._served: dict[str, float] = {}
        """The virtual time at which each client's last served sample ends."""

    def enter(self, caller: Caller, tokens: int) -> float:
        """Add a sample, and return its start."""
        if not self.waiting[caller.name]:
            self.weights += caller.weight
            if len(self._ends) >= MAX_CLIENTS:
                self._forget_idle()
        self.waiting[caller.name] += 1
        start = max(self.now, self._ends.get(caller.name, 0.0))
        self._ends[caller.name] = start + tokens / caller.weight
        return start

    def serve(self, entry: QueueEntry) -> None:
        """Note that a sample got its first placement."""
        self.now = max(self.now, entry.start)
        self._served[entry.caller.name] = entry.start + entry.need.total / entry.caller.weight
        self.leave(entry)

    def leave(self, entry: QueueEntry) -> None:
        """Remove a sample that has not had a placement before."""
        name = entry.caller.name
        self.waiting[name] -= 1
        if not self.waiting[name]:
            del self.waiting[name]
            self.weights -= entry.caller.weight
            self._ends[name] = self._served.get(name, 0.0)

    def _forget_idle(self) -> None:
        self._ends = {name: end for name, end in self._ends.items() if name in self.waiting}
        self._served = {name: end for name, end in self._served.items() if name in self.waiting}


class Pace:
    """The mean time between two placements while samples wait, in seconds on any clock."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._count = 0
        self._last: float | None = None
        """The time of the last placement, or since which samples wait; None while none waits."""

    def interval_s(self, now: float) -> float:
        """Return the mean seconds between two placements, as if the next came now if that is late; 0 while nothing is
        known."""
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
    """Gives placements to entries in order. `pump` or `pump_soon` has to be called when the pool changes.

    max_wait_s: the longest wait that a newcomer may expect before it is refused; 0 means no limit. It does not apply to
        the lowest class.
    node_wait_s: the longest wait while nodes are missing, or while a sample waits aside for a node that cannot be used.
    """

    def __init__(
        self, pool: Registry, *, max_samples: int, max_tokens: int, node_wait_s: float, max_wait_s: float = 0.0
    ) -> None:
        self.refused = 0
        """The number of refused requests, since the router started."""
        self.waiting = 0
        """The number of samples without a placement."""
        self.waiting_tokens = 0
        """The prompt tokens of all samples without a placement."""
        self._pool = pool
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s
        self._node_wait_s = node_wait_s
        self._heap: list[tuple[Key, QueueEntry]] = []
        """The entries in line, and some that have left: those are dropped when they are first."""
        self._aside: dict[QueueEntry, None] = {}
        """The entries aside, in the order in which they stepped aside."""
        self._shares = {priority: FairShare() for priority in Priority}
        self._samples_of: Counter[str] = Counter()  # By client, as the next one.
        self._tokens_of: Counter[str] = Counter()
        self._waiting_for: Counter[str] = Counter()  # Samples by KV key.
        self._arriving: Counter[str] = Counter()  # Samples by client that have yet to enter.
        self._numbers = itertools.count()
        self._placements = itertools.count()
        self._missing_since: float | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._pumping: asyncio.Handle | None = None
        self._pace = Pace()

    @property
    def in_line(self) -> int:
        """The number of samples that wait in line, without those aside."""
        return self.waiting - len(self._aside)

    def more_follow(self, kv_key: str) -> bool:
        """Return whether a waiting sample may get the KV with this key, too."""
        return bool(kv_key) and self._waiting_for[kv_key] > 0

    @contextmanager
    def arriving(
        self, samples: int, tokens: int, deadline: float, *, caller: Caller, priority: Priority
    ) -> Iterator[None]:
        """Count samples that have yet to `enter`. Raises OverloadedError at once, before any work is done for them, if
        `enter` would refuse them, or if they would not be placed before `deadline` or within `max_wait_s`.

        tokens: the least number of prompt tokens of each.
        """
        if self.in_line:
            self._check_wait(samples, deadline, caller, priority)
        if (self.waiting or self._arriving.total()) and not self._has_room(caller, samples, samples * tokens):
            raise self._full()
        self._arriving[caller.name] += samples
        try:
            yield
        finally:
            self._arriving[caller.name] -= samples
            if not self._arriving[caller.name]:
                del self._arriving[caller.name]

    def enter(
        self, needs: Sequence[Need], *, caller: Caller = ANYONE, priority: Priority = Priority.NORMAL
    ) -> list[QueueEntry]:
        """Queue the samples of one request and return their entries. Some may already have a placement.

        Raises OverloadedError, and queues none of them, if more samples would have to wait than there is room for.
        """
        share = self._shares[priority]
        entries = [
            QueueEntry(next(self._numbers), need, caller, priority, share.enter(caller, need.total)) for need in needs
        ]
        for entry in entries:
            self._add(entry)
        self.pump()
        if any(entry.is_waiting for entry in entries) and not self._has_room(caller):
            for entry in entries:
                self.leave(entry)
            raise self._full()
        return entries

    async def place(self, entry: QueueEntry, deadline: float) -> Placement:
        """Wait for the entry's placement and return it. It then belongs to the caller. If this raises anything, the
        entry has left the queue.

        Raises:
            DeadlineError: there was no placement before `deadline`, on the loop's clock.
            UnavailableError: for `node_wait_s` or until the deadline, nodes were missing, or the only nodes that could
                hold the sample could not be used.
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
        """Put an entry whose placement was of no use back to its old place. If it `ran`, it goes before all entries
        that have not run, of any class, because a running request must not wait for other classes."""
        entry.ran = entry.ran or ran
        self._add(entry)
        self.pump()

    def leave(self, entry: QueueEntry) -> None:
        """Remove an entry for good, and give back a placement that its caller has not taken. It does nothing to an
        entry that has left already."""
        if entry.is_waiting:
            self._remove(entry)
            self.pump_soon()  # The next entry may need less room than this one.
        granted, entry.granted = entry.granted, None
        if granted is not None and granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().close()

    def pump_soon(self) -> None:
        """Call `pump` after the code that runs now. By then, samples that lost their placements in it have queued
        again."""
        if self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self._pump_now)

    def pump(self) -> None:
        """Place entries in order, until the first one has to wait for room on a node in use, or nodes are missing. An
        entry that no node in use could ever hold does not block the others: it steps aside, or fails if no other node
        could hold it either."""
        self._come_back(self._pool.most_tokens() if self._aside else 0)
        while (head := self._head()) is not None:
            if (placement := self._pool.place(head.need)) is not None:
                self._grant(head, placement)
            elif self._pool.missing() or head.need.total <= self._pool.most_tokens():
                break
            elif self._pool.awaited(head.need.total):
                self._step_aside(head)
            else:
                self._fail(head, UnavailableError(f"no decode node has KV room for {head.need.total} tokens"))
        is_stuck = self.in_line > 0 and bool(self._pool.missing())
        self._pace.waits(_now(), anyone=self.in_line > 0 and not is_stuck)  # An outage tells nothing about the pace.
        self._missing_since = (self._missing_since or _now()) if is_stuck else None
        self._watch()

    def _pump_now(self) -> None:
        self._pumping = None
        self.pump()

    def _head(self) -> QueueEntry | None:
        while self._heap and not self._heap[0][1].is_in_line:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _add(self, entry: QueueEntry) -> None:
        """Let an entry wait in line."""
        entry.granted = asyncio.get_running_loop().create_future()
        entry.is_waiting = True
        self._count(entry, 1)
        self._line_up(entry)

    def _line_up(self, entry: QueueEntry) -> None:
        if len(self._heap) > 2 * self.waiting + 64:  # Entries that left far behind the head.
            self._heap = [item for item in self._heap if item[1].is_in_line]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (entry.key, entry))

    def _remove(self, entry: QueueEntry, *, is_placed: bool = False) -> None:
        """End an entry's wait."""
        entry.is_waiting = False
        self._count(entry, -1)
        if entry.aside_at is not None:
            entry.aside_at = None
            del self._aside[entry]
        if entry.first_placement is None:
            share = self._shares[entry.priority]
            (share.serve if is_placed else share.leave)(entry)

    def _count(self, entry: QueueEntry, sign: int) -> None:
        self.waiting += sign
        self.waiting_tokens += sign * entry.need.num_prompt
        name, kv_key = entry.caller.name, entry.need.kv_key
        self._samples_of[name] += sign
        self._tokens_of[name] += sign * entry.need.num_prompt
        self._waiting_for[kv_key] += sign
        if not self._samples_of[name]:
            del self._samples_of[name], self._tokens_of[name]
        if not self._waiting_for[kv_key]:
            del self._waiting_for[kv_key]

    def _grant(self, entry: QueueEntry, placement: Placement) -> None:
        assert entry.granted is not None
        if entry.granted.done():  # The caller was cancelled a moment ago, but the entry has not left the queue yet.
            self._remove(entry)
            placement.close()
            return
        self._remove(entry, is_placed=True)
        if entry.first_placement is None:
            entry.first_placement = next(self._placements)
        entry.granted.set_result(placement)
        self._pace.granted(_now())

    def _fail(self, entry: QueueEntry, error: CorunError) -> None:
        self._remove(entry)
        if entry.granted is not None and not entry.granted.done():
            entry.granted.set_exception(error)

    def _expire(self, entry: QueueEntry) -> None:
        if entry.is_waiting:
            missing = self._pool.missing() or ("" if entry.aside_at is None else self._lacks(entry.need))
            late = DeadlineError(f"no slot became free before the deadline; {self.waiting} samples are waiting")
            self._fail(entry, UnavailableError(missing) if missing else late)
            self.pump_soon()

    def _step_aside(self, head: QueueEntry) -> None:
        head.aside_at = _now()
        self._aside[head] = None

    def _come_back(self, most_tokens: int) -> None:
        """Let the entries aside that need at most `most_tokens` tokens wait in line again, at their old places."""
        for entry in [entry for entry in self._aside if entry.need.total <= most_tokens]:
            del self._aside[entry]
            entry.aside_at = None
            self._line_up(entry)

    def _lacks(self, need: Need) -> str:
        """Return why a sample waits aside, in words."""
        nodes = self._pool.awaited(need.total) or "the one that was waited for is gone"
        return f"no decode node in use has KV room for {need.total} tokens: {nodes}"

    def _watch(self) -> None:
        """Run a timer for the first entry that has waited for nodes for too long."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        first_aside = next((entry.aside_at for entry in self._aside), None)
        waits = [since for since in (self._missing_since, first_aside) if since is not None]
        if waits:
            self._giving_up = asyncio.get_running_loop().call_at(min(waits) + self._node_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        over = _now() - self._node_wait_s
        for entry in [entry for entry in self._aside if (entry.aside_at or 0.0) <= over]:
            self._fail(entry, UnavailableError(self._lacks(entry.need)))
        if self._missing_since is not None and self._missing_since <= over:
            self._missing_since, missing = None, self._pool.missing()
            while missing and (head := self._head()) is not None:
                self._fail(head, UnavailableError(missing))
        self._watch()

    def _has_room(self, caller: Caller, samples: int = 0, tokens: int = 0) -> bool:
        """Return whether this client may let so much more wait than it does now."""
        arriving = self._arriving.total() + self._arriving[caller.name]
        both = self.waiting + self._samples_of[caller.name] + arriving + 2 * samples
        both_tokens = self.waiting_tokens + self._tokens_of[caller.name] + 2 * tokens
        return both <= CLIENT_PART * self._max_samples and both_tokens <= CLIENT_PART * self._max_tokens

    def _full(self) -> OverloadedError:
        room = f"{self.waiting + self._arriving.total()} of at most {self._max_samples} wait"
        held = f"{self.waiting_tokens} of at most {self._max_tokens} tokens"
        return self._refusal(f"the queue has no room for more samples of this client: {room}, with {held}")

    def _check_wait(self, samples: int, deadline: float, caller: Caller, priority: Priority) -> None:
        longest = deadline - _now()
        if self._max_wait_s and priority is not Priority.LOW:
            longest = min(longest, self._max_wait_s)
        ahead = self._ahead(samples, caller, priority)
        wait = ahead * self._pace.interval_s(_now())
        if wait > longest:
            text = f"the wait for a slot would be about {wait:.1f} s, with {ahead:.0f} samples to go"
            raise self._refusal(f"{text}: longer than {max(0.0, longest):.1f} s", wait - longest)

    def _ahead(self, samples: int, caller: Caller, priority: Priority) -> float:
        """Return how many samples get placements up to and including the newcomer's last one, if no others arrive."""
        share = self._shares[priority]
        ranks = Counter(key[0] for key, entry in self._heap if entry.is_in_line)
        before = sum(number for rank, number in ranks.items() if rank < _CLASSES[priority])
        own = share.waiting[caller.name]
        weights = share.weights + (0 if own else caller.weight)
        return before + min(ranks[_CLASSES[priority]] + samples, (own + samples) * weights / caller.weight)

    def _refusal(self, text: str, retry_s: float | None = None) -> OverloadedError:
        """Count a refusal and return its error. retry_s: seconds until the client should retry; None means the time in
        which all samples in line should get their placements."""
        self.refused += 1
        retry_s = self.in_line * self._pace.interval_s(_now()) if retry_s is None else retry_s
        least = MISSING_RETRY_S if self._pool.missing() else MIN_RETRY_S
        spread = 1 + _SPREAD * (self.refused * _GOLDEN % 1)
        return OverloadedError(text, min(max(retry_s, least), MAX_RETRY_S / (1 + _SPREAD)) * spread)


def _now() -> float:
    return asyncio.get_running_loop().time()
