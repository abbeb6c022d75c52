"""Targets behind a network: the cluster's router over gRPC, and any server with OpenAI's completions API.

Must not know workloads, nor how the times are used.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from aiohttp.http_exceptions import HttpProcessingError

from corun.client.outputs import Outputs
from corun.client.routers import Deadline
from corun.errors import DeadlineError, InvalidArgumentError, UnavailableError, from_rpc_error
from corun.params import MAX_SAMPLES, SamplingParams
from corun.receipt import output_digest
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.v1 import cluster_service_pb2 as pb
from corun.v1.cluster_service_pb2_grpc import ClusterServiceStub
from corun_bench.driver import Outcome, Request, Target
from corun_bench.systems import TEMPERATURE

TIMEOUT_S = 3600.0
"""The time limit for one request, from its sending to its last token; the driver's own timeout is shorter."""
CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 4.0
"""How long an unused connection is kept. Servers built on uvicorn close theirs after 5 s, and no request must be sent
on a connection that is being closed."""
MAX_EVENT_BYTES = 2**24
MAX_SHOWN = 200
"""The number of characters of a server's error that are kept."""
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What JSON of another shape than expected raises where it is read."""


Received = tuple[float, pb.GenerateResponse | bytes]
"""When a response came, and the response as it came."""


@dataclass(kw_only=True, slots=True)
class _Call:
    """A request of one or several samples of a prompt."""

    outcomes: list[Outcome] = field(default_factory=list)
    ends: list[asyncio.Future[None]] = field(default_factory=list)
    """When each sample has ended, or why the call failed."""
    received: list[Received] = field(default_factory=list)
    drawing: asyncio.Task[None] | None = None

    def takes(self, request: Request) -> bool:
        """Return whether a request is for the next sample: those of a call have the seeds of places from 0 on."""
        first = self.outcomes[0].request
        return (
            first.place == 0 < request.place == len(self.outcomes) < MAX_SAMPLES
            and request.prompt_token_ids is first.prompt_token_ids
        )

    def note(self, received: Received) -> None:
        self.received.append(received)
        _, response = received
        if isinstance(response, pb.GenerateResponse) and response.finish_reason:
            self.end(response.sample_index)

    def end(self, place: int, error: Exception | None = None) -> None:
        if (end := self.ends[place]).done():
            return
        if error is None:
            end.set_result(None)
        else:
            end.set_exception(error)


class ClusterTarget(Target):
    """A router, used as the SDK uses it: the responses of all requests share a stream, and samples of one prompt that
    are sent in the same turn of the loop are one request.

    A wave of requests that ends brings thousands of responses; to read them at once would delay the next wave.
    """

    def __init__(self, address: str) -> None:
        self.channel = channel(address)
        stub = ClusterServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self._outputs = Outputs(stub, track=lambda call: call, read=lambda response: response)
        self._next: _Call | None = None
        """The call that is about to be sent."""
        self._calls: list[_Call] = []

    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        call = self._next
        if call is None or not call.takes(outcome.request):
            call = self._next = _Call()
            self._calls.append(call)
            call.drawing = asyncio.ensure_future(self._draw(call, logprobs=logprobs))
        call.outcomes.append(outcome)
        call.ends.append(end := asyncio.get_running_loop().create_future())
        try:
            await end
        except asyncio.CancelledError:
            if call.drawing is not None and all(one.done() for one in call.ends):
                call.drawing.cancel()
            raise

    async def _draw(self, call: _Call, *, logprobs: bool) -> None:
        """Send a call in the next turn of the loop, and note what comes back."""
        if self._next is call:
            self._next = None
        request = call.outcomes[0].request
        params = SamplingParams(
            n=len(call.outcomes),
            temperature=TEMPERATURE,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
        )
        failure: Exception | None = None
        try:
            message = codec.generate_request(request.prompt_token_ids, params, seed=request.seed)
            async with aclosing(self.responses(message)) as responses:
                async for response in responses:
                    call.note((time.monotonic(), response))
        except Exception as error:  # Whatever it is, the samples must not wait on.
            failure = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
        for place in range(len(call.ends)):
            call.end(place, failure)

    def responses(self, message: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse | bytes, None]:
        return self._outputs.generate(message, Deadline(TIMEOUT_S))

    def settle(self) -> None:
        for call in self._calls:
            for at, data in call.received:
                message = pb.GenerateResponse.FromString(data) if isinstance(data, bytes) else data
                outcome = call.outcomes[message.sample_index]
                if message.token_ids:
                    outcome.arrivals.append((at, len(message.token_ids)))
                    outcome.token_ids += message.token_ids
                    outcome.logprobs += message.logprobs
                digest = message.receipt.output_digest
                if digest and outcome.logprobs and digest != output_digest(outcome.token_ids, outcome.logprobs):
                    outcome.error = "its receipt is of other tokens"
        self._calls.clear()

    async def connected(self) -> None:
        await self.channel.channel_ready()

    async def aclose(self) -> None:
        await self.channel.close(None)


class StreamTarget(ClusterTarget):
    """A router, or what stands in for one, with a stream for each request, as clients without the SDK may use it.

    method: a method with the messages of Generate.
    """

    def __init__(self, address: str, method: str) -> None:
        super().__init__(address)
        serialize = pb.GenerateRequest.SerializeToString
        self._generate = self.channel.unary_stream(method, request_serializer=serialize, response_deserializer=None)

    async def responses(self, message: pb.GenerateRequest) -> AsyncGenerator[bytes, None]:
        call = self._generate(message, timeout=TIMEOUT_S)
        try:
            async for data in call:
                yield data
        finally:
            call.cancel()


class OpenAiTarget(Target):
    """A server at `url`, as in http://127.0.0.1:8000. `model` is its model; empty: the first that the server lists.

    vLLM's own fields are sent. From a server that does not know them, tokens are counted but not known
    (`Outcome.token_ids` stays empty), and the output may end early at the end-of-sequence token. No standard call
    empties the caches of a server, but prompts of different runs differ.
    """

    def __init__(self, url: str, *, model: str = "") -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidArgumentError("url", url, "must begin with http:// or https://")
        self.model = model
        self._url = url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[OpenAiTarget]:
        """Open a client for the block, after which every request in flight has ended.

        Raises UnavailableError if no model is given and the server does not name one.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=MAX_EVENT_BYTES,
        ) as self._session:
            self.model = self.model or await self._first_model()
            yield self

    async def _first_model(self) -> str:
        where = f"{self._url}/v1/models"
        try:
            async with self._session.get(where) as response:
                body = await response.read()
            if response.status != 200:
                raise UnavailableError(f"{where}: HTTP {response.status}: {_message(body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise UnavailableError(f"{where}: {type(error).__name__}: {error}") from error
        except _MALFORMED as error:
            raise UnavailableError(f"{where} lists no model") from error

    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        request = outcome.request
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "temperature": TEMPERATURE,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "return_token_ids": True,
        }
        body |= {"logprobs": 0} if logprobs else {}  # 0: only the sampled token's own.
        answer = _Answer(outcome)
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise UnavailableError(_shown(f"HTTP {response.status}: {_message(await response.read())}"))
                async for line in response.content:
                    if line.startswith(b"data:"):  # Other lines are empty, comments, or fields that are not used here.
                        answer.take(line[5:].strip(), time.monotonic())
            answer.finish(request.max_tokens)
        except asyncio.TimeoutError:  # Before OSError, which it is in some versions of Python.
            raise DeadlineError(f"no end after {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:  # Two are too long lines.
            raise UnavailableError(_shown(f"{type(error).__name__}: {error}")) from error


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
        """Take one event: one line of data, as in OpenAI's API.

        Raises UnavailableError if it reports an error or is malformed.
        """
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            error, total = event.get("error"), (event.get("usage") or {}).get("completion_tokens")
            for choice in event.get("choices") or ():
                self._take_choice(choice, total, now)
            self._total = self._total if total is None else int(total)
        except _MALFORMED as bad:
            raise UnavailableError(f"an event of another shape: {_text(data)}") from bad
        if error:
            text = error.get("message", error) if isinstance(error, dict) else error
            raise UnavailableError(_shown(f"in the stream: {text}"))

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
        """Check the end. Raises UnavailableError if it came too early, or if the server counts other tokens."""
        if not self._done:
            raise UnavailableError(f"the stream broke off after {self._num_tokens} tokens")
        total = self._num_tokens if self._total is None else self._total
        # A server that puts several tokens into one message may count them only at the end. They came with the last
        # message at the latest.
        if total > self._num_tokens and self._outcome.arrivals and not self._outcome.token_ids:
            at, count = self._outcome.arrivals[-1]
            self._outcome.arrivals[-1] = at, count + total - self._num_tokens
            self._num_tokens = total
        if self._num_tokens != total:
            raise UnavailableError(f"{self._num_tokens} tokens came, and the server says {total}")
        if self._num_tokens != max_tokens:
            raise UnavailableError(f"{self._num_tokens} of {max_tokens} tokens came, finish reason {self._reason!r}")


def _message(body: bytes) -> str:
    """Return the message of an error: the field of OpenAI's format, or else the whole text."""
    try:
        return str(json.loads(body)["error"]["message"])
    except _MALFORMED:
        return _text(body)


def _text(data: bytes) -> str:
    return data[:MAX_SHOWN].decode("utf-8", "replace")


def _shown(text: str) -> str:
    return " ".join(text.split())[:MAX_SHOWN]
