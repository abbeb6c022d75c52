"""Workloads: what a spec may say, and that the requests are a pure function of spec and seed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from corun.errors import InvalidArgumentError
from corun_bench.driver import Workload
from corun_bench.workloads import PAPER, expand, fit, gamma, make, parse

LIMITS: dict[str, Any] = {"num_requests": 20, "vocab_size": 1000, "max_model_len": 4096, "seed": 5}


def tokenize(text: str) -> list[int]:
    """A token for each word."""
    return [len(word) for word in text.split()]


def made(text: str, **changes: Any) -> Workload:
    return make(parse(text), tokenize=tokenize, **{**LIMITS, **changes})


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.max_tokens) for request in workload.requests]


def test_a_spec_is_read_in_full() -> None:
    spec = parse(" rl = 32x8, in=512 ,out=256")
    assert (spec.kind, spec.prompts, spec.samples, spec.input_len, spec.output_len) == ("synthetic", 32, 8, 512, 256)
    assert spec.name == "rl=32x8,in=512,out=256"
    trace = parse("burstgpt=some/where//trace.csv,model=GPT-4")
    assert (trace.path, trace.model) == (Path("some/where/trace.csv"), "GPT-4")
    assert trace.name == "burstgpt=trace.csv,model=GPT-4"
    assert parse("blazedit").path is None
    assert (parse("in=5,out=6,rate=2.5").rate, parse("in=5,out=6").rate) == (2.5, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be KEY=VALUE"),
        ("in=5", "must be in=TOKENS,out=TOKENS"),
        ("rl=4x4", "must be in=TOKENS,out=TOKENS"),
        ("in=abc", "each with ,rl=PROMPTSxSAMPLES if wanted; or paper"),
        ("in=0,out=5", "in = '0': must be a number in"),
        ("in=5,out=9999999", "out = '9999999': must be a number in"),
        ("in=5,out=٣", "out = "),
        ("in=5,in=6,out=7", "names 'in' twice"),
        ("in=5,out=6,model=x", "'model' is no part of a synthetic workload"),
        ("in=,out=6", "must be KEY=VALUE"),
        ("paper,in=5,out=6", "must be KEY=VALUE"),
        ("rl=4,in=5,out=6", "rl = '4': must be PROMPTSxSAMPLES"),
        ("rl=0x4,in=5,out=6", "rl = '0x4'"),
        ("in=5,out=6,rate=0", "rate = '0': must be a number of requests a second"),
        ("in=5,out=6,rate=inf", "rate = 'inf'"),
        ("in=5,out=6,rate=x", "rate = 'x'"),
        ("burstgpt,in=5", "'in' is no part of a burstgpt workload"),
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


@pytest.mark.parametrize("text", ["in=10,out=7", "rl=3x4,in=5,out=6", "burstgpt", "sharegpt", "blazedit"])
def test_a_workload_is_a_function_of_spec_and_seed(text: str) -> None:
    assert made(text) == made(text)
    assert made(text, seed=6) != made(text)


def test_the_requests_of_a_seed_do_not_change() -> None:
    """Recorded results name a seed: these numbers are part of what it means."""
    first = made("rl=1x2,in=4,out=2", vocab_size=151_936).requests
    assert [(request.prompt_token_ids, request.seed) for request in first] == PINNED
    samples = made("burstgpt", num_requests=310, max_model_len=32_768), made("sharegpt"), made("blazedit")
    sent = [
        [(r.prompt_token_ids, r.max_tokens, r.seed, r.arrival_s) for r in workload.requests] for workload in samples
    ]
    assert hashlib.sha256(repr(sent).encode()).hexdigest()[:16] == "c067fd48cdb3a57e"
    few, many = made("in=10,out=7", num_requests=5), made("in=10,out=7", num_requests=50)
    assert many.requests[:5] == few.requests, "more requests begin with the same ones"
    assert made("in=10,out=8").requests[0].prompt_token_ids != few.requests[0].prompt_token_ids
    assert [round(at, 6) for at in gamma(3, request_rate=1, seed=1)] == [1.188603, 2.957126, 3.0]


def test_a_rollout_has_its_samples_side_by_side() -> None:
    workload = made("rl=3x4,in=5,out=6", num_requests=999)
    assert [request.index for request in workload.requests] == list(range(12))
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert [prompts.index(prompt) for prompt in prompts] == [0] * 4 + [4] * 4 + [8] * 4
    seeds = [request.seed for request in workload.requests]
    assert len(set(seeds)) == 12
    assert all(abs(a - b) > 1000 for i, a in enumerate(seeds) for b in seeds[:i]), "seeds are hashed, not counted"


def test_burstgpt_gives_lengths_of_its_rows_without_repeating_one() -> None:
    found = lengths(made("burstgpt", num_requests=300, max_model_len=32_768))
    assert max(found)[0] > 8192
    few = lengths(made("burstgpt", num_requests=30, max_model_len=32_768))
    assert found[:30] == few


def test_an_open_loop_has_arrivals_at_its_rate() -> None:
    workload = made("in=10,out=7", request_rate=2.0, burstiness=0.5)
    assert workload.is_open
    assert workload.requests[-1].arrival_s == pytest.approx(10.0)
    own = made("in=10,out=7,rate=4", request_rate=2.0)
    assert (own.request_rate, own.requests[-1].arrival_s) == (4.0, pytest.approx(5.0)), "its own rate goes first"
    closed = made("in=10,out=7")
    assert {request.arrival_s for request in closed.requests} == {0.0}
    assert [replace(request, arrival_s=0.0) for request in workload.requests] == list(closed.requests)


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
    requests = made("blazedit", max_model_len=32_768).requests
    assert {request.max_tokens for request in requests} == {4000}
    prompts = [request.prompt_token_ids for request in requests]
    assert len({prompt[:3] for prompt in prompts[8:16]} & {prompt[:3] for prompt in prompts[:8]}) == 0
    assert {request.max_tokens for request in made("blazedit,out=9").requests} == {9}
    assert {request.max_tokens for request in made("sharegpt,out=2").requests} == {2}


def test_text_needs_the_tokenizer_of_the_model() -> None:
    with pytest.raises(InvalidArgumentError, match="tokenize = 1000: must be below the vocabulary's 1000"):
        make(parse("sharegpt"), tokenize=lambda _: [1000], **LIMITS)


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


def test_what_had_to_be_changed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    whole = made("burstgpt", num_requests=300, max_model_len=65_536)
    cut = made("burstgpt", num_requests=310, max_model_len=2048)
    assert all(a + b <= 2048 and b >= 1 for a, b in lengths(cut))
    changed = sum(a + b > 2048 for a, b in lengths(made("burstgpt", num_requests=310, max_model_len=65_536)))
    assert len(whole.requests) == 300
    made("rl=3x4,in=5,out=6", max_model_len=8)
    assert made("in=5,out=6", max_model_len=2).requests[0].max_tokens == 1
    made("sharegpt")  # Two have no pair; "Hi" is shorter than 4 tokens.
    made("blazedit", max_model_len=32_768)
    assert [record.getMessage().removeprefix("workload ") for record in caplog.records] == [
        "burstgpt: 6 records left out",
        f"burstgpt: {changed} requests cut to 2048 tokens",
        "burstgpt: 6 records left out",
        "burstgpt: 10 prompts used again",
        "burstgpt: 6 records left out",
        "burstgpt: 10 prompts used again",
        "rl=3x4,in=5,out=6: 12 requests cut to 8 tokens",
        "in=5,out=6: 20 requests cut to 2 tokens",
        "sharegpt: 3 records left out",
        "sharegpt: 11 prompts used again",
        "blazedit: 12 prompts used again",
    ]


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0, math.inf])
def test_arrivals_have_vllms_rates_and_shapes(burstiness: float) -> None:
    """The deviation of gamma gaps over their mean is burstiness ** -0.5; the last of n is sent at n over the rate."""
    times = gamma(20_000, request_rate=12.5, burstiness=burstiness, seed=3)
    assert times == sorted(times)
    assert (len(times), times[-1]) == (20_000, pytest.approx(1600.0))
    assert pstdev(gaps(times)) / fmean(gaps(times)) == pytest.approx(burstiness**-0.5, rel=0.05, abs=1e-6)


def test_gaps_that_all_round_to_0_stay_0() -> None:
    assert gamma(3, request_rate=1, burstiness=1e-300, seed=1) == [0.0, 0.0, 0.0]


PINNED = [
    ((21523, 102289, 19454, 79063), 2110752764784141681),
    ((21523, 102289, 19454, 79063), 4820621900793852402),
]
