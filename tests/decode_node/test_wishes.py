"""A router that keeps all slots busy leaves some to one that asked in vain, and no more than it has itself."""

from __future__ import annotations

import pytest

from decode_node.slots import NoRoomError, SlotTable
from decode_node.wishes import TURN_S, WISH_S, Wishes


class Node:
    """Slots whose samples take as long as a test says, and routers that ask for more."""

    def __init__(self, slots: int) -> None:
        self.now = 100.0
        self.wishes = Wishes()
        self.table = SlotTable(slots=slots, kv_blocks=1000, block_size=16)
        self._held: dict[str, list[int]] = {}

    def ask(self, router: str, *, waiting: int = 1) -> bool:
        kept = self.wishes.kept_from(router, self.table.held, self.now)
        try:
            lease = self.table.reserve(router, 1, 1, kept)
        except NoRoomError:
            self.wishes.refused(router, waiting, self.now)
            return False
        self.wishes.granted(router, self.now)
        self._held.setdefault(router, []).append(lease.lease_id)
        return True

    def end(self, router: str) -> None:
        """Its oldest sample."""
        self.table.release(self._held[router].pop(0))

    def turn_over(self, router: str, times: int) -> None:
        """Each of its samples that ends is followed by another one, if the node lets it."""
        for _ in range(times):
            if self._held[router]:
                self.end(router)
            self.ask(router, waiting=1000)

    def fill(self, router: str) -> None:
        while self.ask(router):
            pass

    def held(self, *routers: str) -> tuple[int, ...]:
        return tuple(self.table.held[router] for router in routers)


def test_without_a_wish_the_one_who_hears_first_takes_all() -> None:
    node = Node(4)
    node.fill("a")
    node.turn_over("a", 20)
    assert node.held("a", "b") == (4, 0)


@pytest.mark.parametrize("slots", [2, 3, 4, 9])
def test_one_that_asked_in_vain_gets_its_share(slots: int) -> None:
    node = Node(slots)
    node.fill("a")
    for _ in range(4 * slots):
        while node.ask("b", waiting=1000):
            pass
        node.turn_over("a", 1)
    while node.ask("b", waiting=1000):
        pass
    a, b = node.held("a", "b")
    assert a + b == slots
    assert abs(a - b) <= 1


def test_of_those_who_hold_as_many_the_one_that_waits_longest_is_next() -> None:
    """So a single slot goes round, in times that are long beside those in which it is empty."""
    node, got = Node(1), [""]
    for _ in range(round(20 * TURN_S)):
        node.now += 0.5
        got += [router for router in "abc" if node.ask(router) and router != got[-1]]
        if node.table.held:
            node.end(*node.table.held)
    assert "".join(got).startswith("abcabc")


def test_what_one_cannot_use_is_kept_no_longer_for_having_got_some() -> None:
    """It has many that wait, and no turn at a prefill node, say."""
    node = Node(8)
    node.fill("a")
    assert not node.ask("b", waiting=1000)
    for _ in range(10):
        node.turn_over("a", 8)
        node.now += WISH_S / 4
        if node.held("b") == (0,):
            assert node.ask("b", waiting=1000)
    node.fill("a")
    assert node.held("a", "b") == (7, 1)


def test_no_more_is_kept_than_was_asked_for() -> None:
    node = Node(8)
    node.fill("a")
    assert not node.ask("b", waiting=2)
    node.turn_over("a", 20)
    assert node.held("a") == (6,)
    assert node.ask("b")
    assert node.ask("b")
    node.turn_over("a", 20)
    assert node.held("a", "b") == (6, 2)


def test_what_nobody_comes_for_is_given_to_others_soon() -> None:
    node = Node(4)
    node.fill("a")
    assert not node.ask("b", waiting=1000)
    node.turn_over("a", 20)
    assert node.held("a") == (2,)
    node.now += WISH_S - 0.1
    assert not node.ask("a")
    node.now += 0.2
    node.fill("a")
    assert node.held("a") == (4,)


def test_three_share() -> None:
    node = Node(9)
    node.fill("a")
    for _ in range(60):
        for router in "bc":
            while node.ask(router, waiting=1000):
                pass
        node.turn_over("a", 1)
    assert node.held("a", "b", "c") == (3, 3, 3)


def test_who_holds_fewer_is_kept_from_nothing() -> None:
    node = Node(4)
    node.fill("a")
    assert not node.ask("b")
    assert not node.ask("a")  # It has asked in vain, too.
    node.end("a")
    assert node.ask("b")
