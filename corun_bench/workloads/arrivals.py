"""The times at which an open loop sends its requests: seconds since the run began, in order.

They are a pure function of a seed or a trace. The conventions are those of `vllm bench serve` (get_request in
vllm/benchmarks/serve.py): gaps have a gamma distribution, and all times are scaled so that the last request of n is
sent at n / request_rate. The rate is then the same for every seed, and only the bursts differ. This module must not
know what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from corun.errors import InvalidArgumentError
from corun_bench.workloads.draws import generator


def gamma(count: int, *, request_rate: float, burstiness: float = 1.0, seed: int) -> list[float]:
    """Return `count` times. Burstiness 1 is a Poisson process, less is burstier, more is more even, inf is constant."""
    check_rate(request_rate, burstiness)
    if math.isinf(burstiness):
        return [(i + 1) / request_rate for i in range(count)]
    draw = generator(seed, "arrivals")
    times = list(accumulate(draw.gammavariate(burstiness, 1.0) for _ in range(count)))
    return _scaled(times, count / request_rate)


def from_trace(timestamps: Sequence[float], *, request_rate: float) -> list[float]:
    """Return the bursts of a trace at another rate: the first request at 0, the last of n at n / request_rate."""
    check_rate(request_rate)
    times = [at - timestamps[0] for at in timestamps]
    if len(times) > 1 and times[-1] <= 0:
        raise InvalidArgumentError("arrivals", "trace", "needs timestamps that differ")
    return _scaled(times, len(times) / request_rate)


def check_rate(request_rate: float, burstiness: float = 1.0) -> None:
    """Raise InvalidArgumentError unless the rate is above 0 and finite and the burstiness is above 0."""
    if not 0 < request_rate < math.inf:
        raise InvalidArgumentError("request_rate", request_rate, "must be above 0 and finite in an open loop")
    if not burstiness > 0:
        raise InvalidArgumentError("burstiness", burstiness, "must be above 0")


def _scaled(times: list[float], last_s: float) -> list[float]:
    """Return times that end at `last_s`. If the gaps are so bursty that all of them round to 0, they stay 0."""
    if not times or times[-1] == 0:
        return times
    return [at * (last_s / times[-1]) for at in times]
