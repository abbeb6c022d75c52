"""Slot accounting: never over-reserved, nothing leaked, the lowest free slot first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.slots import Lease, NoRoomError, SlotTable, blocks_needed

TRACES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)) | st.integers(0, 60), max_size=80)
"""Reservations of (prompt, output) tokens, and releases of the n-th lease that was ever asked for."""


def table(slots: int = 4, kv_blocks: int = 10, block_size: int = 16) -> SlotTable:
    return SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=block_size)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_needed(tokens: int, blocks: int) -> None:
    assert blocks_needed(tokens, 16) == blocks


def test_the_whole_sequence_is_reserved() -> None:
    slots = table()
    lease = slots.reserve("r", 16, 17)
    assert (lease.slot, lease.kv_blocks, lease.num_prompt_tokens, lease.max_tokens) == (0, 3, 16, 17)
    assert (len(slots), slots.used_kv_blocks, slots.slots_in_use()) == (1, 3, [0])
    assert slots.get(lease.lease_id) == lease
    assert slots.release(lease.lease_id) == lease
    assert (len(slots), slots.used_kv_blocks, slots.slots_in_use()) == (0, 0, [])


def test_the_lowest_free_slot_is_given() -> None:
    slots = table(kv_blocks=100)
    leases = [slots.reserve("r", 1, 1) for _ in range(4)]
    assert [lease.slot for lease in leases] == [0, 1, 2, 3]
    for which in (2, 0):
        slots.release(leases[which].lease_id)
    assert [slots.reserve("r", 1, 1).slot for _ in range(2)] == [0, 2]


def test_no_slot_and_no_room_are_said_and_take_nothing() -> None:
    slots = table(slots=1)
    lease = slots.reserve("r", 1, 1)
    with pytest.raises(NoRoomError, match="all 1 slots are held"):
        slots.reserve("r", 1, 1)
    slots.release(lease.lease_id)
    assert slots.reserve("r", 80, 80).kv_blocks == 10  # All there is.
    slots = table()
    slots.reserve("r", 16, 16)
    with pytest.raises(NoRoomError, match="9 KV blocks are needed and 8 of 10 are free"):
        slots.reserve("r", 128, 1)
    assert (len(slots), slots.used_kv_blocks, slots.reserve("r", 127, 1).slot) == (1, 2, 1)


def test_releases_happen_once() -> None:
    slots = table()
    first = slots.reserve("r", 1, 1)
    slots.release(first.lease_id)
    assert slots.release(first.lease_id) is None
    assert slots.release(99) is None
    second = slots.reserve("r", 1, 1)
    assert second.lease_id != first.lease_id
    assert slots.get(first.lease_id) is None
    assert slots.used_kv_blocks == second.kv_blocks


def test_leases_belong_to_their_router() -> None:
    slots = table()
    mine = [slots.reserve("a", 1, 1), slots.reserve("a", 1, 1)]
    other = slots.reserve("b", 1, 1)
    assert (slots.held_by("a"), slots.held_by("b"), slots.held_by("c")) == (mine, [other], [])


@given(st.integers(1, 6), st.integers(1, 30), st.sampled_from([1, 16, 128]), TRACES)
def test_any_trace(num_slots: int, kv_blocks: int, block_size: int, trace: list[tuple[int, int] | int]) -> None:
    """Against a model that is a plain list of the leases that are held."""
    slots = table(num_slots, kv_blocks, block_size)
    given_out: list[Lease] = []
    held: list[Lease] = []
    for op in trace:
        if isinstance(op, tuple):
            free = sorted(set(range(num_slots)) - {lease.slot for lease in held})
            fits = sum(lease.kv_blocks for lease in held) + -(-sum(op) // block_size) <= kv_blocks
            if free and fits:
                given_out.append(slots.reserve("r", *op))
                held.append(given_out[-1])
                assert held[-1].slot == free[0]
            else:
                with pytest.raises(NoRoomError):
                    slots.reserve("r", *op)
        elif op < len(given_out):
            lease = given_out[op]
            assert slots.release(lease.lease_id) == (lease if lease in held else None)
            held = [other for other in held if other != lease]
        assert slots.slots_in_use() == sorted(lease.slot for lease in held)
        assert slots.used_kv_blocks == sum(lease.kv_blocks for lease in held) <= kv_blocks
        assert len(slots) == len({lease.slot for lease in held}) <= num_slots
    for lease in held:
        slots.release(lease.lease_id)
    assert (len(slots), slots.used_kv_blocks, slots.held_by("r")) == (0, 0, [])
    assert len({lease.lease_id for lease in given_out}) == len(given_out)
