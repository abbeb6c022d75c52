"""The requests of one client to one router, and the stream that all their responses share.

A router sends one message for all that has come, and a reader here hands it out. So a request whose caller reads slowly
holds up no other: its responses wait here, and they are at most its whole output. This module must not know what is
made of a response, nor when a request is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, TypeVar

import grpc

from corun.client.routers import Deadline, closed
from corun.errors import CorunError, DeadlineError, InternalError
from corun.observe.trace_context import Metadata
from corun.rpc import codec
from corun.v1 import cluster_service_pb2 as pb

ROTATE_S = 600.0
"""The age in seconds from which on a stream gets no new requests. A server ends old connections, and with them what the
longest request that began in time has not used. The router ends a stream that gets no requests for a while."""

T = TypeVar("T")


class Outputs(Generic[T]):
    """Sends requests to one router, and gives each of them its own responses.

    stub: the router's service. track: as in `corun.client.routers.Routers.track`. read: makes of a response what the
    request gets. It is called as soon as the response has come.
    """

    def __init__(self, stub: Any, track: Callable[[Any], Any], read: Callable[[pb.GenerateResponse], T]) -> None:
        self._stub = stub
        self._track = track
        self._read = read
        self._stream: _Stream[T] | None = None
        self._numbers = itertools.count(1)

    async def generate(
        self, request: pb.GenerateRequest, deadline: Deadline, metadata: Metadata = ()
    ) -> AsyncGenerator[T, None]:
        """Yield the responses to a request until the router says that there are no more.

        Raises grpc.RpcError if the call or the stream fails, DeadlineError at the deadline, InternalError for a
        response that cannot be read, and CancelledByPeerError if the client is closed while the stream is opened.
        """
        stream = await self._opened(deadline)
        named = pb.GenerateRequest()
        named.CopyFrom(request)
        named.stream_id, named.call_number = stream.stream_id.result(), next(self._numbers)
        inbox = stream.inboxes[named.call_number] = _Inbox[T]()
        call = self._track(self._stub.Generate(named, timeout=deadline.remaining_s, metadata=metadata))
        ending = asyncio.ensure_future(call.code())
        ending.add_done_callback(inbox.wake)
        try:
            while inbox.items or inbox.error or not inbox.has_ended:
                inbox.arrived.clear()
                if inbox.items:
                    yield inbox.items.popleft()
                elif inbox.error is not None:
                    raise inbox.error
                elif call.done():
                    if not await _may_still_come(call, stream):
                        return
                    await _until(inbox.arrived, deadline)
                else:  # The call has a deadline. If the stream ends, the router ends the call, with what is to be done.
                    await inbox.arrived.wait()
            await ending  # The router ends the call when it has sent the last response.
        finally:
            ending.cancel()
            call.cancel()
            stream.leave(named.call_number)

    async def _opened(self, deadline: Deadline) -> _Stream[T]:
        """Return a stream that the router has named."""
        stream = self._stream
        if stream is None or not stream.takes_requests:
            call = self._track(self._stub.StreamOutputs(pb.StreamOutputsRequest()))
            stream = self._stream = _Stream(call, self._read)
        if not stream.stream_id.done():
            await asyncio.wait((stream.stream_id,), timeout=deadline.remaining_s)
        if not stream.stream_id.done():
            raise DeadlineError("the router did not open a stream in time")
        return stream


class _Inbox(Generic[T]):
    """What has come of one request and has not been read."""

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.error: InternalError | None = None
        """Set if the response behind the items cannot be read."""
        self.has_ended = False
        """Whether all that there is has come."""
        self.arrived = asyncio.Event()
        """Set when there is something new, or when the call or its stream has ended."""

    def wake(self, _: object) -> None:
        self.arrived.set()


class _Stream(Generic[T]):
    """One stream of responses, and the requests that wait for some on it."""

    def __init__(self, call: Any, read: Callable[[pb.GenerateResponse], T]) -> None:
        self.inboxes: dict[int, _Inbox[T]] = {}
        """By call number."""
        self.stream_id: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.error: grpc.RpcError | CorunError | None = None
        """The error that ended the stream; None if there was none."""
        self.is_refused = False
        """Whether the router has refused a request since the stream was opened."""
        self._call = call
        self._read = read
        self._old_at = time.monotonic() + ROTATE_S
        self.reading = asyncio.ensure_future(self._run())

    @property
    def takes_requests(self) -> bool:
        return not self.reading.done() and not self.is_refused and time.monotonic() < self._old_at

    def leave(self, number: int) -> None:
        """Remove the inbox of a call. A stream that gets no other request ends with its last one, because a router
        bounds how many a client may have open."""
        del self.inboxes[number]
        if not self.inboxes and not self.takes_requests:
            self.reading.cancel()

    def _take(self, message: pb.StreamOutputsResponse) -> None:
        """Hand out what one message brings."""
        if not self.stream_id.done():
            self.stream_id.set_result(message.stream_id)
        for response in message.responses:
            inbox = self.inboxes.get(response.call_number)
            if inbox is None or inbox.error is not None:
                continue  # Nobody waits for the rest of a request that was left.
            try:
                inbox.items.append(codec.read_answer(self._read, response))
            except InternalError as error:
                inbox.error = error.with_traceback(None)
            inbox.arrived.set()
        for number in message.ended:
            if (inbox := self.inboxes.get(number)) is not None:
                inbox.has_ended = True
                inbox.arrived.set()

    async def _run(self) -> None:
        """Hand out what comes, until the stream ends."""
        try:
            async for message in self._call:
                self._take(codec.readable(message))
        except (grpc.RpcError, CorunError) as error:
            self.error = error.with_traceback(None)
        except asyncio.CancelledError:
            # The client was closed, or no request will use the stream. This task ends here in any case. An error that
            # it kept, with its traceback, would keep this stream and its connection until Python's garbage collector
            # runs.
            pass
        finally:
            self._call.cancel()
            if not self.stream_id.done():
                self.stream_id.set_exception(self.error or closed())
                self.stream_id.exception()  # Nobody may wait for it any more.
            for inbox in self.inboxes.values():
                inbox.arrived.set()


async def _may_still_come(call: Any, stream: _Stream[Any]) -> bool:
    """Return whether responses to a call that has ended may be on the way: the end of one stream may overtake the
    messages of another. Raises the error of the call or of its stream."""
    if isinstance(stream.error, CorunError):  # What came cannot be read, and would not be better another time.
        raise stream.error
    if await call.code() is grpc.StatusCode.UNAVAILABLE:
        stream.is_refused = True  # The router may not have this stream any more.
    await call.read()
    if stream.error is not None:
        raise stream.error
    return not stream.reading.done()


async def _until(arrived: asyncio.Event, deadline: Deadline) -> None:
    # Before Python 3.12, `wait_for` returns although its task is cancelled, if the event comes at the same moment.
    waiting = asyncio.ensure_future(arrived.wait())
    try:
        await asyncio.wait((waiting,), timeout=deadline.remaining_s)
    finally:
        waiting.cancel()
    if not arrived.is_set():
        raise DeadlineError("the rest of the output did not come in time")
