"""Judges reads of KV that are complete: is it the KV that the handle claims, block by block, and bit by bit where the
prefill node has taken digests?

Owns: the claim of a read, the comparison with what the peers' stamp tables say after the read
(corun/node/kv/stamps.py), and which reads are judged together. Must not know: vLLM's classes, the transfer of KV, what
happens to a read that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from corun.node.kv.stamps import DIGEST, OWNER, PeerTable, Rows, StampTable, Transfers

FETCH_TIMEOUT_S = 1.0
"""The time to fetch the stamps of the reads that are judged together. Their samples wait for them, and those of the
reads that are judged next, but no row."""
PATIENCE_S = 0.002
"""The longest time that a step waits for the stamps of reads that it finds complete. They mostly come in 0.2 ms; later
ones are looked for in the next steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The KV that one read is expected to bring."""

    stamps: bytes = field(repr=False)
    """What the peer's blocks must be stamped with (`stamps`)."""
    first: int
    """The number of the first of these blocks in the prompt. The reader may have had those before it."""
    engine_id: str
    request_id: str
    """The peer's request id with the reader's id (`corun.node.kv.handle.read_id`)."""
    theirs: tuple[int, ...]
    """The peer's ids of the blocks that are read, in the prompt's order."""
    ours: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the checks of one read."""

    refusal: str
    """The reason why the KV must not be used; empty if it may be used."""
    checked: bool = False
    """Whether the bits of the KV were compared."""


UNKNOWN = Verdict("nobody said whose KV it must be")


class Judged(NamedTuple):
    """A read that was judged. One without a claim is refused."""

    name: str
    """The request's id."""
    claim: Claim | None
    verdict: Verdict


class Judgement:
    """The comparison of completed reads with what the peers' tables say after the reads.

    The engine's thread does not wait for a peer: all rows of its steps would wait, too. A peer on a busy host was seen
    to take 0.08 s.
    """

    def __init__(
        self,
        reads: Sequence[tuple[Claim, PeerTable | None]],
        table: StampTable,
        digests: Callable[[Sequence[int]], Rows],
        agent: Any,
    ) -> None:
        """Begin to fetch the rows. No two claims share a block of ours.

        Args:
            reads: completed reads, each with its peer's table; None if it is not known where that is.
            table: gets the rows, so that no other judgement may use it meanwhile.
            digests: a function from our blocks to the digests of their contents.
        """
        self._reads, self._digests = reads, digests
        wanted = [(peer, claim.theirs) for claim, peer in reads if peer and len(claim.theirs) == len(claim.ours)]
        self.fetch = table.fetch(agent, wanted, FETCH_TIMEOUT_S)

    def verdicts(self, patience_s: float) -> list[Verdict] | None:
        """Return the verdicts; None if the rows have not come within `patience_s`."""
        if (fetched := self.fetch.rows(patience_s)) is None:
            return None
        parts = iter(fetched)
        found: list[tuple[Claim, Rows | str]] = []
        for claim, peer in self._reads:
            if peer is None:
                found.append((claim, f"where {claim.engine_id} keeps its stamps is not known"))
            elif len(claim.theirs) != len(claim.ours):
                found.append((claim, f"{len(claim.theirs)} blocks were offered for {len(claim.ours)}"))
            else:  # With any error the owner of this KV stays unknown.
                rows = next(parts)
                found.append((claim, f"the stamps could not be read: {rows}" if isinstance(rows, Exception) else rows))
        return compare(found, self._digests)


class Judge:
    """Judges reads as they complete: those of one step together, and one judgement after the other.

    The rows of a judgement go into a table that no other may use, until nothing comes into it any more.
    """

    def __init__(
        self,
        agent: Any,
        new_table: Callable[[], StampTable],
        table_of: Callable[[str], PeerTable | None],
        digests: Callable[[Sequence[int]], Rows],
    ) -> None:
        """Make the first table.

        Args:
            new_table: makes a registered table with as many rows as this engine has blocks.
            table_of: a function from a peer's engine id to its table; None if it is not known where that is.
            digests: as in `Judgement`.
        """
        self._agent, self._new_table, self._table_of, self._digests = agent, new_table, table_of, digests
        self._table, self._free = new_table(), list[StampTable]()
        self._late: list[tuple[Transfers, StampTable | None]] = []
        self._waiting: list[tuple[str, Claim | None]] = []
        self._running: tuple[list[tuple[str, Claim | None]], Judgement] | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether rows of a peer are being fetched."""
        return self._running is not None

    def judge(self, complete: Sequence[tuple[str, Claim | None]]) -> list[Judged]:
        """Take the requests whose reads have completed, each with its claim, and return those that are judged now.

        Ask in each step: reads that complete while a judgement runs are judged by the next one.
        """
        self._waiting.extend(complete)
        found = self._ended(0.0)
        if self._running is None and self._waiting:
            reads = [(claim, self._table_of(claim.engine_id)) for _, claim in self._waiting if claim]
            self._running = self._waiting, Judgement(reads, self._table, self._digests, self._agent)
            self._waiting = []
            found += self._ended(PATIENCE_S)
        if self._late:
            self._free_tables()
        return found

    def keep(self, transfers: Transfers, table: StampTable | None = None) -> None:
        """Keep transfers until they have ended. Then the table may be used again."""
        self._late.append((transfers, table))

    def _ended(self, patience_s: float) -> list[Judged]:
        """Return what the running judgement says, if it ends within `patience_s`."""
        if self._running is None:
            return []
        reads, judgement = self._running
        if (verdicts := judgement.verdicts(patience_s)) is None:
            return []
        self._running = None
        if judgement.fetch.transfers.are_late():
            self.keep(judgement.fetch.transfers, self._table)
            self._table = self._free.pop() if self._free else self._new_table()
        of_claims = iter(verdicts)
        return [Judged(name, claim, next(of_claims) if claim else UNKNOWN) for name, claim in reads]

    def _free_tables(self) -> None:
        late = [(transfers, table, transfers.are_late()) for transfers, table in self._late]
        self._late = [(transfers, table) for transfers, table, is_late in late if is_late]
        self._free.extend(table for _, table, is_late in late if table is not None and not is_late)


def compare(found: Sequence[tuple[Claim, Rows | str]], digests: Callable[[Sequence[int]], Rows]) -> list[Verdict]:
    """Compare claims with their blocks' rows: all must be the owners', and those with digests must have our bits.

    Blocks that an earlier prompt computed may have digests where the others have none, and the other way round. The
    digests of all reads are asked for at once: each answer waits for the device, and on a GPU that two processes share
    for its turn there, too. A step may find dozens of reads complete, and all its rows wait meanwhile.

    Args:
        found: each claim with its rows, or with the reason why there are none.
        digests: as in `Judgement`.
    """
    verdicts = [Verdict(rows if isinstance(rows, str) else _not_the_owners(claim, rows)) for claim, rows in found]
    signed = [
        (at, claim, rows[:, DIGEST])
        for at, (claim, rows) in enumerate(found)
        if not verdicts[at].refusal and not isinstance(rows, str) and rows[:, DIGEST].any()
    ]
    if not signed:
        return verdicts
    numbers = [np.flatnonzero(theirs) for _, _, theirs in signed]
    bits = digests([claim.ours[at] for (_, claim, _), some in zip(signed, numbers, strict=True) for at in some])
    parts = np.split(bits, np.cumsum([len(some) for some in numbers])[:-1])
    for (at, claim, theirs), some, ours in zip(signed, numbers, parts, strict=True):
        wrong = some[ours != theirs[some]]
        changed = f"of {claim.first + len(theirs)} changed on the way ({len(wrong)} did)"
        verdicts[at] = Verdict(
            f"the bits of block {claim.first + wrong[0]} {changed}" if len(wrong) else "", checked=True
        )
    return verdicts


def _not_the_owners(claim: Claim, rows: Rows) -> str:
    """Return what a refusal says of blocks that are not the owners'; empty if all are."""
    wrong = np.flatnonzero(rows[:, OWNER] != np.frombuffer(claim.stamps, np.uint64))
    if not len(wrong):
        return ""
    return f"block {claim.first + wrong[0]} of {claim.first + len(rows)} is not this prompt's ({len(wrong)} are not)"
