"""The metrics of a run, from the times at which tokens came; named and defined as in `vllm bench serve`.

Keys that vLLM's --save-result has mean the same here (calculate_metrics in vllm/benchmarks/serve.py), with these
differences: a message's tokens are counted, not messages; `ttfts` is in milliseconds; in an open loop, the time for
which `max_concurrency` holds a request back is part of its latencies, or a system would seem to carry any rate. Failed
requests count in `failed` and in what the system did over time (timeline, decode peak, slot occupancy), and nowhere
else. Every number is finite, so that it can be written as JSON; a number that does not exist is None. This module must
not know systems or files.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from corun.errors import InvalidArgumentError
from corun_bench.driver import Outcome, Run
from corun_bench.options import to_number
from corun_bench.results import mismatch_rate

PERCENTILES = (50.0, 90.0, 99.0)
GOODPUT = ("ttft", "tpot", "e2el")
MIN_BINS, MAX_BINS = 20, 200


def summarize(
    run: Run,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    goodput: Mapping[str, float],
    gpus: Mapping[str, int],
    slots: int,
) -> dict[str, Any]:
    """Return the row of a run in a result file, without system, workload and repeat.

    `goodput` has limits in ms, as `parse_goodput` reads them. `gpus` are the system's numbers of GPUs for prefill,
    decode, and in total. `slots` is how many requests the system decodes at once, over all its engines; 0 means that
    this is unknown, and occupancy is then None.
    """
    completed = [outcome for outcome in run.outcomes if not outcome.error]
    timed = [outcome for outcome in completed if outcome.arrivals]
    firsts = [1000 * (outcome.arrivals[0][0] - outcome.sent_s) for outcome in timed]
    tpots = [_tpot_ms(outcome) for outcome in timed]  # None for a single token.
    latencies = {
        "ttft": firsts,
        "tpot": [tpot for tpot in tpots if tpot is not None],
        "itl": [1000 * (after - at) for outcome in timed for (at, _), (after, _) in pairwise(outcome.arrivals)],
        "e2el": [1000 * (outcome.done_s - outcome.sent_s) for outcome in timed],
    }
    # In goodput the time per token of a single token is 0, as in vLLM.
    of_request = {"ttft": firsts, "tpot": [tpot or 0.0 for tpot in tpots], "e2el": latencies["e2el"]}
    good = sum(
        all(value <= limit for value, limit in zip(values, goodput.values(), strict=True))
        for values in zip(*(of_request[name] for name in goodput), strict=True)
    )
    inputs = sum(outcome.num_prompt_tokens for outcome in completed)
    outputs = sum(outcome.num_output_tokens for outcome in completed)
    occupancy = _occupancy(run.outcomes, slots)

    def rate(count: float, devices: int = 1) -> float | None:
        return _rate(count, run.duration_s) / devices if devices > 0 else None

    return {
        "duration": run.duration_s,
        "completed": len(completed),
        "failed": len(run.outcomes) - len(completed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(completed)),
        "request_goodput": rate(good) if goodput else None,
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        **_peaks(completed),
        **{
            f"{statistic}_{metric}_ms": value
            for metric, values in latencies.items()
            for statistic, value in _statistics(values, percentiles).items()
        },
        "input_tokens_per_s_per_prefill_gpu": rate(inputs, gpus["prefill"]),
        "output_tokens_per_s_per_decode_gpu": rate(outputs, gpus["decode"]),
        "output_tokens_per_s_per_gpu": rate(outputs, gpus["total"]),
        "timeline": timeline(run),
        "peak_decode_tokens_per_s": _peak_decode(run),
        "slot_occupancy": occupancy,
        "padding_waste": None if occupancy is None else max(0.0, 1.0 - occupancy),
        "ttfts": [round(value, 3) for value in firsts],
        "tpots": [round(value, 3) for value in latencies["tpot"]],
    }


def _tpot_ms(outcome: Outcome) -> float | None:
    """Return the mean time per token after the first one."""
    tokens = outcome.num_output_tokens
    return 1000 * (outcome.done_s - outcome.arrivals[0][0]) / (tokens - 1) if tokens > 1 else None


def _statistics(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return the statistics of a latency; all are 0 without values, as in vLLM."""
    found = np.array(values or [0.0])
    ranks = dict(zip(percentiles, np.percentile(found, percentiles).tolist(), strict=True))
    moments = {"mean": float(found.mean()), "median": float(np.median(found)), "std": float(found.std())}
    return moments | {f"p{percent:g}": value for percent, value in ranks.items()}


def _peaks(completed: Sequence[Outcome]) -> dict[str, float]:
    """Return vLLM's peaks, over whole seconds since the first of the completed requests was sent."""
    start = min((outcome.sent_s for outcome in completed), default=0.0)
    tokens = _per_second((at - start, count) for outcome in completed for at, count in outcome.arrivals)
    spans = ((int(outcome.sent_s - start), int(outcome.done_s - start)) for outcome in completed)
    requests = _per_second((second, 1) for first, last in spans for second in range(first, last + 1))
    return {"max_output_tokens_per_s": max(tokens), "max_concurrent_requests": int(max(requests))}


def _peak_decode(run: Run) -> float:
    """Return the tokens of the best whole second, without first tokens; for a run under a second, its rate."""
    seconds = _per_second(piece for outcome in run.outcomes for piece in _in_decode(outcome))
    return _rate(sum(seconds), run.duration_s) if run.duration_s < 1 else max(seconds)


def _per_second(pieces: Iterable[tuple[float, int]]) -> list[float]:
    """Return the sums of what came in the seconds [0, 1), [1, 2), …, of which there is at least one."""
    times, counts = zip(*pieces, (0.0, 0), strict=True)
    return [float(value) for value in np.bincount([int(at) for at in times], counts)]


def _in_decode(outcome: Outcome) -> Iterator[tuple[float, int]]:
    """Yield when tokens came and how many, without the first token."""
    for i, (at, count) in enumerate(outcome.arrivals):
        yield at, count - (i == 0)


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


def timeline(run: Run) -> dict[str, Any]:
    """Return the run in 20 to 200 bins from time 0, with everything that came, also from requests that failed later.

    {"bin_s", "prefill_tokens_per_s": […], "decode_tokens_per_s": […], "running": […]}
    A prompt's tokens count when its first output token comes, because they cannot be seen earlier from outside. Outputs
    count without their first tokens, which prefill computes. `running` is the mean number of requests between first
    token and end.
    """
    width = bin_width(run.duration_s)
    edges = np.arange(max(MIN_BINS, math.ceil(run.duration_s / width)) + 1) * width
    begun = [outcome for outcome in run.outcomes if outcome.arrivals]

    def per_second(pieces: Iterable[tuple[float, int]]) -> list[float]:
        times, counts = zip(*pieces, (0.0, 0), strict=True)
        inside = np.clip(times, 0.0, edges[-1])
        return [float(value) / width for value in np.histogram(inside, edges, weights=counts)[0]]

    running = np.zeros(len(edges) - 1)
    for outcome in begun:
        first = outcome.arrivals[0][0]
        running += np.clip(np.minimum(edges[1:], outcome.done_s) - np.maximum(edges[:-1], first), 0.0, None) / width
    lines = {
        "prefill_tokens_per_s": per_second((one.arrivals[0][0], one.num_prompt_tokens) for one in begun),
        "decode_tokens_per_s": per_second(piece for one in begun for piece in _in_decode(one)),
        "running": running.tolist(),
    }
    return {"bin_s": width, **{name: [round(value, 3) for value in values] for name, values in lines.items()}}


def bin_width(duration_s: float) -> float:
    """Return the smallest width of 1, 2 or 5 times a power of ten, in seconds, that gives at most 200 bins."""
    if duration_s <= 0:
        return 0.001
    power = math.floor(math.log10(duration_s / MAX_BINS))
    widths = (float(f"{step}e{exponent}") for exponent in (power, power + 1) for step in (1, 2, 5))
    return next(width for width in widths if math.ceil(duration_s / width) <= MAX_BINS)


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """Read limits in ms, as in vLLM's --goodput: ttft:200 tpot:50 e2el:5000. A good request meets all of them."""
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT or name in limits:
            raise InvalidArgumentError("goodput", pair, f"must be NAME:MS, each of {', '.join(GOODPUT)} once at most")
        limits[name] = to_number(text)
        if not 0 <= limits[name] < math.inf:
            raise InvalidArgumentError("goodput", pair, "must be a number of ms, at least 0")
    return limits


def mismatches(first: Run, again: Run) -> tuple[dict[str, Any], list[int]]:
    """Compare the token ids and the fp32 bits of log probabilities of two runs of one workload, by request.

    Return the row of a result file, without system and workload; and the indices of requests that are missing or failed
    in a run, have neither tokens nor log probabilities, or have them in only one of the two.
    """
    before, after = ({outcome.request.index: outcome for outcome in run.outcomes} for run in (first, again))
    compared, not_compared = [], []
    for index in sorted(before.keys() | after.keys()):
        a, b = before.get(index), after.get(index)
        if a and b and not (a.error or b.error) and (told := _told(a)) == _told(b) and any(told):
            compared.append((a, b))
        else:
            not_compared.append(index)
    tokens = [a.token_ids != b.token_ids for a, b in compared]
    bits = [fp32_bits(a.logprobs) != fp32_bits(b.logprobs) for a, b in compared]
    row = {
        "requests": len(compared),
        "different_tokens": sum(tokens),
        "different_bits": sum(token or bit for token, bit in zip(tokens, bits, strict=True)),
        "tokens_only": sum(not a.logprobs for a, _ in compared),
    }
    return {**row, "rate": mismatch_rate(row)}, not_compared


def _told(outcome: Outcome) -> tuple[bool, bool]:
    """Return whether a request's tokens and log probabilities are known: a foreign system may tell neither."""
    return bool(outcome.token_ids), bool(outcome.logprobs)


def fp32_bits(values: Sequence[float]) -> bytes:
    """Return four bytes for each value: 0.0 and -0.0 differ, and a NaN is equal to itself."""
    return array("f", values).tobytes()
