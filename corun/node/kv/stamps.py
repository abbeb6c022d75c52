"""The stamps of KV blocks: a table that peers can read, with a row of two numbers per block that tells its owner.

Owns: the table, which blocks get an owner or a digest in a step of a prefill node, and reading rows of a peer's table.
Must not know: vLLM's classes (it reads requests and block lists), the transfer of KV, what a digest is taken over, what
is decided by the rows (corun/node/kv/judging.py).

A block id alone does not tell whose KV the block holds: after a prompt's KV is freed, its blocks hold another prompt's
KV. A row is written before the first byte of a new owner's KV, and it is never cleared. So a reader that reads the rows
*after* it has read the KV sees every change of owner that could have changed the KV that it read.

The owner of a block is the prefill that computed it, and later prompts that begin alike may hold the block, too. Its
stamp is the owner's name plus a digest of all tokens up to the block's end. The digest alone would not do: a block that
was given to another prompt, and then to a prefill of the same tokens again, would have its old stamp while its KV is
written.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from corun.node.kv.handle import CHECK_PARAM, STAMPS_PARAM, is_prompt

OWNER, DIGEST = 0, 1
"""The columns of a row. An owner that was never written and a digest that was not computed are 0."""
ROW_BYTES = 16
STAMP_BYTES = 8
MAX_RUNS = 16
"""The largest number of separate runs of rows to read. With more, it is faster to also read the rows between them: 512
runs of a table of 40,000 rows took 10 ms, the whole of it 0.2 ms."""
POLL_S = 20e-6
Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTable:
    """The stamp table of another process."""

    agent: str
    """The peer's name in our NIXL agent."""
    address: int
    num_blocks: int


class StampTable:
    """A table [num_blocks, 2] in host memory. A worker has two: its own blocks' stamps, and room for those that it
    fetches from peers."""

    def __init__(self, num_blocks: int) -> None:
        self.rows: Rows = np.zeros((num_blocks, 2), np.uint64)

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    def register(self, agent: Any) -> Any:
        """Register the table's memory and return what `agent.deregister_memory` takes."""
        return agent.register_memory([(self.address, self.rows.nbytes, 0, "")], "DRAM")

    def own(self, blocks: Sequence[int], stamps: bytes) -> None:
        """Write the stamps of blocks with a new owner, before their KV is written."""
        self.rows[list(blocks)] = 0, 0
        self.rows[list(blocks), OWNER] = np.frombuffer(stamps, np.uint64)

    def unsigned(self, blocks: Iterable[int]) -> list[int]:
        """Return those of the blocks that have no digest, each once.

        A cached block keeps the digest that it has: were its bits to change, a new one would hide that.
        """
        return [block for block in dict.fromkeys(blocks) if not self.rows[block, DIGEST]]

    def sign(self, blocks: Sequence[int], digests: Rows) -> None:
        """Write the digests of the blocks' contents."""
        self.rows[list(blocks), DIGEST] = digests

    def fetch(self, agent: Any, wanted: Sequence[tuple[PeerTable, Sequence[int]]], timeout_s: float) -> Fetch:
        """Begin to fetch rows of several peers' tables, or parts of tables, as they are now.

        All parts share the time. No other fetch into this table may run, not even a late one (`Transfers`).
        """
        begun: list[tuple[Any, list[int]] | Exception] = []
        at, later = 0, sum(len(blocks) for _, blocks in wanted)
        for peer, blocks in wanted:
            later -= len(blocks)
            try:
                handle, places, at = self._begin(agent, peer, blocks, at, room=len(self.rows) - at - later)
                begun.append((handle, places))
            except Exception as error:  # NIXL's errors share no base class.
                begun.append(error)
        return Fetch(self, agent, begun, timeout_s)

    def _begin(
        self, agent: Any, peer: PeerTable, blocks: Sequence[int], at: int, *, room: int
    ) -> tuple[Any, list[int], int]:
        """Prepare a transfer into our rows from `at` on; it may use at most `room` rows.

        Returns:
            Its handle, the row of our table that receives each block's row, and the first row after those it uses.
        """
        low, high = min(blocks, default=-1), max(blocks, default=-1)
        if not 0 < len(blocks) <= room or low < 0 or high >= peer.num_blocks:
            raise ValueError(f"blocks {low} to {high} of {peer.num_blocks}")
        parts, places = list(runs(blocks)), list(range(at, at + len(blocks)))
        if len(parts) > MAX_RUNS and high - low < room:
            parts, places = [(low, high - low + 1)], [at + block - low for block in blocks]
        here, there = [], []
        for first, count in parts:
            here.append((self.address + at * ROW_BYTES, count * ROW_BYTES, 0))
            there.append((peer.address + first * ROW_BYTES, count * ROW_BYTES, 0))
            at += count
        local, remote = (agent.get_xfer_descs(descriptors, "DRAM") for descriptors in (here, there))
        return agent.initialize_xfer("READ", local, remote, peer.agent), places, at


def stamps(owners: Sequence[tuple[int, int]], prompt_token_ids: Sequence[int], block_size: int) -> bytes:
    """Return the stamps of a prompt's blocks, `STAMP_BYTES` each, in the prompt's order.

    Args:
        owners: the names of those who computed the blocks (`corun.node.kv.handle.owner`), each with the number of its
            blocks; together as many as the prompt has.
    """
    names = np.array([name for name, _ in owners], np.uint64).repeat([count for _, count in owners])
    digests = chained(prompt_token_ids, block_size)
    assert len(names) == len(digests)
    return (names + digests).tobytes()  # Sums of uint64 wrap around.


def chained(prompt_token_ids: Sequence[int], block_size: int) -> Rows:
    """Return a uint64 for each block of a prompt: the digest of all tokens up to its end, or to the prompt's end.

    512 blocks of 16 tokens take 0.4 ms.
    """
    tokens = np.asarray(prompt_token_ids, np.uint32).tobytes()
    size, running, found = 4 * block_size, hashlib.sha256(), []
    for start in range(0, len(tokens), size):
        running.update(tokens[start : start + size])
        found.append(running.copy().digest()[:STAMP_BYTES])
    return np.frombuffer(b"".join(found), np.uint64)


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the longest runs of consecutive ids, in order: 4 5 6 2 3 -> (4, 3), (2, 2)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


class Transfers:
    """Transfers that run at the same time, with one deadline.

    One that does not end in time may still write into memory, also after it was released (seen with NIXL 1.5.1 over
    TCP). So it is kept until it has ended.
    """

    def __init__(self, agent: Any, handles: Sequence[Any], timeout_s: float) -> None:
        """Start all of them."""
        self._agent, self._handles, self._timeout_s = agent, handles, timeout_s
        self._late: list[Any] = []
        self._deadline = time.monotonic() + timeout_s
        self._states = [_ask(agent.transfer, handle) for handle in handles]

    def are_over(self, patience_s: float) -> bool:
        """Return whether all have ended, or should have, and wait for that for at most `patience_s`."""
        until = min(time.monotonic() + patience_s, self._deadline)
        while (run := self._run()) and time.monotonic() <= until:
            time.sleep(POLL_S)
        return not run or time.monotonic() > self._deadline

    def _run(self) -> bool:
        """Ask for the states of those that still run, and return whether any does."""
        for i, handle in enumerate(self._handles):
            if self._states[i] == "PROC":
                self._states[i] = _ask(self._agent.check_xfer_state, handle)
        return "PROC" in self._states

    def end(self) -> list[Exception | None]:
        """Return for each None, or its error if it failed or did not end in time. Release those that have ended."""
        errors: list[Exception | None] = []
        for handle, state in zip(self._handles, self._states, strict=True):
            if state == "PROC":
                self._late.append(handle)
                errors.append(TimeoutError(f"the transfer did not end within {self._timeout_s:g} s"))
                continue
            raised = [one for one in (state, self._release(handle)) if isinstance(one, Exception)]
            if raised:
                errors.append(raised[0])
            else:
                errors.append(None if state == "DONE" else RuntimeError(f"the transfer ended as {state}"))
        return errors

    def are_late(self) -> bool:
        """Return whether any still runs after `end`. Release those that have ended since."""
        running = []
        for handle in self._late:
            if _ask(self._agent.check_xfer_state, handle) == "PROC":
                running.append(handle)
            else:
                self._release(handle)
        self._late = running
        return bool(running)

    def _release(self, handle: Any) -> Any:
        return _ask(self._agent.release_xfer_handle, handle)


class Fetch:
    """Rows on their way from peers' tables into one of ours."""

    def __init__(
        self, table: StampTable, agent: Any, begun: Sequence[tuple[Any, list[int]] | Exception], timeout_s: float
    ) -> None:
        """Start the transfers. begun: for each part its transfer, and which of our rows get its rows; or an error."""
        self._table, self._begun = table, begun
        handles = [one[0] for one in begun if not isinstance(one, Exception)]
        self.transfers = Transfers(agent, handles, timeout_s)

    def rows(self, patience_s: float) -> list[Rows | Exception] | None:
        """Return the rows, [len(blocks), 2] for each part; None if not all have come within `patience_s`. Do not ask
        again after the answer.

        If rows did not arrive, the error stands in their place: TimeoutError, RuntimeError if the transfer failed, or
        ValueError if the peer has no such block.
        """
        if not self.transfers.are_over(patience_s):
            return None
        errors = iter(self.transfers.end())
        return [one if isinstance(one, Exception) else next(errors) or self._table.rows[one[1]] for one in self._begun]


def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
    """Return the answer, or the error that was raised: NIXL's errors share no base class."""
    try:
        return question(handle)
    except Exception as error:
        return error


@dataclass(frozen=True, slots=True)
class Owned:
    """Blocks that get an owner, with their stamps."""

    blocks: tuple[int, ...]
    stamps: bytes


@dataclass(slots=True)
class _Prefill:
    request: Any
    stamps: bytes
    is_checked: bool
    blocks: list[int] = field(default_factory=list)


class Prefills:
    """The prefills that a scheduler knows, from their first blocks to their end, with their blocks in the prompt's
    order; and who computed each block, which may be a prefill that has ended."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, _Prefill] = {}
        self._owners: dict[int, str] = {}  # block id -> id of the prefill that was the last to get the block anew

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Any) -> None:
        """Record a request that has its first blocks. Without stamps it is ignored; no reader takes its KV."""
        params = request.kv_transfer_params or {}
        if is_prompt(params) and STAMPS_PARAM in params:
            self._running[request.request_id] = _Prefill(request, params[STAMPS_PARAM], bool(params.get(CHECK_PARAM)))

    def end(self, request_id: str, blocks: Iterable[int]) -> list[tuple[str, int]]:
        """Forget a request that ends with these blocks. Return the ids of the prefills that computed them, each with
        the number of its consecutive blocks; nothing for a request that was ignored."""
        if self._running.pop(request_id, None) is None:
            return []
        return self.owners_of(blocks)

    def owners_of(self, blocks: Iterable[int]) -> list[tuple[str, int]]:
        """Return the ids of the prefills that computed these blocks, each with the number of consecutive ones."""
        return [(name, len(list(run))) for name, run in itertools.groupby(self._owners[block] for block in blocks)]

    def give(self, request_id: str, blocks: Iterable[int], *, anew: bool) -> Owned | None:
        """Record the blocks that a step gives to a request, and return those that it will compute itself.

        The first blocks of a request may be cached ones; vLLM has then counted their tokens as computed.
        anew: the request has lost its earlier blocks.
        """
        prefill = self._running.get(request_id)
        given = tuple(blocks)
        if prefill is None or not given:
            return None
        if anew:
            prefill.blocks.clear()
        own = given if prefill.blocks else given[prefill.request.num_computed_tokens // self._block_size :]
        prefill.blocks.extend(given)
        self._owners.update(dict.fromkeys(own, request_id))
        end = STAMP_BYTES * len(prefill.blocks)
        return Owned(own, prefill.stamps[end - STAMP_BYTES * len(own) : end])

    def completed(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Return all blocks of a prompt that gets digests if this step's `num_tokens` complete it; else none."""
        prefill = self._running.get(request_id)
        if prefill is None or not prefill.is_checked:
            return ()
        request = prefill.request
        done: bool = request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + num_tokens
        return tuple(prefill.blocks) if done else ()
