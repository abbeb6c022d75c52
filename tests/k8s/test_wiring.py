"""What the manifests say is what the processes read; and the check sees it where it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.manifests import Object, complete, of_kind, one, readme_secrets, workloads
from tests.k8s.pods import Pod
from tests.k8s.wiring import configuration, faults

POD_OVERLAYS = ("cpu-demo", "gpu", "rdma", "pool-b")


@pytest.mark.parametrize("overlay", POD_OVERLAYS)
def test_manifests_and_processes_agree(overlay: str, tmp_path: Path) -> None:
    assert faults(complete(overlay), tmp_path) == []


def container(objects: list[Object], role: str) -> Any:
    found = next(item for item in workloads(objects) if f"corun-{role}-" in item["metadata"]["name"])
    return found["spec"]["template"]["spec"]["containers"][0]


def pod_spec(objects: list[Object], role: str) -> Any:
    found = next(item for item in workloads(objects) if f"corun-{role}-" in item["metadata"]["name"])
    return found["spec"]["template"]["spec"]


def exchange(words: list[str], old: str, new: str) -> None:
    index = next(index for index, word in enumerate(words) if old in word)
    words[index] = words[index].replace(old, new)


def toml(objects: list[Object], old: str, new: str) -> None:
    data = next(item for item in of_kind(objects, "ConfigMap") if "cluster.toml" in item["data"])["data"]
    assert old in data["cluster.toml"]
    data["cluster.toml"] = data["cluster.toml"].replace(old, new, 1)


def secret(objects: list[Object], name: str) -> Any:
    return next(item for item in of_kind(objects, "Secret") if item["metadata"]["name"].startswith(name))


def rename_key(objects: list[Object], name: str, old: str, new: str) -> None:
    data = secret(objects, name)["data"]
    data[new] = data.pop(old)


def drop(items: list[Any], name: str) -> None:
    items[:] = [item for item in items if item["name"] != name]


def policy(objects: list[Object], name: str) -> Any:
    return one(objects, "NetworkPolicy", name)["spec"]


Change = Callable[[list[Object]], None]
MUTATIONS: dict[str, tuple[Change, str]] = {
    "a flag that there is not": (
        lambda o: exchange(container(o, "router")["args"], "--metrics-port", "--probe-port"),
        "Unrecognized",
    ),
    "a flag that decode nodes do not have": (
        lambda o: container(o, "decode")["args"].append("--chunk-size=128"),
        "Unrecognized",
    ),
    "a value outside its limit": (
        lambda o: exchange(container(o, "decode")["args"], "50071", "70000"),
        "must be an integer in",
    ),
    "another module": (lambda o: exchange(container(o, "decode")["command"], "decode_node", "prefill_node"), "start a"),
    "a variable that is not there": (lambda o: drop(container(o, "prefill")["env"], "POD_IP"), r"$(POD_IP)"),
    "a variable that nobody reads": (
        lambda o: container(o, "prefill")["env"].append({"name": "CORUN_PORT", "value": "1"}),
        "nobody reads CORUN_PORT",
    ),
    "a variable that moves bits": (
        lambda o: container(o, "prefill")["env"].append({"name": "NCCL_ALGO", "value": "ring"}),
        "NCCL_ALGO",
    ),
    "a port that nobody listens on": (
        lambda o: container(o, "prefill")["ports"][0].update(containerPort=50060),
        "declares ports",
    ),
    "another NIXL port": (lambda o: exchange(container(o, "decode")["args"], "50081", "50082"), "declares ports"),
    "NIXL on loopback": (
        lambda o: exchange(container(o, "prefill")["args"], "--nixl-host=$(POD_IP)", "--nixl-host=127.0.0.1"),
        "not the pod's address",
    ),
    "probes on loopback": (
        lambda o: exchange(container(o, "router")["args"], "--metrics-host=$(POD_IP)", "--metrics-host=127.0.0.1"),
        "not reached",
    ),
    "a probe of another port": (
        lambda o: container(o, "decode")["readinessProbe"]["httpGet"].update(port=50071),
        "readinessProbe asks",
    ),
    "a probe of another path": (
        lambda o: container(o, "decode")["readinessProbe"]["httpGet"].update(path="/startedz"),
        "readinessProbe asks",
    ),
    "liveness that ends what drains": (
        lambda o: container(o, "prefill")["livenessProbe"]["httpGet"].update(path="/readyz"),
        "livenessProbe asks",
    ),
    "an impatient probe": (lambda o: container(o, "router")["livenessProbe"].pop("timeoutSeconds"), "gives up"),
    "too little time to drain": (
        lambda o: pod_spec(o, "router").update(terminationGracePeriodSeconds=30),
        "is killed after 30 s",
    ),
    "a longer drain": (lambda o: toml(o, "drain_grace_s = 20", "drain_grace_s = 300"), "is killed after"),
    "no preStop": (lambda o: container(o, "router").pop("lifecycle"), "without preStop"),
    "a key of a Secret": (lambda o: rename_key(o, "corun-tls", "ca.crt", "ca.pem"), "has no ca.crt"),
    "a Secret": (lambda o: o.remove(secret(o, "corun-cluster-token")), "there is no Secret"),
    "an empty seed key": (lambda o: secret(o, "corun-seed-key")["data"].update({"seed.key": ""}), "seed_key_file"),
    "another mount path": (
        lambda o: container(o, "router")["volumeMounts"][0].update(mountPath="/etc/elsewhere"),
        "readable",
    ),
    "no /tmp": (lambda o: drop(container(o, "router")["volumeMounts"], "tmp"), "cannot write to /tmp"),
    "no home": (lambda o: drop(container(o, "decode")["volumeMounts"], "home"), "cannot write to /home/corun"),
    "a small /dev/shm": (
        lambda o: next(v for v in pod_spec(o, "decode")["volumes"] if v["name"] == "shm").update(emptyDir={}),
        "sized piece of memory",
    ),
    "nodes with the routers' secrets": (
        lambda o: next(v for v in pod_spec(o, "decode")["volumes"] if v["name"] == "corun").update(
            next(v for v in pod_spec(o, "router")["volumes"] if v["name"] == "corun")
        ),
        "only routers need",
    ),
    "an unknown key of cluster.toml": (lambda o: toml(o, "slots = 8", "slot = 8"), "slot"),
    "an unknown pool": (lambda o: toml(o, "[pools.main", "[pools.other"), "pool"),
    "no cluster token": (lambda o: toml(o, "cluster_token_file", "# "), "cluster_token_file"),
    "a model that is not there": (lambda o: toml(o, "/models/tiny", "/models/large"), "model"),
    "no init container": (lambda o: pod_spec(o, "prefill").pop("initContainers"), "model"),
    "another name of the routers": (
        lambda o: exchange(container(o, "decode")["args"], "corun-routers-", "corun-router-"),
        "there is no Service corun-router-main",
    ),
    "another port of the routers": (lambda o: exchange(container(o, "decode")["args"], "50051", "50052"), "no port"),
    "routers behind one address": (
        lambda o: one(o, "Service", "corun-routers-main")["spec"].pop("clusterIP"),
        "ready or not",
    ),
    "only routers that are ready": (
        lambda o: one(o, "Service", "corun-routers-main")["spec"].pop("publishNotReadyAddresses"),
        "ready or not",
    ),
    "a Service that selects too many": (
        lambda o: one(o, "Service", "corun-routers-main")["spec"]["selector"].pop("app.kubernetes.io/component"),
        "is wrong about",
    ),
    "a Service's port": (
        lambda o: one(o, "Service", "corun")["spec"]["ports"][0].update(targetPort="http"),
        "to http, None",
    ),
    "a pod of another pool": (
        lambda o: next(w for w in workloads(o) if "prefill" in w["metadata"]["name"])["spec"]["template"]["metadata"][
            "labels"
        ].update({"corun.dev/pool": "b"}),
        "pool",
    ),
    "a closed registry": (lambda o: policy(o, "corun-router-main")["ingress"].clear(), "does not reach routers"),
    "a closed node": (lambda o: policy(o, "corun-router-main")["egress"].pop(), "routers do not reach port 50071"),
    "closed UCX": (
        lambda o: policy(o, "corun-prefill-main")["ingress"][1]["ports"][0].update(port=50081, endPort=50081),
        "decode nodes do not reach port 32768",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_does_not_fit_is_seen(name: str, tmp_path: Path) -> None:
    change, expected = MUTATIONS[name]
    objects = copy.deepcopy(complete("cpu-demo"))
    change(objects)
    found = faults(objects, tmp_path)
    assert any(expected in fault for fault in found), found


def test_the_readme_makes_the_secrets_that_the_pods_mount() -> None:
    found = complete("gpu")
    assert {secret["metadata"]["name"] for secret in readme_secrets()} == {
        source["secret"]["name"]
        for workload in workloads(found)
        for volume in workload["spec"]["template"]["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", [])
        if "secret" in source
    }


def test_the_demo_is_what_cluster_toml_says(tmp_path: Path) -> None:
    objects = complete("cpu-demo")
    decode = next(item for item in workloads(objects) if item["kind"] == "StatefulSet")
    config = configuration(Pod(decode, objects, ip="10.0.0.3", name="corun-decode-main-0"), tmp_path)
    assert (config.slots, config.threads, config.tls_name) == (8, 1, "corun")
    assert config.router == ("corun-routers-main:50051",)
