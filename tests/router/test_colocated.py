"""Colocated nodes as a router sees them: a prefill and a decode node with one engine, which come and go together."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from corun.errors import DataLossError, OverloadedError, UnavailableError, from_rpc_error
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.testing.cluster import WAIT_S
from corun.testing.engines import FakeDecodeEngine, expected
from corun.types import GONE_AS_PLANNED, NodeInfo, NodeLoad, NodeRole, NodeState
from corun.v1.decode_service_pb2 import StreamStepsResponse
from corun.v1.prefill_service_pb2 import PrefillRequest, PrefillResponse, ScoreTokensRequest
from corun.v1.prefill_service_pb2_grpc import PrefillServiceStub
from decode_node.service import DecodeRequest, DecodeService, OwnPrompt, StepStream
from prefill_node.service import PrefillService
from router.clock import AwakeClock
from router.nodes.node import Placement
from router.nodes.node_client import DecodeClient, RemoteLease
from router.nodes.registry import Registry
from tests.answers import until
from tests.clusters import FakeCluster, cluster, generate, retries
from tests.router.asking import PARAMS, PROMPT, right
from tests.router.test_placement import NEED
from tests.router.test_registry import info

P, D = NodeRole.PREFILL, NodeRole.DECODE
SIDES = "c0-prefill", "c0-decode"


async def add_colocated(fake: FakeCluster, node_id: str = "c0") -> None:
    """Start a colocated node, and wait until both sides are READY."""
    await fake.add_colocated(node_id)
    await fake.ready(f"{node_id}-prefill", f"{node_id}-decode")


def sides(model: str) -> tuple[NodeInfo, NodeInfo]:
    """Return what the sides of a colocated node tell routers."""
    prefill, decode = (info(model, name, role) for name, role in zip(SIDES, (P, D), strict=True))
    return replace(prefill, engine_id="e"), replace(decode, engine_id="e")


def states(registry: Registry) -> dict[str, tuple[NodeState, str]]:
    return {status.node.ref.node_id: (status.state, status.detail) for status in registry.statuses()}


@pytest.mark.parametrize("first", [0, 1])
async def test_if_one_side_is_lost_so_is_the_other_at_once(registry: Registry, model: str, first: int) -> None:
    for node in (*sides(model), info(model, "d1")):
        registry.register(node)
    registry.lose(registry._nodes()[first], "its process died")
    found = states(registry)
    assert [found[name] for name in SIDES] == [(NodeState.LOST, "its process died")] * 2
    assert found["d1"][0] is NodeState.JOINING
    for node in sides(model):  # It was the network: both come back.
        registry.register(node)
    assert {state for state, _ in states(registry).values()} == {NodeState.JOINING}


async def test_a_new_generation_of_one_side_ends_both_old_ones_and_no_new_one(registry: Registry, model: str) -> None:
    for node in sides(model):
        registry.register(node)
    new = [replace(node, ref=replace(node.ref, generation="1" * 16), engine_id="f") for node in sides(model)]
    registry.register(new[0])
    assert [state for state, _ in states(registry).values()] == [NodeState.JOINING, NodeState.LOST]
    registry.register(new[1])
    assert [state for state, _ in states(registry).values()] == [NodeState.JOINING] * 2


async def test_a_colocated_node_that_drained_is_gone_as_planned_with_both_sides(registry: Registry, model: str) -> None:
    for node in sides(model):
        registry.register(node)
        registry.heartbeat(node.ref, NodeLoad(), draining=True)
    registry.lose(registry._nodes()[1], "its step stream ended")
    assert set(states(registry).values()) == {(NodeState.LOST, GONE_AS_PLANNED)}


@pytest.mark.parametrize("is_lost", [False, True])
async def test_wrong_bits_of_one_side_put_both_out(registry: Registry, model: str, is_lost: bool) -> None:
    prefill, decode = sides(model)
    other = info(model, "d1")
    for node in (prefill, decode, other):
        registry.register(node)
    if is_lost:
        registry.lose(registry._nodes()[0], "no heartbeat")
    registry.quarantine((prefill.ref, other.ref), "a sample")
    assert {state for state, _ in states(registry).values()} == {NodeState.REFUSED}
    for node in (prefill, decode):
        with pytest.raises(DataLossError, match="gave other bits for a sample"):
            registry.heartbeat(node.ref, NodeLoad(), draining=False)


@pytest.mark.parametrize("order", [1, -1])
async def test_a_finding_of_one_side_refuses_both_whichever_comes_first(
    registry: Registry, model: str, order: int
) -> None:
    prefill, decode = sides(model)
    for node in (prefill, replace(decode, finding="the logits moved"))[::order]:
        if node.finding or order < 0:
            with pytest.raises(UnavailableError, match="the logits moved"):
                registry.register(node)
        else:
            registry.register(node)
    found = states(registry)
    assert found["c0-decode"][0] is NodeState.REFUSED
    assert found["c0-prefill"][0] is (NodeState.LOST if order > 0 else NodeState.REFUSED)
    assert all("the logits moved" in detail for _, detail in found.values())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the samples that engines started came with."""
    found: list[str] = []
    start = FakeDecodeEngine.start

    async def noted(engine: FakeDecodeEngine, request: DecodeRequest) -> None:
        found.append("prompt" if isinstance(request.kv, OwnPrompt) else "handle")
        await start(engine, request)

    monkeypatch.setattr(FakeDecodeEngine, "start", noted)
    return found


@pytest.mark.parametrize("n", [1, 3])
async def test_all_samples_of_a_prompt_come_with_it(model: str, started: list[str], n: int) -> None:
    params = SamplingParams(logprobs=True, n=n)
    async with cluster(model, prefills=0, decodes=0) as fake:
        node = await fake.add_colocated("c1")
        await fake.ready("c1-prefill", "c1-decode")
        prefill = node.sides[NodeRole.PREFILL]
        async with prefill.engine.turn:
            call = asyncio.ensure_future(generate(fake, PROMPT, params, seed=9))
            await until(lambda: prefill.service.queued_prompts == n)
        outputs = await call
        assert started == ["prompt"] * n
        assert prefill.engine.prefilled == [tuple(PROMPT)]
        assert [output.token_ids for output in outputs] == [
            expected(PROMPT, params, output.seed)[0] for output in outputs
        ]


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_asks_for_a_prompt_that_another_sample_came_with_gets_its_kv(
    model: str, started: list[str], leaves: bool
) -> None:
    """Also if the other one has read it before anybody knows of the second reader, or has left."""
    async with cluster(model, prefills=0, decodes=0) as fake:
        node = await fake.add_colocated("c1")
        await fake.ready("c1-prefill", "c1-decode")
        prefill = node.sides[NodeRole.PREFILL]
        async with prefill.engine.turn:
            calls = [asyncio.ensure_future(generate(fake, PROMPT, seed=1))]
            await until(lambda: started == ["prompt"])
            calls.append(asyncio.ensure_future(generate(fake, PROMPT, seed=2)))
            await until(lambda: started == ["prompt"] * 2)
            if leaves:
                calls[0].cancel()
                await until(lambda: prefill.service.queued_prompts == 1)
        for seed, call in list(enumerate(calls, start=1))[leaves:]:
            (output,) = await call
            assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), seed)[0]
        assert started == ["prompt"] * 2
        assert prefill.engine.prefilled == [tuple(PROMPT)]


async def test_no_prompt_may_have_the_name_of_a_sample(model: str) -> None:
    """Both sides name requests in one engine, which takes a name for one request."""
    async with cluster(model, prefills=0, decodes=0) as fake:
        await add_colocated(fake)
        node = fake.node("c0")
        node.engine.hanging = True
        call = asyncio.ensure_future(generate(fake, PROMPT, seed=9))
        await until(lambda: node.engine._running)
        (name,) = node.engine._running
        prefill, decode = (agent.info for agent in node.agents)
        async with channel(prefill.address) as link:
            stub: Any = PrefillServiceStub(link)  # type: ignore[no-untyped-call]
            fields: dict[str, Any] = {"request_id": name, "generation": prefill.ref.generation}
            prompt = PrefillRequest(**fields, prompt_token_ids=(1, 2), reader=codec.node_ref_to_proto(decode.ref))
            score = ScoreTokensRequest(**fields, token_ids=(1, 2), num_scored=1)
            for asked in (stub.Prefill(prompt, timeout=WAIT_S), stub.ScoreTokens(score, timeout=WAIT_S)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asked
                assert "request_id" in str(from_rpc_error(refused.value))
        node.engine.hanging = False
        await call


async def test_a_sample_that_cannot_come_with_its_prompt_starts_after_it(model: str, started: list[str]) -> None:
    async with cluster(model, prefills=0, decodes=0) as fake:
        node = await fake.add_colocated("c1")
        await fake.ready("c1-prefill", "c1-decode")
        node.engine.start_errors = [UnavailableError("busy")]
        (output,) = await generate(fake, PROMPT, seed=9)
        assert started == ["prompt", "handle"]
        assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), 9)[0]


@pytest.mark.parametrize("then", ["the client leaves", "the prompt fails", "the node dies"])
async def test_what_came_with_a_prompt_ends_with_it(model: str, started: list[str], then: str) -> None:
    """Nothing is held when the cluster is idle. If the client still waits, the sample runs again."""
    async with cluster(model, prefills=0, decodes=0) as fake:
        for name in ("c1", "c2"):
            await fake.add_colocated(name)
        await fake.ready("c1-prefill", "c1-decode", "c2-prefill", "c2-decode")
        engines = [node.sides[NodeRole.PREFILL].engine for node in fake.nodes]
        async with contextlib.AsyncExitStack() as held:
            for engine in engines:
                await held.enter_async_context(engine.turn)
            call = asyncio.ensure_future(generate(fake, PROMPT, seed=9))
            await until(lambda: started == ["prompt"])
            (busy,) = (node for node in fake.nodes if node.engine._running)
            if then == "the client leaves":
                call.cancel()
                await asyncio.wait((call,))
                await until(lambda: not busy.engine._running)
                return
            if then == "the prompt fails":
                busy.sides[NodeRole.PREFILL].engine.errors = [UnavailableError("no")]
            else:
                await fake.kill(busy.ref.node_id)
        (output,) = await call
        assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), 9)[0]
        assert len(started) == 2


@pytest.mark.parametrize("tells", [True, False])
async def test_a_lease_that_nobody_waits_for_any_more_is_given_back(
    model: str, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    """The client leaves when the node has granted the lease and the router does not know of it yet. The control: if the
    node did not tell, the lease would stay."""
    granted: list[int] = []
    reserve = DecodeService.reserve_with_prompt

    def noted(service: DecodeService, request: PrefillRequest) -> int:
        granted.append(reserve(service, request))
        return granted[-1]

    monkeypatch.setattr(DecodeService, "reserve_with_prompt", noted)
    if not tells:
        monkeypatch.setattr(StepStream, "add_granted", lambda *_: None)
    async with cluster(model, prefills=0, decodes=0) as fake:
        node = await fake.add_colocated("c1")
        await fake.ready("c1-prefill", "c1-decode")
        async with node.sides[NodeRole.PREFILL].engine.turn:
            call = asyncio.ensure_future(generate(fake, PROMPT, seed=9))
            await until(lambda: len(granted) == 1)
            assert [*fake.router.registry._decodes["c1-decode"].client.leases] == []
            call.cancel()
            await asyncio.wait((call,))
            await until(lambda: not node.sides[NodeRole.PREFILL].service.queued_prompts)
        if tells:
            await until(lambda: node.leases == 0)
        else:
            assert node.leases == 1
            node.sides[NodeRole.DECODE].service.give_up("the test is over")


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED])
async def test_a_lease_is_given_back_if_the_answer_to_its_prompt_is_lost(
    model: str, monkeypatch: pytest.MonkeyPatch, started: list[str], code: StatusCode
) -> None:
    """The step stream tells of the lease, so the session goes on, with all that runs in it."""
    real, calls = PrefillService.Prefill, 0

    async def prefill(service: PrefillService, request: PrefillRequest, context: Any) -> PrefillResponse:
        nonlocal calls
        calls += 1
        answer = await real(service, request, context)
        if calls == 1:
            await context.abort(code, "the connection broke")
        return answer

    monkeypatch.setattr(PrefillService, "Prefill", prefill)
    async with cluster(model, prefills=0, decodes=0) as fake:
        await add_colocated(fake)
        node, client = fake.node("c0"), fake.router.registry._decodes["c0-decode"].client
        node.engine.hanging = True  # The first run does not end by itself.
        call = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=9))
        await until(lambda: len(node.engine.aborted) == 1 and len(started) == 2)
        node.engine.hanging = False
        (output,) = await call
        assert right(output, PROMPT, PARAMS, 9)
        assert retries(fake) == {"lost": 1}
        assert fake.router.registry._decodes["c0-decode"].client is client


async def test_a_sample_without_room_for_itself_has_no_prompt_computed_and_waits(model: str) -> None:
    """Another router holds the room that this one believes in."""
    async with cluster(model, prefills=0, decodes=0) as fake:
        node = await fake.add_colocated("c1", slots=1)
        await fake.ready("c1-prefill", "c1-decode")
        table = node.sides[NodeRole.DECODE].service._table
        leases = [table.reserve("another router", 1, 1) for _ in range(table.places)]
        call = asyncio.ensure_future(generate(fake, PROMPT, seed=9))
        await until(lambda: fake.router.queue.waiting == 1 and bool(table._waiting))
        assert node.sides[NodeRole.PREFILL].engine.prefilled == []
        for lease in leases:
            table.release(lease.lease_id)
        (output,) = await call
        assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), 9)[0]
        engine = node.sides[NodeRole.PREFILL].engine
        assert len(engine.released) <= len(engine.prefilled), "what was refused has no KV to release"


def refuse_what_has_begun(monkeypatch: pytest.MonkeyPatch) -> list[OverloadedError]:
    """Break the nodes: they refuse the next sample for lack of room when the router has a token of it. Return the
    refusals that are still to come."""
    refusals, begun = [OverloadedError("no room", 0.0)], asyncio.Event()
    real_prefill, real_row = PrefillService.Prefill, RemoteLease.row

    async def prefill(service: PrefillService, request: PrefillRequest, context: Any) -> PrefillResponse:
        answer = await real_prefill(service, request, context)
        if refusals:
            await begun.wait()
            raise refusals.pop()
        return answer

    def row(lease: RemoteLease, *values: Any) -> None:
        real_row(lease, *values)
        begun.set()

    monkeypatch.setattr(PrefillService, "Prefill", prefill)
    monkeypatch.setattr(RemoteLease, "row", row)
    return refusals


async def test_a_refusal_of_a_sample_that_has_begun_moves_no_estimate(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the fault of the node, which has granted the room."""
    refuse_what_has_begun(monkeypatch)
    async with cluster(model, prefills=0, decodes=0) as fake:
        await add_colocated(fake)
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert right(output, PROMPT, PARAMS, 9)
        room = fake.router.registry._decodes["c0-decode"].room
        await until(lambda: room.free_slots == 8)
        assert room.soon_free == 8
        assert retries(fake) == {"fault": 1}


async def test_what_was_drawn_before_a_refusal_is_evidence_if_the_next_run_differs(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_what_has_begun(monkeypatch)
    async with cluster(model, prefills=0, decodes=0) as fake:
        for name in ("c0", "c1"):
            await add_colocated(fake, name)
        fake.node("c1").engine.corrupt = True
        with pytest.raises(DataLossError, match="differs at token 0"):
            await generate(fake, PROMPT, PARAMS, seed=9)
        assert {state for state, _ in states(fake.router.registry).values()} == {NodeState.REFUSED}


async def test_a_colocated_node_older_than_its_router_runs_no_sample_and_the_log_says_why(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It reserves no room in a prompt's call, and holds nothing for the sample."""
    monkeypatch.setattr(DecodeService, "reserve_with_prompt", lambda service, request: 0)
    async with cluster(model, prefills=0, decodes=0) as fake:
        await add_colocated(fake)
        with pytest.raises(UnavailableError, match=r"nodes failed 3 runs of sample \d .*c0-prefill"):
            await generate(fake, PROMPT, SamplingParams(n=3), seed=9)
        assert "c0-prefill leased no room with a prompt: upgrade it together with the routers" in caplog.text


@pytest.mark.parametrize("lent", ["prefill", "decode"])
async def test_a_colocated_node_lends_one_side(model: str, lent: str) -> None:
    """The other side of the pair is a plain node, because the colocated node's own one has no room."""
    async with cluster(model, prefills=0, decodes=0, slots=1) as fake:
        await add_colocated(fake)
        if lent == "prefill":
            await fake.add_decode("d1")
            await fake.ready("d1")
            fake.router.registry._decodes["c0-decode"].room.take(NEED)
            pair = "c0-prefill", "d1"
        else:
            await fake.add_prefill("p1")
            await fake.ready("p1")
            room = fake.router.registry._prefills["c0-prefill"].room
            for _ in range(4):
                room.take(1000)
            pair = "p1", "c0-decode"
        (output,) = await generate(fake, PROMPT, seed=9)
        assert (output.receipt.prefill_node.node_id, output.receipt.decode_node.node_id) == pair
        assert output.token_ids == expected(PROMPT, SamplingParams(logprobs=True), 9)[0]
        if lent == "prefill":
            fake.router.registry._decodes["c0-decode"].room.give(NEED)
        else:
            for _ in range(4):
                room.give(1000)


@pytest.mark.parametrize("is_colocated", [True, False])
async def test_room_of_a_prompt_that_is_given_up_is_not_promised_before_the_node_has_freed_it(
    model: str, monkeypatch: pytest.MonkeyPatch, is_colocated: bool
) -> None:
    """The next sample would be refused, and wait for a heartbeat."""
    refused, refuse = list[Placement](), Placement.refuse

    def noted(placement: Placement) -> None:
        refused.append(placement)
        refuse(placement)

    monkeypatch.setattr(Placement, "refuse", noted)
    late = {"heartbeat_interval_ms": 2000, "heartbeat_timeout_ms": 20_000}
    async with cluster(model, prefills=0, decodes=0, **late) as fake:
        prefill, table = await _one(fake, is_colocated)
        async with prefill.engine.turn:
            first = asyncio.ensure_future(generate(fake, PROMPT, seed=1))
            await until(lambda: table.leases == 1 and prefill.service.queued_prompts == 1)
            second = asyncio.ensure_future(generate(fake, (7, 8), seed=2))
            await until(lambda: fake.router.queue.waiting == 1)
            first.cancel()
            await asyncio.wait((first,))
        await second
    assert not refused


@pytest.mark.parametrize("is_colocated", [True, False])
async def test_a_router_that_stops_gives_back_what_its_prompts_hold(model: str, is_colocated: bool) -> None:
    async with cluster(model, prefills=0, decodes=0, drain_grace_s=0.1) as fake:
        prefill, table = await _one(fake, is_colocated)
        async with prefill.engine.turn:
            call = asyncio.ensure_future(generate(fake, PROMPT, seed=1))
            await until(lambda: table.leases == 1 and prefill.service.queued_prompts == 1)
            await fake.router.drain()
            await fake.router.stop()
            assert isinstance(*await asyncio.gather(call, return_exceptions=True), UnavailableError)
            await until(lambda: table.leases == 0)


async def _one(fake: FakeCluster, is_colocated: bool) -> tuple[Any, Any]:
    """Start a colocated node or a pair, with one slot. Return what computes prompts and what has leases."""
    if not is_colocated:
        prefill, decode = await fake.add_prefill("p0"), await fake.add_decode("d0", slots=1)
        await fake.ready("p0", "d0")
        return prefill, decode
    node = await fake.add_colocated("c0", slots=1)
    await fake.ready(*SIDES)
    return node.sides[P], node


async def test_rows_that_come_with_the_grant_of_a_lease_that_was_given_up_are_nobodys(model: str) -> None:
    taken, given_back, freed = list[int](), list[int](), list[bool]()
    client = DecodeClient(info(model, "d1"), "r1", lambda _: None, AwakeClock())

    async def give_back(lease_id: int) -> None:
        given_back.append(lease_id)

    client._give_back = give_back  # type: ignore[method-assign]
    lease = RemoteLease(lambda token_id, *_: bool(taken.append(token_id)), 1)
    client.with_prompt(lease, "p", params=SamplingParams(), seed=1, share_key="")
    client.release(lease, lambda: freed.append(True))
    message = StreamStepsResponse(lease_ids=[5], token_ids=[7], logprobs=[-1.0])
    for name, lease_id in (("p", 5), ("p", 5), ("q", 6), ("", 7)):
        message.granted.add(request_id=name, lease_id=lease_id)
    client._on_step(message)
    await until(lambda: bool(freed))
    assert (taken, sorted(given_back), freed, client._with_prompt) == ([], [5, 6, 7], [True], {})
    await client.close()


async def test_a_lease_that_is_granted_with_two_prompts_is_nobodys(model: str) -> None:
    lost = list[str]()
    client = DecodeClient(info(model, "d1"), "r1", lost.append, AwakeClock())
    leases = [RemoteLease(lambda *_: True, 1) for _ in "pq"]
    message = StreamStepsResponse()
    for name, lease in zip("pq", leases, strict=True):
        client.with_prompt(lease, name, params=SamplingParams(), seed=1, share_key="")
        message.granted.add(request_id=name, lease_id=5)
    client._on_step(message)
    assert lost == ["it granted lease 5 twice"]
    for lease in leases:
        with pytest.raises(UnavailableError, match="d1: it granted lease 5 twice"):
            lease.ended.result()
    await client.close()
