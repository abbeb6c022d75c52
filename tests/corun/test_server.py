"""The server over a real socket: typed errors, health, limits, impatience, cancellation, lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
    from_rpc_error,
)
from corun.rpc import health, server
from corun.rpc.channel import channel
from corun.rpc.interceptor import _varint, has_more_fields
from corun.rpc.server import GrpcServer, join_address, run, server_options
from corun.v1 import cluster_service_pb2 as pb
from tests.answers import refusal
from tests.corun.serving import DEADLINE_S, LIMIT, SERVICE, Servicer, connected, get, serving, stub_of, texts
from tests.fuzz.http2 import DATA, END_STREAM, WINDOW_UPDATE, Connection, call, frame, headers, hello

GENERATE, GET_CLUSTER = b"/corun.v1.ClusterService/Generate", b"/corun.v1.ClusterService/GetCluster"
IMPATIENT_S = 0.3
"""Where nothing but the end of the patience can happen."""
PATIENCE_S = 1.0
"""Where this process must be quicker."""
INVALID_ARGUMENT, DEADLINE_EXCEEDED = 3, 4
STATUSES = health_pb2.HealthCheckResponse


@contextlib.asynccontextmanager
async def raw_connection(server: GrpcServer, greeting: bytes = b"") -> AsyncIterator[Connection]:
    link = await Connection.open(server.address, greeting)
    try:
        yield link
    finally:
        link.close()


def raw(connection: Any, method: str, data: bytes) -> Any:
    """A call with bytes of our choice: unary, or the first message of a stream."""
    if method == "Generate":
        return connection.unary_stream(f"/{SERVICE}/{method}")(data, timeout=DEADLINE_S).read()
    return connection.unary_unary(f"/{SERVICE}/{method}")(data, timeout=DEADLINE_S)


@pytest.mark.parametrize("call", [get, texts], ids=["unary", "stream"])
async def test_typed_errors_arrive_whole(call: Callable[[Any], Any]) -> None:
    async with connected(Servicer(OverloadedError("the queue is full", 0.5))) as stub:
        error = await refusal(call(stub), OverloadedError)
        assert (error.message, error.retry_after_s) == ("the queue is full", 0.5)


@pytest.mark.parametrize("call", [get, texts], ids=["unary", "stream"])
async def test_internals_stay_in_the_log(call: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    async with connected(Servicer(RuntimeError("/secret/path"))) as stub:
        with caplog.at_level(logging.ERROR):
            error = await refusal(call(stub), InternalError)
    assert "secret" not in str(error)
    error_id = str(error).removeprefix("internal error, id ")
    (record,) = [r for r in caplog.records if error_id in r.getMessage()]
    assert record.exc_info is not None
    assert SERVICE in record.getMessage()


async def test_a_handler_may_abort_by_itself() -> None:
    async with connected(Servicer()) as stub:
        call = stub.Verify(pb.VerifyRequest(), timeout=DEADLINE_S)
        error = await refusal(call.read())
        assert (type(error), str(error)) == (NotFoundError, "by itself")


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
        error = await refusal(texts(stub, "x" * 2000), InvalidArgumentError)
    assert "must be at most 1000 bytes" in str(error)


async def test_a_message_at_the_limit_is_taken_and_rubbish_is_not() -> None:
    overhead = pb.GenerateRequest(text="x" * (LIMIT - 100)).ByteSize() - (LIMIT - 100)
    async with serving() as server, channel(server.address) as connection:
        assert await texts(stub_of(connection), "x" * (LIMIT - overhead)) == ["one"]
        error = await refusal(raw(connection, "GetCluster", b"\xff"))
        assert str(error) == "message = 1 bytes: must be valid protobuf"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(connection, "Nothing", b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 2**63 - 1), st.text(max_size=300), st.integers(0, 45))
def test_fields_of_every_kind_are_counted(cases: int, prompt: int, seed: int, text: str, most: int) -> None:
    """Entries of a repeated message are fields, too."""
    case = pb.VerifyCase(prompt_token_ids=[300] * prompt, seed=seed, output_digest=text)
    request = pb.VerifyRequest(cases=[case] * cases, conditions=[1, 2], order_seed=seed)
    fields = cases + 1 + (seed > 0)  # Numbers are packed into one field.
    assert has_more_fields(request.SerializeToString(), most, request.DESCRIPTOR) is (fields > most)


@given(st.integers(0, 300), st.integers(0, 300), st.text(max_size=300), st.integers(0, 600))
def test_fields_of_messages_within_are_counted(stops: int, choices: int, text: str, most: int) -> None:
    """A text is none, whatever its bytes could mean."""
    request = pb.GenerateRequest(text=text, seed=1)
    request.sampling_params.stop.extend([""] * stops)
    request.sampling_params.structured_outputs.choice.texts.extend([""] * choices)
    fields = 3 + stops + 1 + 1 + choices
    assert has_more_fields(request.SerializeToString(), most, request.DESCRIPTOR) is (fields > most)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_groups_hide_no_fields_and_rubbish_is_left_to_the_parser(data: bytes, most: int) -> None:
    kind = pb.GenerateRequest.DESCRIPTOR
    assert has_more_fields(b"\xfb\x07" + b"\x0a\x00" * 50 + b"\xfc\x07", 40, kind)
    assert has_more_fields(data, most, kind) in (True, False)
    assert not has_more_fields(b"\x08\x80\x80", 1, kind)  # It ends in the middle of a number.


def test_a_number_without_end_is_not_read_to_its_end() -> None:
    """16 MiB of it took the loop, which carries all streams, for seconds."""
    read: list[int] = []

    class Noted(bytearray):
        def __getitem__(self, at: Any) -> Any:
            read.append(at)
            return super().__getitem__(at)

    with pytest.raises(IndexError):
        _varint(Noted(b"\x80" * 1000), 0)  # type: ignore[arg-type]
    assert len(read) == 10


@pytest.mark.parametrize("path", [GET_CLUSTER, GENERATE])
async def test_a_message_that_does_not_come_whole_ends_the_call(path: bytes) -> None:
    sent = (frame(DATA, END_STREAM, 1), frame(DATA, 0, 1, b""), frame(DATA, 0, 1, b"\0\0\0\0\x09abc"))
    async with serving(client_timeout_s=IMPATIENT_S) as server:
        for data, status in zip(sent, (INVALID_ARGUMENT, DEADLINE_EXCEEDED, DEADLINE_EXCEEDED), strict=True):
            async with raw_connection(server) as link:
                link.send(headers(1, path) + data)
                assert await link.until_ended(1, DEADLINE_S) == status


async def test_a_client_that_takes_nothing_loses_its_call() -> None:
    servicer = Servicer()
    async with (
        serving(servicer, client_timeout_s=PATIENCE_S) as server,
        raw_connection(server, hello(0)) as link,
    ):
        link.send(call(1, GENERATE, pb.GenerateRequest(text="flood").SerializeToString()))
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)
        assert servicer.written < 50
        # Should it read after all, it learns why.
        link.send(frame(WINDOW_UPDATE, 0, 1, (1 << 24).to_bytes(4, "big")))
        link.send(frame(WINDOW_UPDATE, 0, 0, (1 << 24).to_bytes(4, "big")))
        assert await link.until_ended(1, DEADLINE_S) == DEADLINE_EXCEEDED


async def test_a_handler_may_take_its_time() -> None:
    """Only waits for the client count."""
    servicer = Servicer()
    servicer.wait_s = 2.5 * PATIENCE_S
    async with connected(servicer, server={"client_timeout_s": PATIENCE_S}) as stub:
        found = await asyncio.gather(get(stub), texts(stub, "late"))
        assert (found[0].router_id, found[1]) == ("r", ["one", "two"])


async def test_a_client_that_goes_away_closes_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Servicer()
    async with connected(servicer) as stub:
        call = stub.Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S)
        await call.read()
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


async def test_health() -> None:
    async with serving() as server, channel(server.address) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)

        async def check(service: str) -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)).status

        assert await check("") == STATUSES.NOT_SERVING
        await refusal(check(SERVICE), NotFoundError)
        server.set_serving("", True)
        server.set_serving(SERVICE, True)
        assert await check("") == await check(SERVICE) == STATUSES.SERVING
        server.set_serving(SERVICE, False)
        assert await check(SERVICE) == STATUSES.NOT_SERVING


async def test_health_is_watched_by_so_many_and_one_that_leaves_does_not_silence_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MAX_WATCHERS", 2)
    async with serving() as server, channel(server.address) as connection:
        stub: Any = health_pb2_grpc.HealthStub(connection)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == STATUSES.NOT_SERVING
        late = stub.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        await refusal(late.read(), OverloadedError)
        watches[0].cancel()
        await asyncio.sleep(0.1)
        server.set_serving("", True)
        assert (await watches[1].read()).status == STATUSES.SERVING
        watches[1].cancel()


def test_options_that_depend_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections leave files for everything else, and only a server whose calls end ends old ones."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert ("grpc.max_allowed_incoming_connections", 768) in server_options()
    assert "grpc.max_connection_age_ms" not in dict(server_options())
    assert dict(server_options(longest_call_s=60))["grpc.max_connection_age_grace_ms"] == 60_000


async def test_stop_gives_running_calls_their_grace() -> None:
    servicer = Servicer()
    async with serving(servicer) as server, channel(server.address) as connection:
        call = stub_of(connection).Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S)
        await call.read()
        started = asyncio.get_running_loop().time()
        await asyncio.wait_for(server.stop(0.1), DEADLINE_S)
        assert asyncio.get_running_loop().time() - started > 0.05
        await asyncio.wait_for(servicer.closed.wait(), DEADLINE_S)


async def test_a_port_in_use_is_an_error() -> None:
    async with serving() as server:
        assert server.port > 0
        with pytest.raises(UnavailableError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await GrpcServer(port=server.port).start()


def test_addresses() -> None:
    assert join_address("localhost", 5) == "localhost:5"
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("[::1]", 5) == "[::1]:5"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_cleanly_on_a_signal_and_at_once_on_a_second(number: signal.Signals) -> None:
    drained = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), DEADLINE_S)
        if drained:
            os.kill(os.getpid(), number)
            await asyncio.sleep(DEADLINE_S)
        drained.append(True)

    run(main)
    with pytest.raises(SystemExit) as caught:
        run(main)
    assert (caught.value.code, drained) == (1, [True])


def test_a_clients_fault_is_no_error_in_grpcs_log() -> None:
    fault, ours = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ValueError("ours")
    for error, is_kept in ((fault, False), (ours, True)):
        record = logging.LogRecord("grpc", logging.ERROR, "", 0, "x", (), (type(error), error, None))
        assert server._without_clients_faults(record) is is_kept


def test_run_logs_a_typed_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise UnavailableError("cannot listen")

    with pytest.raises(SystemExit) as caught:
        run(main)
    assert caught.value.code == 1
    assert "UnavailableError: cannot listen" in caplog.text


async def test_what_a_handler_leaves_behind_does_not_keep_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is kept counts as one of its connection's, of which there may be only so many."""
    monkeypatch.setattr(server, "MAX_STREAMS", 20)
    timers = []

    class Leaving(Servicer):
        async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
            timers.append(asyncio.get_running_loop().call_later(60, print))
            return pb.GetClusterResponse()

    async with connected(Leaving()) as stub:
        for _ in range(50):
            await get(stub)
    for timer in timers:
        timer.cancel()
    assert len(timers) == 50


async def test_streams_of_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 2)
    async with connected(Servicer()) as stub:
        calls = [stub.Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S) for _ in range(2)]
        for call in calls:
            await call.read()
        third = stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)
        await asyncio.sleep(0.2)
        assert not third.done()
        calls[0].cancel()
        assert (await third).router_id == "r"


async def test_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    async with serving() as limited:
        links = [await asyncio.open_connection("127.0.0.1", limited.port) for _ in range(8)]
        refused = 0
        for reader, _ in links:
            # A server that keeps a connection says its settings first.
            refused += not await asyncio.wait_for(reader.read(1), DEADLINE_S)
        assert refused >= 4
        for _, writer in links:
            writer.close()
