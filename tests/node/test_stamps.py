"""The stamps of blocks: who gets which, alone and between two real NIXL agents, and what a reader makes of them."""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    Claim,
    Judgement,
    Owned,
    PeerTable,
    Prefills,
    StampTable,
    Transfers,
    Verdict,
    chained,
    compare,
    runs,
    stamps,
)

A, B = 2**64 - 2, 123
"""Owners; the first one's stamps pass 2^64."""


def rows(*owners: int) -> Any:
    return np.array([[owner, 0] for owner in owners], np.uint64)


def made(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def of(first: int, count: int) -> bytes:
    """Stamps that count up."""
    return made(*((first + i) % 2**64 for i in range(count)))


CLAIM = Claim(stamps=of(B, 3), first=0, engine_id="engine", request_id="r", theirs=(8, 9, 2), ours=(1, 2, 3))


def test_a_stamp_is_the_owners_name_and_the_tokens_up_to_the_blocks_end() -> None:
    """The pinned values are those of other builds."""
    prompt = [*range(20, 57)]
    digests = chained(prompt, 16)
    assert digests.tolist() == [int.from_bytes(_sha256(prompt[:end])[:8], "little") for end in (16, 32, 37)]
    assert digests[0] == 0x33B762DFACF21801
    expected = [(name + int(digest)) % 2**64 for name, digest in zip((A, B, B), digests, strict=True)]
    assert stamps([(A, 1), (B, 2)], prompt, 16) == made(*expected)
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


def nines(blocks: Sequence[int]) -> Any:
    return np.array([9] * len(blocks), np.uint64)


class Pair:
    """A table that is read from and one that reads, each with its own agent."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        logging.getLogger("nixl").setLevel(logging.ERROR)
        self.writer, self.reader = StampTable(64), StampTable(32)
        self.agents = [nixl_agent(name, nixl_agent_config()) for name in ("writer", "reader")]
        tables = zip((self.writer, self.reader), self.agents, strict=True)
        self.memory = [table.register(agent) for table, agent in tables]
        name = self.agents[1].add_remote_agent(self.agents[0].get_agent_metadata())
        self.peer = PeerTable(agent=name, address=self.writer.address, num_blocks=64)

    def fetch(self, *blocks: int) -> Any:
        found = self.reader.fetch(self.agents[1], [(self.peer, blocks)], 5.0).rows(5.0)
        assert found is not None
        return found[0]

    def judge(self, *claims: Claim, peer: PeerTable | None = None, agent: Any = None) -> list[Verdict]:
        """Judge reads from a peer, whose blocks' contents have the digest 9 here."""
        reads = [(claim, peer or self.peer) for claim in claims]
        found = Judgement(reads, self.reader, nines, agent or self.agents[1]).verdicts(5.0)
        assert found is not None
        return found

    def close(self) -> None:
        """Also end the agents, each of which has a thread that polls."""
        self.agents[1].remove_remote_agent(self.peer.agent)
        for agent, memory in zip(self.agents, self.memory, strict=True):
            agent.deregister_memory(memory)
        self.agents.clear()
        gc.collect()  # Errors that were returned lead to them in circles.


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pytest.importorskip("nixl")
    made = Pair()
    yield made
    made.close()


SCATTERED = tuple(range(1, 64, 2))
"""Too far apart for the reader's table to hold what lies between."""


@pytest.mark.parametrize(
    "blocks", [(0,), (63,), (5, 6, 7), (7, 5, 6, 60), range(31, -1, -1), range(41, 12, -1), SCATTERED], ids=str
)
def test_rows_come_over_in_the_order_asked_for(pair: Pair, blocks: Sequence[int]) -> None:
    pair.writer.rows[:] = np.arange(128, dtype=np.uint64).reshape(64, 2) + np.uint64(2**63)
    assert pair.fetch(*blocks).tolist() == pair.writer.rows[list(blocks)].tolist()
    pair.writer.own([63, 0], of(A, 2))  # A later fetch sees a later owner.
    assert pair.fetch(*blocks).tolist() == pair.writer.rows[list(blocks)].tolist()


@pytest.mark.parametrize("blocks", [(), (64,), (-1,), (0, 2**32 - 1), tuple(range(33))], ids=str)
def test_rows_that_no_table_has_are_not_asked_for(pair: Pair, blocks: tuple[int, ...]) -> None:
    assert isinstance(pair.fetch(*blocks), ValueError)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another owner": ({"stamps": of(B + 1, 3)}, "block 0 of 3 is not this prompt's"),
    "other blocks": ({"theirs": (8, 9, 3)}, "block 2 of 3 is not this prompt's"),
    "another order": ({"theirs": (9, 8, 2)}, "block 0 of 3"),
    "fewer blocks than ours": ({"theirs": (8, 9)}, "2 blocks were offered for 3"),
    "a block that is not there": ({"theirs": (8, 9, 64)}, "the stamps could not be read"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_claim_is_refused(pair: Pair, changes: dict[str, Any], reason: str) -> None:
    pair.writer.own([8, 9, 2], of(B, 3))
    assert pair.judge(CLAIM) == [Verdict("")]
    (verdict,) = pair.judge(replace(CLAIM, **changes))
    assert reason in verdict.refusal


def test_a_peer_whose_stamps_are_not_known_is_refused(pair: Pair) -> None:
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
def test_bits_that_changed_on_the_way_are_refused(pair: Pair, signed: tuple[int, ...], refusal: str) -> None:
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


def test_the_device_is_asked_once_for_the_bits_of_all_reads(pair: Pair) -> None:
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
def test_a_read_of_the_last_blocks_is_compared_with_theirs(pair: Pair, first: int) -> None:
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


class Broken:
    """An agent whose transfers end as the test says."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.events: list[str] = []

    def get_xfer_descs(self, *_: Any) -> Any: ...

    def initialize_xfer(self, *_: Any) -> Any: ...

    def transfer(self, handle: Any) -> Any:
        self.events.append("posted")
        return self.check_xfer_state(handle)

    def check_xfer_state(self, _: Any) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def release_xfer_handle(self, _: Any) -> None:
        self.events.append("released")


BROKEN = {
    "gone": (RuntimeError("the peer is gone"), "the stamps could not be read: the peer is gone"),
    "failed": ("ERR", "the stamps could not be read: the transfer ended as ERR"),
    "silent": ("PROC", "the stamps could not be read: the transfer did not end within 0.02 s"),
}


@pytest.mark.parametrize(("state", "reason"), BROKEN.values(), ids=BROKEN)
def test_stamps_that_do_not_come_are_a_refusal(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, state: Any, reason: str
) -> None:
    """The stamps of all reads that are judged together have one time limit."""
    monkeypatch.setattr("corun.node.kv.stamps.FETCH_TIMEOUT_S", 0.02)
    agent = Broken(state)
    assert pair.judge(CLAIM, CLAIM, agent=agent) == [Verdict(reason)] * 2
    assert agent.events == ["posted", "posted", *(["released"] * 2 if state != "PROC" else [])]


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


def test_nobody_waits_for_stamps_that_come_late(pair: Pair) -> None:
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


def test_reads_of_one_step_are_judged_each_by_its_own_stamps(pair: Pair) -> None:
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
