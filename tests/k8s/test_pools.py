"""Several pools in one namespace: none is touched when another one comes, changes or goes."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.k8s.manifests import ROOT, built, complete, objects, one, tree, workloads
from tests.k8s.wiring import faults

POOL_LABEL = "corun.dev/pool"


def texts(overlay: str) -> Counter[str]:
    """The objects of an overlay, as kustomize writes them."""
    return Counter(text.strip() for text in built(overlay).split("\n---\n"))


def of_pool(overlay: str, pool: str) -> Counter[str]:
    return Counter(text for text in texts(overlay).elements() if _pool(text) == pool)


def _pool(text: str) -> str | None:
    found: str | None = yaml.safe_load(text)["metadata"].get("labels", {}).get(POOL_LABEL)
    return found


def changed(name: str, *changes: tuple[str, str, str]) -> str:
    """A copy of pool-b, with (file, old, new) in its files."""
    overlay = tree() / "k8s" / "overlays" / name
    shutil.copytree(overlay.parent / "pool-b", overlay, dirs_exist_ok=True)
    for file, old, new in changes:
        text = (overlay / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (overlay / file).write_text(text.replace(old, new), encoding="utf-8")
    return name


@pytest.fixture(scope="module")
def without_main() -> str:
    """As after the last step of a rollout in k8s/README.md."""
    lines = [("kustomization.yaml", "  - ../gpu/main\n", ""), ("kustomization.yaml", "value: main", "value: b")]
    return changed("pool-b-alone", *lines)


def test_a_pool_that_is_added_changes_no_object_that_was_there() -> None:
    alone, both = texts("gpu"), texts("pool-b")
    assert alone - both == Counter()
    assert both - alone == of_pool("pool-b", "b")
    assert of_pool("gpu", "main") == of_pool("pool-b", "main")


def test_a_pool_that_is_removed_changes_no_other(without_main: str, tmp_path: Path) -> None:
    client = next(text for text in texts("pool-b") if "\n  name: corun\n" in text and "kind: Service\n" in text)
    gone = texts("pool-b") - texts(without_main)
    assert gone == of_pool("pool-b", "main") + Counter([client])
    assert of_pool(without_main, "b") == of_pool("pool-b", "b")
    assert faults(complete(without_main), tmp_path) == []


def test_a_pool_that_changes_rolls_its_own_pods_only() -> None:
    overlay = changed("pool-b-changed", ("b/cluster.toml", "slots = 128", "slots = 64"))
    different = [yaml.safe_load(text) for text in texts(overlay) - texts("pool-b")]
    assert {item["metadata"]["labels"][POOL_LABEL] for item in different} == {"b"}
    assert sorted(item["kind"] for item in different) == ["ConfigMap", "Deployment", "Deployment", "StatefulSet"]


def test_what_the_readme_deletes_is_the_old_pool(without_main: str) -> None:
    """An apply does not delete what is no longer in the manifests."""
    readme = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    ((kinds, label, pool),) = re.findall(r"kubectl -n corun delete (\S+) -l (\S+)=(\w+)", readme)
    assert (label, pool) == (POOL_LABEL, "main")
    short = {
        "all": {"Service", "Deployment", "StatefulSet", "HorizontalPodAutoscaler"},
        "pdb": {"PodDisruptionBudget"},
        "networkpolicy": {"NetworkPolicy"},
        "configmap": {"ConfigMap"},
    }
    deleted = {kind for name in kinds.split(",") for kind in short[name]}
    assert {yaml.safe_load(text)["kind"] for text in of_pool("pool-b", "main")} == deleted
    names = [{(item["kind"], item["metadata"]["name"]) for item in objects(name)} for name in ("pool-b", without_main)]
    documents = [yaml.safe_load(text) for text in of_pool("pool-b", "main")]
    assert names[0] - names[1] == {(item["kind"], item["metadata"]["name"]) for item in documents}


def test_two_pools_differ_in_name_label_and_contract_only() -> None:
    found = objects("pool-b")
    for item in workloads(found):
        name = item["metadata"]["name"]
        if name.endswith("-main"):
            other = one(found, item["kind"], name.replace("-main", "-b"))
            text = json.dumps(item, sort_keys=True).replace("-main", "-b")
            text = text.replace('"corun.dev/pool": "main"', '"corun.dev/pool": "b"')
            assert hashless(text) == hashless(json.dumps(other, sort_keys=True))
    assert one(found, "Service", "corun")["spec"]["selector"][POOL_LABEL] == "main"


def hashless(text: str) -> str:
    """Without the hash in the name of a ConfigMap."""
    return re.sub(r"(corun-config-\w+)-\w{10}", r"\1", text)
