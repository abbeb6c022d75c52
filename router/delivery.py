"""The responses of requests on their way to clients: on the stream of their own call, or on one that many calls share.

Owns: what is encoded when, and who waits for what has been written. A shared stream sends one message for all that has
come since the last one, so its cost is that of steps, not of tokens. This module must not know how samples run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from corun.errors import CorunError, InvalidArgumentError, OverloadedError, UnavailableError
from corun.observe.tracing import Value
from corun.receipt import Receipt
from corun.rpc import codec
from corun.rpc.pump import Source
from corun.types import Alternatives
from router.attempt import SampleTask
from router.output import tokens_of
from router.request import RunningRequest

IDLE_S = 60.0
"""The seconds after which a stream that no call uses ends."""
MAX_STREAMS = 1024
"""The most open streams of one client. Each process of a client needs one."""
RETRY_S = 1.0
"""The seconds after which a client with so many streams should try again."""
REOPEN_S = 0.05
"""The seconds after which a client should come back with another stream when the one it named is not open here."""
END_S = 1.0
"""The seconds that clients have to learn that their streams end, when the router shuts down."""
MESSAGE_TOKENS = 4096
"""The tokens from which on a message of a shared stream takes no further call's responses. A token takes about 70
bytes, or 10 if several of its sample come together."""


class Responses(Source):
    """The responses of one request. Most tokens get a response of their own, so all is done in few calls.

    prompt, fingerprint: what only the first response says. call_number: the call's number on a shared stream.
    """

    def __init__(
        self,
        running: RunningRequest,
        sample: SampleTask,
        prompt: Sequence[int],
        fingerprint: str,
        call_number: int = 0,
    ) -> None:
        self._receipts: list[Receipt] = []  # Those that have been sent.
        self.outbox = running.outbox
        self._request_id = sample.request_id
        self._with_logprobs = sample.params.logprobs
        # Alternatives get their texts when they are sent, each of which a tokenizer finds once.
        self._texts_alone = running.tokenizer.texts_alone if sample.token_texts else None
        self._first = prompt, fingerprint
        self._call_number = call_number
        self._num_samples = running.num_samples
        self._heads: dict[int, bytes] = {}  # By sample index.
        self._messages: deque[bytes] = deque()
        self.is_complete = False
        """Whether the receipts of all samples have been taken."""

    @property
    def has_ended(self) -> bool:
        return self.is_complete and not self._messages

    @property
    def attributes(self) -> dict[str, Value]:
        """The attributes of the request's span that follow from its output."""
        return {
            "gen_ai.usage.output_tokens": sum(receipt.num_output_tokens for receipt in self._receipts),
            "gen_ai.response.finish_reasons": [receipt.finish_reason.value for receipt in self._receipts],
        }

    def listen(self, ready: Callable[[], None] | None) -> None:
        self.outbox.ready = ready

    def pull(self) -> bytes | None:
        if not self._messages:
            taken = codec.outputs_response().responses
            self.take(taken)
            self._messages.extend(message.SerializeToString() for message in taken)
        return self._messages.popleft() if self._messages else None

    def take(self, responses: Any) -> int:
        """Add all responses that are there now to a message's. Return the number of their tokens, with the prompt's.

        Raises the error that ended the request.
        """
        num_tokens = 0
        for piece in self.outbox.take():
            if piece.receipt is not None:
                self._receipts.append(piece.receipt)
                self.is_complete = len(self._receipts) == self._num_samples
            head = self._heads.get(piece.sample_index)
            if head is None:
                head = codec.response_head(self._request_id, piece.sample_index, piece.seed, self._call_number)
                self._heads[piece.sample_index] = head
            first, self._first = self._first, ((), "")
            response = codec.fill_response(
                responses.add(),
                head,
                piece.text,
                piece.token_ids,
                piece.logprobs if self._with_logprobs else (),
                piece.receipt,
                *first,
                piece.token_texts or (),
            )
            num_tokens += len(piece.token_ids) + len(first[0])
            if piece.tops:
                num_tokens += self._add_alternatives(response, piece.tops)
        return num_tokens

    def _add_alternatives(self, response: Any, tops: Sequence[Alternatives]) -> int:
        """Add the alternatives of a response's tokens. Return how many tokens they count as."""
        for each in tops:
            texts = self._texts_alone(each.token_ids) if self._texts_alone else ()
            codec.add_alternatives(response, each._replace(texts=texts))
        return sum(map(tokens_of, tops))


class OutputStream(Source):
    """The responses of all calls that share one stream.

    A client that reads the stream slowly fills the outboxes of its calls, each up to its own limit. None of them waits
    for another, since each message takes what all of them have. An error ends its call at once, even while the client
    takes no message.

    owner: the name of the client, whose calls alone may use the stream.
    """

    def __init__(self, owner: str) -> None:
        self.stream_id = secrets.token_hex(16)
        """The name of the stream, which nobody can guess."""
        self.owner = owner
        self._has_begun = False
        self._calls: dict[int, asyncio.Future[None]] = {}  # By number: the ends of the calls.
        self._filled: dict[int, Responses] = {}  # By number: what there is to take, oldest first.
        self._uses = 0  # Calls that name the stream, also those that have nothing to send yet.
        self._last: list[asyncio.Future[None]] = []  # The ends of calls whose last response is being written.
        self._ready: Callable[[], None] | None = None
        self._turn: asyncio.Handle | None = None
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._rest = self._loop.call_later(IDLE_S, self.end)
        self.closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def listen(self, ready: Callable[[], None] | None) -> None:
        self._ready = ready

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the stream open for a call, which may wait for nodes before it has any responses."""
        self._uses += 1
        self._rest.cancel()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._rest = self._loop.call_later(IDLE_S, self.end)

    async def carry(self, number: int, responses: Responses) -> None:
        """Send the responses of a call. Return when the last one has been written.

        Raises InvalidArgumentError if another call has this number, the error that ends the request, and
        UnavailableError if the stream has ended or ends first.
        """
        if self._has_ended:
            raise _not_open()
        if number in self._calls:
            raise InvalidArgumentError("call_number", number, "must not be that of another call of the stream")
        ended = self._calls[number] = self._loop.create_future()
        responses.listen(partial(self._note, number, responses))
        self._note(number, responses)
        try:
            with self.used():
                await ended
        finally:
            responses.listen(None)
            self._filled.pop(number, None)
            del self._calls[number]

    def pull(self) -> bytes | None:
        for ended in self._last:  # The message before this one has been written.
            _settle(ended)
        self._last.clear()
        if not self._has_begun:
            self._has_begun = True
            return codec.outputs_response(self.stream_id).SerializeToString()
        if self._has_ended:
            return b""
        message, num_tokens = codec.outputs_response(), 0
        taken = message.responses
        for number, responses in tuple(self._filled.items()):
            del self._filled[number]
            num_tokens += responses.take(taken)
            if responses.is_complete:
                message.ended.append(number)
                self._last.append(self._calls[number])
            if num_tokens >= MESSAGE_TOKENS:
                break
        return message.SerializeToString() if taken else None

    def end(self) -> None:
        """End the stream, which no call uses."""
        self._has_ended = True
        self._take_turn()

    def close(self) -> None:
        """End every call that still uses the stream."""
        self._has_ended = True
        self._rest.cancel()
        _settle(self.closed)
        for ended in self._calls.values():
            _settle(ended, _not_open())

    def _note(self, number: int, responses: Responses) -> None:
        """Note that there is something to take, and take it after the step that is being delivered now."""
        if responses.outbox.error is not None:
            self._filled.pop(number, None)
            _settle(self._calls[number], responses.outbox.error)
            return
        self._filled[number] = responses
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if self._ready is not None:
            self._ready()


class OutputStreams:
    """The shared streams that are open."""

    def __init__(self) -> None:
        self._open: dict[str, OutputStream] = {}

    @contextmanager
    def opened(self, owner: str) -> Iterator[OutputStream]:
        """Return a new stream, which is open in this context. Raises OverloadedError if the client has too many."""
        if sum(stream.owner == owner for stream in self._open.values()) >= MAX_STREAMS:
            raise OverloadedError(f"client {owner} has {MAX_STREAMS} streams open, as many as it may", RETRY_S)
        stream = OutputStream(owner)
        self._open[stream.stream_id] = stream
        try:
            yield stream
        finally:
            del self._open[stream.stream_id]
            stream.close()

    async def end(self) -> None:
        """End all streams when no call uses any, and wait until their clients have been told: at most `END_S`."""
        ending = tuple(self._open.values())
        for stream in ending:
            stream.end()
        if ending:
            await asyncio.wait([stream.closed for stream in ending], timeout=END_S)

    def find(self, stream_id: str, owner: str) -> OutputStream:
        """Return a stream of this client. Raises UnavailableError if it is not open."""
        found = self._open.get(stream_id)
        if found is None or found.owner != owner or found.has_ended:
            raise _not_open()
        return found


def _not_open() -> UnavailableError:
    return UnavailableError("the stream that the call names is not open here", REOPEN_S)


def _settle(ended: asyncio.Future[None], error: CorunError | None = None) -> None:
    """End a call, unless it has ended."""
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
