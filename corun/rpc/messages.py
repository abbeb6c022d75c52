"""What a message's bytes tell before they are parsed. This module must not know any message's fields."""

from __future__ import annotations


def has_more_fields(data: bytes, most: int) -> bool:
    """Return whether a message has more than `most` fields at its top level.

    An empty entry of a repeated message takes two bytes on the wire, but about 130 bytes of memory once it is parsed.
    The time of this check is bounded by `most`. For bytes that are no message the answer may be anything, since the
    parser refuses them.
    """
    at, end = 0, len(data)
    if end <= 2 * most:
        return False
    try:
        for _ in range(most):
            if at >= end:
                return False
            at = _after_field(data, at)
    except IndexError:  # The message ends in the middle of a field.
        return False
    return at < end


def _after_field(data: bytes, at: int) -> int:
    """Return where the next field begins. The two ends of a group count as fields, and so do the fields in it."""
    tag, at = _varint(data, at)
    kind = tag & 7
    if kind == 0:
        return _varint(data, at)[1]
    if kind == 2:
        size, at = _varint(data, at)
        return at + size
    return at + {1: 8, 5: 4}.get(kind, 0)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends. Raises IndexError if the bytes end before the number does."""
    value, shift = 0, 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, min(shift + 7, 70)  # A longer varint is no number and must not cost more.
    return value | byte << shift, at + 1
