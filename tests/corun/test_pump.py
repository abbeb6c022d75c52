"""The pump over a call whose writes end when the test says so."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from corun.errors import OverloadedError
from corun.rpc.pump import LateClientError, Patience, Pump, Source
from tests.answers import put_forward, settle

WAIT_S = 30.0


class Lines(Source):
    """Gives what was put in, all that waits as one message; "." is the last."""

    def __init__(self, text: str = "") -> None:
        self.waiting = text
        self.error: Exception | None = None
        self.ready: Callable[[], None] | None = None
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def listen(self, ready: Callable[[], None] | None) -> None:
        self.ready = ready

    def pull(self) -> bytes | None:
        if self.error is not None:
            raise self.error
        text, self.waiting = self.waiting, ""
        self._has_ended = "." in text
        return text.encode() or None

    def put(self, text: str) -> None:
        self.waiting += text
        assert self.ready is not None
        self.ready()


class Call:
    """A servicer context and its client."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flight: deque[asyncio.Future[None]] = deque()
        self.waits = 0
        self.is_waiting = False

    async def write(self, message: bytes) -> None:
        self.written.append(message)
        future = asyncio.get_running_loop().create_future()
        self.flight.append(future)
        assert len(self.flight) == 1, "gRPC takes one write at a time"
        try:
            await future
        finally:
            self.flight.remove(future)

    def begin(self) -> None:
        self.waits += 1
        self.is_waiting = True

    def end(self) -> None:
        self.is_waiting = False


async def started(source: Lines) -> tuple[Call, asyncio.Task[None]]:
    call: Any = Call()
    task = asyncio.ensure_future(Pump(source, call, call).run())
    await settle()
    return call, task


async def test_a_message_is_written_where_it_is_put_and_the_next_ones_merge() -> None:
    source = Lines()
    call, task = await started(source)
    assert (call.written, call.waits) == ([], 0)
    source.put("a")
    assert call.written == [b"a"]  # At once: nothing else had to run.
    assert call.is_waiting
    source.put("b")
    source.put("c")
    assert call.written == [b"a"]
    call.flight[0].set_result(None)
    await settle()
    assert call.written == [b"a", b"bc"]
    call.flight[0].set_result(None)
    await settle()
    assert not call.is_waiting
    source.put("d.")
    call.flight[0].set_result(None)
    await asyncio.wait_for(task, WAIT_S)
    assert (call.written, call.waits, source.ready) == ([b"a", b"bc", b"d."], 3, None)


async def test_what_waits_before_it_begins_is_written() -> None:
    call, task = await started(Lines("all."))
    assert call.written == [b"all."]
    assert not task.done()  # Not before it has left.
    call.flight[0].set_result(None)
    await asyncio.wait_for(task, WAIT_S)


async def test_an_error_of_the_source_ends_the_call_once_nothing_is_in_flight() -> None:
    for first in ("a", ""):
        source = Lines(first)
        call, task = await started(source)
        source.error = OverloadedError("too slow")
        source.put("")
        await settle()
        assert task.done() is not bool(first)
        for write in call.flight:
            write.set_result(None)
        with pytest.raises(OverloadedError, match="too slow"):
            await asyncio.wait_for(task, WAIT_S)
        assert call.written == ([b"a"] if first else [])


async def test_cancellation_ends_the_write_in_flight_and_nothing_more_is_written() -> None:
    source = Lines("a")
    call, task = await started(source)
    ready, write = source.ready, call.flight[0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert write.cancelled()
    source.waiting = "b"
    assert ready is not None
    ready()
    await settle()
    assert (call.written, list(call.flight), source.ready, call.is_waiting) == ([b"a"], [], None, False)


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(grpc.aio.UsageError("the call has ended"), asyncio.CancelledError), (ValueError("a bug"), ValueError)],
)
async def test_a_write_that_fails_ends_the_call(failure: Exception, raised: type[BaseException]) -> None:
    """A client that is gone is a cancellation."""
    call, task = await started(Lines("a"))
    call.flight[0].set_exception(failure)
    with pytest.raises(raised):
        await asyncio.wait_for(task, WAIT_S)
    assert not call.is_waiting


@pytest.mark.parametrize("failure", [None, grpc.aio.UsageError("the call has ended"), ValueError("a bug")])
async def test_a_write_may_end_as_the_call_is_cancelled(failure: Exception | None) -> None:
    """Both in the same turn of the loop, which has nothing to complain of."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    call, task = await started(Lines("a."))
    if failure is None:
        call.flight[0].set_result(None)
    else:
        call.flight[0].set_exception(failure)
    task.cancel()
    await asyncio.wait({task})
    await settle()
    assert (task.cancelled(), call.is_waiting, complaints) == (True, False, [])


async def impatient(source: Lines) -> tuple[Call, asyncio.Task[None]]:
    """Start a pump whose client is late after WAIT_S."""
    call: Any = Call()

    async def run() -> None:
        patience = Patience(WAIT_S)
        with patience.expecting("took no message"):
            await Pump(source, call, patience).run()

    task = asyncio.ensure_future(run())
    await settle()
    return call, task


async def test_a_client_that_takes_no_message_is_late() -> None:
    """Its write ends, too, and nothing more is written."""
    source = Lines("a")
    call, task = await impatient(source)
    source.put("b")
    put_forward(WAIT_S)
    with pytest.raises(LateClientError, match="took no message for 30 s"):
        await asyncio.wait_for(task, 2 * WAIT_S)
    assert (call.written, list(call.flight), source.ready) == ([b"a"], [], None)


async def test_a_source_may_rest_for_longer_than_a_client() -> None:
    """Before its first message, and between two. The client has taken all that there was."""
    source = Lines()
    call, task = await impatient(source)
    for text in "a.":
        put_forward(2 * WAIT_S)
        await asyncio.sleep(0.01)
        source.put(text)
        await settle()
        call.flight[0].set_result(None)
        await settle()
    await task
    assert call.written == [b"a", b"."]


async def test_a_client_that_is_gone_leaves_no_garbage() -> None:
    """A collection of a busy router takes long, since it looks at all that thousands of calls hold."""
    gc.collect()
    gc.disable()
    try:
        call, task = await started(Lines("a"))
        call.flight[0].set_exception(grpc.aio.UsageError("the call has ended"))
        await asyncio.wait({task})
        del call, task  # Without the pump's care, they would be in a cycle.
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, Pump | Lines | Call)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
