"""Limits: each refusal names field, value and limit; equal parameters are equal values."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError
from corun.params import (
    SamplingParams,
    check_lengths,
    check_request_id,
    check_seed,
    check_token_ids,
    check_vocabulary,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 1e-5, 0.009, 2.001, 1e6, NAN, INF, -INF, "1", None, True, 10**400]),
        ("top_p", [0, 1e-10, -0.1, 1.01, NAN, INF, False]),
        ("top_k", [-1, 1.0, 2**31, True, "5"]),
        ("min_p", [-0.01, 1.01, NAN]),
        ("max_tokens", [0, -1, 1.5, True, 2**32, None]),
        ("min_tokens", [-1, 17, True]),
        ("stop", [["x"] * 17, ["x"] * 1000, "", ["a", ""], "x" * 257, [1], 7, None, "\ud800", b"ab", {"a": 1}, {}]),
        ("stop_token_ids", [[-1], [2**32], [1.0], [True], range(65), "12", 3, {}, {1: 2}]),
        ("ignore_eos", [1, None, "yes"]),
        ("presence_penalty", [-2.01, 2.01, NAN]),
        ("frequency_penalty", [-2.01, 2.01, INF]),
        ("repetition_penalty", [0, 1e-40, 0.009, -1, 2.01, NAN]),
        ("logit_bias", [{1: 100.5}, {1: NAN}, {-1: 0}, {"1": 0}, dict.fromkeys(range(1025), 0), [(1, 2), (1, 3)], [1]]),
        ("logprobs", [0, 5, None]),
        ("n", [0, -1, 257, True, 1.0]),
        (
            "structured_outputs",
            [
                *(5, "json", {"wrong": 1}, {"json": "{}", "regex": "a"}, {"json": None}, ("json",), ("regex", 5)),
                *({"json": "{"}, {"json": 5}, {"json": "[]"}, {"json": {"a": NAN}}, {"json": "[" * 10**5}),
                *({"regex": ""}, {"regex": 5}, {"regex": "x" * 65_537}, {"grammar": "\ud800"}, {"json_object": False}),
                *({"choice": []}, {"choice": "ab"}, {"choice": {"a": 1}}, {"choice": [""]}, {"choice": ["x"] * 1025}),
                ("choice", "ab"),
            ],
        ),
    ],
)
def test_out_of_range(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.field.startswith(f"sampling_params.{name}")
        assert "must" in caught.value.limit


def test_edges_are_taken() -> None:
    edges: dict[str, list[Any]] = {
        "temperature": [0, 0.0, 0.01, 2, np.float32(0.5), Fraction(1, 2)],
        "top_p": [1e-9, 1],
        "top_k": [0, 1, 2**31 - 1, np.int64(4)],
        "min_p": [0, 1],
        "max_tokens": [1, 2**32 - 1],
        "min_tokens": [0, 16],
        "stop": [["x" * 256] * 16, "\0", ()],
        "stop_token_ids": [range(64), np.arange(3), [0, 2**32 - 1]],
        "presence_penalty": [-2, 2],
        "repetition_penalty": [0.01, 2],
        "logit_bias": [{}, {0: -100, 2**32 - 1: 100}, dict.fromkeys(range(1024), 0)],
        "n": [1, 256],
    }
    for name, values in edges.items():
        for value in values:
            SamplingParams(**{name: value})


def test_a_refusal_reads_well() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^sampling_params\.top_p = 1\.5: must be in \[1e-09, 1\]$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(InvalidArgumentError, match=r"^sampling_params\.stop = 1000 strings: must be at most 16$"):
        SamplingParams(stop=["x"] * 1000)
    with pytest.raises(
        InvalidArgumentError, match=r"^sampling_params\.max_tokens = 4294967296: must be in \[1, 4294967296\)$"
    ):
        SamplingParams(max_tokens=2**32)


def test_normal_forms() -> None:
    a = SamplingParams(stop="end", stop_token_ids=[3, np.int64(4)], logit_bias={7: 0.1, 2: -1}, temperature=-0.0)
    b = SamplingParams(stop=["end"], stop_token_ids=(3, 4), logit_bias=[(2, -1.0), (7, 0.1)], temperature=0)
    assert a == b
    assert hash(a) == hash(b)
    assert a.digest() == b.digest()
    assert (a.stop, a.stop_token_ids) == (("end",), (3, 4))
    assert a.logit_bias == ((2, -1.0), (7, struct.unpack("<f", struct.pack("<f", 0.1))[0]))
    assert math.copysign(1, a.temperature) == 1
    assert SamplingParams(logit_bias={1: -1e-99}).digest() == SamplingParams(logit_bias={1: 0}).digest()
    assert a.greedy
    assert {type(t) for t in a.stop_token_ids} == {int}


def test_digest_is_pinned() -> None:
    """Receipts hold it: it may change with the protocol's version only."""
    assert SamplingParams().digest() == "78b34a800814eb3c1cff3dd9e2ffa211124188833d9998670dd3debce00ded60"
    params = SamplingParams(temperature=0.6, stop=["é\n"], stop_token_ids=[5], logit_bias={9: 1.5}, ignore_eos=True)
    assert params.digest() == "ed7354c67293210ec57fcf0038bff9a6ef36755406a4c5ab2d9fcc68a0c6e495"


def test_digests_keep_no_long_parameters_in_memory() -> None:
    grammar, bias = "a" * 60_000, dict.fromkeys(range(1024), 1.0)
    tracemalloc.start()
    for i in range(32):
        SamplingParams(structured_outputs={"regex": f"{grammar}{i}"}).digest()
        SamplingParams(logit_bias=bias | {i: 0.5}).digest()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000


def test_digest_covers_what_can_change_the_output() -> None:
    others: dict[str, Any] = dict.fromkeys(SamplingParams.__dataclass_fields__, 0.5)
    others |= dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n"), 5)
    others |= {"stop": "x", "stop_token_ids": (5,), "ignore_eos": True, "logprobs": True, "logit_bias": {5: 0.5}}
    others |= {"structured_outputs": {"regex": "a"}}
    del others["top_logprobs"]  # It needs `logprobs`.
    digests = {name: SamplingParams(**{name: value}).digest() for name, value in others.items()}
    assert digests.pop("n") == digests.pop("logprobs") == SamplingParams().digest()
    assert SamplingParams(logprobs=True, top_logprobs=5).digest() == SamplingParams().digest()
    assert len({*digests.values(), SamplingParams().digest()}) == len(digests) + 1
    before = "78b34a800814eb3c1cff3dd9e2ffa211124188833d9998670dd3debce00ded60"
    assert SamplingParams().digest() == before  # As it was when outputs could not be constrained.


def test_a_constraint_is_held_as_its_kind_and_its_text() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    text = '{"type":"object","properties":{"b":{"type":"string"},"a":{}}}'
    assert SamplingParams(structured_outputs={"json": schema}).constraint == ("json", text)
    assert SamplingParams(structured_outputs={"json_object": True}).constraint == ("json", '{"type":"object"}')
    choice = SamplingParams(structured_outputs={"choice": ["yes", "no"]})
    assert choice.constraint == ("choice", '["yes", "no"]')
    assert replace(choice, n=2).constraint == choice.constraint
    assert SamplingParams(structured_outputs={}).constraint is None


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_constraint_alone_says_where_an_output_ends(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="structured_outputs") as caught:
        SamplingParams(structured_outputs={"regex": "a"}, **other)
    assert caught.value.field == f"sampling_params.{next(iter(other))}"


def test_token_ids() -> None:
    assert check_token_ids([0, 9], 10) == (0, 9)
    assert check_token_ids(np.array([0, 9]), 10) == (0, 9)
    bad: list[tuple[Any, str]] = [
        ([], "prompt.token_ids"),
        ([1, 10], "prompt.token_ids[1]"),
        ([-1], "prompt.token_ids[0]"),
        ([1, True], "prompt.token_ids[1]"),
        ([1.0], "prompt.token_ids[0]"),
        (["1"], "prompt.token_ids[0]"),
        ("12", "prompt.token_ids"),
        (b"12", "prompt.token_ids"),
        (5, "prompt.token_ids"),
        (None, "prompt.token_ids"),
    ]
    for ids, field in bad:
        with pytest.raises(InvalidArgumentError) as caught:
            check_token_ids(ids, 10)
        assert caught.value.field == field
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\] = -1: must be a token id of the vocabulary"):
        check_token_ids([0, -1], None)


def test_vocabulary() -> None:
    check_vocabulary(SamplingParams(stop_token_ids=[9], logit_bias={9: 1}), 10)
    with pytest.raises(InvalidArgumentError, match=r"stop_token_ids\[1\] = 10: must be in \[0, 10\)"):
        check_vocabulary(SamplingParams(stop_token_ids=[9, 10]), 10)
    with pytest.raises(InvalidArgumentError, match=r"logit_bias = 10: must be in \[0, 10\)"):
        check_vocabulary(SamplingParams(logit_bias={10: 1}), 10)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 60))
def test_lengths(num_prompt: int, max_tokens: int, max_model_len: int) -> None:
    if num_prompt + max_tokens <= max_model_len:
        check_lengths(num_prompt, max_tokens, max_model_len)
        return
    with pytest.raises(InvalidArgumentError) as caught:
        check_lengths(num_prompt, max_tokens, max_model_len)
    fits = num_prompt < max_model_len
    assert caught.value.field == ("sampling_params.max_tokens" if fits else "prompt.token_ids")
    assert str(max_model_len) in caught.value.limit or not fits


def test_seed_and_request_id() -> None:
    assert [check_seed(seed) for seed in (0, 2**63 - 1)] == [0, 2**63 - 1]
    for seed in (-1, 2**63, 1.0, "1", True, None):
        with pytest.raises(InvalidArgumentError, match=r"^seed = .*: must be (in \[0, 2\^63\)|an integer)$"):
            check_seed(seed)  # type: ignore[arg-type]
    assert check_request_id("") == ""
    check_request_id("x" * 128)
    for request_id in ("x" * 129, "\udc00", 5):
        with pytest.raises(InvalidArgumentError):
            check_request_id(request_id)  # type: ignore[arg-type]
