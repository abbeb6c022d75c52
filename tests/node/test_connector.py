"""Checked reads, fingerprints, early release and handshakes, on the real worker half of vLLM's NIXL connector, without
an agent behind it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import zmq

from corun.node.kv.handshake import UNDER_WAY
from corun.node.kv.paced_reads import Read
from corun.node.kv.stamps import Claim, Owned, PeerTable, StampTable, Verdict
from tests.loading import load

FOREVER = 10.0**9
PEER = ("p0", "127.0.0.1", 7000, 2, (4096, 8192))
STAMPS = np.array([77, 78, 79], np.uint64).tobytes()


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("corun.node.kv.connector")


@pytest.fixture
def judged(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Judge:
    judge = Judge()
    monkeypatch.setattr(module, "Judgement", judge)
    return judge


def test_handshakes_are_answered_at_the_nodes_own_port(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is an argument. In the environment it would be a part of the key of vLLM's compile cache."""
    given = {"cluster_token_file": "", "handshake_port": 7001}
    transfer = SimpleNamespace(get_from_extra_config=lambda name, default: given[name], kv_role="kv_producer")
    for scheduler in (SimpleNamespace(side_channel_port=5600), None):
        stock = lambda self, *args, scheduler=scheduler: setattr(self, "connector_scheduler", scheduler)  # noqa: E731
        monkeypatch.setattr(module.NixlPullConnector, "__init__", stock)
        config = SimpleNamespace(kv_transfer_config=transfer, cache_config=SimpleNamespace(block_size=16))
        made = module.CorunNixlConnector(config, None, None)
        assert made.connector_scheduler is scheduler
        assert scheduler is None or scheduler.side_channel_port == 7001


@pytest.fixture
def connector(module: ModuleType, judged: Judge) -> Any:
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
    made._copied, made._regions = set(), []
    made._unjudged, made._judgement, made._late, made._tables = [], None, [], []
    made.expired, made._block_size = 0, 16
    made.handoffs = module.Handoffs()
    made.table, made._fetched, made._warmed = StampTable(8), StampTable(8), StampTable(1)
    made.watch(lambda blocks: np.array([5] * len(blocks), np.uint64))
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


class Judge:
    """Judges as a test says, and when; remembers what it was asked."""

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.is_late = self.are_rows_late = False
        """Whether the verdicts have not come; and whether some rows of a judgement that has ended may still come."""

    def __call__(self, reads: list[tuple[Claim, Any]], *where: Any) -> Any:
        self.asked.append((reads, *where))
        found = [Verdict(self.refusals.get(claim.request_id, ""), checked=True) for claim, _ in reads]
        transfers = SimpleNamespace(are_late=lambda: self.are_rows_late)
        fetch = SimpleNamespace(transfers=transfers)
        return SimpleNamespace(verdicts=lambda patience_s: None if self.is_late else found, fetch=fetch)


def reads(connector: Any, name: str, *, state: str = "PROC", claimed: bool = True) -> None:
    """A read of three blocks of prefill "p-<name>" at "p0" is under way."""
    worker = connector.connector_worker
    remote = SimpleNamespace(block_ids=([4, 5, 6],), engine_id="p0", request_id=f"p-{name}", host="h", port=1)
    worker._recving_metadata[name] = SimpleNamespace(
        remote=remote, local_block_ids=([1, 2, 3],), local_physical_block_ids=([2, 3, 4, 5, 6, 7],)
    )
    worker._recving_transfers[name] = [Read(sides=(1, 2), ours=(), theirs=(), running=deque([f"read {name}"]))]
    connector._agent.states[f"read {name}"] = state
    worker._remote_agents["p0"] = {(0, 1): "agent of p0"}
    if claimed:
        connector._claims[name] = claim(name)


def claim(name: str) -> Claim:
    return Claim(stamps=STAMPS, first=0, engine_id="p0", request_id=f"p-{name}", theirs=(4, 5, 6), ours=(1, 2, 3))


def stamps(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()


def expired(connector: Any) -> list[Any]:
    """What vLLM has counted, and logged, as KV that nobody came for."""
    return list(connector.connector_worker.xfer_stats.data["num_kv_expired_reqs"])


def sent(connector: Any) -> set[str]:
    """What one step of the engine frees."""
    finished: set[str] = connector.get_finished(set())[0]
    return finished


@pytest.mark.parametrize("released", [[*order] for n in range(4) for order in itertools.permutations("abc", n)])
def test_a_release_ends_its_own_leases_and_no_other(connector: Any, released: list[str]) -> None:
    """Whatever their place: vLLM stops looking at the first live lease. Nothing ends by itself."""
    for name in released:
        connector.release(name, name)
    assert sent(connector) == set(released)
    assert connector.held() == {"names": [name for name in "abc" if name not in released], "expired": 0}
    assert expired(connector) == [], "vLLM warns of KV that expired, and this was let go"
    assert sent(connector) == set()


def test_leases_still_expire_in_order(connector: Any) -> None:
    worker = connector.connector_worker
    worker._reqs_to_send = {"a": 0.0, "b": FOREVER, "c": FOREVER}
    connector.share("a", ["s", "t"])  # These readers never come, and are forgotten with the lease.
    connector.release("c", "c")
    assert sent(connector) == {"a", "c"}
    worker._reqs_to_send["b"] = 0.0
    assert sent(connector) == {"b"}
    assert connector.expired == 2, "what was released has not waited in vain"
    assert connector._readers == {}


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


SCENES: dict[str, tuple[list[str], list[tuple[list[bytes], str, str]]]] = {
    "a read and a release in one step free once": ([], [([b"b:1"], "b", "b")]),
    "the last of several readers frees": (
        ["s", "t"],
        [([b"b/s:1"], "", ""), ([b"b/b:1"], "", ""), ([b"b/t:1"], "", "b")],
    ),
    "notices of one step count one by one": (["s"], [([b"b/b:1", b"HB:b,c", b"b/s:1", b"c/c:1"], "", "bc")]),
    "a release of one reader leaves the others": (["s"], [([], "b", ""), ([b"b/s:1"], "", "b")]),
    # Its read is acknowledged, or vLLM gives it up, and its router releases it as well.
    "a reader counts once, whatever is said of it": (["s"], [([b"b/s:1", b"b/s:1"], "s", ""), ([], "b", "b")]),
    "who is no reader frees nothing": ([], [([], "s", "")]),
    # It was sent by a decode node that had not heard of the end yet, and read in the very step of the release.
    "a heartbeat does not outlive a release": ([], [([b"HB:b,c"], "b", "b")]),
}


@pytest.mark.parametrize(("readers", "steps"), SCENES.values(), ids=SCENES)
def test_kv_is_freed_after_its_last_reader(
    connector: Any, monkeypatch: pytest.MonkeyPatch, readers: list[str], steps: list[tuple[list[bytes], str, str]]
) -> None:
    """A step: the notices that come, the reader of "b" that is released, and whose KV is freed."""
    complaints: list[Any] = []
    vllm = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker").logger
    monkeypatch.setattr(vllm, "error", lambda *words: complaints.append(words))
    if readers:
        assert connector.share("b", readers)
    for notices, released, freed in [*steps, ([], "", "")]:
        connector.connector_worker.inbox += notices
        if released:
            connector.release("b", released)
        assert sent(connector) == set(freed)
    left = {name for name in "abc" if not any(name in freed for _, _, freed in steps)}
    assert set(connector.held()["names"]) == connector.connector_worker._reqs_to_process == left
    assert connector._readers == connector._released == {}
    assert (connector.expired, expired(connector), complaints) == (0, [], [])


def test_what_cannot_be_read_in_time_is_not_shared(connector: Any) -> None:
    """It is freed, or will be by its last reader or by the end of its lease."""
    connector.release("b", "b")
    assert not connector.share("b", ["s"])
    assert not connector.share("unknown", ["s"])
    connector.connector_worker.inbox.append(b"a:1")
    assert sent(connector) == {"a", "b"}
    assert not connector.share("a", ["s"])
    connector.connector_worker._reqs_to_send["c"] = time.perf_counter() + 9.0
    assert not connector.share("c", ["s"])
    connector.connector_worker.inbox.append(b"HB:c/c")  # Its reader renews it.
    sent(connector)
    assert connector.share("c", ["s"])


def test_heartbeats_of_readers_renew_the_lease(connector: Any) -> None:
    connector.connector_worker._reqs_to_send = dict.fromkeys("abc", 0.0)
    connector.connector_worker.inbox.append(b"HB:b/s,b/t,c,a/a")
    assert sent(connector) == set()


def answers(connector: Any, *attempts: Any) -> None:
    """Handshakes take their turn among `attempts`: a future, or an error that they fail with at once."""

    def future(attempt: Any) -> Future[Any]:
        if isinstance(attempt, Future):
            return attempt
        failed: Future[Any] = Future()
        failed.set_exception(attempt)
        return failed

    turns = map(future, attempts)
    connector.connector_worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *args: next(turns))


def test_a_failed_handshake_is_told_once_and_then_tried_again_until_it_is_complete(connector: Any) -> None:
    first, second = Future[Any](), Future[Any]()
    answers(connector, first, second)
    assert connector.connect(*PEER) == connector.connect(*PEER) == UNDER_WAY
    first.set_exception(RuntimeError("another KV layout"))
    assert connector.connect(*PEER) == "another KV layout"
    assert connector.connect(*PEER) == UNDER_WAY
    second.set_result(({(0, 0): "agent"}, 0.0))
    assert connector.connect(*PEER) == connector.connect(*PEER) == ""
    assert connector._handshakes == {}
    assert connector._stamps == {"p0": 8192}, "the rank that this rank reads from"


def test_a_handshake_that_keeps_failing_is_logged_when_the_reason_changes(
    connector: Any, module: ModuleType, monkeypatch: Any
) -> None:
    """Without a traceback: the router tries every 5 s."""
    lines: list[str] = []
    monkeypatch.setattr(module.log, "error", lambda text, *parts: lines.append(text % parts))
    answers(connector, zmq.Again(), zmq.Again(), *[RuntimeError("another KV layout")] * 2)
    for _ in range(4):
        assert connector.connect(*PEER)
    assert ["p0" in line for line in lines] == [True, True]
    assert "another KV layout" in lines[1]
    connector.connector_worker._log_failure(failure_type="transfer_failed", req_id="r")
    assert connector.failures == ["transfer_failed"], "all else is vLLM's own"


@pytest.mark.parametrize("state", ["DONE", "ERR"])
def test_a_first_read_takes_the_null_block_and_then_its_stamp(connector: Any, state: str) -> None:
    """Its failure is told in words."""
    worker, agent = connector.connector_worker, connector._agent
    worker.num_blocks = worker._physical_blocks_per_logical_kv_block = 1
    worker.src_xfer_handles_by_block_size, worker.dst_xfer_side_handles = {16: 1}, {"p0": {1: 2}}
    worker._compute_desc_ids = lambda blocks, count, *_: [blocks, count]
    worker._remote_agents["p0"] = {(0, 1): "agent of p0"}
    connector._stamps["p0"] = 4096
    agent.states["transfer"] = state
    agent.transfer = agent.check_xfer_state
    fetched: list[Any] = []
    transfers = SimpleNamespace(are_late=lambda: False)
    no_stamp = SimpleNamespace(rows=lambda patience_s: [TimeoutError("no stamp")], transfers=transfers)
    connector._warmed.fetch = lambda *args: fetched.append(args[1]) or no_stamp
    assert connector.warm("p0") == ("no stamp" if state == "DONE" else "the transfer ended as ERR")
    assert agent.made == [("READ", 1, [([0],), 1], 2, [([0, 1],), 64], b"")]
    peer = PeerTable(agent="agent of p0", address=4096, num_blocks=32)
    assert fetched == ([[(peer, (0,))]] if state == "DONE" else [])
    assert connector.warm("unknown") != "", "an error on the way is an answer, too"


def received(connector: Any) -> tuple[set[str], set[int]]:
    """What one step of the engine may use, and the blocks it must not."""
    finished: set[str] = connector.get_finished(set())[1]
    return finished, connector.get_block_ids_with_load_errors()


def test_a_read_is_judged_when_it_is_done_and_then_the_peer_is_told(connector: Any, judged: Judge) -> None:
    """Told earlier, by the transfer itself, the peer could give the blocks to another prompt before they are judged."""
    vllms, agent = connector.connector_worker.nixl_wrapper, connector._agent
    agent.transfer = lambda handle: "PROC"
    vllms.transfer(vllms.make_prepped_xfer("READ", 1, [2], 3, [4], notif_msg=b"p-a:2"))
    connector.get_finished(set())
    assert agent.made == [("READ", 1, [2], 3, [4], b"")]
    reads(connector, "a")
    assert received(connector) == (set(), set())
    assert (judged.asked, agent.told) == ([], [])
    agent.states["read a"] = "DONE"
    connector._stamps["p0"] = 4096
    assert received(connector) == ({"a"}, set())
    peer = PeerTable(agent="agent of p0", address=4096, num_blocks=32)
    assert judged.asked == [([(claim("a"), peer)], connector._fetched, connector._digests, agent)]
    assert agent.told == [("agent of p0", b"p-a:2")]
    assert (connector.handoffs.checked, connector.handoffs.refused, connector._claims) == (1, 0, {})


def test_a_refused_read_fails_its_own_request_only(connector: Any, judged: Judge) -> None:
    judged.refusals = {"p-b": "block 0 of 3 is not this prompt's"}
    for name in "abc":
        reads(connector, name, state="DONE")
    connector.connector_worker._recving_metadata["b"].local_block_ids = ([7, 8],)
    assert received(connector) == ({"a", "b", "c"}, {7, 8})
    assert [reads for reads, *_ in judged.asked] == [[(claim(name), None) for name in "abc"]], "all together"
    assert [notice for _, notice in connector.connector_worker.nixl_wrapper.told] == [b"p-a:2", b"p-c:2"]
    assert (connector.handoffs.refused, connector._claims) == (1, {})
    connector.get_kv_connector_stats()
    found = connector.figures()
    assert [found[name] for name in ("count", "bytes", "failed", "checked", "refused")] == [3, 3, 1, 3, 1]


@pytest.mark.parametrize(("state", "claimed", "refused"), [("DONE", False, 1), ("ERR", True, 0)])
def test_what_failed_or_was_never_claimed_is_not_judged(
    connector: Any, judged: Judge, state: str, claimed: bool, refused: int
) -> None:
    """It is not used either."""
    reads(connector, "a", state=state, claimed=claimed)
    assert received(connector) == ({"a"}, {1, 2, 3})
    assert ([reads for reads, *_ in judged.asked if reads], connector._claims) == ([], {})
    assert connector.handoffs.refused == refused


def test_no_step_waits_for_a_judgement(connector: Any, judged: Judge) -> None:
    """Reads that end meanwhile are judged by the next one. A read that failed is told at once."""
    judged.is_late, judged.refusals = True, {"p-b": "block 0 of 3 is not this prompt's"}
    told = connector.connector_worker.nixl_wrapper.told
    reads(connector, "a", state="DONE")
    assert received(connector) == (set(), set())
    for name, state in (("b", "DONE"), ("c", "DONE"), ("d", "ERR")):
        reads(connector, name, state=state)
    assert received(connector) == ({"d"}, {1, 2, 3})
    assert received(connector) == (set(), set())
    assert (len(judged.asked), told) == (1, [])
    judged.is_late = False
    assert received(connector) == ({"a", "b", "c"}, {1, 2, 3})
    assert [[claim.request_id for claim, _ in reads] for reads, *_ in judged.asked] == [["p-a"], ["p-b", "p-c"]]
    assert [notice for _, notice in told] == [b"p-a:2", b"p-c:2"]
    assert (connector._claims, connector._unjudged, connector._judgement) == ({}, [], None)


def test_rows_that_may_still_come_change_no_later_judgement(connector: Any, judged: Judge) -> None:
    """The next one has another table, and the old one is used again when nothing comes into it any more."""
    worker, first = connector.connector_worker, connector._fetched
    worker._registered_descs = []
    connector._agent.register_memory = lambda *args: "registered"
    tables = []
    for name, are_rows_late in (("a", True), ("b", True), ("c", False), ("d", False)):
        judged.are_rows_late = are_rows_late
        reads(connector, name, state="DONE")
        assert received(connector)[0] == {name}
        tables.append(judged.asked[-1][1])
    assert tables[0] is first
    assert len({id(table) for table in tables}) == 3, "two were late, so there are three"
    assert tables[2] is tables[3]
    assert len(worker._registered_descs) == 2
    assert (len(connector._tables), connector._late) == (2, [])
    judged.are_rows_late = True
    reads(connector, "e", state="DONE")
    assert received(connector)[0] == {"e"}
    assert len(worker._registered_descs) == 2, "a free one was taken"


def test_a_claim_that_comes_meanwhile_is_of_no_earlier_read(connector: Any, judged: Judge) -> None:
    judged.is_late = True
    reads(connector, "a", state="DONE", claimed=False)
    reads(connector, "b", state="DONE")
    assert received(connector) == (set(), set())
    connector._claims["a"] = claim("a")
    judged.is_late = False
    assert received(connector) == ({"a", "b"}, {1, 2, 3})
    assert connector.handoffs.refused == 1


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
    meta.owned = [Owned((3, 1), stamps(100, 101)), Owned((6,), stamps(204))]
    meta.signed = [(1, 6)]
    connector.handle_preemptions(meta)
    connector.start_load_kv(None)
    expected = [[0, 0], [101, 0], [0, 0], [100, 0], [0, 0], [0, 0], [204, 0], [0, 0]]
    assert seen == [expected]
    connector.wait_for_save()
    expected[1][1] = expected[6][1] = 5
    assert connector.table.rows.tolist() == expected
    # Later prompts begin with block 1: what its bits were when it was computed stays. They wait for the device once.
    meta.signed = [(1, 3, 6), (1, 3, 2)]
    asked: list[Any] = []
    connector._digests = lambda blocks: asked.append(tuple(blocks)) or np.array([6] * len(blocks), np.uint64)
    connector.wait_for_save()
    assert asked == [(3, 2)]
    expected[3][1] = expected[2][1] = 6
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
    output.kv_connector_metadata.owned = [Owned((3,), stamps(100))]
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
    meta.stamps = {"a": STAMPS, "aborted": STAMPS}
    worker.start_load_kv = lambda meta: None
    connector.start_load_kv(None)
    assert connector._claims == {"a": claim("a")}


@pytest.mark.parametrize("ours", [[9], [8, 9], [7, 8, 9]])
def test_claims_are_on_the_blocks_that_vllm_reads(connector: Any, module: ModuleType, ours: list[int]) -> None:
    """It reads the last ones, if the first ones are here already."""
    worker = connector.connector_worker
    reads(connector, "a", claimed=False)
    read = worker._recving_metadata["a"]
    read.local_block_ids = (ours,)
    connector._connector_metadata = meta = module.HandoffMetadata()
    meta.reqs_to_recv, meta.stamps = {"a": read}, {"a": STAMPS}
    worker.start_load_kv = lambda meta: None
    connector.start_load_kv(None)
    found = connector._claims["a"]
    (mine,), (theirs,) = worker._apply_prefix_caching((ours,), read.remote.block_ids, 1)
    assert (found.ours, found.theirs) == (tuple(mine), tuple(theirs))
    assert (found.first, found.stamps) == (3 - len(ours), stamps(77, 78, 79)[-8 * len(ours) :])


def test_the_condition_of_handshakes_is_ours(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "condition", lambda worker, make_hash, facts: f"{make_hash.__name__} {facts}")
    payload = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata").NixlHandshakePayload
    worker = connector.connector_worker
    worker.xfer_handshake_metadata = payload("vllm's", b"agent")
    connector.bind({"threads": 2})
    assert worker.compat_hash == "compute_nixl_compatibility_hash {'threads': 2}"
    assert worker.xfer_handshake_metadata == payload(worker.compat_hash, b"agent")


def test_memory_of_the_dead_is_let_go_between_reads_only(connector: Any, module: ModuleType, monkeypatch: Any) -> None:
    dropped: list[Any] = []
    mappings = SimpleNamespace(pids=lambda: {8, 7}, drop=dropped.append)
    monkeypatch.setattr(module.ucx_mappings, "of_this_process", lambda: mappings)
    assert connector.mapped_pids() == [7, 8]
    read = Read(sides=(1, 2), ours=(), theirs=(), running=deque([1]))
    connector.connector_worker._recving_transfers["r"] = [read]
    assert not connector.unmap([7])
    read.running.clear()  # A read that only waits to be posted touches no memory.
    connector.connector_worker._handshake_futures["p1"] = Future()
    assert not connector.unmap([7])
    connector.connector_worker._handshake_futures.clear()
    assert not dropped
    assert connector.unmap([7])
    assert dropped == [[7]]


# A colocated node: samples read from prompts of the same engine.

WORDS = 6


@pytest.fixture
def own(connector: Any) -> Any:
    """A connector of a colocated node. The blocks of "a", 4, 6 and 5, are stamped, and block b of a region holds b and
    the number of its region."""
    torch, digest = load("torch"), load("corun.node.kv.digest")
    numbers = torch.arange(8, dtype=torch.int32)[:, None].expand(8, WORDS)
    connector._regions = [numbers + 100 * layer for layer in (1, 2)]
    connector._digests = digest.KvDigest(connector._regions).of
    connector.table.own((4, 6, 5), STAMPS)
    connector.seen = []
    connector.connector_worker.start_load_kv = connector.seen.append
    return connector


def step(module: ModuleType, connector: Any, **orders: Any) -> Any:
    """Run a step of the worker with these orders, up to its forward pass, and return the orders that vLLM gets."""
    meta = module.HandoffMetadata()
    vars(meta).update(orders)
    connector._connector_metadata = meta
    connector.handle_preemptions(meta)
    connector.start_load_kv(None)
    return connector.seen[-1]


def sample(ours: list[int], *, name: str = "a", engine_id: str = "self", theirs: list[int] | None = None) -> Any:
    """A sample's order to read three blocks of a prompt, or the last ones."""
    remote = SimpleNamespace(
        block_ids=([4, 6, 5] if theirs is None else theirs,), engine_id=engine_id, request_id=name, host="h", port=1
    )
    return SimpleNamespace(remote=remote, local_block_ids=(ours,) if ours else [])


def blocks(connector: Any) -> list[list[int]]:
    """What each region's blocks hold, one number each; all words of a block are equal."""
    assert all((region == region[:, :1]).all() for region in connector._regions)
    return [region[:, 0].tolist() for region in connector._regions]


def test_kv_of_the_engines_own_prompts_is_copied_in_the_step_that_orders_it(own: Any, module: ModuleType) -> None:
    """Every layer, and nothing else. vLLM would connect to itself, so it gets no order; the reader is done at once."""
    before = blocks(own)
    given = step(module, own, reqs_to_recv={"s": sample([1, 7, 2])}, stamps={"s": STAMPS})
    assert given.reqs_to_recv == {}
    moved = [[0, 4, 5, 3, 4, 5, 6, 6], [0, 4, 5, 3, 4, 5, 6, 6]]
    assert blocks(own) == [[100 * layer + block for block in held] for layer, held in enumerate(moved, start=1)]
    assert blocks(own) != before
    assert own.get_finished(set()) == ({"a"}, {"s"}), "and the prompt, which has no other reader, is let go"
    assert own.get_finished(set()) == (set(), set())
    assert own.get_block_ids_with_load_errors() == set()
    assert (own._claims, own.connector_worker._recving_metadata, own._agent.told) == ({}, {}, [])
    assert (own.handoffs.prompt_tokens, own.handoffs.refused, own.handoffs.checked) == (48, 0, 0)


def test_reads_from_peers_go_to_vllm_as_before(own: Any, module: ModuleType) -> None:
    theirs = sample([3], engine_id="p0", theirs=[7])
    given = step(module, own, reqs_to_recv={"s": sample([1, 7, 2]), "t": theirs}, stamps={"s": STAMPS, "t": stamps(5)})
    assert given.reqs_to_recv == {"t": theirs}
    assert set(own._claims) == {"s", "t"}
    assert own.get_finished(set())[1] == {"s"}
    assert set(own._claims) == {"t"}


def test_only_the_blocks_that_a_sample_has_not_are_copied(own: Any, module: ModuleType) -> None:
    step(module, own, reqs_to_recv={"s": sample([1])}, stamps={"s": STAMPS})
    assert blocks(own)[0] == [100, 105, 102, 103, 104, 105, 106, 107]
    assert own.get_finished(set())[1] == {"s"}
    assert (own.handoffs.shared_tokens, own.handoffs.prompt_tokens) == (32, 48)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Its lease has ended, and the step's orders give a block to another prompt, or to a sample.
    "another prompt's": ({"owned": [Owned((6,), stamps(99))]}, "block 1 of 3 is not this prompt's"),
    "a sample's": ({"owned": [Owned((6,), stamps(0))]}, "block 1 of 3 is not this prompt's"),
    "other tokens'": ({"stamps": {"s": stamps(77, 78, 80)}}, "block 2 of 3 is not this prompt's"),
    "nobody's": ({"stamps": {}}, "nobody said whose KV it must be"),
    "more blocks than there are": (
        {"reqs_to_recv": {"s": sample([1, 7, 2], theirs=[4, 6, 8])}},
        "were offered for",
    ),
    "fewer blocks than asked for": ({"reqs_to_recv": {"s": sample([1, 7, 2], theirs=[4, 6])}}, "were offered for"),
}


@pytest.mark.parametrize(("orders", "why"), REFUSED.values(), ids=REFUSED)
def test_kv_that_is_not_the_prompts_is_refused(
    own: Any, module: ModuleType, caplog: pytest.LogCaptureFixture, orders: dict[str, Any], why: str
) -> None:
    """Its blocks are marked as not loaded, so the sample ends and runs elsewhere. The prompt's lease goes on."""
    step(module, own, **{"reqs_to_recv": {"s": sample([1, 7, 2])}, "stamps": {"s": STAMPS}, **orders})
    assert own.get_finished(set()) == (set(), {"s"})
    assert own.get_block_ids_with_load_errors() == {1, 7, 2}
    assert why in caplog.text
    assert own.get_finished(set()) == (set(), set())
    assert (own._copied, own._claims, own.connector_worker._recving_metadata) == (set(), {}, {})
    assert own.handoffs.refused == 1


def test_bits_of_checked_prompts_are_compared_after_the_copy(own: Any, module: ModuleType) -> None:
    own.table.sign((4, 6, 5), own._digests((4, 6, 5)))
    step(module, own, reqs_to_recv={"s": sample([1, 7, 2])}, stamps={"s": STAMPS})
    assert (own.handoffs.checked, own.handoffs.refused) == (1, 0)
    own._regions[1][6, 3] += 1
    step(module, own, reqs_to_recv={"t": sample([1, 7, 2])}, stamps={"t": STAMPS})
    assert (own.handoffs.checked, own.handoffs.refused) == (2, 1)
    assert own.get_block_ids_with_load_errors() == {1, 7, 2}


def test_a_prompt_with_several_readers_is_let_go_after_the_last(own: Any, module: ModuleType) -> None:
    """The first has the prompt's own name, and one reads from another engine."""
    assert own.share("a", ["s", "t"])
    step(module, own, reqs_to_recv={"1": sample([1, 7, 2], name="a/s")}, stamps={"1": STAMPS})
    assert own.get_finished(set()) == (set(), {"1"})
    own.connector_worker.inbox.append(b"a/t:2")
    assert own.get_finished(set()) == (set(), set())
    step(module, own, reqs_to_recv={"2": sample([1, 7, 2])}, stamps={"2": STAMPS})
    assert own.get_finished(set()) == ({"a"}, {"2"})
    assert own._readers == own._released == {}


def test_a_sample_that_ended_before_it_read_only_lets_its_prompt_go(own: Any, module: ModuleType) -> None:
    before = blocks(own)
    given = step(module, own, reqs_to_recv={"s": sample([])}, stamps={"s": STAMPS})
    assert given.reqs_to_recv == {}
    assert own.get_finished(set()) == ({"a"}, set())
    assert (blocks(own), own._claims, own.connector_worker._recving_metadata) == (before, {}, {})


def test_samples_that_wait_renew_the_leases_of_own_prompts(own: Any, module: ModuleType) -> None:
    """Without a connection to itself, and without a change to what vLLM's scheduler goes on to use."""
    worker = own.connector_worker
    worker._reqs_to_send = dict.fromkeys("abc", 0.0)
    beats = {name: SimpleNamespace(req_ids={"a/s", "b"}) for name in ("self", "p0")}
    kept = {name: set(beat.req_ids) for name, beat in beats.items()}
    given = step(module, own, heartbeat_by_engine=beats)
    assert given.heartbeat_by_engine == {"p0": beats["p0"]}
    assert {name: beat.req_ids for name, beat in beats.items()} == kept, "the scheduler's half owns it"
    assert [name for name, until in worker._reqs_to_send.items() if until > 0] == ["a", "b"]


@pytest.mark.parametrize("both", [True, False])
def test_blocks_that_a_sample_gets_are_no_prompts_any_more(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, both: bool
) -> None:
    """A sample reads into some, from the order to read on, and decodes into others. A prompt whose lease ended had them
    before, and its stamps would go on to say that they hold its KV."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    prefills = load("corun.node.kv.stamps").Prefills(16)
    made: Any = object.__new__(module.CorunNixlConnector)
    made._prefills, made._has_both = prefills, both
    asked = SimpleNamespace(kv_transfer_params={"corun_stamps": STAMPS})
    made.connector_scheduler = SimpleNamespace(
        _reqs_need_recv={"t": (asked, ([3, 1],)), "gone": (asked, [])},
        build_connector_meta=lambda output: nixl.NixlConnectorMetadata(),
    )
    params = {"do_remote_decode": True, "corun_stamps": stamps(7)}
    prompt = SimpleNamespace(request_id="p", kv_transfer_params=params, num_computed_tokens=0, num_prompt_tokens=9)
    prefills.begin(prompt)
    cached = SimpleNamespace(req_ids=["u", "v"], new_block_ids=[([5],), None], resumed_req_ids=set())
    news = [SimpleNamespace(req_id="p", block_ids=([2],)), SimpleNamespace(req_id="s", block_ids=([6, 4],))]
    output = SimpleNamespace(
        scheduled_new_reqs=news, scheduled_cached_reqs=cached, num_scheduled_tokens={"p": 9, "s": 1, "u": 1, "v": 1}
    )
    owned = made.build_connector_meta(output).owned
    assert owned == [Owned((2,), stamps(7)), *([Owned((3, 1, 6, 4, 5), bytes(40))] if both else [])]
    table = StampTable(8)
    table.own(range(8), stamps(*range(10, 18)))
    for one in owned:
        table.own(one.blocks, one.stamps)
    assert table.rows[[1, 3, 4, 5, 6], 0].any() != both
