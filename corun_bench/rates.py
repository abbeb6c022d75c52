"""The rates of one engine: from options, or from what `corun bench` measured of a system.

A result has no steps, but it has a timeline: the tokens and the requests between first token and end, in short bins. In
a closed loop there are bins in which nobody waits for a first token: all that are in flight have theirs, or there is no
prompt left. In these bins engines only decode, so requests divided by tokens a second is the time of a step. In the
other bins prompts are computed without a gap. Where the engines of both roles have the same GPU, the time of the decode
steps in these bins is taken off. What the first bins lose to a start is in the rate as well.

This module must not know what rates are used for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.errors import InvalidArgumentError
from corun_bench.options import PlanOptions
from corun_bench.results import Json, in_order, mapping, number, numbers, padding_of, whole
from corun_bench.simulation import BLOCK_SIZE, Rates

LEAST_STEPS = 20
"""The fewest steps in the bins of a number of rows; fewer tell little, because a bin holds a step or does not."""
_IN_FLIGHT = 0.99
"""The share of the requests in flight that have their first token when nobody waits for one. It leaves room for
rounding: a request that ended is followed by the next a moment later."""
_PER_DOUBLING = 4  # Groups of numbers of rows.
MEASURE = "measure them with corun bench --systems cluster:1p1d (on two GPUs) -o DIR, and name DIR/result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The rates of a system in a result file; 0, empty or None where the file does not show them."""

    system: str = ""
    prefill_tokens_per_s: float = 0.0
    prompt_tokens: float = 0.0
    """The mean length of the prompts whose rate this is."""
    decode_steps: tuple[tuple[float, float], ...] = ()
    handoff_s_per_token: float | None = None
    slots: int = 0
    kv_tokens: int = 0
    shares: bool = False
    """Whether the nodes of both roles had the same GPUs."""
    lacks: str = ""
    """What the file lacks, in words."""


def chosen(options: PlanOptions, measured: Measured | None) -> Rates:
    """Return the rates that the options give, and the measured ones where they give none. Raises InvalidArgumentError
    for a rate that nobody knows."""
    found = measured or Measured()
    prefill = options.prefill_tokens_per_s or found.prefill_tokens_per_s
    steps = parse_steps(options.decode_step_ms) or found.decode_steps
    slots = options.slots or found.slots
    for name, value in {"prefill_tokens_per_s": prefill, "decode_step_ms": steps, "slots": slots}.items():
        if not value:
            where = f"is not in what was measured: {found.lacks}" if found.lacks else "is not known"
            raise InvalidArgumentError(name, None, f"{where}; give it, or {MEASURE}")
    per_token = options.handoff_us_per_token
    return Rates(
        prefill_tokens_per_s=prefill,
        decode_steps=steps,
        handoff_s_per_token=found.handoff_s_per_token if per_token is None else per_token / 1e6,
        slots=slots,
        kv_tokens=found.kv_tokens if options.kv_tokens is None else options.kv_tokens,
        step_tokens=options.step_tokens,
    )


def parse_steps(words: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Read decode steps, as in 1:6.1 64:7.5: rows rising, and none faster than one of fewer rows."""
    steps: list[tuple[float, float]] = []
    for word in words:
        rows, _, ms = word.partition(":")
        try:
            step = int(rows), float(ms) / 1000
        except ValueError:
            step = 0, 0.0
        if step[0] < 1 or not 0 < step[1] < math.inf:
            raise InvalidArgumentError("decode_step_ms", word, "must be ROWS:MS, as in 256:15.1")
        if steps and not (step[0] > steps[-1][0] and step[1] >= steps[-1][1]):
            raise InvalidArgumentError("decode_step_ms", word, f"must be more rows, and no less time, than {steps[-1]}")
        steps.append(step)
    return tuple(steps)


def measured(result: Json, system: str, prompt_tokens: float) -> Measured:
    """Return the rates of a system in a result file. system: its name; empty: the file's only one, or only cluster.

    Decode steps are of all its runs. The prefill rate is of the workload whose prompts are closest in length to
    `prompt_tokens`. Raises InvalidArgumentError for a system that the file does not have.
    """
    entry = _entry(result, system)
    runs = [run for run in result["runs"] if run["system"] == entry["system"] and _is_closed(run)]
    nodes = _Nodes.of(entry)
    steps = _steps([piece for run in runs for piece in _bins(run, nodes)])
    prefill, length = _prefill(runs, nodes, steps, prompt_tokens)
    lacks = "" if steps else f"{entry['system']} has no closed-loop run of which {LEAST_STEPS} steps only decode"
    told = mapping(mapping(entry, "settings"), "nodes")
    each = [mapping(told, name) for name in told]
    kv_blocks = [whole(node, "kv_blocks") for node in each if node.get("slots") != 0]  # The others only prefill.
    return Measured(
        system=entry["system"],
        prefill_tokens_per_s=prefill,
        prompt_tokens=length,
        decode_steps=steps,
        handoff_s_per_token=None if nodes.share else _handoff(entry, runs),
        slots=whole(entry, "slots") // nodes.decode,
        kv_tokens=min(kv_blocks, default=0) * BLOCK_SIZE,
        shares=nodes.share,
        lacks=lacks or ("" if prefill else f"{entry['system']} has no closed-loop run in which prompts wait"),
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The engines of a measured system."""

    prefill: int
    decode: int
    share: bool
    """Whether engines of both roles have the same GPUs, or one engine has both roles."""

    @classmethod
    def of(cls, entry: Json) -> _Nodes:
        settings = mapping(entry, "settings")
        prefill, decode, both = (_places(settings, name) for name in ("prefill", "decode", "colocated"))
        both = both or _places(settings, "engines")
        if bool(both) == bool(prefill and decode):
            limit = "must have prefill and decode nodes, or engines of both roles; a mix shows the rates of neither"
            raise InvalidArgumentError("system", entry["system"], limit)
        prefill, decode = prefill or both, decode or both
        gpus = [{str(gpu) for place in places for gpu in place} for places in (prefill, decode)]
        return cls(len(prefill), len(decode), bool(gpus[0] & gpus[1]) or not gpus[0])


def _places(settings: Json, name: str) -> list[list[Any]]:
    found = settings.get(name)
    return [place for place in found if isinstance(place, list)] if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class _Bin:
    """What one node that decodes, and one that prefills, did in a bin of a timeline."""

    seconds: float
    rows: float
    steps: float
    prompt_tokens: float
    only_decodes: bool


def _entry(result: Json, system: str) -> Json:
    names = in_order(row["system"] for row in result["systems"])
    clusters = [name for name in names if name.startswith("cluster")]
    found = [system] if system else clusters if len(clusters) == 1 else names
    if len(found) != 1 or found[0] not in names:
        raise InvalidArgumentError("system", system, f"must be one of {', '.join(names)}: the file has rates of these")
    return next(row for row in result["systems"] if row["system"] == found[0])


def _is_closed(run: Json) -> bool:
    return run.get("request_rate") is None and padding_of(run["workload"]) is None and not whole(run, "failed")


def _bins(run: Json, nodes: _Nodes) -> Iterator[_Bin]:
    line = mapping(run, "timeline")
    seconds, came = number(line, "bin_s") or 0.0, 0.0
    most = _IN_FLIGHT * min(whole(run, "max_concurrency"), whole(run, "completed"))
    series = (numbers(line, name) for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "running"))
    for prompt_rate, output_rate, running in zip(*series, strict=False):
        left = whole(run, "total_input_tokens") - came
        came += prompt_rate * seconds
        yield _Bin(
            seconds=seconds,
            rows=running / nodes.decode,
            steps=output_rate * seconds / running if running > 0 else 0.0,
            prompt_tokens=prompt_rate * seconds / nodes.prefill,
            only_decodes=prompt_rate <= 0 and (running >= most or left < 1),
        )


def _steps(bins: Sequence[_Bin]) -> tuple[tuple[float, float], ...]:
    """Return the decode steps by rows, from bins of which each has the steps of one number of rows, about."""
    groups: dict[int, list[_Bin]] = {}
    for one in bins:
        if one.only_decodes and one.rows >= 1:
            groups.setdefault(round(_PER_DOUBLING * math.log2(one.rows)), []).append(one)
    found = []
    for _, group in sorted(groups.items()):
        steps, seconds = sum(one.steps for one in group), sum(one.seconds for one in group)
        if steps >= LEAST_STEPS:
            found.append((sum(one.rows * one.steps for one in group) / steps, seconds / steps))
    # A step of more rows takes no less time; where it seems to, the difference is noise.
    return tuple((rows, max(seconds for _, seconds in found[: place + 1])) for place, (rows, _) in enumerate(found))


def _prefill(
    runs: Sequence[Json], nodes: _Nodes, steps: tuple[tuple[float, float], ...], prompt_tokens: float
) -> tuple[float, float]:
    """Return the prompt tokens a second of one engine, and the mean length of these prompts; 0 if unknown. Rollouts
    do not count: samples of one prompt share its computation, so their prompts' tokens were not all computed."""
    alone = [run for run in runs if not any(part.startswith("rl=") for part in run["workload"].split(","))]
    lengths = {id(run): whole(run, "total_input_tokens") / max(1, whole(run, "completed")) for run in alone}
    if not alone or not steps:
        return 0.0, 0.0
    length = min(lengths.values(), key=lambda one: abs(math.log(max(one, 1) / max(prompt_tokens, 1))))
    rates = Rates(prefill_tokens_per_s=1.0, decode_steps=steps, slots=1)
    tokens = seconds = 0.0
    for run in (run for run in alone if lengths[id(run)] == length):
        # From the start to the first bin that only decodes, as many prompts wait as are in flight.
        for one in itertools.takewhile(lambda one: not one.only_decodes, _bins(run, nodes)):
            tokens += one.prompt_tokens
            seconds += one.seconds
            if nodes.share and one.rows:
                seconds -= min(one.seconds, one.steps * rates.step_s(round(one.rows)))
    return (tokens / seconds if seconds > 0 else 0.0), length


def _handoff(entry: Json, runs: Sequence[Json]) -> float | None:
    """Return the seconds a prompt token of a handoff between GPUs. The requests that warm the system up and those that
    are compared have the same lengths as the others."""
    mean_ms = number(mapping(entry, "handoff"), "mean_ms")
    completed = sum(whole(run, "completed") for run in runs) or 1
    tokens = sum(whole(run, "total_input_tokens") for run in runs)
    return mean_ms / 1000 / (tokens / completed) if mean_ms and tokens else None


def described(rates: Rates) -> Mapping[str, Any]:
    """Return rates as plain values for JSON, in the units of the options."""
    per_token = rates.handoff_s_per_token
    return {
        "prefill_tokens_per_s": round(rates.prefill_tokens_per_s, 1),
        "decode_step_ms": [[round(rows, 1), round(1000 * seconds, 3)] for rows, seconds in rates.decode_steps],
        "handoff_us_per_token": None if per_token is None else round(1e6 * per_token, 4),
        "slots": rates.slots,
        "kv_tokens": rates.kv_tokens,
        **({"step_tokens": rates.step_tokens} if rates.step_tokens else {}),
    }
