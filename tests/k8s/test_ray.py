"""The overlay for KubeRay: `corun up` takes what its container is told, and Ray has room for it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from corun.cli import main
from corun.config.cluster_file import ROLES, ClusterSpec, read
from tests.k8s.manifests import Object, complete, of_kind, one, selects
from tests.k8s.pods import Pod
from tests.k8s.wiring import ENGINE_END_S, ROUTER_END_S

RAY_END_S = 35
"""At SIGTERM Ray drains by itself for up to 30 s (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S) and then ends."""


def ray(found: list[Object]) -> Any:
    (cluster,) = of_kind(found, "RayCluster")
    return cluster["spec"]


def pods(found: list[Object]) -> dict[str, Pod]:
    """Head and worker, as if each were a workload."""
    templates = {"head": ray(found)["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in ray(found)["workerGroupSpecs"]}
    workloads = {name: {"spec": {"template": template}} for name, template in templates.items()}
    return {name: Pod(workload, found, ip="10.0.0.1", name=name) for name, workload in workloads.items()}


def below(root: Path, pod: Pod) -> Path:
    """The cluster.toml of a pod whose files are under `root`."""
    pod.materialise(root)
    file = root / "etc/corun/cluster.toml"
    model = root / "models/Qwen3-8B"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    file.write_text(re.sub(r'"(?=/(?:etc/corun|models)/)', f'"{root}', file.read_text()))
    return file


def test_corun_up_would_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = pods(complete("ray"))["head"]
    up = next(container for container in head.spec["containers"] if container["name"] == "corun")
    command = head.command(up)
    assert command[:3] == ["corun", "up", "/etc/corun/cluster.toml"]
    words = ["up", str(below(tmp_path, head)), *command[3:], "--check"]
    assert main(words) == 0, capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--no-such-flag"])


def test_every_machine_of_ray_has_the_files_and_the_room(tmp_path: Path) -> None:
    found = complete("ray")
    for name, pod in pods(found).items():
        spec = read(below(tmp_path / name, pod))
        spec.check()
        spec.check_files()
        assert {"/tmp", "/dev/shm", pod.environment()["HOME"]} <= pod.mounts().keys()
        assert pod.container["image"] == pods(found)["head"].container["image"]
    nodes = sum(pool.count(role) for pool in spec.pools for role in ("prefill", "decode"))
    groups = ray(found)["workerGroupSpecs"]
    gpus = [int(g["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for g in groups]
    assert sum(group["replicas"] * each for group, each in zip(groups, gpus, strict=True)) >= nodes
    assert [group["rayStartParams"]["num-gpus"] for group in groups] == [str(each) for each in gpus]


def test_clients_reach_the_router_of_the_head() -> None:
    found = complete("ray")
    service = one(found, "Service", "corun")["spec"]
    labels = {name: pod.labels for name, pod in pods(found).items()}
    assert [name for name in labels if selects({"matchLabels": service["selector"]}, labels[name])] == ["head"]
    named = {port["name"]: port["containerPort"] for port in pods(found)["head"].container["ports"]}
    (port,) = service["ports"]
    text = next(c for c in of_kind(found, "ConfigMap") if "cluster.toml" in c["data"])["data"]["cluster.toml"]
    assert named[port["targetPort"]] == port["port"] == int(re.findall(r"^port = (\d+)$", text, re.MULTILINE)[0])
    policy = one(found, "NetworkPolicy", "clients-to-routers")["spec"]
    assert selects(policy["podSelector"], labels["head"])


def early_ends(pod: Pod, spec: ClusterSpec) -> list[str]:
    """What ends before `corun up` has drained all routers and after them all nodes."""
    ends = {role: ROUTER_END_S if role == "router" else ENGINE_END_S for role in ROLES}
    drains = {role: max(pool.config(role).drain_grace_s for pool in spec.pools) + ends[role] for role in ROLES}
    needed = drains["router"] + max(drains["prefill"], drains["decode"])
    sleep, waits = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    found = [f"Ray ends after {waits} s of {needed:g}"] if float(waits) < needed else []
    return found + (
        [f"the pod ends after {pod.grace_s} s"] if pod.grace_s < max(needed, float(waits) + RAY_END_S) else []
    )


def test_ray_outlives_the_drain_on_every_machine(tmp_path: Path) -> None:
    for name, pod in pods(complete("ray")).items():
        file = below(tmp_path / name, pod)
        assert early_ends(pod, read(file)) == []
        for table in ("[pools.main.router]", "[pools.main.prefill]", "[pools.main.decode]"):
            changed = file.with_name("longer.toml")
            changed.write_text(file.read_text().replace(table, f"{table}\ndrain_grace_s = 80"))
            assert len(early_ends(pod, read(changed))) == 2
        pod.spec["terminationGracePeriodSeconds"] = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert len(early_ends(pod, read(file))) == 1


def test_ray_is_the_one_that_is_installed() -> None:
    assert ray(complete("ray"))["rayVersion"] == metadata.version("ray")
