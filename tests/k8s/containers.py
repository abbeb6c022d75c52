"""Run the containers of a manifest as processes of this machine, each in a file system of its own.

They are set up as a container runtime does it. The root is read-only, and only the mounts of the manifest can be
written to. User, group and capabilities are those of the manifest, plus the right to read, because sources under test
may lie in somebody's home. The environment is that of image and manifest and nothing else. Pods share this machine's
network: each has an address of 127.0.0.0/8. Needs root and Linux.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from corun.processes import descendants, end_tree
from tests.k8s.manifests import ROOT, Object
from tests.k8s.pods import Pod
from tests.probing import probe

_HIDDEN = {"proc", "sys", "dev", "etc", "tmp", "home", "opt", "run", "lost+found"}
"""Entries of the root directory that are not bound into the container read-only as they are."""
_OURS = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
"""The checkout, the environment and its Python. They stay visible at their paths even inside a hidden directory,
because scripts of the environment name their interpreter by its path."""
_SCRIPT = """
root={root}
mount -t tmpfs tmpfs $root
cp -a /etc $root/etc
printf '%s\\n' {hosts} >> $root/etc/hosts
cd /
for entry in *; do
    case " {hidden} " in *" $entry "*) continue ;; esac
    if [ -L "$entry" ]; then cp -a "$entry" $root/
    elif [ -d "$entry" ]; then
        mkdir $root/$entry; mount --rbind /$entry $root/$entry; mount -o remount,bind,ro $root/$entry
    fi
done
for entry in proc sys dev; do mkdir $root/$entry; mount --rbind /$entry $root/$entry; done
mkdir -p $root/tmp $root/home $root/run $root/opt/corun
mount --bind {prefix} $root/opt/corun
mount -o remount,bind,ro $root/opt/corun
{volumes}
for entry in {shown}; do
    mkdir -p $root$entry; mount --bind $entry $root$entry; mount -o remount,bind,ro $root$entry
done
mount -o remount,ro $root
exec chroot $root {user} {confined} env -C / -i {environment} {command}
"""


@dataclass
class RunningPod:
    """A pod whose containers are started here one after the other. All of them have ended after the block."""

    pod: Pod
    directory: Path
    """The directory of its volumes and logs."""
    hosts: Mapping[str, str]
    """The answers of DNS: addresses by name."""
    ours: tuple[Path, ...] = _OURS
    """The paths of this machine that its processes have to read."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> RunningPod:
        uid = self.pod.spec["securityContext"]["runAsUser"]
        for volume in self.pod.spec["volumes"]:
            path = self.directory / "volumes" / volume["name"]
            path.mkdir(parents=True)
            for source in volume.get("projected", {}).get("sources", []):
                for name, content in self.pod.source(source):
                    file = path / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
                    file.chmod(volume["projected"]["defaultMode"])
                    os.chown(file, 0, uid)
            os.chown(path, 0, uid)
            path.chmod(0o2775)
        return self

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            tree = descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
            end_tree(tree, step_s=2.0)

    def start(self) -> None:
        """Run each init container to its end, and then start the container."""
        for container in self.pod.spec.get("initContainers", []):
            assert self._run(container).wait(60) == 0, self.log(container)
        self.process = self._run(self.pod.container)

    def log(self, container: Object | None = None) -> str:
        return (self.directory / f"{(container or self.pod.container)['name']}.log").read_text(errors="replace")

    def probe(self, name: str) -> bool:
        """Make one startupProbe, readinessProbe or livenessProbe as a kubelet does. Return whether it succeeded."""
        asked = self.pod.container[name]
        address = asked["httpGet"]
        return probe(address["port"], address["path"], asked["timeoutSeconds"], self.pod.ip) == 200

    def terminate(self, before_sigterm: Callable[[], None] = lambda: None) -> tuple[int, float]:
        """Stop the container as when its pod is deleted: preStop, then SIGTERM.

        Return the exit code, -9 if the grace period ended first, and how long it took, in seconds.
        """
        assert self.process is not None
        began = time.monotonic()
        if hook := self.pod.container.get("lifecycle", {}).get("preStop"):
            subprocess.run(hook["exec"]["command"], timeout=self.pod.grace_s, check=True)
        before_sigterm()
        self.process.terminate()
        try:
            code = self.process.wait(self.pod.grace_s - (time.monotonic() - began))
        except subprocess.TimeoutExpired:
            code = -9
        return code, time.monotonic() - began

    def written(self) -> set[str]:
        """Return the names of the volumes on disk that hold something besides what was mounted."""
        mounted = {v["name"] for v in self.pod.spec["volumes"] if "projected" in v}
        volumes = (self.directory / "volumes").iterdir()
        return {path.name for path in volumes if path.name not in mounted and any(path.iterdir())}

    def _run(self, container: Object) -> subprocess.Popen[bytes]:
        root = self.directory / f"{container['name']}-root"
        root.mkdir()
        environment = self.pod.environment(container) | {"PYTHONPATH": str(ROOT)}  # Stands for the installed package.
        script = _SCRIPT.format(
            root=shlex.quote(str(root)),
            hidden=" ".join(sorted(_HIDDEN)),
            hosts=shlex.join(f"{address} {name}" for name, address in self.hosts.items()),
            prefix=shlex.quote(sys.prefix),
            volumes="\n".join(self._mounts(container)),
            shown=shlex.join(str(path) for path in self.ours if path.parts[1] in _HIDDEN),
            user=self._user(container),
            confined=shlex.join([sys.executable, "-I", str(ROOT / "tests" / "k8s" / "seccomp.py")]),
            environment=shlex.join(f"{name}={value}" for name, value in environment.items()),
            command=shlex.join(self.pod.command(container)),
        )
        with (self.directory / f"{container['name']}.log").open("wb") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _mounts(self, container: Object) -> list[str]:
        lines = []
        volumes = {volume["name"]: volume for volume in self.pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            at = f"$root{mount['mountPath']}"
            empty = volumes[mount["name"]].get("emptyDir", {})
            lines.append(f"mkdir -p {at}")
            if empty.get("medium") == "Memory":
                lines.append(f"mount -t tmpfs -o mode=1777,size={empty['sizeLimit'].replace('i', '')} tmpfs {at}")
            else:
                lines.append(f"mount --bind {shlex.quote(str(self.directory / 'volumes' / mount['name']))} {at}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {at}")
        return lines

    def _user(self, container: Object) -> str:
        context = self.pod.spec["securityContext"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        read = "-all,+dac_read_search"
        return (
            f"setpriv --reuid={context['runAsUser']} --regid={context['runAsGroup']} --groups={context['fsGroup']}"
            f" --no-new-privs --inh-caps={read} --ambient-caps={read} --bounding-set={read}"
        )
