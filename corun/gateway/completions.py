"""POST /v1/completions: read the request, ask the cluster, and answer as a whole or as a stream.

A request lives as long as its handler. aiohttp cancels the handler when the client is gone, which ends the request in
the cluster and frees its slots. This module must not know routes, nor how clients are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from corun.client.client import AsyncClient
from corun.completion import Assembler, Chunk
from corun.errors import InvalidArgumentError, NotFoundError, shown
from corun.gateway.activity import Prompts
from corun.gateway.bodies import Hold, Limits, Room, read_body
from corun.gateway.clients import Catalog, Clients, Served, bearer_token
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import event_of, typed
from corun.gateway.requests import CompletionRequest, read_request
from corun.gateway.responses import DONE, Events, completion, head
from corun.observe.trace_context import TRACEPARENT, read, within

MAX_BUFFERED = 32 * 1024
"""The bytes that may be buffered for a client without a time limit. A transport stops its writer at 64 KiB."""
QUEUED_CHUNKS = 64
"""The most chunks of several prompts that wait to be written."""

Chunks = AsyncGenerator[Chunk, None]
Numbered = AsyncGenerator[tuple[int, Chunk], None]


class Completions:
    """Answers completion requests."""

    def __init__(self, config: GatewayConfig, clients: Clients, catalog: Catalog) -> None:
        self.activity = Prompts(config.max_requests)
        self.room = Room(config.max_bodies_bytes)
        self._config = config
        self._clients = clients
        self._catalog = catalog

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Handle a completion request."""
        token = bearer_token(request.headers.get("Authorization"))
        caller = read((TRACEPARENT, value) for value in request.headers.getall(TRACEPARENT, ()))
        with self.activity.request(), within(caller), self.room.hold(token) as hold:
            served = await self._catalog.served(token)  # First: only known clients may send a body.
            asked = await self._read(request, served, hold)
            calls = len(asked.prompts)
            with self.activity.more(calls - 1), self._clients.lease(token, calls) as client:
                chunks = merged([_one(asked, client, index) for index in range(calls)])
                async with aclosing(chunks):
                    if asked.stream:
                        return await self._stream(request, asked, served.name, chunks)
                    return await self._whole(asked, served.name, chunks)

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

    async def _whole(self, asked: CompletionRequest, model: str, chunks: Numbered) -> web.Response:
        begun = head(asked, model)
        found = [Assembler(asked.params.n, () if isinstance(each, str) else each) for each in asked.prompts]
        with self.activity.told():
            async for index, chunk in chunks:
                found[index].add(chunk)
        return web.json_response(completion(begun, asked, [each.finish() for each in found]))

    async def _stream(
        self, request: web.Request, asked: CompletionRequest, model: str, chunks: Numbered
    ) -> web.StreamResponse:
        answer = EventStream(request, self._config.client_timeout_s)
        events = Events(head(asked, model), asked)
        try:
            with self.activity.told():
                async for index, chunk in chunks:
                    if event := events.chunk(index, chunk):
                        await answer.send(event)
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: Chunks, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]) -> None:
    end: Exception | None = None
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                await queue.put((index, chunk))
    except Exception as error:
        end = error
    await queue.put((index, end))


async def _one(asked: CompletionRequest, client: AsyncClient, index: int) -> Chunks:
    """Yield the chunks of one prompt. If there are several prompts, an error about one names its number."""
    try:
        chunks = client.stream(
            asked.prompts[index], asked.params, seed=asked.seed, request_id=asked.id_of(index), priority=asked.priority
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except InvalidArgumentError as error:
        if len(asked.prompts) == 1 or not error.field.startswith("prompt"):
            raise
        field = f"prompt[{index}]" + error.field.removeprefix("prompt")
        raise InvalidArgumentError(field, error.value, error.limit) from error
