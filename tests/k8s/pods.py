"""A pod as a kubelet would start it: its containers' command lines, environment, files and mounts.

Everything that the manifest names has to exist: variables in args, keys of ConfigMaps and Secrets, volumes of mounts.
Must not know what the processes do with it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.manifests import ROOT, Object, of_kind, pod_labels

_REFERENCE = re.compile(r"\$\((\w+)\)")


class BrokenPodError(Exception):
    """A kubelet would not start this pod."""


def image_environment() -> dict[str, str]:
    """Return the ENV variables of the image's last stage."""
    stage = (ROOT / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    text = re.sub(r"\\\n", " ", stage)
    lines = re.findall(r"^ENV (.*)$", text, flags=re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in line.split())


@dataclass(frozen=True)
class Pod:
    """One pod of a workload, with an address and a name."""

    workload: Object
    objects: list[Object] = field(repr=False)
    ip: str
    name: str

    @property
    def spec(self) -> Object:
        spec: Object = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        container: Object = self.spec["containers"][0]
        return container

    @property
    def labels(self) -> dict[str, str]:
        return pod_labels(self.workload)

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def grace_s(self) -> int:
        grace: int = self.spec["terminationGracePeriodSeconds"]
        return grace

    def environment(self, container: Object | None = None) -> dict[str, str]:
        """Return the environment of a container: that of the image, then that of the manifest."""
        given = {one["name"]: self._value(one) for one in (container or self.container).get("env", [])}
        return image_environment() | given

    def command(self, container: Object | None = None) -> list[str]:
        """Return command and args of a container, with $(NAME) replaced."""
        container = container or self.container
        environment = self.environment(container)

        def value(match: re.Match[str]) -> str:
            if match[1] not in environment:
                raise BrokenPodError(f"{match[0]} names no variable of the container")
            return environment[match[1]]

        return [_REFERENCE.sub(value, word) for word in [*container["command"], *container.get("args", [])]]

    def mounts(self, container: Object | None = None) -> dict[str, Object]:
        """Return the volumes by the path at which they are mounted."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        found = {}
        for mount in (container or self.container).get("volumeMounts", []):
            if mount["name"] not in volumes:
                raise BrokenPodError(f"there is no volume {mount['name']}")
            found[mount["mountPath"]] = volumes[mount["name"]]
        return found

    def files(self) -> dict[str, bytes]:
        """Return the contents of the mounted ConfigMaps and Secrets, by path."""
        found = {}
        for path, volume in self.mounts().items():
            for source in volume.get("projected", {}).get("sources", []):
                for name, content in self.source(source):
                    found[f"{path}/{name}"] = content
        return found

    def materialise(self, root: Path) -> None:
        """Write the files of `files` under `root`, and make the directories of the other mounts."""
        for path in self.mounts():
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for path, content in self.files().items():
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def _value(self, variable: Object) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.*)'\]", path):
            if label[1] not in self.labels:
                raise BrokenPodError(f"the pod has no label {label[1]}")
            return self.labels[label[1]]
        known = {"metadata.name": self.name, "status.podIP": self.ip}
        if path not in known:
            raise BrokenPodError(f"{path} is not known here")
        return known[path]

    def source(self, source: Object) -> Iterator[tuple[str, bytes]]:
        """Yield the files of a projected volume's source. Raises BrokenPodError if one is not there."""
        kind, wanted = next(iter(source.items()))
        kinds = {"configMap": "ConfigMap", "secret": "Secret"}
        found = [one for one in of_kind(self.objects, kinds[kind]) if one["metadata"]["name"] == wanted["name"]]
        if not found:
            raise BrokenPodError(f"there is no {kinds[kind]} {wanted['name']}")
        data = _content(found[0])
        for item in wanted["items"]:
            if item["key"] not in data:
                raise BrokenPodError(f"{kinds[kind]} {wanted['name']} has no {item['key']}")
            yield item["path"], data[item["key"]]


def _content(found: dict[str, Any]) -> dict[str, bytes]:
    if found["kind"] == "Secret":
        return {key: base64.b64decode(value) for key, value in found["data"].items()}
    return {key: value.encode() for key, value in found["data"].items()}
