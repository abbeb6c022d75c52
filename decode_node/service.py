"""The gRPC service of a decode node.

Owns: leases and their time to live, the one step stream of each router, and the mapping between leases and engine
requests. Must not know: vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from corun.config.fields import DecodeConfig
from corun.errors import (
    CorunError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    StaleGenerationError,
    UnavailableError,
)
from corun.node.kv.handle import binding
from corun.node.life import Role, node_info
from corun.observe.tracing import OFF, Span, caller_of
from corun.params import SamplingParams, check_name
from corun.receipt import prompt_digest
from corun.room import blocks_needed
from corun.rpc import codec
from corun.rpc.interceptor import Context
from corun.types import (
    NO_ALTERNATIVES,
    Alternatives,
    FinishReason,
    KvHandle,
    KvReads,
    NixlEndpoint,
    NodeLoad,
    NodeRef,
    NodeRole,
)
from corun.v1 import decode_service_pb2 as pb
from corun.v1 import decode_service_pb2_grpc
from corun.v1.prefill_service_pb2 import PrefillRequest, PromptSample
from decode_node.metrics import DecodeMetrics
from decode_node.slots import Lease, NoRoomError, SlotTable, rows_of_step

SERVICE_NAME = "corun.v1.DecodeService"
MAX_SHARE_KEY = 512
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnPrompt:
    """The KV of a prompt that the same engine computes, or is about to compute. It stays until the sample has it."""

    prefill_id: str
    prefill_node: NodeRef


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One sample to decode from KV that a prefill node holds, or that the engine itself will hold."""

    request_id: str
    kv: KvHandle | OwnPrompt
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int
    share_key: str = ""
    """The key of the samples of this prompt that may share its blocks; empty if this one shares none."""


class StepRow(NamedTuple):
    """The result of one step for one request. A row that only ends a request has `token_id` None.

    It is a tuple, since several hundred are made in each step, and a frozen dataclass takes three times as long.
    """

    request_id: str
    token_id: int | None
    logprob: float
    finish: FinishReason | None = None
    detail: str = ""
    not_finite: bool = False
    """Whether the logits of the next token are not finite. The engine does not know yet that the request is over."""
    invalid: bool = False
    """Whether no token can follow under the request's own constraint, as `detail` says."""
    tops: Alternatives = NO_ALTERNATIVES
    """The likeliest tokens at this place, if the request asks for them."""


class DecodeEngine(Protocol):
    """The methods that a decode node needs from its engine, which calls `DecodeService.on_step` once per step, and
    `DecodeService.on_read` when KV has been read, at the latest before the step with the request's first token."""

    async def start(self, request: DecodeRequest) -> None:
        """Read the KV and decode. Every outcome, failures included, arrives as rows."""

    async def abort(self, request_id: str) -> None:
        """End a request; no row of it follows. Unknown ids are ignored."""

    async def connect(self, peer: NixlEndpoint) -> None:
        """Make the NIXL connection to a prefill node before its first handle arrives."""


class StepStream:
    """The rows that wait to be sent to one session of a router. The rows of several steps merge into one message while
    the router is slow, so the memory is bounded by its leases."""

    def __init__(self, session: int) -> None:
        self.session = session
        self._pending: list[tuple[int, StepRow]] = []
        self._read: list[int] = []
        self._granted: list[pb.LeaseGrant] = []
        self._ready = asyncio.Event()
        self._sent = 0
        self.replaced = False

    def add(self, lease_id: int, row: StepRow) -> None:
        self._pending.append((lease_id, row))

    def add_read(self, lease_id: int) -> None:
        """Tell that the KV of a lease has been read."""
        self._read.append(lease_id)

    def add_granted(self, lease_id: int, request_id: str) -> None:
        """Tell which lease the sample of a prompt has got, before anything else of it."""
        self._granted.append(pb.LeaseGrant(request_id=request_id, lease_id=lease_id))

    def flush(self) -> None:
        self._ready.set()

    def replace(self) -> None:
        """End the stream, because its router has opened another one."""
        self.replaced = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[pb.StreamStepsResponse]:
        """Yield the stream's messages. Message 0 is empty and tells the router that the stream is open."""
        yield pb.StreamStepsResponse(step=0)
        while True:
            await self._ready.wait()
            if self.replaced:
                return
            self._ready.clear()
            pending, self._pending = self._pending, []
            read, self._read = self._read, []
            granted, self._granted = self._granted, []
            if pending or read or granted:
                self._sent += 1
                message = _message(self._sent, pending, read)
                message.granted.extend(granted)
                yield message


def _message(step: int, rows: Sequence[tuple[int, StepRow]], read: Sequence[int]) -> pb.StreamStepsResponse:
    """Return the message with the rows of these leases. Its lists are filled at once, not by one call a number."""
    drawn = [(lease_id, row.token_id, row.logprob) for lease_id, row in rows if row.token_id is not None]
    lease_ids, token_ids, logprobs = zip(*drawn, strict=True) if drawn else ((), (), ())
    message = pb.StreamStepsResponse(step=step, lease_ids=lease_ids, token_ids=token_ids, logprobs=logprobs, read=read)
    with_tops = (row.tops for _, row in rows if row.token_id is not None)
    for number, tops in enumerate(with_tops):
        if tops.token_ids:
            message.alternatives.add(row=number, token_ids=tops.token_ids, logprobs=tops.logprobs)
    for lease_id, row in rows:
        if row.finish is not None:
            message.ended.add(
                lease_id=lease_id,
                finish_reason=codec.finish_reason_to_proto(row.finish),
                detail=row.detail,
                not_finite=row.not_finite,
                invalid=row.invalid,
            )
    return message


class DecodeService(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves `corun.v1.DecodeService` for one generation of one node."""

    def __init__(
        self,
        ref: NodeRef,
        engine: DecodeEngine,
        table: SlotTable,
        *,
        lease_ttl_ms: int,
        kv_reads: Callable[[], KvReads] = KvReads,
    ) -> None:
        """Create the service. kv_reads: returns the engine's KV reads so far, as of a few seconds ago."""
        self.ref = ref
        self.draining = False
        self.closed = ""
        """The reason why the node accepts no new work now; empty if it accepts work."""
        self._engine = engine
        self._table = table
        self._ttl_s = lease_ttl_ms / 1000
        self._streams: dict[str, StepStream] = {}  # router id -> the router's open stream
        self._running: dict[str, Lease] = {}  # engine request id -> lease
        self._expiry: dict[int, asyncio.TimerHandle] = {}  # lease id -> timer, for leases whose session has no stream
        self._handoffs: dict[str, Span] = {}  # engine request id -> span, for the requests that have no row yet
        self._aborts: set[asyncio.Task[None]] = set()
        self.step_sizes: Sequence[int] = (table.slots,)
        """The numbers of rows that the engine's steps have, ascending."""
        self._kv_reads = kv_reads
        self.metrics = DecodeMetrics(table)
        self.metrics.show_kv_reads(kv_reads)

    async def load(self) -> NodeLoad:
        return NodeLoad(
            used_slots=self._table.used_slots,
            used_kv_blocks=self._table.used_kv_blocks,
            steps=self.metrics.num_steps,
            tokens=int(self.metrics.tokens.value),
            kv_reads=self._kv_reads(),
            leases=len(self._table),
            rows=int(self.metrics.rows.value),
            used_rows=int(self.metrics.used_rows.value),
            step_seconds=(timed := self.metrics.step_seconds.value).sum,
            timed_steps=sum(timed.counts),
        )

    def on_step(self, rows: Sequence[StepRow], live: int = 0) -> None:
        """Process one engine step: add each row to its router's stream, and end the leases of samples that ended. The
        first token of a sample shows that it has a slot.

        live: the number of samples that the step computed, if these were more than drew a token.
        """
        ran = self._table.used_slots > 0
        for row in rows if self._handoffs else ():
            self._note_first(row)
        touched: dict[int, StepStream] = {}
        used = tokens = 0
        for row in rows:
            used += row.token_id is not None
            lease = self._running.get(row.request_id)
            if lease is None:  # released a moment ago
                continue
            tokens += row.token_id is not None
            if row.not_finite:
                self._drop(lease)
            elif row.finish is not None:
                self._end(lease)
            if (stream := self._stream_of(lease)) is not None:
                stream.add(lease.lease_id, row)
                touched[id(stream)] = stream
        now = asyncio.get_running_loop().time()
        computed = rows_of_step(max(live, used), self.step_sizes)
        self.metrics.note_step(computed, used, tokens, now, ran=ran)
        for stream in touched.values():
            stream.flush()

    def on_read(self, request_ids: Sequence[str]) -> None:
        """Tell routers that the KV of these requests has been read, though they may still wait for a slot."""
        now = asyncio.get_running_loop().time()
        for request_id in request_ids:
            lease = self._running.get(request_id)
            if lease is None:  # released a moment ago
                continue
            self._handoffs[request_id].event("kv_read", now)
            if (stream := self._stream_of(lease)) is not None:
                stream.add_read(lease.lease_id)
                stream.flush()

    def _note_first(self, row: StepRow) -> None:
        """Note the first row of a request, which tells whether its KV could be read. With a token, it has a slot."""
        if (span := self._handoffs.pop(row.request_id, None)) is None:
            return
        span.end(None if row.token_id is not None else UnavailableError(row.detail))
        if row.token_id is not None:
            self._table.enter(self._running[row.request_id].lease_id)

    def give_up(self, reason: str) -> None:
        """End all running samples with an error, so routers run them elsewhere. Late tokens of them are dropped."""
        for lease in list(self._running.values()):
            if (stream := self._stream_of(lease)) is not None:
                stream.add(lease.lease_id, StepRow(lease.request_id, None, 0.0, FinishReason.ERROR, reason))
            self._drop(lease)
        for stream in self._streams.values():
            stream.flush()

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        lease = self._reserve(request, request.generation, request.num_prompt_tokens, request.max_tokens)
        return pb.ReserveResponse(lease_id=lease.lease_id, ttl_ms=round(self._ttl_s * 1000))

    def reserve_with_prompt(self, request: PrefillRequest) -> int:
        """Lease room for the sample of a prompt, as `Reserve` does. Return the lease's id.

        The router may give the call up before it has the answer. Therefore its step stream tells of the lease, too, at
        the latest when `tell` is called.
        """
        reader = codec.node_ref_from_proto(request.reader)
        if reader.node_id != self.ref.node_id:
            raise InvalidArgumentError("reader", str(reader), f"must be {self.ref}")
        sample = request.sample
        tokens = len(request.prompt_token_ids), sample.sampling_params.max_tokens
        lease = self._reserve(sample, reader.generation, *tokens)
        if (stream := self._stream_of(lease)) is not None:
            stream.add_granted(lease.lease_id, request.request_id)
        return lease.lease_id

    def tell(self, router_id: str) -> None:
        """Send what a router's step stream has for it."""
        if (stream := self._streams.get(router_id)) is not None:
            stream.flush()

    def _reserve(
        self, asked: pb.ReserveRequest | PromptSample, generation: str, num_prompt_tokens: int, max_tokens: int
    ) -> Lease:
        """Lease room for a sample. Raises OverloadedError if there is none. asked: says for whom."""
        self._check_open(generation)
        if self.draining:
            raise UnavailableError(f"decode node {self.ref.node_id} is draining", 0.0)  # Another node helps at once.
        if num_prompt_tokens < 1 or max_tokens < 1:
            value = (num_prompt_tokens, max_tokens)
            raise InvalidArgumentError("num_prompt_tokens, max_tokens", value, "must each be at least 1")
        check_name("router_id", asked.router_id)
        if len(asked.share_key) > MAX_SHARE_KEY:
            raise InvalidArgumentError("share_key", asked.share_key, f"must have at most {MAX_SHARE_KEY} characters")
        self._check_session(asked.router_id, asked.session)
        whose: dict[str, Any] = {"share_key": asked.share_key, "session": asked.session}
        now = asyncio.get_running_loop().time()
        try:
            lease = self._table.reserve(asked.router_id, num_prompt_tokens, max_tokens, **whose, now=now)
        except NoRoomError as error:
            raise OverloadedError(f"decode node {self.ref.node_id}: {error}", retry_after_s=0.1) from error
        self._keep_or_expire(lease)
        return lease

    async def Start(self, request: pb.StartRequest, context: Context) -> pb.StartResponse:
        self._check_open(request.generation)
        lease = self._held(request.lease_id)
        await self._start(lease, self._bind(lease, request), context)
        return pb.StartResponse()

    async def start_with_prompt(
        self, request: PrefillRequest, lease_id: int, prefill_id: str, prefill_node: NodeRef, context: Context
    ) -> None:
        """Start the sample of a prompt in its lease. The same engine computes the prompt under this id, or is about to.

        Raises what `Start` raises. After a CorunError the lease goes on, since its router then calls `Start`.
        """
        self._check_open(request.reader.generation)
        sample, prompt = request.sample, list(request.prompt_token_ids)
        lease = self._held(lease_id)
        params = codec.sampling_params_from_proto(sample.sampling_params)
        self._check_lease(lease, prompt, params, prompt_digest(prompt))
        kv, key = OwnPrompt(prefill_id, prefill_node), lease.blocks.share_key
        decode = DecodeRequest(lease.request_id, kv, prompt, params, sample.seed, key)
        await self._start(lease, decode, context, may_start_again=True)

    async def _start(
        self, lease: Lease, decode: DecodeRequest, context: Context, *, may_start_again: bool = False
    ) -> None:
        """Start a lease's sample. If that fails, drop the lease. After a CorunError keep one that `may_start_again`."""
        try:
            self._running[decode.request_id] = lease
            handoff = caller_of(context).child("handoff", {"corun.decode_node": str(self.ref)})
            self._handoffs[decode.request_id] = handoff
            await self._engine.start(decode)
            if decode.request_id not in self._running:  # It ended in the meantime, maybe before the engine knew it.
                await self._engine.abort(decode.request_id)
        except BaseException as error:
            if may_start_again and isinstance(error, CorunError):
                self._running.pop(decode.request_id, None)
                self._handoffs.pop(decode.request_id, OFF).end(error)
            else:
                self._drop(lease)
            raise

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        lease = self._table.get(request.lease_id) if request.generation == self.ref.generation else None
        if lease is not None:
            self._drop(lease)
        return pb.ReleaseResponse()

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectResponse:
        self._check_open(request.generation)
        peer = codec.nixl_endpoint_from_proto(request.peer)
        if len(peer.stamp_addresses) != peer.tp_size:
            limit = f"must be one for each of {peer.tp_size} ranks"
            raise InvalidArgumentError("peer.stamp_addresses", peer.stamp_addresses, limit)
        await self._engine.connect(peer)
        return pb.ConnectResponse()

    async def StreamSteps(
        self, request: pb.StreamStepsRequest, context: Context
    ) -> AsyncIterator[pb.StreamStepsResponse]:
        """Stream a session's steps. When the stream opens, the expiry timers of its leases stop, and the leases of the
        router's earlier sessions end: it gave up this node with each of them, and waits for none of their samples."""
        router_id, session = request.router_id, request.session
        self._check_generation(request.generation)
        check_name("router_id", router_id)
        self._check_session(router_id, session)
        stream = StepStream(session)
        previous, self._streams[router_id] = self._streams.get(router_id), stream
        if previous is not None:
            previous.replace()
        for lease in self._table.held_by(router_id):
            if lease.session < session:
                log.info("lease %d of router %s ends: its session is over", lease.lease_id, router_id)
                self._drop(lease)
            else:
                self._keep_or_expire(lease)
        try:
            async for message in stream.messages():
                yield message
        finally:
            if self._streams.get(router_id) is stream:
                del self._streams[router_id]
                for lease in self._table.held_by(router_id):
                    self._keep_or_expire(lease)

    def _stream_of(self, lease: Lease) -> StepStream | None:
        """Return the stream of the lease's own session if it is open, else None."""
        stream = self._streams.get(lease.router_id)
        return stream if stream is not None and stream.session == lease.session else None

    def _bind(self, lease: Lease, request: pb.StartRequest) -> DecodeRequest:
        """Check that lease, prompt, handle and parameters belong together: a foreign handle is refused, never read."""
        prompt = list(request.prompt_token_ids)
        params = codec.sampling_params_from_proto(request.sampling_params)
        handle = codec.kv_handle_from_proto(request.handle)
        self._check_lease(lease, prompt, params, handle.prompt_digest)
        if handle.reader.node_id != self.ref.node_id:
            raise InvalidArgumentError("handle.reader", str(handle.reader), f"must be {self.ref}")
        self._check_generation(handle.reader.generation)
        if handle.num_tokens != len(prompt) or handle.prompt_digest != prompt_digest(prompt):
            raise InvalidArgumentError("handle.prompt_digest", handle.prompt_digest, "must be the prompt's own digest")
        if handle.binding != binding(handle):
            raise InvalidArgumentError("handle.binding", handle.binding, "must be that of the handle's other fields")
        blocks = blocks_needed(len(prompt), self._table.block_size)
        if [len(group) for group in handle.block_ids] != [blocks]:  # vLLM asserts it, and the engine would crash.
            raise InvalidArgumentError("handle.block_ids", handle.block_ids, f"must be one list of {blocks} blocks")
        counts = [owner.num_blocks for owner in handle.owners]
        if sum(counts) != blocks or min(counts) < 1 or handle.owners[-1].request_id != handle.request_id:
            limit = f"must be those of {blocks} blocks, and {handle.request_id} the last one"
            raise InvalidArgumentError("handle.owners", handle.owners, limit)
        return DecodeRequest(lease.request_id, handle, prompt, params, request.seed, lease.blocks.share_key)

    def _held(self, lease_id: int) -> Lease:
        if (lease := self._table.get(lease_id)) is None:
            raise NotFoundError(f"lease {lease_id} is not held on {self.ref.node_id}")
        return lease

    def _check_lease(self, lease: Lease, prompt: Sequence[int], params: SamplingParams, digest: str) -> None:
        """Check that a lease is for this prompt, which has this digest, and for so many tokens."""
        if lease.request_id in self._running:
            raise InvalidArgumentError("lease_id", lease.lease_id, "must not have been started before")
        if (len(prompt), params.max_tokens) != (lease.num_prompt_tokens, lease.max_tokens):
            limit = f"must be the {lease.num_prompt_tokens} + {lease.max_tokens} tokens that the lease holds room for"
            raise InvalidArgumentError("prompt_token_ids, max_tokens", (len(prompt), params.max_tokens), limit)
        share_key = lease.blocks.share_key
        if share_key and not share_key.startswith(digest):
            # Samples of other prompts would not find each other's blocks, and the lease counts on it.
            raise InvalidArgumentError("handle.prompt_digest", digest, "must begin the lease's share_key")

    def _keep_or_expire(self, lease: Lease) -> None:
        """Stop a lease's expiry timer if the stream of its session is open: then the router ends the lease, within its
        own timeouts. If the stream is not open, start the timer unless it runs already."""
        if self._stream_of(lease) is None:
            if lease.lease_id not in self._expiry:
                loop = asyncio.get_running_loop()
                self._expiry[lease.lease_id] = loop.call_later(self._ttl_s, self._expire, lease)
        elif timer := self._expiry.pop(lease.lease_id, None):
            timer.cancel()

    def _expire(self, lease: Lease) -> None:
        since = f"{self._ttl_s:g} s without its step stream"
        log.warning("lease %d of router %s ended after %s", lease.lease_id, lease.router_id, since)
        self.metrics.expired_leases.inc()
        self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        """Free a lease; end its engine request if it has one."""
        running = lease.request_id in self._running
        self._end(lease)
        if running:
            task = asyncio.ensure_future(self._engine.abort(lease.request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _end(self, lease: Lease) -> None:
        self._running.pop(lease.request_id, None)
        if span := self._handoffs.pop(lease.request_id, None):
            span.end(asyncio.CancelledError())
        self._table.release(lease.lease_id)
        if timer := self._expiry.pop(lease.lease_id, None):
            timer.cancel()

    def _check_open(self, generation: str) -> None:
        self._check_generation(generation)
        if self.closed:
            raise UnavailableError(f"decode node {self.ref.node_id}: {self.closed}")

    def _check_session(self, router_id: str, session: int) -> None:
        """Refuse a call of an earlier session while a later one is open: no router would ever release its lease."""
        stream = self._streams.get(router_id)
        if stream is not None and stream.session > session:
            raise UnavailableError(f"session {session} of router {router_id} is over: session {stream.session} stands")

    def _check_generation(self, generation: str) -> None:
        if generation != self.ref.generation:
            raise StaleGenerationError(self.ref.node_id, generation, self.ref.generation)


def role(config: DecodeConfig, ref: NodeRef, engine: Any) -> Role:
    """Return the parts of a decode node, or of a colocated node's decode side, around a started engine."""
    facts = engine.facts
    table = SlotTable(slots=config.slots, kv_blocks=facts.kv_blocks, block_size=facts.block_size, shares=engine.shares)
    service = DecodeService(ref, engine, table, lease_ttl_ms=config.lease_ttl_ms, kv_reads=lambda: engine.kv_reads)
    service.step_sizes = engine.step_sizes
    engine.on_step, engine.on_read = service.on_step, service.on_read
    return Role(
        engine=engine,
        service=service,
        service_name=SERVICE_NAME,
        register=decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
        info=node_info(config, ref, NodeRole.DECODE, engine, slots=config.slots),
        metrics=service.metrics,
    )
