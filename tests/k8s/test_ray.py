"""The overlay for KubeRay: `corun up` takes what its container is told, and Ray has room for it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from corun.cli import main
from corun.config.cluster_file import NODES, ROLES, ClusterSpec, read
from tests.k8s.manifests import Object, Pod, complete, of_kind, one, selects
from tests.k8s.wiring import ENGINE_END_S, ROUTER_END_S

RAY_END_S = 35
"""At SIGTERM Ray drains by itself for up to 30 s (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S) and then ends."""


@pytest.fixture
def found() -> list[Object]:
    return complete("ray")


def pods(found: list[Object]) -> dict[str, Pod]:
    """Return head and workers, as if each were a workload."""
    spec = of_kind(found, "RayCluster")[0]["spec"]
    templates = {"head": spec["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {name: Pod({"spec": {"template": t}}, found, ip="10.0.0.1", name=name) for name, t in templates.items()}


def cluster_file(root: Path, pod: Pod) -> Path:
    """Return the cluster.toml of a pod whose files are under `root`."""
    pod.materialise(root)
    model = root / "models/Qwen3-8B"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    return root / "etc/corun/cluster.toml"


def test_corun_up_would_start(found: list[Object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = pods(found)["head"]
    command = head.command(next(container for container in head.spec["containers"] if container["name"] == "corun"))
    assert command[:3] == ["corun", "up", "/etc/corun/cluster.toml"]
    words = ["up", str(cluster_file(tmp_path, head)), *command[3:], "--check"]
    assert main(words) == 0, capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--no-such-flag"])


def test_every_machine_of_ray_has_the_files_and_the_room(found: list[Object], tmp_path: Path) -> None:
    for name, pod in pods(found).items():
        spec = read(cluster_file(tmp_path / name, pod))
        spec.check()
        spec.check_files()
        assert {"/tmp", "/dev/shm", pod.environment()["HOME"]} <= pod.mounts().keys()
        assert pod.container["image"] == pods(found)["head"].container["image"]
    nodes = sum(pool.count(role) for pool in spec.pools for role in NODES)
    ray = of_kind(found, "RayCluster")[0]["spec"]
    assert ray["rayVersion"] == metadata.version("ray")
    limits = [
        group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        for group in ray["workerGroupSpecs"]
    ]
    assert [group["rayStartParams"]["num-gpus"] for group in ray["workerGroupSpecs"]] == limits
    assert (
        sum(group["replicas"] * int(gpus) for group, gpus in zip(ray["workerGroupSpecs"], limits, strict=True)) >= nodes
    )


def test_clients_reach_the_router_of_the_head(found: list[Object], tmp_path: Path) -> None:
    service = one(found, "Service", "corun")["spec"]
    head = pods(found)["head"]
    reached = [name for name, pod in pods(found).items() if selects({"matchLabels": service["selector"]}, pod.labels)]
    assert reached == ["head"]
    named = {port["name"]: port["containerPort"] for port in head.container["ports"]}
    (port,) = service["ports"]
    listens = read(cluster_file(tmp_path, head)).pool().config("router").port
    assert named[port["targetPort"]] == port["port"] == listens
    assert selects(one(found, "NetworkPolicy", "clients-to-routers")["spec"]["podSelector"], head.labels)


def early_ends(pod: Pod, spec: ClusterSpec) -> list[str]:
    """Return what ends before `corun up` has drained all routers and after them all nodes."""
    ends: dict[str, Any] = {role: ROUTER_END_S if role == "router" else ENGINE_END_S for role in ROLES}
    drains = {role: max(pool.config(role).drain_grace_s for pool in spec.pools) + ends[role] for role in ROLES}
    needed = drains["router"] + max(drains[role] for role in NODES)
    sleep, waits = pod.container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    grace = pod.spec["terminationGracePeriodSeconds"]
    found = {"Ray": float(waits) >= needed, "the pod": grace >= max(needed, float(waits) + RAY_END_S)}
    return [what for what, is_late in found.items() if not is_late]


def test_ray_outlives_the_drain_on_every_machine(found: list[Object], tmp_path: Path) -> None:
    for name, pod in pods(found).items():
        file = cluster_file(tmp_path / name, pod)
        assert early_ends(pod, read(file)) == []
        for role in (role for role in ROLES if f"[pools.main.{role}]" in file.read_text()):
            longer = re.sub(rf"(\[pools\.main\.{role}\])", r"\1\ndrain_grace_s = 80", file.read_text())
            (changed := file.with_name("longer.toml")).write_text(longer)
            assert early_ends(pod, read(changed)) == ["Ray", "the pod"]
        pod.spec["terminationGracePeriodSeconds"] = 105
        assert early_ends(pod, read(file)) == ["the pod"]
