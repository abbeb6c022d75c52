"""A target for any server with OpenAI's completions API: it streams a request and records when its tokens came.

Owns: the HTTP client and the reading of server-sent events, whose data is one line as in OpenAI's API. This module must
not know workloads, nor how the times are used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from corun.errors import InvalidArgumentError, UnavailableError
from corun_bench.driver import Target
from corun_bench.records import Outcome, Request

TIMEOUT_S = 3600.0
"""The default time limit for one request, from its sending to its last token."""
CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 4.0
"""How long an unused connection is kept. Servers built on uvicorn close theirs after 5 s, and no request must be sent
on a connection that is being closed."""
MAX_EVENT_BYTES = 2**24
MAX_SHOWN = 200
"""The number of characters of a server's error that are kept."""


class OpenAiTarget(Target):
    """A server at `url`, as in http://127.0.0.1:8000. `model` is its model; empty: the first that the server lists.

    extra: further fields of every request. vllm: send vLLM's own fields. Without
    them the tokens are counted but not known (`Outcome.token_ids` stays empty), and the output may end early at the
    end-of-sequence token. No standard call empties the caches of a server, but prompts of different runs differ.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        temperature: float = 1.0,
        timeout_s: float = TIMEOUT_S,
        extra: dict[str, Any] | None = None,
        vllm: bool = True,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError("url", url, "must begin with http:// or https://")
        self.model = model
        self._url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        own = {"ignore_eos": True, "return_token_ids": True} if vllm else {}
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if vllm else {})
        self._fields = {"temperature": temperature, "stream": True, "stream_options": options, **own, **(extra or {})}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the client and ask for the model. Raises UnavailableError if the server does not name one."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=MAX_EVENT_BYTES,
        )
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the client; every request in flight ends."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def run(self, request: Request, outcome: Outcome, *, logprobs: bool, clock: Callable[[], float]) -> None:
        """Send one request and record what comes until it ends. A failure is recorded as well, and not raised."""
        try:
            await self._run(request, outcome, logprobs=logprobs, clock=clock)
        except asyncio.TimeoutError:  # Before OSError, which it is in some versions of Python.
            outcome.error = f"no end after {self._timeout_s:g} s"
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:  # Two are too long lines.
            outcome.error = _shown(f"{type(error).__name__}: {error}")
        except BadAnswerError as error:
            outcome.error = _shown(str(error))

    async def _run(self, request: Request, outcome: Outcome, *, logprobs: bool, clock: Callable[[], float]) -> None:
        assert self._session is not None, "start() comes first"
        answer = _Answer(outcome)
        body = json.dumps(self._body(request, logprobs))
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self._url}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise BadAnswerError(f"HTTP {response.status}: {_message(await response.read())}")
            async for line in response.content:
                if line.startswith(b"data:"):  # Other lines are empty, comments, or fields that are not used here.
                    answer.take(line[5:].strip(), clock())
        answer.finish(request.max_tokens)

    def _body(self, request: Request, logprobs: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            **self._fields,
        }
        return fields | ({"logprobs": 0} if logprobs else {})  # 0: only the sampled token's own.

    async def _first_model(self) -> str:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise UnavailableError(f"{self._url}/v1/models: HTTP {response.status}: {_message(body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UnavailableError(f"{self._url}/v1/models: {type(error).__name__}: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"{self._url}/v1/models lists no model") from error


class BadAnswerError(Exception):
    """A server's answer reports an error, or is malformed."""


class _Answer:
    """The content of one stream so far."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._num_tokens = 0
        self._total: int | None = None
        """The number of output tokens by the server's own count."""
        self._reason = ""
        self._done = False

    def take(self, data: bytes, now: float) -> None:
        """Take one event. Raises BadAnswerError if it reports an error or is malformed."""
        if data == b"[DONE]":
            self._done = True
            return
        event = _read(data)
        if error := event.get("error"):
            raise BadAnswerError(f"in the stream: {error.get('message', error) if isinstance(error, dict) else error}")
        try:
            total = (event.get("usage") or {}).get("completion_tokens")
            for choice in event.get("choices") or ():
                self._take_choice(choice, total, now)
            self._total = self._total if total is None else int(total)
        except (AttributeError, TypeError, ValueError) as bad:
            raise BadAnswerError(f"an event of another shape: {_text(data)}") from bad

    def _take_choice(self, choice: dict[str, Any], total: int | None, now: float) -> None:
        token_ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        if token_ids is not None:
            count = len(token_ids)
            self._outcome.token_ids.extend(map(int, token_ids))
        elif total is not None:
            count = int(total) - self._num_tokens
        else:
            count = 0 if reason and not choice.get("text") else 1
        self._reason = reason or self._reason
        if count > 0:
            self._num_tokens += count
            self._outcome.arrivals.append((now, count))
        if logprobs := choice.get("logprobs"):
            self._outcome.logprobs.extend(map(float, logprobs["token_logprobs"]))

    def finish(self, max_tokens: int) -> None:
        """Check the end. Raises BadAnswerError if it came too early, or if the server counts other tokens."""
        if not self._done:
            raise BadAnswerError(f"the stream broke off after {self._num_tokens} tokens")
        self._add_uncounted()
        if self._num_tokens != (self._num_tokens if self._total is None else self._total):
            raise BadAnswerError(f"{self._num_tokens} tokens came, and the server says {self._total}")
        if self._num_tokens != max_tokens:
            raise BadAnswerError(f"{self._num_tokens} of {max_tokens} tokens came, finish reason {self._reason!r}")

    def _add_uncounted(self) -> None:
        """Add tokens that the server counts only at the end to the last message: they came with it at the latest.

        This happens with a server that puts several tokens into one message.
        """
        missing = (self._total or 0) - self._num_tokens
        if missing > 0 and self._outcome.arrivals and not self._outcome.token_ids:
            at, count = self._outcome.arrivals[-1]
            self._outcome.arrivals[-1] = at, count + missing
            self._num_tokens += missing


def _read(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise BadAnswerError(f"an event that is no JSON object: {_text(data)}")
    return event


def _message(body: bytes) -> str:
    """Return the message of an error: the field of OpenAI's format, or else the whole text."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return _text(body)


def _text(data: bytes) -> str:
    return data[:MAX_SHOWN].decode("utf-8", "replace")


def _shown(text: str) -> str:
    return " ".join(text.split())[:MAX_SHOWN]
