"""A server over a real socket for tests, around a service that does what a request asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from corun.rpc.channel import channel
from corun.rpc.server import GrpcServer
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import cluster_service_pb2_grpc as pb_grpc
from corun.v1 import decode_service_pb2 as decode_pb
from corun.v1 import decode_service_pb2_grpc

LIMIT = 64 * 1024
DEADLINE_S = 60
SERVICE = "corun.v1.ClusterService"


class Servicer(pb_grpc.ClusterServiceServicer):
    """Answers, or raises `error`; a stream has one message before that, and a rest as its request says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls = 0
        self.wait_s = 0.0
        self.written = 0
        self.closed = asyncio.Event()

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        await asyncio.sleep(self.wait_s)
        if self.error:
            raise self.error
        return pb.GetClusterResponse(router_id="r")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls += 1
        try:
            yield pb.GenerateResponse(text="one")
            if self.error:
                raise self.error
            if request.text == "late":
                await asyncio.sleep(self.wait_s)
                yield pb.GenerateResponse(text="two")
            while request.text == "forever":
                await asyncio.sleep(0.001)
                yield pb.GenerateResponse(text="more")
            while request.text == "flood":
                self.written += 1
                yield pb.GenerateResponse(text="more" * 16_000)
        finally:
            await asyncio.sleep(0)  # Releasing what a call holds takes awaits.
            self.closed.set()

    async def Verify(self, request: Any, context: Any) -> None:  # noqa: N802
        await context.abort(grpc.StatusCode.NOT_FOUND, "by itself")


class Decode(decode_service_pb2_grpc.DecodeServiceServicer):
    """A service for members only."""

    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802
        return decode_pb.ReleaseResponse()

    async def StreamSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield decode_pb.StreamStepsResponse(step=0)


@contextlib.asynccontextmanager
async def serving(servicer: Servicer | None = None, **options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(**{"max_message_bytes": LIMIT, **options})
    server.add(pb_grpc.add_ClusterServiceServicer_to_server, servicer or Servicer())
    server.add(decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, Decode())
    await server.start()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.stop(0), DEADLINE_S)


@contextlib.asynccontextmanager
async def connected(servicer: Servicer, *, server: Any = None, **options: Any) -> AsyncIterator[Any]:
    """A stub. server: options of the server; all others are the channel's."""
    async with serving(servicer, **(server or {})) as served, channel(served.address, **options) as connection:
        yield pb_grpc.ClusterServiceStub(connection)  # type: ignore[no-untyped-call]


def stub_of(connection: Any) -> Any:
    return pb_grpc.ClusterServiceStub(connection)  # type: ignore[no-untyped-call]


async def get(stub: Any) -> Any:
    return await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)


async def texts(stub: Any, text: str = "") -> list[str]:
    return [m.text async for m in stub.Generate(pb.GenerateRequest(text=text), timeout=DEADLINE_S)]
