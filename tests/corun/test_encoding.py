"""The router's own encoder against the protobuf library's."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import pytest

from corun.receipt import Receipt
from corun.rpc import codec
from corun.rpc.encode import ResponseEncoder, varint
from corun.types import FinishReason, NodeRef
from corun.v1 import cluster_service_pb2 as pb

RECEIPT = Receipt(
    fingerprint="f" * 64,
    request_id="r",
    sample_index=3,
    seed=2**63 - 1,
    prompt_digest="p" * 64,
    params_digest="a" * 64,
    output_digest="o" * 64,
    num_prompt_tokens=2,
    num_output_tokens=300,
    finish_reason=FinishReason.STOP,
    prefill_node=NodeRef(node_id="p1", generation="1" * 16),
    decode_node=NodeRef(node_id="d1", generation="2" * 16),
    tokens_digest="t" * 64,
)
DENORMAL = struct.unpack("<f", struct.pack("<I", 1))[0]
CASES: dict[str, dict[str, Any]] = {
    "nothing": {"text": "", "token_ids": []},
    "a token": {"text": " word", "token_ids": [300], "logprobs": [-1.5]},
    "a token alone": {"text": "", "token_ids": [0]},
    "many tokens": {"text": "ab", "token_ids": [0, 127, 128, 16383, 16384, 151_935, 2**32 - 1], "logprobs": [-0.0] * 7},
    "odd floats": {"text": "", "token_ids": [1] * 4, "logprobs": [float("-inf"), float("inf"), DENORMAL, -DENORMAL]},
    "long text": {"text": "ä€🦀\0" * 5000, "token_ids": [5], "logprobs": [0.0]},
    "the end": {"text": "", "token_ids": [], "receipt": RECEIPT},
    "the end at its length": {
        "text": "",
        "token_ids": [],
        "receipt": replace(RECEIPT, finish_reason=FinishReason.LENGTH),
    },
    "first": {"text": "a", "token_ids": [7], "prompt_token_ids": list(range(500)), "fingerprint": "f" * 64},
    "texts of tokens": {
        "text": "ab",
        "token_ids": [0, 127, 300],
        "logprobs": [-1.5] * 3,
        "token_texts": ["", "ä€🦀" * 50, "b"],
        "fingerprint": "f",
    },
    "a text of nothing": {"text": "", "token_ids": [5], "token_texts": [""]},
    "first and last": {"text": "a", "token_ids": [7], "receipt": RECEIPT, "prompt_token_ids": [0], "fingerprint": "f"},
}
HEADS = [("r", 0, 0), ("ä" * 64, 1, 1), ("r" * 128, 2**32 - 1, 2**63 - 1)]


def protobuf(head: tuple[str, int, int], **fields: Any) -> pb.GenerateResponse:
    receipt = fields.pop("receipt", None)
    return pb.GenerateResponse(
        request_id=head[0],
        sample_index=head[1],
        seed=head[2],
        finish_reason=codec.finish_reason_to_proto(receipt.finish_reason if receipt else None),
        receipt=codec.receipt_to_proto(receipt) if receipt else None,
        **fields,
    )


@pytest.mark.parametrize("name", CASES)
def test_messages_are_those_of_the_protobuf_library(name: str) -> None:
    for head in HEADS:
        encoded = ResponseEncoder(*head).encode(**CASES[name])
        expected = protobuf(head, **CASES[name])
        assert pb.GenerateResponse.FromString(encoded) == expected
        assert encoded == expected.SerializeToString(deterministic=True)


def test_random_messages_are_too() -> None:
    draw = random.Random(5)
    for _ in range(300):
        count = draw.choice((0, 1, 1, 1, 2, 40, 200))
        fields = {
            "text": "".join(chr(draw.choice((65, 0xE9, 0x20AC, 0x1F980))) for _ in range(draw.randrange(50))),
            "token_ids": [draw.getrandbits(draw.randrange(1, 33)) for _ in range(count)],
            "logprobs": [struct.unpack("<f", struct.pack("<f", -draw.expovariate(1)))[0] for _ in range(count)],
            "token_texts": ["é" * draw.randrange(100) for _ in range(count)] if draw.random() < 0.5 else [],
        }
        head = ("request", draw.getrandbits(31), draw.getrandbits(63))
        assert ResponseEncoder(*head).encode(**fields) == protobuf(head, **fields).SerializeToString()


def test_every_field_of_the_message_is_known_to_the_encoder() -> None:
    """Whoever adds a field to the message has to add it to the encoder and to the cases."""
    known = {name for case in CASES.values() for name in case} | {"request_id", "sample_index", "seed", "finish_reason"}
    assert {field.name for field in pb.GenerateResponse.DESCRIPTOR.fields} == known


def test_varints_of_every_length() -> None:
    for value in (2**bits - less for bits in range(64) for less in (0, 1)):
        assert pb.GenerateResponse.FromString(b"\x18" + varint(value)).seed == value
