"""The gRPC services of a router: `ClusterService` for clients, `RegistryService` for nodes.

Owns: the translation between messages and plain values, the deadlines of calls, and the end of service. What a client
may see of the cluster is in `router.views`. This module must not know how samples run.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace

from corun.chat import read_template
from corun.errors import DataLossError, InvalidArgumentError, Shown, UnavailableError
from corun.observe.tracing import Span, Value, of_call
from corun.params import MAX_SAMPLES, check_lengths
from corun.rpc import codec
from corun.rpc.activity import Activity
from corun.rpc.interceptor import Context, caller
from corun.rpc.pump import Source
from corun.types import ClusterStatus
from corun.v1 import cluster_service_pb2 as cluster_pb2
from corun.v1 import cluster_service_pb2_grpc, registry_service_pb2_grpc
from corun.v1 import registry_service_pb2 as registry_pb2
from router.attempt import SampleTask
from router.audit.auditor import Auditor
from router.audit.verifier import Verifier, naming_case
from router.clock import loop_time
from router.delivery import OutputStreams, Responses
from router.metrics import RouterMetrics
from router.nodes.registry import Registry
from router.queue import SampleQueue
from router.request import Request, RequestRunner
from router.score import ScoreRequest, ScoreRunner
from router.views import clients_of, for_client, with_samples

CLUSTER_SERVICE = "corun.v1.ClusterService"
REGISTRY_SERVICE = "corun.v1.RegistryService"
LONGEST_CALL_S = 3600.0
"""The longest time a call may take, and the deadline of a call whose client set none."""
ANSWER_S = 0.25
"""How many seconds before the client's deadline a call is given up, so that the reason still reaches the client."""
AWAY_S = 0.5
"""The seconds after which a client should try again when this router shuts down. By then another router may listen at
its address."""


_template = functools.lru_cache(maxsize=1)(read_template)
"""Reads the template in a model's folder once, so that it stays the same while the router runs."""


@dataclass(kw_only=True, eq=False)
class ClusterService(cluster_service_pb2_grpc.ClusterServiceServicer):
    """The gRPC service that answers clients."""

    router_id: str
    activity: Activity
    registry: Registry
    queue: SampleQueue
    metrics: RouterMetrics
    requests: RequestRunner
    scores: ScoreRunner
    streams: OutputStreams
    verifier: Verifier
    auditor: Auditor
    max_queued_samples: int

    async def Generate(self, request: cluster_pb2.GenerateRequest, context: Context) -> AsyncIterator[Source]:
        metrics = self.metrics
        with metrics.request() as ending, of_call(context, "corun.request") as span, self.activity.admitted():
            metrics.resumed_requests.inc(bool(request.resume))
            asked = _request(request, span)
            stream = self.streams.find(request.stream_id, caller().name) if request.stream_id else None
            with stream.used() if stream else nullcontext():
                samples = await self.requests.accept(asked, _deadline(context))
            span.note({**_request_attributes(asked, samples), "corun.router": self.router_id})
            running = self.requests.start(samples)
            # A client that sent text gets the prompt's token ids, so it can check the receipt or run the request again.
            prompt = samples[0].prompt_token_ids if request.WhichOneof("prompt") == "text" else ()
            fingerprint = self.registry.contract.fingerprint
            responses = Responses(running, samples[0], prompt, fingerprint, request.call_number)
            try:
                if stream is None:
                    yield responses
                else:
                    await stream.carry(request.call_number, responses)
            finally:
                span.note(responses.attributes)
                ending.has_finished, ending.error = responses.has_ended, running.outbox.error
                if ending.error:  # The error may have been raised where the output was taken.
                    span.fail(ending.error)
                await running.close()

    async def Score(self, request: cluster_pb2.ScoreRequest, context: Context) -> cluster_pb2.ScoreResponse:
        with self.metrics.request() as ending, of_call(context, "corun.score") as span, self.activity.admitted():
            asked = ScoreRequest(
                prompt=codec.text_or_tokens_from_proto(request.prompt),
                continuations=tuple(map(codec.text_or_tokens_from_proto, request.continuations)),
                request_id=request.request_id,
                caller=caller(),
                priority=codec.priority_from_proto(request.priority),
                span=span,
                token_texts=request.token_texts,
            )
            found = await self.scores.score(asked, _deadline(context))
            ending.has_finished = True
            return codec.scores_to_proto(found)

    async def StreamOutputs(self, request: cluster_pb2.StreamOutputsRequest, context: Context) -> AsyncIterator[Source]:
        self.activity.check()
        with self.streams.opened(caller().name) as stream:
            yield stream

    async def GetCluster(
        self, request: cluster_pb2.GetClusterRequest, context: Context
    ) -> cluster_pb2.GetClusterResponse:
        viewer, metrics = caller(), self.metrics
        nodes = self.registry.statuses()
        if request.with_samples:
            nodes = with_samples(nodes, self.registry.decodes, viewer)
        if request.without_contracts:
            nodes = tuple(replace(each, node=replace(each.node, contract_json="")) for each in nodes)
        status = ClusterStatus(
            router_id=self.router_id,
            fingerprint=self.registry.contract.fingerprint,
            nodes=nodes,
            queued_samples=self.queue.waiting,
            max_queued_samples=self.max_queued_samples,
            finished_samples=int(metrics.finished_samples.value),
            mismatches=self.registry.mismatches,
            refused_requests=self.queue.refused,
            audit=self.auditor.status(),
            model=None if self.registry.model is None else self.registry.model.status,
            queued_prompt_tokens=self.queue.waiting_tokens,
            sample_retries=metrics.num_retries,
            first_token_seconds=metrics.time_to_first_token_seconds.value,
            output_token_seconds=metrics.time_per_output_token_seconds.value,
            clients=clients_of(self.queue, self.registry.decodes.values(), viewer) if request.with_clients else (),
        )
        return codec.cluster_status_to_proto(status if viewer.is_operator else for_client(status))

    async def GetChatTemplate(
        self, request: cluster_pb2.GetChatTemplateRequest, context: Context
    ) -> cluster_pb2.GetChatTemplateResponse:
        with self.activity.admitted():
            model = await self.requests.model(_deadline(context))
            return codec.template_to_proto(await asyncio.to_thread(_template, model.folder))

    async def Tokenize(self, request: cluster_pb2.TokenizeRequest, context: Context) -> cluster_pb2.TokenizeResponse:
        with self.activity.admitted():
            tokens = await self.requests.tokenize(
                request.text,
                _deadline(context),
                caller(),
                special=not request.without_special_tokens,
                spelled=request.with_spellings,
            )
            return codec.tokens_to_proto(tokens)

    async def Detokenize(
        self, request: cluster_pb2.DetokenizeRequest, context: Context
    ) -> cluster_pb2.DetokenizeResponse:
        with self.activity.admitted():
            text = await self.requests.detokenize(request.token_ids.ids, _deadline(context), caller())
            return cluster_pb2.DetokenizeResponse(text=text)

    async def Verify(
        self, request: cluster_pb2.VerifyRequest, context: Context
    ) -> AsyncIterator[cluster_pb2.VerifyResponse]:
        with self.activity.admitted():
            self.verifier.check_size(len(request.cases), len(request.conditions))
            model = await self.requests.model(_deadline(context))
            cases = []
            for index, case in enumerate(request.cases):
                with naming_case(index):
                    check_lengths(len(case.prompt_token_ids), 1, model.max_model_len)
                    cases.append(codec.verify_case_from_proto(case))
                await asyncio.sleep(0)  # Let other tasks run: the prompts of all cases may take 16 MiB.
            conditions = [codec.condition_from_proto(condition) for condition in request.conditions]
            results = self.verifier.verify(
                cases, conditions, order_seed=request.order_seed, deadline=_deadline(context), caller=caller()
            )
            async with aclosing(results):
                async for result in results:
                    yield codec.verify_result_to_proto(result)


@dataclass(kw_only=True, eq=False)
class RegistryService(registry_service_pb2_grpc.RegistryServiceServicer):
    """The gRPC service that answers nodes."""

    router_id: str
    activity: Activity
    registry: Registry
    heartbeat_interval_ms: int

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterResponse:
        if self.activity.draining:
            raise UnavailableError("the router is shutting down")
        response = registry_pb2.RegisterResponse(
            router_id=self.router_id, heartbeat_interval_ms=self.heartbeat_interval_ms
        )
        with _report_quarantine(response):
            self.registry.register(codec.node_info_from_proto(request.node))
        return response

    async def Heartbeat(
        self, request: registry_pb2.HeartbeatRequest, context: Context
    ) -> registry_pb2.HeartbeatResponse:
        ref, load = codec.node_ref_from_proto(request.ref), codec.node_load_from_proto(request.load)
        response = registry_pb2.HeartbeatResponse()
        with _report_quarantine(response):
            self.registry.heartbeat(ref, load, draining=request.draining, stuck=request.stuck)
        return response


@contextmanager
def _report_quarantine(response: registry_pb2.RegisterResponse | registry_pb2.HeartbeatResponse) -> Iterator[None]:
    """Put a quarantine into the response instead of failing the call. The node reads it there, and goes on to tell
    other routers."""
    try:
        yield
    except DataLossError as error:
        response.quarantined = str(error)


def _deadline(context: Context) -> float:
    """Return when to give the call up, on the loop's clock."""
    left = context.time_remaining()
    left = LONGEST_CALL_S if left is None else min(left, LONGEST_CALL_S)
    return loop_time() + max(left - ANSWER_S, left / 2)


def _request_attributes(request: Request, samples: Sequence[SampleTask]) -> dict[str, Value]:
    """Return the attributes of a request's span. They contain nothing of its text."""
    params = request.params
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": len(samples[0].prompt_token_ids),
        "corun.request_id": samples[0].request_id,
        "corun.priority": request.priority.value,
        "corun.resumed": bool(request.resume),
    }


def _request(message: cluster_pb2.GenerateRequest, span: Span) -> Request:
    if len(message.resume) > MAX_SAMPLES:
        found = Shown(f"{len(message.resume)} entries")
        raise InvalidArgumentError("resume", found, f"must be 0 to {MAX_SAMPLES}")
    return Request(
        # Token ids are copied once the model is known to accept so many.
        prompt=message.text if message.WhichOneof("prompt") == "text" else message.token_ids.ids,
        params=codec.sampling_params_from_proto(message.sampling_params),
        request_id=message.request_id,
        seed=message.seed if message.HasField("seed") else None,
        resume=tuple(map(codec.resume_point_from_proto, message.resume)),
        fingerprint=message.fingerprint,
        caller=caller(),
        priority=codec.priority_from_proto(message.priority),
        span=span,
        token_texts=message.token_texts,
    )
