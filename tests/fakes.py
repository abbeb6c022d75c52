"""Fake engines and nodes: real node services and a real router around engines that only hash.

A token and its log probability are a hash of (prompt, parameters, seed, position), so the output of a sample is known
ahead (`expected`). KV is an entry in a table. A decode engine that gets a handle for KV that is not in the table fails
the sample, as the real one does. Only tests use this; a cluster never falls back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from corun.config.fields import RouterConfig
from corun.contract import Contract, DecodeContract, ModelContract, PrefillContract
from corun.errors import UnavailableError, from_rpc_error
from corun.node.kv.handle import bound
from corun.node.membership import NodeAgent
from corun.params import SamplingParams
from corun.receipt import output_digest, prompt_digest
from corun.rpc import codec
from corun.rpc.auth import Gate
from corun.rpc.channel import OPEN, Access, channel
from corun.rpc.server import GrpcServer
from corun.types import (
    ClusterStatus,
    FinishReason,
    KvHandle,
    NixlEndpoint,
    NodeInfo,
    NodeRef,
    NodeRole,
    NodeState,
    NodeStatus,
    new_generation,
)
from corun.v1 import (
    cluster_service_pb2,
    cluster_service_pb2_grpc,
    decode_service_pb2_grpc,
    prefill_service_pb2_grpc,
)
from decode_node.service import DecodeRequest, DecodeService, StepRow
from decode_node.slots import SlotTable
from prefill_node.service import PrefillService
from router.app import Router
from router.text import VERSION, Tokenizer

VOCAB_SIZE = 256
EOS = 0
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
KV_BLOCKS = 1000
STEP_MS = 1.0
WAIT_S = 30.0
"""The longest wait of any test for anything."""


def write_tokenizer(directory: Path) -> str:
    """Write a byte-level tokenizer of 256 tokens as a model's; return the directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fake = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    fake.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fake.decoder = decoders.ByteLevel()
    (directory / "tokenizer.json").write_text(fake.to_str())
    return str(directory)


def token(prompt: Sequence[int], params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
    """Return the token that fake engines draw, and its log probability, an fp32 value."""
    key = f"{prompt_digest(prompt)} {params.digest()} {seed} {position}"
    number, fraction = struct.unpack("<II", hashlib.blake2b(key.encode(), digest_size=8).digest())
    logprob: float = struct.unpack("<f", struct.pack("<f", -fraction / 2**30))[0]
    return number % VOCAB_SIZE, logprob


def expected(prompt: Sequence[int], params: SamplingParams, seed: int) -> tuple[list[int], list[float], FinishReason]:
    """Return the whole output of a sample; stop strings are ignored."""
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        token_id, logprob = token(prompt, params, seed, len(ids))
        ids.append(token_id)
        logprobs.append(logprob)
        if reason := finish_reason(params, token_id, len(ids)):
            return ids, logprobs, reason


def expected_digest(prompt: Sequence[int], params: SamplingParams, seed: int) -> str:
    ids, logprobs, _ = expected(prompt, params, seed)
    return output_digest(ids, logprobs)


def finish_reason(params: SamplingParams, token_id: int, num_tokens: int) -> FinishReason | None:
    """Return why an engine ends a sample at its newest token, or None if it goes on.

    The fake model has no end-of-sequence token.
    """
    if token_id in params.stop_token_ids and num_tokens > params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= params.max_tokens else None


class FakeKv:
    """The KV that all prefill engines hold: prompts by (engine id, request id), and the readers of shared KV."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str], tuple[int, ...]] = {}
        self.readers: dict[tuple[str, str], set[str]] = {}

    def take(self, key: tuple[str, str], reader: str) -> bool:
        """Remove a reader, and the KV after its last one. Return False if the KV was not there."""
        readers = self.readers.get(key, {reader})
        readers.discard(reader)
        return key in self.held if readers else self.held.pop(key, None) is not None


class FakePrefillEngine:
    """A prefill engine that takes `delay_s` per prompt, one prompt at a time."""

    def __init__(self, ref: NodeRef, kv: FakeKv) -> None:
        self.ref = ref
        self.endpoint = NixlEndpoint(
            engine_id=f"engine-{ref.generation}", host="127.0.0.1", port=1, tp_size=1, stamp_addresses=(4096,)
        )
        self.delay_s = 0.0
        self.kv_ttl_s = 30.0
        """How long KV is kept for its reader."""
        self.errors: list[Exception] = []
        """The errors that the next prefills raise, one each."""
        self.hanging = False
        self.prefilled: list[tuple[int, ...]] = []
        self.released: list[str] = []
        self.expired_claims = 0
        self.turn = asyncio.Lock()
        """The lock of the prompt that is being computed. While a test holds it, prompts gather uncomputed."""
        self._kv = kv

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        async with self.turn:
            await asyncio.sleep(self.delay_s)
            if self.hanging:
                await asyncio.sleep(3600)
        if self.errors:
            raise self.errors.pop(0)
        prompt = tuple(prompt_token_ids)
        self.prefilled.append(prompt)
        key = self.endpoint.engine_id, request_id
        self._kv.held[key] = prompt
        asyncio.get_running_loop().call_later(self.kv_ttl_s, self._kv.held.pop, key, None)
        handle = KvHandle(
            prefill_node=self.ref,
            engine_id=self.endpoint.engine_id,
            request_id=request_id,
            block_ids=(tuple(range(1, 1 - (-len(prompt) // BLOCK_SIZE))),),
            host=self.endpoint.host,
            port=self.endpoint.port,
            tp_size=self.endpoint.tp_size,
            num_tokens=len(prompt),
            prompt_digest=prompt_digest(prompt),
            reader=reader,
        )
        return bound(handle)

    @property
    def known_kv_blocks(self) -> int:
        held = [prompt for (engine, _), prompt in self._kv.held.items() if engine == self.endpoint.engine_id]
        return sum(-(-len(prompt) // BLOCK_SIZE) for prompt in held)

    async def held_kv_blocks(self) -> int:
        return self.known_kv_blocks

    async def release(self, request_id: str, reader: str) -> None:
        self.released.append(reader)
        self._kv.take((self.endpoint.engine_id, request_id), reader)

    async def share(self, request_id: str, readers: Sequence[str]) -> bool:
        key = self.endpoint.engine_id, request_id
        if key in self._kv.held:
            self._kv.readers.setdefault(key, {request_id}).update(readers)
        return key in self._kv.held

    def holds(self, request_id: str) -> bool:
        return (self.endpoint.engine_id, request_id) in self._kv.held


class FakeDecodeEngine:
    """A decode engine that draws a token for every running request each `step_ms`.

    A request without its KV ends with an error.
    """

    def __init__(self, kv: FakeKv) -> None:
        self.step_ms = STEP_MS
        self.hanging = False
        self.fail_after: int | None = None
        """End the next request that has this many tokens with an error, once."""
        self.not_finite: list[int] = []
        """The positions, from 0, at which some request finds no finite logits; once each."""
        self.start_errors: list[Exception] = []
        """The errors that the next starts raise, one each."""
        self.corrupt = False
        """Whether it draws other log probabilities than it should."""
        self.connected: list[NixlEndpoint] = []
        self.connect_errors: list[Exception] = []
        self.most_running = 0
        self.on_step: Callable[[Sequence[StepRow]], None] = lambda _: None
        self._kv = kv
        self._running: dict[str, tuple[DecodeRequest, int]] = {}  # with the number of tokens drawn
        self._clock: asyncio.Task[None] | None = None

    async def start(self, request: DecodeRequest) -> None:
        if self.start_errors:
            raise self.start_errors.pop(0)
        self._running[request.request_id] = request, 0
        self.most_running = max(self.most_running, len(self._running))
        if self._clock is None or self._clock.done():
            self._clock = asyncio.ensure_future(self._tick())

    async def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    async def connect(self, peer: NixlEndpoint) -> None:
        if self.connect_errors:
            raise self.connect_errors.pop(0)
        self.connected.append(peer)

    def shutdown(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    async def _tick(self) -> None:
        while self._running:
            await asyncio.sleep(self.step_ms / 1000)
            if not self.hanging:
                self.on_step([self._step(*running) for running in list(self._running.values())])

    def _step(self, request: DecodeRequest, drawn: int) -> StepRow:
        handle = request.handle
        has_kv = drawn > 0 or self._kv.take((handle.engine_id, handle.request_id), handle.claim)
        if not has_kv or self.fail_after == drawn:
            self.fail_after = None if has_kv else self.fail_after
            del self._running[request.request_id]
            return StepRow(request.request_id, None, 0.0, FinishReason.ERROR, "the KV could not be loaded")
        if drawn in self.not_finite:
            self.not_finite.remove(drawn)
            del self._running[request.request_id]
            return StepRow(request.request_id, None, 0.0, FinishReason.ERROR, "not finite", not_finite=True)
        token_id, logprob = token(request.prompt_token_ids, request.params, request.seed, drawn)
        reason = finish_reason(request.params, token_id, drawn + 1)
        if reason is None:
            self._running[request.request_id] = request, drawn + 1
        else:
            del self._running[request.request_id]
        return StepRow(request.request_id, token_id, -1.0 if self.corrupt else logprob, reason)


def model_contract(model: str, **changes: Any) -> ModelContract:
    values: dict[str, Any] = {
        "weights_digest": "w" * 64,
        "tokenizer_digest": Tokenizer.load(model).digest,
        "config_digest": "c" * 64,
        "dtype": "float32",
        "quantization": "none",
        "kv_cache_dtype": "float32",
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "tensor_parallel_size": 1,
        "engine": "fake 1",
        "tokenizers": VERSION,
        "torch": "none",
        "kernels": (),
        "plugins": (),
        "device": "none",
        "driver": "",
        "cuda": "",
        "cpu_isa": "none",
        "cpu_features": (),
        "cpu_caches": (),
        "threads": 1,
        "blas_policy": "default",
        "environment": (),
    }
    return ModelContract(**{**values, **changes})


def contract(role: NodeRole, model: str, *, slots: int = 8, **changes: Any) -> Contract:
    """Return a fake node's contract; `changes` go to its model part."""
    part = model_contract(model, **changes)
    if role is NodeRole.PREFILL:
        prefill = PrefillContract(
            attention_backend="none",
            runner="fake",
            chunk_size=64,
            buckets=(),
            split_policy="split-kv on",
            multiprocessors=0,
        )
        return Contract(role=role, model=part, prefill=prefill)
    decode = DecodeContract(
        attention_backend="none",
        runner="fake",
        sampler="hash 1",
        slots=slots,
        split_policy="off",
        graph="none",
        multiprocessors=0,
        eos_token_ids=(),
    )
    return Contract(role=role, model=part, decode=decode)


@dataclasses.dataclass(kw_only=True)
class FakeNode:
    """A running node: a real service over a fake engine, with the real agent."""

    info: NodeInfo
    engine: Any
    service: Any
    server: GrpcServer
    agent: NodeAgent
    membership: asyncio.Task[None] | None = None

    @property
    def used_slots(self) -> int:
        return len(self.service._table) if self.info.role is NodeRole.DECODE else 0

    @property
    def drawn_tokens(self) -> int:
        """The number of tokens that a decode node has drawn since its start."""
        return int(self.service.metrics.tokens.value)

    @property
    def queued_tokens(self) -> int:
        """The number of tokens of the prompts that a prefill node is to compute."""
        return int(self.service.queued_tokens)

    def join(self) -> None:
        self.membership = asyncio.ensure_future(self.agent.run())

    async def fall_silent(self) -> None:
        """Stop the heartbeats; the service still answers."""
        if self.membership is not None:
            self.membership.cancel()
            await asyncio.wait((self.membership,))

    async def kill(self) -> None:
        """End at once, as a process that dies."""
        await self.fall_silent()
        if isinstance(self.engine, FakeDecodeEngine):
            self.engine.shutdown()
        await self.server.stop(0.0)


class FakeCluster:
    """A real router and any number of fake nodes, in one process."""

    def __init__(self, model: str, router: Router, access: Access = OPEN, client: Access = OPEN) -> None:
        self.model = model
        self.router = router
        self.access = access
        """The access of the cluster's members."""
        self.client = client
        self.kv = FakeKv()
        self.nodes: list[FakeNode] = []

    @property
    def address(self) -> str:
        return self.router.server.address

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        async with channel(self.address, access=self.client) as link:
            yield cluster_service_pb2_grpc.ClusterServiceStub(link)

    async def add_prefill(self, node_id: str = "p1", *, join: bool = True, **changes: Any) -> FakeNode:
        ref = NodeRef(node_id=node_id, generation=new_generation())
        engine = FakePrefillEngine(ref, self.kv)
        service = PrefillService(ref, engine, kv_tokens=KV_BLOCKS * BLOCK_SIZE)
        register = prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server
        facts = {"role": NodeRole.PREFILL, "nixl": engine.endpoint, "kv_blocks": KV_BLOCKS}
        return await self._add(ref, engine, service, register, facts, join=join, changes=changes)

    async def add_decode(
        self,
        node_id: str = "d1",
        *,
        slots: int = 8,
        kv_blocks: int = 1000,
        lease_ttl_ms: int = 60_000,
        join: bool = True,
        **changes: Any,
    ) -> FakeNode:
        ref = NodeRef(node_id=node_id, generation=new_generation())
        engine = FakeDecodeEngine(self.kv)
        table = SlotTable(slots=slots, kv_blocks=kv_blocks, block_size=BLOCK_SIZE)
        service = DecodeService(ref, engine, table, lease_ttl_ms=lease_ttl_ms)
        engine.on_step = service.on_step
        register = decode_service_pb2_grpc.add_DecodeServiceServicer_to_server
        facts = {"role": NodeRole.DECODE, "slots": slots, "kv_blocks": kv_blocks}
        return await self._add(ref, engine, service, register, facts, join=join, changes={"slots": slots, **changes})

    async def _add(
        self,
        ref: NodeRef,
        engine: Any,
        service: Any,
        register: Any,
        facts: dict[str, Any],
        *,
        join: bool,
        changes: dict[str, Any],
    ) -> FakeNode:
        server = GrpcServer(tls=self.access.tls, gate=Gate(cluster=self.access.token))
        server.add(register, service)
        await server.start()
        info = NodeInfo(
            ref=ref,
            address=server.address,
            contract_json=contract(facts["role"], self.model, **changes).canonical_json(),
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            model=self.model,
            **facts,
        )
        agent = NodeAgent(info, [self.address], service.load, self.access)
        node = FakeNode(info=info, engine=engine, service=service, server=server, agent=agent)
        self.nodes.append(node)
        if join:
            node.join()
        return node

    async def ready(self, *names: str) -> None:
        """Wait until each of these nodes, by id or as id@generation, is READY."""
        await self.until(lambda: all(self.state(name) is NodeState.READY for name in names))

    def state(self, name: str) -> NodeState | None:
        status = self._status(name)
        return status.state if status else None

    def detail(self, name: str) -> str:
        status = self._status(name)
        return status.detail if status else ""

    def _status(self, name: str) -> NodeStatus | None:
        found = [s for s in self.router.registry.statuses() if name in (s.node.ref.node_id, str(s.node.ref))]
        return found[0] if found else None

    async def status(self) -> ClusterStatus:
        async with self.stub() as stub:
            answer = await stub.GetCluster(cluster_service_pb2.GetClusterRequest(), timeout=WAIT_S)
        return codec.cluster_status_from_proto(answer)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fail the test if it does not come."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "the condition did not come"
            await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """Wait until nothing is held anywhere: no slot, no KV, no place in the queue, no claim of the router."""
        try:
            await self.until(lambda: not self.held())
        except AssertionError:
            raise AssertionError(f"still held: {self.held()}") from None

    def held(self) -> list[str]:
        """Return a text for each thing that is held."""
        live = [node for node in self.nodes if node.membership is not None and not node.membership.done()]
        engines = {node.engine.endpoint.engine_id for node in live if isinstance(node.engine, FakePrefillEngine)}
        found = [f"{node.used_slots} slots of {node.info.ref}" for node in live if node.used_slots]
        found += [f"KV {key}" for key in self.kv.held if key[0] in engines]
        found += [f"{self.router.queue.waiting} samples wait"] * (self.router.queue.waiting > 0)
        return found + claims(self.router)

    async def close(self) -> None:
        await self.router.stop()
        for node in self.nodes:
            await node.kill()


def router_config(**config: Any) -> RouterConfig:
    """Return the config of a router on a free port, with timeouts that suit tests."""
    values = {"port": 0, "seed_key": "00" * 32, "heartbeat_interval_ms": 50, "heartbeat_timeout_ms": 2000}
    values["audit_fraction"] = 0  # Otherwise one sample of a thousand would run twice.
    return RouterConfig(**{**values, **config})


async def start_router(config: RouterConfig) -> Router:
    router = Router(config)
    await router.start()
    return router


async def kill_router(router: Router) -> None:
    """End a router as a process that dies: it gives nothing back."""
    router._activity.draining = True
    for member in (*router.registry._decodes.values(), *router.registry._prefills.values()):
        router.registry.lose(member, "the router was killed")
    await router.stop()


def claims(router: Router) -> list[str]:
    """Return a text for each of the router's own claims on nodes."""
    registry = router.registry
    decodes = [f"claim on a slot of {m.info.ref}" for m in registry._decodes.values() if m.room._slots.own]
    decodes += [f"claim on KV of {m.info.ref}" for m in registry._decodes.values() if m.room._blocks.own]
    return decodes + [f"claim on a turn of {m.info.ref}" for m in registry._prefills.values() if m.room._in_flight]


@contextlib.asynccontextmanager
async def cluster(
    model: str,
    *,
    prefills: int = 1,
    decodes: int = 1,
    slots: int = 8,
    lease_ttl_ms: int = 60_000,
    client: Access = OPEN,
    **config: Any,
) -> AsyncIterator[FakeCluster]:
    """Run a cluster whose nodes are READY. At the end, check that it holds nothing, and close it."""
    settings = router_config(**config)
    fake = FakeCluster(model, await start_router(settings), Access.of_member(settings), client)
    try:
        for number in range(1, prefills + 1):
            await fake.add_prefill(f"p{number}")
        for number in range(1, decodes + 1):
            await fake.add_decode(f"d{number}", slots=slots, lease_ttl_ms=lease_ttl_ms)
        if prefills and decodes:
            await fake.ready(*(node.info.ref.node_id for node in fake.nodes))
        yield fake
        await fake.idle()
    finally:
        await fake.close()


@dataclasses.dataclass(kw_only=True)
class Output:
    """One sample as a client saw it."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    seed: int = 0
    receipt: Any = None
    messages: int = 0


async def generate(
    fake: FakeCluster,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    *,
    seed: int | None = None,
    request_id: str = "",
    timeout_s: float = WAIT_S,
) -> list[Output]:
    """Run a request over gRPC; return one output per sample. Raises typed errors."""
    params = params or SamplingParams(logprobs=True)
    request = codec.generate_request(prompt, params, seed=seed, request_id=request_id)
    return await send(fake, request, timeout_s=timeout_s)


async def send(
    fake: FakeCluster, request: cluster_service_pb2.GenerateRequest, *, timeout_s: float = WAIT_S
) -> list[Output]:
    """Send a request as it is; return one output per sample."""
    outputs = [Output() for _ in range(max(1, request.sampling_params.n))]
    try:
        async with fake.stub() as stub:
            async for message in stub.Generate(request, timeout=timeout_s):
                take(outputs[message.sample_index], message)
    except Exception as error:
        raise from_rpc_error(error) if hasattr(error, "code") else error from None
    if any(output.receipt is None for output in outputs):
        raise UnavailableError("the stream ended before every sample had its receipt")
    return outputs


def retries(fake: FakeCluster) -> dict[str, float]:
    """The runs of samples that a node failed, by reason."""
    counter = fake.router.runner.metrics.sample_retries
    return {reason: found for reason in ("lost", "fault") if (found := counter.labels(reason).value)}


def take(output: Output, message: cluster_service_pb2.GenerateResponse) -> None:
    output.text += message.text
    output.token_ids.extend(message.token_ids)
    output.logprobs.extend(message.logprobs)
    output.seed = message.seed
    output.messages += 1
    if message.HasField("receipt"):
        output.receipt = codec.receipt_from_proto(message.receipt)
