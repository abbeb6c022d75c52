"""The prefill service over a real socket, around a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from corun.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    StaleGenerationError,
    UnavailableError,
)
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.rpc.server import GrpcServer
from corun.testing.engines import Facts, FakeKv, FakePrefillEngine
from corun.testing.model import filled_contract
from corun.types import NodeRef, NodeRole
from corun.v1 import prefill_service_pb2 as pb
from corun.v1 import prefill_service_pb2_grpc as pb_grpc
from prefill_node import recheck
from prefill_node.recheck import Computation
from prefill_node.service import PrefillService
from prefill_node.sharing import PromptRequest
from tests.answers import DEADLINE_S, refusal, until

REF = NodeRef(node_id="p0", generation="a" * 16)
READER = NodeRef(node_id="d0", generation="d" * 16)


class Node:
    """A prefill node's gRPC side, and its client."""

    def __init__(self, stub: Any, engine: FakePrefillEngine, service: PrefillService) -> None:
        self.engine = engine
        self.service = service
        self._stub = stub

    def prefill(
        self, request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), timeout_s: float = DEADLINE_S, **fields: Any
    ) -> Any:
        defaults = {"generation": REF.generation, "reader": codec.node_ref_to_proto(READER)}
        request = pb.PrefillRequest(request_id=request_id, prompt_token_ids=prompt, **{**defaults, **fields})
        return self._stub.Prefill(request, timeout=timeout_s)

    async def release(self, request_id: str, generation: str = REF.generation) -> None:
        await self._stub.ReleaseKv(
            pb.ReleaseKvRequest(request_id=request_id, generation=generation), timeout=DEADLINE_S
        )

    @property
    def computing(self) -> list[str]:
        """The prompts that the engine has, by their ids."""
        return sorted(self.service.sharing.computing)

    async def queued(self) -> int:
        return (await self.service.load()).queued_prompt_tokens


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(recheck, "IDLE_S", 0.0)
    engine = FakePrefillEngine(filled_contract(NodeRole.PREFILL, 0), FakeKv(), Facts(), REF)
    service = PrefillService(REF, engine, kv_tokens=4000)
    server = GrpcServer()
    server.add(pb_grpc.add_PrefillServiceServicer_to_server, service)
    await server.start()
    async with channel(server.address) as connection:
        yield Node(pb_grpc.PrefillServiceStub(connection), engine, service)  # type: ignore[no-untyped-call]
    await server.stop(0)


async def test_a_prompt_becomes_a_handle(node: Node) -> None:
    answer = await node.prefill("r", (7, 8, 9))
    assert codec.kv_handle_from_proto(answer.handle) == node.engine._handle(PromptRequest("r", (7, 8, 9), READER))
    load = await node.service.load()
    assert (load.tokens, load.queued_prompt_tokens, load.used_kv_blocks) == (3, 0, 1)
    assert node.engine.released == []


async def test_tokens_from_the_cache_are_counted_apart(node: Node) -> None:
    node.engine.cached_tokens = 16
    answer = await node.prefill("r", [1] * 20)
    assert answer.handle.cached_tokens == 16
    load = await node.service.load()
    assert (load.tokens, load.cached_tokens) == (4, 16)
    assert node.service.metrics.prompts.value == 1


async def test_a_shared_computation_counts_once_whoever_stays(node: Node) -> None:
    node.engine.hanging = True
    first = node.prefill("a", [1] * 10, share_scope="client")
    await until(lambda: node.computing == ["a"])
    second = node.prefill("b", [1] * 10, share_scope="client")
    await until(lambda: node.service.queued_prompts == 2)
    first.cancel()
    await until(lambda: node.service.queued_prompts == 1)
    assert (await node.service.load()).queued_prompt_tokens == 10
    node.engine.hanging = False
    answered = codec.kv_handle_from_proto((await second).handle)
    assert (answered.request_id, answered.claim) == ("a", "b")
    assert (await node.service.load()).tokens == 10
    assert node.service.metrics.prompts.value == 1
    await until(lambda: node.engine.released == ["a"])


class Samples:
    """The other side of a colocated node."""

    def __init__(self, engine: FakePrefillEngine) -> None:
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.told: list[str] = []
        self.started: list[tuple[Any, ...]] = []
        self._engine = engine

    def reserve_with_prompt(self, request: pb.PrefillRequest) -> int:
        if self.refusal:
            raise self.refusal
        return int(request.sample.seed)

    async def start_with_prompt(
        self, request: pb.PrefillRequest, lease_id: int, prefill_id: str, prefill_node: NodeRef, context: Any
    ) -> None:
        if self.error:
            raise self.error
        prompt, reader = tuple(request.prompt_token_ids), codec.node_ref_from_proto(request.reader)
        assert prompt not in self._engine.prefilled, "the sample must be there before its prompt"
        self.started.append((lease_id, prompt, reader, prefill_id, prefill_node))

    def tell(self, router_id: str) -> None:
        self.told.append(router_id)


@pytest.mark.parametrize("fields", [{}, {"share_scope": "client"}, {"isolated": True}])
async def test_a_sample_starts_with_its_prompt(node: Node, fields: dict[str, Any]) -> None:
    sample = pb.PromptSample(seed=5, router_id="r1")
    await refusal(node.prefill("alone", sample=sample, **fields), InvalidArgumentError)  # No other side is here.
    node.service._samples = samples = Samples(node.engine)
    answer = await node.prefill("r", (7, 8, 9), sample=sample, **fields)
    assert (answer.started, answer.lease_id, samples.told) == (True, 5, ["r1"])
    assert samples.started == [(5, (7, 8, 9), READER, "r", REF)]
    assert codec.kv_handle_from_proto(answer.handle).request_id == "r"
    await until(lambda: node.engine.released == ["r"])
    assert not (await node.prefill("s", (7, 8), **fields)).started


async def test_samples_that_join_a_prompt_start_with_it_and_one_that_cannot_waits_for_its_handle(node: Node) -> None:
    """The prompt is computed all the same: others may wait for it, too."""
    node.service._samples = samples = Samples(node.engine)
    node.engine.hanging = True
    calls = []
    for number, name in enumerate("abcd"):
        sample = pb.PromptSample(seed=number) if name != "d" else None
        samples.error = InvalidArgumentError("sampling_params.top_k", 1, "no") if name == "c" else None
        calls.append(asyncio.ensure_future(node.prefill(name, share_scope="client", sample=sample)))
        await until(lambda: node.service.queued_prompts == len(calls) and len(samples.started) == min(len(calls), 2))
    node.engine.hanging = False
    answers = [await call for call in calls]
    assert [answer.started for answer in answers] == [True, True, False, False]
    assert [(started[0], started[3]) for started in samples.started] == [(0, "a"), (1, "a")]
    assert [answer.handle.claim for answer in answers] == [*"abcd"]
    assert node.engine.kv.readers == {(node.engine.engine_id, "a"): {*"cd"}}, "who reads by a handle"
    samples.error = InvalidArgumentError("sampling_params.top_k", 1, "no")
    assert not (await node.prefill("e", (9, 9), sample=pb.PromptSample())).started


async def test_no_prompt_is_computed_before_there_is_room_for_its_sample(node: Node) -> None:
    node.service._samples = samples = Samples(node.engine)
    samples.refusal = OverloadedError("all slots are held", 0.1)
    await refusal(node.prefill("r", (7, 8, 9), sample=pb.PromptSample(router_id="r1")), OverloadedError)
    assert (node.engine.prefilled, samples.started, samples.told) == ([], [], [])


async def test_no_sample_starts_with_the_kv_of_another_prompt(node: Node) -> None:
    """An id names a prompt whose KV waits for its reader, or that others wait for, though its own caller is gone."""
    node.service._samples = samples = Samples(node.engine)
    await node.prefill("held", (4, 5, 6))
    node.engine.hanging = True
    first = asyncio.ensure_future(node.prefill("shared", share_scope="client"))
    await until(lambda: node.computing == ["shared"])
    second = asyncio.ensure_future(node.prefill("b", share_scope="client"))
    await until(lambda: node.service.queued_prompts == 2)
    first.cancel()
    await until(lambda: node.service.queued_prompts == 1)
    for name in ("held", "shared"):
        call = node.prefill(name, (7, 8, 9), timeout_s=5.0, sample=pb.PromptSample())
        error = await refusal(call, InvalidArgumentError)
        assert (error.field, error.limit) == ("request_id", "must be unique to one attempt")
    assert (samples.started, node.computing) == ([], ["shared"])
    node.engine.hanging = False
    assert (await second).handle.request_id == "shared"


async def test_who_gives_the_call_up_is_told_of_the_lease(node: Node) -> None:
    node.service._samples = samples = Samples(node.engine)
    node.engine.hanging = True
    call = asyncio.ensure_future(node.prefill("r", (7, 8, 9), sample=pb.PromptSample(seed=5, router_id="r1")))
    await until(lambda: len(samples.started) == 1)
    assert samples.told == []
    call.cancel()
    await until(lambda: samples.told == ["r1"])


async def test_an_isolated_prompt_shares_no_kv_whatever_its_scope(node: Node) -> None:
    node.engine.hanging = True
    calls = [node.prefill("a", share_scope="client"), node.prefill("b", share_scope="client", isolated=True)]
    await until(lambda: node.computing == ["a", "b"])
    calls.append(node.prefill("c", share_scope="client", isolated=True))
    await until(lambda: node.computing == ["a", "b", "c"])
    node.engine.hanging = False
    assert [(await call).handle.request_id for call in calls] == ["a", "b", "c"]
    assert node.engine.isolated == [(1, 2, 3)] * 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ()}, "prompt_token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a/b"}, "request_id"),
        ({"reader": None}, "reader"),
        ({"reader": {"node_id": "d0"}}, "reader"),
    ],
)
async def test_bad_requests_are_refused(node: Node, fields: dict[str, Any], field: str) -> None:
    error = await refusal(node.prefill(**fields), InvalidArgumentError)
    assert error.field == field
    error = await refusal(node.prefill(generation="b" * 16), StaleGenerationError)
    assert (error.node_id, error.expected, error.actual) == ("p0", "b" * 16, REF.generation)
    assert (node.engine.prefilled, await node.queued()) == ([], 0)


async def test_what_runs_is_not_disturbed_by_what_is_refused(node: Node) -> None:
    """An id in flight is not taken twice: the second attempt must not release the first one's KV. A draining node
    finishes what it has."""
    node.engine.hanging = True
    first = node.prefill("r")
    await until(lambda: node.computing == ["r"])
    error = await refusal(node.prefill("r", (5,)), InvalidArgumentError)
    assert (error.field, error.limit) == ("request_id", "must be unique to one attempt")
    node.service.draining = True
    error = await refusal(node.prefill("s"), UnavailableError)
    assert "p0 is draining" in str(error)
    await node.release("other")
    assert await node.queued() == 3
    node.engine.hanging = False
    assert (await first).handle.num_tokens == 3
    assert (await node.queued(), node.engine.released) == (0, ["other"])


async def test_a_call_that_is_cancelled_or_late_stops_the_work_and_keeps_nothing(node: Node) -> None:
    node.engine.hanging = True
    call = node.prefill("r")
    await until(lambda: node.computing == ["r"])
    call.cancel()
    await until(lambda: node.engine.released == ["r"])
    assert await node.queued() == 0
    await refusal(node.prefill("r", timeout_s=2.0), DeadlineError)  # The id is free again.
    await until(lambda: node.engine.released == ["r", "r"])
    assert (await node.queued(), node.engine.prefilled) == (0, [])


async def test_a_failed_prefill_leaves_nothing_behind(node: Node) -> None:
    node.engine.errors = [InvalidArgumentError("prompt_token_ids", 99, "must fit"), RuntimeError("at /secret/path")]
    await refusal(node.prefill("r"), InvalidArgumentError)
    error = await refusal(node.prefill("r"), InternalError)
    assert "secret" not in str(error)
    load = await node.service.load()
    assert (load.queued_prompt_tokens, load.tokens) == (0, 0)


async def test_releases_reach_the_engine_of_their_own_generation(node: Node) -> None:
    """Another generation's KV died with it: no error, and never this one's KV of the same name."""
    await node.release("r", "b" * 16)
    assert node.engine.released == []
    await node.release("r")
    assert node.engine.released == ["r"]


def computed(*prompt: int, moved: int = 0) -> Computation:
    """What an engine tells of a prompt that it computed beside two others. moved: how far its last digest is off."""
    digests, steps = [[*prompt[:-1], prompt[-1] + moved]], [[len(prompt), 3, 9, 0]]
    return Computation(prompt_token_ids=prompt, digests=digests, freedoms={"packed"}, cached_tokens=0, steps=steps)


@pytest.mark.parametrize("moved", [0, 1])
async def test_checked_prompts_are_computed_again_while_the_node_is_idle(node: Node, moved: int) -> None:
    """A prompt that comes meanwhile goes first. One differing bit takes the node out."""
    engine, findings = node.engine, list[str]()
    engine.on_finding = findings.append
    engine.on_checked(computed(7, 8, moved=moved))
    await node.prefill("first")
    await until(lambda: engine.recomputed == [(7, 8)])
    equal, different = (node.service.metrics.rechecked_prompts.labels(result) for result in ("equal", "different"))
    await until(lambda: (equal.value, different.value) == (1 - moved, moved))
    finding = (
        "a prompt of 2 tokens has other KV when it runs alone: first in KV block 1 of 2 (rank 0); it may use packed, "
        "took 0 tokens from the cache, and ran as 2 of the 9 tokens of 3 prompts"
    )
    assert findings == [finding] * moved


async def test_a_prompt_ends_the_computation_of_an_earlier_one(node: Node) -> None:
    engine = node.engine
    for first in (7, 8):
        engine.on_checked(computed(first))
    engine.hanging = True
    node.service.recheck.resume()
    await until(lambda: engine.recomputed == [(7,)])
    call = asyncio.ensure_future(node.prefill("first"))
    await until(lambda: node.computing == ["first"])
    engine.hanging = False
    await call
    await until(lambda: node.service.metrics.rechecked_prompts.labels("equal").value == 1)
    assert engine.recomputed == [(7,), (8,)]


@pytest.mark.parametrize("state", ["draining", "closed"])
async def test_a_node_that_takes_no_work_computes_nothing_again(node: Node, state: str) -> None:
    engine = node.engine
    engine.hanging = True
    call = asyncio.ensure_future(node.prefill("first"))
    await until(lambda: node.computing == ["first"])
    engine.on_checked(computed(7))
    setattr(node.service, state, True if state == "draining" else "its engine is stuck")
    engine.hanging = False
    await call
    await node.service.load()
    await asyncio.sleep(0)
    assert engine.recomputed == []
