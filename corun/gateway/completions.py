"""POST /v1/completions: read the request, ask the cluster, and answer as a whole or as a stream.

A request lives as long as its handler. aiohttp cancels the handler when the client is gone, which ends the request in
the cluster and frees its slots. This module must not know routes, nor how clients are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from corun.client.client import AsyncClient
from corun.completion import Chunk, Generation
from corun.errors import CorunError, InvalidArgumentError, NotFoundError, shown
from corun.gateway.activity import Activity
from corun.gateway.bodies import Hold, Limits, Room, read_body
from corun.gateway.clients import Catalog, Clients, Served, bearer_token
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import event_of, typed
from corun.gateway.requests import CompletionRequest, read_request
from corun.gateway.responses import DONE, Events, Head, completion
from corun.observe.trace_context import TRACEPARENT, read, within

MAX_BUFFERED = 32 * 1024
"""The bytes that may be buffered for a client without a time limit. A transport stops its writer at 64 KiB."""
QUEUED_CHUNKS = 64
"""The most chunks of several prompts that wait to be written."""

Chunks = AsyncGenerator[Chunk, None]
Numbered = AsyncGenerator[tuple[int, Chunk], None]


class Completions:
    """Answers completion requests."""

    def __init__(
        self, config: GatewayConfig, clients: Clients, catalog: Catalog, activity: Activity, room: Room
    ) -> None:
        self._config = config
        self._clients = clients
        self._catalog = catalog
        self._activity = activity
        self._room = room

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Handle a completion request."""
        token = bearer_token(request.headers.get("Authorization"))
        caller = read((TRACEPARENT, value) for value in request.headers.getall(TRACEPARENT, ()))
        with self._activity.request(), within(caller), self._room.hold(token) as hold:
            served = await self._catalog.served(token)  # First: only known clients may send a body.
            asked = await self._read(request, served, hold)
            calls = len(asked.prompts)
            with self._activity.more(calls - 1), self._clients.lease(token, calls) as client:
                return await self._answer(request, asked, client, served.name)

    async def _read(self, request: web.Request, served: Served, hold: Hold) -> CompletionRequest:
        limits = Limits.of_model(served.max_model_len, served.max_prompt_bytes, self._config.max_body_bytes)
        asked = read_request(
            await read_body(request, limits, hold, self._config.client_timeout_s),
            request_id=request.headers.get("X-Request-Id"),
            max_prompts=self._config.max_prompts,
        )
        if asked.model not in (None, served.name):
            raise NotFoundError(f"the model {shown(asked.model)} does not exist: this is {served.name!r}")
        return asked

    async def _answer(
        self, request: web.Request, asked: CompletionRequest, client: AsyncClient, model: str
    ) -> web.StreamResponse:
        head = Head(request_id=asked.request_id, created=int(time.time()), model=model)
        if asked.stream:
            return await self._stream(request, asked, client, head)
        with self._activity.told():
            generations = await _generate(asked, client)
        return web.json_response(completion(head, asked, generations))

    async def _stream(
        self, request: web.Request, asked: CompletionRequest, client: AsyncClient, head: Head
    ) -> web.StreamResponse:
        answer, events = EventStream(request, self._config.client_timeout_s), Events(head, asked)
        try:
            with self._activity.told():
                await _send_all(merged(_streams(asked, client)), events, answer)
            last = events.usage()
        except ConnectionError:
            raise
        except Exception as error:
            if not answer.begun:
                raise  # Nothing was sent, so the error can have its own status.
            last = event_of(typed(error))
        return await answer.end(last + DONE)


class EventStream:
    """A response that is sent event by event. Its status is sent with the first event."""

    def __init__(self, request: web.Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def send(self, text: str) -> None:
        """Send events. Raises ConnectionError if the client is gone, or reads nothing for too long."""
        response, data = self._response or await self._begin(), text.encode()
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(data) > MAX_BUFFERED:
            await self._in_time(response.write(data))
        else:
            await response.write(data)

    async def end(self, text: str) -> web.StreamResponse:
        """Send the last events and end the response."""
        await self.send(text)
        assert self._response is not None
        await self._in_time(self._response.write_eof())
        return self._response

    async def _begin(self) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(self._request)
        self._response = response
        return response

    async def _in_time(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.wait_for(writing, self._timeout_s)
        except asyncio.TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None


async def _send_all(chunks: Numbered, events: Events, answer: EventStream) -> None:
    async with aclosing(chunks):
        async for index, chunk in chunks:
            if event := events.chunk(index, chunk):
                await answer.send(event)


async def merged(streams: Sequence[Chunks]) -> Numbered:
    """Yield the chunks of several streams as they come, each with the number of its stream. The first error ends all
    streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(QUEUED_CHUNKS)
    tasks = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:  # Each stream ends, at the latest by its own deadline.
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await _end(tasks)


async def _pump(index: int, stream: Chunks, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]) -> None:
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await queue.put((index, chunk))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))


async def _generate(asked: CompletionRequest, client: AsyncClient) -> list[Generation]:
    """Run all prompts at once. Return the results in the order of the prompts. The first error ends all prompts."""
    tasks = [asyncio.ensure_future(_generate_one(asked, client, index)) for index in range(len(asked.prompts))]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _generate_one(asked: CompletionRequest, client: AsyncClient, index: int) -> Generation:
    try:
        return await client.generate(
            asked.prompts[index],
            asked.params,
            seed=asked.seed,
            request_id=asked.id_of(index),
            priority=asked.priority,
        )
    except CorunError as error:
        raise _of_prompt(asked, index, error) from error


def _streams(asked: CompletionRequest, client: AsyncClient) -> list[Chunks]:
    return [_stream_one(asked, client, index) for index in range(len(asked.prompts))]


async def _stream_one(asked: CompletionRequest, client: AsyncClient, index: int) -> Chunks:
    chunks = client.stream(
        asked.prompts[index], asked.params, seed=asked.seed, request_id=asked.id_of(index), priority=asked.priority
    )
    try:
        async with aclosing(chunks) as stream:
            async for chunk in stream:
                yield chunk
    except CorunError as error:
        raise _of_prompt(asked, index, error) from error


def _of_prompt(asked: CompletionRequest, index: int, error: CorunError) -> CorunError:
    """Return the error with the number of its prompt in the field, if there are several prompts and it is about one."""
    if len(asked.prompts) > 1 and isinstance(error, InvalidArgumentError) and error.field.startswith("prompt"):
        _, _, rest = error.field.partition("prompt")
        return InvalidArgumentError(f"prompt[{index}]{rest}", error.value, error.limit)
    return error


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
