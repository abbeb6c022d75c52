"""The stamps of KV blocks: a table that peers can read, with a row of two numbers per block that tells its owner.

Owns: the table, which blocks get an owner or a digest in a step of a prefill node, reading rows of a peer's table, and
the decision whether the KV of a completed read may be used. Must not know: vLLM's classes (it reads requests and block
lists), the transfer of KV, what a digest is taken over, what happens to a read that is refused.

A block id alone does not tell whose KV the block holds: after a prompt's KV is freed, its blocks hold another prompt's
KV. A row is written before the first byte of a new owner's KV, and it is never cleared. So a reader that reads the rows
*after* it has read the KV sees every change of owner that could have changed the KV that it read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from corun.node.kv.handle import CHECK_PARAM, OWNER_PARAM

OWNER, DIGEST = 0, 1
"""The columns of a row. An owner that was never written and a digest that was not computed are 0."""
ROW_BYTES = 16
MAX_RUNS = 16
"""The largest number of separate runs of rows to read. With more, it is faster to also read the rows between them: 512
runs of a table of 40,000 rows took 10 ms, the whole of it 0.2 ms."""
POLL_S = 20e-6
FETCH_TIMEOUT_S = 1.0
"""The time to fetch the stamps of all reads that one step finds completed. The engine's own thread waits for them, so
all rows of the step wait."""
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

    def fetch(
        self, agent: Any, wanted: Sequence[tuple[PeerTable, Sequence[int]]], timeout_s: float
    ) -> list[Rows | Exception]:
        """Return rows of several peers' tables, or parts of tables, as they are now: [len(blocks), 2] for each part.

        All parts share the time. If rows did not arrive, the error stands in their place: TimeoutError, RuntimeError if
        the transfer failed, or ValueError if the peer has no such block.
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
        errors = iter(finish(agent, [one[0] for one in begun if not isinstance(one, Exception)], timeout_s))
        return [one if isinstance(one, Exception) else next(errors) or self.rows[one[1]] for one in begun]

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


def stamps(owner: int, first: int, count: int) -> Rows:
    """Return the stamps of an owner's blocks from number `first` to `first + count - 1`."""
    found: Rows = np.full(count, (owner + first) % 2**64, np.uint64) + np.arange(count, dtype=np.uint64)
    return found


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the longest runs of consecutive ids, in order: 4 5 6 2 3 -> (4, 3), (2, 2)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[start], i - start
            start = i


def finish(agent: Any, handles: Sequence[Any], timeout_s: float) -> list[Exception | None]:
    """Run transfers to their ends at the same time and release them. Return for each transfer None, or its error if it
    failed or did not end in time."""
    deadline = time.monotonic() + timeout_s
    states = [_ask(agent.transfer, handle) for handle in handles]
    while "PROC" in states and time.monotonic() <= deadline:
        time.sleep(POLL_S)
        for i, handle in enumerate(handles):
            if states[i] == "PROC":
                states[i] = _ask(agent.check_xfer_state, handle)
    errors: list[Exception | None] = []
    for handle, state in zip(handles, states, strict=True):
        raised = [one for one in (state, _ask(agent.release_xfer_handle, handle)) if isinstance(one, Exception)]
        if state == "PROC":
            errors.append(TimeoutError(f"the transfer did not end within {timeout_s:g} s"))
        elif raised:
            errors.append(raised[0])
        else:
            errors.append(None if state == "DONE" else RuntimeError(f"the transfer ended as {state}"))
    return errors


def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
    """Return the answer, or the error that was raised: NIXL's errors share no base class."""
    try:
        return question(handle)
    except Exception as error:
        return error


@dataclass(frozen=True, slots=True)
class Owned:
    """Blocks that get an owner: the blocks of its prompt from number `first` on."""

    owner: int
    first: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Prefill:
    request: Any
    owner: int
    is_checked: bool
    blocks: list[int] = field(default_factory=list)


class Prefills:
    """The prefills that a scheduler knows, from their first blocks to their end, with their blocks in the prompt's
    order."""

    def __init__(self) -> None:
        self._running: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, request: Any) -> None:
        """Record a request that has its first blocks. Without an owner's name it is ignored; no reader takes its KV."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") and OWNER_PARAM in params:
            self._running[request.request_id] = _Prefill(request, params[OWNER_PARAM], bool(params.get(CHECK_PARAM)))

    def end(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def give(self, request_id: str, blocks: Iterable[int], *, anew: bool) -> Owned | None:
        """Record the blocks that a step gives to a request. `anew`: the request has lost its earlier blocks."""
        prefill = self._running.get(request_id)
        given = tuple(blocks)
        if prefill is None or not given:
            return None
        if anew:
            prefill.blocks.clear()
        prefill.blocks.extend(given)
        return Owned(prefill.owner, len(prefill.blocks) - len(given), given)

    def completed(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Return all blocks of a prompt that gets digests if this step's `num_tokens` complete it; else none."""
        prefill = self._running.get(request_id)
        if prefill is None or not prefill.is_checked:
            return ()
        request = prefill.request
        done: bool = request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + num_tokens
        return tuple(prefill.blocks) if done else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The KV that one read is expected to bring."""

    owner: int
    """The owner's name that the peer's blocks must carry (`corun.node.kv.handle.owner`)."""
    engine_id: str
    request_id: str
    """The peer's request id with the reader's id (`corun.node.kv.handle.read_id`)."""
    theirs: tuple[int, ...]
    """The peer's block ids, in the prompt's order."""
    ours: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the checks of one read."""

    refusal: str
    """The reason why the KV must not be used; empty if it may be used."""
    checked: bool = False
    """Whether the bits of the KV were compared."""


def judge(
    reads: Sequence[tuple[Claim, PeerTable | None]],
    table: StampTable,
    digests: Callable[[Sequence[int]], Rows],
    agent: Any,
) -> list[Verdict]:
    """Compare the current contents of the peers' tables with the claims. No two claims share a block of ours.

    Args:
        reads: completed reads, each with its peer's table; None if it is not known where that is.
        digests: a function from our blocks to the digests of their contents.
    """
    wanted = [(peer, claim.theirs) for claim, peer in reads if peer and len(claim.theirs) == len(claim.ours)]
    found = iter(table.fetch(agent, wanted, FETCH_TIMEOUT_S))
    verdicts = []
    for claim, peer in reads:
        if peer is None:
            verdicts.append(Verdict(f"where {claim.engine_id} keeps its stamps is not known"))
        elif len(claim.theirs) != len(claim.ours):
            verdicts.append(Verdict(f"{len(claim.theirs)} blocks were offered for {len(claim.ours)}"))
        elif isinstance(rows := next(found), Exception):  # With any error the owner of this KV stays unknown.
            verdicts.append(Verdict(f"the stamps could not be read: {rows}"))
        else:
            verdicts.append(compare(claim, rows, digests))
    return verdicts


def compare(claim: Claim, rows: Rows, digests: Callable[[Sequence[int]], Rows]) -> Verdict:
    """Compare a claim with its blocks' rows: all must be the owner's, and those with digests must have our bits."""
    wrong = np.flatnonzero(rows[:, OWNER] != stamps(claim.owner, 0, len(rows)))
    if len(wrong):
        return Verdict(f"block {wrong[0]} of {len(rows)} is not this prompt's ({len(wrong)} are not)")
    if not rows[:, DIGEST].any():
        return Verdict("")
    wrong = np.flatnonzero(digests(claim.ours) != rows[:, DIGEST])
    if len(wrong):
        return Verdict(f"the bits of block {wrong[0]} of {len(rows)} changed on the way ({len(wrong)} did)", True)
    return Verdict("", checked=True)
