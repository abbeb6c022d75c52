"""Samples of a colocated node that read from its own prompts: copies, their check, and the prompts' leases."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corun.node.kv.handle import owner
from corun.node.kv.stamps import Owned, Prefills, StampTable
from corun.node.kv.stamps import stamps as block_stamps
from corun.types import NodeRef
from tests.loading import load
from tests.node.worker_half import STAMPS, stamps, step

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
    return connector


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


@pytest.mark.parametrize("others", [[], ["t"]])
def test_a_sample_that_came_with_its_prompt_is_none_of_the_readers(
    own: Any, module: ModuleType, others: list[str]
) -> None:
    """It reads before anybody knows who else will, and others may wish to compare the prompt's bits."""
    step(module, own, reqs_to_recv={"s": sample([1, 7, 2], name="a/s")}, stamps={"s": STAMPS})
    assert own.get_finished(set()) == (set(), {"s"})
    assert own.share("a", others)
    own.release("a", "a")
    if others:
        assert own.get_finished(set()) == (set(), set())
        own.connector_worker.inbox.append(b"a/t:2")
    assert own.get_finished(set()) == ({"a"}, set())
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
    prefills = Prefills(16)
    made: Any = object.__new__(module.CorunNixlConnector)
    made._prefills, made._has_both, made._in_place = prefills, both, {}
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


def test_a_prompts_stamps_are_those_of_all_who_computed_its_blocks(own: Any) -> None:
    """What a sample that came with its prompt must find: of earlier prompts, the blocks that were cached."""
    node = NodeRef(node_id="c0-prefill", generation="a" * 16)
    own._prefills = prefills = Prefills(16)
    prompts = []
    for name, length, computed in (("first", 40, 0), ("second", 33, 16)):
        tokens = [*range(length)]
        params = {"do_remote_decode": True, "corun_stamps": made_for(tokens, (name, -(-length // 16)), node=node)}
        prompts.append(
            SimpleNamespace(
                request_id=name,
                prompt_token_ids=tokens,
                kv_transfer_params=params,
                num_computed_tokens=computed,
                num_prompt_tokens=length,
            )
        )
        prefills.begin(prompts[-1])
    prefills.give("first", [4, 6, 5], anew=False)
    prefills.give("second", [4, 7, 2], anew=False)
    assert own.stamps_of(prompts[0], ([4, 6, 5],), node) is prompts[0].kv_transfer_params["corun_stamps"]
    found = own.stamps_of(prompts[1], ([4, 7, 2],), node)
    assert found == made_for(prompts[1].prompt_token_ids, ("first", 1), ("second", 2), node=node)
    assert found != prompts[1].kv_transfer_params["corun_stamps"]


def made_for(tokens: list[int], *owners: tuple[str, int], node: NodeRef) -> bytes:
    return block_stamps([(owner(name, node), count) for name, count in owners], tokens, 16)


def test_a_sample_that_was_never_told_of_its_prompts_kv_releases_nothing(own: Any, module: ModuleType) -> None:
    """It came with its prompt and was aborted before the prompt began, for whose KV another one waits."""
    step(module, own, reqs_to_recv={"s": sample([], name="q/s", theirs=[])})
    own.connector_worker._reqs_to_send["q"] = 10.0**9
    assert own.share("q", ["another"])
    assert own.get_finished(set()) == (set(), set())
    assert "q" in own.connector_worker._reqs_to_send


@pytest.mark.parametrize("external", [5, 0])
def test_blocks_that_a_sample_reads_in_place_keep_their_stamps_and_are_not_copied(
    module: ModuleType, external: int
) -> None:
    """Others may read the prompt yet. vLLM would order all blocks that its cache cannot find, here none."""
    nixl = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
    reads: dict[str, Any] = {}
    made: Any = object.__new__(module.CorunNixlConnector)
    made._prefills, made._has_both, made._in_place = Prefills(16), True, {}
    made.connector_scheduler = SimpleNamespace(
        _reqs_need_recv=reads,
        _stop_heartbeat=lambda name: None,
        update_state_after_alloc=lambda one, held, count: reads.update(
            {one.request_id: (one, (held.get_block_ids()[0] if count else [],))}
        ),
        build_connector_meta=lambda output: nixl.NixlConnectorMetadata(),
    )
    held = SimpleNamespace(
        blocks=([SimpleNamespace(block_id=number) for number in (4, 6, 7)],), get_block_ids=lambda: ([4, 6, 7],)
    )
    one = SimpleNamespace(request_id="s", kv_transfer_params={"corun_in_place": 2, "corun_at_once": True})
    made.update_state_after_alloc(one, held, external)
    assert reads["s"][1][0] == ([7] if external else [])
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="s", block_ids=([4, 6, 7],))],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["s"], new_block_ids=[([9],)], resumed_req_ids=set()),
        num_scheduled_tokens={"s": 1},
    )
    (owned,) = made.build_connector_meta(output).owned
    assert set(owned.blocks) == {7, 9}
    assert made._in_place == {}


def test_a_sample_that_ends_before_it_begins_leaves_nothing_in_place(module: ModuleType) -> None:
    made: Any = object.__new__(module.CorunNixlConnector)
    made._prefills, made._in_place = Prefills(16), {"s": 2, "t": 1}
    made.connector_scheduler = SimpleNamespace(request_finished=lambda *_: (False, None))
    ended = SimpleNamespace(request_id="s", kv_transfer_params={"corun_targets": [1]})
    made.request_finished_all_groups(ended, ([4],))
    assert made._in_place == {"t": 1}
