"""Local clusters for our own tests: with raw gRPC calls, and a check that nothing is held at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import pytest

from corun.config.fields import RouterConfig
from corun.errors import UnavailableError, from_rpc_error
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import OPEN, Access, channel
from corun.testing.cluster import WAIT_S, LocalCluster, router_config
from corun.types import ClusterStatus
from corun.v1 import cluster_service_pb2, cluster_service_pb2_grpc
from router import service


class FakeCluster(LocalCluster):
    """A local cluster whose nodes stay when they are quarantined, so that a test sees what routers make of them."""

    def __init__(self, model: str, config: RouterConfig, client: Access = OPEN) -> None:
        super().__init__(model, config)
        self.ends_quarantined = False
        self.client = client
        """The access of the calls that a test sends."""

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        async with channel(self.addresses[0], access=self.client) as link:
            yield cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]

    async def status(self) -> ClusterStatus:
        async with self.stub() as stub:
            answer = await stub.GetCluster(cluster_service_pb2.GetClusterRequest(), timeout=WAIT_S)
        return codec.cluster_status_from_proto(answer)


@contextlib.asynccontextmanager
async def cluster(
    model: str,
    *,
    prefills: int = 1,
    decodes: int = 1,
    routers: int = 1,
    slots: int = 8,
    lease_ttl_ms: int = 60_000,
    client: Access = OPEN,
    **config: Any,
) -> AsyncIterator[FakeCluster]:
    """Run a cluster whose nodes are READY. At the end, check that it holds nothing, and close it."""
    fake = FakeCluster(model, router_config(**config), client)
    try:
        await fake.start(prefills, decodes, routers, slots=slots, lease_ttl_ms=lease_ttl_ms)
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
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    if any(output.receipt is None for output in outputs):
        raise UnavailableError("the stream ended before every sample had its receipt")
    return outputs


@contextlib.contextmanager
def short_calls(limit_s: float = 1.0) -> Iterator[None]:
    """Let the router give up what begins here soon. Clients hear why, since their own deadlines are far."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "LONGEST_CALL_S", limit_s)
        yield


def retries(fake: FakeCluster) -> dict[str, float]:
    """The runs of samples that a node failed, by reason."""
    counter = fake.router.context.metrics.sample_retries
    return {reason: found for reason in ("lost", "fault") if (found := counter.labels(reason).value)}


def take(output: Output, message: cluster_service_pb2.GenerateResponse) -> None:
    output.text += message.text
    output.token_ids.extend(message.token_ids)
    output.logprobs.extend(message.logprobs)
    output.seed = message.seed
    output.messages += 1
    if message.HasField("receipt"):
        output.receipt = codec.receipt_from_proto(message.receipt)
