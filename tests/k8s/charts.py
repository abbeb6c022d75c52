"""The Helm chart, rendered by Helm's own library. This module must not know what the objects are for."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import helm_python
import yaml

from tests.k8s.manifests import ROOT, Object, parsed

CHART = ROOT / "k8s" / "helm" / "corun"
EXAMPLES = ROOT / "k8s" / "helm" / "examples"


@lru_cache(maxsize=1)
def chart() -> Path:
    """Return a copy of the chart in which links are files, as in a package: Helm logs every link that it follows."""
    copy = Path(mkdtemp(prefix="corun-chart-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(CHART, copy / "corun")
    return copy / "corun"


def rendered(values: Mapping[str, Any], pool: str = "corun") -> list[Object]:
    """Return the objects that `helm template` would print. Raises helm_python.HelmError where it would refuse."""
    with helm_python.Chart.load(str(chart())) as loaded:
        loaded.validate_schema(dict(values))
        texts = loaded.render(dict(values), name=pool, namespace="corun")
    return [found for text in texts.values() for found in parsed(text)]


def example(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def overlay_toml(path: str) -> str:
    """Return the cluster.toml of a pool of an overlay, as --set-file gives it."""
    return (ROOT / "k8s" / "overlays" / path / "cluster.toml").read_text(encoding="utf-8")
