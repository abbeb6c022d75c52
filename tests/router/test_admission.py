from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from corun.errors import DeadlineError, OverloadedError, UnavailableError
from router.admission import AdmissionQueue
from router.lanes import Ticket
from router.members import Seat
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
    """`free` seats for samples of up to `largest` tokens."""

    def __init__(self, free: int = 0, largest: int = 1000) -> None:
        self.free = free
        self.largest = largest
        self.gap = ""
        self.changed: Any = lambda: None

    def place(self, need: Need) -> Seat | None:
        if self.gap or not self.free or need.total > self.largest:
            return None
        self.free -= 1
        return cast("Seat", FakeSeat(self, need))

    def could_hold(self, num_tokens: int) -> bool:
        return num_tokens <= self.largest

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
    queue = make(pool)
    (ticket,) = queue.enter([need()])
    await asyncio.sleep(SOON / 2)
    pool.gap = ""
    queue.pump()
    await asyncio.sleep(2 * SOON)
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
