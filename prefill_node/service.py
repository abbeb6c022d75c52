"""The gRPC face of a prefill node.

Owns: which calls are accepted, what is dropped when a caller goes away, the node's load figures.
Must not know: vLLM. The engine is anything with the methods of `PrefillEngine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from corun.errors import InvalidArgumentError, StaleGenerationError, UnavailableError
from corun.node.kv.owners import SEPARATORS
from corun.observe.figures import LATENCIES_S, Histogram, Rate
from corun.observe.tracing import Lap, Value, caller_of
from corun.rpc import codec
from corun.rpc.server import Context
from corun.types import KvHandle, NodeLoad, NodeRef
from corun.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from prefill_node.sharing import Engine, Sharing

SERVICE_NAME = "corun.v1.PrefillService"


class PrefillEngine(Engine, Protocol):
    """What a prefill node needs of its engine."""

    async def held_kv_blocks(self) -> int:
        """KV blocks of finished prefills that are neither read, released nor expired."""


class Figures:
    """What a prefill node counts, since its start.

    Prompts are computed one at a time, in the order in which they come: one is computed from when the one before it was
    done, or from its arrival if that was later. Waiting for KV room is part of that time.
    """

    def __init__(self) -> None:
        self.prompts = 0
        self.prompt_tokens = 0
        self.failed_prompts = 0
        """Those that left without KV: cancelled, given up, or refused by the engine."""
        self.queue_s = Histogram(LATENCIES_S)
        self.compute_s = Histogram(LATENCIES_S)
        self.rate = Rate()
        """Of prompt tokens."""
        self._done_at = 0.0

    def note_prompt(self, num_tokens: int, arrived: float, now: float) -> tuple[float, float]:
        """A prompt is done; times are on the loop's clock. Returns how long it waited, and was computed, in seconds."""
        began = max(arrived, self._done_at)
        self._done_at = now
        self.prompts += 1
        self.prompt_tokens += num_tokens
        self.queue_s.observe(began - arrived)
        self.compute_s.observe(now - began)
        self.rate.note(num_tokens, now - began)
        return began - arrived, now - began


class _Metered:
    """An engine whose prefills are counted, once each, however many asked for one."""

    def __init__(self, engine: PrefillEngine, figures: Figures) -> None:
        self.computing: dict[str, int] = {}  # request id -> prompt tokens
        self.laps: dict[str, list[Lap]] = {}  # of the requests that want to know, by id
        self.share, self.release, self.holds = engine.share, engine.release, engine.holds
        self._engine = engine
        self._figures = figures

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        now = asyncio.get_running_loop().time
        arrived = now()
        self.computing[request_id] = len(prompt_token_ids)
        try:
            handle = await self._engine.prefill(request_id, prompt_token_ids, reader)
        finally:
            del self.computing[request_id]
        waited, computed = self._figures.note_prompt(len(prompt_token_ids), arrived, now())
        began = arrived + waited
        if request_id in self.laps:
            self.laps[request_id] += [("queue", arrived, began), ("compute", began, began + computed)]
        return handle


class PrefillService(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Answers `corun.v1.PrefillService` for one generation of one node."""

    def __init__(self, ref: NodeRef, engine: PrefillEngine, *, kv_tokens: int) -> None:
        """kv_tokens: how many tokens the engine has KV room for."""
        self.ref = ref
        self.draining = False
        self.closed = ""
        """Why nothing can be started here now; empty if it can."""
        self._engine = engine
        self.figures = Figures()
        self._metered = _Metered(engine, self.figures)
        self.sharing = Sharing(self._metered, kv_tokens)
        self._running: dict[str, asyncio.Task[KvHandle]] = {}
        self._given_up: dict[str, str] = {}  # request id -> why

    @property
    def queued_prompts(self) -> int:
        """In the node now, the one that is being computed included."""
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Of the prompts that are computed for them."""
        return sum(self._metered.computing.values())

    async def load(self) -> NodeLoad:
        """In a drain, which it is asked for to see the end of, KV is no longer kept for those who have yet to ask."""
        if self.draining:
            self.sharing.let_go()
        return NodeLoad(
            used_kv_blocks=await self._engine.held_kv_blocks(),
            queued_prompt_tokens=self.queued_tokens,
            tokens=self.figures.prompt_tokens,
        )

    def give_up(self, reason: str) -> None:
        """Ends whatever runs with an error, so that routers run it elsewhere. KV that waits for its reader is kept."""
        for request_id, task in self._running.items():
            self._given_up[request_id] = reason
            task.cancel()

    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Context
    ) -> prefill_service_pb2.PrefillResponse:
        self._admit(request)
        prompt = list(request.prompt_token_ids)
        reader = codec.node_ref_from_proto(request.reader)
        laps = self._metered.laps[request.request_id] = []
        try:
            handle = await self._run(request, prompt, reader)
        except BaseException as error:
            self.figures.failed_prompts += 1
            if not isinstance(error, asyncio.CancelledError):
                raise
            # The answer may have been on its way: whoever asked no longer knows the handle, so nobody else can free it.
            self.sharing.release_soon(request.request_id)
            if reason := self._given_up.get(request.request_id):
                raise UnavailableError(f"prefill node {self.ref.node_id}: {reason}") from None
            raise
        finally:
            del self._metered.laps[request.request_id]
            self._given_up.pop(request.request_id, None)
        facts: dict[str, Value] = {"corun.prefill_node": str(self.ref), "gen_ai.usage.input_tokens": len(prompt)}
        caller_of(context).laps(laps, facts)
        return prefill_service_pb2.PrefillResponse(handle=codec.kv_handle_to_proto(handle))

    async def ReleaseKv(
        self, request: prefill_service_pb2.ReleaseKvRequest, context: Context
    ) -> prefill_service_pb2.ReleaseKvResponse:
        # Another generation's KV died with it: there is nothing to release and nothing to complain about.
        if request.generation == self.ref.generation:
            await self.sharing.release(request.request_id)
        return prefill_service_pb2.ReleaseKvResponse()

    async def _run(
        self, request: prefill_service_pb2.PrefillRequest, prompt: Sequence[int], reader: NodeRef
    ) -> KvHandle:
        """In a task of its own, which `give_up` can end without the call."""
        name, scope = request.request_id, request.share_scope
        prefill = self.sharing.prefill(name, prompt, reader, scope, more_follow=request.more_follow)
        task = self._running[name] = asyncio.ensure_future(prefill)
        try:
            return await task
        finally:
            del self._running[name]

    def _admit(self, request: prefill_service_pb2.PrefillRequest) -> None:
        if request.generation != self.ref.generation:
            raise StaleGenerationError(self.ref.node_id, request.generation, self.ref.generation)
        if self.closed:
            raise UnavailableError(f"prefill node {self.ref.node_id}: {self.closed}")
        if self.draining:
            raise UnavailableError(f"prefill node {self.ref.node_id} is draining")
        if not request.reader.node_id or not request.reader.generation:
            raise InvalidArgumentError(
                "reader", str(codec.node_ref_from_proto(request.reader)), "must be a decode node"
            )
        if not request.prompt_token_ids:
            raise InvalidArgumentError("prompt_token_ids", [], "must hold at least one token id")
        if not request.request_id or request.request_id in self._running:
            raise InvalidArgumentError("request_id", request.request_id, "must be unique to one attempt")
        if any(mark in request.request_id for mark in SEPARATORS):
            raise InvalidArgumentError("request_id", request.request_id, f"must hold none of {SEPARATORS}")
