"""One router's requests on one stream: order of ends, errors, and what is opened when. No network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from corun.client.outputs import Outputs, _until
from corun.client.routers import Deadline
from corun.errors import CancelledByPeerError, DeadlineError, InternalError, InvalidArgumentError
from corun.v1 import cluster_service_pb2 as pb
from tests.answers import put_forward, settle

Code = grpc.StatusCode


class FailedError(grpc.RpcError):
    """The error of a failed call."""


class Call:
    """A call as grpc.aio has it, with a client's side and a test's."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.is_cancelled = False
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: asyncio.Future[Code] = asyncio.get_running_loop().create_future()

    def send(self, *texts: str, number: int = 0, ended: tuple[int, ...] = (), stream_id: str = "") -> None:
        responses = [pb.GenerateResponse(text=text, call_number=number) for text in texts]
        self._messages.put_nowait(pb.StreamOutputsResponse(stream_id=stream_id, responses=responses, ended=ended))

    def send_unreadable(self) -> None:
        self._messages.put_nowait(None)  # So gRPC tells of bytes that are no message.

    def end(self, code: Code = Code.OK) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
            self._messages.put_nowait(grpc.aio.EOF)  # type: ignore[attr-defined]  # Not in the stubs.

    def cancel(self) -> None:
        self.is_cancelled = self.is_cancelled or not self.done()
        self.end(Code.CANCELLED)

    def done(self) -> bool:
        return self._ended.done()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._ended.add_done_callback(callback)

    async def code(self) -> Code:
        return await asyncio.shield(self._ended)

    async def read(self) -> None:
        if await self.code() is not Code.OK:
            raise FailedError(await self.code())

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._messages.get()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            yield message
        if self.is_cancelled:
            raise asyncio.CancelledError
        await self.read()


class Router:
    """A router's stub, and the requests of a client to it."""

    def __init__(self) -> None:
        self.streams: list[Call] = []
        self.calls: list[Call] = []
        self.opens = True
        self.outputs = Outputs(self, lambda call: call, lambda response: response.text)

    def StreamOutputs(self, request: Any) -> Call:  # noqa: N802
        self.streams.append(Call(request))
        if self.opens:
            self.streams[-1].send(stream_id=f"s{len(self.streams)}")
        return self.streams[-1]

    def Generate(self, request: Any, *, timeout: float, metadata: Any) -> Call:  # noqa: N802
        self.calls.append(Call(request))
        return self.calls[-1]

    def ask(self) -> AsyncGenerator[str, None]:
        return self.outputs.generate(pb.GenerateRequest(text="x"), Deadline(60.0))

    async def asked(self, count: int) -> list[asyncio.Task[list[str]]]:
        """Requests that have been sent, each read to its end."""
        tasks = [asyncio.ensure_future(read(self.ask())) for _ in range(count)]
        await settle()
        return tasks


def refuse_odd(response: pb.GenerateResponse) -> str:
    if response.text == "odd":
        raise InvalidArgumentError("finish_reason", 99, "must be known")
    return response.text


async def read(texts: AsyncGenerator[str, None]) -> list[str]:
    return [text async for text in texts]


async def test_requests_that_begin_together_share_one_stream() -> None:
    router = Router()
    one, two = await router.asked(2)
    (stream,) = router.streams
    assert [(call.request.stream_id, call.request.call_number) for call in router.calls] == [("s1", 1), ("s1", 2)]
    stream.send("a", number=1)
    stream.send("b", number=2, ended=(2,))
    stream.send("c", number=1, ended=(1,))
    for call in router.calls:
        call.end()
    assert (await one, await two) == (["a", "c"], ["b"])
    assert not any(call.is_cancelled for call in router.calls)


async def test_the_end_of_a_call_may_overtake_its_last_responses() -> None:
    router = Router()
    (one,) = await router.asked(1)
    router.calls[0].end()
    await settle()
    router.streams[0].send("a", number=1)
    await settle()
    router.streams[0].send("b", number=1, ended=(1,))
    assert await one == ["a", "b"]


async def test_responses_wait_for_a_slow_reader_and_those_of_one_who_left_do_not() -> None:
    router = Router()
    slow, left = router.ask(), router.ask()
    reading = asyncio.ensure_future(anext(slow))
    leaving = asyncio.ensure_future(anext(left))
    await settle()
    (stream,) = router.streams
    stream.send("a", "b", number=1)
    stream.send("x", number=2)
    assert (await reading, await leaving) == ("a", "x")
    await left.aclose()
    assert router.calls[1].is_cancelled
    stream.send("y", number=2)
    stream.send("c", number=1, ended=(1,))
    router.calls[0].end()
    assert await read(slow) == ["b", "c"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_request_fails_with_its_call_and_its_stream_gets_no_other(is_stream: bool) -> None:
    """The router may have forgotten the stream. What it carries goes on."""
    router = Router()
    one, two = await router.asked(2)
    router.streams[0].send("a", number=1)
    if is_stream:
        router.streams[0].end(Code.DEADLINE_EXCEEDED)
        await settle()
        assert not one.done()  # Its call will say whether it may come back.
    router.calls[0].end(Code.UNAVAILABLE)
    with pytest.raises(FailedError) as failed:
        await one
    assert failed.value.args == (Code.UNAVAILABLE,)
    if not is_stream:
        router.streams[0].send("b", number=2, ended=(2,))
    router.calls[1].end()
    if is_stream:  # The rest that the router sent did not arrive.
        with pytest.raises(FailedError) as failed:
            await two
        assert failed.value.args == (Code.DEADLINE_EXCEEDED,)
    else:
        assert await two == ["b"]
    (three,) = await router.asked(1)
    assert router.calls[-1].request.stream_id == "s2"
    three.cancel()


async def test_a_stream_that_gets_no_other_request_ends_with_its_last_one() -> None:
    """Otherwise each answer of UNAVAILABLE would leave an open one behind for a minute, and a router has room for 1024
    of a client."""
    router = Router()
    one, two = await router.asked(2)
    router.calls[0].end(Code.UNAVAILABLE)
    with pytest.raises(FailedError):
        await one
    await settle()
    assert not router.streams[0].is_cancelled
    router.streams[0].send("b", number=2, ended=(2,))
    router.calls[1].end()
    assert await two == ["b"]
    await settle()
    assert router.streams[0].is_cancelled
    (three,) = await router.asked(1)
    router.streams[1].send(number=3, ended=(3,))
    router.calls[2].end()
    assert await three == []
    await settle()
    assert not router.streams[1].is_cancelled, "the next request may use it"


async def test_a_request_ends_without_error_if_both_ended_well_before_its_last_response() -> None:
    """Its caller misses the receipt."""
    router = Router()
    (one,) = await router.asked(1)
    router.streams[0].end()
    router.calls[0].end()
    assert await one == []


async def test_a_response_that_cannot_be_read_is_an_error_of_its_request_alone() -> None:
    """A router of a later version may end one sample for a reason of its own. It is not asked for that again."""
    router = Router()
    router.outputs = Outputs(router, lambda call: call, refuse_odd)
    one, two = await router.asked(2)
    router.streams[0].send("odd", number=1, ended=(1,))
    await settle()
    assert one.done()
    with pytest.raises(InternalError, match="the answer cannot be read: finish_reason"):
        await one
    assert router.calls[0].is_cancelled
    router.streams[0].send("b", number=2, ended=(2,))
    router.calls[1].end()
    assert await two == ["b"]


async def test_a_message_that_cannot_be_read_ends_its_stream_and_is_not_asked_for_again() -> None:
    router = Router()
    (one,) = await router.asked(1)
    router.streams[0].send_unreadable()
    await settle()
    assert router.streams[0].is_cancelled
    router.calls[0].end(Code.UNAVAILABLE)  # As routers end the calls of a stream that is gone.
    with pytest.raises(InternalError, match="the answer cannot be read"):
        await one


async def test_what_does_not_come_in_time_is_an_error() -> None:
    router = Router()
    (lost,) = await router.asked(1)
    router.calls[0].end()
    await settle()
    put_forward(60.0)
    with pytest.raises(DeadlineError, match="rest"):
        await lost
    router = Router()
    router.opens = False
    (lost,) = await router.asked(1)
    put_forward(60.0)
    with pytest.raises(DeadlineError, match="open a stream"):
        await lost


async def test_a_client_that_is_closed_while_a_stream_opens() -> None:
    router = Router()
    router.opens = False
    (one,) = await router.asked(1)
    router.streams[0].cancel()
    with pytest.raises(CancelledByPeerError):
        await one


async def test_a_cancellation_is_not_lost_when_output_comes_at_the_same_moment() -> None:
    """Python's own `wait_for` loses it before 3.12: Ctrl-C of a batch could leave one of its workers running."""
    for turns in range(5):
        arrived = asyncio.Event()
        waiting = asyncio.create_task(_until(arrived, Deadline(60)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arrived.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled() is cancelled
    with pytest.raises(DeadlineError, match="did not come in time"):
        await _until(asyncio.Event(), Deadline(0.01))
