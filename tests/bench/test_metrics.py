"""Metrics: vLLM's definitions, checked by hand, and every run gives JSON without NaN."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from corun.errors import InvalidArgumentError
from corun_bench.driver import Outcome, Request, Run
from corun_bench.metrics import MAX_BINS, MIN_BINS, bin_width, fp32_bits, mismatches, parse_goodput, summarize

ONE_EACH = {"prefill": 1, "decode": 1, "total": 2}


def request(index: int, num_prompt_tokens: int) -> Request:
    return Request(index=index, prompt_token_ids=(3,) * num_prompt_tokens, max_tokens=1, seed=0)


def outcome(index: int, times: list[float], *, sent: float = 0.0, prompt: int = 10, **changes: Any) -> Outcome:
    """One token a message; the end is the last of them."""
    values: dict[str, Any] = {
        "arrivals": [(at, 1) for at in times],
        "token_ids": list(range(len(times))),
        "done_s": times[-1] if times else sent,
    }
    return Outcome(request=request(index, prompt), sent_s=sent, **{**values, **changes})


def run(*outcomes: Outcome, duration: float | None = None) -> Run:
    last = max((one.done_s for one in outcomes), default=0.0)
    return Run(outcomes=list(outcomes), duration_s=last if duration is None else duration)


def summary(*outcomes: Outcome, **options: Any) -> dict[str, Any]:
    duration = options.pop("duration", None)
    found = summarize(run(*outcomes, duration=duration), **{"gpus": ONE_EACH, "slots": 4, "goodput": {}, **options})
    json.dumps(found, allow_nan=False)
    return found


def test_latencies_of_one_request_by_hand() -> None:
    found = summary(outcome(0, [1.5, 2.0, 3.0], sent=1.0), percentiles=(50, 99, 99.9))
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(750)
    assert found["mean_itl_ms"] == pytest.approx(750)
    assert found["p99_itl_ms"] == pytest.approx(995)
    assert found["p99.9_itl_ms"] == pytest.approx(999.5)
    assert found["std_itl_ms"] == pytest.approx(250)
    assert found["mean_e2el_ms"] == pytest.approx(2000)
    assert (found["ttfts"], found["tpots"]) == ([500.0], [750.0])


def test_throughput_counts_what_was_completed() -> None:
    failed = outcome(2, [0.5, 1.0], error="it left", prompt=1000)
    found = summary(outcome(0, [1.0, 2.0], prompt=30), outcome(1, [1.0, 4.0], prompt=50), failed, duration=4.0)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (80, 4)
    assert (found["request_throughput"], found["output_throughput"]) == (0.5, 1.0)
    assert found["total_token_throughput"] == 21.0
    assert found["duration"] == 4.0
    gpus = {"prefill": 2, "decode": 4, "total": 5}
    spread_out = summary(outcome(0, [1.0, 2.0], prompt=40), duration=2.0, gpus=gpus)
    assert spread_out["input_tokens_per_s_per_prefill_gpu"] == 10.0
    assert spread_out["output_tokens_per_s_per_decode_gpu"] == 0.25
    assert spread_out["output_tokens_per_s_per_gpu"] == 0.2


def test_peaks_are_of_seconds_since_the_first_was_sent() -> None:
    found = summary(outcome(0, [10.1, 10.2, 11.3], sent=10.0), outcome(1, [10.9, 12.5], sent=10.5))
    assert found["max_output_tokens_per_s"] == 3.0
    assert found["max_concurrent_requests"] == 2
    bundled = outcome(0, [], arrivals=[(0.5, 1), (0.6, 8)], token_ids=[1] * 9, done_s=0.6)
    assert summary(bundled)["max_output_tokens_per_s"] == 9.0


def test_goodput_wants_every_limit() -> None:
    requests = [outcome(0, [0.1, 0.2]), outcome(1, [0.1, 0.9]), outcome(2, [0.5, 0.6]), outcome(3, [0.1])]
    assert summary(*requests, duration=1.0)["request_goodput"] is None
    limits = parse_goodput(["ttft:200", "tpot:150"])
    assert summary(*requests, duration=1.0, goodput=limits)["request_goodput"] == 2.0, "one token has no gap to miss"
    assert summary(*requests, duration=1.0, goodput={"e2el": 99.0})["request_goodput"] == 0.0


def test_goodput_is_read_as_vllm_reads_it() -> None:
    assert parse_goodput(["ttft:0", "tpot:50.5", "e2el:1e3"]) == {"ttft": 0.0, "tpot": 50.5, "e2el": 1000.0}
    for wrong in ("itl:5", "ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "ttft:1 ttft:2", "ttft:1:2"):
        with pytest.raises(InvalidArgumentError, match="goodput"):
            parse_goodput(wrong.split())


def test_the_timeline_has_all_tokens_and_no_first_token_twice() -> None:
    done = [outcome(i, [2 + i, 3 + i, 4.5 + i], prompt=100) for i in range(5)]
    failed = outcome(5, [1.0, 1.5], prompt=7, error="it left")
    line = summary(*done, failed, outcome(6, [], error="never came"), duration=10.0)["timeline"]
    width = line["bin_s"]
    bins = len(line["running"])
    assert MIN_BINS <= bins <= MAX_BINS
    assert bins * width == pytest.approx(10.0)
    assert sum(line["prefill_tokens_per_s"]) * width == pytest.approx(507)
    assert sum(line["decode_tokens_per_s"]) * width == pytest.approx(5 * 2 + 1)
    assert sum(line["running"]) * width == pytest.approx(5 * 2.5 + 0.5)
    assert line["prefill_tokens_per_s"][int(1.0 / width)] == pytest.approx(7 / width)
    assert line["running"][int(4.25 / width)] == 3.0


@pytest.mark.parametrize("duration", [1e-6, 0.02, 0.999, 1.0, 1.001, 20.0, 20.001, 59.7, 400.0, 1e5])
def test_there_are_20_to_200_bins_that_cover_the_run(duration: float) -> None:
    width = bin_width(duration)
    assert MIN_BINS <= math.ceil(duration / width) <= MAX_BINS
    line = summary(outcome(0, [duration / 2, duration]), duration=duration)["timeline"]
    assert MIN_BINS <= len(line["running"]) <= MAX_BINS
    assert len(line["running"]) * width >= duration * (1 - 1e-9)


def test_peak_decode_is_of_the_best_whole_second() -> None:
    found = summary(outcome(0, [0.5, 0.9, 1.1, 1.2, 1.3, 2.5]), duration=3.0)
    assert found["peak_decode_tokens_per_s"] == 3.0
    bundled = outcome(0, [], arrivals=[(0.1, 5), (0.2, 5)], token_ids=[1] * 10, done_s=0.2)
    assert summary(bundled, duration=0.5)["peak_decode_tokens_per_s"] == 18.0, "of a run without a whole second"


def test_occupancy_is_of_the_time_in_which_something_decodes() -> None:
    first, second = outcome(0, [1.0, 3.0]), outcome(1, [2.0, 4.0])
    found = summary(first, second, duration=100.0)
    assert found["slot_occupancy"] == pytest.approx((2 + 2) / (3 * 4))
    assert found["padding_waste"] == pytest.approx(1 - 4 / 12)
    apart = summary(first, outcome(1, [10.0, 12.0]), slots=1)
    assert (apart["slot_occupancy"], apart["padding_waste"]) == (1.0, 0.0)
    unknown = summary(first, slots=0)
    assert (unknown["slot_occupancy"], unknown["padding_waste"]) == (None, None)


@pytest.mark.parametrize(
    "outcomes",
    [
        (),
        (outcome(0, [], error="refused"),),
        (outcome(0, []),),
        (outcome(0, [1.0]),),
        (outcome(0, [0.0, 0.0]),),
        (outcome(0, [1.0, 1.0, 1.0], sent=1.0),),
        (outcome(0, [5.0, 6.0], done_s=0.0, error="its end was not seen"),),
    ],
)
def test_odd_runs_have_finite_numbers(outcomes: tuple[Outcome, ...]) -> None:
    for duration in (0.0, None):
        found = summary(*outcomes, duration=duration, goodput={"ttft": 1.0}, gpus=dict.fromkeys(ONE_EACH, 0))
        assert found["output_tokens_per_s_per_gpu"] is None
        assert found["mean_tpot_ms"] >= 0
        assert min(found["timeline"]["running"], default=0) >= 0


def test_a_system_that_hides_its_token_ids_is_counted_by_its_messages() -> None:
    hidden = outcome(0, [], arrivals=[(1.0, 1), (2.0, 4)], token_ids=[], done_s=2.0)
    found = summary(hidden)
    assert found["total_output_tokens"] == 5
    assert found["mean_tpot_ms"] == pytest.approx(250)


def sampled(index: int, tokens: list[int], logprobs: list[float], error: str = "") -> Outcome:
    return Outcome(request=request(index, 1), token_ids=tokens, logprobs=logprobs, error=error)


def test_one_bit_is_a_mismatch() -> None:
    value = float(np.float32(-0.3))
    next_to_it = float(np.nextafter(np.float32(value), np.float32(0)))
    first = run(sampled(0, [1], [value]), sampled(1, [2], [0.0]), sampled(2, [3], [-1.0]), sampled(3, [4], [-1.0]))
    again = run(
        sampled(0, [1], [next_to_it]), sampled(1, [2], [-0.0]), sampled(2, [9], [-1.0]), sampled(3, [4], [-1.0])
    )
    counts = {"requests": 4, "different_tokens": 1, "different_bits": 3, "tokens_only": 0}
    assert mismatches(first, again) == ({**counts, "rate": 0.75}, [])


def test_what_cannot_be_compared_is_named_and_not_counted_as_equal() -> None:
    first = run(sampled(0, [1], []), sampled(1, [2], [], "it left"), sampled(2, [3], []), sampled(4, [5], [-1.0]))
    again = run(sampled(0, [1], []), sampled(1, [2], []), sampled(3, [4], []), sampled(4, [5], []))
    found, not_compared = mismatches(first, again)
    assert (found["requests"], found["tokens_only"], not_compared) == (1, 1, [1, 2, 3, 4])
    assert mismatches(run(), run())[0]["rate"] is None
    blind = run(sampled(0, [], [])), run(sampled(0, [], []))
    found, not_compared = mismatches(*blind)
    assert (found["requests"], found["rate"], not_compared) == (0, None, [0]), "a server that tells no tokens"
    assert fp32_bits([0.1, math.nan]) == fp32_bits([float(np.float32(0.1)), math.nan])
    assert fp32_bits([-1e300]) == fp32_bits([-math.inf]), "a foreign system may send anything"
