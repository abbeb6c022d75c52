"""Seeds: pure functions of what identifies a sample, so that anybody can derive them again.

A sample's seed is never seed + i: request s + 1 would then draw what sample 1 of request s draws. This module must not
know any random state, and nothing here may change: recorded seeds and receipts depend on it.
"""

from __future__ import annotations

import hashlib
import struct

from corun.errors import InvalidArgumentError, Shown
from corun.params import check_seed

MAX_SEED = 2**63 - 1
"""The largest seed; 63 bits fit a signed integer in every language."""
MAX_KEY_BYTES = 64
"""BLAKE2b's limit."""

_REQUEST = b"corun.v1.request"  # 16 bytes at most: BLAKE2b's personalisation.
_SAMPLE = b"corun.v1.sample"


def derive_seed(key: bytes, request_id: str) -> int:
    """The seed of a request that named none: keyed BLAKE2b of its id, 63 bits."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        # The key itself stays out of the error: it is a secret.
        raise InvalidArgumentError("seed_key", Shown(f"{len(key)} bytes"), f"must be 1 to {MAX_KEY_BYTES} bytes")
    return _seed(hashlib.blake2b(request_id.encode(), key=key, person=_REQUEST, digest_size=8))


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of one sample: sample 0 keeps the request's, sample i has BLAKE2b(seed, i), 63 bits."""
    if sample_index < 0:
        raise InvalidArgumentError("sample_index", sample_index, "must be at least 0")
    check_seed(seed)
    if sample_index == 0:
        return seed
    return _seed(hashlib.blake2b(struct.pack("<QQ", seed, sample_index), person=_SAMPLE, digest_size=8))


def _seed(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little") & MAX_SEED
