"""What a router and its clients see of nodes whose engines get stuck, that drain, or that are told to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import DataLossError, UnavailableError
from corun.node.life import Life
from corun.params import SamplingParams
from corun.rpc.channel import channel
from corun.testing.cluster import WAIT_S, router_config
from corun.testing.nodes import LocalNode
from corun.types import FinishReason, NodeState
from corun.v1.decode_service_pb2 import ReserveRequest, StreamStepsResponse
from corun.v1.prefill_service_pb2 import PrefillRequest
from corun.v1.types_pb2 import FINISH_REASON_ERROR
from decode_node import service as decode_service
from decode_node.service import StepRow, _message
from router.nodes.admission import MAX_TEXT_LENGTH
from router.service import CLUSTER_SERVICE
from tests.clusters import FakeCluster, Output, cluster, generate, retries
from tests.router import asking

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=200, logprobs=True)
PATIENT = {"heartbeat_timeout_ms": 20_000}
"""Here nobody is to be lost because the machine is busy."""


async def add(fake: FakeCluster, *names: str, **settings: Any) -> None:
    """Start nodes, which end if they are quarantined."""
    fake.ends_quarantined = True
    common = {"engine_timeout_s": 0.2, "drain_grace_s": 2.0, **settings}
    for name in names:
        if name.startswith("p"):
            await fake.add_prefill(name, **common)
        else:
            await fake.add_decode(name, **{"lease_ttl_ms": 20_000, **common})


@contextlib.asynccontextmanager
async def pool(
    model: str, *names: str, router: dict[str, Any] | None = None, step_ms: float = 1.0, **settings: Any
) -> AsyncIterator[FakeCluster]:
    async with cluster(model, prefills=0, decodes=0, **{**PATIENT, **(router or {})}) as fake:
        await add(fake, *names, **settings)
        await fake.ready(*names)
        for node in decodes_of(fake):
            node.engine.step_ms = step_ms
        yield fake
        fake.kv.held.clear()  # What a stuck node keeps for a router that has given it up ends with its lease.


def decodes_of(fake: FakeCluster) -> list[LocalNode]:
    return [node for node in fake.nodes if node.ref.node_id.startswith("d")]


def start(fake: FakeCluster, **options: Any) -> asyncio.Task[list[Output]]:
    return asking.started(fake, PROMPT, PARAMS, seed=8, timeout_s=60, **options)


async def busy_and_other(fake: FakeCluster) -> tuple[LocalNode, LocalNode]:
    """The one of two decode nodes that runs something, once it has drawn tokens, and the other."""
    one = await busy(fake)
    (other,) = (node for node in decodes_of(fake) if node is not one)
    return one, other


def right(outputs: Sequence[Output], seed: int = 8) -> bool:
    return [asking.right(output, PROMPT, PARAMS, seed) for output in outputs] == [True]


async def stuck(fake: FakeCluster, node: LocalNode) -> None:
    """Wait until the router says of a node that its engine is stuck."""
    await fake.until(lambda: "its engine is stuck" in fake.detail(node.ref.node_id))


class TestStuckEngine:
    async def test_a_decode_engine(self, model: str) -> None:
        """Its streams go on elsewhere; it gets nothing until it answers, and then no late token reaches anybody."""
        async with pool(model, "p1", "d1", "d2", step_ms=3) as fake:
            run = start(fake)
            ill, other = await busy_and_other(fake)
            ill.engine.stop()
            (output,) = outputs = await run
            assert right(outputs)
            assert output.receipt.decode_node == other.ref
            await stuck(fake, ill)
            name = ill.ref.node_id
            assert fake.state(name) is NodeState.JOINING
            for seed in range(4):
                (output,) = await generate(fake, PROMPT, SamplingParams(max_tokens=3), seed=seed)
                assert output.receipt.decode_node == other.ref
            counted = ill.drawn_tokens
            assert ill.engine._running
            ill.engine.go_on()
            await fake.until(lambda: not ill.engine._running)
            assert ill.drawn_tokens == counted
            assert len(ill.service._table) == 0
            await fake.ready(name)
            other.engine.stop()
            assert right(await generate(fake, PROMPT, PARAMS, seed=9), 9)

    async def test_the_only_decode_engine(self, model: str) -> None:
        """A sample waits for it, as for any node, and begins again from its prompt. Nothing can be started there, not
        even by a router that has not heard of it yet."""
        async with pool(model, "p1", "d1") as fake:
            p1, d1 = fake.nodes
            run = start(fake)
            await fake.until(lambda: d1.drawn_tokens > 10)
            d1.engine.stop()
            await fake.until(lambda: "its engine is stuck" in fake.router.registry.missing())
            with pytest.raises(UnavailableError, match="decode node d1: its engine is stuck"):
                await fake.router.registry._decodes["d1"].client.connect(p1.engine.endpoint, 5.0)
            d1.engine.go_on()
            assert right(await run)
            assert len(p1.engine.prefilled) == 2

    async def test_a_prefill_engine(self, model: str) -> None:
        """The prompts that it has are computed elsewhere; what it ends up with is released."""
        async with pool(model, "p1", "p2", "d1") as fake:
            p1, p2 = fake.nodes[:2]
            p1.engine.stop()
            p2.engine.stop()
            run = start(fake)
            await fake.until(lambda: bool(p1.engine.prefilled or p2.engine.prefilled))
            ill, other = (p1, p2) if p1.engine.prefilled else (p2, p1)
            other.engine.go_on()
            (output,) = outputs = await run
            assert right(outputs)
            assert output.receipt.prefill_node == other.ref
            assert "its engine is stuck" in fake.detail(ill.ref.node_id)
            ill.engine.go_on()
            await fake.ready(ill.ref.node_id)
            assert ill.engine.released

    async def test_a_sample_whose_kv_is_at_a_stuck_node(self, model: str) -> None:
        """It was prefilled, and waits in its slot for a KV that will not come."""
        async with pool(model, "p1", "p2", "d1", router={"step_timeout_s": 60.0}) as fake:
            p1, p2, d1 = fake.nodes
            d1.engine.hanging = True  # Answers, but steps nothing: as one whose requests all wait for KV.
            run = start(fake)
            await fake.until(lambda: len(d1.engine._running) == 1)
            ill, other = (p1, p2) if p1.engine.prefilled else (p2, p1)
            ill.engine.stop()
            await fake.until(lambda: bool(other.engine.prefilled))
            d1.engine.hanging = False
            (output,) = outputs = await run
            assert right(outputs)
            assert output.receipt.prefill_node == other.ref
            ill.engine.go_on()
            await fake.ready(ill.ref.node_id)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (StreamStepsResponse(step=1), "message 1 came instead of 0"),
        (StreamStepsResponse(step=0, lease_ids=[1]), "message 0 has columns of different lengths"),
        (None, "the answer cannot be read"),  # So gRPC tells of bytes that are no message.
    ],
)
async def test_a_node_whose_steps_cannot_be_right_is_lost(
    model: str, message: StreamStepsResponse | None, reason: str
) -> None:
    async def steps(request: Any) -> AsyncIterator[StreamStepsResponse | None]:
        yield message

    async with pool(model, "p1", "d1") as fake:
        client = fake.router.registry._decodes["d1"].client
        client._stub = SimpleNamespace(StreamSteps=steps)
        await client._read_steps(asyncio.get_running_loop().create_future())
        assert fake.state("d1") is NodeState.LOST
        assert fake.detail("d1") == f"its step stream is broken: {reason}"


def message_of_a_later_version(*args: Any) -> StreamStepsResponse:
    """The message of a node that has a reason of its own for samples that failed."""
    message = _message(*args)
    for end in message.ended:
        if end.finish_reason == FINISH_REASON_ERROR:
            end.finish_reason = 99  # type: ignore[assignment]
    return message


async def test_a_sample_that_ends_for_an_unknown_reason_runs_again_and_costs_no_other_one(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the node, every stream there would break, and the sample would wait for its next token."""
    monkeypatch.setattr(decode_service, "_message", message_of_a_later_version)
    seeds = 8, 9, 10, 11
    async with pool(model, "p1", "d1", "d2") as fake:
        runs = [asking.started(fake, PROMPT, PARAMS, seed=seed) for seed in seeds]
        await fake.until(lambda: all(node.drawn_tokens > 10 for node in decodes_of(fake)))
        service = decodes_of(fake)[0].service
        lease = next(iter(service._running.values()))
        stream = service._stream_of(lease)
        stream.add(lease.lease_id, StepRow(lease.request_id, None, 0.0, FinishReason.ERROR))
        stream.flush()
        service._drop(lease)
        await fake.until(lambda: retries(fake))
        for seed, run in zip(seeds, runs, strict=True):
            assert right(await run, seed)
        assert retries(fake) == {"fault": 1}


async def test_a_node_is_told_of_with_a_text_of_bounded_length(model: str) -> None:
    """Everybody who asks for the cluster's status gets it."""
    async with pool(model, "p1", "d1") as fake:
        (agent,) = fake.node("d1").agents
        agent.stuck = "x" * 1_000_000
        agent.tell()
        await fake.until(lambda: fake.state("d1") is NodeState.JOINING)
        assert 0 < len(fake.detail("d1")) <= MAX_TEXT_LENGTH
        agent.stuck = ""
        agent.tell()
        await fake.ready("d1")


@pytest.mark.parametrize(
    ("name", "method", "request_type", "reason"),
    [
        ("p1", "corun.v1.PrefillService/Prefill", PrefillRequest, "fault"),
        ("d1", "corun.v1.DecodeService/Reserve", ReserveRequest, "lost"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_its_nodes_fault(
    model: str, name: str, method: str, request_type: Any, reason: str
) -> None:
    """It may have granted a lease whose id nobody knows, which ends with the session."""
    async with pool(model, "p1", "p2", "d1", "d2") as fake:
        node = fake.router.registry._node(name)
        assert node is not None
        answers = node.client._channel.unary_unary(
            f"/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=lambda data: ReserveRequest.FromString(b"\xff"),
        )
        setattr(node.client._stub, method.partition("/")[2], answers)
        assert right(await start(fake))
        assert retries(fake) == {reason: 1}


NAMES = ("p1", "p2", "d1", "d2", "d3")


@contextlib.asynccontextmanager
async def two_routers(model: str) -> AsyncIterator[tuple[FakeCluster, FakeCluster]]:
    """A pool of five nodes with a router, and a second router over them."""
    fake, other = (FakeCluster(model, router_config(**PATIENT)) for _ in range(2))
    try:
        await asyncio.gather(fake.add_router(), other.add_router())
        await add(fake, *NAMES, router=(fake.address, other.address))
        await asyncio.gather(fake.ready(*NAMES), other.ready(*NAMES))
        for node in decodes_of(fake):
            node.engine.step_ms = 3
        yield fake, other
    finally:
        await fake.close()
        await other.close()


async def busy(fake: FakeCluster) -> LocalNode:
    """The decode node that runs something, once it has drawn tokens."""
    await fake.until(lambda: any(node.drawn_tokens > 10 for node in decodes_of(fake)))
    return next(node for node in decodes_of(fake) if node.drawn_tokens)


async def mismatch(fake: FakeCluster) -> list[LocalNode]:
    """A sample of the first router moves from an engine that gets stuck to one that lies; returns who is suspected."""
    run = start(fake, request_id="lied")
    ill = await busy(fake)
    for node in decodes_of(fake):
        node.engine.corrupt = True
    ill.engine.stop()
    with pytest.raises(DataLossError):
        await run
    return [node for node in fake.nodes if node.ref in fake.router.registry._admission._quarantined]


class TestQuarantine:
    async def test_every_router_stops_using_them_and_they_end(self, model: str) -> None:
        """Told by the nodes themselves, before they are gone: that is what their state at the other router says."""
        async with two_routers(model) as (fake, other):
            suspects = await mismatch(fake)
            assert 3 <= len(suspects) <= 4
            names = [node.ref.node_id for node in suspects]
            await other.until(lambda: all("gave other bits" in other.detail(name) for name in names))
            assert {other.state(name) for name in names} <= {NodeState.DRAINING, NodeState.JOINING}
            for node in suspects:
                with pytest.raises(DataLossError, match="gave other bits for sample 0 of request 'lied': restart it"):
                    await node.end()
                assert node.engine.closed
            for node in fake.nodes:
                node.engine.corrupt = False
            await add(fake, *names, router=(fake.address, other.address))  # They have tested themselves again.
            for router in (fake, other):
                await router.ready(*NAMES)
                assert right(await generate(router, PROMPT, PARAMS, seed=9), 9)

    @pytest.mark.parametrize("drains", [False, True])
    async def test_streams_of_other_routers_move_away(self, model: str, drains: bool) -> None:
        """A node in its drain hears of it, too."""
        async with two_routers(model) as (fake, other):
            run = start(other)
            node = await busy(fake)
            if drains:
                node.engine.hanging = True  # Its drain will take long.
                node.stop.set()
            fake.router.registry.quarantine([node.ref], "sample 0 of request 'x'")
            (output,) = outputs = await run
            assert right(outputs)
            assert output.receipt.decode_node != node.ref
            if drains:
                await node.end()

    async def test_without_that_the_other_router_goes_on(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The control: nodes that do not listen are used by whoever saw no mismatch."""
        monkeypatch.setattr(Life, "_note_quarantine", lambda self, reason: None)
        async with two_routers(model) as (fake, other):
            suspects = await mismatch(fake)
            lying = {node.ref for node in suspects if not node.engine.stopped}
            used = []
            for seed in range(6):
                outputs = await generate(other, PROMPT, PARAMS, seed=seed)
                used += [outputs[0].receipt.decode_node, outputs[0].receipt.prefill_node]
            assert lying & set(used)


class TestDrain:
    async def test_a_decode_node_finishes_its_streams(self, model: str) -> None:
        async with pool(model, "p1", "d1", "d2", drain_grace_s=30.0, step_ms=5) as fake:
            run = start(fake)
            node, other = await busy_and_other(fake)
            node.stop.set()
            await fake.until(lambda: fake.state(node.ref.node_id) is NodeState.DRAINING)
            (output,) = await generate(fake, PROMPT, SamplingParams(max_tokens=2), seed=1)
            assert output.receipt.decode_node == other.ref
            (output,) = outputs = await run
            assert right(outputs)
            assert output.receipt.decode_node == node.ref
            await node.end()

    async def test_a_prefill_node_finishes_what_it_computes_and_waits_until_its_kv_is_read(self, model: str) -> None:
        async with pool(model, "p1", "d1", drain_grace_s=30.0) as fake:
            p1, d1 = fake.nodes
            p1.engine.delay_s = 0.3
            d1.engine.hanging = True  # Answers, but reads nothing yet.
            run = start(fake)
            await fake.until(lambda: p1.service.queued_prompts)
            p1.stop.set()
            await fake.until(lambda: fake.state("p1") is NodeState.DRAINING and len(d1.engine._running) == 1)
            await asyncio.sleep(0.2)
            assert not p1.life.done()
            d1.engine.hanging = False
            assert right(await run)
            await p1.end()
            assert len(p1.engine.prefilled) == 1

    async def test_a_node_that_was_told_to_end_is_gone(self, model: str, caplog: pytest.LogCaptureFixture) -> None:
        """It is not lost: somebody wanted it so. A decode node's stream ends, a prefill node falls silent."""
        caplog.set_level(logging.INFO)
        async with pool(model, "p1", "d1", router={"heartbeat_timeout_ms": 1000}) as fake:
            for node in fake.nodes:
                name = node.ref.node_id
                node.stop.set()
                await node.end()
                await fake.until(lambda name=name: fake.state(name) is NodeState.LOST)  # type: ignore[misc]
                assert fake.detail(name) == "gone as planned"
                assert f"node {node.ref} is gone as planned" in caplog.text
                if name == "p1":
                    joining = NodeState.JOINING, "not connected to a prefill node yet"
                    assert (fake.state("d1"), fake.detail("d1")) == joining
            assert "lost" not in caplog.text
            assert "(p1 is gone as planned); no decode" in fake.router.registry.missing()

    async def test_a_node_whose_engine_died_is_lost(self, model: str) -> None:
        """It takes no new work then, as in a drain, and says why."""
        async with pool(model, "p1", "d1") as fake:
            d1 = fake.nodes[1]
            d1.engine.on_death()
            await fake.until(lambda: "the engine died" in fake.detail("d1"))
            with pytest.raises(UnavailableError, match="the engine died"):
                await d1.end()
            await fake.until(lambda: fake.state("d1") is NodeState.LOST)
            assert fake.detail("d1") != "gone as planned"

    async def test_readiness_of_a_router_ends_when_its_last_pair_drains(self, model: str) -> None:
        """While what runs is finished; it comes back with the next node."""
        async with pool(model, "p1", "d1", drain_grace_s=30.0, step_ms=5) as fake, channel(fake.address) as link:
            health = health_pb2_grpc.HealthStub(link)

            serving = health_pb2.HealthCheckResponse.SERVING

            async def until_ready(expected: bool) -> None:
                request = health_pb2.HealthCheckRequest(service=CLUSTER_SERVICE)
                deadline = asyncio.get_running_loop().time() + WAIT_S
                while ((await health.Check(request, timeout=WAIT_S)).status == serving) is not expected:
                    assert asyncio.get_running_loop().time() < deadline
                    await asyncio.sleep(0.005)

            await until_ready(True)
            run = start(fake)
            d1 = await busy(fake)
            d1.stop.set()
            await until_ready(False)
            assert not run.done()
            assert right(await run)
            await d1.end()
            await add(fake, "d1")
            await until_ready(True)
