"""The order between clients: random arrivals and departures against what each of them may expect."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import fairness
from router.fairness import FairQueue, Place

LARGEST = 9


class Fifo(FairQueue[Place]):
    """Negative control: one line for everybody."""

    def add(self, place: Place) -> None:
        self.order = getattr(self, "order", OrderedDict[int, Place]())
        self.order[place.order] = place

    def head(self) -> Place | None:
        return next(iter(self.order.values()), None)

    def serve(self, place: Place) -> None:
        del self.order[place.order]


def place(order: int, client: str, *, weight: int = 1, cost: int = 1, size: int = 1) -> Place:
    return Place(order, client, weight=weight, cost=cost, size=size)


def served(queue: FairQueue[Place], number: int) -> list[Place]:
    found = []
    for _ in range(number):
        head = queue.head()
        assert head is not None
        queue.serve(head)
        found.append(head)
    return found


def names(places: list[Place]) -> str:
    return "".join(each.client for each in places)


def widest_gap(queue: FairQueue[Place], costs: dict[str, list[int]], weights: dict[str, int]) -> float:
    """The largest difference between what two clients were served by weight while both had samples waiting; the first
    client's samples all come before the second's."""
    orders = count()
    for client, each in costs.items():
        for cost in each:
            queue.add(place(next(orders), client, weight=weights[client], cost=cost))
    left, got, widest = Counter({client: len(each) for client, each in costs.items()}), Counter[str](), 0.0
    while all(left.values()):
        (head,) = served(queue, 1)
        got[head.client] += head.cost
        left[head.client] -= 1
        shares = [got[client] / weights[client] for client in costs]
        widest = max(widest, max(shares) - min(shares))
    return widest


@given(
    st.lists(st.integers(1, LARGEST), min_size=1, max_size=60),
    st.lists(st.integers(1, LARGEST), min_size=1, max_size=60),
    st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
)
def test_two_waiting_clients_are_served_alike(one: list[int], two: list[int], weights: tuple[int, int]) -> None:
    gap = widest_gap(FairQueue(), {"a": one, "b": two}, dict(zip("ab", weights, strict=True)))
    assert gap <= sum(LARGEST / weight for weight in weights)  # Theorem 1 of the paper.


def test_first_come_first_served_would_not_do_that() -> None:
    """Negative control."""
    costs = {"a": [LARGEST] * 60, "b": [LARGEST] * 60}
    assert widest_gap(Fifo(), costs, {"a": 1, "b": 1}) > 10 * LARGEST
    assert widest_gap(FairQueue(), costs, {"a": 1, "b": 1}) <= 2 * LARGEST


def test_a_client_that_was_idle_has_saved_nothing_up() -> None:
    queue: FairQueue[Place] = FairQueue()
    for order in range(20):
        queue.add(place(order, "a"))
    served(queue, 10)
    for order in range(20, 40):
        queue.add(place(order, "b"))
    assert names(served(queue, 8)) == "babababa"


def test_a_client_that_asks_for_one_at_a_time_gains_nothing() -> None:
    """Its next sample, too, starts where the last one ended."""
    queue: FairQueue[Place] = FairQueue()
    for order in range(20):
        queue.add(place(order, "a"))
    got = ""
    for order in range(20, 30):
        if queue.line("b") is None:
            queue.add(place(order, "b"))
        got += names(served(queue, 1))
    assert got.count("b") in (5, 6) if got[0] == "b" else got.count("b") == 5


def test_weights_are_shares() -> None:
    queue: FairQueue[Place] = FairQueue()
    for order in range(40):
        queue.add(place(order, "ab"[order % 2], weight=1 + 2 * (order % 2)))
    assert Counter(names(served(queue, 20))) == {"a": 5, "b": 15}


def test_what_leaves_unserved_costs_nothing() -> None:
    queue: FairQueue[Place] = FairQueue()
    queue.add(place(0, "c"))
    gone = [place(order, "a", cost=100) for order in range(1, 50)]
    for each in gone:
        queue.add(each)
    for each in gone:
        queue.remove(each)
    queue.add(place(50, "a"))
    queue.add(place(51, "b"))
    assert names(served(queue, 3)) == "cab"


operations = st.lists(
    st.tuples(st.sampled_from("ssarl"), st.sampled_from("abcde"), st.integers(1, LARGEST)), max_size=200
)


@given(operations)
def test_nobody_is_lost_or_served_twice(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[Place] = FairQueue()
    orders, inside = count(), dict[int, Place]()
    for kind, client, cost in steps:
        if kind in "sa":
            new = place(next(orders), client, cost=cost, size=cost)
            inside[new.order] = new
            queue.add(new)
        elif kind == "r" and inside:
            gone = inside.pop(sorted(inside)[cost % len(inside)])
            queue.remove(gone)
        elif kind == "l" and (head := queue.head()) is not None:
            assert head.order == min(order for order, each in inside.items() if each.client == head.client)
            del inside[head.order]
            queue.serve(head)
        assert len(queue) == len(inside)
        sizes = Counter[str]()
        for each in inside.values():
            sizes[each.client] += each.size
        largest = queue.largest()
        assert (largest.size if largest else 0) == max(sizes.values(), default=0)
        assert queue.weights == len(sizes)
        newest = {client: max(o for o, each in inside.items() if each.client == client) for client in sizes}
        assert all((line := queue.line(c)) is not None and line.newest.order == newest[c] for c in newest)
    rest = served(queue, len(inside))
    assert {each.order for each in rest} == set(inside)
    assert queue.head() is None


@pytest.mark.parametrize("clients", [1, 5000])
def test_memory_does_not_grow_with_clients_that_come_and_go(clients: int) -> None:
    queue: FairQueue[Place] = FairQueue()
    queue.add(place(0, "stays"))
    for order in range(1, 6_001):
        passing = place(order, f"client {order % clients}")
        queue.add(passing)
        queue.remove(passing)
    assert len(queue._lines) == len(queue._heap) <= fairness.MAX_IDLE + 1
    assert len(queue._sizes) <= 64 + 4 * (fairness.MAX_IDLE + 2)
    assert names(served(queue, 1)) == "stays"


def test_a_long_queue_is_served_in_a_moment() -> None:
    """Steps, not seconds: comparisons grow with the logarithm of the number of clients."""
    queue: FairQueue[Place] = FairQueue()
    draw = random.Random(1)
    compared = 0
    less = fairness.Line.__lt__

    def counting(one: fairness.Line[Place], other: fairness.Line[Place]) -> bool:
        nonlocal compared
        compared += 1
        return less(one, other)

    fairness.Line.__lt__ = counting  # type: ignore[method-assign]
    try:
        for order in range(5_000):
            queue.add(place(order, f"client {draw.randrange(4096)}", cost=draw.randint(1, 999)))
        served(queue, 5_000)
    finally:
        fairness.Line.__lt__ = less  # type: ignore[method-assign]
    assert compared < 5_000 * 2 * 13 * 2
