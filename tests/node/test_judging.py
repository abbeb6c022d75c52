"""Judgements of completed reads, over real tables, and which reads are judged together, in which table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from corun.node.kv.judging import Judge, Judgement, Verdict, compare
from corun.node.kv.stamps import DIGEST, StampTable
from tests.node.table_pair import CLAIM, A, B, Broken, TablePair, nines, of
from tests.node.worker_half import Judgements

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another owner": ({"stamps": of(B + 1, 3)}, "block 0 of 3 is not this prompt's"),
    "other blocks": ({"theirs": (8, 9, 3)}, "block 2 of 3 is not this prompt's"),
    "another order": ({"theirs": (9, 8, 2)}, "block 0 of 3"),
    "fewer blocks than ours": ({"theirs": (8, 9)}, "2 blocks were offered for 3"),
    "a block that is not there": ({"theirs": (8, 9, 64)}, "the stamps could not be read"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_claim_is_refused(pair: TablePair, changes: dict[str, Any], reason: str) -> None:
    pair.writer.own([8, 9, 2], of(B, 3))
    assert pair.judge(CLAIM) == [Verdict("")]
    (verdict,) = pair.judge(replace(CLAIM, **changes))
    assert reason in verdict.refusal


def test_a_peer_whose_stamps_are_not_known_is_refused(pair: TablePair) -> None:
    verdicts = Judgement([(CLAIM, None)], pair.reader, nines, pair.agents[1]).verdicts(0.0)
    assert verdicts == [Verdict("where engine keeps its stamps is not known")]


SIGNED = {
    (9, 9, 9): "",
    (9, 9, 8): "the bits of block 2 of 3 changed on the way (1 did)",
    (0, 9, 9): "",
    (9, 0, 0): "",
    (0, 7, 9): "the bits of block 1 of 3 changed on the way (1 did)",
    (8, 0, 8): "the bits of block 0 of 3 changed on the way (2 did)",
}
"""Digests, 0 for a block without one, and the refusal of a read of blocks whose contents have the digest 9."""


@pytest.mark.parametrize(("signed", "refusal"), SIGNED.items(), ids=str)
def test_bits_that_changed_on_the_way_are_refused(pair: TablePair, signed: tuple[int, ...], refusal: str) -> None:
    """Exactly the blocks that have digests are compared: an earlier prompt, which was not chosen, may have left its
    first blocks, or only these may have come from a prompt that was chosen."""
    pair.writer.own([8, 9, 2], of(B, 3))
    pair.writer.sign([8, 9, 2], np.array(signed, np.uint64))
    assert pair.judge(CLAIM) == [Verdict(refusal, checked=True)]
    compared: list[Any] = []
    compare([(CLAIM, pair.fetch(8, 9, 2))], lambda blocks: compared.extend(blocks) or np.array([9] * len(blocks)))
    assert compared == [ours for ours, digest in zip(CLAIM.ours, signed, strict=True) if digest]
    everything = pair.fetch(8, 9, 2)[:, DIGEST] == 9
    assert everything.all() == (signed == (9, 9, 9)), "control: all rows compared refuse honest KV"


def test_the_device_is_asked_once_for_the_bits_of_all_reads(pair: TablePair) -> None:
    """Each answer waits for it, and so do all rows of the step that finds the reads complete."""
    asked: list[int] = []
    pair.writer.own([8, 9, 2], of(B, 3))
    pair.writer.sign([8, 9, 2], np.array([9, 0, 7], np.uint64))
    rows = pair.fetch(8, 9, 2)
    others = replace(CLAIM, ours=tuple(block + 100 for block in CLAIM.ours))
    foreign = replace(CLAIM, stamps=bytes(24))
    found = [(CLAIM, rows), (foreign, rows), (CLAIM, "no rows"), (others, rows)]
    bits = {CLAIM.ours[0]: 9, CLAIM.ours[2]: 7, others.ours[0]: 9, others.ours[2]: 8}

    def digests(blocks: Sequence[int]) -> Any:
        asked.append(len(blocks))
        return np.array([bits[block] for block in blocks], np.uint64)

    verdicts = compare(found, digests)
    assert asked == [4]
    assert [verdict.checked for verdict in verdicts] == [True, False, False, True]
    refusals = [verdict.refusal for verdict in verdicts]
    assert (refusals[0], refusals[2:]) == ("", ["no rows", "the bits of block 2 of 3 changed on the way (1 did)"])
    assert "is not this prompt's" in refusals[1]


@pytest.mark.parametrize("first", range(3))
def test_a_read_of_the_last_blocks_is_compared_with_theirs(pair: TablePair, first: int) -> None:
    """The reader has the others already. What is wrong is named by its place in the prompt."""
    pair.writer.own([8, 9, 2], of(B, 3))
    pair.writer.sign([2], np.array([9], np.uint64))
    part = replace(
        CLAIM, first=first, stamps=CLAIM.stamps[8 * first :], theirs=CLAIM.theirs[first:], ours=CLAIM.ours[first:]
    )
    assert pair.judge(part) == [Verdict("", checked=True)]
    (verdict,) = pair.judge(replace(part, stamps=CLAIM.stamps[: 8 * (3 - first)]))
    assert bool(verdict.refusal) == bool(first), "control: stamps of the first blocks"
    pair.writer.own([2], of(A, 1))
    assert pair.judge(part) == [Verdict("block 2 of 3 is not this prompt's (1 are not)")]


BROKEN = {
    "gone": (RuntimeError("the peer is gone"), "the stamps could not be read: the peer is gone"),
    "failed": ("ERR", "the stamps could not be read: the transfer ended as ERR"),
    "silent": ("PROC", "the stamps could not be read: the transfer did not end within 0.02 s"),
}


@pytest.mark.parametrize(("state", "reason"), BROKEN.values(), ids=BROKEN)
def test_stamps_that_do_not_come_are_a_refusal(
    pair: TablePair, monkeypatch: pytest.MonkeyPatch, state: Any, reason: str
) -> None:
    """The stamps of all reads that are judged together have one time limit."""
    monkeypatch.setattr("corun.node.kv.judging.FETCH_TIMEOUT_S", 0.02)
    agent = Broken(state)
    assert pair.judge(CLAIM, CLAIM, agent=agent) == [Verdict(reason)] * 2
    assert agent.events == ["posted", "posted", *(["released"] * 2 if state != "PROC" else [])]


def test_nobody_waits_for_stamps_that_come_late(pair: TablePair) -> None:
    """While they are on the way, a row can be fetched into another table, and then they are compared as they came."""
    pair.writer.own([8, 9, 2], of(B, 3))
    agent = Broken("PROC")
    judgement = Judgement([(CLAIM, pair.peer)], pair.reader, nines, agent)
    assert [judgement.verdicts(0.0), judgement.verdicts(0.001)] == [None, None]
    assert agent.events == ["posted"]
    pair.reader.own(range(3), of(B, 3))  # As the transfer would.
    other = StampTable(1)
    memory = other.register(pair.agents[1])
    first = other.fetch(pair.agents[1], [(pair.peer, (8,))], 5.0).rows(5.0)
    pair.agents[1].deregister_memory(memory)
    assert first is not None
    assert not isinstance(first[0], Exception)
    assert first[0].tolist() == [[B, 0]]
    agent.state = "DONE"
    assert judgement.verdicts(0.0) == [Verdict("")]
    assert agent.events == ["posted", "released"]


def test_reads_of_one_step_are_judged_each_by_its_own_stamps(pair: TablePair) -> None:
    """Their rows land side by side; one that cannot be fetched, or is a stranger's, refuses no other."""
    # So many runs that all between them would come over, too, had the others behind them no need of the room.
    many = tuple(block for block in range(48, 20, -1) if block % 5)
    for owner, blocks in ((A, (8, 9)), (B, many), (B + 500, (3, 60))):
        pair.writer.own(blocks, of(owner, len(blocks)))
    wanted = [(A, (8, 9)), (A, (64, 65)), (B, many), (A, (3, 60)), (B + 500, (3, 60))]
    claims = (replace(CLAIM, stamps=of(owner, len(blocks)), theirs=blocks, ours=blocks) for owner, blocks in wanted)
    verdicts = pair.judge(*claims)
    assert [verdict.refusal for verdict in verdicts] == [
        "",
        "the stamps could not be read: blocks 64 to 65 of 64",
        "",
        "block 0 of 2 is not this prompt's (2 are not)",
        "",
    ]


@pytest.fixture
def judge(judged: Judgements) -> Judge:
    return Judge("agent", lambda: StampTable(8), lambda engine_id: None, nines)


def test_reads_that_complete_while_a_judgement_runs_are_judged_by_the_next(judge: Judge, judged: Judgements) -> None:
    judged.is_late = True
    assert judge.judge([("a", CLAIM)]) == []
    assert judge.is_at_work
    others = [("b", replace(CLAIM, request_id="s")), ("c", None)]
    assert [judge.judge(others), judge.judge([])] == [[], []]
    judged.is_late, judged.refusals = False, {"s": "block 0 of 3 is not this prompt's"}
    found = judge.judge([])
    assert [(name, claim) for name, claim, _ in found] == [("a", CLAIM), *others]
    refusals = [verdict.refusal for _, _, verdict in found]
    assert refusals == ["", "block 0 of 3 is not this prompt's", "nobody said whose KV it must be"]
    assert [[claim.request_id for claim, _ in reads] for reads, *_ in judged.asked] == [["r"], ["s"]]
    assert not judge.is_at_work


def test_rows_that_may_still_come_change_no_later_judgement(judge: Judge, judged: Judgements) -> None:
    """The next one has another table, and the old one is used again when nothing comes into it any more."""
    tables = []
    for name, are_rows_late in (("a", True), ("b", True), ("c", False), ("d", False), ("e", True), ("f", False)):
        judged.are_rows_late = are_rows_late
        assert [one.name for one in judge.judge([(name, CLAIM)])] == [name]
        tables.append(judged.asked[-1][1])
    assert len({id(table) for table in tables[:3]}) == 3, "two were late, so there are three"
    assert tables[2] is tables[3] is tables[4]
    assert any(tables[5] is table for table in tables[:2]), "a free one was taken"


def test_a_table_is_free_when_nothing_comes_into_it(judge: Judge, judged: Judgements) -> None:
    judged.are_rows_late = True
    for name in "abc":
        judge.judge([(name, CLAIM)])
    assert len({id(table) for _, table, *_ in judged.asked}) == 3
    judged.are_rows_late = False
    judge.judge([])
    judged.are_rows_late = True
    for name in "defg":
        judge.judge([(name, CLAIM)])
    assert len({id(table) for _, table, *_ in judged.asked}) == 4, "the current one, and three that had been late"
