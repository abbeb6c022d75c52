"""The stamps of blocks, alone and between two real NIXL agents."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.node.kv.checks import Claim, Peer, ReadChecks
from corun.node.kv.stamps import DIGEST, OWNER, PeerTable, StampTable, runs, stamps, stranger

A, B = 2**64 - 2, 123
"""Owners; the first one's stamps pass 2^64."""


def rows(*owners: int) -> Any:
    return np.array([[owner, 0] for owner in owners], np.uint64)


def test_stamps_count_up_and_wrap() -> None:
    assert stamps(A, 0, 4).tolist() == [2**64 - 2, 2**64 - 1, 0, 1]
    assert stamps(A, 2, 2).tolist() == [0, 1]
    assert stamps(5, 2**64 - 5, 1).tolist() == [0]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_runs_cover_the_blocks_in_order(blocks: list[int]) -> None:
    found = list(runs(blocks))
    assert [block for first, count in found for block in range(first, first + count)] == blocks
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(found)), "they could be longer"


def test_an_owner_is_written_over_what_was_there() -> None:
    table = StampTable(6)
    table.own([4, 1], 100, 0)
    table.sign([4, 1], np.array([7, 8], np.uint64))
    table.own([2], 100, 2)
    assert table.rows[[4, 1, 2]].tolist() == [[100, 7], [101, 8], [102, 0]]
    table.own([1], B, 0)
    assert table.rows[1].tolist() == [B, 0], "another owner's digest must not stay"
    assert table.rows[[0, 3, 5]].tolist() == [[0, 0]] * 3


STRANGERS = {
    "swapped": (rows(B + 1, B), "block 0 of 2 is not this prompt's (2 are not)"),
    "another owner's last block": (rows(B, B + 1, A), "block 2 of 3 is not this prompt's (1 are not)"),
    "never written": (rows(B, 0), "block 1 of 2"),
    "one off": (rows(B + 1, B + 2), "block 0 of 2"),
}


@pytest.mark.parametrize(("found", "reason"), STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_noticed(found: Any, reason: str) -> None:
    assert reason in stranger(found, B)


def test_the_owner_is_no_stranger() -> None:
    assert stranger(rows(B, B + 1, B + 2), B) == ""
    assert stranger(rows(*stamps(A, 0, 4).tolist()), A) == ""


class Pair:
    """A table that is read from and one that reads, each with its own agent."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        logging.getLogger("nixl").setLevel(logging.ERROR)
        self.writer, self.reader = StampTable(64), StampTable(32)
        self.agents = [nixl_agent(name, nixl_agent_config()) for name in ("writer", "reader")]
        self.memory = [
            table.register(agent) for table, agent in zip((self.writer, self.reader), self.agents, strict=True)
        ]
        self.peer = PeerTable(
            agent=self.agents[1].add_remote_agent(self.agents[0].get_agent_metadata()),
            address=self.writer.address,
            num_blocks=64,
        )

    def fetch(self, *blocks: int) -> Any:
        return self.reader.fetch(self.agents[1], self.peer, blocks, 5.0)

    def close(self) -> None:
        self.agents[1].remove_remote_agent(self.peer.agent)
        for agent, memory in zip(self.agents, self.memory, strict=True):
            agent.deregister_memory(memory)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pytest.importorskip("nixl")
    made = Pair()
    yield made
    made.close()


def test_rows_come_over_in_the_order_asked_for(pair: Pair) -> None:
    pair.writer.rows[:] = np.arange(128, dtype=np.uint64).reshape(64, 2) + np.uint64(2**63)
    scattered = tuple(range(1, 64, 2))  # Too far apart for the reader's table to hold what lies between.
    for blocks in (
        (0,),
        (63,),
        (5, 6, 7),
        (7, 5, 6, 60),
        tuple(range(31, -1, -1)),
        tuple(range(41, 12, -1)),
        scattered,
    ):
        assert pair.fetch(*blocks).tolist() == pair.writer.rows[list(blocks)].tolist()


def test_a_later_fetch_sees_a_later_owner(pair: Pair) -> None:
    pair.writer.own([3, 4], A, 0)
    assert stranger(pair.fetch(3, 4), A) == ""
    pair.writer.own([4], B, 0)
    assert "block 1 of 2" in stranger(pair.fetch(3, 4), A)


@pytest.mark.parametrize("blocks", [(), (64,), (-1,), (0, 2**32 - 1), tuple(range(33))], ids=str)
def test_rows_that_no_table_has_are_not_asked_for(pair: Pair, blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="blocks"):
        pair.fetch(*blocks)


def checks(pair: Pair, digests: Any = None) -> ReadChecks:
    made = ReadChecks(pair.reader, digests or (lambda blocks: np.array([9] * len(blocks), np.uint64)))
    made.learn("engine", pair.peer.address)
    return made


def judge(pair: Pair, checker: ReadChecks, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "owner": B,
        "engine_id": "engine",
        "request_id": "r",
        "theirs": (8, 9, 2),
        "ours": (1, 2, 3),
    }
    claim = Claim(**{**values, **changes})
    (verdict,) = checker.judge([claim], pair.agents[1], dict.fromkeys(["engine", "other"], source(pair.peer.agent)))
    return verdict


def source(agent: str) -> Peer:
    return Peer(agent=agent, num_blocks=64)


def test_the_owners_kv_is_accepted(pair: Pair) -> None:
    pair.writer.own([8, 9, 2], B, 0)
    verdict = judge(pair, checks(pair))
    assert (verdict.refusal, verdict.checked) == ("", False)
    pair.writer.sign([8, 9, 2], np.array([9, 9, 9], np.uint64))
    verdict = judge(pair, checks(pair))
    assert (verdict.refusal, verdict.checked) == ("", True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another owner": ({"owner": B + 1}, "block 0 of 3 is not this prompt's"),
    "other blocks": ({"theirs": (8, 9, 3)}, "block 2 of 3 is not this prompt's"),
    "another order": ({"theirs": (9, 8, 2)}, "block 0 of 3"),
    "an unknown engine": ({"engine_id": "other"}, "where other keeps its stamps is not known"),
    "fewer blocks than ours": ({"theirs": (8, 9)}, "2 blocks were offered for 3"),
    "a block that is not there": ({"theirs": (8, 9, 64)}, "the stamps could not be read"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_claim_is_refused(pair: Pair, changes: dict[str, Any], reason: str) -> None:
    pair.writer.own([8, 9, 2], B, 0)
    assert reason in judge(pair, checks(pair), **changes).refusal


@pytest.mark.parametrize("signed", [(9, 9, 8), (9, 9, 0), (0, 9, 9)])
def test_bits_that_changed_on_the_way_are_refused(pair: Pair, signed: tuple[int, ...]) -> None:
    pair.writer.own([8, 9, 2], B, 0)
    pair.writer.sign([8, 9, 2], np.array(signed, np.uint64))
    verdict = judge(pair, checks(pair))
    assert verdict.checked
    assert "changed on the way (1 did)" in verdict.refusal


def test_a_peer_that_is_gone_is_a_refusal(pair: Pair) -> None:
    class Broken:
        def get_xfer_descs(self, *_: Any) -> Any:
            raise RuntimeError("the peer is gone")

    (verdict,) = checks(pair).judge(
        [Claim(owner=B, engine_id="engine", request_id="r", theirs=(1,), ours=(1,))],
        Broken(),
        {"engine": source("writer")},
    )
    assert verdict.refusal == "the stamps could not be read: the peer is gone"


def test_stamps_that_do_not_come_are_a_refusal(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        released = 0

        def get_xfer_descs(self, *_: Any) -> Any: ...

        def initialize_xfer(self, *_: Any) -> Any: ...

        def transfer(self, _: Any) -> str:
            return "PROC"

        check_xfer_state = transfer

        def release_xfer_handle(self, _: Any) -> None:
            self.released += 1

    monkeypatch.setattr("corun.node.kv.checks.FETCH_TIMEOUT_S", 0.02)
    slow = Slow()
    claim = Claim(owner=B, engine_id="engine", request_id="r", theirs=(1,), ours=(1,))
    verdicts = checks(pair).judge([claim, claim], slow, {"engine": source("writer")})
    assert ["did not end within 0.02 s" in verdict.refusal for verdict in verdicts] == [True, True]
    assert slow.released == 2


def test_reads_of_one_step_are_judged_each_by_its_own_stamps(pair: Pair) -> None:
    """Their rows land side by side; one that cannot be fetched, or is a stranger's, refuses no other."""
    many = tuple(range(21, 60, 2))  # So many runs that all between them would come over, too, had the others no need.
    for owner, blocks in ((A, (8, 9)), (B, many), (B + 500, (3, 60))):
        pair.writer.own(blocks, owner, 0)
    wanted = [(A, (8, 9)), (A, (64, 65)), (B, many), (A, (3, 60)), (B + 500, (3, 60))]
    claims = [
        Claim(owner=owner, engine_id="engine", request_id="r", theirs=theirs, ours=theirs) for owner, theirs in wanted
    ]
    verdicts = checks(pair).judge(claims, pair.agents[1], {"engine": source(pair.peer.agent)})
    assert [verdict.refusal for verdict in verdicts] == [
        "",
        "the stamps could not be read: blocks 64 to 65 of 64",
        "",
        "block 0 of 2 is not this prompt's (2 are not)",
        "",
    ]


def test_columns() -> None:
    """They are read by other builds."""
    assert (OWNER, DIGEST) == (0, 1)
