"""Makes the requests of a workload: pure, from one seed, the same for every system and on every machine.

A request is cut to fit a model: prompt and output together may have `max_model_len` tokens. If they have more, the one
that is longer than half of this limit is cut; if both are longer than half, both are cut to half. A prompt loses its
end. The cut requests are counted, and so are records that cannot be used and prompts that had to be used again.
This module must not know systems, tokenizers or clocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from corun.errors import InvalidArgumentError
from corun.params import check_seed
from corun.seeds import derive_seed, sample_seed
from corun_bench.records import Request, Workload
from corun_bench.workloads import arrivals
from corun_bench.workloads.datasets import Edit, Turn, read_blazedit, read_burstgpt, read_sharegpt
from corun_bench.workloads.draws import integers, pick
from corun_bench.workloads.specs import Spec

Tokenize = Callable[[str], "list[int]"]

FIRST_TOKEN = 3
"""Random tokens are in [3, vocabulary): the first few are special in most vocabularies."""
BLAZEDIT_OUTPUT_TOKENS = 4000
"""vLLM's output length for Blazedit: about 10,000 characters of code, and a margin."""
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""vLLM's limits on ShareGPT (is_valid_sequence in vllm/benchmarks/datasets): other conversations are left out."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A workload, and the changes to the data that it needed."""

    workload: Workload
    clipped: int = 0
    """The number of requests that were cut to fit the model."""
    left_out: int = 0
    """The number of records that cannot be used: failed, too short or too long, of another model or shape."""
    repeated: int = 0
    """The number of prompts that are used again, because the data set has too few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    prompt: tuple[int, ...]
    output_len: int
    timestamp_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Prompts in their order, with lengths as the data set has them."""

    samples: list[_Sample]
    left_out: int = 0
    repeated: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Maker:
    spec: Spec
    vocab_size: int
    seed: int
    tokenize: Tokenize | None

    def random_prompt(self, number: int, length: int) -> tuple[int, ...]:
        drawn = integers(self.seed, f"{self.spec.name}/prompt/{number}", length, self.vocab_size - FIRST_TOKEN)
        return tuple(FIRST_TOKEN + value for value in drawn)

    def pick(self, size: int, count: int) -> list[int]:
        if size == 0:
            raise InvalidArgumentError("workloads", self.spec.text, "has no usable record")
        return pick(self.seed, f"{self.spec.name}/rows", size, count)

    def tokens(self, text: str) -> list[int]:
        if self.tokenize is None:
            raise InvalidArgumentError("workloads", self.spec.text, "is text, which needs the model's tokenizer")
        tokens = self.tokenize(text)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise InvalidArgumentError("tokenize", max(tokens), f"must be below the vocabulary's {self.vocab_size}")
        return tokens


def make(spec: Spec, **options: Any) -> Workload:
    """Return the workload of `prepare`, which has these options, and log what had to be changed."""
    prepared = prepare(spec, **options)
    for count, what in (
        (prepared.clipped, f"requests cut to {options['max_model_len']} tokens"),
        (prepared.left_out, "records left out"),
        (prepared.repeated, "prompts used again"),
    ):
        if count:
            _log.warning("workload %s: %d %s", spec.name, count, what)
    return prepared.workload


def prepare(
    spec: Spec,
    *,
    num_requests: int,
    vocab_size: int,
    max_model_len: int,
    seed: int,
    tokenize: Tokenize | None = None,
    max_concurrency: int = 256,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
) -> Prepared:
    """Return the workload of a spec; a rollout has its own number of requests, whatever `num_requests` is.

    An infinite `request_rate` is a closed loop. Raises InvalidArgumentError for a value outside its limit, a file of
    another shape, or text without `tokenize`. `tokenize` gets raw text: no chat template is applied.
    """
    _check(num_requests, vocab_size, max_model_len, seed, max_concurrency, request_rate)
    maker = _Maker(spec=spec, vocab_size=vocab_size, seed=seed, tokenize=tokenize)
    source = _SOURCES[spec.kind](maker, spec.prompts or num_requests)
    fitted = [_fitted(sample, max_model_len) for sample in source.samples]
    times = _times(spec, source.samples, request_rate, burstiness, seed)
    requests = tuple(_requests(spec, seed, fitted, times))
    clipped = sum(a != b for a, b in zip(source.samples, fitted, strict=True)) * spec.samples
    workload = Workload(
        name=spec.name,
        requests=requests,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        burstiness=burstiness,
    )
    return Prepared(workload=workload, clipped=clipped, left_out=source.left_out, repeated=source.repeated)


def fit(input_len: int, output_len: int, max_model_len: int) -> tuple[int, int]:
    """Return the lengths that a request gets; the module's docstring has the rule."""
    input_len = min(input_len, max(max_model_len - output_len, max_model_len // 2))
    return input_len, min(output_len, max_model_len - input_len)


def edit_prompt(edit: Edit, times_before: int = 0) -> str:
    """Return the task of an edit record as text. The words are ours, so its length differs a little from vLLM's.

    A record that is used again starts differently, so that no prefix cache knows it.
    """
    again = f"Once more, {times_before}. " if times_before else ""
    return (
        f"{again}Here is a file:\n```\n{edit.code}\n```\nChange it as follows:\n{edit.change_request}\n"
        "Answer with the whole new file and nothing else.\n"
    )


def _synthetic(maker: _Maker, count: int) -> _Source:
    spec = maker.spec
    prompts = (maker.random_prompt(i, spec.input_len) for i in range(count))
    return _Source(samples=[_Sample(prompt=prompt, output_len=spec.output_len) for prompt in prompts])


def _burstgpt(maker: _Maker, count: int) -> _Source:
    """Return random tokens in the trace's lengths. Rows are picked at random, or neighbours if the trace times them."""
    trace = read_burstgpt(maker.spec.path, maker.spec.model)
    rows = _window(maker, trace.timestamps, count) if maker.spec.arrivals == "trace" else maker.pick(len(trace), count)
    samples = [
        _Sample(
            prompt=maker.random_prompt(i, trace.prompt_tokens[row]),
            output_len=trace.output_tokens[row],
            timestamp_s=trace.timestamps[row],
        )
        for i, row in enumerate(rows)
    ]
    return _Source(samples=samples, left_out=trace.left_out, repeated=max(0, count - len(trace)))


def _window(maker: _Maker, times: Sequence[float], count: int) -> list[int]:
    """Return neighbouring rows of a trace, from a random place, in order of time."""
    if len(times) < count:
        limit = f"arrivals=trace needs as many usable rows as requests, {count}, and has {len(times)}"
        raise InvalidArgumentError("workloads", maker.spec.text, limit)
    first = integers(maker.seed, f"{maker.spec.name}/window", 1, len(times) - count + 1)[0]
    return sorted(range(first, first + count), key=times.__getitem__)


def _sharegpt(maker: _Maker, count: int) -> _Source:
    turns, left_out = read_sharegpt(maker.spec.path)
    tried = 0
    samples: list[_Sample] = []
    for row in maker.pick(len(turns), len(turns)):
        if len(samples) == count:
            break
        sample = _conversation(maker, turns[row])
        tried += 1
        samples += [sample] if sample else []
    repeated = maker.pick(len(samples), count)[len(samples) :]
    left_out += tried - len(samples)
    return _Source(samples=samples + [samples[i] for i in repeated], left_out=left_out, repeated=len(repeated))


def _conversation(maker: _Maker, turn: Turn) -> _Sample | None:
    prompt, answer = tuple(maker.tokens(turn.prompt)), len(maker.tokens(turn.answer))
    output_len = maker.spec.output_len or answer
    fits = len(prompt) <= MAX_PROMPT_TOKENS and len(prompt) + output_len <= MAX_TOTAL_TOKENS
    # A length that the user gave may be short: vLLM checks only what the data set has.
    is_long = len(prompt) >= MIN_TOKENS and (bool(maker.spec.output_len) or answer >= MIN_TOKENS)
    return _Sample(prompt=prompt, output_len=output_len) if fits and is_long else None


def _blazedit(maker: _Maker, count: int) -> _Source:
    edits, left_out = read_blazedit(maker.spec.path)
    rows = maker.pick(len(edits), count)
    output_len = maker.spec.output_len or BLAZEDIT_OUTPUT_TOKENS
    texts = (edit_prompt(edits[row], i // len(edits)) for i, row in enumerate(rows))
    samples = [_Sample(prompt=tuple(maker.tokens(text)), output_len=output_len) for text in texts]
    return _Source(samples=samples, left_out=left_out, repeated=max(0, count - len(edits)))


_SOURCES: dict[str, Callable[[_Maker, int], _Source]] = {
    "synthetic": _synthetic,
    "burstgpt": _burstgpt,
    "sharegpt": _sharegpt,
    "blazedit": _blazedit,
}


def _fitted(sample: _Sample, max_model_len: int) -> _Sample:
    input_len, output_len = fit(len(sample.prompt), sample.output_len, max_model_len)
    return _Sample(prompt=sample.prompt[:input_len], output_len=output_len, timestamp_s=sample.timestamp_s)


def _times(spec: Spec, samples: list[_Sample], request_rate: float, burstiness: float, seed: int) -> Iterator[float]:
    count = len(samples) * spec.samples
    if spec.arrivals == "trace":
        return iter(arrivals.from_trace([sample.timestamp_s for sample in samples], request_rate=request_rate))
    if math.isinf(request_rate):
        return iter([0.0] * count)
    return iter(arrivals.gamma(count, request_rate=request_rate, burstiness=burstiness, seed=seed))


def _requests(spec: Spec, seed: int, prompts: list[_Sample], times: Iterator[float]) -> Iterator[Request]:
    """Yield the requests. Samples of one prompt are neighbours; each has a seed of its own."""
    key = seed.to_bytes(8, "little")
    for number, prompt in enumerate(prompts):
        first = derive_seed(key, f"{spec.name}/{number}")
        for sample, arrival_s in enumerate(islice(times, spec.samples)):
            yield Request(
                index=number * spec.samples + sample,
                prompt_token_ids=prompt.prompt,
                max_tokens=prompt.output_len,
                seed=sample_seed(first, sample),
                arrival_s=arrival_s,
            )


def _check(
    num_requests: int, vocab_size: int, max_model_len: int, seed: int, max_concurrency: int, request_rate: float
) -> None:
    check_seed(seed)
    for field, value, minimum in (
        ("num_requests", num_requests, 1),
        ("vocab_size", vocab_size, FIRST_TOKEN + 1),
        ("max_model_len", max_model_len, 2),
        ("max_concurrency", max_concurrency, 1 if math.isinf(request_rate) else 0),
    ):
        if value < minimum:
            raise InvalidArgumentError(field, value, f"must be at least {minimum}")
    if not request_rate > 0:
        raise InvalidArgumentError("request_rate", request_rate, "must be above 0")
