"""Workloads: what a spec may say, and that the requests are a pure function of spec and seed."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InvalidArgumentError
from corun_bench.records import Workload
from corun_bench.workloads import PAPER, Prepared, expand, make, parse, prepare
from corun_bench.workloads.requests import fit

LIMITS: dict[str, Any] = {"num_requests": 20, "vocab_size": 1000, "max_model_len": 4096, "seed": 5}


def tokenize(text: str) -> list[int]:
    """A token for each word."""
    return [len(word) for word in text.split()]


def made(text: str, **changes: Any) -> Workload:
    return make(parse(text), tokenize=tokenize, **{**LIMITS, **changes})


def prepared(text: str, **changes: Any) -> Prepared:
    return prepare(parse(text), tokenize=tokenize, **{**LIMITS, **changes})


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.max_tokens) for request in workload.requests]


def test_a_spec_is_read_in_full() -> None:
    spec = parse(" rl = 32x8, in=512 ,out=256")
    assert (spec.kind, spec.prompts, spec.samples, spec.input_len, spec.output_len) == ("synthetic", 32, 8, 512, 256)
    assert spec.name == "rl=32x8,in=512,out=256"
    trace = parse("burstgpt=some/where//trace.csv,model=GPT-4,arrivals=trace")
    assert (trace.path, trace.model, trace.arrivals) == (Path("some/where/trace.csv"), "GPT-4", "trace")
    assert trace.name == "burstgpt=trace.csv,model=GPT-4,arrivals=trace"
    assert parse("blazedit").path is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be KEY=VALUE"),
        ("in=5", "must be in=TOKENS,out=TOKENS"),
        ("rl=4x4", "must be in=TOKENS,out=TOKENS"),
        ("in=0,out=5", "in = '0': must be a number in"),
        ("in=5,out=9999999", "out = '9999999': must be a number in"),
        ("in=5,out=٣", "out = "),
        ("in=5,in=6,out=7", "names 'in' twice"),
        ("in=5,out=6,model=x", "'model' is no part of a synthetic workload"),
        ("in=,out=6", "must be KEY=VALUE"),
        ("paper,in=5,out=6", "must be KEY=VALUE"),
        ("rl=4,in=5,out=6", "rl = '4': must be PROMPTSxSAMPLES"),
        ("rl=0x4,in=5,out=6", "rl = '0x4'"),
        ("burstgpt,in=5", "'in' is no part of a burstgpt workload"),
        ("burstgpt,arrivals=soon", "arrivals = 'soon': must be gamma or trace"),
        ("burstgpt,arrivals=trace,rl=2x2", "no trace to follow"),
        ("burstgpt,sharegpt", "more than one data set: burstgpt, sharegpt"),
        ("synthetic", "must be in=TOKENS,out=TOKENS"),
        ("bustgpt", "must be KEY=VALUE"),
    ],
)
def test_a_wrong_spec_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse(text)
    assert message in str(raised.value)


def test_paper_is_six_workloads_and_each_is_there_once() -> None:
    assert [spec.name for spec in expand(["paper"])] == list(PAPER)
    names = [spec.name for spec in expand(["burstgpt", "paper", "in=1,out=2", "in=1, out=2"])]
    assert names == ["burstgpt", *[name for name in PAPER if name != "burstgpt"], "in=1,out=2"]
    with pytest.raises(InvalidArgumentError, match="two files"):
        expand(["burstgpt=a/x.csv", "burstgpt=b/x.csv"])
    with pytest.raises(InvalidArgumentError, match="at least one"):
        expand([])


def test_synthetic_requests_have_fixed_lengths_and_random_tokens() -> None:
    workload = made("in=100,out=7")
    assert lengths(workload) == [(100, 7)] * 20
    tokens = [token for request in workload.requests for token in request.prompt_token_ids]
    assert min(tokens) >= 3
    assert max(tokens) < 1000
    assert len(set(tokens)) > 800
    assert len({request.prompt_token_ids for request in workload.requests}) == 20
    assert (workload.name, workload.is_open, workload.max_concurrency) == ("in=100,out=7", False, 256)


def test_a_workload_is_a_function_of_spec_and_seed() -> None:
    for text in ("in=10,out=7", "rl=3x4,in=5,out=6", "burstgpt", "sharegpt", "blazedit"):
        assert made(text) == made(text)
        assert made(text, seed=6) != made(text)
    again, other = made("in=10,out=7"), made("in=10,out=8")
    assert again.requests[0].prompt_token_ids != other.requests[0].prompt_token_ids


def test_the_requests_of_a_seed_do_not_change() -> None:
    """Recorded results name a seed: these numbers are part of what it means."""
    first = made("rl=1x2,in=4,out=2", vocab_size=151_936).requests
    assert [(request.prompt_token_ids, request.seed) for request in first] == PINNED


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = made("in=10,out=7", num_requests=5), made("in=10,out=7", num_requests=50)
    assert many.requests[:5] == few.requests


def test_a_rollout_has_its_samples_side_by_side() -> None:
    workload = made("rl=3x4,in=5,out=6", num_requests=999)
    assert [request.index for request in workload.requests] == list(range(12))
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert [prompts.index(prompt) for prompt in prompts] == [0] * 4 + [4] * 4 + [8] * 4
    seeds = [request.seed for request in workload.requests]
    assert len(set(seeds)) == 12
    assert all(abs(a - b) > 1000 for i, a in enumerate(seeds) for b in seeds[:i]), "seeds are hashed, not counted"


def test_burstgpt_gives_lengths_of_its_rows_without_repeating_one() -> None:
    result = prepared("burstgpt", num_requests=300, max_model_len=32_768)
    assert (result.clipped, result.left_out, result.repeated) == (0, 6, 0)
    found = lengths(result.workload)
    assert max(found)[0] > 8192
    assert prepared("burstgpt", num_requests=310).repeated == 10
    few = lengths(made("burstgpt", num_requests=30, max_model_len=32_768))
    assert found[:30] == few
    assert set(few) <= set(found)


def test_a_trace_gives_its_own_arrivals() -> None:
    workload = made("burstgpt,arrivals=trace", num_requests=100, request_rate=4.0)
    times = [request.arrival_s for request in workload.requests]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, pytest.approx(25.0))
    with pytest.raises(InvalidArgumentError, match="request_rate"):
        made("burstgpt,arrivals=trace")
    with pytest.raises(InvalidArgumentError, match="as many usable rows as requests, 301, and has 300"):
        made("burstgpt,arrivals=trace", num_requests=301, request_rate=4.0)


def test_an_open_loop_has_arrivals_at_its_rate() -> None:
    workload = made("in=10,out=7", request_rate=2.0, burstiness=0.5, max_concurrency=0)
    assert workload.is_open
    assert workload.requests[-1].arrival_s == pytest.approx(10.0)
    closed = made("in=10,out=7")
    assert {request.arrival_s for request in closed.requests} == {0.0}
    assert [replace(request, arrival_s=0.0) for request in workload.requests] == list(closed.requests)


def test_sharegpt_leaves_out_what_vllm_leaves_out() -> None:
    result = prepared("sharegpt")
    assert result.workload.requests[0].max_tokens >= 4
    # Two without a pair; "Hi" and "First of two." are shorter than 4 tokens, or have no answer.
    assert result.left_out == 3
    assert result.repeated == 20 - 9
    fixed = made("sharegpt,out=2")
    assert {request.max_tokens for request in fixed.requests} == {2}


@pytest.mark.parametrize(("words", "is_used"), [(3, False), (4, True), (1024, True), (1025, False)])
def test_the_limits_on_sharegpt_are_those_of_vllm(tmp_path: Path, words: int, is_used: bool) -> None:
    path = tmp_path / "talks.json"
    said = '{"from": "human", "value": "' + "w " * words + '"}, {"from": "gpt", "value": "one two three four"}'
    path.write_text('[{"conversations": [' + said + "]}]")
    if is_used:
        assert lengths(made(f"sharegpt={path}", num_requests=1)) == [(words, 4)]
    else:
        with pytest.raises(InvalidArgumentError, match="no usable record"):
            made(f"sharegpt={path}", num_requests=1)


def test_blazedit_asks_for_the_whole_file_and_never_twice_with_the_same_words() -> None:
    result = prepared("blazedit", max_model_len=32_768)
    assert {request.max_tokens for request in result.workload.requests} == {4000}
    assert result.repeated == 12
    prompts = [request.prompt_token_ids for request in result.workload.requests]
    assert len({prompt[:3] for prompt in prompts[8:16]} & {prompt[:3] for prompt in prompts[:8]}) == 0
    assert {request.max_tokens for request in made("blazedit,out=9").requests} == {9}


@pytest.mark.parametrize("text", ["sharegpt", "blazedit"])
def test_text_needs_a_tokenizer_of_the_model(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        make(parse(text), **LIMITS)
    with pytest.raises(InvalidArgumentError, match="vocabulary"):
        make(parse(text), tokenize=lambda _: [1000], **LIMITS)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((60, 40), (60, 40)),
        ((80, 40), (60, 40)),  # Only the prompt has more than a half.
        ((40, 80), (40, 60)),
        ((500, 900), (50, 50)),
        ((500, 1), (99, 1)),
        ((1, 500), (1, 99)),
        ((50, 51), (50, 50)),
    ],
)
def test_what_does_not_fit_is_cut_by_one_rule(asked: tuple[int, int], given: tuple[int, int]) -> None:
    assert fit(*asked, 100) == given


def test_cut_requests_fit_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    result = prepared("burstgpt", num_requests=300, max_model_len=2048)
    whole = prepared("burstgpt", num_requests=300, max_model_len=65_536)
    assert all(a + b <= 2048 and b >= 1 for a, b in lengths(result.workload))
    changed = sum(a != b for a, b in zip(lengths(result.workload), lengths(whole.workload), strict=True))
    assert result.clipped == changed > 10
    assert whole.clipped == 0
    assert prepared("rl=3x4,in=5,out=6", max_model_len=8).clipped == 12
    assert made("in=5,out=6", max_model_len=2).requests[0].max_tokens == 1
    with caplog.at_level(logging.WARNING):
        made("burstgpt", num_requests=310, max_model_len=2048)
    assert [record.getMessage() for record in caplog.records] == [
        "workload in=5,out=6: 20 requests cut to 2 tokens",
        f"workload burstgpt: {changed} requests cut to 2048 tokens",
        "workload burstgpt: 6 records left out",
        "workload burstgpt: 10 prompts used again",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_requests", 0),
        ("vocab_size", 3),
        ("max_model_len", 1),
        ("seed", -1),
        ("max_concurrency", 0),
        ("request_rate", 0.0),
        ("request_rate", math.nan),
    ],
)
def test_a_value_outside_its_limit_is_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        made("in=5,out=6", **{field: value})
    assert raised.value.field == field


PINNED = [
    ((21523, 102289, 19454, 79063), 2110752764784141681),
    ((21523, 102289, 19454, 79063), 4820621900793852402),
]
