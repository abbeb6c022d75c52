"""Whose KV a block holds, written down beside the KV where a reader can see it: one row of two numbers for each block.

Owns: the table, its registration with a NIXL agent, and reading rows of a peer's table. Must not know: vLLM, requests,
what a digest is taken over.

A block id alone does not say whose KV is behind it: after a prompt's KV is freed, its blocks hold another prompt's. A
row is written before the first byte of a new owner's KV, and it is never cleared, so a reader that looks at the rows
*after* it has read the KV sees every change of owner that could have touched what it read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
        if not 0 < len(blocks) <= len(self.rows) or min(blocks) < 0 or max(blocks) >= peer.num_blocks:
            raise ValueError(f"blocks {min(blocks, default=-1)} to {max(blocks, default=-1)} of {peer.num_blocks}")
        parts, places = self._plan(blocks)
        here, there = zip(*self._transfers(peer.address, parts), strict=True)
        local, remote = (agent.get_xfer_descs(list(descriptors), "DRAM") for descriptors in (here, there))
        handle = agent.initialize_xfer("READ", local, remote, peer.agent)
        try:
            finish(agent, handle, timeout_s)
        finally:
            agent.release_xfer_handle(handle)
        fetched: Rows = self.rows[places]
        return fetched

    def _plan(self, blocks: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """The runs to transfer, and where each block's row lands: with many runs, one that spans them all."""
        parts = list(runs(blocks))
        low, count = min(blocks), max(blocks) - min(blocks) + 1
        if len(parts) > MAX_RUNS and count <= len(self.rows):
            return [(low, count)], [block - low for block in blocks]
        return parts, list(range(len(blocks)))

    def _transfers(self, address: int, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """(address, bytes, device) here and there, for each run of the peer's rows."""
        done = 0
        for first, count in parts:
            size = count * ROW_BYTES
            yield (self.address + done * ROW_BYTES, size, 0), (address + first * ROW_BYTES, size, 0)
            done += count


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
    """Runs a transfer to its end. Raises TimeoutError if that takes longer, RuntimeError if the transfer failed."""
    deadline = time.monotonic() + timeout_s
    state = agent.transfer(handle)
    while state == "PROC":
        if time.monotonic() > deadline:
            raise TimeoutError(f"the transfer did not end within {timeout_s:g} s")
        time.sleep(POLL_S)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")
