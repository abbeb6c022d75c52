"""Early release and handshakes, on the real worker half of vLLM's NIXL connector without an agent behind it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.loading import load

FOREVER = 10.0**9


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("corun.node.connector")


@pytest.fixture
def connector(module: ModuleType) -> Any:
    """A connector whose worker holds the KV of "a", "b" and "c", and has an inbox instead of a NIXL agent."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker")
    # No agent is made, so there is none to end.
    cls = type("Worker", (nixl.NixlPullConnectorWorker,), {"__del__": lambda self: None})
    worker: Any = object.__new__(cls)
    worker.inbox = []
    worker.nixl_wrapper = SimpleNamespace(
        get_new_notifs=lambda: {"peer": [worker.inbox.pop() for _ in worker.inbox[:]]}
    )
    worker.transfer_topo = SimpleNamespace(tp_ratio=lambda size: 1)
    worker.xfer_stats = SimpleNamespace(record_kv_expired_req=lambda: None)
    worker.world_size = worker.tp_rank = 1
    worker.use_mla = worker.enable_heterogeneous_attn_post_process = worker._has_mamba = worker.use_host_buffer = False
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker._recving_transfers = {}
    worker._failed_recv_reqs = queue.Queue()
    worker._lease_extension = 30
    worker._reqs_to_send = dict.fromkeys("abc", FOREVER)
    worker._reqs_to_process = set("abc")
    worker._remote_agents = defaultdict(dict)
    worker._handshake_futures = {}
    worker._handshake_lock = threading.RLock()
    worker._engine_last_active = {}
    worker._engine_clock_offset = {}
    worker._evict_stale_engines = lambda: None
    worker._log_failure = lambda **_: None
    made = object.__new__(module.CorunNixlConnector)
    made.connector_worker = worker
    made._released = {}
    made._handshakes = {}
    return made


def sent(connector: Any) -> set[str]:
    """What one step of the engine frees."""
    finished: set[str] = connector.get_finished(set())[0]
    return finished


def test_nothing_ends_by_itself(connector: Any) -> None:
    assert sent(connector) == set()
    assert connector.held() == ["a", "b", "c"]


@pytest.mark.parametrize("released", [[*order] for n in (1, 2, 3) for order in itertools.permutations("abc", n)])
def test_a_release_ends_its_own_leases_and_no_other(connector: Any, released: list[str]) -> None:
    """Whatever their place: vLLM stops looking at the first live lease."""
    for name in released:
        connector.release(name)
    assert sent(connector) == set(released)
    assert connector.held() == [name for name in "abc" if name not in released]
    assert sent(connector) == set()


def test_leases_still_expire_in_order(connector: Any) -> None:
    worker = connector.connector_worker
    worker._reqs_to_send = {"a": 0.0, "b": time.perf_counter() + 0.05, "c": FOREVER}
    connector.release("c")
    assert sent(connector) == {"a", "c"}
    time.sleep(0.06)
    assert sent(connector) == {"b"}


def test_a_release_before_the_lease_begins_waits_for_it(connector: Any) -> None:
    """The release overtakes the step in which the prefill ends."""
    connector.release("late")
    assert sent(connector) == set()
    connector.connector_worker._reqs_to_process.add("late")
    connector.connector_worker._reqs_to_send["late"] = FOREVER
    assert sent(connector) == {"late"}


def test_a_release_of_what_was_read_is_forgotten(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RELEASE_TTL_S", 0.0)
    connector.release("read long ago")
    assert sent(connector) == set()
    assert connector._released == {}


def test_a_read_and_a_release_in_one_step_free_once(connector: Any) -> None:
    connector.release("b")
    connector.connector_worker.inbox.append(b"b:1")
    assert sent(connector) == {"b"}
    assert connector.held() == ["a", "c"]
    assert connector.connector_worker._reqs_to_process == {"a", "c"}


def test_a_heartbeat_does_not_outlive_a_release(connector: Any) -> None:
    """Sent by a decode node that had not heard of the end yet, and read in the very step of the release."""
    connector.release("b")
    connector.connector_worker.inbox.append(b"HB:b,c")
    freed = sent(connector) | sent(connector)
    assert freed == {"b"}
    assert connector.held() == ["a", "c"]


def test_connect_is_complete_when_the_handshake_is(connector: Any) -> None:
    worker = connector.connector_worker
    handshake: Future[Any] = Future()
    worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *args: handshake)
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is False
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is False
    handshake.set_result(({(0, 0): "agent"}, 0.0))
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is True
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is True
    assert connector._handshakes == {}


def test_a_failed_handshake_is_raised_once_and_then_tried_again(connector: Any) -> None:
    worker = connector.connector_worker
    handshakes = [Future[Any](), Future[Any]()]
    attempts = iter(handshakes)
    worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *args: next(attempts))
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is False
    handshakes[0].set_exception(RuntimeError("another KV layout"))
    with pytest.raises(RuntimeError, match="another KV layout"):
        connector.connect("p0", "127.0.0.1", 7000, 1)
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is False
    handshakes[1].set_result(({(0, 0): "agent"}, 0.0))
    assert connector.connect("p0", "127.0.0.1", 7000, 1) is True
