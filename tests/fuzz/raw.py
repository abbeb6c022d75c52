"""Bytes on the port that no gRPC client would send: noise, HTTP/1, and HTTP/2 that is wrong or too much. Tests only."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

from tests.fuzz.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    block,
    call,
    call_fields,
    frame,
    headers,
    hello,
    message,
    widen,
)

GENERATE, GET_CLUSTER = b"/corun.v1.ClusterService/Generate", b"/corun.v1.ClusterService/GetCluster"
PATHS = (GENERATE, GET_CLUSTER, b"/grpc.health.v1.Health/Watch")
_CANCEL = struct.pack(">I", 8)


def http1(rng: Random) -> bytes:
    body = rng.choice((b"", b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"))
    line = rng.choice((b"GET / HTTP/1.1", b"POST /corun.v1.ClusterService/Generate HTTP/1.1", b"PRI * HTTP/1.1"))
    return line + b"\r\nHost: localhost\r\nUpgrade: h2c\r\n" + body + b"\r\n"


def tls_hello(rng: Random) -> bytes:
    return b"\x16\x03\x01" + struct.pack(">H", rng.choice((5, 512))) + b"\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)


def broken_frames(rng: Random) -> bytes:
    """Right frames with some bits turned."""
    data = bytearray(call(1, rng.choice(PATHS), rng.randbytes(20)) + frame(PING, 0, 0, bytes(8)))
    for _ in range(rng.choice((1, 2, 10))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def odd_frames(rng: Random) -> bytes:
    """Any kind on any stream, of any length."""
    out = b""
    for _ in range(rng.choice((1, 3, 10))):
        stream = rng.choice((0, 1, 2, 3, 2**31 - 1))
        out += frame(rng.randrange(16), rng.getrandbits(8), stream, rng.randbytes(rng.choice((0, 4, 8, 60))))
    return out


def lying_length(rng: Random) -> bytes:
    kind = rng.choice((DATA, HEADERS, SETTINGS, PING, GOAWAY, PRIORITY))
    return frame(kind, 0, rng.choice((0, 1)), b"x" * 20, length=rng.choice((0, 3, 19, 21, 2**24 - 1)))


def settings_flood(rng: Random) -> bytes:
    values = struct.pack(">HI", rng.choice((1, 2, 3, 4, 5, 6, 99)), rng.choice((0, 1, 2**31, 2**32 - 1)))
    return frame(SETTINGS, 0, 0, values * rng.choice((0, 1, 100))) * rng.choice((10, 1000))


def continuation_flood(rng: Random) -> bytes:
    more = block([(b"x-%d" % rng.randrange(9), b"y" * rng.choice((0, 100)))] * rng.choice((1, 50)))
    return headers(1, GET_CLUSTER, flags=0) + frame(CONTINUATION, 0, 1, more) * rng.choice((10, 300))


def big_headers(rng: Random) -> bytes:
    """Metadata beyond the limit, in one frame and more."""
    fields = block([*call_fields(GET_CLUSTER), *[(b"x-big", b"y" * 1000)] * rng.choice((15, 70, 200))])
    parts = [fields[i : i + 16_000] for i in range(0, len(fields), 16_000)]
    out = b""
    for i, part in enumerate(parts):
        out += frame(CONTINUATION if i else HEADERS, END_HEADERS if i == len(parts) - 1 else 0, 1, part)
    return out + frame(DATA, END_STREAM, 1, message(b""))


def hpack_bomb(rng: Random) -> bytes:
    """One large entry in the table, then many references to it."""
    entry = b"\x40" + b"\x01x" + b"\x7f\xe1\x1e" + b"y" * 4000
    return frame(HEADERS, END_HEADERS, 1, block(call_fields(GET_CLUSTER)) + entry + b"\xbe" * rng.choice((10, 9000)))


def rapid_reset(rng: Random) -> bytes:
    """Calls that are taken back at once."""
    streams, path = range(1, 2 * rng.choice((10, 200)), 2), rng.choice(PATHS)
    return b"".join(headers(stream, path) + frame(RST_STREAM, 0, stream, _CANCEL) for stream in streams)


def window_overflow(rng: Random) -> bytes:
    update = widen(rng.choice((0, 1)), rng.choice((0, 2**31 - 1, 2**32 - 1)))
    return headers(1, GENERATE) + update * rng.choice((1, 3, 200))


def odd_metadata(rng: Random) -> bytes:
    odd = (
        (b"authorization", b"Bearer \xff\xfe" + rng.randbytes(9)),
        (b"authorization", b"Bearer " + b"a" * 10_000),
        (b"x-\xff", b"1"),
        (b"x-bin", b"!!!"),
        (b"grpc-timeout", rng.choice((b"zz", b"-1S", b"99999999999H", b"", b"1n"))),
        (b"grpc-encoding", rng.choice((b"gzip", b"nonsense"))),
        (b"content-type", b"text/html"),
        (b"Upper", b"Case"),
        (b"", b"nameless"),
        (b":status", b"200"),
    )
    return call(1, rng.choice(PATHS), b"", rng.choice(odd))


def odd_path(rng: Random) -> bytes:
    return call(1, rng.choice((b"", b"*", b"/\xff\xfe", b"no-slash", b"/" + rng.randbytes(30), b"/a" * 3000)), b"")


def odd_message(rng: Random) -> bytes:
    """The five bytes before a message lie."""
    body = rng.randbytes(rng.choice((0, 3, 50)))
    lie = message(body, announced=rng.choice((0, 1, 2**26, 2**30, 2**32 - 1)), compressed=rng.choice((0, 1, 2, 255)))
    end = rng.choice((0, END_STREAM))
    return headers(1, rng.choice(PATHS)) + frame(DATA, end, 1, rng.choice((lie, lie[:3], lie * 3, b"")))


_BARE: dict[str, Callable[[Random], bytes]] = {
    "noise": lambda rng: rng.randbytes(rng.choice((1, 10, 100, 5000))),
    "http1": http1,
    "tls_hello": tls_hello,
    "half_preface": lambda rng: PREFACE[: rng.randrange(len(PREFACE))],
}
_AFTER_HELLO: dict[str, Callable[[Random], bytes]] = {
    "broken_frames": broken_frames,
    "odd_frames": odd_frames,
    "lying_length": lying_length,
    "settings_flood": settings_flood,
    "ping_flood": lambda rng: frame(PING, rng.choice((0, 0, 1)), 0, rng.randbytes(8)) * rng.choice((10, 2000)),
    # HEADERS that never end.
    "open_headers": lambda rng: headers(1, rng.choice(PATHS), flags=0) + rng.choice((b"", frame(DATA, 0, 1, b"x"))),
    "continuation_flood": continuation_flood,
    "big_headers": big_headers,
    "hpack_bomb": hpack_bomb,
    "rapid_reset": rapid_reset,
    "reset_of_nothing": lambda rng: frame(RST_STREAM, 0, rng.choice((0, 2, 99)), _CANCEL) * rng.choice((1, 100)),
    "window_overflow": window_overflow,
    "odd_metadata": odd_metadata,
    "odd_path": odd_path,
    "odd_message": odd_message,
    # More than one connection may have; none of them says anything.
    "many_streams": lambda rng: b"".join(headers(n, GENERATE) for n in range(1, 2 * rng.choice((100, 1200)), 2)),
    "push": lambda _: frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\x02" + block(call_fields(GENERATE))),
    "padding": lambda rng: headers(1, GENERATE) + frame(DATA, 8, 1, bytes([rng.choice((0, 5, 255))]) + b"abc"),
    # Streams in falling order, even ones, and one twice.
    "backwards": lambda rng: b"".join(
        call(stream, GET_CLUSTER, b"") for stream in rng.choice(((5, 3, 1), (2, 4), (1, 1), (0,)))
    ),
}
SCRIPTS = tuple(_BARE) + tuple(_AFTER_HELLO)


def script(name: str, rng: Random) -> bytes:
    """All that one of the scripts sends."""
    return _BARE[name](rng) if name in _BARE else hello() + _AFTER_HELLO[name](rng)
