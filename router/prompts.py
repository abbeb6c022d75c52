"""Turn text prompts into token ids. A text's size is checked before any work, and long texts are tokenized in threads,
at most two at a time.

Owns: the router's knowledge of the model, the limit on a text's length, the two threads that tokenize, and the texts
that wait for them. This module must not know samples, queues or nodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from corun.errors import DeadlineError, InvalidArgumentError, OverloadedError, Shown
from corun.types import ModelStatus
from router.clock import loop_time
from router.text import Tokenizer

T = TypeVar("T")

SHORT = 512
"""The most bytes of a text that is tokenized in the event loop itself. That takes about a millisecond."""
LONG = 64 * 1024
"""The number of bytes above which a text is long. Long texts wait only for other long texts, and shorter texts do not
wait for them."""
MAX_WAITING = 64 * 1024 * 1024
"""The most bytes of text that may wait in each lane, that of long texts and that of the others."""
MAX_WAITING_OF_CLIENT = MAX_WAITING // 4
"""The most bytes of text of one client that may wait in each lane."""
LARGEST = 4 * 1024 * 1024
TOKEN_BYTES = 8
"""Tokenizing takes about 150 bytes of memory per byte of text. So a text may have at most `LARGEST` bytes, or
`TOKEN_BYTES` bytes per token of the model's length if that is more. Hardly any text that fits a model is longer."""
TOKEN_ID_BYTES = 6
"""The most bytes of one token id in a message, with the tag of its field."""
PARAMETERS_BYTES = 1024 * 1024
"""The most bytes of a request without its prompt. This is far more than the limits on all its fields add up to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The router's knowledge of the cluster's model."""

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """The most tokens of a sample, prompt and output together."""
    name: str
    """The name by which clients know the model."""
    folder: str
    """The model's folder, which this router can read."""

    @property
    def max_prompt_bytes(self) -> int:
        """The most UTF-8 bytes of a text prompt. The bound is what fits the model if every token is as long as its
        longest one, limited further by memory (`TOKEN_BYTES`)."""
        fits = self.max_model_len * self.tokenizer.max_token_bytes
        return min(fits, max(LARGEST, self.max_model_len * TOKEN_BYTES))

    @property
    def max_request_bytes(self) -> int:
        """The most bytes of a whole request, with a prompt of text or of token ids."""
        return max(self.max_prompt_bytes, self.max_model_len * TOKEN_ID_BYTES) + PARAMETERS_BYTES

    @property
    def status(self) -> ModelStatus:
        """The facts about the model that clients may see."""
        return ModelStatus(name=self.name, max_model_len=self.max_model_len, max_prompt_bytes=self.max_prompt_bytes)


class PromptEncoder:
    """Tokenizes one long text and one shorter text at a time. Close it when nothing runs any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "tokenize")
        self._long = _Lane(self._threads)
        self._other = _Lane(self._threads)

    async def encode(
        self, text: str, model: Model, deadline: float, client: str = "", *, special: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt. Clients take turns by name, however many texts each of them has waiting.
        special: False adds no special tokens.

        Raises:
            InvalidArgumentError: the text has no token, or is too long for the model; names its size and the limit.
            OverloadedError: too many other texts wait to be tokenized.
            DeadlineError: the text was not tokenized before `deadline`, on the loop's clock.
        """
        size = len(text.encode())
        if size > (limit := model.max_prompt_bytes):
            text_limit = f"must be at most {limit} bytes with this model of {model.max_model_len} tokens"
            raise InvalidArgumentError("prompt.text", Shown(f"{size} bytes"), f"{text_limit}; token ids may be more")
        encode = partial(model.tokenizer.encode, text, model.max_model_len - 1, special=special)
        if size <= SHORT:
            ids = encode()
        else:
            ids = await self._lane(size).run(encode, size, deadline, client)
        if not ids:
            raise InvalidArgumentError("prompt.text", Shown(f"{size} bytes"), "must have at least one token")
        return ids

    async def read(
        self, work: Callable[[], T], num_tokens: int, deadline: float, client: str, *, is_due: bool = False
    ) -> T:
        """Return what `work` makes of so many tokens. It waits among the texts; errors as in `encode`.

        is_due: whether the tokens are what a finished request gets. It is never refused, but counts for what comes
        after it; the number of such requests is bounded elsewhere.
        """
        size = TOKEN_ID_BYTES * num_tokens
        return await self._lane(size).run(work, size, deadline, client, is_due=is_due)

    def _lane(self, size: int) -> _Lane:
        return self._long if size > LONG else self._other

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)


class _Lane:
    """Texts that are tokenized one after the other. Clients take turns, each with its oldest text."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._lock = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {}  # Each lets one text of a client at a time wait for the lane.
        self._waiting: Counter[str] = Counter()  # The bytes of the waiting texts, by client.

    async def run(self, work: Callable[[], T], size: int, deadline: float, client: str, *, is_due: bool = False) -> T:
        of_client = (self._waiting[client], MAX_WAITING_OF_CLIENT)
        for waiting, most in ((self._waiting.total(), MAX_WAITING), of_client):
            if waiting + size > most and not is_due:
                raise OverloadedError(f"{waiting} bytes of text wait to be tokenized, of at most {most}")
        self._waiting[client] += size
        encoding = asyncio.ensure_future(self._in_turn(work, client))
        try:
            await asyncio.wait((encoding,), timeout=max(0.0, deadline - loop_time()))
        finally:
            encoding.cancel()  # This does nothing to a finished task.
            self._waiting[client] -= size
            if not self._waiting[client]:
                del self._waiting[client]
                self._turns.pop(client, None)  # A text whose caller left at once has none.
        if not encoding.done():
            raise DeadlineError("text and tokens were not converted before the deadline")
        return encoding.result()

    async def _in_turn(self, work: Callable[[], T], client: str) -> T:
        def done(running: asyncio.Future[T]) -> None:
            self._lock.release()
            if not running.cancelled():
                running.exception()  # Mark the error as retrieved, because the caller may be gone.

        async with self._turns.setdefault(client, asyncio.Lock()):
            await self._lock.acquire()
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(done)
            # A thread runs to its end even if its caller is gone, so the lane's lock is held until then.
            return await asyncio.shield(running)
