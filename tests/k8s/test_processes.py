"""The processes as the manifests start them: same command, environment, files, user, and a root that is read-only."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pytest

from corun import Chunk, Client, SamplingParams, TlsConfig, UnauthenticatedError
from tests.k8s.containers import RunningPod
from tests.k8s.manifests import ROOT, Object, complete, secrets_directory, workloads
from tests.k8s.pods import Pod

IPS = {"router": "127.0.0.2", "prefill": "127.0.0.3", "decode": "127.0.0.4"}
HOSTS = {"corun-routers-main": IPS["router"]}
PORTS: dict[str, tuple[int, ...]] = {"router": (), "prefill": (50061, 50081), "decode": (50071, 50081)}
"""At which the pods listen on their own addresses, of those ports that Linux gives to connections, too."""
LISTEN = [("0.0.0.0", 50051), *((IPS[role], port) for role, ports in PORTS.items() for port in ports)]
START_S = 240.0


def why_not() -> str:
    """Why nobody can mount here what a container runtime would; empty if this process can."""
    if ROOT.is_relative_to("/opt/corun"):
        return "this checkout lies in /opt/corun, where the image has its environment"
    script = "mount -t tmpfs tmpfs /tmp; chroot / setpriv --no-new-privs true"
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return "there is no unshare command"
    except subprocess.TimeoutExpired as error:
        return f"containers cannot be made here: {error}"
    return f"containers cannot be made here: {done.stderr.strip()}" if done.returncode else ""


NO_CONTAINERS = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_CONTAINERS), reason=NO_CONTAINERS)]


@pytest.fixture(scope="module", autouse=True)
def ports() -> Iterator[None]:
    """Keeps the ports for the pods: no connection gets one that is bound, and a server does if nobody listens there."""
    with ExitStack() as stack:
        for address in LISTEN:
            kept = stack.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(address)
        yield


def running(role: str, directory: Path, objects: list[Object] | None = None) -> RunningPod:
    objects = objects or complete("cpu-demo")
    workload = next(one for one in workloads(objects) if f"corun-{role}-" in one["metadata"]["name"])
    pod = Pod(workload, objects, ip=IPS[role], name=f"{workload['metadata']['name']}-0")
    return RunningPod(pod, directory / role, HOSTS)


def until(check: Callable[[], bool], pod: RunningPod, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert pod.process is not None
        assert pod.process.poll() is None, pod.log()[-3000:]
        assert time.monotonic() < deadline, pod.log()[-3000:]
        time.sleep(0.1)


def client(token: str = "client.token", timeout_s: float = 120.0) -> Client:
    """As the README tells users, but for the name: here the router is not behind a port-forward."""
    secrets = secrets_directory()
    tls = TlsConfig(ca=str(secrets / "ca.pem"), name="corun")
    return Client(f"{IPS['router']}:50051", tls=tls, token=(secrets / token).read_text().strip(), timeout_s=timeout_s)


def metrics(role: str) -> str:
    with urllib.request.urlopen(f"http://{IPS[role]}:9100/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("hidden", ["/tmp", "/home", "/opt", "/run"])
def test_a_checkout_may_lie_where_pods_have_their_own_files(hidden: str, tmp_path: Path) -> None:
    with TemporaryDirectory(dir=hidden) as place, running("router", tmp_path) as router:
        checkout = Path(place) / "clone"
        checkout.mkdir()
        (checkout / "README.md").write_text("found")
        router.pod.spec["initContainers"] = []
        router.pod.container.update(command=["cat", str(checkout / "README.md")], args=[])
        router.ours = (*router.ours, checkout)
        router.start()
        assert router.process is not None
        assert (router.process.wait(60), router.log()) == (0, "found")


def test_a_router(tmp_path: Path) -> None:
    with running("router", tmp_path) as router:
        router.start()
        until(lambda: router.probe("startupProbe"), router)
        assert router.probe("livenessProbe")
        assert not router.probe("readinessProbe"), "without nodes it would be sent clients"
        with client() as known:
            assert known.get_cluster().nodes == ()
        with client("cluster.token") as member:
            assert member.get_cluster().nodes == ()
        wrong = TlsConfig(ca=str(secrets_directory() / "ca.pem"), name="corun")
        with Client(f"{IPS['router']}:50051", tls=wrong) as stranger, pytest.raises(UnauthenticatedError):
            stranger.get_cluster()
        assert "corun_router_certified_pair 0.0" in metrics("router")
        code, took_s = router.terminate()
        assert code == 0, router.log()
        assert took_s < router.pod.grace_s
        assert router.written() <= {"model", "tmp"}


def test_a_broken_secret_ends_the_router_with_words(tmp_path: Path) -> None:
    objects = complete("cpu-demo")
    for one in objects:
        if one["kind"] == "Secret" and one["metadata"]["name"].startswith("corun-client-tokens"):
            one["data"]["clients.tokens"] = ""
    with running("router", tmp_path, objects) as router:
        router.start()
        assert router.process is not None
        assert router.process.wait(30) == 2
        assert "client_tokens_file = '/etc/corun/clients/clients.tokens': must hold at least one token" in router.log()


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_cluster_serves_and_drains(tmp_path: Path) -> None:
    """Real engines. A router whose pod is deleted serves until SIGTERM; a stream that runs then gets all its tokens."""
    with ExitStack() as stack:
        pods = {role: stack.enter_context(running(role, tmp_path)) for role in ("decode", "prefill", "router")}
        for pod in pods.values():
            pod.start()
        until(lambda: pods["prefill"].probe("livenessProbe"), pods["prefill"])
        assert not pods["prefill"].probe("startupProbe"), "it is still loading"
        for role in ("prefill", "decode", "router"):
            until(lambda role=role: pods[role].probe("readinessProbe"), pods[role], START_S)
            assert pods[role].probe("startupProbe")
            assert pods[role].probe("livenessProbe")
        parameters = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=True)
        with client() as known:
            alone = known.generate("Once upon a time", parameters, seed=42)
            assert {f"corun-{role}-main-0" for role in ("prefill", "decode")} == {
                alone.receipt.prefill_node.node_id,
                alone.receipt.decode_node.node_id,
            }
        seen = {role: metrics(role) for role in pods}
        (tmp_path / "metrics").mkdir()
        for role, text in seen.items():
            (tmp_path / "metrics" / role).write_text(text)
        assert "corun_router_certified_pair 1.0" in seen["router"]
        again: list[Chunk] = []
        with client() as known:

            def draw() -> None:
                for chunk in known.stream("Once upon a time", parameters, seed=42):
                    again.append(chunk)  # One by one: it is looked at meanwhile.  # noqa: PERF402

            stream = Thread(target=draw)

            def run_a_stream() -> None:
                stream.start()
                until(lambda: bool(again) and "corun_decode_running_samples 1.0" in metrics("decode"), pods["decode"])

            code, took_s = pods["router"].terminate(before_sigterm=run_a_stream)
            stream.join(30)
        assert code == 0, pods["router"].log()[-3000:]
        assert took_s < pods["router"].pod.grace_s
        assert tuple(token for chunk in again for token in chunk.token_ids) == alone.token_ids
        assert [chunk.receipt.output_digest for chunk in again if chunk.receipt] == [alone.receipt.output_digest]
        for role in ("prefill", "decode"):
            code, took_s = pods[role].terminate()
            assert (code, took_s < pods[role].pod.grace_s) == (0, True), pods[role].log()[-3000:]
            assert pods[role].written() <= {"model", "tmp", "home"}
