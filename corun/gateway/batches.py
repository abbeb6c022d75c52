"""OpenAI's batch files: lines of requests, and the lines that answer them.

A line that cannot be answered as it is asked gets a line with the error; none is dropped. This module must not know
files.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from corun.client.client import AsyncClient
from corun.config.extras import load
from corun.errors import CorunError, InvalidArgumentError, NotFoundError, PermissionDeniedError, UnavailableError
from corun.gateway.answers import tokens_of_chat, translated, whole
from corun.gateway.chat_responses import CHAT
from corun.gateway.config import GatewayConfig
from corun.gateway.errors import STATUSES, body_of
from corun.gateway.requests import CompletionRequest, check_model, read_json, read_request
from corun.gateway.responses import COMPLETION, plain
from corun.params import MAX_REQUEST_ID_LENGTH, check_text
from corun.types import ModelStatus, TemplateSource

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
REFUSALS = (InvalidArgumentError, NotFoundError, PermissionDeniedError)
"""The errors that are about a line, the last one only if the line itself has the value. All others are about the
cluster, and may be over when the batch is run again."""
_FIELDS = ("custom_id", "method", "url", "body")
_DEFAULTED = ("seed", "request_id", "priority")
"""Fields of a body that have a default here; null stands for it."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One line of a batch file."""

    id: str
    """The id of its answer, which follows from what the line asks for. Another request has another id."""
    custom_id: str
    number: int
    """The number of the line in its file, from 1."""
    url: str
    body: Mapping[str, Any]

    @property
    def request_id(self) -> str:
        """The request's id in the cluster: its own, else that of its answer, from which a router derives its seed."""
        return self.body.get("request_id") or self.id


def is_batch(line: bytes) -> bool:
    """Return whether a line is one of OpenAI's batch files."""
    try:
        return "custom_id" in read_json(line)
    except InvalidArgumentError:
        return False


def read_line(line: bytes, number: int, seed_of: Callable[[str], int | None]) -> Request:
    """Read one line. Raises InvalidArgumentError, which names the field.

    seed_of: returns the seed of a line that has none, from its `custom_id`; None: the router derives one.
    """
    fields = read_json(line)
    for name in (*fields, *_FIELDS):
        if name not in _FIELDS:
            raise InvalidArgumentError(name, fields[name], f"must be one of {', '.join(_FIELDS)}")
    custom_id, url, body = _custom_id(fields), fields.get("url"), fields.get("body")
    if fields.get("method") != "POST":
        raise InvalidArgumentError("method", fields.get("method"), 'must be "POST"')
    if url not in (COMPLETIONS, CHATS):
        raise InvalidArgumentError("url", url, f'must be "{COMPLETIONS}" or "{CHATS}"')
    if not isinstance(body, dict):
        raise InvalidArgumentError("body", body, "must be an object")
    body = {name: value for name, value in body.items() if value is not None or name not in _DEFAULTED}
    if "request_id" in body:
        check_text("body.request_id", body["request_id"], MAX_REQUEST_ID_LENGTH, min_length=0)
    if "seed" not in body and (seed := seed_of(custom_id)) is not None:
        body["seed"] = seed
    return Request(id=line_id(custom_id, url, body), custom_id=custom_id, number=number, url=url, body=body)


def _custom_id(fields: Mapping[str, Any]) -> str:
    return check_text("custom_id", fields.get("custom_id", ""))


def line_id(*asked: Any) -> str:
    """Return the id of the answer to what was asked."""
    text = json.dumps(asked, sort_keys=True)
    return f"batch_req_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def broken(line: bytes, number: int, error: CorunError) -> Row:
    """Return the answer to a line that is no request."""
    custom_id: str | None
    try:
        custom_id = _custom_id(read_json(line))
    except InvalidArgumentError:
        custom_id = None
    answer_id = line_id(number, line.decode(errors="replace"))
    return {"id": answer_id, "custom_id": custom_id, "response": None, "error": _error(error, number)}


class Answers:
    """Answers requests with one cluster. priority: that of requests that name none."""

    def __init__(self, client: AsyncClient, config: GatewayConfig, priority: str) -> None:
        self._client = client
        self._config = config
        self._priority = priority
        self._model: ModelStatus | None = None
        self._template: TemplateSource | None = None

    async def answer(self, request: Request) -> Row:
        """Return the line that answers a request: the response of the API, or the error with which it is refused.

        Raises the errors of the cluster, such as OverloadedError.
        """
        try:
            status, body = 200, plain(await self._answer(request))
        except REFUSALS as error:
            if isinstance(error, PermissionDeniedError) and error.field not in request.body:
                raise  # The priority of the whole run is refused.
            status, body = STATUSES[error.code][0], {"error": _error(error, request.number)}
        response = {"status_code": status, "request_id": request.request_id, "body": body}
        return {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}

    async def _answer(self, request: Request) -> Row:
        model, sent = await self._served(), json.dumps({"priority": self._priority, **request.body}).encode()
        if request.url == COMPLETIONS:
            asked = read_request(sent, request_id=request.request_id, max_prompts=self._config.max_prompts)
            _check(asked, model.name)
            return await whole(await translated(asked, self._client), self._client, COMPLETION, model.name)
        chats = load("corun.gateway.chats", "a batch of chats", "router")  # Only chats need jinja2.
        chat = chats.read_chat_request(sent, request_id=request.request_id)
        _check(chat.asked, model.name)
        template = self._template = self._template or await self._client.get_chat_template()
        text, style = await asyncio.to_thread(chat.render, template, model.max_prompt_bytes)
        prompt = (await tokens_of_chat(text, self._client)).token_ids
        asked = chat.with_prompt(prompt, style, model.max_model_len, self._config.chat_max_tokens)
        return await whole(asked, self._client, CHAT, model.name)

    async def _served(self) -> ModelStatus:
        if self._model is None:
            self._model = (await self._client.get_cluster(contracts=False)).model
        if self._model is None:
            raise UnavailableError("no node has joined the cluster yet")
        return self._model


def _check(asked: CompletionRequest, served: str) -> None:
    if asked.stream:
        raise InvalidArgumentError("stream", True, "must be false in a batch: answers come whole")
    check_model(asked.model, served)


def _error(error: CorunError, number: int) -> Row:
    return {**body_of(error)["error"], "line": number}
