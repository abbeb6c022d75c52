"""The requests that need tokens: read them, ask the cluster, and answer as a whole or as a stream.

POST /v1/completions, /v1/chat/completions and /v1/responses draw tokens, /tokenize and /detokenize only translate. A
request lives as long as its handler. aiohttp cancels the handler when the client is gone, which ends the request in the
cluster and frees its slots. This module must not know routes, nor how clients are kept.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from corun.client.client import AsyncClient
from corun.gateway.activity import Prompts
from corun.gateway.answers import Numbered, chunks_of, tokens_of_chat, translated, whole
from corun.gateway.bodies import Limits, Room, read_body
from corun.gateway.chat_responses import CHAT
from corun.gateway.chats import Chat, ChatRequest, read_chat_request, read_detokenize, read_tokenize
from corun.gateway.clients import Catalog, Clients, Served, bearer_token
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import naming
from corun.gateway.failures import typed
from corun.gateway.renders import Renders
from corun.gateway.requests import CompletionRequest, check_model, read_request
from corun.gateway.response_items import shape
from corun.gateway.response_requests import named, read_response_request
from corun.gateway.responses import COMPLETION, Events, Shape, parts
from corun.gateway.streams import EventStream, send_whole
from corun.observe.trace_context import TRACEPARENT, read, within
from corun.types import TemplateSource

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Incoming:
    """A request that has arrived and was admitted."""

    request: web.Request
    token: str
    served: Served
    body: bytes

    @property
    def request_id(self) -> str | None:
        """The id in the header; None if there is none, or an empty one, which proxies send for none."""
        return self.request.headers.get("X-Request-Id") or None


class Completions:
    """Answers the requests that need tokens."""

    def __init__(self, config: GatewayConfig, clients: Clients, catalog: Catalog) -> None:
        self.activity = Prompts(config.max_requests)
        self.room = Room(config.max_bodies_bytes)
        self.renders = Renders(config.timeout_s)
        self._config = config
        self._clients = clients
        self._catalog = catalog

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Handle a completion request."""
        async with self._incoming(request) as incoming:
            asked = read_request(incoming.body, request_id=incoming.request_id, max_prompts=self._config.max_prompts)
            check_model(asked.model, *incoming.served.names)
            calls = len(asked.prompts)
            with self.activity.more(calls - 1), self._clients.lease(incoming.token, calls) as client:
                with self.activity.told():
                    asked = await translated(asked, client)
                return await self._run(incoming, asked, client, COMPLETION)

    async def post_chat(self, request: web.Request) -> web.StreamResponse:
        """Handle a request for the answer to a chat."""
        async with self._incoming(request) as incoming:
            chat = read_chat_request(incoming.body, request_id=incoming.request_id)
            check_model(chat.asked.model, *incoming.served.names)
            with self._clients.lease(incoming.token) as client:
                asked = await self._with_prompt(incoming, chat, client)
                return await self._run(incoming, asked, client, CHAT)

    async def post_response(self, request: web.Request) -> web.StreamResponse:
        """Handle a request for the answer to a conversation of items."""
        async with self._incoming(request) as incoming:
            read = read_response_request(incoming.body, request_id=incoming.request_id)
            check_model(read.chat.asked.model, *incoming.served.names)
            with self._clients.lease(incoming.token) as client:
                with named(read.sources):
                    asked = await self._with_prompt(incoming, read.chat, client)
                return await self._run(incoming, asked, client, shape(read.told))

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Answer with the tokens of a text or of a chat."""
        async with self._incoming(request) as incoming:
            asked = read_tokenize(incoming.body)
            check_model(asked.model, *incoming.served.names)
            with self._clients.lease(incoming.token) as client, self.activity.told():
                if isinstance(asked.prompt, Chat):
                    text = await self._rendered(incoming, asked.prompt.render)
                    found = await tokens_of_chat(text, client, asked.return_token_strs)
                else:
                    with naming("prompt", "prompt", whole=True):
                        found = await client.tokenize(
                            asked.prompt,
                            add_special_tokens=asked.add_special_tokens,
                            with_spellings=asked.return_token_strs,
                        )
            answer = {
                "count": len(found.token_ids),
                "max_model_len": incoming.served.max_model_len,
                "tokens": list(found.token_ids),
                "token_strs": list(found.tokens) if asked.return_token_strs else None,
            }
            return await self._whole(incoming, answer)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        """Answer with the text of tokens."""
        async with self._incoming(request) as incoming:
            model, token_ids = read_detokenize(incoming.body)
            check_model(model, *incoming.served.names)
            with self._clients.lease(incoming.token) as client, naming("token_ids", "tokens"), self.activity.told():
                text = await client.detokenize(token_ids)
            return await self._whole(incoming, {"prompt": text})

    @asynccontextmanager
    async def _incoming(self, request: web.Request) -> AsyncIterator[_Incoming]:
        """Admit a request and read its body, which is held until the block ends."""
        token = bearer_token(request.headers.get("Authorization"))
        caller = read((TRACEPARENT, value) for value in request.headers.getall(TRACEPARENT, ()))
        with self.activity.request(), within(caller), self.room.hold(token) as hold:
            with self.activity.told():
                served = await self._catalog.served(token)  # First: only known clients may send a body.
                limits = Limits.of_model(served.max_model_len, served.max_prompt_bytes, self._config.max_body_bytes)
                body = await read_body(request, limits, hold, self._config.client_timeout_s)
            yield _Incoming(request=request, token=token, served=served, body=body)

    async def _with_prompt(self, incoming: _Incoming, chat: ChatRequest, client: AsyncClient) -> CompletionRequest:
        """Return the request for the prompt that a chat becomes."""
        with self.activity.told():
            text, style = await self._rendered(incoming, chat.render)
            prompt = (await tokens_of_chat(text, client)).token_ids
            return chat.with_prompt(prompt, style, incoming.served.max_model_len, self._config.chat_max_tokens)

    async def _rendered(self, incoming: _Incoming, render: Callable[[TemplateSource, int], T]) -> T:
        """Return what the model's template makes of a chat."""
        template = await self._catalog.template(incoming.token)
        return await self.renders.run(
            incoming.token, functools.partial(render, template, incoming.served.max_prompt_bytes)
        )

    async def _run(
        self, incoming: _Incoming, asked: CompletionRequest, client: AsyncClient, shape: Shape
    ) -> web.StreamResponse:
        """Run a request and answer it in this shape."""
        model = incoming.served.name
        if asked.stream:
            events = shape.events(shape.head(asked, model), asked)
            async with aclosing(chunks_of(asked, client)) as chunks:
                return await self._stream(incoming.request, events, chunks)
        with self.activity.told():
            answer = await whole(asked, client, shape, model)
        return await self._whole(incoming, answer)

    async def _whole(self, incoming: _Incoming, answer: Mapping[str, Any]) -> web.StreamResponse:
        return await send_whole(incoming.request, parts(answer), self._config.client_timeout_s)

    async def _stream(self, request: web.Request, events: Events, chunks: Numbered) -> web.StreamResponse:
        answer = EventStream(request, self._config.client_timeout_s)
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
            last = events.failure(typed(error))
        return await answer.end(last + events.done)
