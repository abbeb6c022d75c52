"""`corun up` over real Ray and real processes that only stand in for the router and the nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from corun.processes import descendants, living
from tests.machine import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NODE = """
import os, sys, time
print(sys.argv[1:], "CORUN_SEED_KEY" in os.environ, flush=True)
time.sleep(300)
"""
ROUTER = """
import os, sys
print("key of", len(os.environ["CORUN_SEED_KEY"]), "digits", flush=True)
from concurrent.futures import ThreadPoolExecutor
import grpc
from corun.v1 import cluster_service_pb2 as pb, cluster_service_pb2_grpc, registry_service_pb2 as registry, types_pb2

class Service(cluster_service_pb2_grpc.ClusterServiceServicer):
    def GetCluster(self, request, context):
        infos = [
            registry.NodeInfo(ref=types_pb2.NodeRef(node_id=name, generation="0" * 16), role=role, slots=slots)
            for name, role, slots in (("prefill-0", 1, 0), ("decode-0", 2, 8))
        ]
        nodes = [pb.NodeStatus(node=info, state=pb.NODE_STATE_READY) for info in infos]
        return pb.GetClusterResponse(router_id="r", fingerprint="f" * 64, nodes=nodes)

server = grpc.server(ThreadPoolExecutor(2))
cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server(Service(), server)
server.add_insecure_port("127.0.0.1:" + sys.argv[sys.argv.index("--port") + 1])
server.start()
server.wait_for_termination()
"""
UP = """
import sys
from corun.cli.up import Up
from corun.launch import run
sys.exit(run(Up(model=sys.argv[1], port=0, slots=8, http=0).spec(), log_dir=sys.argv[2]))
"""


class Launch:
    """A `corun up` in a process of its own; modules: what stands in for each process."""

    def __init__(self, directory: Path, modules: dict[str, str]) -> None:
        self.logs, self.output = directory / "logs", directory / "output"
        for name, code in modules.items():
            (directory / f"{name}.py").write_text(code)
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text("{}")
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", UP, str(directory / "model"), str(self.logs)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))},
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.output.read_text(), re.MULTILINE) is not None

    def guards(self) -> list[int]:
        """The roots of the process trees of router, prefill and decode node, once all have been started."""
        names = ("router", "prefill-0", "decode-0")
        for name in names:
            self.wait_for(rf"{name}: process \d+$")
        said = dict(re.findall(r"([a-z0-9-]+): process (\d+)$", self.output.read_text(), re.MULTILINE))
        return [int(said[name]) for name in names]

    def wait_for(self, pattern: str) -> None:
        wait_for(lambda: self.said(pattern) or self.process.poll() is not None, pattern)
        assert self.said(pattern), self.output.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches = []

    def start(**modules: str) -> Launch:
        launches.append(Launch(tmp_path, {"router": ROUTER, "prefill_node": NODE, "decode_node": NODE, **modules}))
        return launches[-1]

    yield start
    for one in launches:
        one.process.kill()
        one.process.wait(30)


def test_starts_restarts_and_stops(launch: Callable[..., Launch]) -> None:
    cluster = launch()
    cluster.wait_for(rf"^ready: 127\.0\.0\.1:\d+, fingerprint {'f' * 64}, 8 slots$")
    router_guard, prefill_guard, _ = cluster.guards()
    for pid in (router_guard, *descendants(router_guard)):
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    cluster.wait_for(r"^http: http://127\.0\.0\.1:\d+/v1$")
    cluster.wait_for(r"^page: http://127\.0\.0\.1:\d+/$")
    wait_for(lambda: _version_at(cluster), "the gateway answers")
    log = cluster.logs / "decode-0.log"
    wait_for(lambda: "'--node-id', 'decode-0'" in log.read_text(), "the node says its arguments")
    assert "] False" in log.read_text()  # The seed key is the router's alone.
    assert "key of 64 digits" in (cluster.logs / "router.log").read_text()

    wait_for(lambda: descendants(prefill_guard), "the prefill node runs")
    os.kill(next(iter(descendants(prefill_guard))), signal.SIGKILL)
    cluster.wait_for(r"prefill-0: waiting: killed by signal 9 after")
    cluster.wait_for(r"prefill-0: process \d+, start 2$")

    tree = descendants(cluster.process.pid)
    cluster.process.terminate()
    assert cluster.process.wait(60) == 0, cluster.output.read_text()
    assert living(tree) == []
    assert cluster.said(
        r"try, in another terminal:\n  corun generate 'Once upon a time' --seed 42 --router 127\.0\.0\.1:\d+$"
    )
    assert cluster.said(r"ended: every process has stopped; logs in \S+\n\Z")


def _version_at(cluster: Launch) -> str:
    """The version that the gateway tells; empty while it does not listen."""
    address = re.search(r"^http: (\S+)/v1$", cluster.output.read_text(), re.MULTILINE)
    assert address is not None
    with suppress(OSError), urllib.request.urlopen(address[1] + "/version", timeout=10) as answer:
        return str(json.load(answer)["version"])
    return ""


def test_nothing_outlives_a_killed_launch(launch: Callable[..., Launch]) -> None:
    cluster = launch()
    guards = cluster.guards()
    wait_for(lambda: all(descendants(guard) for guard in guards), "every guard has started its process")
    everything = descendants(cluster.process.pid)
    ours = {pid: everything[pid] for guard in guards for pid in (guard, *descendants(guard))}
    assert len(ours) == 6
    cluster.process.kill()
    cluster.process.wait(10)
    wait_for(lambda: not living(ours), "every process has ended", timeout_s=30)


def test_gives_up_on_a_node_that_cannot_start(launch: Callable[..., Launch]) -> None:
    cluster = launch(decode_node="import sys; print('no such model', flush=True); sys.exit(2)")
    assert cluster.process.wait(120) == 1, cluster.output.read_text()
    assert cluster.said(r"giving up: decode-0 exit code 2 after \d+ s\nno such model\nlogs in ")
