"""The prompts' part of a colocated node's KV blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_node.shares import prompt_blocks


@pytest.mark.parametrize(
    ("kv_blocks", "max_model_len", "expected"),
    [
        (40_000, 32_768, 5000),  # An eighth.
        (8000, 32_768, 2048),  # The longest prompt.
        (8000, 32_769, 2049),
        (3000, 32_768, 1500),  # A half: longer prompts are refused by their length, and samples have room, too.
        (16, 16, 2),
        (1, 16, 0),
    ],
)
def test_prompts_have_an_eighth_but_room_for_the_longest_and_at_most_a_half(
    kv_blocks: int, max_model_len: int, expected: int
) -> None:
    assert prompt_blocks(kv_blocks, 16, max_model_len) == expected


@given(st.integers(2, 100_000), st.sampled_from([16, 32, 64, 128]), st.integers(1, 200_000))
def test_both_have_room_for_what_fits_a_half(kv_blocks: int, block_size: int, max_model_len: int) -> None:
    share = prompt_blocks(kv_blocks, block_size, max_model_len)
    longest = -(-max_model_len // block_size)
    assert 0 < share <= kv_blocks - share
    assert share >= min(longest, kv_blocks // 2)
