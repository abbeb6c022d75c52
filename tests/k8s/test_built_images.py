"""The image of routers and gateways, really built, and both run in it as the demo's manifests say."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from corun.models import tiny
from tests.k8s import images
from tests.k8s.images import UID, Images
from tests.k8s.manifests import Pod, complete, one, tree
from tests.probing import probe

ROUTER_IP, GATEWAY_IP = "127.0.0.2", "127.0.0.5"
MOST_BYTES = 300_000_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(images.why_not()), reason=images.why_not()),
]


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[Images, str]]:
    with images.images() as made:
        yield made, made.build("router")


@contextmanager
def running(
    store: tuple[Images, str], name: str, ip: str, files: Path, instead: dict[str, str]
) -> Iterator[tuple[Pod, subprocess.Popen[bytes]]]:
    """Run the container of a Deployment of the demo, with words of its command replaced, and stop it by SIGTERM."""
    made, image = store
    found = complete("cpu-demo")
    pod = Pod(one(found, "Deployment", name), found, ip=ip, name=f"{name}-0")
    pod.materialise(files)
    shutil.copytree(tiny.ensure(), files / "models" / "tiny")
    subprocess.run(["chown", "-R", f"{UID}:{UID}", str(files)], check=True, timeout=30)
    words = [pod.below(files, word) for word in pod.command()]
    for old, new in instead.items():
        words = [word.replace(old, new) for word in words]
    environment = {**made.environment(image), **pod.environment()}
    process = images.start(made.mounted(image), files, words, environment)
    try:
        yield pod, process
        process.terminate()
        assert process.wait(60) == 0, log(files)
    finally:
        process.kill()
        process.wait()


def log(files: Path) -> str:
    return (files / "log").read_text(encoding="utf-8", errors="replace")[-3000:]


def until(check: Callable[[], bool], process: subprocess.Popen[bytes], files: Path) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert process.poll() is None, log(files)
        assert time.monotonic() < deadline, log(files)
        time.sleep(0.1)


def https(path: str) -> int:
    context = ssl.create_default_context(cafile=str(tree() / "secrets" / "ca.pem"))
    context.check_hostname = False  # As a kubelet does, it is asked by its address.
    try:
        with urllib.request.urlopen(f"https://{GATEWAY_IP}:8000{path}", timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_the_image_is_small_and_has_nothing_of_this_machine(store: tuple[Images, str]) -> None:
    made, image = store
    assert made.size(image) < MOST_BYTES
    root = made.mounted(image)
    left = [path for path in images.SETTINGS[1:3] if (root / path[1:]).is_file() and (root / path[1:]).read_bytes()]
    assert left == []
    assert made.environment(image)["HOME"] == "/home/corun"
    pins = {name for name in made.environment(image) if name.startswith(("PIP_", "UV_"))}
    assert pins == set()


def test_a_router_and_a_gateway_run_in_it(store: tuple[Images, str], tmp_path: Path) -> None:
    """Their root is read-only, and they are no root. The gateway finds the router, and serves HTTPS."""
    router_files, gateway_files = tmp_path / "router", tmp_path / "gateway"
    router_files.mkdir()
    gateway_files.mkdir()
    for parent in [tmp_path, *tmp_path.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    with ExitStack() as stack:
        _, router = stack.enter_context(running(store, "corun-router-main", ROUTER_IP, router_files, {}))
        until(lambda: probe(9100, "/startedz", 6, ROUTER_IP) == 200, router, router_files)
        status = Path(f"/proc/{router.pid}/status").read_text(encoding="utf-8")
        assert f"Uid:\t{UID}" in status
        assert "CapEff:\t0000000000000000" in status
        there = f"/proc/{router.pid}/root"
        mounts = Path(f"/proc/{router.pid}/mounts").read_text(encoding="utf-8").splitlines()
        assert any(line.split()[1] == "/" and "ro" in line.split()[3].split(",") for line in mounts), (there, mounts)
        instead = {"corun:50051": f"{ROUTER_IP}:50051"}
        _, gateway = stack.enter_context(running(store, "corun-gateway", GATEWAY_IP, gateway_files, instead))
        until(lambda: https("/version") == 200, gateway, gateway_files)
        until(lambda: https("/health") == 200, gateway, gateway_files)
        assert https("/v1/models") in {401, 503}
