from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.errors import DeadlineError, OverloadedError, UnavailableError
from corun.rpc.auth import Caller
from corun.types import Priority
from router.admission import AdmissionQueue
from router.lanes import Lanes, Ticket
from router.nodes.members import Seat
from router.pace import Pace
from router.placement import Need

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
    """`free` seats for samples of up to `largest` tokens; a node that cannot be used would take up to `later`."""

    def __init__(self, free: int = 0, largest: int = 1000, later: int = 0) -> None:
        self.free = free
        self.largest = largest
        self.later = later
        self.gap = ""
        self.looks = 0
        self.changed: Any = lambda: None

    def place(self, need: Need) -> Seat | None:
        self.looks += 1
        if self.gap or not self.free or need.total > self.largest:
            return None
        self.free -= 1
        return cast("Seat", FakeSeat(self, need))

    def most_tokens(self) -> int:
        return 0 if self.gap else self.largest

    def awaited(self, num_tokens: int) -> str:
        return "d2 is joining: it is stuck" if num_tokens <= self.later else ""

    def missing(self) -> str:
        return self.gap


def make(pool: FakePool, **changes: Any) -> AdmissionQueue:
    values = {"max_samples": 100, "max_tokens": 100_000, "node_wait_s": SOON}
    queue = AdmissionQueue(pool, **{**values, **changes})
    pool.changed = queue.pump
    return queue


def need(num_prompt: int = 1, max_tokens: int = 1) -> Need:
    return Need(num_prompt=num_prompt, max_tokens=max_tokens)


def later(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def seated(tickets: list[Ticket]) -> list[int]:
    return [i for i, t in enumerate(tickets) if t.granted is not None and t.granted.done()]


async def test_seats_are_given_in_order_of_arrival() -> None:
    pool = FakePool(free=2)
    queue = make(pool)
    tickets = queue.enter([need()] * 3) + queue.enter([need()])
    assert seated(tickets) == [0, 1]
    assert (queue.waiting, queue.waiting_tokens) == (2, 2)
    (await queue.seat(tickets[1], later())).close()
    assert seated(tickets) == [0, 2]
    (await queue.seat(tickets[0], later())).close()
    assert seated(tickets) == [2, 3]
    assert queue.waiting == 0


async def test_a_small_sample_does_not_overtake_a_large_one() -> None:
    pool = FakePool(free=1, largest=10)
    queue = make(pool)
    tickets = queue.enter([need(), need(max_tokens=8), need()])
    assert seated(tickets) == [0]
    pool.place = lambda _: None  # type: ignore[method-assign]
    queue.pump()
    assert seated(tickets) == [0]


async def test_a_ticket_that_waits_again_keeps_its_turn() -> None:
    pool = FakePool(free=2)
    queue = make(pool)
    tickets = queue.enter([need()] * 4)
    first, second = [await queue.seat(ticket, later()) for ticket in tickets[:2]]
    queue.again(tickets[1])
    queue.again(tickets[0])
    assert queue.waiting == 4
    first.close()
    assert tickets[0].granted is not None
    assert tickets[0].granted.done()
    assert seated(tickets) == [0]
    second.close()
    assert seated(tickets) == [0, 1]


async def test_too_many_waiting_samples_are_refused_whole() -> None:
    pool = FakePool(free=1)
    queue = make(pool, max_samples=2)
    kept = queue.enter([need()] * 3)
    with pytest.raises(OverloadedError) as caught:
        queue.enter([need()])
    assert 0.1 <= caught.value.retry_after_s <= 30
    assert (queue.waiting, seated(kept)) == (2, [0])


async def test_a_refused_request_gives_back_the_seats_it_got() -> None:
    pool = FakePool(free=3)
    queue = make(pool, max_samples=1)
    with pytest.raises(OverloadedError):
        queue.enter([need()] * 5)
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (3, 0, 0)


async def test_waiting_prompt_tokens_are_bounded() -> None:
    queue = make(FakePool(), max_tokens=10)
    queue.enter([need(num_prompt=6)])
    with pytest.raises(OverloadedError, match="6 of at most 10 tokens"):
        queue.enter([need(num_prompt=5)])
    queue.enter([need(num_prompt=4)])


async def test_a_wait_ends_at_its_deadline() -> None:
    queue = make(FakePool())
    (ticket,) = queue.enter([need()])
    with pytest.raises(DeadlineError, match="no slot became free"):
        await queue.seat(ticket, later(SOON))
    assert queue.waiting == 0


async def test_an_expired_head_makes_way() -> None:
    pool = FakePool(free=1, largest=100)
    queue = make(pool)
    large, small = queue.enter([need(max_tokens=80), need()])
    seat = await queue.seat(large, later())
    large_again = queue.enter([need(max_tokens=80)])[0]
    seat.close()
    assert seated([small, large_again]) == [0]


async def test_missing_nodes_end_the_wait_after_a_while() -> None:
    pool = FakePool()
    pool.gap = "no decode node has joined"
    queue = make(pool)
    tickets = queue.enter([need()] * 2)
    for ticket in tickets:
        with pytest.raises(UnavailableError, match="no decode node has joined"):
            await queue.seat(ticket, later())
    assert queue.waiting == 0


async def test_nodes_that_come_back_in_time_end_nothing() -> None:
    pool = FakePool()
    pool.gap = "gone"
    queue = make(pool, node_wait_s=0.5)
    (ticket,) = queue.enter([need()])
    await asyncio.sleep(SOON / 2)
    pool.gap = ""
    queue.pump()
    await asyncio.sleep(0.6)
    assert not seated([ticket])
    pool.free = 1
    queue.pump()
    assert seated([ticket])


async def test_missing_nodes_are_named_at_the_deadline_too() -> None:
    pool = FakePool()
    pool.gap = "no prefill node has joined"
    queue = make(pool, node_wait_s=60.0)
    (ticket,) = queue.enter([need()])
    with pytest.raises(UnavailableError, match="no prefill node has joined"):
        await queue.seat(ticket, later(SOON))
    queue.leave(ticket)


async def test_what_no_node_can_hold_does_not_block_the_queue() -> None:
    pool = FakePool(free=1, largest=10)
    queue = make(pool)
    large, small = queue.enter([need(max_tokens=50), need()])
    with pytest.raises(UnavailableError, match="51 tokens"):
        await queue.seat(large, later())
    assert seated([small])


async def test_who_only_an_unusable_node_could_hold_steps_aside_and_comes_back_first() -> None:
    pool = FakePool(free=1, largest=10, later=100)
    queue = make(pool, node_wait_s=60.0)
    large, larger, small, late = queue.enter([need(max_tokens=50), need(max_tokens=90), need(), need()])
    assert seated([large, larger, small, late]) == [2]
    assert (queue.waiting, queue.in_line, queue.next_need) == (3, 1, late.need)
    pool.largest = 60
    queue.pump()
    assert (queue.in_line, queue.next_need) == (2, large.need), "it is first again, and waits for room as ever"
    pool.largest, pool.free = 100, 1
    queue.pump()
    assert seated([large, larger, small, late]) == [0, 2]
    assert queue.next_need == larger.need
    for ticket in (large, larger, small, late):
        queue.leave(ticket)
    assert (queue.waiting, queue.in_line) == (0, 0)


async def test_what_had_a_seat_steps_aside_and_keeps_its_turn() -> None:
    pool = FakePool(free=2, largest=100, later=100)
    queue = make(pool, node_wait_s=60.0)
    large, other = queue.enter([need(max_tokens=50), need(max_tokens=50)])
    seats = [await queue.seat(ticket, later()) for ticket in (large, other)]
    pool.largest = 10
    queue.again(other, ran=True)
    queue.again(large, ran=True)
    assert (queue.waiting, queue.in_line) == (2, 0)
    pool.largest = 100
    for seat in seats:
        seat.close()
    assert seated([large, other]) == [0, 1]
    assert queue._lanes.head() is None


async def test_a_wait_aside_ends_after_a_while_and_says_for_which_node_it_was() -> None:
    queue = make(FakePool(free=1, largest=10, later=100))
    (ticket,) = queue.enter([need(max_tokens=50)])
    with pytest.raises(UnavailableError, match="51 tokens: d2 is joining: it is stuck"):
        await queue.seat(ticket, later())
    (ticket,) = queue.enter([need(max_tokens=50)])
    with pytest.raises(UnavailableError, match="51 tokens: d2 is joining: it is stuck"):
        await queue.seat(ticket, later(SOON / 2))
    assert queue.waiting == 0


async def test_a_full_queue_sheds_those_aside_first_and_they_shed_nobody_in_line() -> None:
    pool = FakePool(largest=10, later=100)
    queue = make(pool, max_samples=2, node_wait_s=60.0)
    asides = [queue.enter([need(max_tokens=50)], caller=HOG)[0] for _ in range(2)]
    waiting = [queue.enter([need()], caller=HOG)[0] for _ in range(2)]
    for ticket in asides:
        with pytest.raises(OverloadedError):
            await queue.seat(ticket, later())
    assert (queue.waiting, queue.in_line) == (2, 2)
    with pytest.raises(OverloadedError):
        queue.enter([need(max_tokens=50)], caller=SMALL, priority=Priority.HIGH)
    assert all(ticket.is_waiting for ticket in waiting)


async def test_who_waits_aside_makes_nobody_expect_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", 100.0)
    queue = make(FakePool(largest=10, later=100), max_wait_s=10.0, node_wait_s=60.0)
    queue.enter([need(max_tokens=50)])
    with queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL):
        pass


async def test_a_waiter_that_is_cancelled_leaves() -> None:
    queue = make(FakePool())
    (ticket,) = queue.enter([need()])
    waiter = asyncio.ensure_future(queue.seat(ticket, later()))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait((waiter,))
    assert waiter.cancelled()
    assert queue.waiting == 0


async def test_a_seat_granted_to_a_cancelled_waiter_goes_back() -> None:
    pool = FakePool()
    queue = make(pool)
    (ticket,) = queue.enter([need()])
    waiter = asyncio.ensure_future(queue.seat(ticket, later()))
    await asyncio.sleep(0)
    pool.free = 1
    queue.pump()  # The seat is granted, and the waiter cancelled before it could take it.
    assert pool.free == 0
    waiter.cancel()
    await asyncio.wait((waiter,))
    assert pool.free == 1


async def test_a_seat_is_not_granted_to_a_waiter_cancelled_before() -> None:
    pool = FakePool()
    queue = make(pool)
    first, second = queue.enter([need()] * 2)
    waiter = asyncio.ensure_future(queue.seat(first, later()))
    await asyncio.sleep(0)
    waiter.cancel()
    pool.free = 1
    queue.pump()
    assert seated([second])
    await asyncio.wait((waiter,))
    assert pool.free == 0


async def test_leaving_twice_is_harmless() -> None:
    pool = FakePool(free=1)
    queue = make(pool)
    first, second = queue.enter([need()] * 2)
    for ticket in (first, first, second, second):
        queue.leave(ticket)
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (1, 0, 0)


async def test_a_request_that_leaves_is_looked_behind_once() -> None:
    """However many samples it has: each look asks every node, in the loop that carries all streams."""
    pool = FakePool()
    queue = make(pool, max_samples=1000)
    cancelled, late, _ = (queue.enter([need()] * samples) for samples in (256, 256, 1))
    deadline = later(0.0)
    waits = [asyncio.ensure_future(queue.seat(ticket, deadline)) for ticket in late]
    await asyncio.sleep(0)
    pool.looks = 0
    for ticket in cancelled:
        queue.leave(ticket)
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(result) for result in results} == {DeadlineError}
    await asyncio.sleep(0)
    assert 1 <= pool.looks < 10


async def test_random_visitors_lose_no_seat() -> None:
    pool = FakePool(free=5)
    queue = make(pool, max_samples=1000)
    rng = random.Random(3)
    running = most = 0

    async def visit() -> None:
        nonlocal running, most
        (ticket,) = queue.enter([need(num_prompt=rng.randint(1, 9))])
        seat = await queue.seat(ticket, later())
        for _ in range(rng.randint(0, 2)):
            seat.close()
            queue.again(ticket)
            seat = await queue.seat(ticket, later())
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(rng.random() / 500)
        finally:
            running -= 1
            seat.close()

    tasks = [asyncio.ensure_future(visit()) for _ in range(300)]
    for _ in range(100):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    await asyncio.wait(tasks)
    assert most == 5
    assert (pool.free, queue.waiting, queue.waiting_tokens) == (5, 0, 0)


HOG, SMALL = Caller(name="hog"), Caller(name="small")


async def give(pool: FakePool, queue: AdmissionQueue, tickets: dict[str, Ticket], number: int) -> str:
    """The names of the next tickets that get seats, one after the other."""
    found = []
    for _ in range(number):
        before = {name for name, ticket in tickets.items() if ticket.is_waiting}
        pool.free += 1
        queue.pump()
        found += [name for name in before if not tickets[name].is_waiting]
    return " ".join(found)


async def refusal(ticket: Ticket, queue: AdmissionQueue) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        await queue.seat(ticket, later())
    return caught.value


async def test_higher_classes_come_first() -> None:
    pool = FakePool()
    queue = make(pool)
    tickets = {}
    for name in ("low 1", "normal 1", "high 1", "low 2", "normal 2", "high 2"):
        (tickets[name],) = queue.enter([need()], priority=Priority(name.split()[0]))
    assert await give(pool, queue, tickets, 6) == "high 1 high 2 normal 1 normal 2 low 1 low 2"


async def test_clients_of_a_class_take_turns() -> None:
    pool = FakePool()
    queue = make(pool)
    tickets = {}
    for index in range(4):
        (tickets[f"h{index}"],) = queue.enter([need()], caller=HOG)
    for index in range(2):
        (tickets[f"s{index}"],) = queue.enter([need()], caller=SMALL)
    assert await give(pool, queue, tickets, 6) == "h0 s0 h1 s1 h2 h3"


async def test_what_ran_comes_before_every_class_and_what_only_had_a_seat_before_its_own() -> None:
    pool = FakePool(free=2)
    queue = make(pool)
    tickets = {}
    for name in ("ran", "refused"):
        (tickets[name],) = queue.enter([need()], priority=Priority.LOW)
        seat = await queue.seat(tickets[name], later())
        pool.free = 0 if name == "refused" else pool.free
    (tickets["low"],) = queue.enter([need()], priority=Priority.LOW)
    (tickets["high"],) = queue.enter([need()], priority=Priority.HIGH)
    queue.again(tickets["refused"])
    queue.again(tickets["ran"], ran=True)
    assert await give(pool, queue, tickets, 4) == "ran high refused low"
    assert seat is not None


async def test_a_full_queue_sheds_lower_classes_first_the_newest_of_the_largest_client() -> None:
    queue = make(FakePool(), max_samples=6)
    kept = queue.enter([need()], priority=Priority.NORMAL, caller=HOG)
    low = [queue.enter([need()], priority=Priority.LOW, caller=client)[0] for client in (HOG, SMALL, HOG, HOG, SMALL)]
    for expected in (low[3], low[2], low[4]):  # Of equals, either may go: here, the first by name.
        kept += queue.enter([need()], priority=Priority.HIGH)
        error = await refusal(expected, queue)
        assert 0.1 <= error.retry_after_s <= 30
    assert queue.waiting == 6
    assert queue.refused == 3
    assert all(ticket.is_waiting for ticket in [*kept, low[0], low[1]])
    with pytest.raises(OverloadedError):
        queue.enter([need()], priority=Priority.LOW)


async def test_a_client_with_less_in_the_queue_takes_from_the_one_with_most() -> None:
    queue = make(FakePool(), max_samples=5)
    hog = [queue.enter([need()], caller=HOG)[0] for _ in range(5)]
    small = [queue.enter([need()], caller=SMALL)[0] for _ in range(2)]
    for ticket in hog[3:]:
        await refusal(ticket, queue)
    for client in (SMALL, HOG):  # Three against two: one more for either would only turn that around.
        with pytest.raises(OverloadedError):
            queue.enter([need()], caller=client)
    assert all(ticket.is_waiting for ticket in [*hog[:3], *small])
    assert queue.waiting == 5


async def test_a_queue_without_shares_would_lock_small_clients_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(Lanes, "victim", lambda lanes, newcomer: None)
    queue = make(FakePool(), max_samples=5)
    hog = [queue.enter([need()], caller=HOG)[0] for _ in range(5)]
    with pytest.raises(OverloadedError):
        queue.enter([need()], caller=SMALL)
    assert all(ticket.is_waiting for ticket in hog)


async def test_a_request_is_shed_whole_and_only_if_that_is_enough() -> None:
    queue = make(FakePool(), max_samples=8)
    first = queue.enter([need()] * 3, caller=HOG)
    second = queue.enter([need()] * 4, caller=HOG)
    with pytest.raises(OverloadedError):  # All of both would have to go.
        queue.enter([need()] * 9, caller=SMALL)
    assert all(ticket.is_waiting for ticket in [*first, *second])
    small = queue.enter([need()] * 2, caller=SMALL)
    for ticket in second:
        await refusal(ticket, queue)
    assert all(ticket.is_waiting for ticket in [*first, *small])
    assert queue.waiting == 5


async def test_after_shedding_in_vain_everybody_has_their_place() -> None:
    pool = FakePool()
    queue = make(pool, max_samples=4)
    tickets = {}
    for index in range(2):
        tickets[f"h{index}a"], tickets[f"h{index}b"] = queue.enter([need()] * 2, caller=HOG)
    with pytest.raises(OverloadedError):
        queue.enter([need()] * 5, caller=SMALL, priority=Priority.HIGH)
    assert (queue.waiting, queue.waiting_tokens) == (4, 4)
    assert await give(pool, queue, tickets, 4) == "h0a h0b h1a h1b"


async def test_a_request_that_has_begun_is_never_shed() -> None:
    """Neither the rest of a request whose first sample has a seat, nor what waits again."""
    pool = FakePool(free=2)
    queue = make(pool, max_samples=3)
    begun = queue.enter([need()] * 2, caller=HOG, priority=Priority.LOW)
    for ticket in begun:
        await queue.seat(ticket, later())
    queue.again(begun[0], ran=True)
    queue.again(begun[1])
    pool.free = 1
    part = queue.enter([need()] * 2, caller=HOG, priority=Priority.LOW)  # The seat goes to the one that ran.
    assert [ticket.is_waiting for ticket in [*begun, *part]] == [False, True, True, True]
    pool.free = 2
    queue.pump()
    assert [ticket.is_waiting for ticket in [*begun, *part]] == [False, False, False, True]
    queue.enter([need()] * 2, caller=SMALL, priority=Priority.HIGH)
    with pytest.raises(OverloadedError):
        queue.enter([need()], caller=SMALL, priority=Priority.HIGH)
    assert part[1].is_waiting


async def test_who_would_be_refused_is_refused_before_any_work() -> None:
    queue = make(FakePool(), max_samples=3)
    arrive: Any = lambda caller, priority=Priority.NORMAL, n=1: queue.arriving(  # noqa: E731
        n, 1, later(), caller=caller, priority=priority
    )
    queue.enter([need()] * 3, caller=HOG)
    with pytest.raises(OverloadedError, match="3 of at most 3 wait"), arrive(HOG):
        pass
    with pytest.raises(OverloadedError), arrive(SMALL, Priority.LOW):
        pass
    with arrive(SMALL), arrive(HOG, Priority.HIGH):
        pass
    assert queue.refused == 2


async def test_requests_on_their_way_in_are_bounded_too() -> None:
    """They wait for nodes, or for a tokenizer."""
    queue = make(FakePool(), max_samples=3)
    with contextlib.ExitStack() as arrived:
        for _ in range(3):
            arrived.enter_context(queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL))
        with pytest.raises(OverloadedError), queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL):
            pass
    with queue.arriving(3, 1, later(), caller=SMALL, priority=Priority.NORMAL):
        pass


async def test_a_wait_that_would_be_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", 1.0)
    queue = make(FakePool(), max_samples=1000, max_wait_s=10.0)
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
    assert queue._pace.interval_s == 0
    with queue.arriving(1, 1, later(), caller=SMALL, priority=Priority.NORMAL):
        pass


async def test_refusals_do_not_come_back_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "interval_s", 1.0)
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
    tickets = queue.enter([need()] * 4)
    for ticket in tickets[:2]:
        (await queue.seat(ticket, later())).close()
    held = [weakref.ref(ticket.granted) for ticket in tickets if ticket.granted is not None]
    assert held
    gc.disable()
    try:
        for ticket in tickets:
            queue.leave(ticket)
        del ticket, tickets
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()


def test_the_pace_is_that_of_busy_times() -> None:
    pace = Pace()
    pace.granted(1.0)
    assert pace.interval_s == 0.0  # It never had to wait.
    pace.waits(10.0, anyone=True)
    for second in range(11, 22):
        pace.granted(second)
    assert pace.interval_s == pytest.approx(1.0, rel=0.1)
    pace.waits(21.0, anyone=False)
    pace.waits(500.0, anyone=True)
    for second in range(501, 521):
        pace.granted(second)
        pace.granted(second)
    assert 0.5 < pace.interval_s < 0.75
    pace.waits(700.0, anyone=True)
    assert pace.interval_s > 10


def test_who_waits_for_an_instant_says_nothing_of_the_pace() -> None:
    pace = Pace()
    for second in range(100):  # Eight slots become free at once, and the last few clients come a moment too early.
        pace.waits(second, anyone=True)
        for slot in range(8):
            pace.granted(second + 0.001 * slot)
        pace.waits(second + 0.01, anyone=False)
    assert pace.interval_s == 0.0


steps = st.lists(
    st.tuples(
        st.sampled_from(["enter"] * 4 + ["seats", "leave", "expire", "again", "ran", "close", "close", "nodes"]),
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
        self.tickets: list[Ticket] = []
        self.seats: dict[int, Seat] = {}
        self.had_seat: set[int] = set()
        self.parties: dict[int, list[int]] = {}
        self.shed = 0

    async def step(self, kind: str, client: str, priority: Priority, number: int, tokens: int) -> None:
        if kind == "enter":
            with contextlib.suppress(OverloadedError):
                needs = [need(num_prompt=tokens)] * number
                party = self.queue.enter(needs, caller=Caller(name=client), priority=priority)
                self.tickets += party
                self.parties |= {ticket.order: [each.order for each in party] for ticket in party}
        elif kind == "seats":
            self.pool.free += 1
            self.queue.pump()
        elif kind == "nodes":  # Larger ones come into use, or go out of it.
            self.pool.largest = 1000 if tokens > 6 else tokens
            self.queue.pump()
        elif kind == "leave" and self.tickets:
            gone = self.tickets.pop(number % len(self.tickets))
            self.queue.leave(gone)
            if gone.order in self.seats:
                self.seats.pop(gone.order).close()
        elif kind == "expire" and self.tickets:
            self.queue._expire(self.tickets[tokens % len(self.tickets)])
        elif self.seats:
            order = sorted(self.seats)[tokens % len(self.seats)]
            seat = self.seats.pop(order)
            ticket = next(ticket for ticket in self.tickets if ticket.order == order)
            if kind == "close":
                self.tickets.remove(ticket)
                seat.close()
            else:
                self.pool.free += 1
                self.queue.again(ticket, ran=kind == "ran")
        await self.take()

    async def take(self) -> None:
        """Takes what was granted; drops what was refused."""
        for ticket in list(self.tickets):
            if ticket.granted is None or not ticket.granted.done():
                continue
            try:
                self.seats[ticket.order] = await self.queue.seat(ticket, later())
                self.had_seat.add(ticket.order)
            except OverloadedError:
                assert not self.had_seat.intersection(self.parties[ticket.order]), "shed what had begun"
                self.tickets.remove(ticket)
                self.shed += 1
            except (DeadlineError, UnavailableError):
                self.tickets.remove(ticket)

    def check(self) -> None:
        waiting = [ticket for ticket in self.tickets if ticket.is_waiting]
        fresh = [ticket for ticket in waiting if ticket.turn is None]
        assert self.queue.waiting == len(waiting)
        assert self.queue.waiting_tokens == sum(ticket.need.num_prompt for ticket in waiting)
        assert not fresh or len(fresh) <= 8
        assert len(waiting) + len(self.seats) == len(self.tickets), "a ticket is lost"
        in_line = [ticket for ticket in waiting if ticket.aside_at is None]
        assert self.queue.in_line == len(in_line)
        assert all(ticket.need.total > self.pool.largest for ticket in waiting if ticket not in in_line)
        assert not in_line or self.pool.free == 0, "a seat is left over"
        head = self.queue._lanes.head()
        assert (head is not None) == bool(in_line)
        if head is not None:
            assert head.need.total <= self.pool.largest, "it blocks those behind it"
            assert _rank(head) == min(map(_rank, in_line))
        for client in "abc":
            line = [ticket for ticket in in_line if ticket.client == client and ticket.turn is None and not ticket.ran]
            firsts = {p: min((t.order for t in line if t.priority is p), default=None) for p in Priority}
            for priority, first in firsts.items():
                found = self.queue._lanes._lanes[priority].fresh.line(client)
                assert (next(iter(found.places)) if found else None) == first, "a client's samples go by arrival"


def _rank(ticket: Ticket) -> tuple[Any, ...]:
    """What no later one may come before; of fresh ones of a class, each client's first."""
    if ticket.ran:
        return (0, ticket.turn)
    place = 1 + list(Priority).index(ticket.priority)
    return (place, 0, ticket.turn) if ticket.turn is not None else (place, 1)


@settings(max_examples=60)
@given(steps)
def test_any_course_of_events_loses_nobody_and_keeps_the_order(course: list[Any]) -> None:
    async def run() -> None:
        model = Model()
        for step in course:
            await model.step(*step)
            model.check()
        for ticket in model.tickets:
            model.queue.leave(ticket)
        for seat in model.seats.values():
            seat.close()
        assert (model.queue.waiting, model.queue.waiting_tokens) == (0, 0)
        assert model.queue._lanes.head() is None

    asyncio.run(run())
