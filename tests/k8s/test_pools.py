"""Several pools in one namespace: none is touched when another one comes, changes or goes."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.k8s.manifests import POOL_LABEL, README, built, complete, objects, one, tree, workloads
from tests.k8s.wiring import faults


def texts(overlay: str, pool: str | None = None) -> Counter[str]:
    """Return the objects of an overlay as kustomize writes them; with a pool, only those of that pool."""
    found = (text.strip() for text in built(overlay).split("\n---\n"))
    return Counter(text for text in found if pool is None or f"    {POOL_LABEL}: {pool}\n  name: " in text)


def changed(name: str, *changes: tuple[str, str, str]) -> str:
    """Make a copy of pool-b, with (file, old, new) in its files."""
    overlay = tree() / "k8s" / "overlays" / name
    shutil.copytree(overlay.parent / "pool-b", overlay, dirs_exist_ok=True)
    for file, old, new in changes:
        text = (overlay / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (overlay / file).write_text(text.replace(old, new), encoding="utf-8")
    return name


@pytest.fixture(scope="module")
def without_main() -> str:
    """The manifests after the last step of a rollout in k8s/README.md."""
    lines = [("kustomization.yaml", "  - ../gpu/main\n", ""), ("kustomization.yaml", "value: main", "value: b")]
    return changed("pool-b-alone", *lines)


def test_a_pool_that_comes_or_goes_changes_no_other(without_main: str, tmp_path: Path) -> None:
    assert texts("pool-b") - texts("gpu") == texts("pool-b", "b") != Counter()
    assert texts("gpu") - texts("pool-b") == Counter()
    client = next(text for text in texts("pool-b") if "\n  name: corun\n" in text and "kind: Service\n" in text)
    assert texts("pool-b") - texts(without_main) == texts("pool-b", "main") + Counter([client])
    assert texts(without_main, "b") == texts("pool-b", "b")
    assert faults(complete(without_main), tmp_path) == []


def test_a_pool_that_changes_rolls_its_own_pods_only() -> None:
    overlay = changed("pool-b-changed", ("b/cluster.toml", "slots = 128", "slots = 64"))
    different = [yaml.safe_load(text) for text in texts(overlay) - texts("pool-b")]
    assert {item["metadata"]["labels"][POOL_LABEL] for item in different} == {"b"}
    assert sorted(item["kind"] for item in different) == ["ConfigMap", "Deployment", "Deployment", "StatefulSet"]


def test_what_the_readme_deletes_is_the_old_pool() -> None:
    """An apply does not delete what is no longer in the manifests."""
    ((kinds, label, pool),) = re.findall(r"kubectl -n corun delete (\S+) -l (corun.dev/pool)=(\w+)", README)
    assert (label, pool) == (POOL_LABEL, "main")
    short = {
        "all": {"Service", "Deployment", "StatefulSet", "HorizontalPodAutoscaler"},
        "pdb": {"PodDisruptionBudget"},
        "networkpolicy": {"NetworkPolicy"},
        "configmap": {"ConfigMap"},
    }
    deleted = {kind for name in kinds.split(",") for kind in short[name]}
    assert {yaml.safe_load(text)["kind"] for text in texts("pool-b", "main")} == deleted


def test_two_pools_differ_in_name_label_and_contract_only() -> None:
    def hashless(item: object) -> str:
        """Return the text of an object without the hash in the name of its ConfigMap."""
        return re.sub(r"(corun-config-\w+)-\w{10}", r"\1", json.dumps(item, sort_keys=True))

    found = objects("pool-b")
    for item in workloads(found):
        name = item["metadata"]["name"]
        if name.endswith("-main"):
            text = hashless(item).replace("-main", "-b").replace('"corun.dev/pool": "main"', '"corun.dev/pool": "b"')
            assert text == hashless(one(found, item["kind"], name.replace("-main", "-b")))
    assert one(found, "Service", "corun")["spec"]["selector"][POOL_LABEL] == "main"
