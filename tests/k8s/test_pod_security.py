"""Pod Security: every pod fits its namespace's level, and only RDMA nodes need more than "restricted"."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.k8s.manifests import OVERLAYS, Object, objects, of_kind, pod_specs, workloads

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(spec: Object) -> list[str]:
    """Return the violations of the Pod Security Standard "restricted".

    In addition, a pod needs a read-only root and must have no API token.
    """
    found = [f"host{name}" for name in ("Network", "PID", "IPC") if spec.get(f"host{name}")]
    found += [f"volume {v['name']}" for v in spec.get("volumes", []) if not (v.keys() - {"name"}) <= VOLUMES]
    pod = spec.get("securityContext", {})
    if spec.get("automountServiceAccountToken") is not False:
        found.append("an API token")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        found += [f"{container['name']}: {problem}" for problem in _of_container(pod, own)]
        found += [f"{container['name']}: hostPort" for port in container.get("ports", []) if "hostPort" in port]
    return found


def _of_container(pod: Any, own: Any) -> list[str]:
    capabilities = own.get("capabilities", {})
    both = {**pod, **own}
    checks = {
        "runs as root": both.get("runAsNonRoot") is True and both.get("runAsUser", 1) != 0,
        "seccomp": both.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        "privileged": not own.get("privileged"),
        "escalates": own.get("allowPrivilegeEscalation") is False,
        "writes to its root": own.get("readOnlyRootFilesystem") is True,
        "keeps capabilities": capabilities.get("drop") == ["ALL"],
        **{f"adds {added}": added == "NET_BIND_SERVICE" for added in capabilities.get("add", [])},
    }
    return [problem for problem, holds in checks.items() if not holds]


def level(found: list[Object]) -> str:
    (namespace,) = of_kind(found, "Namespace")
    enforced: str = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    return enforced


@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name != "rdma"])
def test_restricted(overlay: str) -> None:
    found = objects(overlay)
    assert level(found) == "restricted"
    specs = list(pod_specs(found))
    assert len(specs) >= 2
    assert {name: violations(spec) for name, spec in specs if violations(spec)} == {}


def test_rdma_has_a_namespace_of_its_own_and_only_its_nodes_need_it() -> None:
    found = objects("rdma")
    assert level(found) == "privileged"
    (namespace,) = of_kind(found, "Namespace")
    assert namespace["metadata"]["name"] == "corun-rdma"
    for workload in workloads(found):
        name, spec = workload["metadata"]["name"], workload["spec"]["template"]["spec"]
        problems = [problem.partition(": ")[2] for problem in violations(spec)]
        assert problems == ([] if "router" in name else ["runs as root", "adds IPC_LOCK"])
        if "router" not in name:
            assert "rdma/hca_shared_devices_a" in spec["containers"][0]["resources"]["limits"]


def test_gpus_are_asked_for_and_found() -> None:
    for workload in workloads(objects("gpu")):
        spec = workload["spec"]["template"]["spec"]
        limits = spec["containers"][0]["resources"]["limits"]
        is_node = "router" not in workload["metadata"]["name"]
        assert limits.get("nvidia.com/gpu") == ("1" if is_node else None)
        assert ("nodeSelector" in spec) == ("tolerations" in spec) == is_node


def test_accounts_have_no_token_and_no_rights() -> None:
    for overlay in OVERLAYS:
        found = objects(overlay)
        assert {one["automountServiceAccountToken"] for one in of_kind(found, "ServiceAccount")} == {False}
        assert of_kind(found, "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding") == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("securityContext", "runAsNonRoot"), False, "router: runs as root"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "router: seccomp"),
        (("containers", 0, "securityContext", "capabilities"), {}, "router: keeps capabilities"),
        (("containers", 0, "securityContext", "readOnlyRootFilesystem"), False, "router: writes to its root"),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True, "router: escalates"),
        (("automountServiceAccountToken",), True, "an API token"),
        (("hostNetwork",), True, "hostNetwork"),
        (("volumes",), [{"name": "host", "hostPath": {"path": "/"}}], "volume host"),
    ],
)
def test_a_violation_is_seen(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    workload = next(one for one in workloads(objects("gpu")) if "router" in one["metadata"]["name"])
    spec = copy.deepcopy(workload["spec"]["template"]["spec"])
    place: Any = spec
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert violations(spec) == [expected]
