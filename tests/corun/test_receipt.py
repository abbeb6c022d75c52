"""Digests are over exact bits, and receipts survive JSON."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError
from corun.receipt import (
    OutputDigest,
    Receipt,
    alternatives_digest,
    certificates_digest,
    output_digest,
    prompt_digest,
    records_digest,
    records_tokens_digest,
    text_digest,
    tokens_digest,
)
from corun.types import Alternatives, FinishReason, NodeRef

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(width=32, max_value=0, allow_nan=False)

RECEIPT = Receipt(
    fingerprint="f" * 64,
    request_id="r",
    sample_index=1,
    seed=2**63 - 1,
    prompt_digest="a" * 64,
    params_digest="b" * 64,
    output_digest="c" * 64,
    num_prompt_tokens=3,
    num_output_tokens=4,
    finish_reason=FinishReason.STOP,
    prefill_node=NodeRef(node_id="p", generation="0" * 16),
    decode_node=NodeRef(node_id="d", generation="1" * 16),
    tokens_digest="d" * 64,
    cached_tokens=32,
    certificates="e" * 64,
)


def test_digests_are_what_anybody_would_compute() -> None:
    assert prompt_digest([1, 2]) == hashlib.sha256(b"corun.v1.prompt\0" + struct.pack("<II", 1, 2)).hexdigest()
    expected = hashlib.sha256(b"corun.v1.output\0" + struct.pack("<IfIf", 1, -0.5, 2, -1.25)).hexdigest()
    assert output_digest([1, 2], [-0.5, -1.25]) == expected
    assert expected == "8929df15b504950e0f187b66a35e91a2e0764e16981e58b567912bd22041a81e"
    assert tokens_digest([1, 2]) == hashlib.sha256(b"corun.v1.tokens\0" + struct.pack("<II", 1, 2)).hexdigest()
    tops = Alternatives((1, 2), (-0.5, -1.5), ("ä", ""))
    packed = struct.pack("<IIfI", 2, 1, -0.5, 2) + "ä".encode() + struct.pack("<IfI", 2, -1.5, 0)
    assert alternatives_digest([tops]) == hashlib.sha256(b"corun.v1.alternatives\0" + packed).hexdigest()
    assert alternatives_digest([]) == ""
    assert text_digest("ä") == hashlib.sha256(b"corun.v1.text\0" + "ä".encode()).hexdigest()


@given(st.lists(st.tuples(IDS, LOGPROBS), max_size=20))
def test_incremental_equals_whole(rows: list[tuple[int, float]]) -> None:
    digest = OutputDigest()
    for i, (token_id, logprob) in enumerate(rows):
        assert digest.num_tokens == i
        digest.update(token_id, logprob)
        digest.hexdigest()
    assert digest.tokens_hexdigest() == tokens_digest(token_id for token_id, _ in rows)
    assert digest.hexdigest() == output_digest([t for t, _ in rows], [p for _, p in rows])
    records = bytearray(b"".join(struct.pack("<If", *row) for row in rows))
    assert records_tokens_digest(records) == records_tokens_digest(bytes(records)) == digest.tokens_hexdigest()
    assert records_digest(records) == digest.hexdigest()
    records += b"more"  # Nothing holds them any longer.


def test_the_certificates_digest_is_of_both_nodes_in_their_order() -> None:
    assert certificates_digest("a", "b") == hashlib.sha256(b"corun.v1.certificates\0a b").hexdigest()
    assert len({certificates_digest(*pair) for pair in (("a", "b"), ("b", "a"), ("a", ""), ("", "a"))}) == 4
    assert certificates_digest("", "") == ""


def test_columns_must_be_equally_long() -> None:
    with pytest.raises(InvalidArgumentError, match="logprobs = 1: must be one per token, 2"):
        output_digest([1, 2], [-0.5])


def test_json_round_trip() -> None:
    assert Receipt.from_dict(json.loads(json.dumps(RECEIPT.to_dict()))) == RECEIPT


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": "1"}, "receipt.seed"),
        ({"seed": True}, "receipt.seed"),
        ({"fingerprint": 5}, "receipt.fingerprint"),
        ({"tokens_digest": None}, "receipt.tokens_digest"),
        ({"finish_reason": "tired"}, "receipt.finish_reason"),
        ({"finish_reason": None}, "receipt.finish_reason"),
        ({"finish_reason": []}, "receipt.finish_reason"),
        ({"prefill_node": "p"}, "receipt.prefill_node"),
        ({"prefill_node": {"node_id": "p"}}, "receipt.prefill_node.generation"),
        ({"decode_node": {"node_id": "p", "generation": 1}}, "receipt.decode_node.generation"),
        ({"more": 1}, "receipt.more"),
    ],
)
def test_bad_receipts(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Receipt.from_dict({**RECEIPT.to_dict(), **change})
    assert caught.value.field == field


def test_what_is_missing_and_what_is_no_receipt() -> None:
    values = RECEIPT.to_dict()
    del values["seed"]
    with pytest.raises(InvalidArgumentError, match=r"^receipt\.seed = None: must be set$"):
        Receipt.from_dict(values)
    with pytest.raises(InvalidArgumentError, match="must be an object"):
        Receipt.from_dict([])  # type: ignore[arg-type]
