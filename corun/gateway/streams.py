"""An answer as a client takes it: the events of a stream, or a whole one in pieces.

This module must not know what is in an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from aiohttp import web

MAX_BUFFERED = 32 * 1024
"""The bytes that may be buffered for a client without a time limit. A transport stops its writer at 64 KiB, and lets it
go on at 16 KiB."""


PIECE = 16 * 1024
"""The characters of a piece of a whole answer, at least."""
JSON = "application/json"


async def send_whole(request: web.Request, parts: Iterable[str], timeout_s: float) -> web.StreamResponse:
    """Send a whole answer, as JSON that comes in parts.

    A long one is made and sent piece by piece: meanwhile other clients' streams go on, and a client that takes nothing
    for `timeout_s` seconds is dropped. Raises ConnectionError for such a client, and for one that is gone.
    """
    answer = EventStream(request, timeout_s, content_type=JSON)
    held: list[str] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= PIECE:
            await answer.send("".join(held))
            await asyncio.sleep(0)  # A client that takes all at once makes nothing wait.
            held, size = [], 0
    last = "".join(held)
    return await answer.end(last) if answer.begun else web.Response(text=last, content_type=JSON)


async def send_short(request: web.Request, answer: web.Response, timeout_s: float) -> None:
    """Send a response that is no stream, such as a page. Raises ConnectionError as `send_whole` does."""

    async def send() -> None:
        await answer.prepare(request)
        await answer.write_eof()

    await _written(request, send(), answer.content_length or 0, timeout_s)


class EventStream:
    """A response that is sent event by event. Its status is sent with the first event."""

    def __init__(self, request: web.Request, timeout_s: float, content_type: str = "text/event-stream") -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._content_type = content_type
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def send(self, text: str) -> None:
        """Send events. Raises ConnectionError if the client is gone, or reads nothing for too long."""
        response, data = self._response or await self._begin(), text.encode()
        await _written(self._request, response.write(data), len(data), self._timeout_s)

    async def end(self, text: str) -> web.StreamResponse:
        """Send the last events and end the response."""
        await self.send(text)
        assert self._response is not None
        await _in_time(self._request, self._response.write_eof(), self._timeout_s)
        return self._response

    async def _begin(self) -> web.StreamResponse:
        headers = {"Content-Type": f"{self._content_type}; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        self._response = response
        return response


async def _written(request: web.Request, writing: Coroutine[Any, Any, None], size: int, timeout_s: float) -> None:
    """Write so many bytes, with a time limit if the client has so much to take that they may wait."""
    transport, is_stopped = request.transport, request.protocol.writing_paused
    if transport is not None and (is_stopped or transport.get_write_buffer_size() + size > MAX_BUFFERED):
        await _in_time(request, writing, timeout_s)
    else:
        await writing


async def _in_time(request: web.Request, writing: Coroutine[Any, Any, None], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(writing, timeout_s)
    except asyncio.TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client takes nothing") from None
