"""One real cluster for the tests here: router, prefill node and decode node as processes, on the tiny model."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest

from corun import Client, ClusterStatus, DeadlineError, UnavailableError
from corun.models import tiny
from corun.types import KvReads, NodeRole, NodeState
from corun_bench.children import Processes
from tests.machine import free_port
from tests.otlp import Collector, collecting, variables
from tests.probing import probe
from tests.scraping import families, values

PROBES = ("/livez", "/startedz", "/readyz")
SLOTS = 8
CHUNK = 128
START_TIMEOUT_S = 240.0
VLLM_LABELS = '{engine="0",model_name='
ALL_CHECKED = ("--kv-check-fraction", "1.0")
"""Every prompt's KV is compared by digest after its transfer."""


@dataclass(frozen=True)
class Watch:
    """The ports and the collector by which a cluster is watched."""

    metrics: Mapping[str, int]
    """The ports of metrics and probes, by the names of the processes."""
    collector: Collector
    """The collector of traces."""
    while_loading: Mapping[str, int]
    """The answers of the decode node's probes before its engine had loaded."""


@dataclass(frozen=True)
class Cluster:
    address: str
    model: str
    processes: Processes
    watch: Watch | None = None

    def client(self) -> Client:
        return Client(self.address)

    def status(self) -> ClusterStatus:
        with self.client() as client:
            return client.get_cluster()

    def shown(self, name: str) -> dict[str, float]:
        """Return the metrics of a watched process; vLLM's labels are left out of their names."""
        assert self.watch is not None
        found = values(families(self.watch.metrics[name]))
        return {key.partition(VLLM_LABELS)[0]: value for key, value in found.items()}

    def kv_reads(self) -> KvReads:
        """Wait until the decode node tells of all KV reads that its engine has counted, and return what it tells."""

        def told() -> KvReads:
            (decode,) = (node for node in self.status().nodes if node.node.ref.node_id == "d0")
            return decode.load.kv_reads

        counted = self.shown("decode").get("vllm:nixl_xfer_time_seconds_count", 0)
        wait_until(lambda: told().count >= counted, "the reads are told")
        return told()


def wait_until(check: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


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
    """Yield a watched cluster with two threads per engine. So every test of bits shows that watching changes none.

    It ends with this package, because idle engines spin and would take the cores from the tests after it.
    """
    with collecting() as collector, mock.patch.dict(os.environ, variables(collector)):
        watch = Watch({name: free_port() for name in ("decode", "prefill", "router")}, collector, {})
        with started(tmp_path_factory.mktemp("cluster"), threads=2, watch=watch) as cluster:
            yield cluster


@contextmanager
def started(logs: Path, *, threads: int, watch: Watch | None = None, model: str = "") -> Iterator[Cluster]:
    """Start a whole cluster in an unusual order: nodes first, router last. It serves the tiny model if none is given.

    The nodes' copies of the model lie at different paths.
    """
    model = model or str(tiny.ensure())
    copy = str(shutil.copytree(model, logs / "a copy of the model"))
    port = free_port()
    with Processes(logs) as processes:
        cluster = Cluster(f"127.0.0.1:{port}", model, processes, watch)
        seed_key = logs / "seed.key"
        seed_key.write_text("c0ffee" * 4)
        node = ("--router", cluster.address, "--threads", str(threads))
        flags = {
            "decode": ("--model", copy, *node, "--node-id", "d0", "--slots", str(SLOTS)),
            "prefill": ("--model", model, *node, "--node-id", "p0", "--chunk-size", str(CHUNK), *ALL_CHECKED),
            # Tests count what runs, so nothing is audited.
            "router": ("--port", str(port), "--seed-key-file", str(seed_key), "--audit-fraction", "0"),
        }
        for name, own in flags.items():
            watched = ("--metrics-port", str(watch.metrics[name])) if watch else ()
            processes.start(name, name if name == "router" else f"{name}_node", *own, *watched)
        if watch:
            loading = watch.metrics["decode"]
            wait_until(lambda: probe(loading, "/livez") == 200, "the decode node is alive", START_TIMEOUT_S)
            watch = replace(watch, while_loading={path: probe(loading, path) for path in PROBES})
            cluster = replace(cluster, watch=watch)
        wait_until(lambda: ready(cluster.status) or _anyone_died(processes), "the cluster is ready", START_TIMEOUT_S)
        assert not _anyone_died(processes), {name: processes.log(name)[-3000:] for name in processes.running}
        yield cluster
        assert processes.stop() == {"decode": 0, "prefill": 0, "router": 0}


def _anyone_died(processes: Processes) -> bool:
    return any(process.poll() is not None for process in processes.running.values())
