"""Which nodes may join, and why the others may not: what they say of themselves, their contracts, their generations.

Owns: the one contract of the cluster, the generations that were replaced or quarantined, and the nodes that were
refused. This module must not know how nodes are reached or used.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping

from corun.contract import Contract, diff, pair_fingerprint
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    InvalidArgumentError,
    Shown,
    StaleGenerationError,
    UnavailableError,
)
from corun.params import check_name
from corun.types import NodeInfo, NodeLoad, NodeRef, NodeRole, NodeState, NodeStatus
from router.clock import AwakeClock

FORGET_AFTER_S = 600.0
"""The seconds for which lost and refused nodes stay in the cluster's status."""
REMEMBERED_GENERATIONS = 64
MAX_NODES = 4096
"""The most node ids that are known at once, including lost and refused nodes."""
MAX_TEXT_LENGTH = 65_536
"""The most characters of each text in a node's description of itself."""
MAX_OFFERED = 64
"""The most contracts that are remembered until two of them give the expected fingerprint."""

log = logging.getLogger(__name__)


class ClusterContract:
    """The contract of the cluster, for the whole life of the router. It is the contract of the first node of each role,
    or of the first two nodes that together give the expected fingerprint."""

    def __init__(self, expected: str = "") -> None:
        self.fingerprint = ""
        """The fingerprint of the cluster's contract; empty until a node of each role has joined."""
        self._expected = expected
        self._offered: dict[str, Contract] = {}
        """The contracts that nodes offered, by fingerprint, newest last. They are kept until two of them give the
        expected fingerprint."""
        self._pinned: dict[NodeRole, Contract] = {}

    def computes_with(self, library: str) -> bool:
        """Return whether the decode nodes' contract has the version of a library."""
        decode = self._pinned.get(NodeRole.DECODE)
        return decode is not None and any(name.startswith(f"{library} ") for name in decode.model.kernels)

    def admit(self, contract: Contract) -> str:
        """Check a node's contract against the cluster's, and pin it if the cluster has none for its role yet.

        Return an empty text if the contract is admitted, otherwise what it waits for, in words. Raises
        ContractMismatchError if it differs from the cluster's contract.
        """
        if self._expected and not self._pinned and (waits := self._offer(contract)):
            return waits
        pinned = self._pinned.get(contract.role)
        differences: dict[str, tuple[str, str]] = diff(pinned, contract) if pinned else {}
        for other in self._pinned.values():  # Roles share the part of the model.
            differences |= {name: pair for name, pair in diff(other, contract).items() if name.startswith("model.")}
        if differences:
            raise ContractMismatchError("the node's contract is not the cluster's", differences)
        self._pinned[contract.role] = contract
        if len(self._pinned) == len(NodeRole) and not self.fingerprint:
            self.fingerprint = pair_fingerprint(self._pinned[NodeRole.PREFILL], self._pinned[NodeRole.DECODE])
        return ""

    def _offer(self, contract: Contract) -> str:
        """Pin the contract together with one of the other role, if both give the expected fingerprint. A single
        contract cannot be checked, and a wrong contract that came first must not cause a right one to be refused.

        The result and the errors are those of `admit`.
        """
        self._offered.pop(contract.fingerprint(), None)
        self._offered[contract.fingerprint()] = contract
        if len(self._offered) > MAX_OFFERED:
            del self._offered[next(iter(self._offered))]  # Its node will offer it again.
        errors: list[ContractMismatchError] = []
        for other in reversed([other for other in self._offered.values() if other.role is not contract.role]):
            pair = {each.role: each for each in (contract, other)}
            try:
                found = pair_fingerprint(pair[NodeRole.PREFILL], pair[NodeRole.DECODE])
            except ContractMismatchError as error:
                errors.append(error)
                continue
            if found == self._expected:
                self._pinned, self._offered = pair, {}
                return ""
            text = (
                f"with the contract of a {other.role.value} node it does not give the fingerprint that is expected here"
            )
            errors.append(ContractMismatchError(text, {"fingerprint": (self._expected, found)}))
        if errors:
            raise errors[0]
        missing = next(role for role in NodeRole if role is not contract.role)
        return f"it waits for a {missing.value} node, to give the expected fingerprint {self._expected} with it"


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


def check_info(info: NodeInfo) -> None:
    """Raise InvalidArgumentError unless a node's description of itself is complete and within its limits."""
    required: dict[str, object] = {
        "node.ref.node_id": info.ref.node_id,
        "node.ref.generation": info.ref.generation,
        "node.address": info.address,
        "node.kv_blocks": info.kv_blocks,
        "node.block_size": info.block_size,
        "node.max_model_len": info.max_model_len,
        "node.vocab_size": info.vocab_size,
        "node.model": info.model,
    }
    required |= {"node.slots": info.slots} if info.role is NodeRole.DECODE else {"node.nixl": info.nixl}
    for field, value in required.items():
        if not value:
            raise InvalidArgumentError(field, value, "must be set")
    for field in ("node.ref.node_id", "node.ref.generation", "node.address"):
        check_name(field, str(required[field]))
    texts = [("contract_json", info.contract_json), ("model", info.model), ("finding", info.finding)]
    texts += [("engine_id", info.engine_id)]
    texts += [("freedoms", "".join(one.name + one.refused for one in info.freedoms)), ("certificate", info.certificate)]
    for field, text in texts:
        if len(text) > MAX_TEXT_LENGTH:
            limit = f"must be at most {MAX_TEXT_LENGTH} characters"
            raise InvalidArgumentError(f"node.{field}", Shown(f"{len(text)} characters"), limit)
