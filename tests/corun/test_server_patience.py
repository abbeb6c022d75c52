"""Clients that do not send or do not read: their calls end, typed, and give back what they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import OverloadedError, from_rpc_error
from corun.rpc import health
from corun.rpc.channel import channel
from corun.rpc.server import GrpcServer, server_options
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import cluster_service_pb2_grpc as pb_grpc
from tests.fuzz.http2 import DATA, END_STREAM, WINDOW_UPDATE, Connection, call, frame, headers, hello, status_of

GENERATE = b"/corun.v1.ClusterService/Generate"
GET_CLUSTER = b"/corun.v1.ClusterService/GetCluster"
IMPATIENT_S = 0.3
"""Where nothing but the end of the patience can happen."""
PATIENCE_S = 1.0
"""Where this process must be quicker."""
WAIT_S = 20.0
INVALID_ARGUMENT, DEADLINE_EXCEEDED = 3, 4


class Servicer(pb_grpc.ClusterServiceServicer):
    """Streams without an end."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.written = 0

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetClusterResponse(router_id="r")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        try:
            while True:
                self.written += 1
                yield pb.GenerateResponse(text="x" * 10_000)
                await asyncio.sleep(float(request.text or 0))
        finally:
            self.closed.set()


@contextlib.asynccontextmanager
async def serving(servicer: Servicer, patience_s: float = PATIENCE_S) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(client_timeout_s=patience_s)
    server.add(pb_grpc.add_ClusterServiceServicer_to_server, servicer)
    await server.start()
    try:
        yield server
    finally:
        await asyncio.wait_for(server.stop(0), WAIT_S)


@contextlib.asynccontextmanager
async def connection(server: GrpcServer, greeting: bytes = b"") -> AsyncIterator[Connection]:
    link = await Connection.open(server.address, greeting)
    try:
        yield link
    finally:
        link.close()


@pytest.mark.parametrize("path", [GET_CLUSTER, GENERATE])
async def test_a_call_that_ends_without_a_message_is_refused(path: bytes) -> None:
    async with serving(Servicer()) as server, connection(server) as link:
        link.send(headers(1, path) + frame(DATA, END_STREAM, 1))
        assert status_of(await link.until_ended(1, WAIT_S) or b"") == INVALID_ARGUMENT


@pytest.mark.parametrize("path", [GET_CLUSTER, GENERATE])
@pytest.mark.parametrize("sent", [b"", b"\0\0\0\0\x09abc"])
async def test_a_message_that_does_not_come_ends_the_call(path: bytes, sent: bytes) -> None:
    async with serving(Servicer(), IMPATIENT_S) as server, connection(server) as link:
        link.send(headers(1, path) + frame(DATA, 0, 1, sent))
        assert status_of(await link.until_ended(1, WAIT_S) or b"") == DEADLINE_EXCEEDED


async def test_a_client_that_takes_nothing_loses_its_call() -> None:
    servicer = Servicer()
    async with serving(servicer) as server, connection(server, hello(n4=0)) as link:
        link.send(call(1, GENERATE, b""))
        await asyncio.wait_for(servicer.closed.wait(), WAIT_S)
        assert servicer.written < 50
        # Should it read after all, it learns why.
        link.send(frame(WINDOW_UPDATE, 0, 1, (1 << 24).to_bytes(4, "big")))
        link.send(frame(WINDOW_UPDATE, 0, 0, (1 << 24).to_bytes(4, "big")))
        assert status_of(await link.until_ended(1, WAIT_S) or b"") == DEADLINE_EXCEEDED


async def test_a_handler_may_take_its_time() -> None:
    """Only waits for the client count."""
    async with serving(Servicer()) as server, channel(server.address) as link:
        stub: Any = pb_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
        stream = stub.Generate(pb.GenerateRequest(text=str(2.5 * PATIENCE_S)), timeout=WAIT_S)
        assert [len((await stream.read()).text) for _ in range(2)] == [10_000] * 2
        stream.cancel()


async def test_a_watcher_that_leaves_does_not_silence_the_others() -> None:
    statuses = health_pb2.HealthCheckResponse
    async with serving(Servicer()) as server, channel(server.address) as link:
        stub: Any = health_pb2_grpc.HealthStub(link)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == statuses.NOT_SERVING
        watches[0].cancel()
        await asyncio.sleep(0.1)
        await server.set_serving("", True)
        assert (await watches[1].read()).status == statuses.SERVING
        watches[1].cancel()


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)
    async with serving(Servicer()) as server, channel(server.address) as link:
        stub: Any = health_pb2_grpc.HealthStub(link)
        first = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        await first.read()
        with pytest.raises(OverloadedError):
            await _read(stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S))
        first.cancel()


def test_connections_leave_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert ("grpc.max_allowed_incoming_connections", 768) in server_options()


def test_only_a_server_whose_calls_end_ends_old_connections() -> None:
    assert "grpc.max_connection_age_ms" not in dict(server_options())
    assert dict(server_options(longest_call_s=60))["grpc.max_connection_age_grace_ms"] == 60_000


async def _read(stream: Any) -> Any:
    try:
        return await stream.read()
    except Exception as error:
        raise from_rpc_error(error) if hasattr(error, "code") else error from None
