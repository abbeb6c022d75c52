"""Strict validation of every object: Kubernetes' own schemas by version, and ours of the custom resources.

The operators' own schemas are in no package, so here are the fields that the manifests use, and no others: a misspelt
one is an error. What they embed of Kubernetes (pod templates, selectors) is validated by Kubernetes' schemas.
"""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils
from referencing import Registry, Resource

from tests.k8s.manifests import Object

VERSIONS = ("1.29", "1.33", "1.37")

# One validation reads ten megabytes of definitions.
utils.schema_contents = functools.lru_cache(maxsize=None)(utils.schema_contents)


def check(found: Object, version: str) -> None:
    """Raises jsonschema.ValidationError for an object that the version would not take as it is."""
    key = (found["apiVersion"], found["kind"])
    if key in CUSTOM:
        _custom(key, version).validate(found)
    else:
        kubernetes_validate.validate(found, version, strict=True)


def _strict(required: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _core(kind: str) -> dict[str, Any]:
    return {"$ref": f"_definitions.json#/$defs/{kind}"}


TEXT = {"type": "string", "minLength": 1}
DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
LABELS = {"type": "object", "additionalProperties": TEXT}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}

_ENDPOINT = _strict(("port",), port=TEXT, interval=DURATION, scrapeTimeout=DURATION, path=TEXT)
_ALERT = _strict(
    ("alert", "expr"),
    alert={"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
    expr=TEXT,
    labels=LABELS,
    annotations=LABELS,
    **{"for": DURATION},
)
_RAY_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
_HEAD = _strict(("template",), rayStartParams=_RAY_PARAMS, template=_core("io.k8s.api.core.v1.PodTemplateSpec"))
_WORKERS = _strict(
    ("groupName", "template"),
    groupName=TEXT,
    replicas={"type": "integer", "minimum": 0},
    minReplicas={"type": "integer", "minimum": 0},
    maxReplicas={"type": "integer", "minimum": 0},
    rayStartParams=_RAY_PARAMS,
    template=_core("io.k8s.api.core.v1.PodTemplateSpec"),
)

CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _strict(
        ("endpoints", "selector"),
        selector=_core("io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"),
        endpoints=_list(_ENDPOINT),
        podTargetLabels=_list(TEXT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _strict(
        ("groups",), groups=_list(_strict(("name", "rules"), name=TEXT, rules=_list(_ALERT)))
    ),
    ("ray.io/v1", "RayCluster"): _strict(
        ("headGroupSpec",),
        rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        headGroupSpec=_HEAD,
        workerGroupSpecs=_list(_WORKERS),
    ),
}


@functools.lru_cache
def _custom(key: tuple[str, str], version: str) -> Any:
    spec = CUSTOM[key]
    schema = _strict(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": key[0]},
        kind={"const": key[1]},
        metadata=_core("io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"),
        spec=spec,
    )
    number = next(known for known in utils.all_versions() if known.startswith(f"{version}."))
    definitions = utils.schema_contents(f"kubernetes-json-schema/v{number}-local-strict/_definitions.json", version)
    base = str(definitions["$id"]).removesuffix("_definitions.json")
    resource = Resource.from_contents(definitions)
    return jsonschema.Draft202012Validator({"$id": f"{base}custom.json", **schema}, registry=resource @ Registry())
