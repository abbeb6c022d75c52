"""Checked reads, fingerprints, early release and handshakes, on the real worker half of vLLM's NIXL connector, without
an agent behind it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import zmq

from corun.node.kv.checks import Claim, Peer, Verdict
from corun.node.kv.handshake import UNDER_WAY
from corun.node.kv.owners import Owned
from corun.node.kv.stamps import StampTable
from tests.loading import load

FOREVER = 10.0**9
PEER = ("p0", "127.0.0.1", 7000, 2, (4096, 8192))


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("corun.node.kv.connector")


@pytest.fixture
def connector(module: ModuleType) -> Any:
    """A connector whose worker holds the KV of "a", "b" and "c", and has an inbox instead of a NIXL agent."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker")
    # No agent is made, so there is none to end.
    cls = type("Worker", (nixl.NixlPullConnectorWorker,), {"__del__": lambda self: None})
    worker: Any = object.__new__(cls)
    worker.inbox = []
    worker.nixl_wrapper = Agent(worker.inbox)
    info = SimpleNamespace(remote_physical_blocks_per_logical=2, remote_block_size=16)
    worker.transfer_topo = SimpleNamespace(
        tp_ratio=lambda size: 1, get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1
    )
    worker.xfer_stats = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats").NixlKVConnectorStats()
    worker.world_size, worker.tp_rank = 2, 1
    worker.use_mla = worker.enable_heterogeneous_attn_post_process = worker._has_mamba = worker.use_host_buffer = False
    worker._is_hma_required = worker.enable_permute_local_kv = False
    worker.dst_num_blocks = {"p0": 64}
    worker._recving_metadata = {}
    worker._invalid_block_ids = queue.Queue()
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker._recving_transfers = defaultdict(list)
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
    made = object.__new__(module.CorunNixlConnector)
    made.connector_worker = worker
    made.failures = []
    worker._log_failure = lambda failure_type, **_: made.failures.append(failure_type)
    made._said = {}
    made._released = {}
    made._readers = {}
    made.expired = 0
    made._handshakes = {}
    made._claims = {}
    made.handoffs = module.Handoffs()
    made.table = StampTable(8)
    made.watch(lambda blocks: np.array([5] * len(blocks), np.uint64))
    made._checks = Checks()
    return made


class Agent:
    """A NIXL agent whose transfers, named by a test, are in the state that the test says."""

    def __init__(self, inbox: list[bytes]) -> None:
        self.states: dict[str, str] = {}
        self.made: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, bytes]] = []
        self._inbox = inbox

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {"peer": [self._inbox.pop() for _ in self._inbox[:]]}

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes = b"") -> str:
        self.made.append((*args, notif_msg))
        return "transfer"

    def check_xfer_state(self, handle: str) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: str) -> Any:
        return SimpleNamespace(postDuration=1, xferDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: str) -> None:
        del self.states[handle]

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.told.append((agent, notif_msg))


class Checks:
    """Judges as a test says; remembers what it was asked."""

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.judged: list[tuple[Any, ...]] = []
        self.addresses: dict[str, int] = {}

    def learn(self, engine_id: str, address: int) -> None:
        self.addresses[engine_id] = address

    def judge(self, claims: list[Claim], *where: Any) -> list[Verdict]:
        self.judged += [(claim, *where) for claim in claims]
        return [Verdict(self.refusals.get(claim.request_id, ""), checked=True) for claim in claims]


def reads(connector: Any, name: str, *, state: str = "PROC", claimed: bool = True) -> None:
    """A read of three blocks of prefill "p-<name>" at "p0" is under way."""
    worker = connector.connector_worker
    remote = SimpleNamespace(block_ids=([4, 5, 6],), engine_id="p0", request_id=f"p-{name}", host="h", port=1)
    worker._recving_metadata[name] = SimpleNamespace(
        remote=remote, local_block_ids=([1, 2, 3],), local_physical_block_ids=([2, 3, 4, 5, 6, 7],)
    )
    worker._recving_transfers[name] = [f"read {name}"]
    worker.nixl_wrapper.states[f"read {name}"] = state
    worker._remote_agents["p0"] = {(0, 1): "agent of p0"}
    if claimed:
        connector._claims[name] = claim(name)


def claim(name: str) -> Claim:
    return Claim(owner=77, engine_id="p0", request_id=f"p-{name}", theirs=(4, 5, 6), ours=(1, 2, 3))


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
        connector.release(name, name)
    assert sent(connector) == set(released)
    assert connector.held() == [name for name in "abc" if name not in released]
    assert sent(connector) == set()
    assert connector.expired == 0


def test_leases_still_expire_in_order(connector: Any) -> None:
    worker = connector.connector_worker
    worker._reqs_to_send = {"a": 0.0, "b": FOREVER, "c": FOREVER}
    connector.release("c", "c")
    assert sent(connector) == {"a", "c"}
    worker._reqs_to_send["b"] = 0.0
    assert sent(connector) == {"b"}
    assert connector.expired == 2  # What was released has not waited in vain.


def test_a_release_before_the_lease_begins_waits_for_it(connector: Any) -> None:
    """The release overtakes the step in which the prefill ends."""
    connector.release("late", "late")
    assert sent(connector) == set()
    connector.connector_worker._reqs_to_process.add("late")
    connector.connector_worker._reqs_to_send["late"] = FOREVER
    assert sent(connector) == {"late"}


def test_a_release_of_what_was_read_is_forgotten(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RELEASE_TTL_S", 0.0)
    connector.release("read long ago", "read long ago")
    assert sent(connector) == set()
    assert connector._released == {}


def test_a_read_and_a_release_in_one_step_free_once(connector: Any) -> None:
    connector.release("b", "b")
    connector.connector_worker.inbox.append(b"b:1")
    assert sent(connector) == {"b"}
    assert connector.held() == ["a", "c"]
    assert connector.connector_worker._reqs_to_process == {"a", "c"}
    assert connector.expired == 0


def test_kv_with_several_readers_is_freed_after_the_last_one(connector: Any) -> None:
    worker = connector.connector_worker
    assert connector.share("b", ["s", "t"])
    for reader in (b"s", b"b"):
        worker.inbox.append(b"b/" + reader + b":1")
        assert sent(connector) == set()
    worker.inbox.append(b"b/t:1")
    assert sent(connector) == {"b"}
    assert connector.held() == ["a", "c"]
    assert connector._readers == {}


def test_thanks_that_come_in_one_step_count_one_by_one(connector: Any) -> None:
    connector.share("b", ["s"])
    connector.connector_worker.inbox += [b"b/b:1", b"HB:b,c", b"b/s:1", b"c/c:1"]
    assert sent(connector) == {"b", "c"}


def test_a_release_of_one_reader_leaves_the_others(connector: Any) -> None:
    connector.share("b", ["s"])
    connector.release("b", "b")
    assert sent(connector) == set()
    connector.connector_worker.inbox.append(b"b/s:1")
    assert sent(connector) == {"b"}
    assert connector.expired == 0


def test_a_reader_is_taken_once_whatever_is_said_of_him(connector: Any) -> None:
    """His read is thanked for, or vLLM gives it up, and his router releases him as well."""
    connector.share("b", ["s"])
    connector.connector_worker.inbox += [b"b/s:1", b"b/s:1"]
    connector.release("b", "s")
    assert sent(connector) == set()
    connector.release("b", "b")
    assert sent(connector) == {"b"}


def test_what_is_freed_or_will_be_is_not_shared(connector: Any) -> None:
    connector.release("b", "b")
    assert not connector.share("b", ["s"])
    assert not connector.share("unknown", ["s"])
    connector.connector_worker.inbox.append(b"a:1")
    assert sent(connector) == {"a", "b"}
    assert not connector.share("a", ["s"])


def test_what_another_reader_could_not_read_in_time_is_not_shared(connector: Any) -> None:
    connector.connector_worker._reqs_to_send["b"] = time.perf_counter() + 9.0
    assert not connector.share("b", ["s"])
    connector.connector_worker.inbox.append(b"HB:b/b")  # Its reader renews it.
    sent(connector)
    assert connector.share("b", ["s"])


def test_a_reader_that_is_none_frees_nothing(connector: Any) -> None:
    connector.release("b", "s")
    assert sent(connector) == set()
    assert connector.held() == ["a", "b", "c"]


def test_heartbeats_of_readers_renew_the_lease(connector: Any) -> None:
    worker = connector.connector_worker
    worker._reqs_to_send = dict.fromkeys("abc", 0.0)
    worker.inbox.append(b"HB:b/s,b/t,c,a/a")
    assert sent(connector) == set()


def test_readers_that_never_come_are_forgotten_with_the_lease(connector: Any) -> None:
    connector.share("a", ["s", "t"])
    connector.connector_worker._reqs_to_send["a"] = 0.0
    assert sent(connector) == {"a"}
    assert connector._readers == {}
    assert connector.expired == 1


def test_a_heartbeat_does_not_outlive_a_release(connector: Any) -> None:
    """Sent by a decode node that had not heard of the end yet, and read in the very step of the release."""
    connector.release("b", "b")
    connector.connector_worker.inbox.append(b"HB:b,c")
    freed = sent(connector) | sent(connector)
    assert freed == {"b"}
    assert connector.held() == ["a", "c"]


def test_connect_is_complete_when_the_handshake_is(connector: Any) -> None:
    worker = connector.connector_worker
    handshake: Future[Any] = Future()
    worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *args: handshake)
    assert connector.connect(*PEER) == UNDER_WAY
    assert connector.connect(*PEER) == UNDER_WAY
    handshake.set_result(({(0, 0): "agent"}, 0.0))
    assert connector.connect(*PEER) == ""
    assert connector.connect(*PEER) == ""
    assert connector._handshakes == {}
    assert connector._checks.addresses == {"p0": 8192}, "the rank that this rank reads from"


def test_a_failed_handshake_is_told_once_and_then_tried_again(connector: Any) -> None:
    worker = connector.connector_worker
    handshakes = [Future[Any](), Future[Any]()]
    attempts = iter(handshakes)
    worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *args: next(attempts))
    assert connector.connect(*PEER) == UNDER_WAY
    handshakes[0].set_exception(RuntimeError("another KV layout"))
    assert connector.connect(*PEER) == "another KV layout"
    assert connector.connect(*PEER) == UNDER_WAY
    handshakes[1].set_result(({(0, 0): "agent"}, 0.0))
    assert connector.connect(*PEER) == ""


def fails_with(error: Exception) -> Any:
    def submit(*_: Any) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    return SimpleNamespace(submit=submit)


WHY_NOT = {
    "a closed port": (zmq.Again(), "it has not answered the NIXL handshake for 5 s"),
    "another hash": (RuntimeError("NIXL compatibility hash mismatch. Local: 1, Remote: 2."), "it has other weights"),
    "another engine": (RuntimeError("Remote NIXL agent engine ID mismatch. Expected a,received b."), "another engine"),
    "without words": (AssertionError(), "AssertionError"),
}


@pytest.mark.parametrize(("error", "words"), WHY_NOT.values(), ids=WHY_NOT)
def test_why_a_handshake_fails_is_said_in_words(connector: Any, error: Exception, words: str) -> None:
    connector.connector_worker._handshake_initiation_executor = fails_with(error)
    assert words in connector.connect(*PEER)


def test_a_handshake_that_keeps_failing_is_logged_when_the_reason_changes(
    connector: Any, module: ModuleType, monkeypatch: Any
) -> None:
    """Without a traceback: the router tries every 5 s."""
    lines: list[str] = []
    monkeypatch.setattr(module.log, "error", lambda text, *parts: lines.append(text % parts))
    worker = connector.connector_worker
    for error in (zmq.Again(), zmq.Again(), RuntimeError("another KV layout"), RuntimeError("another KV layout")):
        worker._handshake_initiation_executor = fails_with(error)
        assert connector.connect(*PEER)
    assert ["p0" in line for line in lines] == [True, True]
    assert "another KV layout" in lines[1]
    worker._log_failure(failure_type="transfer_failed", req_id="r")
    assert connector.failures == ["transfer_failed"], "all else is vLLM's own"


def test_a_peer_that_cannot_be_read_ahead_is_told_in_words(connector: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the peer is gone")

    worker = connector.connector_worker
    worker.num_blocks = worker._physical_blocks_per_logical_kv_block = 1
    worker.src_xfer_handles_by_block_size, worker.dst_xfer_side_handles = {16: 1}, {"p0": {1: 2}}
    worker._compute_desc_ids = lambda *args: [0]
    worker.nixl_wrapper.make_prepped_xfer = broken
    assert connector.warm("p0") == "the peer is gone"


def received(connector: Any) -> tuple[set[str], set[int]]:
    """What one step of the engine may use, and the blocks it must not."""
    finished: set[str] = connector.get_finished(set())[1]
    return finished, connector.get_block_ids_with_load_errors()


def test_a_read_is_judged_when_it_is_done_and_then_the_peer_is_told(connector: Any) -> None:
    """Told earlier, the peer could give the blocks to another prompt before they are judged."""
    agent = connector.connector_worker.nixl_wrapper
    reads(connector, "a")
    assert received(connector) == (set(), set())
    assert (connector._checks.judged, agent.told) == ([], [])
    agent.states["read a"] = "DONE"
    assert received(connector) == ({"a"}, set())
    assert connector._checks.judged == [(claim("a"), agent, {"p0": Peer(agent="agent of p0", num_blocks=32)})]
    assert agent.told == [("agent of p0", b"p-a:2")]
    assert (connector.handoffs.checked, connector.handoffs.refused, connector._claims) == (1, 0, {})


def test_the_stamps_of_all_reads_of_a_step_are_waited_for_together(
    connector: Any, module: ModuleType, monkeypatch: Any
) -> None:
    """All rows stand still meanwhile: k reads of a node that has stopped must not cost k timeouts."""
    monkeypatch.setattr("corun.node.kv.checks.FETCH_TIMEOUT_S", 0.01)
    agent = connector.connector_worker.nixl_wrapper
    events: list[str] = []

    def initialize(*_: Any) -> str:
        name = f"stamps {len(events)}"
        agent.states[name] = "PROC"
        return name

    def post(handle: str) -> str:
        events.append("posted")
        return "PROC"

    def release(handle: str) -> None:
        if handle.startswith("stamps"):
            events.append("given up")

    agent.get_xfer_descs, agent.initialize_xfer = lambda *_: None, initialize
    agent.transfer, agent.release_xfer_handle = post, release
    connector._checks = module.ReadChecks(StampTable(8), lambda blocks: np.zeros(len(blocks), np.uint64))
    connector._checks.learn("p0", 4096)
    for name in ("a", "b"):
        reads(connector, name, state="DONE")
    assert received(connector)[0] == {"a", "b"}
    assert events == ["posted", "posted", "given up", "given up"]
    assert connector.handoffs.refused == 2


def test_transfers_themselves_tell_nobody(connector: Any) -> None:
    agent = connector.connector_worker.nixl_wrapper
    assert agent.make_prepped_xfer("READ", 1, [2], 3, [4], notif_msg=b"p-a:2") == "transfer"
    assert agent.made == [("READ", 1, [2], 3, [4], b"")]


def test_a_refused_read_fails_its_own_request_only(connector: Any) -> None:
    connector._checks.refusals = {"p-b": "block 0 of 3 is not this prompt's"}
    for name in "abc":
        reads(connector, name, state="DONE")
    connector.connector_worker._recving_metadata["b"].local_block_ids = ([7, 8],)
    assert received(connector) == ({"a", "b", "c"}, {7, 8})
    assert [notice for _, notice in connector.connector_worker.nixl_wrapper.told] == [b"p-a:2", b"p-c:2"]
    assert (connector.handoffs.refused, connector._claims) == (1, {})
    connector.get_kv_connector_stats()
    assert connector.handoffs.failed == 1


def test_a_read_that_nobody_claimed_is_refused(connector: Any) -> None:
    reads(connector, "a", state="DONE", claimed=False)
    assert received(connector) == ({"a"}, {1, 2, 3})
    assert connector._checks.judged == []
    assert connector.handoffs.refused == 1


def test_a_transfer_that_failed_is_not_judged(connector: Any) -> None:
    reads(connector, "a", state="ERR")
    assert received(connector) == ({"a"}, {1, 2, 3})
    assert (connector._checks.judged, connector._claims, connector.handoffs.refused) == ([], {}, 0)


def test_a_peer_that_cannot_be_told_frees_its_blocks_by_itself(connector: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("gone")

    connector.connector_worker.nixl_wrapper.send_notif = broken
    reads(connector, "a", state="DONE")
    assert received(connector) == ({"a"}, set())


def test_a_step_names_its_owners_first_and_signs_last(connector: Any, module: ModuleType) -> None:
    worker = connector.connector_worker
    seen: list[Any] = []
    worker.start_load_kv = lambda meta: seen.append(connector.table.rows.tolist())
    connector._connector_metadata = meta = module.HandoffMetadata()
    meta.owned = [Owned(100, 0, (3, 1)), Owned(200, 4, (6,))]
    meta.signed = [(1, 6)]
    connector.handle_preemptions(meta)
    connector.start_load_kv(None)
    expected = [[0, 0], [101, 0], [0, 0], [100, 0], [0, 0], [0, 0], [204, 0], [0, 0]]
    assert seen == [expected]
    connector.wait_for_save()
    expected[1][1] = expected[6][1] = 5
    assert connector.table.rows.tolist() == expected


def test_owners_are_named_before_the_runner_zeroes_their_blocks(
    connector: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who still reads what was there looks at the owners afterwards, and must not take zeros for the KV he wants."""
    runners = load("vllm.v1.worker.gpu_model_runner")
    monkeypatch.setattr(runners, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(runners, "get_kv_transfer_group", lambda: connector)
    output = load("vllm.v1.core.sched.output").SchedulerOutput.make_empty()
    output.kv_connector_metadata = module.HandoffMetadata()
    output.kv_connector_metadata.owned = [Owned(100, 0, (3,))]
    output.new_block_ids_to_zero = [3]
    seen: list[Any] = []

    def zero(blocks: list[int]) -> None:
        seen.append((blocks, connector.table.rows[3].tolist()))
        raise InterruptedError  # What follows needs a runner.

    runner = MagicMock(execute_model_state=None, routed_experts_initialized=False, _zero_block_ids=zero)
    runner._update_states = lambda given: runners.GPUModelRunner._update_states(runner, given)
    with pytest.raises(InterruptedError):
        runners.GPUModelRunner.execute_model(runner, output)
    assert seen == [([3], [100, 0])]


def test_claims_hold_the_engines_block_ids(connector: Any, module: ModuleType) -> None:
    """vLLM replaces them with its kernels' when it starts to read. A read without blocks only tells the peer."""
    worker = connector.connector_worker
    reads(connector, "a", claimed=False)
    reads(connector, "aborted", claimed=False)
    connector._connector_metadata = meta = module.HandoffMetadata()
    meta.reqs_to_recv = {name: worker._recving_metadata[name] for name in ("a", "aborted")}
    meta.reqs_to_recv["aborted"].local_block_ids = []
    meta.owners = {"a": 77, "aborted": 78}
    worker.start_load_kv = lambda meta: None
    connector.start_load_kv(None)
    assert connector._claims == {"a": claim("a")}


def bound(connector: Any, facts: dict[str, Any], *, ranks: int = 2, **model: Any) -> str:
    """The hash that peers must have, for a model of these settings."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    worker = connector.connector_worker
    values = {"model": "/models/a", "dtype": "bfloat16", "heads": 2, "size": 16, "layers": 4, **model}
    config = SimpleNamespace(
        model=values["model"],
        dtype=values["dtype"],
        get_total_num_kv_heads=lambda: values["heads"],
        get_head_size=lambda: values["size"],
        get_total_num_hidden_layers=lambda: values["layers"],
    )
    worker.vllm_config = SimpleNamespace(
        model_config=config,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )
    worker.backend_name, worker.transfer_topo.cross_layers_blocks, worker.world_size = "CPU_ATTN", False, ranks
    own = nixl.compute_nixl_compatibility_hash(worker.vllm_config, "CPU_ATTN", False)
    worker.compat_hash, worker.xfer_handshake_metadata = own, nixl.NixlHandshakePayload(own, b"agent")
    connector.bind(facts)
    assert worker.xfer_handshake_metadata == nixl.NixlHandshakePayload(worker.compat_hash, b"agent")
    assert config.model == values["model"], "the engine's own settings stay"
    return str(worker.compat_hash)


FACTS = {"weights_digest": "a", "threads": 2}


def test_a_handshake_needs_equal_facts(connector: Any) -> None:
    """Weights, for one: vLLM's own hash leaves them out."""
    assert bound(connector, FACTS) == bound(connector, dict(reversed(FACTS.items())))
    others = [
        bound(connector, {**FACTS, "weights_digest": "b"}),
        bound(connector, {**FACTS, "threads": 1}),
        bound(connector, FACTS, ranks=1),
        bound(connector, FACTS, dtype="float16"),
        bound(connector, FACTS, layers=5),
    ]
    assert len({bound(connector, FACTS), *others}) == 6


def test_where_the_model_lies_is_no_condition_of_a_handshake(connector: Any) -> None:
    """vLLM's own hash has its path; the weights' digest, which is in ours, says what the path cannot."""
    assert bound(connector, FACTS) == bound(connector, FACTS, model="/another/copy")


def test_a_hash_that_vllm_makes_otherwise_is_refused(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "compute_nixl_compatibility_hash", lambda *_: "another version's")
    with pytest.raises(RuntimeError, match=r"NIXL compatibility hash .* 0\.26\.0"):
        bound(connector, FACTS)


def test_memory_of_the_dead_is_let_go_between_reads_only(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    dropped: list[Any] = []
    mappings = SimpleNamespace(pids=lambda: {8, 7}, drop=dropped.append)
    monkeypatch.setattr(module.ucx_mappings, "of_this_process", lambda: mappings)
    assert connector.mapped_pids() == [7, 8]
    connector.connector_worker._recving_transfers["r"] = [1]
    assert not connector.unmap([7])
    connector.connector_worker._recving_transfers.clear()
    connector.connector_worker._handshake_futures["p1"] = Future()
    assert not connector.unmap([7])
    connector.connector_worker._handshake_futures.clear()
    assert not dropped
    assert connector.unmap([7])
    assert dropped == [[7]]
