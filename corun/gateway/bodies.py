"""Bodies of requests: how large a body may be, how many bytes of bodies are held at once, and how a body is read.

A body is parsed in the event loop that carries every stream. A thread would not help, since Python's parser holds the
interpreter. The parser needs about 1 ms for a MiB of text, 15 ms for a MiB of token ids and 70 ms for a MiB of empty
lists. So everything except text is weighed while it arrives, and a body is refused if that weighs more than a prompt of
the model's length needs. This module must not know what a request means, nor whose it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import HttpVersion11, hdrs, web

from corun.errors import OverloadedError

ALLOWANCE = 256 * 1024
"""The bytes that a body may have beyond what one prompt needs, for all other fields and the prompts of a batch."""
RETRY_S = 1.0
PARTS = 4
"""The number of parts of the room for bodies. Several bodies of one token may together take one part."""
_TOKEN_ID_BYTES = 8
"""The bytes of one token id in JSON: six digits, a comma and a space."""
_MOST_ESCAPED = 6
"""The most bytes of JSON that one byte of text may take, as in "\\u0000"."""
_QUOTE_WEIGHT, _BRACKET_WEIGHT = 16, 32
"""A quote, or the opening bracket of a list or an object, takes the parser as long as this many bytes of token ids."""

Hold = Callable[[int], None]
"""A function that counts further bytes as held. Raises OverloadedError if there is no room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one body, in bytes."""

    size: int
    structure: int
    """The largest weight of everything except text, as `Structure` weighs it."""
    max_model_len: int
    """The model's length in tokens, from which these limits are derived."""

    @classmethod
    def of_model(cls, max_model_len: int, max_prompt_bytes: int, most: int) -> Limits:
        """Return limits with room for a prompt of the model's length, as text or as token ids.

        most: the largest number of bytes of any body, whatever the model.
        """
        structure = ALLOWANCE + _TOKEN_ID_BYTES * max_model_len
        size = structure + _MOST_ESCAPED * max_prompt_bytes
        return cls(size=min(size, most), structure=min(structure, most), max_model_len=max_model_len)

    def check(self, size: int, structure: int = 0) -> None:
        """Raise aiohttp's error for 413 if a body exceeds a limit."""
        facts = (size, self.size, "bytes"), (structure, self.structure, "bytes of numbers and lists")
        for found, limit, what in facts:
            if found > limit:
                reason = f"the most for a model of {self.max_model_len} tokens; send fewer prompts in a request"
                text = f"the body has more than {limit} {what}, {reason}"
                raise web.HTTPRequestEntityTooLarge(limit, found, text=text)


class Structure:
    """Weighs the content that costs a parser more than text: everything outside of strings, quotes and escapes."""

    def __init__(self) -> None:
        self.size = 0
        self._in_string = False
        self._escape = b""  # An unfinished escape at the end of a piece belongs to the next one.

    def add(self, data: bytes) -> None:
        """Weigh the next piece of a body."""
        data = self._escape + data
        is_open = (len(data) - len(data.rstrip(b"\\"))) % 2 == 1
        self._escape = data[-1:] if is_open else b""
        data = data[:-1] if is_open else data
        if b"\\" in data:
            unescaped = data.replace(b"\\\\", b"")
            self.size += (len(data) - len(unescaped)) // 2 + unescaped.count(b"\\")
            data = unescaped.replace(b'\\"', b"").replace(b"\\", b"")
        parts = data.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        brackets = outside.count(b"[") + outside.count(b"{")
        self.size += len(outside) + _QUOTE_WEIGHT * (len(parts) - 1) + _BRACKET_WEIGHT * brackets
        self._in_string ^= len(parts) % 2 == 0


class Room:
    """Counts the bytes of all bodies that are held, including those of running requests."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._used_by: Counter[str] = Counter()  # By token.

    @contextmanager
    def hold(self, token: str) -> Iterator[Hold]:
        """Yield a function that takes room for one body. Give the taken room back when the block ends.

        Several bodies of one token together get only a part of the room. Otherwise one client could hold the whole room
        with bodies that it sends slowly. Clients without a token cannot be told apart, so they have no such limit.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            _check_room(count, self.used, self._limit, "bodies")
            if token and self._used_by[token] > taken:  # The token has other bodies.
                _check_room(count, self._used_by[token], self._limit // PARTS, "this client's bodies")
            self.used += count
            self._used_by[token] += count
            taken += count

        try:
            yield take
        finally:
            self.used -= taken
            self._used_by[token] -= taken
            self._used_by += Counter()  # Drop the tokens that hold nothing.


def _check_room(count: int, used: int, limit: int, whose: str) -> None:
    if used + count > limit:
        text = f"{whose} of {used} of {limit} bytes are held"
        raise OverloadedError(f"the gateway has no room for {count} bytes more: {text}", RETRY_S)


async def read_body(request: web.Request, limits: Limits, hold: Hold, timeout_s: float) -> bytes:
    """Read a body of JSON. Raises aiohttp's errors for 408, 413 and 415, and OverloadedError if there is no room."""
    if request.content_type != "application/json":  # This also keeps another site's page from sending it.
        raise web.HTTPUnsupportedMediaType(text="the header Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="the header Content-Encoding must be identity")
    limits.check(request.content_length or 0)
    try:
        return await asyncio.wait_for(_read(request, limits, hold), timeout_s)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request did not arrive in {timeout_s:g} s") from None


async def when_read(request: web.Request) -> None:
    """Do nothing, as aiohttp's handler of the header Expect. aiohttp's own handler would ask the client for its body
    before the token is checked."""


def was_not_asked(request: web.Request) -> bool:
    """Return whether a client that waits to be asked for its body was not asked, or did not send all of it. Its next
    bytes may be the body or another request, so its connection must be closed."""
    return _waits(request) and not request.content.is_eof()


def _waits(request: web.Request) -> bool:
    return request.version >= HttpVersion11 and request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"


async def _read(request: web.Request, limits: Limits, hold: Hold) -> bytes:
    if _waits(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    body, structure = bytearray(), Structure()
    async for data in request.content.iter_any():
        hold(len(data))
        body += data
        structure.add(data)
        limits.check(len(body), structure.size)
    return bytes(body)
