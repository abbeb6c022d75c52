"""The gRPC service of a prefill node.

Owns: which calls are accepted, which KV is released when a caller goes away, the node's load. Must not know: vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from corun.config.fields import NodeConfig
from corun.errors import CorunError, InvalidArgumentError, Shown, StaleGenerationError, UnavailableError
from corun.node.kv.handle import SEPARATORS
from corun.node.life import Role, node_info
from corun.observe.tracing import Value, caller_of
from corun.rpc import codec
from corun.rpc.interceptor import Context
from corun.types import NodeLoad, NodeRef, NodeRole
from corun.v1 import prefill_service_pb2 as pb
from corun.v1 import prefill_service_pb2_grpc
from prefill_node.metrics import PrefillMetrics
from prefill_node.recheck import Recheck
from prefill_node.sharing import PrefillEngine, PromptRequest, Sharing

T = TypeVar("T")
SERVICE_NAME = "corun.v1.PrefillService"
log = logging.getLogger(__name__)


class Samples(Protocol):
    """Leases room for samples in the engine that computes their prompts, and starts them."""

    def reserve_with_prompt(self, request: pb.PrefillRequest) -> int:
        """Lease room for the sample of a prompt. Return the lease's id. Raises OverloadedError if there is no room."""

    async def start_with_prompt(
        self, request: pb.PrefillRequest, lease_id: int, prefill_id: str, prefill_node: NodeRef, context: Context
    ) -> None:
        """Start the sample of a prompt that the engine computes, or is about to compute, under this id. Raises
        CorunError if it cannot start."""

    def tell(self, router_id: str) -> None:
        """Tell a router of the leases that were granted to it."""


class GivenUpError(UnavailableError):
    """The node has given up what ran, so that routers run it elsewhere."""


class PrefillService(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves `corun.v1.PrefillService` for one generation of one node."""

    def __init__(self, ref: NodeRef, engine: PrefillEngine, *, kv_tokens: int, samples: Samples | None = None) -> None:
        """Create the service.

        Args:
            kv_tokens: the number of tokens that the engine has KV room for.
            samples: the side of a colocated node that decodes; None: there is none.
        """
        self.ref = ref
        self.draining = False
        self.closed = ""
        """The reason why the node accepts no new work now; empty if it accepts work."""
        self._engine = engine
        self.metrics = metrics = PrefillMetrics()
        self.sharing = Sharing(engine, kv_tokens, metrics)
        self.recheck = Recheck(engine.recompute, metrics, engine.withdraw)
        engine.on_checked = self.recheck.add
        self._samples = samples
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._given_up: dict[str, str] = {}  # request id -> why
        metrics.queued_prompts.set_function(lambda: self.queued_prompts)
        metrics.queued_prompt_tokens.set_function(lambda: self.queued_tokens)
        metrics.expected_wait_seconds.set_function(lambda: metrics.seconds_for(self.queued_tokens))

    @property
    def queued_prompts(self) -> int:
        """The number of prompts in the node now, including those that are being computed."""
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """The number of tokens of the prompts that the engine has to compute for the queued requests."""
        return sum(self.sharing.computing.values())

    async def load(self) -> NodeLoad:
        """Return the node's load.

        The drain polls the load to see when the work is over. So a draining node keeps no more KV for later requests.
        """
        if self.draining:
            self.sharing.let_go()
            self.recheck.pause()
        return NodeLoad(
            used_kv_blocks=await self._engine.held_kv_blocks(),
            queued_prompt_tokens=self.queued_tokens,
            tokens=int(self.metrics.prompt_tokens.value),
            cached_tokens=int(self.metrics.cached_tokens.value),
        )

    def give_up(self, reason: str) -> None:
        """End all running prefills with an error, so routers run them elsewhere. KV that waits for a reader stays."""
        self.recheck.pause()
        for request_id, task in self._running.items():
            self._given_up[request_id] = reason
            task.cancel()

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        self._admit(request, "prompt_token_ids", request.prompt_token_ids)
        reader = codec.node_ref_from_proto(request.reader)
        if not reader.node_id or not reader.generation:
            raise InvalidArgumentError("reader", str(reader), "must be a decode node")
        name = request.request_id
        started, lease_id, samples = False, 0, None
        if request.HasField("sample"):
            if (samples := self._samples) is None:
                raise InvalidArgumentError("sample", Shown("a sample"), "must be absent: this node does not decode")
            lease_id = samples.reserve_with_prompt(request)

        async def start_sample(prefill_id: str) -> bool:
            nonlocal started
            assert samples is not None
            try:
                await samples.start_with_prompt(request, lease_id, prefill_id, self.ref, context)
                started = True
            except CorunError as error:  # The prompt may be for others, too. The router starts the sample afterwards.
                log.info("the sample of prefill %s does not start with its prompt: %s", name, error)
            return started

        prompt = PromptRequest(
            name,
            list(request.prompt_token_ids),
            reader,
            scope="" if request.isolated else request.share_scope,
            isolated=request.isolated,
        )
        start = start_sample if samples else None
        work = self.sharing.prefill(prompt, start, more_follow=request.more_follow)
        try:
            handle = await self._run(name, len(prompt.token_ids), context, work)
        except (asyncio.CancelledError, GivenUpError):
            # The prefill may have finished already. The caller gets no handle, so only this node can free the KV.
            self.sharing.release_soon(name)
            raise
        finally:
            if samples is not None:  # Whoever has given the call up must hear of the lease all the same.
                samples.tell(request.sample.router_id)
        return pb.PrefillResponse(handle=codec.kv_handle_to_proto(handle), started=started, lease_id=lease_id)

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Context) -> pb.ScoreTokensResponse:
        self._admit(request, "token_ids", request.token_ids)
        name, tokens, count = request.request_id, list(request.token_ids), request.num_scored
        if not 1 <= count < len(tokens):
            raise InvalidArgumentError("num_scored", count, f"must be 1 to {len(tokens) - 1}, all tokens but the first")
        score = self.sharing.score(name, tokens, count, request.share_scope)
        return codec.token_scores_to_proto(await self._run(name, len(tokens), context, score))

    async def _run(self, name: str, num_tokens: int, context: Context, work: Coroutine[Any, Any, T]) -> T:
        """Do a call's work, which `give_up` can end without the call: then raise GivenUpError."""
        self.recheck.pause()
        laps = self.sharing.laps[name] = []
        task = self._running[name] = asyncio.ensure_future(work)
        try:
            found: T = await task
        except BaseException as error:
            self.metrics.failed_prompts.inc()
            if isinstance(error, asyncio.CancelledError) and (reason := self._given_up.get(name)):
                raise GivenUpError(f"prefill node {self.ref.node_id}: {reason}") from None
            raise
        finally:
            del self._running[name], self.sharing.laps[name]
            self._given_up.pop(name, None)
            if not self._running and not self.draining and not self.closed:
                self.recheck.resume()
        facts: dict[str, Value] = {"corun.prefill_node": str(self.ref), "gen_ai.usage.input_tokens": num_tokens}
        caller_of(context).laps(laps, facts)
        return found

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Context) -> pb.ReleaseKvResponse:
        # The KV of another generation ended with its process: there is nothing to release, and this is no error.
        if request.generation == self.ref.generation:
            await self.sharing.release(request.request_id)
        return pb.ReleaseKvResponse()

    def _admit(self, request: pb.PrefillRequest | pb.ScoreTokensRequest, field: str, tokens: Sequence[int]) -> None:
        """Refuse a call that cannot be answered. field: the name of its tokens."""
        if request.generation != self.ref.generation:
            raise StaleGenerationError(self.ref.node_id, request.generation, self.ref.generation)
        if self.closed:
            raise UnavailableError(f"prefill node {self.ref.node_id}: {self.closed}")
        if self.draining:
            raise UnavailableError(f"prefill node {self.ref.node_id} is draining", 0.0)  # Another node helps at once.
        if not tokens:
            raise InvalidArgumentError(field, [], "must hold at least one token id")
        name = request.request_id
        if not name or name in self._running or self.sharing.has(name):  # A sample may start before the engine looks.
            raise InvalidArgumentError("request_id", request.request_id, "must be unique to one attempt")
        if any(mark in request.request_id for mark in SEPARATORS):
            raise InvalidArgumentError("request_id", request.request_id, f"must hold none of {SEPARATORS}")


def role(config: NodeConfig, ref: NodeRef, engine: Any, samples: Any = None) -> Role:
    """Return the parts of a prefill node, or of a colocated node's prefill side, around a started engine.

    samples: the service of a colocated node's other side.
    """
    facts = engine.facts
    service = PrefillService(ref, engine, kv_tokens=facts.kv_blocks * facts.block_size, samples=samples)
    service.metrics.show_engine(engine, facts.kv_blocks)
    return Role(
        engine=engine,
        service=service,
        service_name=SERVICE_NAME,
        register=prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
        info=node_info(config, ref, NodeRole.PREFILL, engine, step_tokens=facts.step_tokens, nixl=engine.endpoint),
        metrics=service.metrics,
    )
