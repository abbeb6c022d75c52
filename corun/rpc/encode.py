"""GenerateResponse messages as bytes, without a protobuf object for each: a router sends one per token and sample.

This module owns the layout of that message, and of the one that holds many of them, as
protos/corun/v1/cluster_service.proto defines both.
`tests/corun/test_wire.py` compares it with the protobuf library. This module must not know where tokens come from
or who sends the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from corun.receipt import Receipt
from corun.rpc import codec

_REQUEST_ID, _SAMPLE_INDEX, _SEED = b"\x0a", b"\x10", b"\x18"
_TEXT, _TOKEN_IDS, _LOGPROBS, _FINISH_REASON = b"\x22", b"\x2a", b"\x32", b"\x38"
_RECEIPT, _PROMPT_TOKEN_IDS, _FINGERPRINT, _TOKEN_TEXT, _CALL_NUMBER = b"\x42", b"\x4a", b"\x52", b"\x5a", b"\x60"
"""The tags of the fields: a field's number and wire type in one byte, since all numbers are below 16."""
_STREAM_ID, _RESPONSE, _ENDED = b"\x0a", b"\x12", b"\x1a"
"""The tags of the fields of a StreamOutputsResponse."""
_ONE_LOGPROB = struct.Struct("<cBf")
_BYTES = tuple(bytes((value,)) for value in range(256))


class ResponseEncoder:
    """Encodes the responses of one sample."""

    __slots__ = ("_head", "_tail")

    def __init__(self, request_id: str, sample_index: int, seed: int, call_number: int = 0) -> None:
        self._head = (
            _bytes(_REQUEST_ID, request_id.encode()) + _number(_SAMPLE_INDEX, sample_index) + _number(_SEED, seed)
        )
        self._tail = _number(_CALL_NUMBER, call_number)

    def encode(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[float] = (),
        receipt: Receipt | None = None,
        prompt_token_ids: Sequence[int] = (),
        fingerprint: str = "",
        token_texts: Sequence[str] = (),
    ) -> bytes:
        """Return the message with new output of the sample.

        logprobs: one fp32 value per token id, or none. token_texts: one text per token id, or none. receipt: only for
        the sample's last message.
        """
        parts = [self._head]
        if text:
            parts.append(_bytes(_TEXT, text.encode()))
        if len(token_ids) == 1:
            token_id = varint(token_ids[0])
            parts.append(_TOKEN_IDS + _BYTES[len(token_id)] + token_id)
        elif token_ids:
            parts.append(_bytes(_TOKEN_IDS, b"".join(map(varint, token_ids))))
        if len(logprobs) == 1:
            parts.append(_ONE_LOGPROB.pack(_LOGPROBS, 4, logprobs[0]))
        elif logprobs:
            parts.append(_bytes(_LOGPROBS, struct.pack(f"<{len(logprobs)}f", *logprobs)))
        if receipt is not None:
            parts.append(_number(_FINISH_REASON, codec.finish_reason_to_proto(receipt.finish_reason)))
            parts.append(_bytes(_RECEIPT, codec.receipt_to_proto(receipt).SerializeToString()))
        if prompt_token_ids:
            parts.append(_bytes(_PROMPT_TOKEN_IDS, b"".join(map(varint, prompt_token_ids))))
        if fingerprint:
            parts.append(_bytes(_FINGERPRINT, fingerprint.encode()))
        if token_texts:  # An empty text is sent, too, since each token has one.
            parts.extend(_bytes(_TOKEN_TEXT, text.encode()) or _TOKEN_TEXT + b"\0" for text in token_texts)
        parts.append(self._tail)
        return b"".join(parts)


def opening(stream_id: str) -> bytes:
    """Return a stream's first StreamOutputsResponse."""
    return _bytes(_STREAM_ID, stream_id.encode())


def together(responses: Iterable[bytes], ended: Iterable[int]) -> bytes:
    """Return the StreamOutputsResponse with these responses. ended: the numbers of the calls that end with them."""
    parts = [part for each in responses for part in (_RESPONSE, varint(len(each)), each)]
    parts.append(_bytes(_ENDED, b"".join(map(varint, ended))))
    return b"".join(parts)


def varint(value: int) -> bytes:
    """Encode a number of at least 0: 7 bits per byte, the lowest first."""
    if value < 0x80:
        return _BYTES[value]
    if value < 0x4000:
        return _BYTES[value & 0x7F | 0x80] + _BYTES[value >> 7]
    return _BYTES[value & 0x7F | 0x80] + varint(value >> 7)


def _number(tag: bytes, value: int) -> bytes:
    """Encode a scalar field. 0 is not sent."""
    return tag + varint(value) if value else b""


def _bytes(tag: bytes, data: bytes) -> bytes:
    """Encode a field of bytes with its length. An empty one is not sent."""
    return tag + varint(len(data)) + data if data else b""
