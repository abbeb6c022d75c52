"""The cluster as a target: its public gRPC service, read as raw bytes during the run and decoded afterwards."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from corun.errors import from_rpc_error
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.v1 import cluster_service_pb2 as pb
from corun_bench.driver import Target
from corun_bench.engines import TEMPERATURE
from corun_bench.records import Outcome, Request

METHOD = "/corun.v1.ClusterService/Generate"
DEADLINE_S = 3600.0
"""The deadline of one call; the driver's own timeout is shorter."""


class ClusterTarget(Target):
    """A router. A cluster keeps no KV from one request to the next, so there is nothing to forget."""

    def __init__(self, address: str) -> None:
        self._channel = channel(address)
        serialize = pb.GenerateRequest.SerializeToString
        self._received: list[tuple[Outcome, list[tuple[float, bytes]]]] = []
        self._generate = self._channel.unary_stream(METHOD, request_serializer=serialize, response_deserializer=None)

    async def run(self, request: Request, outcome: Outcome, *, logprobs: bool, clock: Callable[[], float]) -> None:
        params = SamplingParams(
            temperature=TEMPERATURE, max_tokens=request.max_tokens, ignore_eos=True, logprobs=logprobs
        )
        message = codec.generate_request(request.prompt_token_ids, params, seed=request.seed)
        received: list[tuple[float, bytes]] = []
        call = self._generate(message, timeout=DEADLINE_S)
        try:
            received.extend([(clock(), data) async for data in call])
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
            self._received.append((outcome, received))

    def settle(self) -> None:
        """Decode the messages of the run.

        A wave of requests that ends brings thousands of them; to decode them at once would delay the next wave.
        """
        for outcome, received in self._received:
            _decode(received, outcome)
        self._received.clear()

    async def close(self) -> None:
        await self._channel.close(None)


def _decode(received: list[tuple[float, bytes]], outcome: Outcome) -> None:
    for at, data in received:
        message = pb.GenerateResponse.FromString(data)
        if message.token_ids:
            outcome.arrivals.append((at, len(message.token_ids)))
            outcome.token_ids += message.token_ids
            outcome.logprobs += message.logprobs
