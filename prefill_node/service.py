"""The gRPC face of a prefill node.

Owns: which calls are accepted, what is dropped when a caller goes away, the node's load figures.
Must not know: vLLM. The engine is anything with the two methods of `PrefillEngine`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from corun import wire
from corun.cluster import KvHandle, NodeLoad, NodeRef
from corun.errors import CorunError, InvalidArgumentError, StaleGenerationError, UnavailableError
from corun.figures import LATENCIES_S, Histogram, Rate
from corun.server import Context
from corun.tracing import Value, caller_of
from corun.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from prefill_node.sharing import Sharing

SERVICE_NAME = "corun.v1.PrefillService"
log = logging.getLogger(__name__)


class PrefillEngine(Protocol):
    """What a prefill node needs of its engine."""

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        """Computes the prompt's KV and keeps it for `reader` until it is read, released or its lease ends.

        Cancelling the call stops the work and keeps nothing.
        """

    async def share(self, request_id: str, readers: int) -> bool:
        """Keeps the KV of a finished prefill for so many readers more. False: it is not there any more."""

    async def release(self, request_id: str) -> None:
        """Takes a reader from a finished prefill, whose KV is dropped after the last; unknown ids are ignored."""

    def holds(self, request_id: str) -> bool:
        """Whether a finished prefill's KV waits for a reader, as far as is known without asking."""

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


class PrefillService(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Answers `corun.v1.PrefillService` for one generation of one node."""

    def __init__(self, ref: NodeRef, engine: PrefillEngine, *, share_kv: bool = True) -> None:
        self.ref = ref
        self.draining = False
        self.closed = ""
        """Why nothing can be started here now; empty if it can."""
        self._engine = engine
        self._share_kv = share_kv
        self.sharing = Sharing(engine)
        self._in_flight: dict[str, int] = {}  # request id -> prompt tokens that it waits for
        self._running: dict[str, asyncio.Task[KvHandle]] = {}
        self._given_up: dict[str, str] = {}  # request id -> why
        self.figures = Figures()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def queued_prompts(self) -> int:
        """In the node now, the one that is being computed included."""
        return len(self._in_flight)

    @property
    def queued_tokens(self) -> int:
        """Of these prompts."""
        return sum(self._in_flight.values())

    async def load(self) -> NodeLoad:
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
        reader = wire.node_ref_from_proto(request.reader)
        scope = request.share_scope if self._share_kv else ""
        self._in_flight[request.request_id] = 0 if self.sharing.has(scope, prompt, reader) else len(prompt)
        arrived = asyncio.get_running_loop().time()
        try:
            handle = await self._run(request.request_id, prompt, reader, scope)
        except BaseException as error:
            self.figures.failed_prompts += 1
            if not isinstance(error, asyncio.CancelledError):
                raise
            # The answer may have been on its way: whoever asked no longer knows the handle, so nobody else can free it.
            self._release_soon(request.request_id)
            if reason := self._given_up.get(request.request_id):
                raise UnavailableError(f"prefill node {self.ref.node_id}: {reason}") from None
            raise
        finally:
            del self._in_flight[request.request_id]
            self._given_up.pop(request.request_id, None)
        if handle.request_id != request.request_id:  # Another one's, which has been noted.
            return prefill_service_pb2.PrefillResponse(handle=wire.kv_handle_to_proto(handle))
        waited, computed = self.figures.note_prompt(len(prompt), arrived, asyncio.get_running_loop().time())
        facts: dict[str, Value] = {"corun.prefill_node": str(self.ref), "gen_ai.usage.input_tokens": len(prompt)}
        began = arrived + waited
        laps = [("queue", arrived, began), ("compute", began, began + computed)]
        caller_of(context).laps(laps, facts)
        return prefill_service_pb2.PrefillResponse(handle=wire.kv_handle_to_proto(handle))

    async def ReleaseKv(
        self, request: prefill_service_pb2.ReleaseKvRequest, context: Context
    ) -> prefill_service_pb2.ReleaseKvResponse:
        # Another generation's KV died with it: there is nothing to release and nothing to complain about.
        if request.generation == self.ref.generation:
            await self.sharing.release(request.request_id)
        return prefill_service_pb2.ReleaseKvResponse()

    async def _run(self, request_id: str, prompt: Sequence[int], reader: NodeRef, scope: str) -> KvHandle:
        """In a task of its own, which `give_up` can end without the call."""
        prefill = self.sharing.prefill(request_id, prompt, reader, scope)
        task = self._running[request_id] = asyncio.ensure_future(prefill)
        try:
            return await task
        finally:
            del self._running[request_id]

    def _admit(self, request: prefill_service_pb2.PrefillRequest) -> None:
        if request.generation != self.ref.generation:
            raise StaleGenerationError(self.ref.node_id, request.generation, self.ref.generation)
        if self.closed:
            raise UnavailableError(f"prefill node {self.ref.node_id}: {self.closed}")
        if self.draining:
            raise UnavailableError(f"prefill node {self.ref.node_id} is draining")
        if not request.reader.node_id or not request.reader.generation:
            raise InvalidArgumentError("reader", str(wire.node_ref_from_proto(request.reader)), "must be a decode node")
        if not request.prompt_token_ids:
            raise InvalidArgumentError("prompt_token_ids", [], "must hold at least one token id")
        if not request.request_id or request.request_id in self._in_flight:
            raise InvalidArgumentError("request_id", request.request_id, "must be unique to one attempt")

    def _release_soon(self, request_id: str) -> None:
        task = asyncio.ensure_future(self._release(request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, request_id: str) -> None:
        try:
            await self.sharing.release(request_id)
        except CorunError as error:  # A stuck engine does it when it goes on.
            log.warning("KV of %s was not released yet: %s", request_id, error)
