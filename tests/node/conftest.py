"""Torch, as an engine loads it, and the worker half of vLLM's NIXL connector with our checks, without an agent behind
it."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corun.node.kv import judging
from corun.node.kv.stamps import StampTable
from tests.loading import load
from tests.node.table_pair import TablePair
from tests.node.worker_half import FOREVER, Agent, Judgements


@pytest.fixture(scope="module")
def torch() -> Any:
    return load("torch")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("corun.node.kv.connector")


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judgements:
    judge = Judgements()
    monkeypatch.setattr(judging, "Judgement", judge)
    return judge


@pytest.fixture
def connector(module: ModuleType, judged: Judgements) -> Any:
    """A connector whose worker holds the KV of "a", "b" and "c", and has an inbox instead of a NIXL agent. `seen`
    has the orders that vLLM would get."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker")
    # No agent is made, so there is none to end.
    cls = type("Worker", (nixl.NixlPullConnectorWorker,), {"__del__": lambda self: None})
    worker: Any = object.__new__(cls)
    worker.inbox, worker._registered_descs = [], []
    worker.nixl_wrapper = Agent(worker.inbox)
    info = SimpleNamespace(remote_physical_blocks_per_logical=2, remote_block_size=16)
    worker.transfer_topo = SimpleNamespace(
        tp_ratio=lambda size: 1, get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1
    )
    worker.xfer_stats = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats").NixlKVConnectorStats()
    worker.engine_id, worker.world_size, worker.tp_rank = "self", 2, 1
    worker.use_mla = worker.enable_heterogeneous_attn_post_process = worker._has_mamba = worker.use_host_buffer = False
    worker._is_hma_required = worker.enable_permute_local_kv = False
    worker.dst_num_blocks = {"p0": 64}
    worker._recving_metadata, worker._handshake_futures = {}, {}
    worker._engine_last_active, worker._engine_clock_offset = {}, {}
    worker._invalid_block_ids, worker._failed_recv_reqs = queue.Queue(), queue.Queue()
    worker.consumer_notification_counts_by_req, worker._recving_transfers = defaultdict(int), defaultdict(list)
    worker._lease_extension = 30
    worker._reqs_to_send, worker._reqs_to_process = dict.fromkeys("abc", FOREVER), set("abc")
    worker._remote_agents = defaultdict(dict)
    worker._handshake_lock = threading.RLock()
    worker._evict_stale_engines = lambda: None
    made = object.__new__(module.CorunNixlConnector)
    made.connector_worker = worker
    made.failures = []
    worker._log_failure = lambda failure_type, **_: made.failures.append(failure_type)
    made._said, made._released, made._readers, made._handshakes, made._claims, made._stamps = {}, {}, {}, {}, {}, {}
    made._warming = {}
    made._copied, made._regions = set(), []
    made.expired, made._block_size = 0, 16
    made.seen = []
    worker.start_load_kv = made.seen.append
    made.handoffs = module.Handoffs()
    made.table = StampTable(8)
    made.watch(lambda blocks: np.array([5] * len(blocks), np.uint64))
    return made


@pytest.fixture(scope="module")
def pair() -> Iterator[TablePair]:
    pytest.importorskip("nixl")
    made = TablePair()
    yield made
    made.close()
