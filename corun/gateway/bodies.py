"""Bodies of requests: how large one may be, how many bytes of them are held at once, and how one is read.

A body is parsed in the loop that carries every stream, and a thread would not help: Python's parser holds the
interpreter. A MiB of text takes it about 1 ms, of token ids 15 ms, of empty lists 70 ms. So what is not text is weighed
while it arrives, and refused where it is more than a prompt of the model's length needs. This module must not know what
a request means, nor whose it is.
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
"""Bytes beyond what one prompt needs: all other fields, and the prompts of a batch."""
RETRY_S = 1.0
PARTS = 4
"""Of the room for bodies, one for the bodies of one token."""
_TOKEN_ID_BYTES = 8
"""Six digits, a comma and a space."""
_MOST_ESCAPED = 6
"""Bytes of JSON that one byte of text may take, as in "\\u0000"."""
_QUOTE_WEIGHT, _BRACKET_WEIGHT = 16, 32
"""A quote, and the begin of a list or an object, take a parser as long as so many bytes of token ids."""

Hold = Callable[[int], None]
"""Counts further bytes as held. Raises OverloadedError if there is no room for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one body may have, in bytes."""

    size: int
    structure: int
    """Of all but text, as `Structure` weighs it."""
    max_model_len: int
    """Tokens; what these limits follow from."""

    @classmethod
    def of_model(cls, max_model_len: int, max_prompt_bytes: int, most: int) -> Limits:
        """Limits with room for a prompt of the model's length, text or token ids. most: bytes of any body."""
        structure = ALLOWANCE + _TOKEN_ID_BYTES * max_model_len
        size = structure + _MOST_ESCAPED * max_prompt_bytes
        return cls(size=min(size, most), structure=min(structure, most), max_model_len=max_model_len)

    def check(self, size: int, structure: int = 0) -> None:
        """Raises aiohttp's error for 413 if a body is beyond a limit."""
        facts = (size, self.size, "bytes"), (structure, self.structure, "bytes of numbers and lists")
        for found, limit, what in facts:
            if found > limit:
                reason = f"the most for a model of {self.max_model_len} tokens; send fewer prompts in a request"
                text = f"the body has more than {limit} {what}, {reason}"
                raise web.HTTPRequestEntityTooLarge(limit, found, text=text)


class Structure:
    """Weighs what a parser has more work with than with text: what is outside of strings, their quotes and escapes."""

    def __init__(self) -> None:
        self.size = 0
        self._in_string = False
        self._escape = b""  # At the end of a piece: it says how the next one begins.

    def add(self, data: bytes) -> None:
        """Weighs the next piece of a body."""
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
    """The bytes of all bodies that are held, those of running requests included."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._used_by: Counter[str] = Counter()  # Tokens.

    @contextmanager
    def hold(self, token: str) -> Iterator[Hold]:
        """Gives a way to take room for one body, and gives back on the way out what was taken.

        Several bodies of one token get a part of the room, so that it cannot hold all of it with bodies that it sends
        slowly. Clients without a token cannot be told apart.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            _check_room(count, self.used, self._limit, "bodies")
            if token and self._used_by[token] > taken:  # It has others.
                _check_room(count, self._used_by[token], self._limit // PARTS, "this client's bodies")
            self.used += count
            self._used_by[token] += count
            taken += count

        try:
            yield take
        finally:
            self.used -= taken
            self._used_by[token] -= taken
            self._used_by += Counter()  # Drops those that hold nothing.


def _check_room(count: int, used: int, limit: int, whose: str) -> None:
    if used + count > limit:
        text = f"{whose} of {used} of {limit} bytes are held"
        raise OverloadedError(f"the gateway has no room for {count} bytes more: {text}", RETRY_S)


async def read_body(request: web.Request, limits: Limits, hold: Hold, timeout_s: float) -> bytes:
    """Reads a body of JSON. Raises aiohttp's errors for 408, 413 and 415, and OverloadedError if there is no room."""
    if request.content_type != "application/json":  # Nor can another site's page send it then, unasked.
        raise web.HTTPUnsupportedMediaType(text="the header Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="the header Content-Encoding must be identity")
    limits.check(request.content_length or 0)
    try:
        return await asyncio.wait_for(_read(request, limits, hold), timeout_s)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the request did not arrive in {timeout_s:g} s") from None


async def when_read(request: web.Request) -> None:
    """For aiohttp, which would else ask a client that expects it for its body before anybody looked at its token."""


def was_not_asked(request: web.Request) -> bool:
    """Whether a client that waits to be asked for its body was not, or did not send all of it. What it sends next may
    be the body or another request, so that its connection cannot go on."""
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
