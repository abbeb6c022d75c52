"""Checked reads, fingerprints, early release and handshakes, on the real worker half of vLLM's NIXL connector, without
an agent behind it."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import zmq

from corun.node.kv.handshake import UNDER_WAY
from corun.node.kv.judging import Claim
from corun.node.kv.paced_reads import Read
from corun.node.kv.stamps import Owned, PeerTable
from tests.loading import load
from tests.node.worker_half import FOREVER, STAMPS, Judgements, stamps, step

PEER = ("p0", "127.0.0.1", 7000, 2, (4096, 8192))


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
    "a read and a release in one step free once": ([], [([b"b:2"], "b", "b")]),
    "the last of several readers frees": (
        ["s", "t"],
        [([b"b/s:2"], "", ""), ([b"b/b:2"], "", ""), ([b"b/t:2"], "", "b")],
    ),
    "notices of one step count one by one": (["s"], [([b"b/b:2", b"HB:b,c", b"b/s:2", b"c/c:2"], "", "bc")]),
    "a release of one reader leaves the others": (["s"], [([], "b", ""), ([b"b/s:2"], "", "b")]),
    # Its read is acknowledged, or vLLM gives it up, and its router releases it as well.
    "a reader counts once, whatever is said of it": (["s"], [([b"b/s:2", b"b/s:2"], "s", ""), ([], "b", "b")]),
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
    connector.connector_worker.inbox.append(b"a:2")
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


UNREADABLE = (b"\xff:2", b"HB:\xff,b", b"b:\xff", b"b:", b"b", b"", b"b:1", b"b:x", b"b:0")


@pytest.mark.parametrize("notice", UNREADABLE, ids=repr)
def test_a_message_that_cannot_be_read_frees_nothing(connector: Any, notice: bytes) -> None:
    """An error of vLLM's, in the step that finds the message, would end the engine."""
    connector.connector_worker.inbox.append(notice)
    assert sent(connector) == set()
    connector.connector_worker.inbox.append(b"b:2")
    assert sent(connector) == {"b"}


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


def test_a_first_read_that_takes_its_time_holds_up_no_step(
    connector: Any, module: ModuleType, monkeypatch: Any
) -> None:
    """A peer may hang. Memory stays mapped meanwhile; nobody needs to ask for the end of such a read."""
    monkeypatch.setattr(connector, "_null_block", lambda engine_id: "transfer")
    agent = connector._agent
    agent.states["transfer"] = "PROC"
    agent.transfer = agent.check_xfer_state
    assert connector.warm("p0") == connector.warm("p0") == module.UNDER_WAY
    assert not connector.unmap([1])
    agent.states["transfer"] = "ERR"
    assert connector.warm("p0") == "the transfer ended as ERR"
    agent.states["transfer"] = "PROC"
    monkeypatch.setattr(module, "WARM_TIMEOUT_S", 0.0)
    assert connector.warm("p1") == "the transfer did not end within 0 s"
    monkeypatch.setattr(module, "WARM_TIMEOUT_S", 0.01)
    connector.warm("p2")
    time.sleep(0.02)
    assert connector.unmap([1])


def received(connector: Any) -> tuple[set[str], set[int]]:
    """What one step of the engine may use, and the blocks it must not."""
    finished: set[str] = connector.get_finished(set())[1]
    return finished, connector.get_block_ids_with_load_errors()


def test_a_read_is_judged_when_it_is_done_and_then_the_peer_is_told(connector: Any, judged: Judgements) -> None:
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
    ((read, _, digests, given),) = judged.asked
    assert (read, digests, given) == ([(claim("a"), peer)], connector._digests, agent)
    assert agent.told == [("agent of p0", b"p-a:2")]
    assert (connector.handoffs.checked, connector.handoffs.refused, connector._claims) == (1, 0, {})


def test_a_refused_read_fails_its_own_request_only(connector: Any, judged: Judgements) -> None:
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
    connector: Any, judged: Judgements, state: str, claimed: bool, refused: int
) -> None:
    """It is not used either."""
    reads(connector, "a", state=state, claimed=claimed)
    assert received(connector) == ({"a"}, {1, 2, 3})
    assert ([reads for reads, *_ in judged.asked if reads], connector._claims) == ([], {})
    assert connector.handoffs.refused == refused


def test_no_step_waits_for_a_judgement(connector: Any, judged: Judgements) -> None:
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
    assert connector._claims == {}
    assert not connector._judge.is_at_work


def test_a_claim_that_comes_meanwhile_is_of_no_earlier_read(connector: Any, judged: Judgements) -> None:
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
    ordered = connector.connector_worker._recving_metadata
    reads(connector, "a", claimed=False)
    reads(connector, "aborted", claimed=False)
    ordered["aborted"].local_block_ids = []
    step(module, connector, reqs_to_recv={**ordered}, stamps=dict.fromkeys(ordered, STAMPS))
    assert connector._claims == {"a": claim("a")}


def test_nothing_is_remembered_of_a_read_that_was_aborted_before_it_began(connector: Any, module: ModuleType) -> None:
    """vLLM itself tells the peer, and keeps the prompt's block ids for an end that never comes."""
    worker = connector.connector_worker
    reads(connector, "aborted", claimed=False)
    read = worker._recving_metadata.pop("aborted")
    read.local_block_ids, read.tp_size = [], 2
    worker._physical_blocks_per_logical_kv_block, worker._bidirectional_kv_xfer_enabled = 1, False
    worker.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    worker.tp_mappings = {"p0": SimpleNamespace(all_source_ranks=[1], source_ranks_per_group=[[1]])}
    worker.src_xfer_handles_by_block_size, worker.dst_xfer_side_handles = {16: 1}, {"p0": {1: 2}}
    worker.transfer_topo.get_engine_info("p0").remote_tp_size = 2
    worker._ready_requests = queue.Queue()
    worker._send_heartbeats = lambda meta: None
    del worker.start_load_kv
    meta = module.HandoffMetadata()
    meta.reqs_to_recv = {"aborted": read}
    connector._connector_metadata = meta
    connector.start_load_kv(None)
    assert connector._agent.told == [("agent of p0", b"p-aborted:2")]
    assert received(connector) == (set(), set())
    assert worker._recving_metadata == {}


@pytest.mark.parametrize("ours", [[9], [8, 9], [7, 8, 9]])
def test_claims_are_on_the_blocks_that_vllm_reads(connector: Any, module: ModuleType, ours: list[int]) -> None:
    """It reads the last ones, if the first ones are here already."""
    worker = connector.connector_worker
    reads(connector, "a", claimed=False)
    read = worker._recving_metadata["a"]
    read.local_block_ids = (ours,)
    step(module, connector, reqs_to_recv={"a": read}, stamps={"a": STAMPS})
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
