"""One real cluster for the tests here: router, prefill node and decode node as processes, on the tiny model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from corun import Client, ClusterStatus, DeadlineError, UnavailableError
from corun.chat import TEMPLATE_FILE
from corun.models import tiny
from corun.types import KvReads, NodeRole, NodeState
from corun_bench.children import Processes
from tests.machine import free_port, wait_for
from tests.otlp import Collector, collecting, variables
from tests.probing import probe
from tests.scraping import families, values

PROBES = ("/livez", "/startedz", "/readyz")
SLOTS = 8
CHUNK = 128
START_TIMEOUT_S = 240.0
VLLM_LABELS = '{engine="0",model_name='
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALL_CHECKED = ("--kv-check-fraction", "1.0")
"""Every prompt's KV is compared by digest after its transfer."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster that is watched, so that every test of bits shows that watching changes none."""

    address: str
    model: str
    processes: Processes
    metrics: dict[str, int]
    """The ports of metrics and probes, by the names of the processes."""
    collector: Collector
    """The collector of traces."""
    while_loading: Mapping[str, int]
    """The answers of the decode node's probes before its engine had loaded."""

    def client(self) -> Client:
        return Client(self.address)

    def status(self) -> ClusterStatus:
        with self.client() as client:
            return client.get_cluster()

    def shown(self, name: str) -> dict[str, float]:
        """Return the metrics of a process; vLLM's labels are left out of their names."""
        found = values(families(self.metrics[name]))
        return {key.partition(VLLM_LABELS)[0]: value for key, value in found.items()}

    def kv_reads(self) -> KvReads:
        """Wait until the decode node tells of all KV reads that its engine has counted, and return what it tells."""

        def told() -> KvReads:
            (decode,) = (node for node in self.status().nodes if node.node.ref.node_id == "d0")
            return decode.load.kv_reads

        counted = self.shown("decode").get("vllm:nixl_xfer_time_seconds_count", 0)
        wait_for(lambda: told().count >= counted, "the reads are told")
        return told()


def ready(status: Callable[[], ClusterStatus]) -> bool:
    """Return whether a router says that it uses nodes of both roles."""
    try:
        nodes = status().nodes
    except (UnavailableError, DeadlineError):
        return False
    roles = {status.node.role for status in nodes if status.state is NodeState.READY}
    return roles == {NodeRole.PREFILL, NodeRole.DECODE}


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with two threads per engine.

    It ends with this package, because idle engines spin and would take the cores from the tests after it.
    """
    with started(tmp_path_factory.mktemp("cluster"), threads=2) as cluster:
        yield cluster


@contextmanager
def started(logs: Path, *, threads: int, model: str = "") -> Iterator[Cluster]:
    """Start a whole cluster in an unusual order: nodes first, router last. It serves the tiny model if none is given.

    The nodes' copies of the model lie at different paths, and have a chat template.
    """
    if not model:
        ours = tiny.ensure()
        model = str(shutil.copytree(ours, logs / ours.name))
        (Path(model) / TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    copy = str(shutil.copytree(model, logs / "a copy of the model"))
    port = free_port()
    address = f"127.0.0.1:{port}"
    with collecting() as collector, mock.patch.dict(os.environ, variables(collector)), Processes(logs) as processes:
        seed_key = logs / "seed.key"
        seed_key.write_text("c0ffee" * 4)
        node = ("--router", address, "--threads", str(threads))
        flags = {
            "decode": ("--model", copy, *node, "--node-id", "d0", "--slots", str(SLOTS)),
            "prefill": ("--model", model, *node, "--node-id", "p0", "--chunk-size", str(CHUNK), *ALL_CHECKED),
            # Tests count what runs, so nothing is audited.
            "router": ("--port", str(port), "--seed-key-file", str(seed_key), "--audit-fraction", "0"),
        }
        metrics = {name: free_port() for name in flags}
        for name, own in flags.items():
            module = name if name == "router" else f"{name}_node"
            processes.start(name, module, *own, "--metrics-port", str(metrics[name]))
        wait_for(lambda: probe(metrics["decode"], "/livez") == 200, "the decode node is alive", START_TIMEOUT_S)
        while_loading = {path: probe(metrics["decode"], path) for path in PROBES}
        cluster = Cluster(address, model, processes, metrics, collector, while_loading)
        wait_for(lambda: ready(cluster.status) or _anyone_died(processes), "the cluster is ready", START_TIMEOUT_S)
        assert not _anyone_died(processes), {name: processes.log(name)[-3000:] for name in processes.running}
        yield cluster
        assert {name: processes.terminate(name) for name in flags} == dict.fromkeys(flags, 0)


def _anyone_died(processes: Processes) -> bool:
    return any(process.poll() is not None for process in processes.running.values())
