"""The metrics of a run, from the times at which tokens came; named and defined as in `vllm bench serve`.

Keys that vLLM's --save-result has mean the same here (calculate_metrics in vllm/benchmarks/serve.py), with these
differences: a message's tokens are counted, not messages; `ttfts` is in milliseconds. Failed requests count in `failed`
and in what the system did over time (timeline, decode peak, slot occupancy), and nowhere else. Every number is finite,
so that it can be written as JSON; a number that does not exist is None. This module must not know systems or files.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from corun.errors import InvalidArgumentError
from corun_bench.records import Outcome, Run
from corun_bench.timeline import in_decode, per_second, timeline

PERCENTILES = (50.0, 90.0, 99.0)
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The numbers of GPUs of a system. A GPU that does both phases counts in both, and once in `total`."""

    prefill: int
    decode: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The spread of one measurement over its repeats."""

    median: float
    min: float
    max: float
    repeats: int

    def over(self, unit: float) -> Spread:
        """Return the same numbers in multiples of `unit`."""
        return Spread(median=self.median / unit, min=self.min / unit, max=self.max / unit, repeats=self.repeats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The comparison, bit by bit, of requests that ran twice."""

    requests: int
    """The number of requests that were compared."""
    different_tokens: int
    """The number of compared requests that have other tokens."""
    different_bits: int
    """The number of compared requests that have other tokens, or other bits in a log probability."""
    tokens_only: int = 0
    """The number of compared requests that have no log probabilities to compare."""
    not_compared: tuple[int, ...] = ()
    """The indices of requests that are missing or failed in a run, or have log probabilities in only one of them."""

    @property
    def rate(self) -> float | None:
        """The share of the compared requests that differ; None if no request was compared."""
        return self.different_bits / self.requests if self.requests else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Latency:
    """The latencies of one completed request, in seconds."""

    ttft: float
    tpot: float | None
    """The mean time per token after the first one; None if there is only one token."""
    itls: list[float]
    e2el: float


def summarize(
    run: Run,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    goodput: Mapping[str, float] | None = None,
    gpus: Gpus,
    slots: int,
) -> dict[str, Any]:
    """Return the row of a run in a result file, without system, workload and repeat.

    `goodput` has limits in ms, as `parse_goodput` reads them. `slots` is how many requests the system decodes at once,
    over all its engines; 0 means that this is unknown, and occupancy is then None.
    """
    completed = [outcome for outcome in run.outcomes if not outcome.error]
    latencies = [_latency(outcome) for outcome in completed if outcome.arrivals]
    inputs = sum(outcome.num_prompt_tokens for outcome in completed)
    outputs = sum(map(output_tokens, completed))
    occupancy = _occupancy(run.outcomes, slots)
    return {
        "duration": run.duration_s,
        "completed": len(completed),
        "failed": len(run.outcomes) - len(completed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(completed), run.duration_s),
        "request_goodput": _rate(_good(latencies, goodput), run.duration_s) if goodput else None,
        "output_throughput": _rate(outputs, run.duration_s),
        "total_token_throughput": _rate(inputs + outputs, run.duration_s),
        **_peaks(completed),
        **_latency_statistics(latencies, percentiles),
        "input_tokens_per_s_per_prefill_gpu": _per_gpu(_rate(inputs, run.duration_s), gpus.prefill),
        "output_tokens_per_s_per_decode_gpu": _per_gpu(_rate(outputs, run.duration_s), gpus.decode),
        "output_tokens_per_s_per_gpu": _per_gpu(_rate(outputs, run.duration_s), gpus.total),
        "timeline": timeline(run),
        "peak_decode_tokens_per_s": _peak_decode(run),
        "slot_occupancy": occupancy,
        "padding_waste": None if occupancy is None else max(0.0, 1.0 - occupancy),
        "ttfts": [round(1000 * latency.ttft, 3) for latency in latencies],
        "tpots": [round(1000 * latency.tpot, 3) for latency in latencies if latency.tpot is not None],
    }


def output_tokens(outcome: Outcome) -> int:
    """Return the number of tokens that came; a foreign system may report how many, but not their ids."""
    return outcome.num_tokens or sum(count for _, count in outcome.arrivals)


def aggregate_throughput(summaries: Iterable[Mapping[str, Any]]) -> float:
    """Return the paper's aggregate of several tasks (Section V): output tokens/s, each weighted by its time."""
    tasks = [(float(summary["output_throughput"]), float(summary["duration"])) for summary in summaries]
    return _rate(math.fsum(throughput * time for throughput, time in tasks), math.fsum(time for _, time in tasks))


def spread(values: Iterable[float]) -> Spread:
    """Return median, minimum and maximum over repeats; raises InvalidArgumentError if there is no repeat."""
    found = sorted(values)
    if not found:
        raise InvalidArgumentError("repeats", 0, "must be at least 1")
    return Spread(median=percentile(found, 50), min=found[0], max=found[-1], repeats=len(found))


def parse_goodput(text: str | Sequence[str]) -> dict[str, float]:
    """Read limits in ms, as in vLLM's --goodput: "ttft:200 tpot:50 e2el:5000". A good request meets all of them."""
    limits: dict[str, float] = {}
    for pair in text.split() if isinstance(text, str) else text:
        name, _, value = pair.partition(":")
        if name not in GOODPUT or name in limits:
            raise InvalidArgumentError("goodput", pair, f"must be NAME:MS, each of {', '.join(GOODPUT)} once at most")
        limits[name] = _milliseconds(pair, value)
    return limits


def mismatches(first: Run, again: Run) -> Mismatch:
    """Compare the token ids and the fp32 bits of log probabilities of two runs of one workload, by request."""
    before, after = ({outcome.index: outcome for outcome in run.outcomes} for run in (first, again))
    every = sorted(before.keys() | after.keys())
    pairs = {index: (before[index], after[index]) for index in every if index in before and index in after}
    compared = [pair for pair in pairs.values() if _comparable(*pair)]
    tokens = [a.token_ids != b.token_ids for a, b in compared]
    bits = [fp32_bits(a.logprobs) != fp32_bits(b.logprobs) for a, b in compared]
    return Mismatch(
        requests=len(compared),
        different_tokens=sum(tokens),
        different_bits=sum(token or bit for token, bit in zip(tokens, bits, strict=True)),
        tokens_only=sum(not a.logprobs for a, _ in compared),
        not_compared=tuple(index for index in every if index not in pairs or not _comparable(*pairs[index])),
    )


def fp32_bits(values: Sequence[float]) -> bytes:
    """Return four bytes for each value: 0.0 and -0.0 differ, and a NaN is equal to itself."""
    return array("f", values).tobytes()


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, linear between two of them as in numpy; 0 without values, as in vLLM."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = min(math.floor(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _comparable(a: Outcome, b: Outcome) -> bool:
    return not a.error and not b.error and bool(a.logprobs) == bool(b.logprobs)


def _milliseconds(pair: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InvalidArgumentError("goodput", pair, "must be a number of ms, at least 0")
    return value


def _latency(outcome: Outcome) -> _Latency:
    times = [at for at, _ in outcome.arrivals]
    tokens = output_tokens(outcome)
    return _Latency(
        ttft=times[0] - outcome.sent_s,
        tpot=(outcome.done_s - times[0]) / (tokens - 1) if tokens > 1 else None,
        itls=[after - before for before, after in pairwise(times)],
        e2el=outcome.done_s - outcome.sent_s,
    )


def _latency_statistics(latencies: Sequence[_Latency], percentiles: Sequence[float]) -> dict[str, float]:
    metrics: dict[str, list[float]] = {
        "ttft": [latency.ttft for latency in latencies],
        "tpot": [latency.tpot for latency in latencies if latency.tpot is not None],
        "itl": [itl for latency in latencies for itl in latency.itls],
        "e2el": [latency.e2el for latency in latencies],
    }
    found: dict[str, float] = {}
    for name, seconds in metrics.items():
        found |= _statistics(name, sorted(1000 * value for value in seconds), percentiles)
    return found


def _statistics(name: str, ordered: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(ordered) / max(1, len(ordered))
    variance = math.fsum((value - mean) ** 2 for value in ordered) / max(1, len(ordered))
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": math.sqrt(variance),
        **{f"p{percent:g}_{name}_ms": percentile(ordered, percent) for percent in percentiles},
    }


def _good(latencies: Iterable[_Latency], limits: Mapping[str, float]) -> int:
    """Return the number of requests within every limit. The time per token of a single token is 0, as in vLLM."""
    found = ({"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2el": one.e2el} for one in latencies)
    return sum(all(1000 * values[name] <= limit for name, limit in limits.items()) for values in found)


def _peaks(completed: Sequence[Outcome]) -> dict[str, float]:
    """Return vLLM's peaks, over whole seconds since the first of the completed requests was sent."""
    start = min((outcome.sent_s for outcome in completed), default=0.0)
    tokens = per_second((at - start, count) for outcome in completed for at, count in outcome.arrivals)
    spans = ((int(outcome.sent_s - start), int(outcome.done_s - start)) for outcome in completed)
    requests = per_second((second, 1) for first, last in spans for second in range(first, last + 1))
    return {
        "max_output_tokens_per_s": float(max(tokens.values(), default=0)),
        "max_concurrent_requests": max(requests.values(), default=0),
    }


def _peak_decode(run: Run) -> float:
    """Return the tokens of the best whole second, without first tokens; for a run under a second, its rate."""
    seconds = per_second(piece for outcome in run.outcomes for piece in in_decode(outcome))
    if run.duration_s < 1:
        return _rate(sum(seconds.values()), run.duration_s)
    return float(max(seconds.values(), default=0))


def _occupancy(outcomes: Iterable[Outcome], slots: int) -> float | None:
    """Return the mean share of slots in use over the time in which at least one is in use.

    A slot is in use from the first token of its request to the end.
    """
    starts = ((outcome.arrivals[0][0], outcome.done_s) for outcome in outcomes if outcome.arrivals)
    spans = sorted((first, max(first, last)) for first, last in starts)
    busy, reached = 0.0, -math.inf
    for first, last in spans:
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    if slots <= 0 or busy <= 0:
        return None
    return math.fsum(last - first for first, last in spans) / (busy * slots)


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _per_gpu(rate: float, gpus: int) -> float | None:
    return rate / gpus if gpus > 0 else None
