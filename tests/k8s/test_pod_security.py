"""Pod Security: every pod fits its namespace's level, and only RDMA nodes of root need more than "restricted"."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.manifests import OVERLAYS, Object, objects, of_kind, pod_specs, workloads

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"}
VOLUMES |= {"secret"}


def violations(spec: Object) -> list[str]:
    """Return the violations of the Pod Security Standard "restricted".

    In addition, a pod needs a read-only root and must have no API token.
    """
    found = [f"host{name}" for name in ("Network", "PID", "IPC") if spec.get(f"host{name}")]
    found += [f"volume {v['name']}" for v in spec.get("volumes", []) if not (v.keys() - {"name"}) <= VOLUMES]
    if spec.get("automountServiceAccountToken") is not False:
        found.append("an API token")
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        both = {**spec.get("securityContext", {}), **own}
        capabilities = own.get("capabilities", {})
        holds = {
            "runs as root": both.get("runAsNonRoot") is True and both.get("runAsUser", 1) != 0,
            "seccomp": both.get("seccompProfile", {}).get("type") == "RuntimeDefault",
            "privileged": not own.get("privileged"),
            "escalates": own.get("allowPrivilegeEscalation") is False,
            "writes to its root": own.get("readOnlyRootFilesystem") is True,
            "keeps capabilities": capabilities.get("drop") == ["ALL"],
            **{f"adds {added}": added == "NET_BIND_SERVICE" for added in capabilities.get("add", [])},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        }
        found += [problem for problem, is_well in holds.items() if not is_well]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_fit_the_level_of_their_namespace(overlay: str) -> None:
    found = objects(overlay)
    (namespace,) = of_kind(found, "Namespace")
    is_root, is_rdma = overlay == "rdma-root", overlay in {"rdma", "rdma-root"}
    assert namespace["metadata"]["name"] == ("corun-rdma" if is_root else "corun")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == ("privileged" if is_root else "restricted")
    specs = list(pod_specs(found))
    assert len(specs) >= (1 if overlay == "fetch-weights" else 2)
    for name, spec in specs:
        needs_rdma = is_rdma and "router" not in name and "gateway" not in name
        assert violations(spec) == (["runs as root", "adds IPC_LOCK"] if needs_rdma and is_root else []), name
        assert ("memlock" in str(spec.get("initContainers"))) == (needs_rdma and not is_root)
        assert ("rdma/hca_shared_devices_a" in str(spec["containers"][0]["resources"])) == needs_rdma
    assert {one["automountServiceAccountToken"] for one in of_kind(found, "ServiceAccount")} == {False}
    assert of_kind(found, "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding") == []


def test_gpus_are_asked_for_and_found() -> None:
    for workload in workloads(objects("gpu")):
        spec = workload["spec"]["template"]["spec"]
        is_node = "router" not in workload["metadata"]["name"]
        assert spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == ("1" if is_node else None)
        assert ("nodeSelector" in spec) == ("tolerations" in spec) == is_node


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("securityContext", "runAsNonRoot"), False, "runs as root"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccomp"),
        (("containers", 0, "securityContext", "capabilities"), {}, "keeps capabilities"),
        (("containers", 0, "securityContext", "readOnlyRootFilesystem"), False, "writes to its root"),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True, "escalates"),
        (("automountServiceAccountToken",), True, "an API token"),
        (("hostNetwork",), True, "hostNetwork"),
        (("volumes",), [{"name": "host", "hostPath": {"path": "/"}}], "volume host"),
    ],
)
def test_a_violation_is_seen(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    spec = next(spec for name, spec in pod_specs(objects("gpu")) if "router" in name)
    place: Any = spec
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert violations(spec) == [expected]
