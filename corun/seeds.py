"""Seeds: pure functions of what identifies a sample, so that anybody can derive them again.

A sample's seed is never seed + i: a request with seed s + 1 would then draw the same tokens as sample 1 of a request
with seed s. This module must not know any random state. Nothing here may change, because recorded seeds and receipts
depend on it.
"""

from __future__ import annotations

import hashlib
import struct

from corun.errors import InvalidArgumentError, Shown
from corun.params import check_seed

MAX_SEED = 2**63 - 1
"""The largest seed; 63 bits fit a signed integer in every language."""
MAX_KEY_BYTES = 64
"""The longest key that BLAKE2b accepts."""

_REQUEST = b"corun.v1.request"  # BLAKE2b's personalisation takes at most 16 bytes.
_SAMPLE = b"corun.v1.sample"


def derive_seed(key: bytes, request_id: str) -> int:
    """Return the seed of a request that named none: the keyed BLAKE2b of its id, 63 bits.

    Raises InvalidArgumentError unless the key has 1 to 64 bytes.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES:
        # The key itself stays out of the error: it is a secret.
        raise InvalidArgumentError("seed_key", Shown(f"{len(key)} bytes"), f"must be 1 to {MAX_KEY_BYTES} bytes")
    return _seed(hashlib.blake2b(request_id.encode(), key=key, person=_REQUEST, digest_size=8))


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one sample: sample 0 keeps the request's seed, sample i gets BLAKE2b(seed, i), 63 bits."""
    if sample_index < 0:
        raise InvalidArgumentError("sample_index", sample_index, "must be at least 0")
    check_seed(seed)
    if sample_index == 0:
        return seed
    return _seed(hashlib.blake2b(struct.pack("<QQ", seed, sample_index), person=_SAMPLE, digest_size=8))


def _seed(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little") & MAX_SEED
