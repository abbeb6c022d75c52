"""The server over a real socket: typed errors, health, limits, cancellation, lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import (
    CorunError,
    DataLossError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    from_rpc_error,
)
from corun.rpc import server
from corun.rpc.auth import Gate, bearer, read_client_tokens
from corun.rpc.channel import channel
from corun.rpc.interceptor import caller, peer_host
from corun.rpc.server import GrpcServer, join_address, run
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import cluster_service_pb2_grpc as pb_grpc

LIMIT = 64 * 1024
DEADLINE_S = 60
SERVICE = "corun.v1.ClusterService"


class Servicer(pb_grpc.ClusterServiceServicer):
    """Answers, or raises `error`; a stream has one message before that."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls = 0
        self.written = 0
        self.streaming = asyncio.Event()
        self.closed = asyncio.Event()

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls += 1
        if self.error:
            raise self.error
        return pb.GetClusterResponse(router_id="r")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls += 1
        try:
            yield pb.GenerateResponse(text="one")
            if self.error:
                raise self.error
            self.streaming.set()
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


@contextlib.asynccontextmanager
async def serving(servicer: Servicer) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(max_message_bytes=LIMIT)
    server.add(pb_grpc.add_ClusterServiceServicer_to_server, servicer)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def connected(servicer: Servicer, **options: Any) -> AsyncIterator[Any]:
    async with serving(servicer) as server, channel(server.address, **options) as connection:
        yield pb_grpc.ClusterServiceStub(connection)  # type: ignore[no-untyped-call]


def raw(connection: Any, method: str, data: bytes) -> Any:
    """A call with bytes of our choice: unary, or the first message of a stream."""
    if method == "Generate":
        return connection.unary_stream(f"/{SERVICE}/{method}")(data, timeout=DEADLINE_S).read()
    return connection.unary_unary(f"/{SERVICE}/{method}")(data, timeout=DEADLINE_S)


async def failure(call: Callable[[], Any]) -> CorunError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    return from_rpc_error(caught.value)


async def get(stub: Any) -> Any:
    return await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)


async def texts(stub: Any, text: str = "") -> list[str]:
    return [m.text async for m in stub.Generate(pb.GenerateRequest(text=text), timeout=DEADLINE_S)]


async def test_answers() -> None:
    async with connected(Servicer()) as stub:
        assert (await get(stub)).router_id == "r"
        assert await texts(stub) == ["one"]


@pytest.mark.parametrize("call", [get, texts], ids=["unary", "stream"])
async def test_typed_errors_arrive_whole(call: Callable[[Any], Any]) -> None:
    async with connected(Servicer(OverloadedError("the queue is full", 0.5))) as stub:
        error = await failure(lambda: call(stub))
        assert isinstance(error, OverloadedError)
        assert (error.message, error.retry_after_s) == ("the queue is full", 0.5)


async def test_an_error_after_the_first_message() -> None:
    async with connected(Servicer(DataLossError("token 1 differs"))) as stub:
        call = stub.Generate(pb.GenerateRequest(), timeout=DEADLINE_S)
        assert (await call.read()).text == "one"
        assert isinstance(await failure(call.read), DataLossError)


@pytest.mark.parametrize("call", [get, texts], ids=["unary", "stream"])
async def test_internals_stay_in_the_log(call: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    async with connected(Servicer(RuntimeError("/secret/path"))) as stub:
        with caplog.at_level(logging.ERROR):
            error = await failure(lambda: call(stub))
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    error_id = str(error).removeprefix("internal error, id ")
    (record,) = [r for r in caplog.records if error_id in r.getMessage()]
    assert record.exc_info is not None
    assert SERVICE in record.getMessage()


async def test_a_handler_may_abort_by_itself() -> None:
    async with connected(Servicer()) as stub:
        call = stub.Verify(pb.VerifyRequest(), timeout=DEADLINE_S)
        error = await failure(call.read)
        assert (type(error), str(error)) == (NotFoundError, "by itself")


async def test_an_unknown_method() -> None:
    async with serving(Servicer()) as server, channel(server.address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(connection, "Nothing", b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT, 5 * LIMIT], ids=["ours", "far over", "gRPC's"])
@pytest.mark.parametrize("method", ["GetCluster", "Generate"])
async def test_a_big_message_is_refused_by_name(method: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    servicer = Servicer()
    async with serving(servicer) as server, channel(server.address) as connection:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(connection, method, b"\0" * size)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "message"
    assert str(error.value) == f"{size} bytes"
    assert "must be at most" in error.limit
    if size <= 4 * LIMIT:
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.limit == f"must be at most {LIMIT} bytes"
    assert servicer.calls == 0
    assert not caplog.records


async def test_a_big_message_is_not_even_sent() -> None:
    async with connected(Servicer(), max_message_bytes=1000) as stub:
        error = await failure(lambda: texts(stub, "x" * 2000))
    assert isinstance(error, InvalidArgumentError)
    assert "must be at most 1000 bytes" in str(error)


async def test_a_message_at_the_limit_is_taken() -> None:
    overhead = pb.GenerateRequest(text="x" * (LIMIT - 100)).ByteSize() - (LIMIT - 100)
    async with connected(Servicer()) as stub:
        assert await texts(stub, "x" * (LIMIT - overhead)) == ["one"]


async def test_rubbish_is_refused() -> None:
    async with serving(Servicer()) as server, channel(server.address) as connection:
        error = await failure(lambda: raw(connection, "GetCluster", b"\xff"))
        assert str(error) == "message = 1 bytes: must be valid protobuf"


async def test_a_client_that_goes_away_closes_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Servicer()
    async with connected(servicer) as stub:
        call = stub.Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S)
        await call.read()
        await asyncio.wait_for(servicer.streaming.wait(), DEADLINE_S)
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_client_that_stopped_reading_and_leaves_closes_the_handler() -> None:
    """The handler then waits inside a write, not inside itself."""
    servicer = Servicer()
    async with connected(servicer) as stub:
        call = stub.Generate(pb.GenerateRequest(text="flood"), timeout=DEADLINE_S)
        await call.read()
        written = -1
        while written != servicer.written:
            written = servicer.written
            await asyncio.sleep(0.05)
        assert not servicer.closed.is_set()
        call.cancel()
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)


async def test_a_deadline_closes_the_handler() -> None:
    servicer = Servicer()
    async with connected(servicer) as stub:
        responses = aiter(stub.Generate(pb.GenerateRequest(text="forever"), timeout=1.0))
        await anext(responses)  # The handler runs.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)


async def test_health() -> None:
    statuses = health_pb2.HealthCheckResponse
    async with serving(Servicer()) as server, channel(server.address) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)

        async def check(service: str) -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)).status

        assert await check("") == statuses.NOT_SERVING
        assert isinstance(await failure(lambda: check(SERVICE)), NotFoundError)
        await server.set_serving("", True)
        await server.set_serving(SERVICE, True)
        assert await check("") == await check(SERVICE) == statuses.SERVING
        await server.set_serving(SERVICE, False)
        assert await check(SERVICE) == statuses.NOT_SERVING


async def test_health_is_watched() -> None:
    statuses = health_pb2.HealthCheckResponse
    async with serving(Servicer()) as server, channel(server.address) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)
        assert (await watch.read()).status == statuses.NOT_SERVING
        await server.set_serving("", True)
        assert (await watch.read()).status == statuses.SERVING
        watch.cancel()


async def test_stop_gives_running_calls_their_grace() -> None:
    servicer = Servicer()
    async with serving(servicer) as server, channel(server.address) as connection:
        stub: Any = pb_grpc.ClusterServiceStub(connection)  # type: ignore[no-untyped-call]
        call = stub.Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S)
        await call.read()
        started = asyncio.get_running_loop().time()
        await asyncio.wait_for(server.stop(0.1), DEADLINE_S)
        assert asyncio.get_running_loop().time() - started > 0.05
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)


async def test_a_port_in_use_is_an_error() -> None:
    async with serving(Servicer()) as server:
        assert server.port > 0
        with pytest.raises(UnavailableError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await GrpcServer(port=server.port).start()


async def test_nobody_there() -> None:
    async with serving(Servicer()) as server:
        address = server.address
    async with channel(address) as connection:
        stub = pb_grpc.ClusterServiceStub(connection)  # type: ignore[no-untyped-call]
        assert isinstance(await failure(lambda: get(stub)), UnavailableError)


def test_addresses() -> None:
    assert join_address("localhost", 5) == "localhost:5"
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("[::1]", 5) == "[::1]:5"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    drained = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), DEADLINE_S)
        drained.append(True)

    run(main)
    assert drained


def test_run_stops_at_once_on_a_second_signal() -> None:
    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), DEADLINE_S)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(DEADLINE_S)

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 1


def test_run_logs_a_typed_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise UnavailableError("cannot listen")

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 1
    assert "UnavailableError: cannot listen" in caplog.text


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5123", "10.0.0.7"),
        ("ipv6:[::1]:5123", "::/64"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5123", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:5123", "10.0.0.7"),
        ("ipv6:[fe80::1%25eth0]:5123", "fe80::/64"),
        ("unix:", "unix"),
    ],
)
def test_a_client_without_a_token_is_its_host(peer: str, host: str) -> None:
    assert peer_host(peer) == host


async def test_a_handler_knows_who_calls(tmp_path: Path) -> None:
    found = []

    class Asking(Servicer):
        async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
            found.append(caller())
            return pb.GetClusterResponse()

        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            await asyncio.sleep(0.01 * len(request.request_id))
            found.append(caller())
            yield pb.GenerateResponse()

    file = tmp_path / "tokens"
    file.write_text(f"alice: {'a' * 16}\nbob: {'b' * 16} max_requests=9\n")
    for gate in (None, Gate(clients=read_client_tokens("client_tokens_file", str(file)))):
        server = GrpcServer(gate=gate)
        server.add(pb_grpc.add_ClusterServiceServicer_to_server, Asking())
        await server.start()
        async with channel(server.address) as link:
            stub = pb_grpc.ClusterServiceStub(link)

            async def read(name: str, stub: Any = stub) -> None:
                request = pb.GenerateRequest(request_id="x" * ord(name) if name == "b" else "")
                own = (("corun-client", "forged"), *bearer(name * 16))
                assert [each async for each in stub.Generate(request, metadata=own, timeout=DEADLINE_S)]

            await stub.GetCluster(pb.GetClusterRequest(), metadata=bearer("a" * 16), timeout=DEADLINE_S)
            await asyncio.gather(read("b"), read("a"))
        await server.stop(0.0)
    assert [each.name for each in found] == ["127.0.0.1"] * 3 + ["alice", "alice", "bob"]


async def test_what_a_handler_leaves_behind_does_not_keep_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is kept counts as one of its connection's, of which there may be only so many."""
    monkeypatch.setattr(server, "MAX_STREAMS", 20)
    timers = []

    class Leaving(Servicer):
        async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
            timers.append(asyncio.get_running_loop().call_later(60, print))
            return pb.GetClusterResponse()

    serving = GrpcServer()
    serving.add(pb_grpc.add_ClusterServiceServicer_to_server, Leaving())
    await serving.start()
    async with channel(serving.address) as link:
        stub = pb_grpc.ClusterServiceStub(link)
        for _ in range(50):
            await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)
    await serving.stop(0.0)
    assert len(timers) == 50
    for timer in timers:
        timer.cancel()
