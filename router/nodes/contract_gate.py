"""The one contract of a cluster, and the checks of a node's description of itself.

This module must not know how nodes are reached or used.
"""

from __future__ import annotations

from corun.contract import Contract, diff, pair_fingerprint
from corun.errors import ContractMismatchError, InvalidArgumentError, Shown
from corun.params import check_name
from corun.types import NodeInfo, NodeRole

MAX_TEXT_LENGTH = 65_536
"""The most characters of each text in a node's description of itself."""
MAX_OFFERED = 64
"""The most contracts that are remembered until two of them give the expected fingerprint."""


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
