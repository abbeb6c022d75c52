"""Reads in pieces: how much of the engine's time a step gives them, their turns, and their ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.kv import paced_reads
from corun.node.kv.paced_reads import PIECE, POST_S, PacedReads, Read

PIECE_S = POST_S / 3.5
"""The time that the agent below takes to post a piece, so that a step posts four."""


class Agent:
    """A NIXL agent that takes time to post, and whose transfers end when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.posted: list[tuple[int, ...]] = []
        self.states: dict[int, str] = {}
        self.released: list[int] = []
        self.silent: set[int] = set()

    def make_prepped_xfer(self, operation: str, local: Any, ours: Any, remote: Any, theirs: Any) -> int:
        assert (operation, local, remote, list(ours)) == ("READ", "here", "there", [index + 1 for index in theirs])
        self.posted.append(tuple(ours))
        return len(self.posted) - 1

    def transfer(self, handle: int) -> str:
        self.now += PIECE_S
        return self.states.setdefault(handle, "PROC")

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        if handle in self.silent:
            raise RuntimeError("no telemetry")
        return SimpleNamespace(postDuration=2, xferDuration=1, totalBytes=3, descCount=4)

    def release_xfer_handle(self, handle: int) -> None:
        self.released.append(handle)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    monkeypatch.setattr(paced_reads.time, "monotonic", lambda: made.now)
    return made


def begun(reads: PacedReads, count: int) -> Read:
    read = reads.make_prepped_xfer("READ", "here", range(1, count + 1), "there", range(count), notif_msg=b"x")
    reads.transfer(read)
    return read


def test_a_step_gives_long_reads_a_few_milliseconds_and_a_short_one_need_not_wait_for_them(agent: Agent) -> None:
    reads = PacedReads(agent)
    long = [begun(reads, 40 * PIECE) for _ in range(3)]
    short = begun(reads, 2)
    for step in range(1, 13):
        reads.post()
        assert len(agent.posted) == 4 * step
    agent.states = dict.fromkeys(agent.states, "DONE")
    assert [reads.check_xfer_state(read) for read in (*long, short)] == ["PROC", "PROC", "PROC", "DONE"]
    assert [read.posted for read in long] == [16 * PIECE, 16 * PIECE, 15 * PIECE], "they take turns"
    assert agent.posted[3] == (1, 2)


def test_a_read_is_done_with_its_last_piece_and_has_the_sums_of_all(agent: Agent) -> None:
    reads = PacedReads(agent)
    read = begun(reads, 2 * PIECE + 1)
    reads.post()
    reads.post()
    assert [index for piece in agent.posted for index in piece] == [*range(1, 2 * PIECE + 2)]
    agent.states = {0: "DONE", 1: "PROC", 2: "DONE"}
    assert reads.check_xfer_state(read) == "PROC"
    agent.states[1] = "DONE"
    assert reads.check_xfer_state(read) == "DONE"
    told = reads.get_xfer_telemetry(read)
    assert (told.postDuration, told.totalBytes, told.descCount) == (6, 9, 12)
    assert told.xferDuration == pytest.approx(1e6 * 3 * PIECE_S)
    reads.release_xfer_handle(read)
    assert agent.released == [0, 1, 2]


@pytest.mark.parametrize("how", ["state", "post", "refused", "telemetry"])
def test_a_failed_read_ends_when_none_of_its_pieces_runs_and_posts_no_more(
    agent: Agent, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While a piece runs, it writes to the read's blocks, which would have a new owner after the failure."""
    reads = PacedReads(agent)
    read = begun(reads, 40 * PIECE)
    reads.post()
    assert len(agent.posted) == 4
    if how == "state":
        agent.states[1] = "ERR"
    if how == "post":
        agent.states[4] = "ERR"
    if how == "refused":
        del agent.states[1]  # To ask for it raises KeyError.
    agent.states[0] = "DONE"
    agent.silent = {0} if how == "telemetry" else set()
    assert reads.check_xfer_state(read) == "PROC"
    reads.post()
    assert len(agent.posted) == (5 if how == "post" else 4)
    agent.states |= {2: "DONE", 3: "DONE"} | ({1: "DONE"} if how in ("post", "telemetry") else {})
    assert reads.check_xfer_state(read) == "ERR"
    assert set(agent.released) | agent.silent == {*range(len(agent.posted))}
    assert ("a piece of a KV read failed" in caplog.text) == (how in ("refused", "telemetry"))


def test_a_read_that_is_released_is_forgotten(agent: Agent) -> None:
    reads = PacedReads(agent)
    gone, kept = begun(reads, 40 * PIECE), begun(reads, 1)
    reads.release_xfer_handle(gone)
    reads.post()
    assert agent.posted == [(1,)]
    assert kept.posted


def test_all_else_is_the_agents(agent: Agent) -> None:
    assert PacedReads(agent).states is agent.states
    with pytest.raises(ValueError, match="only reads are paced, not WRITE"):
        PacedReads(agent).make_prepped_xfer("WRITE", "here", (), "there", ())
