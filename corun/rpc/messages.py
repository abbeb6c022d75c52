"""What can be told of a message's bytes before they are parsed. This module must not know any message's fields."""

from __future__ import annotations


def has_more_fields(data: bytes, most: int) -> bool:
    """Whether a message has more than `most` fields at its top level.

    An empty entry of a repeated message takes two bytes, and some 130 bytes of memory once it is parsed. The time that
    this takes is bounded by `most`. Bytes that are no message may have any answer: parsing refuses them.
    """
    at, end = 0, len(data)
    if end <= 2 * most:
        return False
    try:
        for _ in range(most):
            if at >= end:
                return False
            at = _after_field(data, at)
    except IndexError:  # It ends in the middle of a field.
        return False
    return at < end


def _after_field(data: bytes, at: int) -> int:
    """Where the next field begins. The ends of a group count as fields, and what is in it, too."""
    tag, at = _varint(data, at)
    kind = tag & 7
    if kind == 0:
        return _varint(data, at)[1]
    if kind == 2:
        size, at = _varint(data, at)
        return at + size
    return at + {1: 8, 5: 4}.get(kind, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises IndexError if the bytes end before it does."""
    value, shift = 0, 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, min(shift + 7, 70)  # A longer one is no number, and is not to cost more.
    return value | byte << shift, at + 1
