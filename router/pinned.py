"""The one contract of a cluster, and what a node has to say of itself to join it.

This module must not know how nodes are reached or used.
"""

from __future__ import annotations

from corun.cluster import NodeInfo, NodeRole
from corun.contract import Contract, diff, pair_fingerprint
from corun.errors import ContractMismatchError, InvalidArgumentError, Shown
from corun.params import check_name

MAX_TEXT_LENGTH = 65_536
"""Characters of anything that a node says of itself."""


class ClusterContract:
    """The contract of the cluster: set by the first node of each role, for as long as the router lives."""

    def __init__(self) -> None:
        self.fingerprint = ""
        """Empty until a node of each role has joined."""
        self._pinned: dict[NodeRole, Contract] = {}

    def admit(self, contract: Contract) -> None:
        """Raises ContractMismatchError unless `contract` is the cluster's, or is free to become it."""
        pinned = self._pinned.get(contract.role)
        differences = diff(pinned, contract) if pinned else self._model_differences(contract)
        if differences:
            raise ContractMismatchError("the node's contract is not the cluster's", differences)
        self._pinned[contract.role] = contract
        if len(self._pinned) == len(NodeRole) and not self.fingerprint:
            self.fingerprint = pair_fingerprint(self._pinned[NodeRole.PREFILL], self._pinned[NodeRole.DECODE])

    def _model_differences(self, contract: Contract) -> dict[str, tuple[str, str]]:
        everything = [diff(other, contract) for other in self._pinned.values()]
        return {name: pair for found in everything for name, pair in found.items() if name.startswith("model.")}


def check_info(info: NodeInfo) -> None:
    """Raises InvalidArgumentError unless a node's description of itself is complete."""
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
    for field, text in (("contract_json", info.contract_json), ("model", info.model), ("finding", info.finding)):
        if len(text) > MAX_TEXT_LENGTH:
            limit = f"must be at most {MAX_TEXT_LENGTH} characters"
            raise InvalidArgumentError(f"node.{field}", Shown(f"{len(text)} characters"), limit)
