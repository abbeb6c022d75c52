"""Whose KV a block holds, written down beside the KV where a reader can see it: one row of two numbers for each block.

Owns: the table, its registration with a NIXL agent, and reading rows of a peer's table. Must not know: vLLM, requests,
what a digest is taken over.

A block id alone does not say whose KV is behind it: after a prompt's KV is freed, its blocks hold another prompt's. A
row is written before the first byte of a new owner's KV, and it is never cleared, so a reader that looks at the rows
*after* it has read the KV sees every change of owner that could have touched what it read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

OWNER, DIGEST = 0, 1
"""Columns. An owner that was never written and a digest that was not computed are 0."""
ROW_BYTES = 16
MAX_RUNS = 16
"""Beyond it, reading the rows between them too is faster."""
POLL_S = 20e-6
_U64 = 2**64

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """Another process's table."""

    agent: str
    """The peer's name in our NIXL agent."""
    address: int
    num_blocks: int


class StampTable:
    """[num_blocks, 2] in host memory: this worker's own rows if it is read from, a landing place if it reads."""

    def __init__(self, num_blocks: int) -> None:
        self.rows: Rows = np.zeros((num_blocks, 2), np.uint64)

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    def register(self, agent: Any) -> Any:
        """Registers the table's memory; returns what `agent.deregister_memory` takes."""
        return agent.register_memory([(self.address, self.rows.nbytes, 0, "")], "DRAM")

    def own(self, blocks: Sequence[int], owner: int, first: int) -> None:
        """Names the owner of its blocks number `first` and up, before their KV is written."""
        self.rows[list(blocks)] = 0, 0
        self.rows[list(blocks), OWNER] = stamps(owner, first, len(blocks))

    def sign(self, blocks: Sequence[int], digests: Rows) -> None:
        """Adds the digests of what the blocks hold."""
        self.rows[list(blocks), DIGEST] = digests

    def fetch(self, agent: Any, peer: PeerTable, blocks: Sequence[int], timeout_s: float) -> Rows:
        """The peer's rows of these blocks, [len(blocks), 2], as they are now.

        Raises:
            TimeoutError: they did not come in time.
            RuntimeError: the transfer failed.
            ValueError: the peer has no such block.
        """
        (found,) = self.fetch_all(agent, [(peer, blocks)], timeout_s)
        if isinstance(found, Exception):
            raise found
        return found

    def fetch_all(
        self, agent: Any, wanted: Sequence[tuple[PeerTable, Sequence[int]]], timeout_s: float
    ) -> list[Rows | Exception]:
        """As `fetch`, of several tables or parts of them at once, which share the time. In the place of rows that did
        not come stands the error that `fetch` would raise."""
        begun: list[_Fetch | Exception] = []
        at, later = 0, sum(len(blocks) for _, blocks in wanted)
        for peer, blocks in wanted:
            later -= len(blocks)
            try:
                fetch = self._begin(agent, peer, blocks, at, room=len(self.rows) - at - later)
                at = fetch.end
                begun.append(fetch)
            except Exception as error:  # NIXL's errors share no base.
                begun.append(error)
        handles = [fetch.handle for fetch in begun if isinstance(fetch, _Fetch)]
        ends = iter(finish_all(agent, handles, timeout_s))
        return [fetch if isinstance(fetch, Exception) else next(ends) or self.rows[fetch.places] for fetch in begun]

    def _begin(self, agent: Any, peer: PeerTable, blocks: Sequence[int], at: int, *, room: int) -> _Fetch:
        """Prepares a transfer to the rows from `at` on, of which it may take `room`."""
        if not 0 < len(blocks) <= room or min(blocks) < 0 or max(blocks) >= peer.num_blocks:
            raise ValueError(f"blocks {min(blocks, default=-1)} to {max(blocks, default=-1)} of {peer.num_blocks}")
        parts, places = _plan(blocks, at, room)
        here, there = zip(*self._transfers(peer.address, parts, at), strict=True)
        local, remote = (agent.get_xfer_descs(list(descriptors), "DRAM") for descriptors in (here, there))
        handle = agent.initialize_xfer("READ", local, remote, peer.agent)
        return _Fetch(handle, places, at + sum(count for _, count in parts))

    def _transfers(
        self, address: int, parts: Sequence[tuple[int, int]], at: int
    ) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """(address, bytes, device) here and there, for each run of the peer's rows."""
        for first, count in parts:
            size = count * ROW_BYTES
            yield (self.address + at * ROW_BYTES, size, 0), (address + first * ROW_BYTES, size, 0)
            at += count


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A transfer that is prepared."""

    handle: Any
    places: list[int]
    """Where each block's row lands."""
    end: int
    """The first row behind those that it takes."""


def _plan(blocks: Sequence[int], at: int, room: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The runs to transfer, and where each block's row lands: with many runs, one that spans them all."""
    parts = list(runs(blocks))
    low, count = min(blocks), max(blocks) - min(blocks) + 1
    if len(parts) > MAX_RUNS and count <= room:
        return [(low, count)], [at + block - low for block in blocks]
    return parts, list(range(at, at + len(blocks)))


def stamps(owner: int, first: int, count: int) -> Rows:
    """The stamps of an owner's blocks number `first` to `first + count - 1`."""
    found: Rows = np.full(count, (owner + first) % _U64, np.uint64) + np.arange(count, dtype=np.uint64)
    return found


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the longest runs of consecutive ids, in order: 4 5 6 2 3 -> (4, 3), (2, 2)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


def stranger(rows: Rows, owner: int) -> str:
    """The first row that does not carry this owner's stamp, in words; empty if all do."""
    wrong = np.flatnonzero(rows[:, OWNER] != stamps(owner, 0, len(rows)))
    return f"block {wrong[0]} of {len(rows)} is not this prompt's ({len(wrong)} are not)" if len(wrong) else ""


def finish(agent: Any, handle: Any, timeout_s: float) -> None:
    """Runs a transfer to its end and releases it. Raises TimeoutError if it takes longer, RuntimeError if it failed."""
    (error,) = finish_all(agent, (handle,), timeout_s)
    if error is not None:
        raise error


def finish_all(agent: Any, handles: Sequence[Any], timeout_s: float) -> list[Exception | None]:
    """Runs transfers to their ends at the same time, and releases them. In the place of one that did not end in time,
    or failed, stands the error; else None."""
    deadline = time.monotonic() + timeout_s
    states = [_ask(agent.transfer, handle) for handle in handles]
    while "PROC" in states and time.monotonic() <= deadline:
        time.sleep(POLL_S)
        for i, handle in enumerate(handles):
            if states[i] == "PROC":
                states[i] = _ask(agent.check_xfer_state, handle)
    released = [_ask(agent.release_xfer_handle, handle) for handle in handles]
    return [_error(state, end, timeout_s) for state, end in zip(states, released, strict=True)]


def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, or the error in its place: NIXL's share no base."""
    try:
        return question(handle)
    except Exception as error:
        return error


def _error(state: Any, released: Any, timeout_s: float) -> Exception | None:
    if state == "PROC":
        return TimeoutError(f"the transfer did not end within {timeout_s:g} s")
    for answer in (state, released):
        if isinstance(answer, Exception):
            return answer
    return None if state == "DONE" else RuntimeError(f"the transfer ended as {state}")
