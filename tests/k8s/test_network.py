"""Which pods reach which: a table of all that is allowed, and everything else is not."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import POOL_LABEL, Object, Pod, complete, objects, of_kind, selects, tree, workloads
from tests.k8s.wiring import faults

UCX = {"ucx first": 32768, "ucx last": 60999}
"""The ends of the ports that UCX may choose: Linux gives it one of its ephemeral ports."""


@dataclass(frozen=True)
class Peer:
    """A pod somewhere."""

    labels: dict[str, str]
    namespace: str
    namespace_labels: dict[str, str]


def allowed(found: list[Object], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return whether the NetworkPolicies let a connection out of one pod and into the other.

    As in Kubernetes, a pod that no policy of a direction selects is open in that direction.
    """

    def is_open(direction: str, here: Peer, there: Peer, peers: str) -> bool:
        concerned = [
            policy["spec"]
            for policy in of_kind(found, "NetworkPolicy")
            if policy["metadata"]["namespace"] == here.namespace
            and direction in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], here.labels)
        ]
        rules = [rule for spec in concerned for rule in spec.get(direction.lower(), [])]
        return not concerned or any(
            (peers not in rule or any(is_peer(peer, here.namespace, there) for peer in rule[peers]))
            and ("ports" not in rule or any(is_port(one) for one in rule["ports"]))
            for rule in rules
        )

    def is_peer(peer: Object, namespace: str, there: Peer) -> bool:
        assert peer.keys() <= {"podSelector", "namespaceSelector"}, f"not used here: {peer}"
        if "namespaceSelector" in peer and not selects(peer["namespaceSelector"], there.namespace_labels):
            return False
        if "namespaceSelector" not in peer and there.namespace != namespace:
            return False
        return "podSelector" not in peer or selects(peer["podSelector"], there.labels)

    def is_port(one: Any) -> bool:
        return one.get("protocol", "TCP") == protocol and one["port"] <= port <= one.get("endPort", one["port"])

    return is_open("Egress", source, target, "to") and is_open("Ingress", target, source, "from")


def peers_of(found: list[Object]) -> dict[str, Peer]:
    """Return the pods by role and pool, and a few strangers."""
    (namespace,) = of_kind(found, "Namespace")
    here = namespace["metadata"]["name"]
    own = {**namespace["metadata"]["labels"], "kubernetes.io/metadata.name": here}
    pods = [Pod(one, found, ip="10.0.0.1", name="any") for one in workloads(found)]
    known = {f"{pod.role}-{pod.labels[POOL_LABEL]}": Peer(pod.labels, here, own) for pod in pods}
    strangers = {
        "client": ({"app": "shop"}, "app", {"corun.dev/clients": "true"}),
        "dns": ({"k8s-app": "kube-dns"}, "kube-system", {}),
        "prometheus": ({"app.kubernetes.io/name": "prometheus"}, "monitoring", {}),
        "collector": ({"app.kubernetes.io/name": "opentelemetry-collector"}, "monitoring", {}),
        "stranger": ({"app.kubernetes.io/name": "corun"}, "default", {}),
    }
    for name, (labels, where, extra) in strangers.items():
        known[name] = Peer(labels, where, {**extra, "kubernetes.io/metadata.name": where})
    return known | {"stranger-here": Peer({"app": "debug"}, here, own)}


def ports_of(found: list[Object]) -> dict[str, int]:
    """Return the ports that the pods declare: NIXL's and the metrics' once, gRPC's by role. `faults` compares them with
    those that the processes listen on."""
    ports = dict(UCX)
    for one in workloads(found):
        pod = Pod(one, found, ip="10.0.0.1", name="any")
        for port in pod.container["ports"]:
            ports[pod.role if port["name"] == "grpc" else port["name"]] = port["containerPort"]
    return ports


def table(found: list[Object]) -> set[tuple[str, str, str]]:
    """Return (source, target, port) of every connection that may be made to a pod of the cluster, or by one."""
    peers = peers_of(found)
    ours = {name for name in peers if name.startswith(("router", "prefill", "decode", "colocated"))}
    return {
        (source, target, name)
        for (source, target), (name, port) in product(product(peers, peers), ports_of(found).items())
        if source != target and ours & {source, target} and allowed(found, peers[source], peers[target], port)
    }


def expected(pool: str, roles: tuple[str, ...] = ("prefill", "decode")) -> set[tuple[str, str, str]]:
    router, nodes = f"router-{pool}", [f"{role}-{pool}" for role in roles]
    ports = ("router", *roles, "nixl", "metrics", *UCX)
    return {
        *((client, router, "router") for client in ("client", *nodes)),
        *((router, node, role) for node, role in zip(nodes, roles, strict=True)),
        *((a, b, port) for a, b in permutations(nodes, 2) for port in ports),
        *(("prometheus", pod, "metrics") for pod in (router, *nodes)),
    }


def test_colocated_nodes_reach_each_other_and_a_pair() -> None:
    found = objects("colocated")
    assert table(found) == expected("main", ("colocated",))
    peers, ports = peers_of(found), ports_of(found)
    own = peers["colocated-main"]
    assert allowed(found, own, own, ports["nixl"])
    assert not allowed(found, own, own, 443)
    overlay = tree() / "k8s" / "overlays" / "mixed"
    shutil.copytree(overlay.parent / "colocated", overlay, dirs_exist_ok=True)
    pool = overlay / "main" / "kustomization.yaml"
    one = "  - ../../../base/colocated\n"
    assert one in pool.read_text(encoding="utf-8")
    pool.write_text(pool.read_text(encoding="utf-8").replace(one, f"{one}  - ../../../base/pair\n"), encoding="utf-8")
    assert table(objects("mixed")) == expected("main", ("prefill", "decode", "colocated"))


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "rdma", "pool-b"])
def test_what_is_reached(overlay: str) -> None:
    found = objects(overlay)
    pools = ("main", "b") if overlay == "pool-b" else ("main",)
    assert table(found) == set().union(*map(expected, pools))
    peers = peers_of(found)
    for name in ("router-main", "prefill-main", "decode-main"):
        reached = [("dns", 53, "UDP"), ("dns", 53, "TCP"), ("dns", 443, "TCP"), ("stranger", 443, "TCP")]
        assert [allowed(found, peers[name], peers[to], *port) for to, *port in reached] == [True, True, False, False]
    assert not allowed(found, peers["decode-main"], peers["prefill-main"], ports_of(found)["nixl"], "UDP")


@pytest.mark.parametrize(
    ("policy", "change", "difference"),
    [
        ("", {"policyTypes": ["Ingress"]}, {("router-main", "stranger", "router")}),  # All policies.
        ("corun-router-main", {"ingress": []}, {("decode-main", "router-main", "router")}),
        ("corun-router-main", {"egress": []}, {("router-main", "decode-main", "decode")}),
        ("corun-prefill-main", {"ingress": []}, {("decode-main", "prefill-main", "ucx last")}),
    ],
)
def test_another_policy_gives_another_table(policy: str, change: Any, difference: set[tuple[str, str, str]]) -> None:
    found = objects("gpu")
    before = table(found)
    for one in of_kind(found, "NetworkPolicy"):
        if policy in ("", one["metadata"]["name"]):
            one["spec"] |= change
    assert difference <= table(found) ^ before


def test_traces_leave_for_the_collector_where_they_are_wanted(tmp_path: Path) -> None:
    overlay = tree() / "k8s" / "overlays" / "traced"
    overlay.mkdir(exist_ok=True)
    lines = ("resources: [../gpu]", "components: [../../components/tracing]", "namespace: corun")
    (overlay / "kustomization.yaml").write_text("\n".join(lines))
    found = complete("traced")
    assert faults(found, tmp_path) == []
    peers = peers_of(found)
    for workload in workloads(found):
        pod = Pod(workload, found, ip="10.0.0.1", name="any")
        host, _, port = pod.environment()["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://").partition(":")
        assert host.partition(".")[2] == peers["collector"].namespace
        own = peers[f"{pod.role}-main"]
        assert allowed(found, own, peers["collector"], int(port))
        assert not allowed(objects("gpu"), own, peers["collector"], int(port))
