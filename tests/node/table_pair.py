"""Two stamp tables with NIXL agents, one of which reads the other's, and an agent whose transfers do not end well."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from corun.node.kv.judging import Claim, Judgement, Verdict
from corun.node.kv.stamps import PeerTable, StampTable
from tests.node.worker_half import stamps

A, B = 2**64 - 2, 123
"""Owners; the first one's stamps pass 2^64."""


def of(first: int, count: int) -> bytes:
    """Stamps that count up."""
    return stamps(*((first + i) % 2**64 for i in range(count)))


CLAIM = Claim(stamps=of(B, 3), first=0, engine_id="engine", request_id="r", theirs=(8, 9, 2), ours=(1, 2, 3))


def nines(blocks: Sequence[int]) -> Any:
    return np.array([9] * len(blocks), np.uint64)


class TablePair:
    """A table that is read from and one that reads, each with its own agent."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

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
