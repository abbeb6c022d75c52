"""Contract admission and what a node says of itself. Life and loss of nodes: test_faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from corun.config.fields import RouterConfig
from corun.contract import pair_fingerprint
from corun.errors import (
    ContractMismatchError,
    InvalidArgumentError,
    NotFoundError,
    StaleGenerationError,
    UnavailableError,
)
from corun.node.certificate import Certificate
from corun.params import SamplingParams
from corun.receipt import certificates_digest
from corun.testing.cluster import WAIT_S, router_config
from corun.testing.model import contract
from corun.types import Freedom, FreedomStatus, NixlEndpoint, NodeInfo, NodeLoad, NodeRef, NodeRole, NodeState
from router.nodes import admission
from router.nodes.admission import MAX_OFFERED, ClusterContract
from router.nodes.registry import Registry
from router.placement import PREFILLS_IN_FLIGHT
from tests.answers import settle
from tests.clusters import cluster, generate

P, D = NodeRole.PREFILL, NodeRole.DECODE
ENDPOINT = NixlEndpoint(engine_id="e", host="h", port=1, tp_size=1)


def info(model: str, node_id: str = "d1", role: NodeRole = D) -> NodeInfo:
    return NodeInfo(
        ref=NodeRef(node_id=node_id, generation="0" * 16),
        role=role,
        address="127.0.0.1:1",
        contract_json=contract(role, model).canonical_json(),
        slots=8 if role is D else 0,
        kv_blocks=10,
        block_size=16,
        max_model_len=100,
        vocab_size=256,
        nixl=ENDPOINT if role is P else None,
        model=model,
    )


def test_the_first_node_of_each_role_sets_the_contract_and_a_differing_field_is_named(model: str) -> None:
    pinned = ClusterContract()
    pinned.admit(contract(D, model, slots=8))
    assert pinned.fingerprint == ""
    with pytest.raises(ContractMismatchError) as caught:
        pinned.admit(contract(D, model, slots=16, driver="2"))
    assert caught.value.differences == {"decode.slots": ("8", "16"), "model.driver": ("", "2")}
    with pytest.raises(ContractMismatchError) as caught:
        pinned.admit(contract(P, model, dtype="bfloat16"))  # Roles share the part of the model only.
    assert caught.value.differences == {"model.dtype": ("float32", "bfloat16")}
    pinned.admit(contract(P, model))
    assert pinned.fingerprint == pair_fingerprint(contract(P, model), contract(D, model, slots=8))
    pinned.admit(contract(D, model, slots=8))


def test_an_expected_fingerprint_waits_for_the_pair_that_gives_it(model: str) -> None:
    """Whoever comes first: a wrong node must not pin the contract for the router's life."""
    right, wrong = contract(D, model), contract(D, model, slots=16)
    expected, other = (pair_fingerprint(contract(P, model), decode) for decode in (right, wrong))
    pinned = ClusterContract(expected)
    assert "waits for a prefill node" in pinned.admit(wrong)
    with pytest.raises(ContractMismatchError) as caught:
        pinned.admit(contract(P, model))
    assert caught.value.differences == {"fingerprint": (expected, other)}
    assert expected in str(caught.value)
    assert other in str(caught.value)
    with pytest.raises(ContractMismatchError, match=other):
        pinned.admit(wrong)
    assert pinned.fingerprint == ""
    assert pinned.admit(right) == ""
    assert pinned.fingerprint == expected
    assert pinned.admit(contract(P, model)) == ""
    with pytest.raises(ContractMismatchError) as caught:
        pinned.admit(wrong)
    assert caught.value.differences == {"decode.slots": ("8", "16")}


def test_contracts_of_other_models_cannot_give_the_expected_fingerprint(model: str) -> None:
    pinned = ClusterContract(pair_fingerprint(contract(P, model), contract(D, model)))
    assert pinned.admit(contract(P, model))
    with pytest.raises(ContractMismatchError) as caught:
        pinned.admit(contract(D, model, driver="2"))
    assert caught.value.differences == {"model.driver": ("", "2")}
    assert pinned.admit(contract(D, model)) == ""


def test_few_contracts_are_remembered(model: str) -> None:
    pinned = ClusterContract("e" * 64)
    for slots in range(1, 200):
        pinned.admit(contract(D, model, slots=slots))
    assert len(pinned._offered) == MAX_OFFERED


async def test_a_router_that_expects_a_fingerprint_serves_with_no_other(model: str) -> None:
    expected = pair_fingerprint(contract(P, model), contract(D, model))
    async with cluster(model, prefills=0, decodes=0, expected_fingerprint=expected) as fake:
        await fake.add_decode("wrong", slots=16)
        await fake.until(lambda: "waits for a prefill node" in fake.detail("wrong"))
        assert fake.state("wrong") is NodeState.JOINING
        await fake.add_prefill("p1")
        await fake.until(lambda: fake.state("p1") is NodeState.REFUSED)
        assert expected in fake.detail("p1")
        await fake.add_decode("d1")
        await fake.ready("p1", "d1")
        assert fake.router.registry.contract.fingerprint == expected
        await fake.until(lambda: fake.state("wrong") is NodeState.REFUSED)
        (output,) = await generate(fake, (5, 6, 7), seed=1)
        assert output.receipt.fingerprint == expected


@pytest.mark.parametrize("value", ["f" * 63, "F" * 64, "f" * 65, "x"])
def test_a_fingerprint_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match="64 hexadecimal digits") as caught:
        RouterConfig(expected_fingerprint=value)
    assert caught.value.field == "expected_fingerprint"


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"slots": 0}, "node.slots"),
    ({"vocab_size": 0}, "node.vocab_size"),
    ({"address": ""}, "node.address"),
    ({"role": P, "slots": 0}, "node.nixl"),
    ({"role": P, "nixl": ENDPOINT}, "node.contract_json"),  # It is that of a decode node.
    ({"contract_json": "{}"}, "contract"),
    ({"contract_json": "[" * 60_000}, "contract"),  # Too deep to read.
    ({"contract_json": "[" * 100_000}, "node.contract_json"),
    ({"ref": NodeRef(node_id="", generation="1")}, "node.ref.node_id"),
    ({"ref": NodeRef(node_id="d1\n2026 ERROR forged", generation="0" * 16)}, "node.ref.node_id"),
    ({"ref": NodeRef(node_id="d" * 129, generation="0" * 16)}, "node.ref.node_id"),
    ({"ref": NodeRef(node_id="d1", generation="\x1b[2J")}, "node.ref.generation"),
    ({"address": "127.0.0.1:1\r\n"}, "node.address"),
    ({"finding": "x" * 100_000}, "node.finding"),
    ({"freedoms": (FreedomStatus(name="rows", refused="x" * 100_000),)}, "node.freedoms"),
    ({"certificate": "x" * 100_000}, "node.certificate"),
]


@pytest.mark.parametrize(("changes", "field"), UNUSABLE)
async def test_a_description_that_lacks_something_or_says_too_much_is_refused(
    registry: Registry, model: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        registry.register(replace(info(model), **changes))
    assert caught.value.field.startswith(field)
    assert all((s.state, s.detail) == (NodeState.REFUSED, str(caught.value)) for s in registry.statuses())


async def test_a_node_that_failed_its_self_test_is_refused_and_shown_for_a_time(
    registry: Registry, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnavailableError, match="the logits moved"):
        registry.register(replace(info(model), finding="the logits moved"))
    (status,) = registry.statuses()
    assert status.state is NodeState.REFUSED
    assert "the logits moved" in status.detail
    assert registry.contract.fingerprint == ""
    monkeypatch.setattr(admission, "FORGET_AFTER_S", 0.0)
    assert registry.statuses() == ()


async def test_a_node_that_registers_again_may_have_lost_a_freedom_and_nothing_else(
    registry: Registry, model: str
) -> None:
    packs = (FreedomStatus(name="packed"),)
    node = replace(info(model, "p1", P), freedoms=packs, certificate="a" * 64, step_tokens=1000)
    registry.register(node)
    room = registry._prefills["p1"].room
    for _ in range(PREFILLS_IN_FLIGHT):
        room.take(100)
    assert room.has_room(100)
    after = replace(node, freedoms=(FreedomStatus(name="packed", refused="other KV"),), certificate="b" * 64)
    registry.register(replace(after, contract_json="{}", address="127.0.0.1:2", kv_blocks=99))
    assert [status.node for status in registry.statuses()] == [after]
    assert not room.has_room(100), "prompts are not packed any more"


async def test_a_finding_in_service_is_in_the_status_and_in_the_receipts_of_what_still_runs(model: str) -> None:
    async with cluster(model) as fake:
        prefill, decode = fake.nodes
        decode.engine.hanging = True
        running = asyncio.ensure_future(generate(fake, "a", SamplingParams(max_tokens=3)))
        await fake.until(lambda: bool(decode.service._running))
        decode.engine._step()
        await fake.until(lambda: decode.drawn_tokens > 0)
        before = prefill.engine.certificate
        prefill.engine.certificate = Certificate.of_ranks(dict.fromkeys((Freedom.PACKED, Freedom.CHUNKS), ""))
        prefill.engine.withdraw("other KV when it runs alone")
        after = prefill.engine.certificate
        await fake.until(lambda: fake.router.registry._prefills[prefill.ref.node_id].info.certificate == after.digest)
        (status,) = [one for one in (await fake.status()).nodes if one.node.role is P]
        assert {one.refused for one in status.node.freedoms} == {"other KV when it runs alone"}
        assert (status.state, status.detail) == (NodeState.JOINING, "other KV when it runs alone")
        decode.engine.hanging = False
        (output,) = await running
        assert output.receipt.certificates == certificates_digest(after.digest, decode.engine.certificate.digest)
        assert after.digest != before.digest


async def test_an_unknown_node_has_to_register(registry: Registry, model: str) -> None:
    node = info(model)
    with pytest.raises(NotFoundError):
        registry.heartbeat(node.ref, NodeLoad(), draining=False)
    registry.register(node)
    registry.heartbeat(node.ref, NodeLoad(), draining=False)
    with pytest.raises(NotFoundError):
        registry.heartbeat(replace(node.ref, generation="1"), NodeLoad(), draining=False)
    assert [status.state for status in registry.statuses()] == [NodeState.JOINING]
    assert registry.missing() == "no prefill node has joined; no decode node is in use (d1 is joining: being prepared)"
    registry.register(replace(node, ref=replace(node.ref, generation="1")))
    with pytest.raises(StaleGenerationError):
        registry.register(node)


async def test_nodes_are_looked_at_again_after_each_change(registry: Registry, model: str) -> None:
    """What was found of them is kept until then."""
    prefill, decode = info(model, "p1", P), info(model, "d1")
    for each in (prefill, decode):
        registry.register(each)
    assert "no prefill node is in use" in registry.missing()
    for node in registry._nodes():
        node.is_open, node.peers = True, {"p1", "d1"}

    def beat(ref: NodeRef, **state: Any) -> None:
        registry.heartbeat(ref, NodeLoad(), **{"draining": False, **state})

    def in_use() -> list[str]:
        return [node.node_id for nodes in registry.in_use() for node in nodes]

    beat(decode.ref)
    assert (registry.missing(), registry.most_tokens(), in_use()) == ("", 160, ["d1", "p1"])
    beat(decode.ref, stuck="it stands")
    assert (registry.most_tokens(), in_use()) == (0, ["p1"])
    assert registry.missing() == "no decode node is in use (d1 is joining: it stands)"
    beat(decode.ref)
    registry.note_fault(registry._prefills["p1"], UnavailableError("no answer"))
    assert (registry.most_tokens(), in_use()) == (0, [])
    assert registry.missing() == "no prefill node is in use (p1 is joining: no answer)"
    beat(prefill.ref)
    assert (registry.missing(), in_use()) == ("", ["d1", "p1"])
    found: list[str] = []
    registry.on_change = lambda: found.append(registry.missing())
    registry.lose(registry._decodes["d1"], "it went")
    assert found == ["no decode node is in use (d1 is lost: it went)"], "who hears of a loss sees it"


async def test_a_sample_that_ends_wakes_no_request_that_waits_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait for a prefill node while samples still decode, and their streams share the loop."""
    looks = Mock(return_value=0.0)
    monkeypatch.setattr("router.nodes.registry.loop_time", looks)
    registry = Registry(router_config(), "r")
    waiting = [asyncio.ensure_future(registry.wait_ready(WAIT_S)) for _ in range(20)]
    for _ in range(10):
        registry.changed()
        await settle()
    assert looks.call_count == len(waiting)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await registry.close()
