"""The images, really built: routers, gateways and nodes on a CPU run in them as the demo's manifests say."""

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

from corun import Client, SamplingParams, TlsConfig
from corun.models import tiny
from corun.processes import descendants, end_tree
from tests.k8s import images
from tests.k8s.images import UID, Images
from tests.k8s.manifests import Pod, complete, of_kind, tree
from tests.probing import probe

ROUTER_IP, GATEWAY_IP = "127.0.0.2", "127.0.0.5"
NODE_IPS = {"prefill": "127.0.0.3", "decode": "127.0.0.4"}
MOST_BYTES = 300_000_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(images.why_not()), reason=images.why_not()),
]


@pytest.fixture(scope="module")
def made() -> Iterator[Images]:
    with images.images() as store:
        yield store


@pytest.fixture(scope="module")
def image(made: Images) -> str:
    return made.build("router")


@contextmanager
def running(
    made: Images, image: str, name: str, ip: str, files: Path, instead: dict[str, str]
) -> Iterator[tuple[Pod, subprocess.Popen[bytes]]]:
    """Run the container of a workload of the demo, with words of its command replaced, and stop it by SIGTERM."""
    found = complete("cpu-demo")
    (workload,) = (one for one in of_kind(found, "Deployment", "StatefulSet") if one["metadata"]["name"] == name)
    pod = Pod(workload, found, ip=ip, name=f"{name}-0")
    files.mkdir()
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
        started = descendants(process.pid)
        process.kill()
        process.wait()
        end_tree(started)


def log(files: Path) -> str:
    return (files / "log").read_text(encoding="utf-8", errors="replace")[-3000:]


def until(check: Callable[[], bool], process: subprocess.Popen[bytes], files: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
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


def check_confined(process: subprocess.Popen[bytes]) -> None:
    """Check that a process is no root, has no capabilities, and sees a root that it cannot write to."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    assert f"Uid:\t{UID}" in status
    assert "CapEff:\t0000000000000000" in status
    mounts = Path(f"/proc/{process.pid}/mounts").read_text(encoding="utf-8").splitlines()
    assert any(line.split()[1] == "/" and "ro" in line.split()[3].split(",") for line in mounts), mounts


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory that another user may enter."""
    for parent in [tmp_path, *tmp_path.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    return tmp_path


def test_the_image_is_small_and_has_nothing_of_this_machine(made: Images, image: str) -> None:
    assert made.size(image) < MOST_BYTES
    root = made.mounted(image)
    left = [path for path in images.SETTINGS[1:3] if (root / path[1:]).is_file() and (root / path[1:]).read_bytes()]
    assert left == []
    assert made.environment(image)["HOME"] == "/home/corun"
    pins = {name for name in made.environment(image) if name.startswith(("PIP_", "UV_"))}
    assert pins == set()


def test_a_router_and_a_gateway_run_in_it(made: Images, image: str, place: Path) -> None:
    """The gateway finds the router, and serves HTTPS."""
    with ExitStack() as stack:
        files = place / "router"
        _, router = stack.enter_context(running(made, image, "corun-router-main", ROUTER_IP, files, {}))
        until(lambda: probe(9100, "/startedz", 6, ROUTER_IP) == 200, router, files)
        check_confined(router)
        files, instead = place / "gateway", {"corun:50051": f"{ROUTER_IP}:50051"}
        _, gateway = stack.enter_context(running(made, image, "corun-gateway", GATEWAY_IP, files, instead))
        until(lambda: https("/version") == 200, gateway, files)
        until(lambda: https("/health") == 200, gateway, files)
        assert https("/v1/models") in {401, 503}


@pytest.mark.timeout(1500)
def test_nodes_serve_in_theirs(made: Images, image: str, place: Path) -> None:
    """Real engines of another image, on a root that they cannot write to. A crowd changes no bit."""
    node_image, instead = made.build("cpu"), {"corun-routers-main": ROUTER_IP}
    pods = {"corun-router-main": (image, ROUTER_IP)}
    pods |= {f"corun-{role}-main": (node_image, ip) for role, ip in NODE_IPS.items()}
    with ExitStack() as stack:
        ready = {
            name: stack.enter_context(running(made, own, name, ip, place / name, instead))[1]
            for name, (own, ip) in pods.items()
        }
        for name, process in ready.items():
            ip = pods[name][1]
            until(lambda ip=ip: probe(9100, "/readyz", 6, ip) == 200, process, place / name, 240.0)
            check_confined(process)
        secrets = tree() / "secrets"
        tls, token = TlsConfig(ca=str(secrets / "ca.pem"), name="corun"), (secrets / "client.token").read_text().strip()
        with Client(f"{ROUTER_IP}:50051", tls=tls, token=token, timeout_s=120.0) as client:
            parameters = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=True)
            alone, crowd = (
                client.generate_many(
                    ["Once upon a time"] * 6, parameters, seeds=range(6), concurrency=at_once, progress=False
                )
                for at_once in (1, 6)
            )
        digests = [one.receipt.output_digest for one in alone]
        assert len(set(digests)) == 6
        assert [one.receipt.output_digest for one in crowd] == digests
