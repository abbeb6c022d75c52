"""HTTP/2 as a hostile client speaks it: frames made by hand, right or wrong, and what came back.

Owns only what gRPC's own client would refuse to send. Tests only.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

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


def settings(**values: int) -> bytes:
    """A SETTINGS frame of `n4=0` style values."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", int(k[1:]), v) for k, v in values.items()))


def hello(**values: int) -> bytes:
    return PREFACE + settings(**values)


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


def frames(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each whole frame."""
    while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
        yield data[3], data[4], int.from_bytes(data[5:9], "big") & 0x7FFFFFFF, data[9 : 9 + size]
        data = data[9 + size :]


@dataclass(kw_only=True)
class Connection:
    """A connection whose every frame is ours to send. Reading answers pings and settings, as an honest client does."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    windows: dict[int, int] = field(default_factory=dict)
    """Bytes that the server lets us send, by stream; 0 is the connection."""
    received: dict[int, bytes] = field(default_factory=dict)
    """DATA by stream."""
    ended: dict[int, bytes] = field(default_factory=dict)
    """The last HEADERS block, or RST_STREAM's code, by stream."""
    goaway: bytes = b""
    is_over: bool = False
    _initial: int = WINDOW
    _rest: bytes = b""

    @classmethod
    async def open(cls, address: str, greeting: bytes = b"", *, source: str | None = None) -> Connection:
        host, _, port = address.rpartition(":")
        local = None if source is None else (source, 0)
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
        writer.write(greeting or hello())
        return cls(reader=reader, writer=writer)

    def send(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    def window(self, stream: int) -> int:
        """Bytes of DATA that may be sent now."""
        return min(self.windows.get(stream, self._initial), self.windows.get(0, WINDOW))

    def send_data(self, stream: int, data: bytes, flags: int = 0) -> None:
        """Sends DATA that fits the window."""
        self.send(frame(DATA, flags, stream, data))
        self.windows[0] = self.windows.get(0, WINDOW) - len(data)
        self.windows[stream] = self.windows.get(stream, self._initial) - len(data)

    async def read(self, seconds: float, size: int = 1 << 16) -> bool:
        """Takes what has come, for at most so long; False if nothing did, or the connection is over."""
        try:
            data = await asyncio.wait_for(self.reader.read(size), seconds)
        except asyncio.TimeoutError:
            return False
        except OSError:
            data = b""
        self.is_over = not data
        self._rest += data
        for kind, flags, stream, payload in frames(self._rest):
            self._rest = self._rest[9 + len(payload) :]
            self._take(kind, flags, stream, payload)
        return bool(data)

    async def until_ended(self, stream: int, seconds: float) -> bytes | None:
        """What ended a stream; None if nothing did in that time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while stream not in self.ended and not self.is_over and (left := end - loop.time()) > 0:
            await self.read(left)
        return self.ended.get(stream)

    def close(self) -> None:
        self.writer.transport.abort()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == INITIAL_WINDOW:
                    grown, self._initial = value - self._initial, value
                    self.windows = {k: v + grown if k else v for k, v in self.windows.items()}
            self.send(frame(SETTINGS, ACK))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            before = self.windows.get(stream, self._initial if stream else WINDOW)
            self.windows[stream] = before + int.from_bytes(payload, "big")
        elif kind == DATA:
            self.received[stream] = self.received.get(stream, b"") + payload
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


def _text(value: bytes) -> bytes:
    return _length(len(value)) + value


def _length(size: int) -> bytes:
    """HPACK's integer with a prefix of seven bits."""
    if size < 127:
        return bytes([size])
    out, size = [127], size - 127
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])
