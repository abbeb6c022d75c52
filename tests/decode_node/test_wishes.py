"""A router that keeps a node full leaves room to one that waits, but no more than it has itself."""

from __future__ import annotations

import pytest

from decode_node.slots import NOTHING, NoRoomError, Room, SlotTable
from decode_node.wishes import TURN_S, Wishes

WISH_S = 3.0
"""How long a router's wish holds."""


class Node:
    """A node whose samples take as long as a test says, and whose routers ask for more."""

    def __init__(self, slots: int, kv_blocks: int = 1000, **blocks: int) -> None:
        """blocks: the KV blocks that each sample of a router needs, by the router's name; 1 for other routers."""
        self.now = 100.0
        self.table = SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=16)
        self.wishes = Wishes(self.table.total)
        self._blocks = blocks
        self._held: dict[str, list[int]] = {}

    def ask(self, router: str, *, waiting: int = 1) -> bool:
        """Ask for room for a sample; return whether it was given.

        waiting: the number of waiting samples that the router reports with the next heartbeat if it was not.
        """
        tokens = 16 * self._blocks.get(router, 1)
        kept = self.wishes.kept_from(router, self.table.held, self.now)
        try:
            lease = self.table.reserve(router, 1, tokens - 1, kept)
        except NoRoomError:
            if waiting:
                self.say(router, waiting)
            return False
        self.wishes.granted(router, Room(1, lease.kv_blocks), self.now)
        self._held.setdefault(router, []).append(lease.lease_id)
        return True

    def say(self, router: str, waiting: int) -> None:
        """Report the number of waiting samples with a heartbeat."""
        need, until = self.table.needs(16 * self._blocks.get(router, 1)), self.now + WISH_S
        self.wishes.note(router, waiting, need, self.table.held, self.now, until)

    def end(self, router: str) -> None:
        """End the router's oldest sample."""
        self.table.release(self._held[router].pop(0))

    def turn_over(self, router: str, times: int) -> None:
        """End the router's samples one after the other; ask for another one after each."""
        for _ in range(times):
            if self._held[router]:
                self.end(router)
            self.ask(router, waiting=1000)

    def fill(self, router: str) -> None:
        while self.ask(router):
            pass

    def held(self, *routers: str) -> tuple[int, ...]:
        """Return the number of slots that each router holds."""
        return tuple(self.table.held.get(router, NOTHING).slots for router in routers)

    def shares(self, *routers: str) -> tuple[float, ...]:
        """Return the share of the KV that each router holds."""
        return tuple(self.table.held.get(router, NOTHING).kv_blocks / self.table.kv_blocks for router in routers)


def test_without_a_wish_the_one_who_hears_first_takes_all() -> None:
    node = Node(4)
    node.fill("a")
    node.turn_over("a", 20)
    assert node.held("a", "b") == (4, 0)


@pytest.mark.parametrize("slots", [2, 3, 4, 9])
def test_one_that_waits_gets_its_share(slots: int) -> None:
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
    """So a single slot goes round, with turns that are long compared to the times in which it is empty."""
    node, got = Node(1), [""]
    for _ in range(round(20 * TURN_S)):
        node.now += 0.5
        got += [router for router in "abc" if node.ask(router) and router != got[-1]]
        if node.table.held:
            node.end(*node.table.held)
    assert "".join(got).startswith("abcabc")


def test_what_one_cannot_use_is_kept_no_longer_for_having_got_some() -> None:
    """For example, it has many samples that wait, but no turn at a prefill node."""
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
    assert not node.ask("a")  # It waits as well.
    node.end("a")
    assert node.ask("b")


def saturate(node: Node, rounds: int = 3000, **lasts: float) -> tuple[float, ...]:
    """Return the mean shares of the KV of routers that always want more.

    They ask when one of their samples has ended, and once a second with the heartbeat. lasts: how long the samples of
    each router take, in seconds.
    """
    routers = tuple(lasts)
    ends: list[tuple[float, str]] = []
    seen = []
    for number in range(rounds):
        node.now += 0.1
        ended = [router for at, router in ends if at <= node.now]
        ends = [(at, router) for at, router in ends if at > node.now]
        for router in ended:
            node.end(router)
        is_heartbeat = number % 10 == 0
        for router in routers if is_heartbeat else dict.fromkeys(ended):
            if is_heartbeat:
                node.say(router, 1000)
            while node.ask(router, waiting=0):
                ends.append((node.now + lasts[router], router))
        seen.append(node.shares(*routers))
    return tuple(sum(shares) / rounds for shares in zip(*seen, strict=True))


@pytest.mark.parametrize("lasts", [1.1, 4.0, 30.0])
@pytest.mark.parametrize("large", [2, 7, 10, 11, 13, 14, 16, 19, 20, 21, 30, 36, 39, 40])
def test_large_samples_do_not_starve_beside_small_ones(large: int, lasts: float) -> None:
    """Large samples get half of the KV, or as many of them as fit into it, or turns if none fits."""
    node = Node(100, kv_blocks=40, small=1, large=large)
    of_small, of_large = saturate(node, small=2.0, large=lasts)
    assert of_large > 0.2
    assert of_small > 0.04
    assert of_small + of_large > 0.8


def test_with_nothing_kept_they_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(100, kv_blocks=40, small=1, large=10)
    monkeypatch.setattr(node.wishes, "note", lambda *_: None)
    assert saturate(node, small=2.0, large=4.0) == (pytest.approx(1), 0)


def test_who_holds_more_is_told_by_what_it_holds_most_of() -> None:
    """6 of 8 slots are more than 16 of 40 KV blocks, but one more large sample would be yet more: they take turns."""
    node = Node(8, kv_blocks=40, many=2, large=16)
    for router in ("many", "many", "many", "many", "many", "large"):
        assert node.ask(router)
    assert not node.ask("large")
    assert node.ask("many")
    for _ in range(3):
        node.now += WISH_S - 0.5
        assert not node.ask("large")
    for _ in range(3):
        assert not node.ask("many", waiting=0)
        node.end("many")
    assert node.ask("large")
    assert node.ask("many")  # The large one's turn is over.


def test_no_turn_is_taken_that_leads_nowhere() -> None:
    """If both held as much, the second large sample would not fit either."""
    node = Node(100, kv_blocks=40, small=1, large=17)
    assert node.ask("large")
    node.fill("small")
    for _ in range(10):
        node.now += WISH_S - 0.5
        assert not node.ask("large", waiting=1000)
        node.end("small")
        assert node.ask("small")


def test_what_one_has_just_had_is_taken_by_nobody_in_between() -> None:
    """A router's next sample comes a moment after its last one has ended."""
    node = Node(4)
    for router in "abab":
        assert node.ask(router)
    for _ in range(10):
        node.now += 1
        assert not node.ask("a", waiting=1000)
        assert not node.ask("b", waiting=1000)
    node.end("b")
    node.end("a")
    assert node.ask("a", waiting=0)
    assert not node.ask("a", waiting=0)
    assert node.ask("b", waiting=0)


def test_nothing_is_kept_for_what_could_never_be_held() -> None:
    node = Node(4, kv_blocks=10, giant=11)
    assert not node.ask("giant", waiting=1000)
    node.fill("a")
    assert node.held("a") == (4,)
