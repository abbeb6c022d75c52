"""Fake nodes for measuring a router: real node services around engines that compute nothing.

Fake nodes claim no contract of a real model. Only a benchmark uses them; a cluster never falls back to them.
`python -m corun_bench.router.fake_nodes` is one such node.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio
import tyro
import uvloop

from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.node.membership import NodeAgent
from corun.rpc.encode import ResponseEncoder
from corun.rpc.pump import Pump, Source
from corun.rpc.server import GrpcServer, raise_file_limit, run
from corun.types import NodeInfo, NodeRef, NodeRole, new_generation
from corun.v1 import cluster_service_pb2, decode_service_pb2_grpc, prefill_service_pb2_grpc
from corun_bench.router.fake_engines import BLOCK_SIZE, FIRST_TOKEN, NUM_TOKENS, FakeDecodeEngine, FakePrefillEngine
from decode_node.service import DecodeService, StepRow
from decode_node.slots import SlotTable
from prefill_node.service import PrefillService
from router.text import VERSION, Tokenizer

DIRECT_METHOD = "/corun.bench.FakeDirect/Generate"
"""The method of a node without a router: it takes a GenerateRequest and streams GenerateResponses."""
MAX_MODEL_LEN = 8192
DRIFT = 0.003
"""The share by which each node's step is longer than the previous node's, so that every phase between them occurs."""


@dataclass(frozen=True, kw_only=True)
class FakeNodeOptions:
    """One fake node."""

    role: Literal["prefill", "decode", "direct"]
    """Role of the node; direct: it streams to clients by itself, without any router."""
    model: str
    """Model whose tokenizer the router loads."""
    index: int = 0
    """Index of the decode node, from 0."""
    routers: tuple[str, ...] = ()
    """host:port of each router."""
    slots: int = 256
    step_ms: float = 30.0
    times: Path
    """File to which the node writes the times of its steps when it ends: doubles, on the machine's monotonic clock.
    A direct node first writes its port, to a file with suffix .port."""


class FakeStream(Source):
    """The messages of one sample that are still to be sent; they are like a router's."""

    def __init__(self, request: cluster_service_pb2.GenerateRequest) -> None:
        self._encoder = ResponseEncoder(request.request_id, 0, request.seed)
        self._left = request.sampling_params.max_tokens
        self._messages: deque[bytes] = deque()
        self._ready: Callable[[], None] | None = None

    @property
    def has_ended(self) -> bool:
        return not self._left

    def listen(self, ready: Callable[[], None] | None) -> None:
        self._ready = ready

    def pull(self) -> bytes | None:
        if not self._messages:
            return None
        self._left -= 1
        return self._messages.popleft()

    def add(self, row: StepRow) -> None:
        assert row.token_id is not None  # No row fails here.
        self._messages.append(self._encoder.encode(" word", [row.token_id], [row.logprob]))
        if self._ready is not None:
            self._ready()


class FakeDirect:
    """The bare stream that a router is compared with: one call per sample, one message per token, nothing else."""

    def __init__(self, engine: FakeDecodeEngine) -> None:
        self._engine = engine
        self._streams: dict[str, FakeStream] = {}
        self._names = itertools.count()

    def on_step(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._streams[row.request_id].add(row)

    async def generate(self, data: bytes, context: Any) -> None:
        request = cluster_service_pb2.GenerateRequest.FromString(data)
        name = str(next(self._names))
        stream = self._streams[name] = FakeStream(request)
        self._engine.add(name, request.sampling_params.max_tokens)
        try:
            await Pump(stream, context, self).run()
        finally:
            await self._engine.abort(name)
            del self._streams[name]

    def begin(self) -> None:
        """Do nothing: this benchmark does not track waits for slow clients."""

    def end(self) -> None:
        """Do nothing: this benchmark does not track waits for slow clients."""

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
    fakes = dict.fromkeys(("config_digest", "weights_digest", "engine", "torch", "device", "cpu_isa"), "fake")
    part = ModelContract(
        **fakes,
        tokenizer_digest=Tokenizer.load(model).digest,
        dtype="float32",
        quantization="none",
        kv_cache_dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=1,
        tokenizers=VERSION,
        kernels=(),
        plugins=(),
        cpu_features=(),
        cpu_caches=(),
        driver="",
        cuda="",
        threads=1,
        blas_policy="fake",
        environment=(),
    )
    if role is NodeRole.PREFILL:
        prefill = PrefillContract(
            attention_backend="fake",
            runner="fake",
            chunk_size=BLOCK_SIZE,
            buckets=(),
            split_policy="fake",
            multiprocessors=0,
        )
        return Contract(role=role, model=part, prefill=prefill)
    decode = DecodeContract(
        attention_backend="fake",
        runner="fake",
        sampler="fake",
        slots=slots,
        split_policy="fake",
        graph="fake",
        multiprocessors=0,
        eos_token_ids=(),
    )
    return Contract(role=role, model=part, decode=decode)


class FakeNode:
    """One fake node over its life."""

    def __init__(self, options: FakeNodeOptions) -> None:
        self._options = options
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
        self._options.times.write_bytes(self._engine.times.tobytes())

    async def _stream(self, stop: asyncio.Event) -> None:
        direct = FakeDirect(self._engine)
        self._engine.on_step = direct.on_step
        async with direct.serving() as port:
            ready = self._options.times.with_suffix(".port")
            ready.with_suffix(".new").write_text(str(port))
            ready.with_suffix(".new").rename(ready)
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
        membership = asyncio.ensure_future(NodeAgent(info, self._options.routers, service.load).run())
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
    options = tyro.cli(FakeNodeOptions, prog="python -m corun_bench.router.fake_nodes")
    raise_file_limit()
    gc.disable()  # Pauses would count for the router, or make the bare path late. The process lives for a minute.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run(FakeNode(options).live)


if __name__ == "__main__":
    main()
