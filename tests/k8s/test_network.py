"""Which pods reach which: a table of all that is allowed, and everything else is not."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import POOL_LABEL, Object, Pod, adhoc, complete, objects, of_kind, selects, tree, workloads
from tests.k8s.wiring import faults

UCX = {"ucx first": 32768, "ucx last": 60999}
"""The ends of the ports that UCX may choose: Linux gives it one of its ephemeral ports."""


@dataclass(frozen=True)
class Peer:
    """A pod somewhere."""

    labels: dict[str, str]
    namespace: str
    namespace_labels: dict[str, str]
    ip: str = "10.0.0.1"


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
        assert peer.keys() <= {"podSelector", "namespaceSelector", "ipBlock"}, f"not used here: {peer}"
        if block := peer.get("ipBlock"):
            address = ip_address(there.ip)
            cut_out = any(address in ip_network(part) for part in block.get("except", []))
            return address in ip_network(block["cidr"]) and not cut_out
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
    if gateways := of_kind(
        [item for item in of_kind(found, "Deployment") if item not in workloads(found)], "Deployment"
    ):
        known["gateway"] = Peer(Pod(gateways[0], found, ip="10.0.0.1", name="any").labels, here, own)
    strangers = {
        "client": ({"app": "shop"}, "app", {"corun.dev/clients": "true"}),
        "dns": ({"k8s-app": "kube-dns"}, "kube-system", {}),
        "openshift-dns": ({"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns", {}),
        "prometheus": ({"app.kubernetes.io/name": "prometheus"}, "monitoring", {}),
        "collector": ({"app.kubernetes.io/name": "opentelemetry-collector"}, "monitoring", {}),
        "stranger": ({"app.kubernetes.io/name": "corun"}, "default", {}),
    }
    for name, (labels, where, extra) in strangers.items():
        known[name] = Peer(labels, where, {**extra, "kubernetes.io/metadata.name": where})
    known["node-local-dns"] = Peer({}, "", {}, ip="169.254.20.10")
    known["hub"] = Peer({}, "", {}, ip="93.184.216.34")
    known["metadata"] = Peer({}, "", {}, ip="169.254.169.254")
    return known | {"stranger-here": Peer({"app": "debug"}, here, own)}


def ports_of(found: list[Object]) -> dict[str, int]:
    """Return the ports that the pods declare: NIXL's and the metrics' once, gRPC's by role. `faults` compares them with
    those that the processes listen on."""
    ports = dict(UCX)
    for one in of_kind(found, "Deployment", "StatefulSet"):
        pod = Pod(one, found, ip="10.0.0.1", name="any")
        for port in pod.container["ports"]:
            ports[pod.role if port["name"] in {"grpc", "https"} else port["name"]] = port["containerPort"]
    return ports


def table(found: list[Object]) -> set[tuple[str, str, str]]:
    """Return (source, target, port) of every connection that may be made to a pod of the cluster, or by one."""
    peers = peers_of(found)
    ours = {name for name in peers if name.startswith(("router", "prefill", "decode", "colocated", "gateway"))}
    return {
        (source, target, name)
        for (source, target), (name, port) in product(product(peers, peers), ports_of(found).items())
        if source != target and ours & {source, target} and allowed(found, peers[source], peers[target], port)
    }


def expected(pool: str, roles: tuple[str, ...] = ("prefill", "decode")) -> set[tuple[str, str, str]]:
    router, nodes = f"router-{pool}", [f"{role}-{pool}" for role in roles]
    ports = ("router", "gateway", *roles, "nixl", "metrics", *UCX)
    return {
        ("client", "gateway", "gateway"),
        *((client, router, "router") for client in ("client", "gateway", *nodes)),
        *((router, node, role) for node, role in zip(nodes, roles, strict=True)),
        *((a, b, port) for a, b in permutations(nodes, 2) for port in ports),
        *(("prometheus", pod, "metrics") for pod in (router, "gateway", *nodes)),
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


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "rdma", "rdma-root", "pool-b"])
def test_what_is_reached(overlay: str) -> None:
    found = objects(overlay)
    pools = ("main", "b") if overlay == "pool-b" else ("main",)
    assert table(found) == set().union(*map(expected, pools))
    peers = peers_of(found)
    for name in ("router-main", "prefill-main", "decode-main", "gateway"):
        names = [("dns", 53), ("node-local-dns", 53), ("openshift-dns", 5353)]
        asked = [(peers[to], port, protocol) for to, port in names for protocol in ("UDP", "TCP")]
        assert [one for one in asked if not allowed(found, peers[name], *one)] == []
        other = [("dns", 443), ("node-local-dns", 443), ("openshift-dns", 443), ("stranger", 443), ("hub", 443)]
        assert [to for to, port in other if allowed(found, peers[name], peers[to], port)] == []
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


def test_only_the_pod_that_fetches_weights_reaches_the_hub() -> None:
    found = objects("fetch-weights")
    (job,) = of_kind(found, "Job")
    peers = peers_of(found)
    fetcher = Peer(job["spec"]["template"]["metadata"]["labels"], peers["stranger-here"].namespace, {})
    assert allowed(found, fetcher, peers["hub"], 443)
    assert allowed(found, fetcher, peers["dns"], 53, "UDP")
    closed = [("hub", 80), ("metadata", 443), ("stranger", 443), ("stranger-here", 443), ("client", 443)]
    assert [name for name, port in closed if allowed(found, fetcher, peers[name], port)] == []
    assert not allowed(found, peers["client"], fetcher, 443)
    served = [*objects("gpu"), *found]
    assert [name for name, peer in peers_of(objects("gpu")).items() if allowed(served, peer, peers["hub"], 443)] == [
        name for name, peer in peers_of(objects("gpu")).items() if peer.namespace != fetcher.namespace
    ]


def test_pods_that_fetch_for_themselves_reach_the_hub(tmp_path: Path) -> None:
    lines = ("namespace: corun", "resources: [../../base/cluster, ../../base/gateway, ../gpu/main]")
    parts = "components: [../../components/models-fetch, ../../components/site]"
    adhoc("fetching", *lines, parts)
    found = complete("fetching")
    assert faults(found, tmp_path) == []
    peers = peers_of(found)
    reached = {name for name, peer in peers.items() if allowed(found, peer, peers["hub"], 443)}
    assert {"router-main", "prefill-main", "decode-main"} <= reached
    assert "gateway" not in reached
    assert not allowed(found, peers["decode-main"], peers["metadata"], 443)
