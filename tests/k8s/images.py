"""The Dockerfile's images, built without any registry of images, and processes in them on a root that is read-only.

The base is made of Debian's packages by mmdebstrap, and buildah builds on it. Packages come from where this machine
takes them: its settings of pip, uv and apt are mounted while the image is built, and are not part of it. All of it is
kept below one directory. This module must not know what the processes do.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from tests.k8s.manifests import ROOT

PACKAGES = "apt,ca-certificates,passwd,python3,python3-venv,usr-is-merged"
NEITHER_READ_NOR_KEPT = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")
SETTINGS = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/uv", "/etc/apt/sources.list.d", "/etc/apt/apt.conf.d")
"""What says where packages come from on this machine."""
BASE = "localhost/corun-base"
UID = 10001
CHROOT = """
set -eu
root=$1 files=$2 all=$3
shift 3
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root$all"
mount --bind "$all" "$root$all"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
if [ -d "$files/home/corun" ]; then mount --bind "$files/home/corun" "$root/home/corun"; fi
mount -o remount,ro,bind "$root"
PATH=$PATH:/usr/sbin # Where chroot is, also for users who have no such folder in theirs.
exec chroot --userspec=10001:10001 "$root" env -i "$@"
"""


@functools.cache
def why_not() -> str:
    """Return why no images can be built and run here; empty if they can."""
    if missing := [tool for tool in ("buildah", "mmdebstrap", "unshare") if shutil.which(tool) is None]:
        return f"there is no {', '.join(missing)} here: apt-get install buildah mmdebstrap"
    if os.geteuid() != 0:
        return "images are built by root here"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, timeout=30, check=False)
    return f"the kernel gives no mount namespace: {tried.stderr.strip()}" if tried.returncode else ""


class Images:
    """A store of images below a directory of its own. `images` makes it and removes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "tmp").mkdir()
        self.driver = "overlay"
        try:
            self._buildah("rm", self._buildah("from", "scratch"))
        except subprocess.CalledProcessError:  # The kernel has no overlays; copies of whole layers do as well.
            self.driver = "vfs"

    def make_base(self) -> None:
        """Make the image that stands for python:3.11-slim."""
        left_out = [f"--dpkgopt=path-exclude={path}" for path in NEITHER_READ_NOR_KEPT]
        hooks = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
        words = ["--variant=essential", hooks, f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io", *left_out]
        archive = self._directory / "base.tar"
        codename = next(
            line.partition("=")[2] for line in Path("/etc/os-release").read_text().splitlines() if "CODENAME=" in line
        )
        _run("mmdebstrap", *words, codename, str(archive), environment=self._environment)
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(archive), "/")
        self._buildah("run", container, "--", "ln", "-s", "/usr/bin/python3", "/usr/local/bin/python")
        self._buildah("commit", "--quiet", "--rm", container, BASE)
        archive.unlink()

    def build(self, target: str) -> str:
        """Build the image of a target of the Dockerfile, and return its name."""
        volumes = [f"--volume={path}:{path}:ro" for path in SETTINGS if Path(path).exists()]
        arguments = [f"--build-arg=TARGET={target}", f"--build-arg=BASE={BASE}"]
        name = f"localhost/corun-{target}"
        self._buildah("bud", "--layers=false", *arguments, *volumes, "--tag", name, str(ROOT))
        return name

    def size(self, name: str) -> int:
        """Return the bytes of an image."""
        return sum(
            path.lstat().st_size for path in self.mounted(name).rglob("*") if path.is_file() and not path.is_symlink()
        )

    @functools.cache  # noqa: B019 - A store lives as long as its test.
    def mounted(self, name: str) -> Path:
        """Return the root of a container of an image."""
        return Path(self._buildah("mount", self._buildah("from", "--pull-never", name)))

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables that the image sets."""
        wanted = "{{range .OCIv1.Config.Env}}{{println .}}{{end}}"
        lines = self._buildah("inspect", "--type=image", "--format", wanted, name)
        return dict(line.split("=", 1) for line in lines.splitlines() if line)

    def remove(self) -> None:
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self._directory / "tmp"), "BUILDAH_ISOLATION": "chroot"}

    def _buildah(self, *words: str) -> str:
        where = ["--root", str(self._directory / "storage"), "--runroot", str(self._directory / "run")]
        return _run("buildah", *where, "--storage-driver", self.driver, *words, environment=self._environment)


def start(root: Path, files: Path, words: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process as user 10001 on a root that it cannot write to.

    It has the directory of `files` and of those of other pods at its own path, its home in `files` if there is one, and
    a /tmp of its own. Its output is appended to `files`/log.
    """
    variables = [f"{name}={value}" for name, value in environment.items()]
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CHROOT, "sh", str(root)]
    with (files / "log").open("ab") as log:
        return subprocess.Popen(
            [*argv, str(files), str(files.parent), *variables, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


@contextmanager
def images() -> Iterator[Images]:
    directory = Path(mkdtemp(prefix="corun-images-", dir="/var/tmp"))
    store = Images(directory)
    try:
        store.make_base()
        yield store
    finally:
        store.remove()


def _run(*words: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run(words, env=dict(environment), capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout.strip()
