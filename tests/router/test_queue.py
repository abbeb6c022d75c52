from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from corun.errors import DeadlineError, OverloadedError, UnavailableError
from corun.rpc.auth import ANYONE, Caller
from corun.testing.cluster import router_config
from corun.types import Priority
from router.nodes.node import Placement
from router.nodes.registry import Registry
from router.placement import Need
from router.queue import Pace, QueueEntry, SampleQueue
from tests.answers import put_forward, settle

SOON = 0.02


class FakeSeat:
    def __init__(self, pool: FakePool, need: Need) -> None:
        self.pool = pool
        self.need = need
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        assert self.closed == 1
        self.pool.free += 1
        self.pool.changed()


class FakePool:
    """`free` placements for samples of up to `largest` tokens; a node that cannot be used would take up to `later`."""

    def __init__(self, free: int = 0, largest: int = 1000, later: int = 0) -> None:
        self.free = free
        self.largest = largest
        self.later = later
        self.gap = ""
        self.looks = 0
        self.changed: Any = lambda: None

    def place(self, need: Need) -> Placement | None:
        self.looks += 1
        if self.gap or not self.free or need.total > self.largest:
            return None
        self.free -= 1
        return cast("Placement", FakeSeat(self, need))

    def most_tokens(self) -> int:
        return 0 if self.gap else self.largest

    def awaited(self, num_tokens: int) -> str:
        return "d2 is joining: it is stuck" if num_tokens <= self.later else ""

    def missing(self) -> str:
        return self.gap


def make(pool: FakePool, **changes: Any) -> SampleQueue:
    settings = {"max_queued_samples": 100, "max_queued_tokens": 100_000, "node_wait_s": SOON, "max_queue_wait_s": 0.0}
    names = {"max_samples": "max_queued_samples", "max_tokens": "max_queued_tokens", "max_wait_s": "max_queue_wait_s"}
    settings |= {names.get(name, name): value for name, value in changes.items()}
    queue = SampleQueue(cast("Registry", pool), router_config(**settings))
    pool.changed = queue.pump
    return queue


def need(num_prompt: int = 1, max_tokens: int = 1) -> Need:
    return Need(num_prompt=num_prompt, max_tokens=max_tokens)


def later(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def head_need(queue: SampleQueue) -> Need | None:
    head = queue.head
    return None if head is None else head.need


def placed(entries: list[QueueEntry]) -> list[int]:
    return [i for i, t in enumerate(entries) if t.granted is not None and t.granted.done()]


async def test_placements_are_given_in_order_of_arrival() -> None:
    pool = FakePool(free=2)
    queue = make(pool)
    entries = queue.enter([need()] * 3) + queue.enter([need()])
    assert placed(entries) == [0, 1]
    assert (queue.waiting, queue.waiting_tokens) == (2, 2)
    (await queue.place(entries[1], later())).close()
    assert placed(entries) == [0, 2]
    (await queue.place(entries[0], later())).close()
    assert placed(entries) == [2, 3]
    assert queue.waiting == 0


async def test_a_prompt_is_to_be_computed_once_for_all_its_samples_that_share_it() -> None:
    """Otherwise a rollout would seem to keep first tokens waiting, and nodes would take prompts only."""
    pool = FakePool()
    queue = make(pool)
    shared, own = need(num_prompt=10), need(num_prompt=5)
    entries = queue.enter([replace(shared, kv_key=key) for key in "aaab"] + [own, own])
    assert (queue.waiting_tokens, queue.tokens_to_compute) == (50, 30)
    pool.free = 2
    queue.pump()
    assert queue.tokens_to_compute == 30, "one sample of the first prompt still waits"
    for entry, left in zip(entries[2:], (20, 10, 5, 0), strict=True):
        queue.leave(entry)
        assert queue.tokens_to_compute == left


async def test_a_small_sample_does_not_overtake_a_large_one() -> None:
    pool = FakePool(free=1, largest=10)
    queue = make(pool)
    entries = queue.enter([need(), need(max_tokens=8), need()])
    assert placed(entries) == [0]
    pool.place = lambda _: None  # type: ignore[method-assign]
    queue.pump()
    assert placed(entries) == [0]


async def test_what_is_too_much_is_refused_whole() -> None:
    pool = FakePool(free=3)
    queue = make(pool, max_samples=2, max_tokens=10)
    with pytest.raises(OverloadedError, match="no room for more samples of this client") as caught:
        queue.enter([need()] * 6)
    assert 0.1 <= caught.value.retry_after_s <= 30
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (3, 0, 0)
    pool.free = 0
    queue.enter([need(num_prompt=6)])
    with pytest.raises(OverloadedError, match="6 of at most 10 tokens"):
        queue.enter([need(num_prompt=5)])
    queue.enter([need(num_prompt=4)])
    assert (queue.waiting, queue.waiting_tokens) == (2, 10)


async def test_what_is_refused_costs_no_share() -> None:
    """Some of its samples may have had placements by then."""
    pool = FakePool(free=3)
    queue = make(pool, max_samples=2)
    with pytest.raises(OverloadedError):
        queue.enter([need()] * 6, caller=HOG)
    pool.free = 0
    entries = {name: queue.enter([need()], caller=caller)[0] for name, caller in (("h0", HOG), ("s0", SMALL))}
    assert await give(pool, queue, entries, 2) == "h0 s0"


@pytest.mark.parametrize(
    ("gap", "later_on", "tokens", "node_wait_s", "deadline_s", "error", "says"),
    [
        ("", 0, 1, SOON, SOON, DeadlineError, "no room became free before the deadline; 2 samples are waiting"),
        ("no decode node has joined", 0, 1, SOON, 5.0, UnavailableError, "no decode node has joined"),
        ("no decode node has joined", 0, 1, 60.0, SOON, UnavailableError, "no decode node has joined"),
        ("", 0, 50, SOON, 5.0, UnavailableError, "51 tokens: no other node could hold them either"),
        ("", 100, 50, SOON, 5.0, UnavailableError, "51 tokens: d2 is joining: it is stuck"),
        ("", 100, 50, 60.0, SOON, UnavailableError, "51 tokens: d2 is joining: it is stuck"),
    ],
)
async def test_every_wait_ends_and_says_for_what_it_was(
    gap: str, later_on: int, tokens: int, node_wait_s: float, deadline_s: float, error: type[Exception], says: str
) -> None:
    pool = FakePool(largest=10, later=later_on)
    pool.gap = gap
    queue = make(pool, node_wait_s=node_wait_s)
    entry, behind = queue.enter([need(max_tokens=tokens), need()])
    with pytest.raises(error, match=says):
        await queue.place(entry, later(deadline_s))
    pool.gap, pool.free = "", 1
    queue.pump()
    assert gap or placed([behind]), "it blocks nobody"
    queue.leave(behind)
    assert queue.waiting == 0


async def test_an_outage_is_looked_at_once_however_many_wait() -> None:
    """Each look goes through all nodes: thousands of them would stop the event loop."""
    pool = FakePool()
    queue = make(pool, node_wait_s=60.0)
    queue.enter([need()] * 50)
    looks: list[str] = []
    pool.gap, pool.looks = "gone", 0
    pool.missing = lambda: looks.append("all nodes") or pool.gap  # type: ignore[func-returns-value, method-assign]
    queue.pump()
    assert (len(looks), pool.looks, queue.in_line) == (1, 0, 0)


async def test_nodes_that_come_back_in_time_end_nothing() -> None:
    pool = FakePool()
    pool.gap = "gone"
    queue = make(pool, node_wait_s=60.0)
    (entry,) = queue.enter([need()])
    pool.gap = ""
    queue.pump()
    put_forward(60.0)
    await settle()
    assert not placed([entry])
    pool.free = 1
    queue.pump()
    assert placed([entry])


async def test_who_only_an_unusable_node_could_hold_steps_aside_and_comes_back_first() -> None:
    pool = FakePool(free=1, largest=10, later=100)
    queue = make(pool, node_wait_s=60.0)
    large, larger, small, late = queue.enter([need(max_tokens=50), need(max_tokens=90), need(), need()])
    assert placed([large, larger, small, late]) == [2]
    assert (queue.waiting, queue.in_line, head_need(queue)) == (3, 1, late.need)
    pool.largest = 60
    queue.pump()
    assert (queue.in_line, head_need(queue)) == (2, large.need), "it is first again, and waits for room as ever"
    pool.largest, pool.free = 100, 1
    queue.pump()
    assert placed([large, larger, small, late]) == [0, 2]
    assert head_need(queue) == larger.need
    for entry in (large, larger, small, late):
        queue.leave(entry)
    assert (queue.waiting, queue.in_line) == (0, 0)


async def test_who_waits_aside_makes_nobody_expect_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", lambda pace, now: 100.0)
    queue = make(FakePool(largest=10, later=100), max_wait_s=10.0, node_wait_s=60.0)
    queue.enter([need(max_tokens=50)])
    with queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL):
        pass


@pytest.mark.parametrize("granted", ["never", "before", "after"])
async def test_a_waiter_that_is_cancelled_leaves_its_place_to_the_next(granted: str) -> None:
    """It may be granted a placement that it cannot take any more, or be cancelled a moment before it would be."""
    pool = FakePool()
    queue = make(pool)
    first, second = queue.enter([need()] * 2)
    waiter = asyncio.ensure_future(queue.place(first, later()))
    await asyncio.sleep(0)
    pool.free = 0 if granted == "never" else 1
    if granted == "before":
        queue.pump()
        assert pool.free == 0
    waiter.cancel()
    if granted == "after":
        queue.pump()
    await asyncio.wait((waiter,))
    assert waiter.cancelled()
    assert bool(placed([second])) == (granted != "never")
    assert (pool.free, queue.waiting) == (0, 1 if granted == "never" else 0)


async def test_nothing_is_placed_for_those_who_have_just_gone() -> None:
    """However many they are: each placement would be given back at once, and each of these tells all listeners."""
    pool = FakePool()
    queue = make(pool, max_samples=1000)
    gone = queue.enter([need()] * 256)
    (stays,) = queue.enter([need()])
    waits = [asyncio.ensure_future(queue.place(entry, later())) for entry in gone]
    await asyncio.sleep(0)
    pool.free, pool.looks = 1, 0
    for wait in waits:
        wait.cancel()
    queue.pump()  # None of them has run since.
    assert placed([stays]) == [0]
    assert (pool.free, pool.looks, queue.waiting, queue.waiting_tokens) == (0, 1, 0, 0)
    await asyncio.wait(waits)
    assert all(wait.cancelled() for wait in waits)
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (0, 0, 0)


async def test_leaving_twice_is_harmless() -> None:
    pool = FakePool(free=1)
    queue = make(pool)
    first, second = queue.enter([need()] * 2)
    for entry in (first, first, second, second):
        queue.leave(entry)
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (1, 0, 0)


async def test_a_request_that_leaves_is_looked_behind_once() -> None:
    """However many samples it has: each look asks every node, in the loop that carries all streams."""
    pool = FakePool()
    queue = make(pool, max_samples=1000)
    cancelled, late, _ = (queue.enter([need()] * samples) for samples in (256, 256, 1))
    deadline = later(0.0)
    waits = [asyncio.ensure_future(queue.place(entry, deadline)) for entry in late]
    await asyncio.sleep(0)
    pool.looks = 0
    for entry in cancelled:
        queue.leave(entry)
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(result) for result in results} == {DeadlineError}
    await asyncio.sleep(0)
    assert 1 <= pool.looks < 10


HOG, SMALL = Caller(name="hog"), Caller(name="small")


async def give(pool: FakePool, queue: SampleQueue, entries: dict[str, QueueEntry], number: int) -> str:
    """The names of the next entries that get placements, one after the other."""
    found = []
    for _ in range(number):
        before = {name for name, entry in entries.items() if entry.is_waiting}
        pool.free += 1
        queue.pump()
        found += [name for name in before if not entries[name].is_waiting]
    return " ".join(found)


async def test_clients_of_a_class_take_turns() -> None:
    pool = FakePool()
    queue = make(pool)
    entries = {}
    for index in range(4):
        (entries[f"h{index}"],) = queue.enter([need()], caller=HOG)
    for index in range(2):
        (entries[f"s{index}"],) = queue.enter([need()], caller=SMALL)
    assert await give(pool, queue, entries, 6) == "h0 s0 h1 s1 h2 h3"


async def test_what_ran_comes_before_every_class_and_what_only_had_a_seat_before_its_own() -> None:
    pool = FakePool(free=2)
    queue = make(pool)
    entries = {}
    for name in ("ran", "refused"):
        (entries[name],) = queue.enter([need()], priority=Priority.LOW)
        placement = await queue.place(entries[name], later())
        pool.free = 0 if name == "refused" else pool.free
    (entries["low"],) = queue.enter([need()], priority=Priority.LOW)
    (entries["high"],) = queue.enter([need()], priority=Priority.HIGH)
    queue.again(entries["refused"])
    queue.again(entries["ran"], ran=True)
    assert await give(pool, queue, entries, 4) == "ran high refused low"
    assert placement is not None


async def test_who_was_served_beside_a_sample_that_waits_aside_has_had_that_share() -> None:
    pool = FakePool(largest=100, later=1000)
    queue = make(pool, node_wait_s=60.0)
    entries = dict(zip(["aside", "h0"], queue.enter([need(10, 200), need(1, 90)], caller=HOG), strict=True))
    assert await give(pool, queue, entries, 1) == "h0"
    pool.largest = 1000
    queue.pump()
    assert await give(pool, queue, entries, 1) == "aside"
    (entries["h1"],) = queue.enter([need()], caller=HOG)
    (entries["s0"],) = queue.enter([need()], caller=SMALL)
    assert await give(pool, queue, entries, 2) == "s0 h1"


async def test_what_had_a_seat_comes_before_what_stepped_aside() -> None:
    pool = FakePool(free=1, largest=10, later=100)
    queue = make(pool, node_wait_s=60.0)
    large, small = queue.enter([need(max_tokens=50), need()])
    placement = await queue.place(small, later())
    pool.free, pool.largest = 0, 100
    queue.again(small)
    assert await give(pool, queue, {"large": large, "small": small}, 2) == "small large"
    assert placement is not None


async def test_requests_on_their_way_in_are_bounded_before_any_work_too() -> None:
    """They wait for nodes, or for a tokenizer."""
    queue = make(FakePool(), max_samples=3)

    def arrives(caller: Caller, samples: int = 1) -> contextlib.AbstractContextManager[None]:
        return queue.arriving(samples, 1, later(), caller=caller, priority=Priority.HIGH)

    with contextlib.ExitStack() as arrived:
        for _ in range(3):
            arrived.enter_context(arrives(SMALL))
        with pytest.raises(OverloadedError), arrives(SMALL):
            pass
    with arrives(SMALL, 3):
        pass
    queue.enter([need()] * 3, caller=HOG)
    with pytest.raises(OverloadedError, match="3 of at most 3 wait"), arrives(HOG):
        pass
    with arrives(SMALL):
        pass
    assert queue.refused == 2


async def test_a_wait_that_would_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", lambda pace, now: 1.0)
    pool = FakePool()
    queue = make(pool, max_samples=1000, max_wait_s=10.0, node_wait_s=60.0)
    queue.enter([need()] * 10, caller=HOG)

    def arrives(caller: Caller, priority: Priority, timeout_s: float) -> float | None:
        try:
            with queue.arriving(1, 1, later(timeout_s), caller=caller, priority=priority):
                return None
        except OverloadedError as error:
            return error.retry_after_s

    assert 1 <= (arrives(HOG, Priority.NORMAL, 60.0) or 0) <= 1.5  # Eleven seconds: one too many.
    assert arrives(SMALL, Priority.NORMAL, 60.0) is None  # Its turn comes after two.
    assert arrives(SMALL, Priority.NORMAL, 1.0) is not None
    assert arrives(HOG, Priority.HIGH, 2.0) is None
    assert arrives(HOG, Priority.LOW, 60.0) is None  # As long as it takes, within its deadline.
    assert arrives(HOG, Priority.LOW, 5.0) is not None
    pool.gap = "gone"
    queue.pump()  # All step aside, and will be there when the nodes are back.
    assert queue.in_line == 0
    assert arrives(HOG, Priority.NORMAL, 60.0) is not None
    assert arrives(SMALL, Priority.NORMAL, 60.0) is None
    assert arrives(SMALL, Priority.NORMAL, 1.0) is not None


async def test_a_client_whose_weight_changes_while_it_waits_moves_nobodys_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file of tokens is read again when it is edited."""
    monkeypatch.setattr(Pace, "interval_s", lambda pace, now: 1.0)
    queue = make(FakePool(), max_wait_s=10.0)
    (before,) = queue.enter([need()], caller=Caller(name="edited"))
    (after,) = queue.enter([need()], caller=Caller(name="edited", weight=1000))
    queue.leave(before)
    queue.leave(after)
    queue.enter([need()] * 10, caller=HOG)
    with (
        pytest.raises(OverloadedError, match="11 samples to go"),
        queue.arriving(1, 1, later(60.0), caller=HOG, priority=Priority.NORMAL),
    ):
        pass


async def test_who_arrives_does_not_look_at_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait, and dozens arrive at once."""
    queue = make(FakePool(), max_samples=1000, max_wait_s=10.0)
    queue.enter([need()] * 500)
    looks = list[QueueEntry]()
    monkeypatch.setattr(QueueEntry, "rank", property(lambda entry: looks.append(entry) or 1))
    monkeypatch.setattr(SampleQueue, "_is_in_line", lambda queue, entry: looks.append(entry) or True)
    with queue.arriving(1, 1, later(), caller=ANYONE, priority=Priority.NORMAL):
        pass
    assert looks == []


async def test_an_outage_is_no_reason_to_refuse_what_comes_after_it() -> None:
    pool = FakePool()
    queue = make(pool, max_wait_s=1.0, node_wait_s=60.0, max_samples=3)
    pool.gap = "no decode node has joined"
    queue.enter([need()] * 3)
    with pytest.raises(OverloadedError) as caught:
        queue.enter([need()])
    assert caught.value.retry_after_s >= 1
    await asyncio.sleep(2 * SOON)
    pool.gap, pool.free = "", 2
    queue.pump()
    assert queue._pace.interval_s(later(0.0)) == 0
    with queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL):
        pass


async def test_refusals_do_not_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", lambda pace, now: 1.0)
    queue = make(FakePool(), max_samples=4)
    queue.enter([need()] * 4)
    delays = []
    for _ in range(20):
        with pytest.raises(OverloadedError) as caught:
            queue.enter([need()])
        delays.append(caught.value.retry_after_s)
    assert all(4 <= delay <= 6 for delay in delays)
    assert len({round(delay, 2) for delay in delays}) == 20


async def test_tickets_that_left_need_no_garbage_collector() -> None:
    queue = make(FakePool(free=2), max_samples=3)
    entries = queue.enter([need()] * 4)
    for entry in entries[:2]:
        (await queue.place(entry, later())).close()
    held = [weakref.ref(entry.granted) for entry in entries if entry.granted is not None]
    assert held
    gc.disable()
    try:
        for entry in entries:
            queue.leave(entry)
        del entry, entries
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()


def test_the_pace_is_that_of_busy_times() -> None:
    pace = Pace()
    pace.granted(1.0)
    assert pace.interval_s(2.0) == 0.0  # It never had to wait.
    pace.waits(10.0, anyone=True)
    for second in range(11, 22):
        pace.granted(second)
    assert pace.interval_s(21.0) == 1.0
    pace.waits(21.0, anyone=False)
    pace.waits(500.0, anyone=True)
    for second in range(501, 521):
        pace.granted(second)
        pace.granted(second)
    assert 0.5 < pace.interval_s(520.0) < 0.75
    assert pace.interval_s(700.0) > 3, "the next one is late"


def test_who_waits_for_an_instant_says_little_of_the_pace() -> None:
    pace = Pace()
    for second in range(100):  # Eight slots become free at once, and the last few clients come a moment too early.
        pace.waits(second, anyone=True)
        for slot in range(8):
            pace.granted(second + 0.001 * slot)
        pace.waits(second + 0.01, anyone=False)
    assert pace.interval_s(100.0) < 0.01


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), max_size=60))
def test_whoever_asks_there_is_room_for_another_and_less_than_twice_the_bound_waits(
    asks: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        queue = make(FakePool(), max_samples=20)
        for client, number in asks:
            with contextlib.suppress(OverloadedError):
                queue.enter([need()] * number, caller=Caller(name=client))
            assert queue.waiting < 2 * 20
        queue.enter([need()], caller=Caller(name="another"))

    asyncio.run(run())


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["enter"] * 4 + ["placements", "leave", "expire", "again", "ran", "close", "close", "nodes", "outage"]
        ),
        st.sampled_from("abc"),
        st.sampled_from(list(Priority)),
        st.integers(1, 4),
        st.integers(1, 9),
    ),
    max_size=120,
)


class Model:
    """Drives a queue by random steps, and knows what has to be true of it after each."""

    def __init__(self) -> None:
        self.pool = FakePool(free=2, largest=1000, later=1000)
        self.queue = make(self.pool, max_samples=8, max_tokens=50, node_wait_s=60.0)
        self.entries: list[QueueEntry] = []
        self.placements: dict[int, Placement] = {}

    async def step(self, kind: str, client: str, priority: Priority, number: int, tokens: int) -> None:
        if kind == "enter":
            with contextlib.suppress(OverloadedError):
                needs = [need(num_prompt=tokens)] * number
                self.entries += self.queue.enter(needs, caller=Caller(name=client), priority=priority)
        elif kind == "placements":
            self.pool.free += 1
            self.queue.pump()
        elif kind == "nodes":  # Larger ones come into use, or go out of it.
            self.pool.largest = 1000 if tokens > 6 else tokens
            self.queue.pump()
        elif kind == "outage":  # It begins, or it ends.
            self.pool.gap = "" if self.pool.gap else "no decode node has joined"
            self.queue.pump()
        elif kind == "leave" and self.entries:
            gone = self.entries.pop(number % len(self.entries))
            self.queue.leave(gone)
            if gone.number in self.placements:
                self.placements.pop(gone.number).close()
        elif kind == "expire" and self.entries:
            self.queue._expire(self.entries[tokens % len(self.entries)])
        elif self.placements:
            order = sorted(self.placements)[tokens % len(self.placements)]
            placement = self.placements.pop(order)
            entry = next(entry for entry in self.entries if entry.number == order)
            if kind == "close":
                self.entries.remove(entry)
                placement.close()
            else:
                self.pool.free += 1
                self.queue.again(entry, ran=kind == "ran")
        await asyncio.sleep(0)  # The queue looks again after what runs now, if it has promised to (`pump_soon`).
        await self.take()

    async def take(self) -> None:
        """Takes what was granted; drops what was refused."""
        for entry in list(self.entries):
            if entry.granted is None or not entry.granted.done():
                continue
            try:
                self.placements[entry.number] = await self.queue.place(entry, later())
            except (DeadlineError, UnavailableError):
                self.entries.remove(entry)

    def check(self) -> None:
        waiting = [entry for entry in self.entries if entry.is_waiting]
        fresh = [entry for entry in waiting if entry.first_placement is None]
        assert self.queue.waiting == len(waiting)
        assert self.queue.waiting_tokens == sum(entry.need.num_prompt for entry in waiting)
        assert len(fresh) < 2 * 8
        assert len(waiting) + len(self.placements) == len(self.entries), "an entry is lost"
        in_line = [entry for entry in waiting if entry not in self.queue._aside]
        assert self.queue.in_line == len(in_line)
        assert all(entry.need.total > self.pool.most_tokens() for entry in waiting if entry not in in_line)
        assert not in_line or self.pool.free == 0, "a placement is left over"
        head = self.queue.head
        assert (head is not None) == bool(in_line)
        if head is not None:
            assert head.need.total <= self.pool.largest, "it blocks those behind it"
            assert _rank(head) == min(map(_rank, in_line))
        for client in "abc":
            for priority in Priority:
                own = [entry for entry in fresh if entry.caller.name == client and entry.priority is priority]
                assert [entry.start for entry in own] == sorted(entry.start for entry in own), "it is not in order"
                assert self.queue._shares[priority].waiting[client] == len(own)


def _rank(entry: QueueEntry) -> tuple[Any, ...]:
    """What no later one may come before; of fresh ones of a class, each client's first."""
    if entry.ran:
        return (0, entry.first_placement)
    place = 1 + list(Priority).index(entry.priority)
    return (place, 0, entry.first_placement) if entry.first_placement is not None else (place, 1)


FIRST_LEAVES = [
    ("enter", "a", Priority.NORMAL, 2, 1),
    ("enter", "a", Priority.NORMAL, 1, 1),
    ("nodes", "a", Priority.NORMAL, 1, 4),
    ("enter", "a", Priority.NORMAL, 1, 6),
    ("leave", "a", Priority.NORMAL, 2, 1),
]
"""The first in line leaves, and no node in use could hold the one behind it."""


@settings(max_examples=60)
@given(steps)
@example(FIRST_LEAVES)
def test_any_course_of_events_loses_nobody_and_keeps_the_order(course: list[Any]) -> None:
    async def run() -> None:
        model = Model()
        for step in course:
            await model.step(*step)
            model.check()
        for entry in model.entries:
            model.queue.leave(entry)
        for placement in model.placements.values():
            placement.close()
        assert (model.queue.waiting, model.queue.waiting_tokens) == (0, 0)
        assert model.queue.head is None

    asyncio.run(run())


async def test_a_pump_does_not_take_the_place_of_a_promised_one() -> None:
    """What changes between the two, such as a node that takes samples to decode again, is seen by the promised one."""
    pool = FakePool()
    queue = make(pool)
    [entry] = queue.enter([need()])
    asyncio.get_running_loop().call_soon(setattr, pool, "free", 1)
    queue.pump_soon()
    queue.pump()
    await asyncio.sleep(0)
    assert placed([entry]) == [0]
    (await queue.place(entry, later())).close()
