"""HTTP/2 as a hostile client speaks it: frames made by hand, right or wrong, and what came back.

Owns only what gRPC's own client would refuse to send. Tests only.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW = 4
"""The setting's number."""
WINDOW = 65_535
MAX_FRAME = 16_384


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A frame; `length` lies about the payload."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size & 0xFFFFFF)[1:] + struct.pack(">BBI", kind & 0xFF, flags & 0xFF, stream) + payload


def hello(window: int | None = None) -> bytes:
    """The preface with SETTINGS; window: how much the server may send on each stream at first."""
    values = b"" if window is None else struct.pack(">HI", INITIAL_WINDOW, window)
    return PREFACE + frame(SETTINGS, payload=values)


def widen(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE of a stream; 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """HPACK: literals, neither indexed nor compressed."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def call_fields(path: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The header of a gRPC call."""
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost")]
    return [*pseudo, (b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]


def headers(stream: int, path: bytes, *more: tuple[bytes, bytes], flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, block(call_fields(path, *more)))


def message(payload: bytes, *, announced: int | None = None, compressed: int = 0) -> bytes:
    """A gRPC message; `announced` lies about its length."""
    size = len(payload) if announced is None else announced
    return struct.pack(">BI", compressed, size & 0xFFFFFFFF) + payload


def call(stream: int, path: bytes, payload: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A whole unary call in one go; the payload has to fit a frame."""
    return headers(stream, path, *more) + frame(DATA, END_STREAM, stream, message(payload))


class Connection:
    """A connection whose every frame is ours to send. Reading answers pings and settings, as an honest client does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.ended: dict[int, bytes] = {}
        """The last HEADERS block, or RST_STREAM's code, by stream."""
        self.goaway = b""
        self.is_over = False
        self._room: defaultdict[int, int] = defaultdict(int)
        """Bytes that the server lets us send beyond the first window, by stream; 0 is the connection."""
        self._initial = WINDOW
        self._rest = b""

    @classmethod
    async def open(cls, address: str, greeting: bytes = b"") -> Connection:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(greeting or hello())
        return cls(reader, writer)

    def send(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    def window(self, stream: int) -> int:
        """Bytes of DATA that may be sent now."""
        return min(self._initial + self._room[stream], WINDOW + self._room[0])

    def send_data(self, stream: int, data: bytes) -> None:
        """Sends DATA that fits the window."""
        self.send(frame(DATA, 0, stream, data))
        for each in (0, stream):
            self._room[each] -= len(data)

    async def read(self, seconds: float) -> bool:
        """Takes what has come, for at most so long; False if nothing did, or the connection is over.

        Up to Python 3.11, `asyncio.wait_for` drops a cancellation that comes together with the bytes.
        """
        reading = asyncio.create_task(self.reader.read(1 << 16))
        try:
            done, _ = await asyncio.wait({reading}, timeout=seconds)
        finally:
            reading.cancel()
        if not done:
            return False
        try:
            data = reading.result()
        except OSError:
            data = b""
        self.is_over = not data
        self._rest += data
        while len(self._rest) >= 9 and len(self._rest) >= (end := 9 + int.from_bytes(self._rest[:3], "big")):
            kind, flags, stream = struct.unpack(">BBI", self._rest[3:9])
            payload, self._rest = self._rest[9:end], self._rest[end:]
            self._take(kind, flags, stream & 0x7FFFFFFF, payload)
        return bool(data)

    async def until_ended(self, stream: int, seconds: float) -> int | None:
        """The gRPC status that ended a stream; None if there is none in that time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while stream not in self.ended and not self.is_over and (left := end - loop.time()) > 0:
            await self.read(left)
        return status_of(self.ended.get(stream, b""))

    def close(self) -> None:
        self.writer.transport.abort()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            values = dict(struct.iter_unpack(">HI", payload))
            self._initial = values.get(INITIAL_WINDOW, self._initial)
            self.send(frame(SETTINGS, ACK))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._room[stream] += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.setdefault(stream, payload)
        elif kind == GOAWAY:
            self.goaway = payload


def status_of(trailers: bytes) -> int | None:
    """grpc-status of a HEADERS block as gRPC writes it; None if there is none."""
    _, found, rest = trailers.partition(b"grpc-status")
    if not found or not rest:
        return None
    digits = rest[1 : 1 + (rest[0] & 0x7F)]
    return int(digits) if not rest[0] & 0x80 and digits.isdigit() else None


def varint(value: int) -> bytes:
    """A number as protobuf writes it, and HPACK its lengths: seven bits a byte, the lowest first."""
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def _text(value: bytes) -> bytes:
    """A text with its length, HPACK's integer with a prefix of seven bits."""
    size = len(value)
    return (bytes([size]) if size < 127 else b"\x7f" + varint(size - 127)) + value
