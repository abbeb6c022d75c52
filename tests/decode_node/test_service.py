"""The decode service over a real socket, around a fake engine that draws nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from corun.errors import (
    CorunError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    StaleGenerationError,
    UnavailableError,
)
from corun.node.kv.handle import bound
from corun.params import SamplingParams
from corun.receipt import prompt_digest
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.rpc.server import GrpcServer
from corun.testing.engines import Facts, FakeDecodeEngine, FakeKv
from corun.testing.model import filled_contract
from corun.types import Alternatives, FinishReason, KvHandle, KvOwner, NixlEndpoint, NodeRef, NodeRole
from corun.v1 import decode_service_pb2 as pb
from corun.v1 import decode_service_pb2_grpc as pb_grpc
from corun.v1.prefill_service_pb2 import PrefillRequest, PromptSample
from decode_node.service import DecodeRequest, DecodeService, OwnPrompt, StepRow
from decode_node.slots import SlotTable
from tests.answers import DEADLINE_S, put_forward, refusal, settle, until
from tests.handles import a_handle

REF = NodeRef(node_id="d0", generation="a" * 16)
PEER = NixlEndpoint(engine_id="p0-engine", host="127.0.0.1", port=7000, tp_size=2, stamp_addresses=(4096, 2**63))
PREFILL = NodeRef(node_id="c0-prefill", generation="b" * 16)
PROMPT = (1, 2, 3)
SLOTS, KV_BLOCKS, BLOCK_SIZE = 4, 10, 16
TTL_S = 60
"""Times to live. One is longer than any test. The other is short enough to wait for, yet longer than a call on a busy
machine."""


def owners(*runs: tuple[str, int]) -> tuple[KvOwner, ...]:
    return tuple(KvOwner(request_id=name, num_blocks=count) for name, count in runs)


def handle(prompt: Sequence[int] = PROMPT, **fields: Any) -> KvHandle:
    return bound(a_handle(prompt, **{"reader": REF, "owners": owners(("prefill-1", 1)), **fields}))


class Steps:
    """A router's step stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def read(self) -> Any:
        return await asyncio.wait_for(self.call.read(), DEADLINE_S)

    async def rows(self) -> list[tuple[int, int, float]]:
        """Read the next message and return lease, token and log probability of each of its rows."""
        message = await self.read()
        return list(zip(message.lease_ids, message.token_ids, message.logprobs, strict=True))

    async def nothing_follows(self) -> bool:
        """Whether all is delivered: an empty step would have been a message by now."""
        await asyncio.sleep(0.05)
        return not self.call.done()


class Node:
    """A decode node's gRPC side, and a client of it."""

    def __init__(self) -> None:
        self.engine = FakeDecodeEngine(filled_contract(NodeRole.DECODE, SLOTS), FakeKv(), Facts())
        self.engine.hanging = True
        table = SlotTable(slots=SLOTS, kv_blocks=KV_BLOCKS, block_size=BLOCK_SIZE)
        self.service = DecodeService(REF, self.engine, table, lease_ttl_ms=1000 * TTL_S)
        self.server = GrpcServer()
        self.server.add(pb_grpc.add_DecodeServiceServicer_to_server, self.service)
        self.stub: Any = None
        self._open: list[Steps] = []  # Keeps the streams, because a stream without a reference is cancelled.

    async def reserve(self, router_id: str = "router", **fields: Any) -> Any:
        """Reserve room. fields: further fields of the request, such as `session`."""
        values = {"generation": REF.generation, "num_prompt_tokens": len(PROMPT), "max_tokens": 8, **fields}
        return await self.stub.Reserve(pb.ReserveRequest(router_id=router_id, **values), timeout=DEADLINE_S)

    def start(self, lease_id: int, *, generation: str = REF.generation, **fields: Any) -> Any:
        request = pb.StartRequest(
            lease_id=lease_id,
            generation=generation,
            handle=codec.kv_handle_to_proto(fields.get("handle", handle())),
            prompt_token_ids=fields.get("prompt", PROMPT),
            sampling_params=codec.sampling_params_to_proto(fields.get("params", SamplingParams(max_tokens=8))),
            seed=fields.get("seed", 42),
        )
        return self.stub.Start(request, timeout=DEADLINE_S)

    async def release(self, lease_id: int, generation: str = REF.generation) -> None:
        await self.stub.Release(pb.ReleaseRequest(lease_id=lease_id, generation=generation), timeout=DEADLINE_S)

    async def steps(self, router_id: str = "router", session: int = 0) -> Steps:
        """Open a stream and read its first message, which is empty."""
        request = pb.StreamStepsRequest(router_id=router_id, generation=REF.generation, session=session)
        steps = Steps(self.stub.StreamSteps(request))
        self._open.append(steps)
        first = await steps.read()
        assert first == pb.StreamStepsResponse(step=0)
        return steps

    async def started(self, count: int = 1, router_id: str = "router", session: int = 0) -> list[int]:
        """Start `count` leases and return their ids; the engine's names of them are `ids()`."""
        leases = [(await self.reserve(router_id, session=session)).lease_id for _ in range(count)]
        for lease in leases:
            await self.start(lease)
        return leases

    @property
    def running(self) -> list[DecodeRequest]:
        """The requests that the engine has, in the order of their start."""
        return [request for request, _ in self.engine._running.values()]

    def ids(self) -> list[str]:
        """Return the engine's own names of its requests."""
        return [request.request_id for request in self.running]

    def held(self) -> list[int]:
        """Return the ids of all leases, in the order of their reservations."""
        return list(self.service._table._leases)

    async def until_free(self) -> None:
        await until(lambda: not self.held())
        assert (await self.service.load()).used_kv_blocks == 0


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    await node.server.start()
    async with channel(node.server.address) as connection:
        node.stub = pb_grpc.DecodeServiceStub(connection)  # type: ignore[no-untyped-call]
        yield node
    await node.server.stop(0)
    await node.engine.close()


# Leases


async def test_a_lease_holds_a_place_and_room_for_the_whole_sequence(node: Node) -> None:
    first = await node.reserve(num_prompt_tokens=16, max_tokens=17)
    second = await node.reserve("another")
    assert first.ttl_ms == 1000 * TTL_S
    assert first.lease_id != second.lease_id
    load = await node.service.load()
    assert (load.leases, load.used_slots, load.used_kv_blocks) == (2, 0, 4)
    error = await refusal(node.reserve(num_prompt_tokens=128, max_tokens=4), OverloadedError)
    assert 0 < error.retry_after_s < 1
    assert "KV blocks are needed" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompt_tokens", 0),
        ("max_tokens", 0),
        ("router_id", ""),
        ("router_id", "r\n2026 ERROR forged"),
        ("router_id", "r" * 129),
    ],
)
async def test_a_lease_for_nothing_or_for_nobody_is_refused(node: Node, field: str, value: Any) -> None:
    """A router has a name that can be logged."""
    error = await refusal(node.reserve(**{field: value}), InvalidArgumentError)
    assert field in error.field
    assert node.held() == []


async def test_a_share_key_reaches_the_engine_if_it_is_of_the_prompt(node: Node) -> None:
    key = f"{prompt_digest(PROMPT)} client a"
    lease = (await node.reserve(share_key=key)).lease_id
    await node.start(lease)
    assert [request.share_key for request in node.running] == [key]
    lease = (await node.reserve(share_key="0" * 64)).lease_id
    error = await refusal(node.start(lease), InvalidArgumentError)
    assert "share_key" in str(error)
    error = await refusal(node.reserve(share_key="k" * 513), InvalidArgumentError)
    assert error.field == "share_key"


async def test_another_generation_is_refused(node: Node) -> None:
    lease = (await node.reserve()).lease_id
    other = "b" * 16
    calls = [
        node.reserve(generation=other),
        node.start(lease, generation=other),
        node.start(lease, handle=handle(reader=NodeRef(node_id=REF.node_id, generation=other))),
        node.stub.Connect(pb.ConnectRequest(generation=other, peer=codec.nixl_endpoint_to_proto(PEER))),
        node.stub.StreamSteps(pb.StreamStepsRequest(router_id="router", generation=other)).read(),
    ]
    for call in calls:
        error = await refusal(call, StaleGenerationError)
        assert (error.node_id, error.expected, error.actual) == ("d0", other, REF.generation)
    await node.release(lease, other)  # The lease is not this generation's, so this is neither an error nor a release.
    assert node.held() == [lease]
    assert node.running == node.engine.connected == []


async def test_release_frees_at_once_and_ends_the_request(node: Node) -> None:
    waiting, running = (await node.reserve()).lease_id, (await node.started())[0]
    (name,) = node.ids()
    await node.release(waiting)
    assert node.held() == [running]
    assert node.engine.aborted == []
    await node.release(running)
    assert node.held() == []
    await until(lambda: node.engine.aborted == [name])
    await node.release(running)
    await node.release(99)
    assert node.engine.aborted == [name]


# Start


async def test_start_hands_over_all_that_the_engine_needs_once(node: Node) -> None:
    """A node that drains takes no new lease, and starts what it has leased."""
    lease = (await node.reserve(max_tokens=5)).lease_id
    node.service.draining = True
    error = await refusal(node.reserve(), UnavailableError)
    assert "d0 is draining" in str(error)
    params = SamplingParams(temperature=0.5, top_k=3, max_tokens=5, stop_token_ids=[9], logit_bias={4: 1.5})
    await node.start(lease, params=params, seed=2**63 - 1)
    (request,) = node.running
    assert request.kv == handle()
    assert (tuple(request.prompt_token_ids), request.params, request.seed) == (PROMPT, params, 2**63 - 1)
    error = await refusal(node.start(lease, params=params), InvalidArgumentError)
    assert (error.field, error.limit) == ("lease_id", "must not have been started before")
    assert len(node.running) == 1


CONTEXT: Any = SimpleNamespace(invocation_metadata=tuple)


def prompt_request(prompt: Sequence[int] = PROMPT, **fields: Any) -> PrefillRequest:
    """Return the request of a prompt that its sample comes with."""
    params = codec.sampling_params_to_proto(fields.pop("params", SamplingParams(max_tokens=8)))
    reader = codec.node_ref_to_proto(fields.pop("reader", REF))
    sample = PromptSample(**{"sampling_params": params, "seed": 42, "router_id": "r1", "session": 1} | fields)
    return PrefillRequest(request_id="prefill-1", prompt_token_ids=prompt, reader=reader, sample=sample)


def with_prompt(node: Node, lease_id: int, prompt: Sequence[int] = PROMPT, **fields: Any) -> Any:
    request = prompt_request(prompt, **fields)
    return node.service.start_with_prompt(request, lease_id, "prefill-0", PREFILL, CONTEXT)


async def test_a_sample_that_comes_with_its_prompt_runs_in_its_lease(node: Node) -> None:
    steps = await node.steps()
    lease = (await node.reserve(share_key=f"{prompt_digest(PROMPT)} client")).lease_id
    params = SamplingParams(temperature=0.5, max_tokens=8)
    await with_prompt(node, lease, params=params, seed=2**63 - 1)
    (request,) = node.running
    assert request.kv == OwnPrompt("prefill-0", PREFILL), "which another request has computed"
    assert (tuple(request.prompt_token_ids), request.params, request.seed) == (PROMPT, params, 2**63 - 1)
    assert request.share_key == f"{prompt_digest(PROMPT)} client"
    node.service.on_step([StepRow(request.request_id, 7, -0.5)])
    assert await steps.rows() == [(lease, 7, -0.5)]
    await node.release(lease)
    await until(lambda: node.engine.aborted == [request.request_id])
    await node.until_free()


@pytest.mark.parametrize("error", [InvalidArgumentError("sampling_params.top_k", 1, "no"), UnavailableError("busy")])
async def test_a_lease_waits_for_its_start_if_its_sample_cannot_come_with_the_prompt(
    node: Node, error: CorunError
) -> None:
    await node.steps()
    lease = (await node.reserve()).lease_id
    for refused in ({"params": SamplingParams(max_tokens=9)}, {"prompt": (*PROMPT, 4)}):
        with pytest.raises(InvalidArgumentError, match="prompt_token_ids, max_tokens"):
            await with_prompt(node, lease, **refused)
    with pytest.raises(NotFoundError):
        await with_prompt(node, lease + 1)
    with pytest.raises(StaleGenerationError):
        await with_prompt(node, lease, reader=NodeRef(node_id=REF.node_id, generation="c" * 16))
    node.engine.start_errors = [error]
    with pytest.raises(type(error)):
        await with_prompt(node, lease)
    assert node.running == []
    await node.start(lease)
    assert len(node.running) == 1


async def test_the_lease_of_a_sample_that_comes_with_its_prompt_is_told_before_its_rows(node: Node) -> None:
    steps = await node.steps("r1", session=1)
    request = prompt_request(share_key=f"{prompt_digest(PROMPT)} client")
    lease = node.service.reserve_with_prompt(request)
    await node.service.start_with_prompt(request, lease, "prefill-1", PREFILL, CONTEXT)
    node.service.on_step([StepRow(node.ids()[0], 7, -0.5)])
    message = await steps.read()
    assert [(one.request_id, one.lease_id) for one in message.granted] == [("prefill-1", lease)]
    assert list(message.lease_ids) == [lease]
    node.service.tell("r1")
    node.service.tell("a router without a stream")
    assert await steps.nothing_follows()
    await node.release(lease)
    await node.until_free()


async def test_a_lease_is_told_also_if_its_sample_never_starts(node: Node) -> None:
    steps = await node.steps("r1", session=1)
    lease = node.service.reserve_with_prompt(prompt_request())
    node.service.tell("r1")
    assert [one.lease_id for one in (await steps.read()).granted] == [lease]
    await node.release(lease)
    await node.until_free()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"reader": NodeRef(node_id="d1", generation=REF.generation)}, InvalidArgumentError),
        ({"reader": NodeRef(node_id=REF.node_id, generation="c" * 16)}, StaleGenerationError),
        ({"router_id": ""}, InvalidArgumentError),
        ({"share_key": "k" * 513}, InvalidArgumentError),
        ({"session": 0}, UnavailableError),
        ({"params": SamplingParams(max_tokens=999_999)}, OverloadedError),
    ],
)
async def test_a_prompt_without_room_for_its_sample_gets_no_lease(
    node: Node, fields: dict[str, Any], error: type[CorunError]
) -> None:
    await node.steps("r1", session=1)
    with pytest.raises(error):
        node.service.reserve_with_prompt(prompt_request(**fields))
    node.service.draining = True
    with pytest.raises(UnavailableError, match="draining"):
        node.service.reserve_with_prompt(prompt_request())
    await node.until_free()


async def test_a_sample_of_another_prompt_than_its_lease_shares_is_refused(node: Node) -> None:
    lease = (await node.reserve(share_key=f"{prompt_digest((9, 9, 9))} client")).lease_id
    with pytest.raises(InvalidArgumentError, match="must begin the lease's share_key"):
        await with_prompt(node, lease)


REFUSED = {
    "another prompt's handle": ({"handle": handle((9, 9, 9))}, "handle.prompt_digest"),
    "a handle without digest": ({"handle": handle(prompt_digest="")}, "handle.prompt_digest"),
    "a handle of fewer tokens": ({"handle": handle(num_tokens=2)}, "handle.prompt_digest"),
    "another prompt": ({"prompt": (9, 9, 9)}, "handle.prompt_digest"),
    "another reader's handle": ({"handle": handle(reader=NodeRef(node_id="d1", generation="a" * 16))}, "handle.reader"),
    "a handle without reader": ({"handle": handle(reader=NodeRef(node_id="", generation=""))}, "handle.reader"),
    "a handle without binding": ({"handle": replace(handle(), binding="")}, "handle.binding"),
    "other blocks": ({"handle": replace(handle(), block_ids=((5,),))}, "handle.binding"),
    "another request's blocks": ({"handle": replace(handle(), request_id="prefill-2")}, "handle.binding"),
    "too many blocks": ({"handle": handle(block_ids=((4, 5),))}, "handle.block_ids"),
    "too few blocks": ({"handle": handle(block_ids=((),))}, "handle.block_ids"),
    "blocks in two groups": ({"handle": handle(block_ids=((4,), (5,)))}, "handle.block_ids"),
    "nobody's blocks": ({"handle": handle(owners=())}, "handle.owners"),
    "more owners than blocks": ({"handle": handle(owners=owners(("a", 1), ("prefill-1", 1)))}, "handle.owners"),
    "an owner of no block": ({"handle": handle(owners=owners(("a", 0), ("prefill-1", 1)))}, "handle.owners"),
    "a last block of another prefill": ({"handle": handle(owners=owners(("a", 1)))}, "handle.owners"),
    "a longer prompt": ({"prompt": (*PROMPT, 4), "handle": handle((*PROMPT, 4))}, "prompt_token_ids, max_tokens"),
    "a longer output": ({"params": SamplingParams(max_tokens=9)}, "prompt_token_ids, max_tokens"),
    "a shorter output": ({"params": SamplingParams(max_tokens=7)}, "prompt_token_ids, max_tokens"),
}


@pytest.mark.parametrize(("fields", "field"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_start_that_does_not_belong_to_its_lease_is_refused(
    node: Node, fields: dict[str, Any], field: str
) -> None:
    """A foreign handle is refused and never read: it would give another prompt's KV. The lease waits for its own."""
    lease = (await node.reserve()).lease_id
    error = await refusal(node.start(lease, **fields), InvalidArgumentError)
    assert error.field == field
    assert node.running == []
    await node.start(lease)
    assert len(node.running) == 1


async def test_a_start_that_fails_frees_its_lease(node: Node) -> None:
    await node.steps()
    lease = (await node.reserve()).lease_id
    node.engine.start_errors = [RuntimeError("at /secret/path")]
    error = await refusal(node.start(lease), InternalError)
    assert "secret" not in str(error)
    await node.until_free()


@pytest.mark.parametrize("ended_by", ["cancel", "release"])
async def test_a_start_that_is_given_up_leaves_nothing_running(
    node: Node, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """The engine may get the abort before it knows the request."""
    go, start = asyncio.Event(), node.engine.start

    async def late(request: DecodeRequest) -> None:
        await go.wait()
        await start(request)

    monkeypatch.setattr(node.engine, "start", late)
    await node.steps()
    lease = (await node.reserve()).lease_id
    call = node.start(lease)
    await until(lambda: bool(node.service._running))
    if ended_by == "cancel":
        call.cancel()
        await node.until_free()
        await until(lambda: len(node.engine.aborted) == 1)
        return
    await node.release(lease)
    go.set()
    await call
    await until(lambda: not node.running)
    assert node.held() == []


async def test_connections_reach_the_engine_for_peers_with_their_stamps(node: Node) -> None:
    """No KV that is read from another peer could be accepted."""

    def connect(peer: NixlEndpoint) -> Any:
        request = pb.ConnectRequest(generation=REF.generation, peer=codec.nixl_endpoint_to_proto(peer))
        return node.stub.Connect(request, timeout=DEADLINE_S)

    for addresses in ((), (4096,), (1, 2, 3)):
        error = await refusal(connect(replace(PEER, stamp_addresses=addresses)), InvalidArgumentError)
        assert error.field == "peer.stamp_addresses"
    assert node.engine.connected == []
    await connect(PEER)
    assert node.engine.connected == [PEER]


# Steps


def fp32(word: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", word))[0]
    return value


async def test_one_message_a_step_with_the_rows_of_a_router_and_their_bits(node: Node) -> None:
    streams = {name: await node.steps(name) for name in ("a", "b", "idle")}
    leases = {name: await node.started(2, name) for name in ("a", "b")}
    names = node.ids()
    values = [fp32(word) for word in (0x80000000, 0xBDCCCCCD, 0xC2C7FFFF, 0x80000001)]
    mixed = [names[2], names[0], names[3], names[1]]
    for step in range(3):
        node.service.on_step([StepRow(name, 10 * step + i, values[i]) for i, name in enumerate(mixed)])
        for router, first in (("a", 1), ("b", 0)):
            message = await streams[router].read()
            assert (message.step, list(message.lease_ids)) == (step + 1, leases[router])
            assert list(message.token_ids) == [10 * step + first, 10 * step + first + 2]
            found = [struct.pack("<f", value) for value in message.logprobs]
            assert found == [struct.pack("<f", values[i]) for i in (first, first + 2)]
            assert not message.ended
    load = await node.service.load()
    assert (load.steps, load.tokens) == (3, 12)
    assert await streams["idle"].nothing_follows()


async def test_alternatives_come_with_the_rows_that_have_some(node: Node) -> None:
    """Also if the rows of several steps make one message, in which other rows have none or only end."""
    steps = await node.steps()
    await node.started(3)
    first, second, third = node.ids()
    tops = Alternatives((4, 5), (-0.5, -1.5))
    failed = StepRow(second, None, 0.0, FinishReason.ERROR, "no")
    node.service.on_step([StepRow(first, 3, -1.0), failed, StepRow(third, 4, -0.5, tops=tops)])
    message = await steps.read()
    assert list(message.token_ids) == [3, 4]
    found = [(each.row, tuple(each.token_ids), tuple(each.logprobs)) for each in message.alternatives]
    assert found == [(1, *tops[:2])]
    node.service.on_step([StepRow(first, 3, -1.0)])
    assert not (await steps.read()).alternatives


async def test_a_reader_that_does_not_read_gets_all_of_it_later(node: Node) -> None:
    """When the buffers of the connection are full, later messages hold many steps. Message numbers have no gap."""
    steps = await node.steps()
    await node.started(2)
    names = node.ids()
    for step in range(20_000):
        node.service.on_step([StepRow(name, step, -1.0) for name in names])
        if step % 100 == 0:
            await asyncio.sleep(0)
    tokens: list[int] = []
    number = 0
    while len(tokens) < 40_000:
        message = await steps.read()
        number += 1
        assert message.step == number
        tokens.extend(message.token_ids)
    assert tokens == [step for step in range(20_000) for _ in names]
    assert number < 20_000


async def test_a_router_is_told_which_kv_was_read_before_the_first_token(node: Node) -> None:
    """It is no step, and takes no slot. It may come in one message with the token, if the router reads slowly."""
    steps, others = await node.steps(), await node.steps("idle")
    leases = await node.started(3)
    first, second, gone = node.ids()
    await node.release(leases.pop())
    node.service.on_read([first, gone])
    message = await steps.read()
    assert (list(message.read), list(message.lease_ids), list(message.ended)) == (leases[:1], [], [])
    load = await node.service.load()
    assert (load.used_slots, load.leases, load.steps) == (0, 2, 0)
    node.service.on_read([second])
    node.service.on_step([StepRow(second, 1, -1.0)])
    message = await steps.read()
    assert (list(message.read), list(message.lease_ids)) == (leases[1:], leases[1:])
    assert (await node.service.load()).used_slots == 1
    assert await others.nothing_follows()


async def test_an_end_comes_with_its_last_token_and_frees_the_slot(node: Node) -> None:
    """A request with nothing to draw from is ended in the engine, too: otherwise the engine would go on with it."""
    steps = await node.steps()
    leases = await node.started(4)
    names = node.ids()
    node.service.on_step(
        [
            StepRow(names[0], 5, -1.0, FinishReason.STOP),
            StepRow(names[1], None, 0.0, FinishReason.ERROR, "no token can follow", invalid=True),
            StepRow(names[2], None, 0.0, FinishReason.ERROR, "not finite", not_finite=True),
            StepRow(names[3], 6, -2.0),
        ]
    )
    assert node.held() == [leases[3]]
    assert (await node.service.load()).used_slots == 1
    message = await steps.read()
    assert list(message.lease_ids) == [leases[0], leases[3]]
    ends = [
        (codec.finish_reason_from_proto(end.finish_reason), end.detail, end.not_finite, end.invalid)
        for end in message.ended
    ]
    assert [end.lease_id for end in message.ended] == leases[:3]
    assert ends == [
        (FinishReason.STOP, "", False, False),
        (FinishReason.ERROR, "no token can follow", False, True),
        (FinishReason.ERROR, "not finite", True, False),
    ]
    assert (await node.service.load()).tokens == 2
    await until(lambda: node.engine.aborted == [names[2]])


async def test_rows_of_released_leases_go_nowhere(node: Node) -> None:
    """Late rows of a lease cannot reach the one that got its slot, which has another id."""
    steps = await node.steps()
    old, kept = await node.started(2)
    names = node.ids()
    await node.release(old)
    node.service.on_step([StepRow(names[0], 1, -1.0, FinishReason.STOP), StepRow(names[1], 2, -1.0)])
    assert await steps.rows() == [(kept, 2, -1.0)]
    node.service.on_step([StepRow("never seen", 1, -1.0)])
    assert await steps.nothing_follows()
    (new,) = await node.started()
    assert new != old
    node.service.on_step([StepRow(names[0], 1, -1.0), StepRow(node.ids()[-1], 2, -1.0)])
    assert await steps.rows() == [(new, 2, -1.0)]


# Streams


async def test_a_stream_keeps_its_leases_even_if_it_breaks_and_is_back_in_time(node: Node) -> None:
    """It takes over leases that came before it, and keeps those that wait for their start, since a prompt may take any
    time. A second stream replaces the first, whose end then ends no lease."""
    (lease,) = await node.started()
    await node.reserve()
    steps = await node.steps()
    steps.call.cancel()
    await until(lambda: len(node.service._expiry) == 2)
    put_forward(0.5 * TTL_S)
    steps = await node.steps()
    second = await node.steps()
    assert await steps.read() == grpc.aio.EOF
    steps.call.cancel()
    put_forward(TTL_S)
    await settle()
    assert len(node.held()) == 2
    assert node.engine.aborted == []
    node.service.on_step([StepRow(node.ids()[0], 1, -1.0)])
    assert await second.rows() == [(lease, 1, -1.0)]


async def test_leases_outlive_a_lost_stream_by_their_time_to_live(node: Node) -> None:
    """A lease's clock runs from the end of the stream, or from the lease's own begin if that is later."""
    steps, other = await node.steps("lost"), await node.steps("other")
    (running,) = await node.started(1, "lost")
    (lost,) = node.ids()
    await node.started(1, "other")
    waiting = [(await node.reserve("lost")).lease_id]
    steps.call.cancel()
    await until(lambda: bool(node.service._expiry))
    put_forward(0.5 * TTL_S)
    waiting.append((await node.reserve("lost")).lease_id)
    assert len(node.held()) == 4
    for expired in (2, 3):
        put_forward(0.5 * TTL_S)
        await settle()
        assert (node.service.metrics.expired_leases.value, len(node.held())) == (expired, 4 - expired)
        assert node.engine.aborted == [lost]
    for lease in (running, *waiting):
        await refusal(node.start(lease), NotFoundError)
    assert await other.nothing_follows()


# Sessions


async def test_the_stream_of_a_later_session_ends_what_earlier_ones_hold(node: Node) -> None:
    """They end at once, running or not: the router gave the node up before, and waits for nothing of those sessions."""
    first, other = await node.steps(session=1), await node.steps("other", session=1)
    (running,) = await node.started(session=1)
    (name,) = node.ids()
    waiting = (await node.reserve(session=1)).lease_id
    (kept,) = await node.started(router_id="other", session=1)
    second = await node.steps(session=2)
    assert node.held() == [kept]
    assert await first.read() == grpc.aio.EOF
    await until(lambda: node.engine.aborted == [name])
    assert node.service.metrics.expired_leases.value == 0
    for lease in (running, waiting):
        await refusal(node.start(lease), NotFoundError)
    node.service.on_step([StepRow(name, 1, -1.0), StepRow(node.ids()[0], 2, -1.0)])
    assert await other.rows() == [(kept, 2, -1.0)]
    assert await second.nothing_follows()


async def test_a_session_that_is_over_gets_nothing(node: Node) -> None:
    """Its last calls may come after the stream of the next session, and nobody would release what they were granted."""
    await node.steps(session=2)
    late = node.stub.StreamSteps(pb.StreamStepsRequest(router_id="router", generation=REF.generation, session=1))
    for call in (node.reserve(session=1), late.read()):
        error = await refusal(call, UnavailableError)
        assert "session 1 of router router is over" in str(error)
    assert node.held() == []
    await node.reserve(session=2)
    await node.reserve("other", session=1)
    assert len(node.held()) == 2


async def test_no_lease_is_kept_by_the_stream_of_another_session(node: Node) -> None:
    """A lease that comes while no stream is open, or before its own, has a clock until its stream is there. The next
    session's stream ends a reservation that was on its way when the stream broke."""
    await node.reserve(session=0)
    first = await node.steps(session=1)
    assert (node.held(), node.service._expiry) == ([], {})
    (early,) = await node.started(session=2)
    assert list(node.service._expiry) == [early]
    node.service.on_step([StepRow(node.ids()[0], 1, -1.0)])
    await node.steps(session=2)
    assert await first.read() == grpc.aio.EOF
    assert node.service._expiry == {}
    assert node.held() == [early]
    await node.release(early)


async def test_rows_are_counted_as_they_are_computed(node: Node) -> None:
    """Rows of samples that were just released count, because they were computed. An end without a token does not. A
    sample that a stop has ended may still have a row in the next step, which draws nothing there."""
    node.service.step_sizes = (2, SLOTS)
    steps = await node.steps()
    await node.started(3)
    first, second, third = node.ids()
    node.service.on_step([StepRow(name, 1, -1.0) for name in (first, second, third)])
    node.service.on_step([StepRow(first, 1, -1.0, FinishReason.LENGTH), StepRow(second, None, 0.0, FinishReason.ERROR)])
    node.service.on_step([StepRow(first, 1, -1.0), StepRow(third, 1, -1.0, FinishReason.STOP)], 3)
    node.service.on_step([StepRow("gone", None, 0.0, FinishReason.ERROR)])
    found = node.service.metrics
    assert (found.num_steps, found.steps.labels(SLOTS).value, found.steps.labels(2).value) == (4, 2, 1)
    assert (found.rows.value, found.used_rows.value, found.tokens.value) == (2 * SLOTS + 2, 6, 5)
    assert found.registry.get_sample_value("corun_decode_step_seconds_count") == 2
    steps.call.cancel()


async def test_the_time_between_tokens_is_that_of_samples_that_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time in which no sample has a slot is no step, however the last one ended. Nor is the end of a sample that
    had none."""
    loop = asyncio.get_running_loop()
    now = round(loop.time())
    monkeypatch.setattr(loop, "time", lambda: now)
    found = node.service.metrics.step_seconds
    await node.started(2)
    first, other = node.ids()
    node.service.on_step([StepRow(first, 1, -1.0)])
    now += 1
    node.service.on_step([StepRow(other, None, 0.0, FinishReason.ERROR, "its KV could not be read")])
    now += 1
    node.service.on_step([StepRow(first, 1, -1.0)])
    assert (found.value.sum, sum(found.value.counts)) == (2, 1)
    await node.release(node.held()[0])
    now += 30
    await node.started()
    node.service.on_step([StepRow(node.ids()[0], 1, -1.0)])
    assert (found.value.sum, sum(found.value.counts)) == (2, 1)
