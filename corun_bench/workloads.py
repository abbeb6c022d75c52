"""The work that systems get: the names of workloads, and the requests made from a name and a seed.

A name is comma-separated `key=value`, checked in full before anything is read or started.

    in=512,out=256                 random tokens, fixed lengths
    rl=32x8,in=512,out=256         32 prompts x 8 samples: the rollout of an RL step
    burstgpt                       the built-in sample of BurstGPT's shape; burstgpt=PATH: a CSV file of BurstGPT
    sharegpt                       the built-in sample; sharegpt=PATH: a JSON file of ShareGPT
    blazedit                       the built-in sample; blazedit=PATH: JSON lines of Blazedit

`rl=PxN` can be added to each of them, and so can `rate=R`: R requests are sent a second, whatever the command's own
rate is, so that one start of a system measures a curve. BurstGPT takes `model=GPT-4` (rows of that model only, as in
vLLM's benchmark). ShareGPT and Blazedit take `out=N` (the same output length for all). A path must not contain a comma.

A request is cut to fit a model: prompt and output together may have `max_model_len` tokens. If they have more, the one
that is longer than half of this limit is cut; if both are longer than half, both are cut to half. A prompt loses its
end. Requests are the same for every system and on every machine, with every version of Python: recorded results name a
seed. This module must not know systems or clocks.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import random
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal, NamedTuple

from corun.errors import InvalidArgumentError
from corun.params import check_seed, derive_seed, sample_seed, whole_number
from corun_bench.datasets import read_blazedit, read_burstgpt, read_sharegpt
from corun_bench.driver import Request, Workload
from corun_bench.options import to_number
from router.text import Tokenizer

Kind = Literal["synthetic", "burstgpt", "sharegpt", "blazedit"]
Tokenize = Callable[[str], "list[int]"]

PAPER = ("in=512,out=256", "in=2048,out=64", "in=128,out=1024", "in=4096,out=128", "burstgpt", "blazedit")
"""The paper's six configurations (Fig. "throughput"). The paper's text names BurstGPT, Blazedit and 4096/128. The other
three lengths are only in its figure; here they are those that the project measures (docs/benchmarks.md)."""
FORMS = "in=TOKENS,out=TOKENS or burstgpt, sharegpt, blazedit, each with ,rl=PROMPTSxSAMPLES if wanted; or paper"
"""The forms of a workload's name, for errors."""
MAX_LENGTH = 2**20
"""The most tokens of a length; more is taken for a typing error."""
MAX_SAMPLES = 2**16
FIRST_TOKEN = 3
"""Random tokens are in [3, vocabulary): the first few are special in most vocabularies."""
ONE_TOKEN = FIRST_TOKEN + 1
"""The smallest vocabulary. It makes prompts quickly for those who need only their lengths: all tokens are the same."""
BLAZEDIT_OUTPUT_TOKENS = 4000
"""vLLM's output length for Blazedit: about 10,000 characters of code, and a margin."""
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""vLLM's limits on ShareGPT (is_valid_sequence in vllm/benchmarks/datasets): other conversations are left out."""
_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "synthetic": frozenset({"in", "out", "rate", "rl"}),
    "burstgpt": frozenset({"model", "rate", "rl"}),
    "sharegpt": frozenset({"out", "rate", "rl"}),
    "blazedit": frozenset({"out", "rate", "rl"}),
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A workload as it was named."""

    text: str
    """The user's text, without blanks."""
    kind: Kind
    path: Path | None = None
    """The user's file; None: no file, or the built-in sample."""
    input_len: int = 0
    """Tokens of every prompt; 0: as the data set has it."""
    output_len: int = 0
    """Tokens of every output; 0: as the data set has it."""
    prompts: int = 0
    """Prompts of a rollout; 0: as many as there are requests."""
    samples: int = 1
    model: str = ""
    """BurstGPT: rows of this model only; empty: all rows."""
    rate: float = 0.0
    """Requests a second; 0: the command's rate."""

    @property
    def name(self) -> str:
        """The workload's name in results: the text, with a file's name in place of its path."""
        if self.path is None:
            return self.text
        file = f"{self.kind}={self.path.name}"
        return ",".join(file if part.startswith(f"{self.kind}=") else part for part in self.text.split(","))

    @property
    def is_text(self) -> bool:
        """Whether prompts are text, for which a tokenizer is needed."""
        return self.kind in {"sharegpt", "blazedit"}


def parse(spec: str) -> Spec:
    """Read one workload; raises InvalidArgumentError that names the wrong part."""
    fields: dict[str, str] = {}
    for part in spec.split(","):
        key, has_value, value = (text.strip() for text in part.partition("="))
        if not key or (has_value and not value) or (not has_value and key not in _OPTIONS):
            raise InvalidArgumentError("workloads", spec, f"{part.strip()!r} must be KEY=VALUE in {FORMS}")
        if key in fields:
            raise InvalidArgumentError("workloads", spec, f"names {key!r} twice")
        fields[key] = value
    text = ",".join(f"{key}={value}" if value else key for key, value in fields.items())
    kinds: list[Kind] = [kind for kind in _OPTIONS if kind in fields and kind != "synthetic"]
    if len(kinds) > 1:
        raise InvalidArgumentError("workloads", spec, f"names more than one data set: {', '.join(kinds)}")
    kind: Kind = kinds[0] if kinds else "synthetic"
    path = fields.pop(kind, "")
    if unknown := [key for key in fields if key not in _OPTIONS[kind]]:
        limit = f"{unknown[0]!r} is no part of a {kind} workload, which has {', '.join(sorted(_OPTIONS[kind]))}"
        raise InvalidArgumentError("workloads", spec, limit)
    if kind == "synthetic" and not {"in", "out"} <= set(fields):
        raise InvalidArgumentError("workloads", spec, f"must be {FORMS}")
    rollout = fields.get("rl", "")
    prompts, _, samples = rollout.partition("x")
    return Spec(
        text=text,
        kind=kind,
        path=Path(path) if path else None,
        input_len=_integer("in", fields["in"], fields["in"], MAX_LENGTH) if "in" in fields else 0,
        output_len=_integer("out", fields["out"], fields["out"], MAX_LENGTH) if "out" in fields else 0,
        prompts=_integer("rl", rollout, prompts, MAX_SAMPLES) if rollout else 0,
        samples=_integer("rl", rollout, samples, MAX_SAMPLES) if rollout else 1,
        model=fields.get("model", ""),
        rate=_rate(fields["rate"]) if "rate" in fields else 0.0,
    )


def expand(specs: Iterable[str]) -> tuple[Spec, ...]:
    """Return the workloads of a command line, in order and each once; "paper" stands for six."""
    found: dict[str, Spec] = {}
    for text in specs:
        for parsed in (parse(part) for part in (PAPER if text.strip() == "paper" else (text,))):
            if found.setdefault(parsed.name, parsed) != parsed:
                raise InvalidArgumentError("workloads", text, f"two files would both be called {parsed.name!r}")
    if not found:
        raise InvalidArgumentError("workloads", "", "must name at least one workload")
    return tuple(found.values())


def _integer(key: str, shown: str, digits: str, maximum: int) -> int:
    number = whole_number(digits)
    if number is None or not 1 <= number <= maximum:
        form = "PROMPTSxSAMPLES, both" if key == "rl" else "a number"
        raise InvalidArgumentError(key, shown, f"must be {form} in [1, {maximum}]")
    return number


def _rate(digits: str) -> float:
    if not 0 < (found := to_number(digits)) < math.inf:
        raise InvalidArgumentError("rate", digits, "must be a number of requests a second, above 0")
    return found


class _Sample(NamedTuple):
    """A prompt, and the number of tokens to draw after it."""

    prompt: tuple[int, ...]
    output_len: int


def tokenizer(model: str) -> Tokenize:
    """Return the function that tokenizes for a model. It loads the model's tokenizer when it is first called."""
    load = functools.cache(lambda: Tokenizer.load(model))
    return lambda text: list(load().encode(text))


def make(
    spec: Spec,
    *,
    num_requests: int,
    vocab_size: int,
    max_model_len: int,
    seed: int,
    tokenize: Tokenize,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    opening: str = "",
) -> Workload:
    """Return the workload of a spec; a rollout has its own number of requests, whatever `num_requests` is.

    What had to be changed is logged: requests that were cut, records left out, prompts used again. The spec's own rate
    goes before `request_rate`; an infinite one is a closed loop. `tokenize` gets raw text: no chat template is applied.
    `opening` begins each prompt of text, so that prefix caches know none of those with another one.
    The numbers are those of checked options (`corun_bench.options`). Raises InvalidArgumentError for a file of another
    shape.
    """
    request_rate = spec.rate or request_rate
    maker = _Maker(spec, vocab_size, seed, tokenize, opening)
    made = maker.samples(spec.prompts or num_requests)
    fitted = []
    for sample in made:
        input_len, output_len = fit(len(sample.prompt), sample.output_len, max_model_len)
        fitted.append(_Sample(sample.prompt[:input_len], output_len))
    clipped = sum(before != after for before, after in zip(made, fitted, strict=True)) * spec.samples
    for count, what in (
        (clipped, f"requests cut to {max_model_len} tokens"),
        (maker.left_out, "records left out"),
        (maker.repeated, "prompts used again"),
    ):
        if count:
            _log.warning("workload %s: %d %s", spec.name, count, what)
    requests: list[Request] = []
    total = len(made) * spec.samples
    arrivals = iter(gamma(total, request_rate=request_rate, burstiness=burstiness, seed=seed))
    for number, sample in enumerate(fitted):
        # Samples of one prompt are neighbours; each has a seed of its own.
        own_seed = derive_seed(seed.to_bytes(8, "little"), f"{spec.name}/{number}")
        for place, arrival_s in enumerate(islice(arrivals, spec.samples)):
            requests.append(
                Request(
                    index=len(requests),
                    prompt_token_ids=sample.prompt,
                    max_tokens=sample.output_len,
                    seed=sample_seed(own_seed, place),
                    place=place,
                    arrival_s=arrival_s,
                )
            )
    return Workload(name=spec.name, requests=tuple(requests), request_rate=request_rate)


def fit(input_len: int, output_len: int, max_model_len: int) -> tuple[int, int]:
    """Return the lengths that a request gets; the module's docstring has the rule."""
    input_len = min(input_len, max(max_model_len - output_len, max_model_len // 2))
    return input_len, min(output_len, max_model_len - input_len)


class _Maker:
    """Makes prompts in their order, with lengths as the data set has them."""

    def __init__(self, spec: Spec, vocab_size: int, seed: int, tokenize: Tokenize, opening: str) -> None:
        self.left_out = 0
        """The number of records that cannot be used: failed, too short or too long, of another model or shape."""
        self.repeated = 0
        """The number of prompts that are used again, because the data set has too few."""
        self._spec, self._vocab_size, self._seed, self._tokenize = spec, vocab_size, seed, tokenize
        self._opening = opening

    def samples(self, count: int) -> list[_Sample]:
        if self._spec.kind == "sharegpt":
            return self._sharegpt(count)
        if self._spec.kind == "blazedit":
            return self._blazedit(count)
        lengths = [(self._spec.input_len, self._spec.output_len)] * count
        if self._spec.kind == "burstgpt":  # Only the lengths are the trace's; its rows are picked at random.
            rows, self.left_out = read_burstgpt(self._spec.path, self._spec.model)
            lengths = [rows[row] for row in self._pick(len(rows), count)]
        return [_Sample(self._random(i, prompt), output) for i, (prompt, output) in enumerate(lengths)]

    def _sharegpt(self, count: int) -> list[_Sample]:
        turns, self.left_out = read_sharegpt(self._spec.path)
        samples: list[_Sample] = []
        for row in self._pick(len(turns), len(turns)):
            if len(samples) == count:
                break
            said, answered = turns[row]
            prompt, answer = tuple(self._tokens(self._opening + said)), len(self._tokens(answered))
            output_len = self._spec.output_len or answer
            fits = len(prompt) <= MAX_PROMPT_TOKENS and len(prompt) + output_len <= MAX_TOTAL_TOKENS
            # A length that the user gave may be short: vLLM checks only what the data set has.
            is_long = len(prompt) >= MIN_TOKENS and (self._spec.output_len or answer >= MIN_TOKENS)
            if fits and is_long:
                samples.append(_Sample(prompt, output_len))
            else:
                self.left_out += 1
        return samples + [samples[i] for i in self._pick(len(samples), count)[len(samples) :]]

    def _blazedit(self, count: int) -> list[_Sample]:
        """Return the tasks of edit records. The words are ours, so their lengths differ a little from vLLM's."""
        edits, self.left_out = read_blazedit(self._spec.path)
        samples = []
        for i, row in enumerate(self._pick(len(edits), count)):
            # A record that is used again starts differently, so that no prefix cache knows it.
            again = f"Once more, {i // len(edits)}. " if i >= len(edits) else ""
            code, change = edits[row]
            text = (
                f"{self._opening}{again}Here is a file:\n```\n{code}\n```\nChange it as follows:\n"
                f"{change}\nAnswer with the whole new file and nothing else.\n"
            )
            samples.append(_Sample(tuple(self._tokens(text)), self._spec.output_len or BLAZEDIT_OUTPUT_TOKENS))
        return samples

    def _random(self, number: int, length: int) -> tuple[int, ...]:
        if self._vocab_size == ONE_TOKEN:
            return (FIRST_TOKEN,) * length
        drawn = integers(self._seed, f"{self._spec.name}/prompt/{number}", length, self._vocab_size - FIRST_TOKEN)
        return tuple(FIRST_TOKEN + value for value in drawn)

    def _pick(self, size: int, count: int) -> list[int]:
        if size == 0:
            raise InvalidArgumentError("workloads", self._spec.text, "has no usable record")
        self.repeated = max(0, count - size)
        return pick(self._seed, f"{self._spec.name}/rows", size, count)

    def _tokens(self, text: str) -> list[int]:
        tokens = self._tokenize(text)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise InvalidArgumentError("tokenize", max(tokens), f"must be below the vocabulary's {self._vocab_size}")
        return tokens


# Arrivals follow `vllm bench serve` (get_request in vllm/benchmarks/serve.py): gaps have a gamma distribution, and all
# times are scaled so that the last request of n is sent at n / request_rate. The rate is then the same for every seed,
# and only the bursts differ.


def gamma(count: int, *, request_rate: float, burstiness: float = 1.0, seed: int) -> list[float]:
    """Return `count` times, all of them 0 at an infinite rate.

    Burstiness 1 is a Poisson process, less is burstier, more is more even, inf is constant.
    """
    if math.isinf(burstiness):
        return [(i + 1) / request_rate for i in range(count)]
    draw = random.Random(int.from_bytes(_key(seed, "arrivals"), "little"))
    times = list(accumulate(draw.gammavariate(burstiness, 1.0) for _ in range(count)))
    if not times or times[-1] == 0:  # Gaps may be so bursty that all of them round to 0.
        return times
    return [at * (count / request_rate / times[-1]) for at in times]


# Draws with different labels are independent, so one more draw anywhere changes no other.


def integers(seed: int, label: str, count: int, below: int) -> list[int]:
    """Return `count` evenly distributed integers in [0, below): SHAKE-256 of seed and label, 64 bits each."""
    stream = hashlib.shake_256(_key(seed, label)).digest(8 * count)
    return [value * below >> 64 for value in struct.unpack(f"<{count}Q", stream)]


def pick(seed: int, label: str, size: int, count: int) -> list[int]:
    """Return `count` indices of [0, size) in a random order; if too few, all of them again in another order."""
    picked: list[int] = []
    while len(picked) < count:
        moved: dict[int, int] = {}  # Fisher-Yates without the whole list: a data set may have millions of rows.
        values = integers(seed, f"{label}/{len(picked)}", min(size, count - len(picked)), 1 << 64)
        for i, value in enumerate(values):
            j = i + (value * (size - i) >> 64)
            picked.append(moved.get(j, j))
            moved[j] = moved.get(i, i)
    return picked


def _key(seed: int, label: str) -> bytes:
    text = label.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(struct.pack("<Q", check_seed(seed)) + text, person=b"corun.bench", digest_size=32).digest()
