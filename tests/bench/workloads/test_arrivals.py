"""Arrivals of an open loop: vLLM's rates and shapes, the same for the same seed."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from corun.errors import InvalidArgumentError
from corun_bench.workloads.arrivals import from_trace, gamma


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise([0.0, *times])]


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 8.0, math.inf])
def test_the_last_of_n_is_sent_at_n_over_the_rate(burstiness: float) -> None:
    for seed in range(5):
        times = gamma(300, request_rate=12.5, burstiness=burstiness, seed=seed)
        assert times == sorted(times)
        assert len(times) == 300
        assert times[-1] == pytest.approx(24.0)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """The deviation of gamma gaps over their mean is burstiness ** -0.5."""
    for burstiness in (0.25, 1.0, 16.0):
        found = gaps(gamma(20_000, request_rate=7, burstiness=burstiness, seed=3))
        assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)
    even = gaps(gamma(100, request_rate=7, burstiness=math.inf, seed=3))
    assert max(even) == pytest.approx(min(even))


def test_a_seed_gives_the_same_times_and_another_seed_others() -> None:
    times = gamma(50, request_rate=3, seed=11)
    assert gamma(50, request_rate=3, seed=11) == times
    assert gamma(50, request_rate=3, seed=12) != times


def test_the_times_of_a_seed_do_not_change() -> None:
    """Recorded results name a seed: these bits are part of what it means."""
    assert [round(at, 6) for at in gamma(3, request_rate=1, seed=1)] == [1.188603, 2.957126, 3.0]


def test_gaps_that_round_to_nothing_stay_nothing() -> None:
    assert gamma(3, request_rate=1, burstiness=1e-300, seed=1) == [0.0, 0.0, 0.0]


def test_a_trace_keeps_its_bursts_at_another_rate() -> None:
    assert from_trace([100, 100, 110, 140], request_rate=2) == [0.0, 0.0, 0.5, 2.0]
    assert from_trace([7.5], request_rate=2) == [0.0]
    with pytest.raises(InvalidArgumentError, match="differ"):
        from_trace([5, 5, 5], request_rate=2)


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_rates_outside_the_limit_are_named(rate: float) -> None:
    with pytest.raises(InvalidArgumentError, match="request_rate"):
        gamma(2, request_rate=rate, seed=0)


@pytest.mark.parametrize("burstiness", [0, -1, math.nan])
def test_a_burstiness_outside_the_limit_is_named(burstiness: float) -> None:
    with pytest.raises(InvalidArgumentError, match="burstiness"):
        gamma(2, request_rate=1, burstiness=burstiness, seed=0)
