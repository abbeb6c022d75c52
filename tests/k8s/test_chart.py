"""The chart gives the objects of the overlays, so what is tested of those holds for it. Its values are explained."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from tests.k8s.charts import CHART, chart, example, overlay_toml, rendered
from tests.k8s.manifests import Object, adhoc, objects, one
from tests.k8s.test_build import VERSIONS, check

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, dict[str, Any]] = {
    "ingress": {"gateway": {"ingress": {"enabled": True}}},
    "httproute": {"gateway": {"httpRoute": {"enabled": True}}},
    "tracing": {"tracing": {"enabled": True}},
}
"""Values that turn on what a component of the same name adds."""

Named = dict[tuple[str, str], Object]


def plain(found: list[Object]) -> Named:
    """Return objects by kind and name, without what Helm and kustomize say each in its own way.

    That is the namespace, hashes at the ends of names, and Namespace and Secrets, which administrators make.
    """
    text = json.dumps([item for item in found if item["kind"] not in {"Namespace", "Secret"}])
    text = re.sub(r"(corun-config-\w+)-\w{10}\b", r"\1", text)
    text = re.sub(r'(corun-(?:tls|cluster-token|client-tokens|seed-key))-\w{10}"', r'\1"', text)
    named = {}
    for item in json.loads(text):
        item["metadata"].pop("namespace", None)
        named[item["kind"], item["metadata"]["name"]] = item
    return named


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Return where two values differ, in a few words each."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = sorted({*left, *right}, key=str)
        return [line for key in keys for line in differences(left.get(key), right.get(key), f"{path}/{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [
            line for i, pair in enumerate(zip(left, right, strict=True)) for line in differences(*pair, f"{path}/{i}")
        ]
    return [] if left == right else [f"{path}: {str(left)[:200]} != {str(right)[:200]}"]


@pytest.mark.parametrize(
    ("overlay", "pool"),
    [("gpu", "gpu"), ("cpu-demo", "cpu-demo"), ("colocated", "colocated"), ("rdma", "gpu"), ("rdma-root", "gpu")],
)
def test_the_chart_gives_what_the_overlay_gives(overlay: str, pool: str) -> None:
    values = {} if overlay == "gpu" else example(overlay)
    found = rendered({**values, "clusterToml": overlay_toml(f"{pool}/main")})
    assert differences(plain(found), plain(objects(overlay))) == []


def test_a_second_release_is_a_second_pool() -> None:
    first = plain(rendered({"clusterToml": overlay_toml("gpu/main")}))
    second = plain(rendered({**example("pool-b"), "clusterToml": overlay_toml("pool-b/b")}))
    assert first.keys().isdisjoint(second)
    assert differences({**first, **second}, plain(objects("pool-b"))) == []


@pytest.mark.parametrize("component", OPTIONS)
def test_an_option_gives_what_the_component_gives(component: str) -> None:
    lines = ("namespace: corun", "resources: [../gpu]", f"components: [../../components/{component}]")
    found = rendered({**OPTIONS[component], "clusterToml": overlay_toml("gpu/main")})
    assert differences(plain(found), plain(adhoc(f"gpu-{component}", *lines))) == []


@pytest.mark.parametrize(("source", "component"), [("image", "models-image"), ("fetch", "models-fetch")])
def test_models_come_from_where_the_component_takes_them(source: str, component: str) -> None:
    lines = ["namespace: corun", "resources: [../../base/cluster, ../../base/gateway, ../gpu/main]"]
    names = (component, "compile-cache", "monitoring", "site")
    lines.append(f"components: [{', '.join(f'../../components/{name}' for name in names)}]")
    found = rendered({"model": {"source": source}, "clusterToml": overlay_toml("gpu/main")})
    assert differences(plain(found), plain(adhoc(f"gpu-{component}", *lines))) == []


def test_a_job_fetches_weights_as_in_its_overlay() -> None:
    without = plain(rendered({}))
    found = plain(rendered({"model": {"fetch": {"job": True}}}))
    job = {key: item for key, item in found.items() if key not in without}
    wanted = plain(objects("fetch-weights"))
    assert sorted(job) == [("Job", "corun-fetch-weights"), ("NetworkPolicy", "fetch-weights")]
    assert differences(job, {key: wanted[key] for key in job}) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_what_no_overlay_has_is_valid(version: str) -> None:
    values = {
        "user": None,
        "storageClass": None,
        "images": {"pullSecrets": [{"name": "registry"}]},
        "nodes": {"runtimeClassName": "nvidia", "gpus": 4},
        "decode": {"replicas": 3},
        "model": {"fetch": {"job": True}, "volume": {"create": False}},
        "gateway": {"args": ["--max-prompts=64"], "ingress": {"enabled": True, "annotations": None}},
    }
    found = rendered(values)
    for item in found:
        check({**item, "metadata": {**item["metadata"], "namespace": "corun"}}, version)
    text = json.dumps(found)
    assert "storageClassName" not in text
    assert "10001" not in text
    pods = [item["spec"]["template"]["spec"] for item in found if item["kind"] in {"Deployment", "StatefulSet", "Job"}]
    assert [pod["imagePullSecrets"] for pod in pods] == [[{"name": "registry"}]] * 5
    decode = one(found, "StatefulSet", "corun-decode-main")
    assert decode["spec"]["replicas"] == 3
    assert decode["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pool": "b"}, r"must have the table \[pools.b\]"),
        ({"model": {"source": "disk"}}, "source"),
        ({"router": {"replica": 2}}, "replica"),
        ({"model": {"source": "image", "fetch": {"job": True}}}, "must be volume"),
        ({"nodes": {"gpus": "one"}}, "gpus"),
    ],
)
def test_wrong_values_are_refused_with_words(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=words):
        rendered(values)


def test_lint_finds_nothing() -> None:
    found = helm_python.lint(str(chart()))
    assert [message for message in found["messages"] if "icon is recommended" not in str(message)] == []


def test_every_value_is_explained_and_in_the_schema() -> None:
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").split("\n")
    unexplained, block = [], 0
    for before, line in itertools.pairwise(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip().startswith("clusterToml"):
            block = 1
        elif block and indent == 0 and line.strip():
            block = 0
        is_leaf = re.match(r" *(?!requests|limits)[a-zA-Z]+: ?\S", line) and not block
        if is_leaf and not before.strip().startswith("#"):
            unexplained.append(line)
    assert unexplained == []
    assert shape(VALUES) == shape_of_schema(SCHEMA)
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


FREE = {"resources", "nodeSelector", "tolerations", "annotations", "parentRefs", "pullSecrets", "args"}
"""Values that are Kubernetes' own objects."""


def shape(values: dict[str, Any]) -> dict[str, Any]:
    return {k: shape(v) if isinstance(v, dict) and k not in FREE else None for k, v in values.items()}


def shape_of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    assert schema["additionalProperties"] is False
    return {k: shape_of_schema(v) if "properties" in v else None for k, v in schema["properties"].items()}
