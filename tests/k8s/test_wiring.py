"""What the manifests say is what the processes read; and the check sees it where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from corun.config.fields import ColocatedConfig
from tests.k8s.manifests import Pod, built, complete, of_kind, workloads
from tests.k8s.wiring import configuration, faults

ROUTER, PREFILL, DECODE = "Deployment corun-router-main", "Deployment corun-prefill-main", "StatefulSet corun-decode"
TOML, ROUTERS = "ConfigMap corun-config", "Service corun-routers-main"


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "colocated", "rdma", "rdma-root", "pool-b"])
def test_manifests_and_processes_agree(overlay: str, tmp_path: Path) -> None:
    assert faults(complete(overlay), tmp_path) == []


@pytest.mark.parametrize(
    ("object_name", "old", "new", "fault"),
    [
        (ROUTER, "--metrics-port", "--probe-port", "Unrecognized"),
        (DECODE, "- --port=50071", "- --port=50071\n        - --chunk-size=128", "Unrecognized"),
        (DECODE, "--port=50071", "--port=70000", "must be an integer in"),
        (DECODE, "- decode_node", "- prefill_node", "does not start a decode"),
        (PREFILL, "name: POD_IP", "name: POD_ADDRESS", "$(POD_IP) names no variable"),
        (
            PREFILL,
            "        env:\n",
            "        env:\n        - {name: CORUN_PORT, value: '1'}\n",
            "nobody reads CORUN_PORT",
        ),
        (PREFILL, "        env:\n", "        env:\n        - {name: NCCL_ALGO, value: ring}\n", "NCCL_ALGO"),
        (PREFILL, "containerPort: 50061", "containerPort: 50060", "declares ports"),
        (DECODE, "--nixl-port=50081", "--nixl-port=50082", "declares ports"),
        (PREFILL, "--nixl-host=$(POD_IP)", "--nixl-host=127.0.0.1", "not the pod's address"),
        (ROUTER, "--metrics-host=$(POD_IP)", "--metrics-host=127.0.0.1", "not reached"),
        (DECODE, "path: /readyz", "path: /startedz", "readinessProbe asks"),
        (PREFILL, "path: /livez", "path: /readyz", "livenessProbe asks"),
        (ROUTER, "timeoutSeconds: 6", "timeoutSeconds: 1", "livenessProbe gives up"),
        (ROUTER, "terminationGracePeriodSeconds: 40", "terminationGracePeriodSeconds: 30", "is killed after 30 s"),
        (TOML, "drain_grace_s = 20", "drain_grace_s = 300", "is killed after"),
        (ROUTER, "preStop:", "postStart:", "without preStop"),
        ("Secret corun-tls", "ca.crt:", "ca.pem:", "has no ca.crt"),
        ("Secret corun-cluster-token", "kind: Secret", "kind: Other", "there is no Secret"),
        ("Secret corun-seed-key", "seed.key: |", "seed.key: ''\n  other: |", "seed_key_file"),
        (ROUTER, "mountPath: /etc/corun", "mountPath: /etc/elsewhere", "readable"),
        (ROUTER, "mountPath: /tmp", "mountPath: /temporary", "cannot write to /tmp"),
        (DECODE, "mountPath: /home/corun", "mountPath: /home/other", "cannot write to /home/corun"),
        (DECODE, "medium: Memory", "medium: ''", "sized piece of memory"),
        (DECODE, "path: cluster/cluster.token", "path: clients.tokens", "cluster_token_file"),
        (
            DECODE,
            "- key: tls.key\n",
            "- {key: tls.key, path: seed.key}\n              - key: tls.key\n",
            "only routers",
        ),
        (TOML, "slots = 8", "slot = 8", "slot"),
        (TOML, "[pools.main", "[pools.other", "pool"),
        (TOML, "cluster_token_file", "# token", "cluster_token_file"),
        (TOML, "/models/tiny", "/models/large", "model"),
        (PREFILL, "initContainers:", "ephemeralContainers:", "model"),
        (DECODE, "=corun-routers-", "=corun-router-", "there is no Service corun-router-main"),
        (DECODE, ":50051", ":50052", "has no port 50052"),
        (ROUTERS, "clusterIP: None", "clusterIP: ''", "ready or not"),
        (ROUTERS, "publishNotReadyAddresses: true", "publishNotReadyAddresses: false", "ready or not"),
        (ROUTERS, "app.kubernetes.io/component: router", "app.kubernetes.io/name: corun", "is wrong about"),
        ("Service corun", "targetPort: grpc", "targetPort: http", "sends 50051 to http"),
        (PREFILL, "corun.dev/pool: main", "corun.dev/pool: b", "pool"),
    ],
)
def test_what_does_not_fit_is_seen(object_name: str, old: str, new: str, fault: str, tmp_path: Path) -> None:
    kind, name = object_name.split()
    texts = built("cpu-demo").split("\n---\n")
    index = next(i for i, text in enumerate(texts) if f"\nkind: {kind}\n" in text and f"\n  name: {name}" in text)
    assert old in texts[index]
    texts[index] = texts[index].replace(old, new)
    found = faults([yaml.safe_load(text) for text in texts], tmp_path)
    assert any(fault in one for one in found), found


def test_a_pool_needs_both_sides(tmp_path: Path) -> None:
    found = [one for one in complete("colocated") if one["kind"] != "StatefulSet"]
    assert sorted(faults(found, tmp_path)) == ["pool main has no decode", "pool main has no prefill"]


def test_a_colocated_pod_is_its_process_and_no_pair_is_beside_it(tmp_path: Path) -> None:
    objects = complete("colocated")
    router, node = sorted(workloads(objects), key=lambda one: str(one["kind"]))
    pod = Pod(node, objects, ip="10.0.0.3", name="corun-colocated-main-0")
    assert pod.command()[:3] == ["python", "-m", "colocated_node"]
    config = configuration(pod, tmp_path)
    assert (type(config), config.slots, config.node_id) == (ColocatedConfig, 256, "corun-colocated-main-0")
    assert (router["kind"], node["kind"]) == ("Deployment", "StatefulSet")
    assert pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_readme_makes_the_secrets_that_the_pods_mount() -> None:
    found = complete("gpu")
    sources = [
        source
        for workload in workloads(found)
        for volume in workload["spec"]["template"]["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
    ]
    made = {secret["metadata"]["name"] for secret in of_kind(found, "Secret")}
    assert made == {source["secret"]["name"] for source in sources if "secret" in source}


def test_the_demo_is_what_cluster_toml_says(tmp_path: Path) -> None:
    objects = complete("cpu-demo")
    decode = next(item for item in workloads(objects) if item["kind"] == "StatefulSet")
    config = configuration(Pod(decode, objects, ip="10.0.0.3", name="corun-decode-main-0"), tmp_path)
    assert (config.slots, config.threads, config.tls_name) == (8, 1, "corun")
    assert config.router == ("corun-routers-main:50051",)
