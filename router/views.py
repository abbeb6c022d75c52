"""The cluster's status as a client that is no operator sees it: the nodes that serve it, and how busy they are.

Owns: what is left out. Why a node is not in use and which sample differed are left out, because both may name another
client's request. So are the locations of models and nodes, and the values of environment variables. This module must
not know who asks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from corun.contract import Contract
from corun.errors import InvalidArgumentError
from corun.types import ClusterStatus, NodeInfo, NodeStatus

HIDDEN = "(hidden)"
FOR_OPERATORS = "only an operator's token shows why"


def for_client(status: ClusterStatus) -> ClusterStatus:
    """Return the status without the facts that are only for operators or for other clients."""
    audit = status.audit
    return replace(
        status,
        nodes=tuple(map(_status, status.nodes)),
        audit=replace(audit, last_mismatch=FOR_OPERATORS if audit.last_mismatch else ""),
    )


def _status(status: NodeStatus) -> NodeStatus:
    return replace(status, node=_node(status.node), detail=FOR_OPERATORS if status.detail else "")


def _node(node: NodeInfo) -> NodeInfo:
    name = PurePath(node.model).name if PurePath(node.model).is_absolute() else node.model
    finding = HIDDEN if node.finding else ""
    return replace(
        node, address="", nixl=None, model=name, finding=finding, contract_json=_contract(node.contract_json)
    )


def _contract(text: str) -> str:
    """Return the contract without the values of its variables; empty if it cannot be read. Its hash therefore differs
    from the real one."""
    try:
        contract = Contract.from_json(text)
    except InvalidArgumentError:
        return ""
    names = (variable.partition("=")[0] for variable in contract.model.environment)
    environment = tuple(f"{name}={HIDDEN}" for name in names)
    return replace(contract, model=replace(contract.model, environment=environment)).canonical_json()
