"""The stamps of KV blocks: a table that peers can read, with a row of two numbers per block that tells its owner.

Owns: the table, its registration with a NIXL agent, and reading rows of a peer's table. Must not know: vLLM, requests,
what a digest is taken over.

A block id alone does not tell whose KV the block holds: after a prompt's KV is freed, its blocks hold another prompt's
KV. A row is written before the first byte of a new owner's KV, and it is never cleared. So a reader that reads the rows
*after* it has read the KV sees every change of owner that could have changed the KV that it read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

OWNER, DIGEST = 0, 1
"""The columns of a row. An owner that was never written and a digest that was not computed are 0."""
ROW_BYTES = 16
MAX_RUNS = 16
"""The largest number of separate runs of rows to read. With more, it is faster to also read the rows between them."""
POLL_S = 20e-6
_U64 = 2**64

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """The stamp table of another process."""

    agent: str
    """The peer's name in our NIXL agent."""
    address: int
    num_blocks: int


class StampTable:
    """A table [num_blocks, 2] in host memory. It holds this worker's own stamps if peers read from the worker, or the
    stamps that were fetched from peers if the worker reads."""

    def __init__(self, num_blocks: int) -> None:
        self.rows: Rows = np.zeros((num_blocks, 2), np.uint64)

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    def register(self, agent: Any) -> Any:
        """Register the table's memory and return what `agent.deregister_memory` takes."""
        return agent.register_memory([(self.address, self.rows.nbytes, 0, "")], "DRAM")

    def own(self, blocks: Sequence[int], owner: int, first: int) -> None:
        """Write the owner of `blocks`, the owner's blocks from number `first` on, before their KV is written."""
        self.rows[list(blocks)] = 0, 0
        self.rows[list(blocks), OWNER] = stamps(owner, first, len(blocks))

    def sign(self, blocks: Sequence[int], digests: Rows) -> None:
        """Write the digests of the blocks' contents."""
        self.rows[list(blocks), DIGEST] = digests

    def fetch(self, agent: Any, peer: PeerTable, blocks: Sequence[int], timeout_s: float) -> Rows:
        """Return the peer's rows of these blocks, [len(blocks), 2], as they are now.

        Raises:
            TimeoutError: the rows did not arrive in time.
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
        """Fetch rows of several tables, or parts of tables, at once; all share the time. If rows did not arrive, the
        result holds in their place the error that `fetch` would raise."""
        begun: list[_Fetch | Exception] = []
        at, later = 0, sum(len(blocks) for _, blocks in wanted)
        for peer, blocks in wanted:
            later -= len(blocks)
            try:
                fetch = self._begin(agent, peer, blocks, at, room=len(self.rows) - at - later)
                at = fetch.end
                begun.append(fetch)
            except Exception as error:  # NIXL's errors share no base class.
                begun.append(error)
        handles = [fetch.handle for fetch in begun if isinstance(fetch, _Fetch)]
        ends = iter(finish_all(agent, handles, timeout_s))
        return [fetch if isinstance(fetch, Exception) else next(ends) or self.rows[fetch.places] for fetch in begun]

    def _begin(self, agent: Any, peer: PeerTable, blocks: Sequence[int], at: int, *, room: int) -> _Fetch:
        """Prepare a transfer into our rows from `at` on; it may use at most `room` rows."""
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
        """Yield the local and the remote (address, bytes, device) of each run of the peer's rows."""
        for first, count in parts:
            size = count * ROW_BYTES
            yield (self.address + at * ROW_BYTES, size, 0), (address + first * ROW_BYTES, size, 0)
            at += count


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A transfer that is prepared but not started."""

    handle: Any
    places: list[int]
    """The row of our table that receives each block's row."""
    end: int
    """The first row after those that the transfer uses."""


def _plan(blocks: Sequence[int], at: int, room: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the runs to transfer and the row that receives each block's row. Many runs become one that spans all."""
    parts = list(runs(blocks))
    low, count = min(blocks), max(blocks) - min(blocks) + 1
    if len(parts) > MAX_RUNS and count <= room:
        return [(low, count)], [at + block - low for block in blocks]
    return parts, list(range(at, at + len(blocks)))


def stamps(owner: int, first: int, count: int) -> Rows:
    """Return the stamps of an owner's blocks from number `first` to `first + count - 1`."""
    found: Rows = np.full(count, (owner + first) % _U64, np.uint64) + np.arange(count, dtype=np.uint64)
    return found


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the longest runs of consecutive ids, in order: 4 5 6 2 3 -> (4, 3), (2, 2)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


def stranger(rows: Rows, owner: int) -> str:
    """Return in words the first row that does not carry this owner's stamp; empty if all rows carry it."""
    wrong = np.flatnonzero(rows[:, OWNER] != stamps(owner, 0, len(rows)))
    return f"block {wrong[0]} of {len(rows)} is not this prompt's ({len(wrong)} are not)" if len(wrong) else ""


def finish(agent: Any, handle: Any, timeout_s: float) -> None:
    """Run a transfer to its end and release it. Raises TimeoutError if it takes longer, RuntimeError if it failed."""
    (error,) = finish_all(agent, (handle,), timeout_s)
    if error is not None:
        raise error


def finish_all(agent: Any, handles: Sequence[Any], timeout_s: float) -> list[Exception | None]:
    """Run transfers to their ends at the same time and release them. Return for each transfer None, or its error if it
    failed or did not end in time."""
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
    """Return the answer, or the error that was raised: NIXL's errors share no base class."""
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
