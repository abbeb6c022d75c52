"""Which pods reach which: a table of all that is allowed, and everything else is not."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path

import pytest

from tests.k8s.manifests import Object, complete, objects, of_kind, tree, workloads
from tests.k8s.netpol import Peer, allowed
from tests.k8s.pods import Pod
from tests.k8s.wiring import faults, peer

PORTS = {
    "client": 50051,
    "prefill": 50061,
    "decode": 50071,
    "nixl": 50081,
    "ucx": 45678,
    "metrics": 9100,
}


def pods(found: list[Object]) -> dict[str, Peer]:
    """By role and pool; a few strangers."""
    known = {
        f"{pod.role}-{pod.labels['corun.dev/pool']}": peer(pod)
        for pod in (Pod(one, found, ip="10.0.0.1", name="any") for one in workloads(found))
    }
    (namespace,) = of_kind(found, "Namespace")
    own = {**namespace["metadata"]["labels"], "kubernetes.io/metadata.name": namespace["metadata"]["name"]}
    elsewhere = {
        "app": {"corun.dev/clients": "true"},
        "kube-system": {},
        "monitoring": {},
        "default": {},
    }
    labels = {name: {**extra, "kubernetes.io/metadata.name": name} for name, extra in elsewhere.items()}
    return known | {
        "client": Peer({"app": "shop"}, "app", labels["app"]),
        "dns": Peer({"k8s-app": "kube-dns"}, "kube-system", labels["kube-system"]),
        "prometheus": Peer({"app.kubernetes.io/name": "prometheus"}, "monitoring", labels["monitoring"]),
        "stranger": Peer({"app.kubernetes.io/name": "corun"}, "default", labels["default"]),
        "stranger-here": Peer({"app": "debug"}, namespace["metadata"]["name"], own),
    }


def table(found: list[Object]) -> set[tuple[str, str, str]]:
    """(source, target, port) of every connection that may be made to a pod of the cluster, or by one."""
    peers = pods(found)
    ours = {name for name in peers if name.startswith(("router", "prefill", "decode"))}
    return {
        (source, target, name)
        for (source, target), (name, port) in product(product(peers, peers), PORTS.items())
        if source != target and ours & {source, target} and allowed(found, peers[source], peers[target], port)
    }


def expected(pool: str) -> set[tuple[str, str, str]]:
    router, prefill, decode = f"router-{pool}", f"prefill-{pool}", f"decode-{pool}"
    between = {(a, b, port) for a, b in ((prefill, decode), (decode, prefill)) for port in PORTS}
    return {
        ("client", router, "client"),
        (prefill, router, "client"),
        (decode, router, "client"),
        (router, prefill, "prefill"),
        (router, decode, "decode"),
        *between,
        *(("prometheus", pod, "metrics") for pod in (router, prefill, decode)),
    }


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "rdma", "pool-b"])
def test_what_is_reached(overlay: str) -> None:
    found = objects(overlay)
    pools = ("main", "b") if overlay == "pool-b" else ("main",)
    assert table(found) == set().union(*map(expected, pools))


def test_names_are_resolved_and_nothing_else_is_asked() -> None:
    found = objects("gpu")
    peers = pods(found)
    for name in ("router-main", "prefill-main", "decode-main"):
        assert allowed(found, peers[name], peers["dns"], 53, "UDP")
        assert allowed(found, peers[name], peers["dns"], 53, "TCP")
        assert not allowed(found, peers[name], peers["dns"], 443)
        assert not allowed(found, peers[name], peers["stranger"], 443)


def test_udp_is_closed_between_nodes() -> None:
    found = objects("gpu")
    peers = pods(found)
    assert not allowed(found, peers["decode-main"], peers["prefill-main"], 50081, "UDP")


def test_without_default_deny_the_table_is_another() -> None:
    found = [copy.deepcopy(one) for one in objects("gpu") if one["metadata"]["name"] != "default-deny"]
    for one in of_kind(found, "NetworkPolicy"):
        one["spec"]["policyTypes"] = ["Ingress"]
    assert ("router-main", "stranger", "client") in table(found)


def test_traces_leave_for_the_collector_where_they_are_wanted(tmp_path: Path) -> None:
    overlay = tree() / "k8s" / "overlays" / "traced"
    overlay.mkdir(exist_ok=True)
    lines = ("resources: [../gpu]", "components: [../../components/tracing]", "namespace: corun")
    (overlay / "kustomization.yaml").write_text("\n".join(lines))
    found = complete("traced")
    assert faults(found, tmp_path) == []
    for workload in workloads(found):
        pod = Pod(workload, found, ip="10.0.0.1", name="any")
        host, _, port = pod.environment()["OTEL_EXPORTER_OTLP_ENDPOINT"].removeprefix("http://").partition(":")
        namespace = host.partition(".")[2]
        labels = {"app.kubernetes.io/name": "opentelemetry-collector"}
        collector = Peer(labels, namespace, {"kubernetes.io/metadata.name": namespace})
        assert allowed(found, peer(pod), collector, int(port))
        assert not allowed(objects("gpu"), peer(pod), collector, int(port))
