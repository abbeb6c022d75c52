from __future__ import annotations

import pytest

from decode_node.ladder import Ladder, smaller_than


@pytest.mark.parametrize(("live", "rows"), [(1, 256), (17, 256), (256, 256), (300, 300)])
def test_without_a_certified_number_steps_have_all_slots(live: int, rows: int) -> None:
    assert Ladder(256).rows(live) == rows


@pytest.mark.parametrize(("live", "rows"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 257)])
def test_the_fewest_certified_rows_that_hold_all(live: int, rows: int) -> None:
    assert Ladder.of(256, [64, 16, 256]).rows(live) == rows


def test_only_fewer_rows_than_slots_are_tried() -> None:
    assert smaller_than(256) == (16, 32, 64, 96, 128, 192)
    assert smaller_than(64) == (16, 32)
    assert smaller_than(8) == ()
