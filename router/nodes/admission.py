"""Which generations of nodes may join, and why the others may not.

Owns: the generations that were replaced or quarantined, and the nodes that were refused. This module must not know how
nodes are reached or used.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from corun.contract import Contract
from corun.errors import (
    CorunError,
    DataLossError,
    InvalidArgumentError,
    StaleGenerationError,
    UnavailableError,
)
from corun.types import NodeInfo, NodeLoad, NodeRef, NodeState, NodeStatus
from router.clock import AwakeClock
from router.nodes.contract_gate import ClusterContract

FORGET_AFTER_S = 600.0
"""The seconds for which lost and refused nodes stay in the cluster's status."""
REMEMBERED_GENERATIONS = 64
MAX_NODES = 4096
"""The most node ids that are known at once, including lost and refused nodes."""

log = logging.getLogger(__name__)


class Admission:
    """What a router remembers of the generations that it does not use."""

    def __init__(self, contract: ClusterContract, clock: AwakeClock) -> None:
        self._contract = contract
        self._clock = clock
        self._refused: dict[str, tuple[NodeStatus, float]] = {}
        """The nodes that may not join, or not yet, by id, each with the time of its last try."""
        self._replaced: dict[str, deque[str]] = {}  # Generations, by node id.
        self._quarantined: dict[NodeRef, str] = {}  # The reasons. They are rare, so they are never forgotten.

    def check_generation(self, info: NodeInfo, known: str) -> None:
        """Check that a node's generation may still be used. known: the generation that is in use; empty if none is.

        Raises:
            DataLossError: this generation may have given wrong bits.
            StaleGenerationError: this generation was replaced before.
        """
        if info.ref in self._quarantined and not known:
            self._refuse(info, self._quarantined[info.ref])  # Of a known node, its own status says so.
        self.check_trusted(info.ref)
        if info.ref.generation in self._replaced.get(info.ref.node_id, ()):
            raise StaleGenerationError(info.ref.node_id, info.ref.generation, known or "gone")

    def check_trusted(self, ref: NodeRef) -> None:
        """Raise DataLossError if this generation may have given wrong bits."""
        if reason := self._quarantined.get(ref):
            raise DataLossError(f"node {ref} {reason}: restart it, so that it tests itself again")

    def admit(self, info: NodeInfo) -> None:
        """Check what a node says of itself against the cluster's contract.

        Raises:
            ContractMismatchError: its contract differs from the cluster's; the error names the fields.
            UnavailableError: it failed its self-test, or its contract waits for that of another node.
            InvalidArgumentError: its contract cannot be read, or is that of another role.
        """
        try:
            contract = Contract.from_json(info.contract_json)
            if contract.role is not info.role:
                raise InvalidArgumentError("node.contract_json", contract.role.value, f"must be {info.role.value}")
            if finding := self._finding(info):
                raise UnavailableError(f"node {info.ref} failed its self-test: {finding}")
            waits = self._contract.admit(contract)
        except CorunError as error:
            self._refuse(info, str(error))
            raise
        if waits:
            self._refuse(info, waits, NodeState.JOINING)
            raise UnavailableError(f"node {info.ref} is not in use yet: {waits}")
        self._refused.pop(info.ref.node_id, None)

    def replace(self, ref: NodeRef) -> None:
        """Remember that a newer generation has replaced this one."""
        self._replaced.setdefault(ref.node_id, deque(maxlen=REMEMBERED_GENERATIONS)).append(ref.generation)
        if len(self._replaced) > MAX_NODES:
            self._replaced.pop(next(iter(self._replaced)))  # Forget the node that was first replaced longest ago.

    def quarantine(self, suspects: Collection[NodeRef], reason: str) -> bool:
        """Quarantine generations for ever. Return False, and quarantine none, if one of them already is."""
        if any(ref in self._quarantined for ref in suspects):
            return False
        for ref in suspects:
            self._quarantined[ref] = reason
            log.error("node %s is quarantined: one of two runs %s", ref, reason)
        return True

    def refusals(self) -> Mapping[str, tuple[NodeStatus, float]]:
        """Return the refused nodes by id, and forget those that have not tried to join for long."""
        now = self._clock.time()
        self._refused = {name: found for name, found in self._refused.items() if now - found[1] < FORGET_AFTER_S}
        return self._refused

    def _finding(self, info: NodeInfo) -> str:
        """Return what a node's self-test found, or that of the other side of a colocated node; empty if it passed."""
        if info.finding or not info.engine_id:
            return info.finding
        refused = (status.node for status, _ in self._refused.values())
        return next((node.finding for node in refused if node.engine_id == info.engine_id and node.finding), "")

    def _refuse(self, info: NodeInfo, reason: str, state: NodeState = NodeState.REFUSED) -> None:
        """Remember a node that may not join. state: REFUSED, or JOINING if that may end by itself."""
        known = self._refused.get(info.ref.node_id)
        if known is None or known[0].detail != reason:
            log.warning("node %s is %s: %s", info.ref, state.value, reason)
        status = NodeStatus(node=info, load=NodeLoad(), state=state, detail=reason)
        self._refused[info.ref.node_id] = status, self._clock.time()
