"""A gateway before a cluster of fakes, and how tests talk to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from corun.gateway.app import Gateway
from corun.gateway.config import GatewayConfig
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.testing.engines import expected
from tests.answers import until
from tests.clusters import FakeCluster, cluster
from tests.secrets import Secrets

PROMPT = (5, 6, 7)


@dataclass(frozen=True, kw_only=True)
class Http:
    """A client of one gateway."""

    gateway: Gateway
    session: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.gateway.url + path, **options) as response:
            return response.status, await response.json()

    async def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any, Any]:
        """Status, JSON and headers."""
        sent = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.gateway.url + path, **sent, **options) as response:
            # The events of a stream are read and not looked at.
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.read()), response.headers

    async def answer(self, body: Any, path: str) -> Any:
        status, answer, _ = await self.post(body, path)
        assert status == 200, answer
        return answer

    async def events(self, body: Any, path: str) -> list[Any]:
        """The events of a stream without the last, which is checked."""
        async with self.session.post(self.gateway.url + path, json={"stream": True, **body}) as response:
            text = await response.text()
            assert (response.status, response.content_type) == (200, "text/event-stream"), text
        return read_events(text)

    async def complete(self, **fields: Any) -> Any:
        return await self.answer({"prompt": list(PROMPT), **fields}, "/v1/completions")

    async def stream(self, **fields: Any) -> list[Any]:
        return await self.events({"prompt": list(PROMPT), **fields}, "/v1/completions")

    async def refused(self, body: Any, path: str = "/v1/completions") -> str:
        """The field for which a request is refused."""
        status, answer, _ = await self.post(body, path)
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error"), (body, answer)
        assert error["message"] == f"{error['param']} = {error['value']}: {error['limit']}"
        assert error["limit"]
        return str(error["param"])


def read_events(text: str) -> list[Any]:
    *events, last, rest = text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@asynccontextmanager
async def serving(fake: FakeCluster, **config: Any) -> AsyncIterator[Http]:
    """A running gateway that calls this cluster's router."""
    gateway = Gateway(GatewayConfig(**{"port": 0, "router": fake.address, **config}))
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Http(gateway=gateway, session=session)
        # Requests of clients that have gone, as of a browser's page, take a moment to end. They must end, though.
        await until(lambda: gateway.activity.running == 0 or gateway.activity.draining)
    finally:
        await gateway.stop()


@asynccontextmanager
async def with_tokens(model: str, directory: Path, **config: Any) -> AsyncIterator[tuple[FakeCluster, Http, Secrets]]:
    """A gateway before a cluster whose clients need tokens."""
    secrets = Secrets.make(directory)
    guarded = cluster(model, client=secrets.client, **secrets.settings)
    async with guarded as fake, serving(fake, tls_ca=secrets.path("ca.pem"), **config) as http:
        yield fake, http, secrets


def check_choice(
    choice: Any, params: SamplingParams, seed: int, prompt: tuple[int, ...] = PROMPT, *, whole: bool = True
) -> None:
    """A choice is what these always give: the fakes' tokens are a hash of prompt, every parameter, and seed."""
    ids, logprobs, reason = expected(prompt, params, seed)
    receipt = Receipt.from_dict(choice["corun"]["receipt"])
    assert (choice["finish_reason"], choice["corun"]["seed"], receipt.seed) == (reason.value, seed, seed)
    assert receipt.num_output_tokens == len(ids)
    if whole:
        assert choice["token_ids"] == ids
        assert choice["logprobs"]["token_logprobs"] == logprobs


def joined(events: list[Any], index: int = 0) -> Any:
    """The choice that the events of a stream add up to."""
    parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert all(part["finish_reason"] is None for part in parts[:-1])
    logprobs: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            logprobs[name] = logprobs.get(name, []) + values
    return {
        "index": index,
        "text": "".join(part["text"] for part in parts),
        "logprobs": logprobs or None,
        "finish_reason": parts[-1]["finish_reason"],
        "prompt_token_ids": parts[0].get("prompt_token_ids"),
        "token_ids": [token_id for part in parts for token_id in part.get("token_ids", [])],
        "corun": parts[-1]["corun"],
    }
