"""Random messages, made from the protobuf descriptors alone, and their bytes broken on purpose.

Owns what is sent, drawn from one random stream, so that a case's seed gives the same bytes again. Knows no service's
meaning: a new field of a proto is fuzzed from the day it is there. Tests only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

from tests.fuzz.http2 import varint

_INTS = (
    0, 1, 2, 3, 7, 16, 255, 256, 511, 512, 513, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
_FLOATS = (
    0.0, -0.0, 0.5, 1.0, -1.0, 2.0, 2.0000001, 100.0, 1e-45, 1e38, 1.7e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
_TEXTS = (
    "", "x", "0", "\0", "\n\r\t", "ä" * 3, "\U0001f600", "\ufeff\u202e", "a" * 128, "a" * 129, "%s%n{}{0}", "../../etc",
    "127.0.0.1:1", "[::1]:0", "0" * 64, "{", "[" * 2000, "null", '{"model": {}}', "\ufffd" * 40, "é" * 300,
)  # fmt: skip
_SIZES = (0, 1, 1, 1, 2, 2, 3, 17, 65, 300)
_RARE_SIZES = (1025, 5000, 40_000)
_MAX_DEPTH = 6
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Maker:
    """Draws messages."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def any_of(self, descriptor: Any) -> Any:
        """A message with random fields, none of which need fit together."""
        message = message_factory.GetMessageClass(descriptor)()
        self._fill_all(message, 0)
        return message

    def changed(self, message: Any) -> Any:
        """A copy with one to three fields, at any depth, set to something else."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            self._change(copy, 0)
        return copy

    def _fill_all(self, message: Any, depth: int) -> None:
        """In place: copied into another, a message is parsed again, and not all that is made here can be."""
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < 0.6 and depth < _MAX_DEPTH:
                self._fill(message, field, depth)

    def _change(self, message: Any, depth: int) -> None:
        if not message.DESCRIPTOR.fields:
            return
        field = self._rng.choice(message.DESCRIPTOR.fields)
        inside = field.message_type is not None and not field.message_type.GetOptions().map_entry
        if inside and not field.is_repeated and message.HasField(field.name) and self._rng.random() < 0.8:
            self._change(getattr(message, field.name), depth + 1)
        elif inside and field.is_repeated and len(getattr(message, field.name)) and self._rng.random() < 0.7:
            self._change(self._rng.choice(getattr(message, field.name)), depth + 1)
        else:
            message.ClearField(field.name)
            self._fill(message, field, depth)

    def _fill(self, message: Any, field: Any, depth: int) -> None:
        if not (field.is_repeated or field.message_type is not None):
            setattr(message, field.name, self._scalar(field))
            return
        there = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(self._size()):
                there[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated and field.message_type is not None:
            for _ in range(min(self._size(), 40)):
                self._fill_all(there.add(), depth + 1)
        elif field.is_repeated:
            value = self._scalar(field)
            same = self._rng.random() < 0.5
            there.extend([value if same else self._scalar(field) for _ in range(self._size())])
        else:
            there.SetInParent()
            self._fill_all(there, depth + 1)

    def _size(self) -> int:
        return self._rng.choice(_RARE_SIZES if self._rng.random() < 0.02 else _SIZES)

    def _scalar(self, field: Any) -> Any:
        rng, kind = self._rng, field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((*(value.number for value in field.enum_type.values), 99, -1, 2**31 - 1))
        if kind in _BOUNDS:
            low, high = _BOUNDS[kind]
            number = rng.choice((*_INTS, rng.getrandbits(64), rng.randrange(256))) * rng.choice((1, -1))
            return min(max(number, low), high)
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            value = rng.choice((*_FLOATS, rng.uniform(-3, 3)))
            return value if kind == FieldDescriptor.CPPTYPE_DOUBLE or abs(value) < 1e39 else float("inf")
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        text = rng.choice(_TEXTS) * rng.choice((1, 1, 1, 2, 100))
        return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def mutated(rng: Random, data: bytes, other: bytes) -> bytes:
    """The bytes of a message, broken in one to four ways; `other` is what pieces are taken from."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = rng.choice(_MUTATIONS)(rng, data, other)
    return data[: 1 << 20]


def _flip(rng: Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 3, 20))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _splice(rng: Random, data: bytes, other: bytes) -> bytes:
    at, start = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    return data[:at] + other[start : start + rng.randrange(1, 200)] + data[at + rng.randrange(20) :]


def _lie(rng: Random, data: bytes, _: bytes) -> bytes:
    """A byte, perhaps a length or a tag, becomes another small or a huge number."""
    at = rng.randrange(len(data) + 1)
    value = rng.choice((b"\0", b"\x7f", b"\xff\x7f", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80" * 11))
    return data[:at] + value + data[at + 1 :]


_UNKNOWN_FIELDS = (
    b"\xf8\xff\xff\xff\x0f\x01", b"\xfa\x07\x03abc", b"\x00", b"\x07", b"\xc5\x3e\0\0\0\0", b"\xa1\x06" + b"\xff" * 8,
)  # fmt: skip


def _bad_text(rng: Random, data: bytes, _: bytes) -> bytes:
    """Not UTF-8, in the place of a text."""
    bad = rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"))
    return data + bytes([rng.choice((0x0A, 0x12, 0x3A)), len(bad)]) + bad


def _nest(rng: Random, data: bytes, other: bytes) -> bytes:
    """Groups, or messages in messages, deeper than any reader should follow."""
    if rng.random() < 0.5:
        return data + b"\x0b" * rng.choice((5, 99, 101, 10_000))
    inner = b""
    for _ in range(rng.choice((10, 150))):
        inner = b"\x22" + varint(len(inner)) + inner
    return data + inner


_MUTATIONS: Sequence[Callable[[Random, bytes, bytes], bytes]] = (
    _flip,
    _flip,
    lambda rng, data, _: data[: rng.randrange(len(data) + 1)],
    _splice,
    _splice,
    _lie,
    lambda rng, data, _: data + rng.choice(_UNKNOWN_FIELDS) * rng.choice((1, 1, 1000)),
    _bad_text,
    _nest,
    lambda rng, data, other: rng.choice((data + data, data + other, data * 50)),
    lambda rng, *_: rng.randbytes(rng.choice((1, 5, 60, 3000))),
)
