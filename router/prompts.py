"""Text prompts to token ids: bounded by the model before any work, beside the event loop, few at a time.

Owns: what the router knows of the model, how long a text may be, the two threads that tokenize, and who waits for them.
This module must not know samples, queues or nodes.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from corun.errors import DeadlineError, InvalidArgumentError, OverloadedError, Shown
from corun.types import ModelStatus
from router.text import Tokenizer

SHORT = 512
"""Bytes of a text that is tokenized in the event loop itself: about a millisecond."""
LONG = 64 * 1024
"""Bytes beyond which a text waits for other long ones only, and the rest does not wait for it."""
MAX_WAITING = 64 * 1024 * 1024
"""Bytes of the texts that wait for others like them."""
MAX_WAITING_OF_CLIENT = MAX_WAITING // 4
"""Bytes of those that one client has among them."""
LARGEST = 4 * 1024 * 1024
TOKEN_BYTES = 8
"""Tokenizing takes some 150 bytes of memory for a byte of text, so that a text may have `LARGEST` bytes, or so many for
each token that the model takes, if that is more. Hardly any text that fits a model is longer."""
TOKEN_ID_BYTES = 6
"""Bytes of one id in a message, at most, with the tag of its field."""
PARAMETERS_BYTES = 1024 * 1024
"""Bytes of a request without its prompt, at most: that is far more than all limits on them come to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What the router needs to know of the cluster's model."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """Tokens, prompt and output together."""
    name: str
    """What clients call it."""

    @property
    def max_prompt_bytes(self) -> int:
        """UTF-8 bytes that a text prompt may have: what fits the model if every token is its longest, and memory."""
        fits = self.max_model_len * self.tokenizer.max_token_bytes
        return min(fits, max(LARGEST, self.max_model_len * TOKEN_BYTES))

    @property
    def max_request_bytes(self) -> int:
        """Bytes that a whole request may have, with a prompt of text or of token ids."""
        return max(self.max_prompt_bytes, self.max_model_len * TOKEN_ID_BYTES) + PARAMETERS_BYTES

    @property
    def status(self) -> ModelStatus:
        """What clients are told of it."""
        return ModelStatus(name=self.name, max_model_len=self.max_model_len, max_prompt_bytes=self.max_prompt_bytes)


class PromptEncoder:
    """Tokenizes one long text at a time, and one other. Close it, when nothing runs any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "tokenize")
        self._long = _Lane(self._threads)
        self._other = _Lane(self._threads)

    async def encode(self, text: str, model: Model, deadline: float, client: str = "") -> tuple[int, ...]:
        """Token ids of a prompt. Clients, by name, take turns, however many texts each of them has.

        Raises:
            InvalidArgumentError: the text has no token, or is longer than the model; names what it has and the limit.
            OverloadedError: too many others wait to be tokenized.
            DeadlineError: it was not its turn, or not done, before `deadline`, on the loop's clock.
        """
        size = len(text.encode())
        if size > (limit := model.max_prompt_bytes):
            text_limit = f"must be at most {limit} bytes with this model of {model.max_model_len} tokens"
            raise InvalidArgumentError("prompt.text", Shown(f"{size} bytes"), f"{text_limit}; token ids may be more")
        if size <= SHORT:
            ids = model.tokenizer.encode(text, model.max_model_len - 1)
        else:
            lane = self._long if size > LONG else self._other
            ids = await lane.encode(text, size, model, deadline, client)
        if not ids:
            raise InvalidArgumentError("prompt.text", Shown(f"{size} bytes"), "must have at least one token")
        return ids

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False)


class _Line:
    """One client's texts in a lane, oldest first."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """Of its texts only the holder's waits for the lane."""
        self.waiting = 0
        """Bytes."""


class _Lane:
    """Texts that are tokenized one after the other: of each client the oldest, and clients in turn."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()
        self._lines: dict[str, _Line] = {}  # Of clients that wait.
        self._waiting = 0  # Bytes.

    async def encode(self, text: str, size: int, model: Model, deadline: float, client: str) -> tuple[int, ...]:
        line = self._lines.get(client) or _Line()
        self._check_room(line, size)
        self._lines[client] = line
        self._waiting += size
        line.waiting += size
        encoding = asyncio.ensure_future(self._in_line(line, text, model))
        try:
            await asyncio.wait((encoding,), timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        finally:
            encoding.cancel()  # Does nothing to one that is done.
            self._waiting -= size
            line.waiting -= size
            if not line.waiting:
                del self._lines[client]
        if not encoding.done():
            raise DeadlineError("the prompt was not tokenized before the deadline")
        return encoding.result()

    def _check_room(self, line: _Line, size: int) -> None:
        for waiting, most in ((self._waiting, MAX_WAITING), (line.waiting, MAX_WAITING_OF_CLIENT)):
            if waiting + size > most:
                raise OverloadedError(f"{waiting} bytes of text wait to be tokenized, of at most {most}")

    async def _in_line(self, line: _Line, text: str, model: Model) -> tuple[int, ...]:
        async with line.turn:
            return await self._in_turn(text, model)

    async def _in_turn(self, text: str, model: Model) -> tuple[int, ...]:
        await self._turn.acquire()
        encode, max_tokens = model.tokenizer.encode, model.max_model_len - 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, encode, text, max_tokens)
        work.add_done_callback(self._done)
        return await asyncio.shield(work)  # A thread goes on to its end, whoever is gone: until then it is its turn.

    def _done(self, work: asyncio.Future[tuple[int, ...]]) -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()  # Nobody may be there any more to be told.
