"""Fake nodes for measuring a router: real node services around engines that compute nothing.

A fake decode engine emits steps at a fixed rate, with a row for every running request, and records the time of each
step. The log probability of a row says which step of which node it is, so that a client can tell how long its token was
on the way. Fake nodes claim no contract of a real model. Only a benchmark uses them; a cluster never falls back to
them. `python -m corun_bench.router.fake_node JSON` is one such node.
"""

from __future__ import annotations

import array
import asyncio
import gc
import itertools
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.node.kv.handle import bound
from corun.node.membership import NodeAgent
from corun.receipt import prompt_digest
from corun.rpc.encode import ResponseEncoder
from corun.rpc.server import GrpcServer, raise_file_limit, run
from corun.types import FinishReason, KvHandle, NixlEndpoint, NodeInfo, NodeRef, NodeRole, new_generation
from corun.v1 import cluster_service_pb2, decode_service_pb2_grpc, prefill_service_pb2_grpc
from corun_bench.router.load import FIRST_TOKEN, NUM_TOKENS, step_code
from decode_node.service import DecodeRequest, DecodeService, StepRow
from decode_node.slots import SlotTable
from prefill_node.service import PrefillService
from router.text import VERSION, Tokenizer

DIRECT_METHOD = "/corun.bench.FakeDirect/Generate"
"""The method of a node without a router: it takes a GenerateRequest and streams GenerateResponses."""
BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
DRIFT = 0.003
"""The share by which each node's step is longer than the previous node's, so that every phase between them occurs."""


@dataclass(frozen=True, kw_only=True)
class FakeNodeOptions:
    """The options of one fake node."""

    role: str
    """Role of the node: prefill, decode, or direct, which streams to clients by itself without any router."""
    model: str
    """Model whose tokenizer the router loads."""
    index: int
    """Index of the decode node, from 0."""
    routers: list[str]
    """host:port of each router."""
    slots: int
    step_ms: float
    times: str
    """File to which the node writes the times of its steps when it ends: doubles, on the machine's monotonic clock.
    A direct node first writes its port, to a file with suffix .port."""


class FakePrefillEngine:
    """A prefill engine that claims at once to hold the KV of a prompt."""

    def __init__(self, ref: NodeRef) -> None:
        self._ref = ref
        self.endpoint = NixlEndpoint(
            engine_id=f"fake-{ref.generation}", host="127.0.0.1", port=1, tp_size=1, stamp_addresses=(4096,)
        )

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        handle = KvHandle(
            prefill_node=self._ref,
            engine_id=self.endpoint.engine_id,
            request_id=request_id,
            block_ids=(tuple(range(-(-len(prompt_token_ids) // BLOCK_SIZE))),),
            host=self.endpoint.host,
            port=self.endpoint.port,
            tp_size=self.endpoint.tp_size,
            num_tokens=len(prompt_token_ids),
            prompt_digest=prompt_digest(prompt_token_ids),
            reader=reader,
        )
        return bound(handle)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        return False

    def holds(self, request_id: str) -> bool:
        return False

    async def release(self, request_id: str, reader: str) -> None:
        """Do nothing: there is no KV to drop."""

    async def held_kv_blocks(self) -> int:
        return 0


class FakeDecodeEngine:
    """A decode engine that emits a row for every running request each `step_s`, whatever was asked for."""

    def __init__(self, index: int, step_s: float) -> None:
        self.times = array.array("d")
        """The time at which each step was emitted, on the monotonic clock."""
        self.on_step: Callable[[Sequence[StepRow]], None] = lambda _: None
        self._index = index
        self._step_s = step_s
        self._left: dict[str, int] = {}  # Tokens to come, by request id.

    async def start(self, request: DecodeRequest) -> None:
        self.add(request.request_id, request.params.max_tokens)

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
            self.step()

    def step(self) -> None:
        """Emit one step now."""
        step = len(self.times)
        token_id, logprob = FIRST_TOKEN + step % NUM_TOKENS, step_code(self._index, step)
        rows, left = [], self._left
        for request_id, num_left in list(left.items()):
            if num_left == 1:
                del left[request_id]
                rows.append(StepRow(request_id, token_id, logprob, FinishReason.LENGTH))
            else:
                left[request_id] = num_left - 1
                rows.append(StepRow(request_id, token_id, logprob))
        self.times.append(time.monotonic())
        self.on_step(rows)


class FakeDirect:
    """The bare stream that a router is compared with: one call per sample, one message per token, nothing else."""

    def __init__(self, engine: FakeDecodeEngine) -> None:
        self._engine = engine
        self._rows: dict[str, asyncio.Queue[StepRow]] = {}
        self._names = map(str, itertools.count())
        engine.on_step = self.on_step

    def on_step(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._rows[row.request_id].put_nowait(row)

    async def generate(self, data: bytes, context: Any) -> None:
        request = cluster_service_pb2.GenerateRequest.FromString(data)
        encoder, name = ResponseEncoder(request.request_id, 0, request.seed), next(self._names)
        rows = self._rows[name] = asyncio.Queue[StepRow]()
        self._engine.add(name, request.sampling_params.max_tokens)
        try:
            finish = None
            while finish is None:
                row = await rows.get()
                assert row.token_id is not None  # No row fails here.
                await context.write(encoder.encode(" word", [row.token_id], [row.logprob]))
                finish = row.finish
        finally:
            await self._engine.abort(name)
            del self._rows[name]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Listen on a free port, and give its number to the block."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 4096)])
        handler = grpc.unary_stream_rpc_method_handler(self.generate)
        service, method = DIRECT_METHOD[1:].split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0.0)


def fake_contract(role: NodeRole, model: str, slots: int) -> Contract:
    """Return a contract that calls everything a fake except the tokenizer, which is the model's."""
    tokenizer = {"tokenizer_digest": Tokenizer.load(model).digest, "tokenizers": VERSION}
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN, "tensor_parallel_size": 1}
    part = _fake(ModelContract, **tokenizer, **sizes)
    if role is NodeRole.PREFILL:
        return Contract(role=role, model=part, prefill=_fake(PrefillContract, chunk_size=BLOCK_SIZE))
    return Contract(role=role, model=part, decode=_fake(DecodeContract, slots=slots))


def _fake(kind: Any, **known: Any) -> Any:
    """Return a part of a contract. Every text that is not known is "fake", every number 0, every list empty."""
    by_type = {"str": "fake", "int": 0}
    return kind(**{field.name: by_type.get(str(field.type), ()) for field in fields(kind)} | known)


class FakeNode:
    """One fake node over its life."""

    def __init__(self, options: FakeNodeOptions) -> None:
        self._options, self._times = options, Path(options.times)
        self._role = NodeRole.PREFILL if options.role == "prefill" else NodeRole.DECODE
        self._ref = NodeRef(node_id=f"fake-{options.role}-{options.index}", generation=new_generation())
        self._engine = FakeDecodeEngine(options.index, options.step_ms / 1000 * (1 + DRIFT * options.index))

    async def live(self, stop: asyncio.Event) -> None:
        """Serve until it is told to stop, then write the times of its steps."""
        ticking = asyncio.ensure_future(self._engine.tick())
        try:
            await (self._stream(stop) if self._options.role == "direct" else self._serve(stop))
        finally:
            ticking.cancel()
        self._times.write_bytes(self._engine.times.tobytes())

    async def _stream(self, stop: asyncio.Event) -> None:
        async with FakeDirect(self._engine).serving() as port:
            unfinished = self._times.with_suffix(".new")
            unfinished.write_text(str(port))
            unfinished.rename(unfinished.with_suffix(".port"))
            await stop.wait()

    async def _serve(self, stop: asyncio.Event) -> None:
        server, (register, service, facts) = GrpcServer(), self._service()
        server.add(register, service)
        await server.start()
        info = NodeInfo(
            ref=self._ref,
            role=self._role,
            address=server.address,
            contract_json=fake_contract(self._role, self._options.model, self._options.slots).canonical_json(),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=FIRST_TOKEN + NUM_TOKENS,
            model=self._options.model,
            **facts,
        )
        membership = asyncio.ensure_future(NodeAgent(info, tuple(self._options.routers), service.load).run())
        try:
            await stop.wait()
        finally:
            membership.cancel()
            await server.stop(0.0)

    def _service(self) -> tuple[Callable[..., None], Any, dict[str, Any]]:
        slots = self._options.slots
        kv_blocks = slots * MAX_MODEL_LEN // BLOCK_SIZE
        if self._role is NodeRole.PREFILL:
            engine = FakePrefillEngine(self._ref)
            register = prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server
            prefill = PrefillService(self._ref, engine, kv_tokens=kv_blocks * BLOCK_SIZE)
            return register, prefill, {"nixl": engine.endpoint, "kv_blocks": kv_blocks}
        table = SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=BLOCK_SIZE)
        service = DecodeService(self._ref, self._engine, table, lease_ttl_ms=60_000)
        self._engine.on_step = service.on_step
        facts = {"slots": slots, "kv_blocks": kv_blocks}
        return decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, service, facts


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    options = FakeNodeOptions(**json.loads(sys.argv[1]))
    raise_file_limit()
    gc.disable()  # Pauses would count for the router, or make the bare path late. The process lives for a minute.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run(FakeNode(options).live)


if __name__ == "__main__":
    main()
