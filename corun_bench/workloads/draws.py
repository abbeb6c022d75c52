"""The random choices of a benchmark, as pure functions of (seed, label): the same in every version of Python.

Two draws with different labels are independent, so one more draw anywhere changes no other. This module must not know
what is drawn.
"""

from __future__ import annotations

import hashlib
import random
import struct

from corun.params import check_seed

_PERSON = b"corun.bench"


def integers(seed: int, label: str, count: int, below: int) -> list[int]:
    """Return `count` evenly distributed integers in [0, below): SHAKE-256 of seed and label, 64 bits each."""
    stream = hashlib.shake_256(_key(seed, label)).digest(8 * count)
    return [value * below >> 64 for value in struct.unpack(f"<{count}Q", stream)]


def pick(seed: int, label: str, size: int, count: int) -> list[int]:
    """Return `count` indices of [0, size) in a random order; if too few, all of them again in another order."""
    picked: list[int] = []
    while len(picked) < count:
        picked += _shuffled(seed, f"{label}/{len(picked)}", size, min(size, count - len(picked)))
    return picked


def generator(seed: int, label: str) -> random.Random:
    """Return a generator for distributions that need an unknown number of draws."""
    return random.Random(int.from_bytes(_key(seed, label), "little"))


def _shuffled(seed: int, label: str, size: int, count: int) -> list[int]:
    """Return the first `count` of a Fisher-Yates shuffle, in memory for `count`: a table has the moved items."""
    moved: dict[int, int] = {}
    chosen: list[int] = []
    for i, value in enumerate(integers(seed, label, count, 1 << 64)):
        j = i + (value * (size - i) >> 64)
        chosen.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return chosen


def _key(seed: int, label: str) -> bytes:
    text = label.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(struct.pack("<Q", check_seed(seed)) + text, person=_PERSON, digest_size=32).digest()
