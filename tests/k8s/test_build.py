"""Every overlay builds, and every object is valid for several versions of Kubernetes, unknown fields included."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.k8s.manifests import OVERLAYS, ROOT, complete, objects, of_kind, one, workloads
from tests.k8s.schemas import VERSIONS, check


def distinct() -> dict[str, Any]:
    """The objects of all overlays, each once, by where it was seen first."""
    found: dict[str, Any] = {}
    texts: set[str] = set()
    for overlay in OVERLAYS:
        for item in complete(overlay):
            text = json.dumps(item, sort_keys=True)
            if text not in texts:
                texts.add(text)
                found[f"{overlay}: {item['kind']} {item['metadata']['name']}"] = item
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    problems = {}
    for name, item in distinct().items():
        try:
            check(item, version)
        except jsonschema.ValidationError as error:
            problems[name] = f"{list(error.absolute_path)}: {error.message[:300]}"
    assert problems == {}


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("Deployment", ("spec", "template", "spec"), "terminationGracePeriod"),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "startupProbe", "httpGet"), "name"),
        ("HorizontalPodAutoscaler", ("spec",), "minReplica"),
        ("NetworkPolicy", ("spec",), "policyType"),
        ("PodDisruptionBudget", ("spec",), "minimum"),
        ("ServiceMonitor", ("spec",), "podLabels"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "severity"),
    ],
)
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_an_unknown_field_is_an_error(kind: str, path: tuple[str | int, ...], field: str, version: str) -> None:
    item = of_kind(objects("gpu"), kind)[0]
    check(item, version)
    place: Any = item
    for step in path:
        place = place[step]
    place[field] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(item, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_unique_and_in_one_namespace(overlay: str) -> None:
    found = objects(overlay)
    names = [(item["kind"], item["metadata"]["name"]) for item in found]
    assert len(set(names)) == len(names)
    (namespace,) = of_kind(found, "Namespace")
    others = {item["metadata"].get("namespace") for item in found if item is not namespace}
    assert others == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_is_labelled(overlay: str) -> None:
    for item in objects(overlay):
        if item["kind"] not in {"NetworkPolicy", "Secret", "ConfigMap"}:
            assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "corun", item["metadata"]


def test_no_secret_is_in_the_repository() -> None:
    for overlay in set(OVERLAYS) - {"cpu-demo"}:
        assert of_kind(objects(overlay), "Secret") == []
    for path in (ROOT / "k8s").rglob("*"):
        if path.is_file() and "secrets" not in path.parts:
            assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|[0-9a-f]{64}", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("overlay", ["gpu", "rdma", "pool-b"])
def test_scaling(overlay: str) -> None:
    found = objects(overlay)
    for pool in ("main", "b") if overlay == "pool-b" else ("main",):
        scalers = {item["metadata"]["name"]: item["spec"] for item in of_kind(found, "HorizontalPodAutoscaler")}
        assert scalers[f"corun-router-{pool}"]["minReplicas"] == 2
        for role in ("router", "prefill"):
            target = scalers[f"corun-{role}-{pool}"]["scaleTargetRef"]
            deployment = one(found, target["kind"], target["name"])
            assert "replicas" not in deployment["spec"], "every apply would take back what the autoscaler did"
        budgets = {item["metadata"]["name"]: item["spec"] for item in of_kind(found, "PodDisruptionBudget")}
        for item in workloads(found):
            if item["metadata"]["name"].endswith(f"-{pool}"):
                assert budgets[item["metadata"]["name"]]["selector"] == item["spec"]["selector"]
        assert budgets[f"corun-router-{pool}"]["minAvailable"] == 1
        decode = one(found, "StatefulSet", f"corun-decode-{pool}")["spec"]
        assert decode["podManagementPolicy"] == "Parallel"
        assert "replicas" not in decode, "every apply would take back what `kubectl scale` said"


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "rdma"])
def test_prefill_and_decode_pods_differ_in_what_they_run_only(overlay: str) -> None:
    """Their manifests are written out, each to be read alone, so nothing else keeps them the same."""
    found = objects(overlay)
    prefill, decode = (
        json.dumps(one(found, kind, f"corun-{role}-main")["spec"]["template"], sort_keys=True)
        for kind, role in (("Deployment", "prefill"), ("StatefulSet", "decode"))
    )
    for own, other in (("prefill", "decode"), ("50061", "50071")):
        assert own in prefill
        prefill = prefill.replace(own, other)
    assert prefill == decode


def test_the_readme_names_what_is_there() -> None:
    readme = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:k8s/)?((?:overlays|components|base)/[\w./-]+)`", readme))
    assert {f"overlays/{name}" for name in OVERLAYS} <= named
    assert {name for name in named if not (ROOT / "k8s" / name).exists()} == set()
    assert {path.name for path in (ROOT / "k8s" / "overlays").iterdir()} == set(OVERLAYS)
