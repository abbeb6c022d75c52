"""A server of OpenAI's API that is not ours, and whose bits depend on company: the playground's negative control."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

PARTS_AT = 5
"""The token, counted from 0, from which on a request in company gets other bits."""
ANYONE = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Headers": "*"}


class Foreign:
    """Answers /v1/completions with streams in vLLM's shape."""

    def __init__(self, cors: bool) -> None:
        self.asked: list[Any] = []
        """The bodies of all requests."""
        self.headers: list[Any] = []
        self._cors = ANYONE if cors else {}
        self._running = 0
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._complete)
        self.app.router.add_options("/v1/{path}", self._preflight)

    async def _preflight(self, request: web.Request) -> web.Response:
        return web.Response(headers=self._cors)

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"data": [{"id": "stock", "max_model_len": 512}]}, headers=self._cors)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        answer = web.StreamResponse(headers={**self._cors, "Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self._running += len(prompts)
        try:
            for position in range(body["max_tokens"]):
                for index in range(len(prompts)):
                    end = "length" if position + 1 == body["max_tokens"] else None
                    choice = {"index": index, "text": f" {position}", "logprobs": None, "finish_reason": end}
                    if body.get("logprobs"):
                        value = self._logprob(position)
                        choice["logprobs"] = {"tokens": [f" {position}"], "token_logprobs": [value]}
                    await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                await asyncio.sleep(0.01)
            await answer.write(b"data: [DONE]\n\n")
        finally:
            self._running -= len(prompts)
        return answer

    def _logprob(self, position: int) -> float:
        """The log probability of a token. In company its last bit differs, from the token `PARTS_AT` on."""
        (bits,) = struct.unpack("<I", struct.pack("<f", -1.5 - position / 7))
        found: float = struct.unpack("<f", struct.pack("<I", bits ^ (self._running > 1 and position >= PARTS_AT)))[0]
        return found


@asynccontextmanager
async def foreign(*, cors: bool = True) -> AsyncIterator[tuple[Foreign, str]]:
    """Run such a server. Yield it and its address, with /v1. cors: whether pages of other origins may call it."""
    made = Foreign(cors)
    runner = web.AppRunner(made.app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server: Any = site._server
    try:
        yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        await runner.cleanup()
