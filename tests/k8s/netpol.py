"""What NetworkPolicies allow, computed: a connection must be let out of one pod and into the other.

Only what the manifests use: pod and namespace selectors by labels, and ports. As in Kubernetes, a pod that no policy of
a direction selects is open in that direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Object, of_kind, selects


@dataclass(frozen=True)
class Peer:
    """A pod somewhere."""

    labels: dict[str, str]
    namespace: str
    namespace_labels: dict[str, str]


def allowed(objects: list[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether the policies let `source` connect to a port of `target`."""
    policies = of_kind(objects, "NetworkPolicy")
    return _lets(policies, "Egress", source, target, port, protocol) and _lets(
        policies, "Ingress", target, source, port, protocol
    )


def _lets(policies: list[Object], direction: str, here: Peer, there: Peer, port: int, protocol: str) -> bool:
    concerned = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == here.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], here.labels)
    ]
    if not concerned:
        return True
    peers = {"Ingress": "from", "Egress": "to"}[direction]
    return any(
        _is_peer(rule.get(peers), here.namespace, there) and _is_port(rule.get("ports"), port, protocol)
        for spec in concerned
        for rule in spec.get(direction.lower(), [])
    )


def _is_peer(peers: list[Any] | None, namespace: str, there: Peer) -> bool:
    return peers is None or any(_matches(peer, namespace, there) for peer in peers)


def _matches(peer: Object, namespace: str, there: Peer) -> bool:
    assert peer.keys() <= {"podSelector", "namespaceSelector"}, f"not used here: {peer}"
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], there.namespace_labels):
            return False
    elif there.namespace != namespace:
        return False
    return "podSelector" not in peer or selects(peer["podSelector"], there.labels)


def _is_port(ports: list[Any] | None, port: int, protocol: str) -> bool:
    if ports is None:
        return True
    return any(
        one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])
        for one in ports
    )
