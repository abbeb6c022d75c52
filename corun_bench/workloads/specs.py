"""The names of workloads: comma-separated `key=value`, checked in full before anything is read or started.

    in=512,out=256                 random tokens, fixed lengths
    rl=32x8,in=512,out=256         32 prompts x 8 samples: the rollout of an RL step
    burstgpt                       the built-in sample of BurstGPT's shape; burstgpt=PATH: a CSV file of BurstGPT
    sharegpt                       the built-in sample; sharegpt=PATH: a JSON file of ShareGPT
    blazedit                       the built-in sample; blazedit=PATH: JSON lines of Blazedit

`rl=PxN` can be added to each of them. BurstGPT takes `model=GPT-4` (rows of that model only, as in vLLM's benchmark)
and `arrivals=trace` (its own timestamps, at the given request rate). ShareGPT and Blazedit take `out=N` (the same
output length for all). A path must not contain a comma. This module must not know how workloads are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corun.errors import InvalidArgumentError

Kind = Literal["synthetic", "burstgpt", "sharegpt", "blazedit"]
Arrivals = Literal["gamma", "trace"]

PAPER = ("in=512,out=256", "in=2048,out=64", "in=128,out=1024", "in=4096,out=128", "burstgpt", "blazedit")
"""The paper's six configurations (Fig. "throughput"). The paper's text names BurstGPT, Blazedit and 4096/128. The other
three lengths are only in its figure; here they are those that the project measures (docs/benchmarks.md)."""

MAX_LENGTH = 2**20
"""The most tokens of a length; more is taken for a typing error."""
MAX_SAMPLES = 2**16

_OPTIONS: Mapping[str, frozenset[str]] = {
    "synthetic": frozenset({"in", "out", "rl"}),
    "burstgpt": frozenset({"model", "arrivals", "rl"}),
    "sharegpt": frozenset({"out", "rl"}),
    "blazedit": frozenset({"out", "rl"}),
}


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
    """Samples of each prompt."""
    model: str = ""
    """BurstGPT: rows of this model only; empty: all rows."""
    arrivals: Arrivals = "gamma"

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
    fields = _fields(spec)
    kinds = [key for key in fields if key in _OPTIONS and key != "synthetic"]
    if len(kinds) > 1:
        raise InvalidArgumentError("workloads", spec, f"names more than one data set: {', '.join(kinds)}")
    kind = _kind(kinds[0] if kinds else "synthetic")
    path = fields.pop(kind, "")
    unknown = [key for key in fields if key not in _OPTIONS[kind]]
    if unknown:
        known = ", ".join(sorted(_OPTIONS[kind]))
        raise InvalidArgumentError(
            "workloads", spec, f"{unknown[0]!r} is no part of a {kind} workload, which has {known}"
        )
    if kind == "synthetic" and not {"in", "out"} <= set(fields):
        raise InvalidArgumentError("workloads", spec, "must be in=TOKENS,out=TOKENS or burstgpt, sharegpt, blazedit")
    return _spec(spec, kind, Path(path) if path else None, fields)


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


def _fields(spec: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in spec.split(","):
        key, has_value, value = (text.strip() for text in part.partition("="))
        if not key or (has_value and not value) or (not has_value and key not in _OPTIONS):
            raise InvalidArgumentError("workloads", spec, f"{part.strip()!r} must be KEY=VALUE")
        if key in fields:
            raise InvalidArgumentError("workloads", spec, f"names {key!r} twice")
        fields[key] = value
    return fields


def _kind(name: str) -> Kind:
    kinds: tuple[Kind, ...] = ("synthetic", "burstgpt", "sharegpt", "blazedit")
    return next(kind for kind in kinds if kind == name)


def _spec(spec: str, kind: Kind, path: Path | None, fields: Mapping[str, str]) -> Spec:
    prompts, samples = _rollout(fields.get("rl", ""))
    arrivals = fields.get("arrivals", "gamma")
    if arrivals not in {"gamma", "trace"}:
        raise InvalidArgumentError("arrivals", arrivals, "must be gamma or trace")
    if prompts and arrivals == "trace":
        raise InvalidArgumentError("workloads", spec, "a rollout has no trace to follow")
    return Spec(
        text=",".join("=".join(word.strip() for word in part.split("=", 1)) for part in spec.split(",")),
        kind=kind,
        path=path,
        input_len=_length("in", fields),
        output_len=_length("out", fields),
        prompts=prompts,
        samples=samples,
        model=fields.get("model", ""),
        arrivals="trace" if arrivals == "trace" else "gamma",
    )


def _rollout(text: str) -> tuple[int, int]:
    """Return (prompts, samples of each); (0, 1) if there is no rollout."""
    if not text:
        return 0, 1
    prompts, _, samples = text.partition("x")
    return _integer("rl", text, prompts, MAX_SAMPLES), _integer("rl", text, samples, MAX_SAMPLES)


def _length(key: str, fields: Mapping[str, str]) -> int:
    return _integer(key, fields[key], fields[key], MAX_LENGTH) if key in fields else 0


def _integer(key: str, shown: str, digits: str, maximum: int) -> int:
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and 1 <= int(digits) <= maximum):
        form = "PROMPTSxSAMPLES, both" if key == "rl" else "a number"
        raise InvalidArgumentError(key, shown, f"must be {form} in [1, {maximum}]")
    return int(digits)
