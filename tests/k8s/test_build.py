"""Every overlay builds, and every object is valid for several versions of Kubernetes, unknown fields included.

The schemas are Kubernetes' own. The operators' are in no package, so here are the fields of custom resources that the
manifests use, and no others; what they embed of Kubernetes (pod templates, selectors) is validated by its schemas.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.k8s.manifests import OVERLAYS, README, ROOT, Object, adhoc, complete, objects, of_kind, one, workloads

VERSIONS = ("1.29", "1.33", "1.37")

# One validation reads ten megabytes of definitions.
utils.schema_contents = functools.lru_cache(maxsize=None)(utils.schema_contents)


def strict(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def items(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


def core(kind: str) -> dict[str, Any]:
    return {"$ref": f"_definitions.json#/$defs/{kind}"}


TEXT = {"type": "string", "minLength": 1}
DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
COUNT = {"type": "integer", "minimum": 0}
ALERT = strict(
    ("alert", "expr"),
    alert={"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
    expr=TEXT,
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": DURATION},
)
LOCAL = strict(("group", "kind", "name"), group={"type": "string"}, kind=TEXT, name=TEXT)
RAY = {"rayStartParams": TEXTS, "template": core("io.k8s.api.core.v1.PodTemplateSpec")}
WORKERS = strict(("groupName", "template"), groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, **RAY)
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): strict(
        ("endpoints", "selector"),
        selector=core("io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"),
        endpoints=items(strict(("port",), port=TEXT, interval=DURATION, scrapeTimeout=DURATION, path=TEXT)),
        podTargetLabels=items(TEXT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): strict(
        ("groups",), groups=items(strict(("name", "rules"), name=TEXT, rules=items(ALERT)))
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): strict(
        ("parentRefs", "rules"),
        parentRefs=items(strict(("name",), name=TEXT, namespace=TEXT)),
        hostnames=items(TEXT),
        rules=items(
            strict(
                ("backendRefs",),
                timeouts=strict(request=DURATION),
                backendRefs=items(strict(("name", "port"), name=TEXT, port=COUNT)),
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): strict(
        ("targetRefs", "validation"),
        targetRefs=items(LOCAL),
        validation=strict(("hostname",), hostname=TEXT, caCertificateRefs=items(LOCAL)),
    ),
    ("ray.io/v1", "RayCluster"): strict(
        ("headGroupSpec",),
        rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        headGroupSpec=strict(("template",), **RAY),
        workerGroupSpecs=items(WORKERS),
    ),
}


def check(found: Object, version: str) -> None:
    """Raise jsonschema.ValidationError for an object that the version would not take as it is."""
    key = (found["apiVersion"], found["kind"])
    if key not in CUSTOM:
        kubernetes_validate.validate(found, version, strict=True)
        return
    metadata = core("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta")
    whole = strict(
        ("metadata", "spec"), apiVersion={"const": key[0]}, kind={"const": key[1]}, metadata=metadata, spec=CUSTOM[key]
    )
    number = next(known for known in utils.all_versions() if known.startswith(f"{version}."))
    definitions = utils.schema_contents(f"kubernetes-json-schema/v{number}-local-strict/_definitions.json", version)
    base = str(definitions["$id"]).removesuffix("_definitions.json")
    registry: Any = Resource.from_contents(definitions) @ Registry()
    jsonschema.Draft202012Validator({"$id": f"{base}custom.json", **whole}, registry=registry).validate(found)


def optional() -> list[Object]:
    """Return the objects of overlays with the components that no overlay has."""
    lines = ("namespace: corun", "resources: [../../base/cluster, ../../base/gateway, ../gpu/main]")
    found = []
    for names in (("ingress", "httproute", "tracing", "models-image"), ("models-fetch",)):
        components = ", ".join(f"../../components/{name}" for name in names)
        found += adhoc(f"with-{names[-1]}", *lines, f"components: [{components}]")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str) -> None:
    known = [item for overlay in OVERLAYS for item in complete(overlay)]
    # The field of an image as a volume came with 1.31, and is on by default since 1.33.
    known += [item for item in optional() if version != "1.29" or '"reference"' not in json.dumps(item)]
    distinct = {json.dumps(item, sort_keys=True): item for item in known}
    problems = []
    for item in distinct.values():
        try:
            check(item, version)
        except jsonschema.ValidationError as error:
            problems.append((item["kind"], item["metadata"]["name"], list(error.absolute_path), error.message[:300]))
    assert problems == []


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("Deployment", ("spec", "template", "spec"), "terminationGracePeriod"),
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "startupProbe", "httpGet"), "name"),
        ("NetworkPolicy", ("spec",), "policyType"),
        ("ServiceMonitor", ("spec",), "podLabels"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0), "severity"),
    ],
)
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_an_unknown_field_is_an_error(kind: str, path: tuple[str | int, ...], field: str, version: str) -> None:
    item = of_kind(objects("gpu"), kind)[0]
    place: Any = item
    for step in path:
        place = place[step]
    place[field] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(item, version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_namespaces_labels_and_secrets(overlay: str) -> None:
    found = objects(overlay)
    names = [(item["kind"], item["metadata"]["name"]) for item in found]
    assert len(set(names)) == len(names)
    (namespace,) = of_kind(found, "Namespace")
    others = {item["metadata"].get("namespace") for item in found if item is not namespace}
    assert others == {namespace["metadata"]["name"]}
    for item in found:
        if item["kind"] not in {"NetworkPolicy", "Secret", "ConfigMap"}:
            assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "corun", item["metadata"]
    assert overlay == "cpu-demo" or of_kind(found, "Secret") == []


def test_no_secret_is_in_the_repository() -> None:
    for path in (ROOT / "k8s").rglob("*"):
        if path.is_file() and "secrets" not in path.parts:
            assert not re.search(r"BEGIN [A-Z ]*PRIVATE KEY|[0-9a-f]{64}", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    ("overlay", "pool"), [("gpu", "main"), ("colocated", "main"), ("rdma", "main"), ("pool-b", "main"), ("pool-b", "b")]
)
def test_scaling(overlay: str, pool: str) -> None:
    found = objects(overlay)
    scaled, kept = (("router",), "colocated") if overlay == "colocated" else (("router", "prefill"), "decode")
    scaler = {role: one(found, "HorizontalPodAutoscaler", f"corun-{role}-{pool}") for role in scaled}
    assert scaler["router"]["spec"]["minReplicas"] == 2
    pods = [item for item in workloads(found) if item["metadata"]["name"].endswith(f"-{pool}")]
    for item in pods:
        assert "replicas" not in item["spec"], "every apply would take back what an autoscaler or `kubectl scale` did"
        budget = one(found, "PodDisruptionBudget", item["metadata"]["name"])["spec"]
        assert budget["selector"] == item["spec"]["selector"]
        assert ("router" in item["metadata"]["name"]) == (budget.get("minAvailable") == 1)
    targets = [{key: item["spec"]["scaleTargetRef"][key] for key in ("kind", "name")} for item in scaler.values()]
    assert all({"kind": i["kind"], "name": i["metadata"]["name"]} in targets for i in pods if i["kind"] == "Deployment")
    assert one(found, "StatefulSet", f"corun-{kept}-{pool}")["spec"]["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu", "rdma", "rdma-root"])
def test_prefill_and_decode_pods_differ_in_what_they_run_only(overlay: str) -> None:
    """Their manifests are written out, each to be read alone, so nothing else keeps them the same."""
    found = objects(overlay)
    prefill, decode = (
        json.dumps(one(found, kind, f"corun-{role}-main")["spec"]["template"], sort_keys=True)
        for kind, role in (("Deployment", "prefill"), ("StatefulSet", "decode"))
    )
    assert prefill.replace("prefill", "decode").replace("50061", "50071") == decode != prefill


def test_colocated_pods_differ_from_decode_pods_in_what_they_run_only() -> None:
    colocated, decode = (
        re.sub(
            r"corun-config-main-\w+",
            "",
            json.dumps(one(objects(overlay), "StatefulSet", f"corun-{role}-main"), sort_keys=True),
        )
        for overlay, role in (("colocated", "colocated"), ("gpu", "decode"))
    )
    assert decode.replace("decode", "colocated").replace("50071", "50091") == colocated != decode


def test_the_readme_names_what_is_there() -> None:
    named = set(re.findall(r"`(?:k8s/)?((?:overlays|components|base)/[\w./-]+)`", README))
    assert {f"overlays/{name}" for name in OVERLAYS} <= named
    assert {name for name in named if not (ROOT / "k8s" / name).exists()} == set()
    assert {path.name for path in (ROOT / "k8s" / "overlays").iterdir()} == set(OVERLAYS)
    assert {f"components/{path.name}" for path in (ROOT / "k8s" / "components").iterdir()} <= named
