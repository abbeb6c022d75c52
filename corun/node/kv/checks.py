"""Checks KV that was read from a peer: whether it is the right prompt's, and, for a share of the prompts, every bit.

Owns: the decision whether the KV of a completed read may be used for decode. Must not know: vLLM, the transfer itself,
what happens to a read that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corun.node.kv.stamps import DIGEST, PeerTable, Rows, StampTable, stranger

FETCH_TIMEOUT_S = 1.0
"""The time to fetch the stamps of all reads that one step finds completed. The engine's own thread waits for them, so
all rows of the step wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The KV that one read is expected to bring."""

    owner: int
    """The owner's name that the peer's blocks must carry (`corun.node.kv.handle.owner`)."""
    engine_id: str
    request_id: str
    """The peer's request id with the reader's id (`corun.node.kv.owners.read_id`)."""
    theirs: tuple[int, ...]
    """The peer's block ids, in the prompt's order."""
    ours: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine whose KV is read."""

    agent: str
    """The peer's name in our NIXL agent."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the checks of one read."""

    refusal: str
    """The reason why the KV must not be used; empty if it may be used."""
    checked: bool = False
    """Whether the bits of the KV were compared."""


class ReadChecks:
    """Checks completed reads against the peer's stamp table as it is after the read."""

    def __init__(self, table: StampTable, digests: Callable[[Sequence[int]], Rows]) -> None:
        self._table = table
        self._digests = digests
        self._addresses: dict[str, int] = {}  # engine id -> the address of the stamps of the rank that we read from

    def learn(self, engine_id: str, address: int) -> None:
        """Record where a peer's stamps lie. Before that, no read from this peer is accepted."""
        self._addresses[engine_id] = address

    def warm(self, engine_id: str, agent: Any, peer: str, timeout_s: float) -> None:
        """Fetch one stamp of a known peer; raises what `StampTable.fetch` raises."""
        table = PeerTable(agent=peer, address=self._addresses[engine_id], num_blocks=1)
        self._table.fetch(agent, table, (0,), timeout_s)

    def judge(self, claims: Sequence[Claim], agent: Any, peers: Mapping[str, Peer]) -> list[Verdict]:
        """Compare the current contents of the peers' tables with the claims. No two claims share a block of ours.

        Args:
            agent: our NIXL agent.
            peers: the peers that the claims name, by engine id.
        """
        unfit = [self._unfit(claim) for claim in claims]
        fit = [claim for claim, refusal in zip(claims, unfit, strict=True) if not refusal]
        wanted = [(self._table_of(claim.engine_id, peers[claim.engine_id]), claim.theirs) for claim in fit]
        found = iter(self._table.fetch_all(agent, wanted, FETCH_TIMEOUT_S))
        return [
            Verdict(refusal) if refusal else self._verdict(next(found), claim)
            for claim, refusal in zip(claims, unfit, strict=True)
        ]

    def _unfit(self, claim: Claim) -> str:
        if claim.engine_id not in self._addresses:
            return f"where {claim.engine_id} keeps its stamps is not known"
        if len(claim.theirs) != len(claim.ours):
            return f"{len(claim.theirs)} blocks were offered for {len(claim.ours)}"
        return ""

    def _table_of(self, engine_id: str, peer: Peer) -> PeerTable:
        return PeerTable(agent=peer.agent, address=self._addresses[engine_id], num_blocks=peer.num_blocks)

    def _verdict(self, rows: Rows | Exception, claim: Claim) -> Verdict:
        if isinstance(rows, Exception):  # With any error the owner of this KV stays unknown.
            return Verdict(f"the stamps could not be read: {rows}")
        if found := stranger(rows, claim.owner):
            return Verdict(found)
        return self._compare(rows[:, DIGEST], claim)

    def _compare(self, expected: Rows, claim: Claim) -> Verdict:
        if not expected.any():
            return Verdict("")
        wrong = np.flatnonzero(self._digests(claim.ours) != expected)
        if not len(wrong):
            return Verdict("", checked=True)
        return Verdict(f"the bits of block {wrong[0]} of {len(expected)} changed on the way ({len(wrong)} did)", True)
