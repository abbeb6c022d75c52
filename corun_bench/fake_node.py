"""Fake nodes for measuring a router: real node services around engines that compute nothing.

A fake decode engine emits steps at a fixed rate, with a row for every running request. The log probability of a row
says when its step was emitted, so that a client can tell how long its token was on the way. Only a benchmark uses them.
`python -m corun_bench.fake_node JSON` is one such node.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio

from corun.contract import Contract
from corun.node.membership import NodeAgent
from corun.rpc import codec
from corun.rpc.server import GrpcServer, raise_file_limit, run
from corun.testing.engines import BLOCK_SIZE, Facts, FakeKv, FakePrefillEngine
from corun.testing.model import contract
from corun.types import FinishReason, NixlEndpoint, NodeInfo, NodeLoad, NodeRef, NodeRole, new_generation
from corun.v1 import cluster_service_pb2, decode_service_pb2_grpc, prefill_service_pb2_grpc
from corun_bench.load import FIRST_TOKEN, NUM_TOKENS, time_code
from decode_node.service import DecodeRequest, DecodeService, StepRow
from decode_node.slots import SlotTable
from prefill_node.service import PrefillService

DIRECT_METHOD = "/corun.bench.FakeDirect/Generate"
"""The method of a node without a router: it takes a GenerateRequest and streams GenerateResponses."""
MAX_MODEL_LEN = 8192


@dataclass(frozen=True, kw_only=True)
class FakeNodeOptions:
    """The options of one fake node. The port is that of a direct node."""

    role: str
    """Role of the node: prefill, decode, colocated, or direct, which streams to clients by itself without a router."""
    model: str
    """Model whose tokenizer the router loads."""
    index: int
    routers: list[str]
    slots: int
    step_ms: float
    port: int


class StepEngine:
    """A decode engine that emits a row for the request in every slot each `step_s`, whatever was asked for."""

    def __init__(self, step_s: float, slots: int) -> None:
        self.on_step: Callable[[Sequence[StepRow]], None] = lambda _: None
        self.on_read: Callable[[Sequence[str]], None] = lambda _: None
        self._step_s = step_s
        self._slots = slots
        self._left: dict[str, int] = {}  # Tokens to come, by request id.
        self._started: list[str] = []  # The requests whose KV counts as read in the next step.

    async def start(self, request: DecodeRequest) -> None:
        self.add(request.request_id, request.params.max_tokens)
        self._started.append(request.request_id)

    def add(self, request_id: str, num_tokens: int) -> None:
        self._left[request_id] = num_tokens

    async def abort(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    async def connect(self, peer: NixlEndpoint) -> None:
        """Do nothing: there is nothing to connect."""

    async def tick(self) -> None:
        """Emit steps until cancelled. A late step does not delay the steps after it."""
        began = time.monotonic()
        for number in itertools.count(1):
            await asyncio.sleep(max(0.0, began + number * self._step_s - time.monotonic()))
            self.step(FIRST_TOKEN + number % NUM_TOKENS)

    def step(self, token_id: int) -> None:
        logprob = time_code(time.monotonic())
        started, self._started = self._started, []
        self.on_read(started)
        rows, left = [], self._left
        for request_id, num_left in list(itertools.islice(left.items(), self._slots)):
            if num_left == 1:
                del left[request_id]
                rows.append(StepRow(request_id, token_id, logprob, FinishReason.LENGTH))
            else:
                left[request_id] = num_left - 1
                rows.append(StepRow(request_id, token_id, logprob))
        self.on_step(rows)


class FakeDirect:
    """The bare stream that a router is compared with: one call per sample, one message per token, nothing else."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._rows: dict[str, asyncio.Queue[StepRow]] = {}
        self._names = map(str, itertools.count())
        engine.on_step = self.on_step
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 4096)])
        service, method = DIRECT_METHOD[1:].split("/")
        handlers = {method: grpc.unary_stream_rpc_method_handler(self.generate)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def on_step(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._rows[row.request_id].put_nowait(row)

    async def generate(self, data: bytes, context: Any) -> None:
        request = cluster_service_pb2.GenerateRequest.FromString(data)
        head, name = codec.response_head(request.request_id, 0, request.seed), next(self._names)
        rows = self._rows[name] = asyncio.Queue[StepRow]()
        self._engine.add(name, request.sampling_params.max_tokens)
        try:
            finish = None
            while finish is None:
                row = await rows.get()
                assert row.token_id is not None  # No row fails here.
                response = cluster_service_pb2.GenerateResponse()
                codec.fill_response(response, head, " word", [row.token_id], [row.logprob])
                await context.write(response.SerializeToString())
                finish = row.finish
        finally:
            await self._engine.abort(name)
            del self._rows[name]


async def _stream(options: FakeNodeOptions, engine: StepEngine, stop: asyncio.Event) -> None:
    server = FakeDirect(engine).server
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    await stop.wait()
    await server.stop(0.0)


async def _serve(options: FakeNodeOptions, engine: StepEngine, stop: asyncio.Event) -> None:
    """Serve a node's services around fake engines: one, or the two of a colocated node, which a router knows as two."""
    server, generation = GrpcServer(), new_generation()
    nodes: list[tuple[NodeInfo, Callable[[], Awaitable[NodeLoad]]]] = []
    samples: DecodeService | None = None
    if options.role != "prefill":
        info = _info(options, _contract(options, NodeRole.DECODE), generation)
        table = SlotTable(slots=info.slots, kv_blocks=info.kv_blocks, block_size=BLOCK_SIZE)
        samples = DecodeService(info.ref, engine, table, lease_ttl_ms=60_000)
        engine.on_step, engine.on_read = samples.on_step, samples.on_read
        server.add(decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, samples)
        nodes.append((info, samples.load))
    if options.role != "decode":
        model = _contract(options, NodeRole.PREFILL)
        info = _info(options, model, generation)
        prefill = FakePrefillEngine(model, FakeKv(), Facts(), info.ref, info.engine_id)
        prefill.kv_ttl_s = 0.0  # No engine of this benchmark reads KV.
        service = PrefillService(info.ref, prefill, kv_tokens=info.kv_blocks * BLOCK_SIZE, samples=samples)
        server.add(prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server, service)
        nodes.append((replace(info, nixl=prefill.endpoint), service.load))
    await server.start()
    agents = [NodeAgent(replace(info, address=server.address), (*options.routers,), load) for info, load in nodes]
    memberships = [asyncio.ensure_future(agent.run()) for agent in agents]
    try:
        await stop.wait()
    finally:
        for membership in memberships:
            membership.cancel()
        await server.stop(0.0)


def _contract(options: FakeNodeOptions, role: NodeRole) -> Contract:
    return contract(role, options.model, slots=options.slots, max_model_len=MAX_MODEL_LEN)


def _info(options: FakeNodeOptions, model: Contract, generation: str) -> NodeInfo:
    role = model.role
    return NodeInfo(
        ref=NodeRef(node_id=f"fake-{role.value}-{options.index}", generation=generation),
        role=role,
        address="",  # It is known when the server has started.
        contract_json=model.canonical_json(),
        kv_blocks=options.slots * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=FIRST_TOKEN + NUM_TOKENS,
        model=options.model,
        slots=options.slots if role is NodeRole.DECODE else 0,
        engine_id=f"fake-engine-{options.role}-{options.index}",
    )


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    options = FakeNodeOptions(**json.loads(sys.argv[1]))
    engine = StepEngine(options.step_ms / 1000, options.slots)

    async def live(stop: asyncio.Event) -> None:
        ticking = asyncio.ensure_future(engine.tick())
        try:
            await (_stream if options.role == "direct" else _serve)(options, engine, stop)
        finally:
            ticking.cancel()

    raise_file_limit()
    gc.disable()  # Pauses would count for the router, or make the bare path late. The process lives for a minute.
    run(live)


if __name__ == "__main__":
    main()
