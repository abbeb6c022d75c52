"""The stamps of blocks: who gets which, and how they come from one real NIXL agent to another."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.node.kv.stamps import (
    DIGEST,
    OWNER,
    STAMP_BYTES,
    Owned,
    Prefills,
    StampTable,
    Transfers,
    chained,
    runs,
    stamps,
)
from tests.node.table_pair import A, B, Broken, TablePair, of


def test_a_stamp_is_the_owners_name_and_the_tokens_up_to_the_blocks_end() -> None:
    """The pinned values are those of other builds."""
    prompt = [*range(20, 57)]
    digests = chained(prompt, 16)
    assert digests.tolist() == [int.from_bytes(_sha256(prompt[:end])[:8], "little") for end in (16, 32, 37)]
    assert digests[0] == 0x33B762DFACF21801
    expected = [(name + int(digest)) % 2**64 for name, digest in zip((A, B, B), digests, strict=True)]
    assert stamps([(A, 1), (B, 2)], prompt, 16) == np.array(expected, np.uint64).tobytes()
    assert (OWNER, DIGEST, STAMP_BYTES) == (0, 1, 8), "other builds read them"
    with pytest.raises(AssertionError):
        stamps([(A, 1), (B, 1)], prompt, 16)


def _sha256(prompt: list[int]) -> bytes:
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt)).digest()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_prompts_have_the_same_digests_as_far_as_they_begin_alike(left: list[int], right: list[int]) -> None:
    """A last block that is not full is no beginning of a full one."""
    a, b = chained(left, 2).tolist(), chained(right, 2).tolist()
    ends = [[*range(2, len(prompt), 2), len(prompt)] for prompt in (left, right)]
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x == y) == (left[: ends[0][i]] == right[: ends[1][i]])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_runs_cover_the_blocks_in_order(blocks: list[int]) -> None:
    found = list(runs(blocks))
    assert [block for first, count in found for block in range(first, first + count)] == blocks
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(found)), "they could be longer"


def test_an_owner_is_written_over_what_was_there() -> None:
    table = StampTable(6)
    table.own([4, 1], of(100, 2))
    table.sign([4, 1], np.array([7, 8], np.uint64))
    table.own([2], of(102, 1))
    assert table.rows[[4, 1, 2]].tolist() == [[100, 7], [101, 8], [102, 0]]
    assert table.unsigned([2, 1, 4]) == [2]
    table.own([1], of(B, 1))
    assert table.rows[1].tolist() == [B, 0], "another owner's digest must not stay"
    assert table.rows[[0, 3, 5]].tolist() == [[0, 0]] * 3


def request(name: str = "r", prompt: int = 40, **params: Any) -> Any:
    given = {"do_remote_decode": True, "corun_stamps": of(100, 3), "corun_check": True, **params}
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt, num_computed_tokens=0, kv_transfer_params=given)


def test_each_prefill_has_its_own_account_of_blocks() -> None:
    """It counts over the chunks of a prompt, and begins again when the request has lost its blocks."""
    prefills = Prefills(16)
    for name, first in (("r", 100), ("s", 200)):
        prefills.begin(request(name, corun_stamps=of(first, 3)))
    assert prefills.give("r", [7, 3], anew=False) == Owned((7, 3), of(100, 2))
    assert prefills.give("r", [], anew=False) is None
    assert prefills.give("r", [9], anew=False) == Owned((9,), of(102, 1))
    assert prefills.give("s", [2], anew=False) == Owned((2,), of(200, 1))
    assert prefills.give("r", [1, 2, 3], anew=True) == Owned((1, 2, 3), of(100, 3))
    assert prefills.end("r", [1, 2, 3]) == [("r", 3)]
    assert prefills.end("never began", [1]) == []
    assert prefills.give("r", [3], anew=False) is None
    assert len(prefills) == 1


def test_cached_blocks_stay_their_owners() -> None:
    """They are the first ones, and their tokens count as computed. A block that was given away is its new owner's."""
    prefills = Prefills(16)
    for name, first, computed in (("r", 100, 0), ("s", 200, 32), ("t", 300, 48), ("u", 400, 0)):
        prefills.begin(request(name, prompt=64, corun_stamps=of(first, 4)))
        prefills._running[name].request.num_computed_tokens = computed
    assert prefills.give("r", [7, 3], anew=False) == Owned((7, 3), of(100, 2))
    assert prefills.give("s", [7, 3, 5], anew=False) == Owned((5,), of(202, 1))
    assert prefills.give("s", [6], anew=False) == Owned((6,), of(203, 1))
    assert prefills.give("t", [7, 3, 5, 8], anew=False) == Owned((8,), of(303, 1))
    assert prefills.end("r", [7, 3]) == [("r", 2)]
    assert prefills.end("s", [7, 3, 5, 6]) == [("r", 2), ("s", 2)]
    prefills.give("u", [6, 3], anew=False)  # Whoever still names "s" or "r" for these is refused by their stamps.
    assert prefills.end("t", [7, 3, 5, 8]) == [("r", 1), ("u", 1), ("s", 1), ("t", 1)]


@pytest.mark.parametrize("params", [{"do_remote_decode": False}, None])
def test_what_nobody_may_read_gets_no_owner(params: dict[str, Any] | None) -> None:
    prefills, reader = Prefills(16), request(**(params or {}))
    if params is None:
        reader.kv_transfer_params = None
    prefills.begin(reader)
    assert len(prefills) == 0
    assert prefills.give("r", [1], anew=False) is None


def test_a_chosen_prompt_is_signed_once_and_whole_by_the_step_that_completes_it() -> None:
    prefills, running = Prefills(16), request(prompt=40)
    prefills.begin(running)
    prefills.begin(request("not chosen", prompt=16, corun_check=False))
    prefills.give("r", [7, 3], anew=False)
    assert prefills.completed("r", 32) == ()
    running.num_computed_tokens = 32
    prefills.give("r", [9], anew=False)
    assert prefills.completed("r", 7) == ()
    assert prefills.completed("r", 8) == (7, 3, 9)
    running.num_computed_tokens = 40
    assert prefills.completed("r", 1) == ()
    prefills.give("not chosen", [8], anew=False)
    assert prefills.completed("not chosen", 16) == prefills.completed("unknown", 16) == ()


SCATTERED = tuple(range(1, 64, 2))
"""Too far apart for the reader's table to hold what lies between."""


@pytest.mark.parametrize(
    "blocks", [(0,), (63,), (5, 6, 7), (7, 5, 6, 60), range(31, -1, -1), range(41, 12, -1), SCATTERED], ids=str
)
def test_rows_come_over_in_the_order_asked_for(pair: TablePair, blocks: Sequence[int]) -> None:
    pair.writer.rows[:] = np.arange(128, dtype=np.uint64).reshape(64, 2) + np.uint64(2**63)
    assert pair.fetch(*blocks).tolist() == pair.writer.rows[list(blocks)].tolist()
    pair.writer.own([63, 0], of(A, 2))  # A later fetch sees a later owner.
    assert pair.fetch(*blocks).tolist() == pair.writer.rows[list(blocks)].tolist()


@pytest.mark.parametrize("blocks", [(), (64,), (-1,), (0, 2**32 - 1), tuple(range(33))], ids=str)
def test_rows_that_no_table_has_are_not_asked_for(pair: TablePair, blocks: tuple[int, ...]) -> None:
    assert isinstance(pair.fetch(*blocks), ValueError)


def test_a_transfer_that_is_late_is_kept_until_it_has_ended() -> None:
    """Released while it runs, it could still write its rows, over those of the next one."""
    agent = Broken("PROC")
    transfers = Transfers(agent, ["a", "b"], 0.0)
    assert transfers.are_over(1.0)
    assert [str(error) for error in transfers.end()] == ["the transfer did not end within 0 s"] * 2
    assert transfers.are_late()
    assert agent.events == ["posted", "posted"]
    agent.state = "DONE"
    assert not transfers.are_late()
    assert agent.events == ["posted", "posted", "released", "released"]
    assert not transfers.are_late()
    assert len(agent.events) == 4
