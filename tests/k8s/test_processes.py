"""The demo's processes run as its manifests say: with those commands, variables, files, addresses and probes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from corun import Chunk, Client, SamplingParams, TlsConfig, UnauthenticatedError
from corun.processes import descendants, end_tree
from tests.k8s.manifests import ROOT, Object, Pod, complete, of_kind, tree, workloads
from tests.probing import probe

IPS = {"router": "127.0.0.2", "prefill": "127.0.0.3", "decode": "127.0.0.4"}
LISTEN = [("0.0.0.0", 50051), (IPS["prefill"], 50061), (IPS["decode"], 50071)]
LISTEN += [(IPS[role], 50081) for role in ("prefill", "decode")]
"""Where the pods listen, of those ports that Linux gives to connections, too."""

pytestmark = pytest.mark.slow  # Its ports are those of a `corun up` that may run here.


@pytest.fixture(autouse=True)
def ports() -> Iterator[None]:
    """Keep the ports for the pods: no connection gets one that is bound, and a server does if nobody listens there."""
    with ExitStack() as stack:
        for address in LISTEN:
            kept = stack.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(address)
        yield


@dataclass
class RunningPod:
    """The containers of a pod as ordinary processes, with mounted paths below `root`. They end with the block."""

    pod: Pod
    root: Path
    process: Any = field(default=None, init=False)

    def __enter__(self) -> RunningPod:
        self.pod.materialise(self.root)
        for container in self.pod.spec["initContainers"]:
            assert self._run(container).wait(60) == 0, self.log
        self.process = self._run(self.pod.container)
        return self

    def __exit__(self, *error: object) -> None:
        tree = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        end_tree(tree, step_s=2.0)

    def _run(self, container: Object) -> subprocess.Popen[bytes]:
        words = [self.pod.below(self.root, word) for word in self.pod.command(container)]
        words = [word.replace("corun-routers-main", IPS["router"]) for word in words]  # Stands for DNS.
        stand_ins = {
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.root / "home/corun"),
        }
        with (self.root / "log").open("ab") as log:
            return subprocess.Popen(
                words, env=self.pod.environment(container) | stand_ins, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return (self.root / "log").read_text(errors="replace")[-3000:]

    def probe(self, name: str) -> bool:
        """Make a startupProbe, readinessProbe or livenessProbe as a kubelet does. Return whether it succeeded."""
        asked = self.pod.container[name]
        return probe(asked["httpGet"]["port"], asked["httpGet"]["path"], asked["timeoutSeconds"], self.pod.ip) == 200

    def until(self, check: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.1)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.pod.ip}:9100/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def terminate(self) -> None:
        """End the process by SIGTERM, and check that it ends well within its grace period."""
        self.process.terminate()
        assert self.process.wait(self.pod.spec["terminationGracePeriodSeconds"]) == 0, self.log


def running(role: str, directory: Path, objects: list[Object] | None = None) -> RunningPod:
    objects = objects or complete("cpu-demo")
    workload = next(one for one in workloads(objects) if f"corun-{role}-" in one["metadata"]["name"])
    (directory / role).mkdir()
    return RunningPod(Pod(workload, objects, ip=IPS[role], name=f"corun-{role}-main-0"), directory / role)


def client(token: str = "client.token") -> Client:
    """Return a client as the README tells users, but for the name: here the router is not behind a port-forward."""
    secrets = tree() / "secrets"
    words = (secrets / token).read_text().strip() if token else ""
    tls = TlsConfig(ca=str(secrets / "ca.pem"), name="corun")
    return Client(f"{IPS['router']}:50051", tls=tls, token=words, timeout_s=120.0)


def test_a_router(tmp_path: Path) -> None:
    with running("router", tmp_path) as router:
        router.until(lambda: router.probe("startupProbe"))
        assert router.probe("livenessProbe")
        assert not router.probe("readinessProbe"), "without nodes it would be sent clients"
        for token in ("client.token", "cluster.token"):
            with client(token) as known:
                assert known.get_cluster().nodes == ()
        with client("") as stranger, pytest.raises(UnauthenticatedError):
            stranger.get_cluster()
        assert "corun_router_certified_pair 0.0" in router.metrics()
        router.terminate()


def test_a_broken_secret_ends_the_router_with_words(tmp_path: Path) -> None:
    objects = complete("cpu-demo")
    for secret in of_kind(objects, "Secret"):
        if "clients.tokens" in secret["data"]:
            secret["data"]["clients.tokens"] = ""
    with running("router", tmp_path, objects) as router:
        assert router.process.wait(30) == 2
        assert "client_tokens_file = " in router.log
        assert "must hold at least one token" in router.log


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_cluster_serves_and_drains(tmp_path: Path) -> None:
    """Real engines. A stream that runs when its router is told to end gets all its tokens."""
    with ExitStack() as stack:
        pods = {role: stack.enter_context(running(role, tmp_path)) for role in ("decode", "prefill", "router")}
        pods["prefill"].until(lambda: pods["prefill"].probe("livenessProbe"))
        assert not pods["prefill"].probe("startupProbe"), "it is still loading"
        for pod in reversed(pods.values()):
            pod.until(lambda pod=pod: pod.probe("readinessProbe"), 240.0)
            assert pod.probe("startupProbe")
            assert pod.probe("livenessProbe")
        assert "corun_router_certified_pair 1.0" in pods["router"].metrics()
        parameters = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=True)
        with client() as known:
            alone = known.generate("Once upon a time", parameters, seed=42)
            assert (alone.receipt.prefill_node.node_id, alone.receipt.decode_node.node_id) == (
                "corun-prefill-main-0",
                "corun-decode-main-0",
            )
            again: list[Chunk] = []

            def draw() -> None:
                for chunk in known.stream("Once upon a time", parameters, seed=42):
                    again.append(chunk)  # One by one: it is looked at meanwhile.  # noqa: PERF402

            stream = Thread(target=draw)
            stream.start()
            decode = pods["decode"]
            decode.until(lambda: bool(again) and "corun_decode_used_slots 1.0" in decode.metrics())
            pods["router"].terminate()
            stream.join(30)
        assert tuple(token for chunk in again for token in chunk.token_ids) == alone.token_ids
        assert [chunk.receipt.output_digest for chunk in again if chunk.receipt] == [alone.receipt.output_digest]
        for role in ("prefill", "decode"):
            pods[role].terminate()
