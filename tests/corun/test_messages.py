"""Fields of a message, counted before it is parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.rpc.interceptor import has_more_fields
from corun.v1 import cluster_service_pb2 as pb


@pytest.mark.parametrize(("cases", "most"), [(100, 99), (100, 100), (101, 100), (0, 0)])
def test_entries_of_a_repeated_message_are_fields(cases: int, most: int) -> None:
    data = pb.VerifyRequest(cases=[pb.VerifyCase()] * cases).SerializeToString()
    assert has_more_fields(data, most) is (cases > most)


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 2**63 - 1), st.text(max_size=300), st.integers(0, 45))
def test_every_kind_of_field_is_stepped_over(cases: int, prompt: int, seed: int, text: str, most: int) -> None:
    case = pb.VerifyCase(prompt_token_ids=[300] * prompt, seed=seed, output_digest=text)
    request = pb.VerifyRequest(cases=[case] * cases, conditions=[1, 2], order_seed=seed)
    fields = cases + 1 + (seed > 0)  # Numbers are packed into one field.
    assert has_more_fields(request.SerializeToString(), most) is (fields > most)


def test_unknown_groups_hide_nothing() -> None:
    hidden = b"\xfb\x07" + b"\x0a\x00" * 50 + b"\xfc\x07"
    assert has_more_fields(hidden, 40)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes, most: int) -> None:
    assert has_more_fields(data, most) in (True, False)
