"""Receipts and the digests in them: what ran, and exactly which bits came out.

A digest is SHA-256 over a domain tag and little-endian records, so that any language can compute it. This module must
not know where tokens come from.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from corun.errors import InvalidArgumentError
from corun.types import Alternatives, FinishReason, NodeRef, from_plain

_PROMPT_TAG = b"corun.v1.prompt\0"
_OUTPUT_TAG = b"corun.v1.output\0"
_TOKENS_TAG = b"corun.v1.tokens\0"
_TEXT_TAG = b"corun.v1.text\0"
_ALTERNATIVES_TAG = b"corun.v1.alternatives\0"
_CERTIFICATES_TAG = b"corun.v1.certificates\0"
_RECORD = struct.Struct("<If")
_TOKEN_ID = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What ran, under which contract, and what came out: enough to check a later run bit by bit."""

    fingerprint: str
    """The fingerprint of the contract; 64 hex digits."""
    request_id: str
    sample_index: int
    seed: int
    """The sample's own seed, in [0, 2^63)."""
    prompt_digest: str
    """The digest of the prompt's token ids; 64 hex digits."""
    params_digest: str
    """The digest of the sampling parameters that can change the output; 64 hex digits."""
    output_digest: str
    """The digest of the output's pairs of token id and fp32 log probability bits; 64 hex digits."""
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason
    prefill_node: NodeRef
    decode_node: NodeRef
    tokens_digest: str
    """The digest of the output's token ids alone; 64 hex digits."""
    cached_tokens: int = 0
    """The number of prompt tokens whose KV came from the prefill node's prefix cache. It is information: no bit depends
    on it."""
    certificates: str = ""
    """The digest of the certificates of both nodes (`certificates_digest`); 64 hex digits. It is information: no bit
    depends on it. Empty if neither node has one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as plain values for JSON."""
        return {**asdict(self), "finish_reason": self.finish_reason.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Receipt:
        """Read what `to_dict` wrote. Raises InvalidArgumentError for an unknown, mistyped or missing field."""
        receipt: Receipt = from_plain("receipt", cls, values)
        return receipt


class OutputDigest:
    """Computes the two digests of one sample's output, token by token and in order.

    One is SHA-256 over the pairs of token id and fp32 log probability bits. The other is over the token ids alone.
    """

    __slots__ = ("_hash", "_num_tokens", "_tokens")

    def __init__(self) -> None:
        self._hash = hashlib.sha256(_OUTPUT_TAG)
        self._tokens = hashlib.sha256(_TOKENS_TAG)
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def update(self, token_id: int, logprob: float) -> None:
        """Add one token. `logprob` is rounded to fp32; the bits of an fp32 value are kept."""
        self._hash.update(_RECORD.pack(token_id, logprob))
        self._tokens.update(_TOKEN_ID.pack(token_id))
        self._num_tokens += 1

    def hexdigest(self) -> str:
        """Return the output digest of the tokens so far. More tokens may follow."""
        return self._hash.hexdigest()

    def tokens_hexdigest(self) -> str:
        """Return the digest of the token ids so far, without their log probabilities."""
        return self._tokens.hexdigest()


def output_digest(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return the output digest of a whole output. Raises InvalidArgumentError unless each token has one logprob."""
    if len(token_ids) != len(logprobs):
        raise InvalidArgumentError("logprobs", len(logprobs), f"must be one per token, {len(token_ids)}")
    digest = OutputDigest()
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        digest.update(token_id, logprob)
    return digest.hexdigest()


def records_digest(records: bytes | bytearray) -> str:
    """Return the output digest of records that are already packed: token id and fp32 bits, 8 bytes per token."""
    return hashlib.sha256(_OUTPUT_TAG + records).hexdigest()


def records_tokens_digest(records: bytes | bytearray) -> str:
    """Return the tokens digest of an output that is already packed as records."""
    with memoryview(records) as view, view.cast("I") as words:  # This only copies words, so their byte order stays.
        return hashlib.sha256(_TOKENS_TAG + words[::2].tobytes()).hexdigest()


def prompt_digest(token_ids: Iterable[int]) -> str:
    """Return the SHA-256 over a prompt's token ids, each a little-endian uint32."""
    ids = tuple(token_ids)
    return hashlib.sha256(_PROMPT_TAG + struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def certificates_digest(prefill: str, decode: str) -> str:
    """Return the digest of two nodes' certificates (`NodeInfo.certificate`). Empty if neither node has one."""
    return hashlib.sha256(_CERTIFICATES_TAG + f"{prefill} {decode}".encode()).hexdigest() if prefill or decode else ""


def tokens_digest(token_ids: Iterable[int]) -> str:
    """Return the SHA-256 over an output's token ids, each a little-endian uint32."""
    ids = tuple(token_ids)
    return hashlib.sha256(_TOKENS_TAG + struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def text_digest(text: str) -> str:
    """Return the SHA-256 over an output's text in UTF-8."""
    return hashlib.sha256(_TEXT_TAG + text.encode()).hexdigest()


def alternatives_digest(tops: Sequence[Alternatives]) -> str:
    """Return the SHA-256 over the alternatives of each token of an output, in order. Empty if there are none.

    For each token it covers their number, and for each of them token id, fp32 log probability bits, the length of its
    text in UTF-8 and the text itself.
    """
    if not tops:
        return ""
    digest = hashlib.sha256(_ALTERNATIVES_TAG)
    for each in tops:
        digest.update(_TOKEN_ID.pack(len(each.token_ids)))
        for token_id, logprob, text in zip(*each, strict=True):
            encoded = text.encode()
            digest.update(_RECORD.pack(token_id, logprob) + _TOKEN_ID.pack(len(encoded)) + encoded)
    return digest.hexdigest()
