"""A gRPC client for measuring servers: just enough HTTP/2 to send unary requests and to record when bytes come back.

Nothing is decoded during the run: chunks are stored with the time at which they left the socket, and `messages` takes
them apart afterwards. It uses plain TCP, no compression, no deadlines. This module must not know what messages mean.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER = struct.Struct(">BHBBI")
"""The header of a frame: length in 1 + 2 bytes, type, flags, stream."""
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_WINDOW = 2**31 - 1
_REFILL = 1 << 20
"""The number of received bytes after which the client allows the server to send as many more."""

Chunk = tuple[float, bytes]
"""The time at which a chunk came, on the monotonic clock, and its bytes."""


class RawConnection(asyncio.Protocol):
    """One connection and its calls, each named by its stream's number.

    on_end: called with a call's number when the server has ended the call, or when the connection has ended.
    """

    def __init__(self, on_end: Callable[[RawConnection, int], None]) -> None:
        self.chunks: dict[int, list[Chunk]] = {}
        """The chunks of each call, in the order in which they came."""
        self.trailers: dict[int, bytes] = {}
        """The last header block of each call, as it came."""
        self._on_end = on_end
        self._open: set[int] = set()
        self._next = 1
        self._rest = b""
        self._unacknowledged = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop has its own class.
        # No header table, so that header blocks can be read one by one; no push; windows as large as possible.
        settings = struct.pack(">HIHIHI", 1, 0, 2, 0, 4, _WINDOW)
        window = struct.pack(">I", _WINDOW - 65_535)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

    def call(self, authority: str, path: str, message: bytes) -> int:
        """Start a call and return its number."""
        number, self._next = self._next, self._next + 2
        self.chunks[number] = []
        self._open.add(number)
        body = b"\0" + struct.pack(">I", len(message)) + message
        head = _frame(_HEADERS, _END_HEADERS, number, _headers(authority, path))
        self._transport.write(head + _frame(_DATA, _END_STREAM, number, body))
        return number

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        for number in sorted(self._open):
            self._end(number)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._rest:
            data = self._rest + data
        at, end, chunks = 0, len(data), self.chunks
        while end - at >= 9:
            high, low, kind, flags, number = _HEADER.unpack_from(data, at)
            stop = at + 9 + (high << 16) + low
            if stop > end:
                break
            if kind == _DATA:
                chunks[number].append((now, data[at + 9 : stop]))
                self._unacknowledged += stop - at - 9
                if flags & _END_STREAM:
                    self._end(number)
            else:
                self._control(kind, flags, number, data[at + 9 : stop])
            at = stop
        self._rest = data[at:]
        if self._unacknowledged > _REFILL:
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0

    def _control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == _HEADERS:
            self.trailers[number] = payload
            if flags & _END_STREAM:
                self._end(number)
        elif kind == _RST:
            self._end(number)
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))

    def _end(self, number: int) -> None:
        if number in self._open:
            self._open.discard(number)
            self._on_end(self, number)


def messages(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the whole messages of a call, each with the time of its last byte."""
    rest = b""
    for now, chunk in chunks:
        rest = rest + chunk if rest else chunk
        while len(rest) >= 5 and len(rest) >= 5 + (length := int.from_bytes(rest[1:5], "big")):
            yield now, rest[5 : 5 + length]
            rest = rest[5 + length :]


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    length = len(payload)
    return _HEADER.pack(length >> 16, length & 0xFFFF, kind, flags, number) + payload


def _headers(authority: str, path: str) -> bytes:
    """Return the headers of a gRPC call: HPACK literals that enter no table (RFC 7541, Section 6.2.2)."""
    post, http = b"\x83", b"\x86"  # Entries of the static table.
    named = _literal(4, path) + _literal(1, authority) + _literal(31, "application/grpc")
    return post + http + named + _literal("te", "trailers")


def _literal(name: int | str, value: str) -> bytes:
    """Return a header whose name is given, or is an index of the static table."""
    if isinstance(name, str):
        return b"\0" + _text(name) + _text(value)
    index = bytes([name]) if name < 15 else bytes([15, name - 15])  # 4 bits; a larger index goes on in the next byte.
    return index + _text(value)


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127  # A longer text needs more than one byte for its length.
    return bytes([len(data)]) + data
