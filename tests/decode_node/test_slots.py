"""The accounting of leases: never over-reserved, nothing leaked.

A router that keeps a node full leaves room to one that waits longer, and nothing when nobody waits.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.room import blocks_needed, places
from decode_node.slots import WAIT_S, Lease, NoRoomError, SlotTable, rows_of_step, smaller_than

TRACES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)) | st.integers(0, 60), max_size=80)
"""Reservations of (prompt, output) tokens, and releases of the n-th lease that was ever asked for."""


def table(slots: int = 4, kv_blocks: int = 10, block_size: int = 16) -> SlotTable:
    return SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=block_size)


def test_the_whole_sequence_is_reserved() -> None:
    assert [blocks_needed(tokens, 16) for tokens in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
    slots = table()
    lease = slots.reserve("r", 16, 17)
    assert (lease.blocks.own, lease.num_prompt_tokens, lease.max_tokens) == (3, 16, 17)
    assert slots.get(lease.lease_id) == lease
    assert (slots.held_by("r"), slots.held_by("other")) == ([lease], [])
    assert [slots.release(lease.lease_id), slots.release(lease.lease_id), slots.release(99)] == [lease, None, None]
    assert slots.get(lease.lease_id) is None


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (3, 3), (4, 5), (8, 10), (256, 320)])
def test_there_is_a_place_for_each_slot_and_a_short_line(slots: int, most: int) -> None:
    assert places(slots) == most
    node = table(slots, kv_blocks=1000)
    leases = [node.reserve("r", 1, 1) for _ in range(most)]
    with pytest.raises(NoRoomError, match=f"all {slots} slots and {most - slots} places in line are held"):
        node.reserve("r", 1, 1)
    assert node.used_slots == 0, "no sample decodes yet"
    for lease in leases[:slots]:
        node.enter(lease.lease_id)
    assert (node.used_slots, len(node)) == (slots, most)
    node.release(leases[0].lease_id)
    assert (node.used_slots, len(node)) == (slots - 1, most - 1)


def test_no_place_and_no_room_are_said_and_take_nothing() -> None:
    slots = table(slots=1)
    lease = slots.reserve("r", 1, 1)
    with pytest.raises(NoRoomError, match="all 1 slots and 0 places in line are held"):
        slots.reserve("r", 1, 1)
    slots.release(lease.lease_id)
    assert slots.reserve("r", 80, 80).blocks.own == 10  # All there is.
    slots = table()
    slots.reserve("r", 16, 16)
    with pytest.raises(NoRoomError, match="9 KV blocks are needed and 8 of 10 are free"):
        slots.reserve("r", 128, 1)
    assert (len(slots), slots.used_kv_blocks, slots.reserve("r", 127, 1).blocks.own) == (1, 2, 8)


def test_samples_of_a_prompt_count_its_blocks_once_while_one_of_them_lives() -> None:
    """A prompt of 48 tokens has two blocks before its last position, and each sample two of its own."""
    slots = table(slots=8, kv_blocks=10)
    leases = [slots.reserve("r", 48, 16, share_key="k") for _ in range(4)]
    assert slots.used_kv_blocks == 2 + 4 * 2
    with pytest.raises(NoRoomError, match="2 KV blocks are needed and 0 of 10 are free"):
        slots.reserve("r", 48, 16, share_key="k")
    for left, lease in zip((8, 6, 4, 0), leases, strict=True):
        slots.release(lease.lease_id)
        assert slots.used_kv_blocks == left
    for key, used in (("k", 4), ("l", 8)):
        slots.reserve("r", 48, 16, share_key=key)
        assert slots.used_kv_blocks == used
    with pytest.raises(NoRoomError, match="4 KV blocks are needed and 2 of 10 are free"):
        slots.reserve("r", 48, 16)


def test_a_node_whose_engine_shares_nothing_counts_all_blocks() -> None:
    slots = SlotTable(slots=4, kv_blocks=10, block_size=16, shares=False)
    assert [slots.reserve("r", 48, 16, share_key="k").blocks.own for _ in range(2)] == [4, 4]
    assert slots.used_kv_blocks == 8


@given(st.integers(1, 6), st.integers(1, 30), st.sampled_from([1, 16, 128]), TRACES)
def test_any_trace(num_slots: int, kv_blocks: int, block_size: int, trace: list[tuple[int, int] | int]) -> None:
    """Against a model that is a plain list of the leases that are held."""
    slots = table(num_slots, kv_blocks, block_size)
    given_out: list[Lease] = []
    held: list[Lease] = []
    for op in trace:
        if isinstance(op, tuple):
            free = len(held) < places(num_slots)
            fits = sum(lease.blocks.own for lease in held) + -(-sum(op) // block_size) <= kv_blocks
            if free and fits:
                given_out.append(slots.reserve("r", *op))
                held.append(given_out[-1])
            else:
                with pytest.raises(NoRoomError):
                    slots.reserve("r", *op)
        elif op < len(given_out):
            lease = given_out[op]
            assert slots.release(lease.lease_id) == (lease if lease in held else None)
            held = [other for other in held if other != lease]
        assert slots.used_kv_blocks == sum(lease.blocks.own for lease in held) <= kv_blocks
        assert len(slots) == len(held) <= places(num_slots)
    for lease in held:
        slots.release(lease.lease_id)
    assert (len(slots), slots.used_kv_blocks, slots.held_by("r")) == (0, 0, [])
    assert len({lease.lease_id for lease in given_out}) == len(given_out)


@pytest.mark.parametrize(("live", "rows"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 257)])
def test_a_step_has_the_fewest_allowed_rows_that_hold_all(live: int, rows: int) -> None:
    assert rows_of_step(live, (16, 64, 256)) == rows


def test_only_fewer_rows_than_slots_are_tried() -> None:
    assert smaller_than(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)
    assert smaller_than(64) == (1, 2, 4, 8, 16, 24, 32, 48)
    assert smaller_than(8) == (1, 2, 4)
    assert smaller_than(1) == ()


class Node:
    """A node whose samples take as long as a test says, and whose routers ask for more."""

    def __init__(self, slots: int, kv_blocks: int = 1000, **blocks: int) -> None:
        """blocks: the KV blocks that each sample of a router needs, by the router's name; 1 for other routers."""
        self.now = 100.0
        self.table = SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=16)
        self._blocks = blocks
        self._held: dict[str, list[int]] = {}

    def ask(self, router: str) -> bool:
        """Ask for room for a sample; return whether it was given."""
        self.now += 0.001
        try:
            lease = self.table.reserve(router, 1, 16 * self._blocks.get(router, 1) - 1, now=self.now)
        except NoRoomError:
            return False
        self._held.setdefault(router, []).append(lease.lease_id)
        return True

    def end(self, router: str) -> None:
        """End the router's oldest sample."""
        self.table.release(self._held[router].pop(0))

    def fill(self, router: str) -> None:
        """Take all places that are free."""
        while len(self.table) < self.table.places:
            assert self.ask(router)

    def held(self, *routers: str) -> tuple[int, ...]:
        return tuple(len(self._held.get(router, ())) for router in routers)

    def share(self, router: str) -> float:
        """The router's part of the node: of the places or of the KV, whichever is larger."""
        blocks = len(self._held.get(router, ())) * self._blocks.get(router, 1)
        return max(blocks / self.table.kv_blocks, len(self._held.get(router, ())) / self.table.places)


def test_alone_a_router_may_hold_all() -> None:
    node = Node(4)
    node.fill("a")
    assert node.held("a") == (5,)
    assert not node.ask("a")
    node.end("a")
    assert node.ask("a"), "it was refused before, but nobody else waits"


def test_what_ends_goes_to_the_one_that_waits_until_both_have_their_part() -> None:
    node = Node(5)
    node.fill("a")
    assert not node.ask("b")
    for expected in ((5, 1), (4, 2), (3, 3), (3, 3)):
        node.now += 0.5
        node.end("a")
        for router in "abba":
            node.ask(router)
        assert node.held("a", "b") == expected


def test_a_part_that_cannot_be_divided_goes_to_who_waits_longest() -> None:
    node = Node(4)  # It has five places.
    for router in "abab":
        assert node.ask(router)
    node.fill("a")
    assert not node.ask("b")
    node.end("a")
    node.now += 0.5
    assert not node.ask("a"), "it has its part, and the other waits longer"
    assert node.ask("b")
    node.end("b")
    node.now += 0.5
    assert not node.ask("b")
    assert node.ask("a")


def test_who_has_not_asked_for_a_while_waits_no_more() -> None:
    node = Node(4)
    node.fill("a")
    assert not node.ask("b")
    node.end("a")
    node.now += WAIT_S - 0.5
    assert not node.ask("a")
    node.now += 1.0
    assert node.ask("a")


def test_who_comes_back_has_not_waited_meanwhile() -> None:
    """Also if the node was full all the time, and refused all others for that alone."""
    node = Node(1)
    node.fill("a")
    assert not node.ask("b")
    for _ in range(4):
        node.now += WAIT_S - 1.0
        assert not node.ask("c")
    assert not node.ask("b")
    node.end("a")
    assert not node.ask("b"), "the other has waited longer"
    assert node.ask("c")


def test_who_asks_for_more_than_there_is_waits_for_nothing() -> None:
    """It would never get it, and nobody else anything."""
    node = Node(4, kv_blocks=10, b=11)
    for _ in range(5):
        node.now += 0.5
        assert not node.ask("b")
        assert node.ask("a")
    assert node.held("a", "b") == (5, 0)


def test_two_that_need_more_than_their_part_take_turns() -> None:
    node = Node(8, kv_blocks=10, a=7, b=7)
    assert node.ask("a")
    for first, second in ("ab", "ba", "ab"):
        assert not node.ask(second)
        node.now += 0.5
        assert not node.ask(first)
        node.end(first)
        assert not node.ask(first), "the other has waited longer"
        assert node.ask(second)


def saturate(node: Node, rounds: int = 3000, **lasts: float) -> dict[str, float]:
    """Return the mean shares of routers that always want more.

    They ask when one of their samples has ended, and once a second with the heartbeat. lasts: how long the samples of
    each router take, in seconds.
    """
    ends: list[tuple[float, str]] = []
    sums = dict.fromkeys(lasts, 0.0)
    for number in range(rounds):
        node.now += 0.1
        ended = [router for at, router in ends if at <= node.now]
        ends = [(at, router) for at, router in ends if at > node.now]
        for router in ended:
            node.end(router)
        for router in lasts if number % 10 == 0 else dict.fromkeys(ended):
            while node.ask(router):
                ends.append((node.now + lasts[router], router))
        for router in lasts:
            sums[router] += node.share(router) / rounds
    return sums


@pytest.mark.parametrize("routers", [2, 3, 5])
def test_routers_that_always_want_more_have_equal_parts(routers: int) -> None:
    shares = saturate(Node(64), **{f"r{index}": 2.0 + index for index in range(routers)})
    assert min(shares.values()) > 0.8 / routers
    assert sum(shares.values()) > 0.9


@pytest.mark.parametrize("lasts", [1.1, 4.0, 30.0])
@pytest.mark.parametrize("large", [2, 7, 10, 11, 13, 14, 16, 19, 20, 21, 30, 36, 39, 40])
def test_large_samples_do_not_starve_beside_small_ones(large: int, lasts: float) -> None:
    """Large samples get half of the KV, or as many of them as fit into it, or turns if none fits. Beside one that needs
    the whole node, a turn of the small ones is one sample."""
    shares = saturate(Node(100, kv_blocks=40, small=1, large=large), small=2.0, large=lasts)
    assert shares["large"] > 0.2
    assert shares["small"] > (0.02 if large < 40 else 0.005)
    assert sum(shares.values()) > (0.5 if large < 40 else 0.25)


def test_without_the_rule_they_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(SlotTable, "_check_part", lambda *_: None)
    shares = saturate(Node(100, kv_blocks=40, small=1, large=10), small=2.0, large=4.0)
    assert shares["large"] == 0
