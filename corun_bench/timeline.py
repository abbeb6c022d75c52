"""A run over time: tokens of prompts and of outputs in bins, and how many requests are being decoded.

It counts everything that came, also from requests that failed later, because the system did that work. This module must
not know latencies or systems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from corun_bench.records import Outcome, Run

MIN_BINS, MAX_BINS = 20, 200
_STEPS = (1, 2, 5)


def timeline(run: Run) -> dict[str, Any]:
    """Return the run in 20 to 200 bins from time 0.

    {"bin_s", "prefill_tokens_per_s": […], "decode_tokens_per_s": […], "running": […]}
    A prompt's tokens count when its first output token comes, because they cannot be seen earlier from outside. Outputs
    count without their first tokens, which prefill computes. `running` is the mean number of requests between first
    token and end.
    """
    width = bin_width(run.duration_s)
    bins = max(MIN_BINS, math.ceil(run.duration_s / width))
    prompts, outputs, running = [0.0] * bins, [0.0] * bins, [0.0] * bins
    for outcome in run.outcomes:
        if not outcome.arrivals:
            continue
        first = outcome.arrivals[0][0]
        prompts[_bin(first, width, bins)] += outcome.num_prompt_tokens / width
        for at, count in in_decode(outcome):
            outputs[_bin(at, width, bins)] += count / width
        for i in range(_bin(first, width, bins), _bin(outcome.done_s, width, bins) + 1):
            running[i] += max(0.0, min(outcome.done_s, (i + 1) * width) - max(first, i * width)) / width
    return {
        "bin_s": width,
        "prefill_tokens_per_s": [round(value, 3) for value in prompts],
        "decode_tokens_per_s": [round(value, 3) for value in outputs],
        "running": [round(value, 3) for value in running],
    }


def bin_width(duration_s: float) -> float:
    """Return the smallest width of 1, 2 or 5 times a power of ten, in seconds, that gives at most 200 bins."""
    if duration_s <= 0:
        return 0.001
    power = math.floor(math.log10(duration_s / MAX_BINS))
    widths = (float(f"{step}e{exponent}") for exponent in (power, power + 1) for step in _STEPS)
    return next(width for width in widths if math.ceil(duration_s / width) <= MAX_BINS)


def in_decode(outcome: Outcome) -> Iterator[tuple[float, int]]:
    """Yield when tokens came and how many, without the first token."""
    first = 1
    for at, count in outcome.arrivals:
        yield at, max(0, count - first)
        first = max(0, first - count)


def per_second(pieces: Iterable[tuple[float, int]]) -> Counter[int]:
    """Return the sums of what came in the seconds [0, 1), [1, 2), …; seconds with nothing are left out."""
    sums: Counter[int] = Counter()
    for at, count in pieces:
        sums[int(at)] += count
    return sums


def _bin(at: float, width: float, bins: int) -> int:
    return min(max(0, int(at / width)), bins - 1)
