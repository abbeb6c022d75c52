"""Slot accounting: never over-reserved, nothing leaked, the lowest free slot first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.slots import Lease, NoRoomError, SlotTable, blocks_needed, rows_of_step, smaller_than

TRACES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)) | st.integers(0, 60), max_size=80)
"""Reservations of (prompt, output) tokens, and releases of the n-th lease that was ever asked for."""


def table(slots: int = 4, kv_blocks: int = 10, block_size: int = 16) -> SlotTable:
    return SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=block_size)


def test_the_whole_sequence_is_reserved() -> None:
    assert [blocks_needed(tokens, 16) for tokens in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]
    slots = table()
    lease = slots.reserve("r", 16, 17)
    assert (lease.slot, lease.kv_blocks, lease.num_prompt_tokens, lease.max_tokens) == (0, 3, 16, 17)
    assert slots.get(lease.lease_id) == lease
    assert (slots.held_by("r"), slots.held_by("other")) == ([lease], [])
    assert [slots.release(lease.lease_id), slots.release(lease.lease_id), slots.release(99)] == [lease, None, None]
    assert slots.get(lease.lease_id) is None


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


@pytest.mark.parametrize(("live", "rows"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 257)])
def test_a_step_has_the_fewest_allowed_rows_that_hold_all(live: int, rows: int) -> None:
    assert rows_of_step(live, (16, 64, 256)) == rows


def test_only_fewer_rows_than_slots_are_tried() -> None:
    assert smaller_than(256) == (16, 32, 64, 96, 128, 192)
    assert smaller_than(64) == (16, 32)
    assert smaller_than(8) == ()
