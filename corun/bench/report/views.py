"""What tables and figures show: plain numbers out of result files, several files merged into one.

Owns which runs stand for a system on a workload. This module must not know how anything is drawn or measured.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError

SCHEMA = "corun-bench-1"
STD = "std"
ORDER = (STD, "std+nosplit", "std+isolated", "bi", "colocated", "pd-std", "cluster", "cluster:1p1d", "cluster:shared")
"""Known systems in the order in which they are shown; others follow as the files name them."""

Json = dict[str, Any]

_TOO_LARGE = 1e300  # JSON has infinities, NaN and integers of any size.
_ABLATION = "std+"
_PADDING = re.compile(r"padding=(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One number over all repeats."""

    median: float
    low: float
    high: float
    count: int

    def over(self, unit: float) -> Spread:
        """The same numbers in multiples of `unit`."""
        return Spread(median=self.median / unit, low=self.low / unit, high=self.high / unit, count=self.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Requests that were run again in another crowd, and how many came out otherwise."""

    requests: int
    different_tokens: int
    different_bits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything that some result files say; lists of the files' own JSON objects."""

    documents: tuple[Json, ...] = ()
    systems: tuple[Json, ...] = ()
    runs: tuple[Json, ...] = ()
    mismatches: tuple[Json, ...] = ()
    kernels: tuple[Json, ...] = ()

    @property
    def names(self) -> list[str]:
        """All systems, in the order in which they are shown."""
        return in_order([*_texts(self.runs, "system"), *_texts(self.systems, "system")])

    @property
    def workloads(self) -> list[str]:
        """All workloads but the steps of a padding sweep, as the files name them."""
        return [name for name in _unique(_texts(self.runs, "workload")) if padding_of(name) is None]

    def runs_of(self, workload: str, system: str, concurrency: float | None = None) -> list[Json]:
        """Repeats of one cell; None: at the concurrency that stands for the workload."""
        wanted = self.concurrency(workload) if concurrency is None else concurrency
        return [
            run
            for run in self.runs
            if (run["workload"], run["system"]) == (workload, system) and _concurrency(run) == wanted
        ]

    def concurrency(self, workload: str) -> float:
        """The concurrency that stands for a workload: the one that most systems ran, and of those the largest."""
        systems: dict[float, set[str]] = {}
        for run in self.runs:
            if run["workload"] == workload:
                systems.setdefault(_concurrency(run), set()).add(run["system"])
        return max(systems, key=lambda value: (len(systems[value]), value), default=0.0)

    def concurrencies(self, workload: str) -> list[float]:
        """All concurrencies of a workload, the smallest first; 0 is none set."""
        return sorted({_concurrency(run) for run in self.runs if run["workload"] == workload})

    def mismatch(self, system: str, workload: str | None = None) -> Mismatch | None:
        """What running requests again gave, of one workload or of all; None: that was not done."""
        found = [
            [whole(entry, key) for key in ("requests", "different_tokens", "different_bits")]
            for entry in self.mismatches
            if entry["system"] == system and workload in {None, entry["workload"]}
        ]
        if not sum(requests for requests, _, _ in found):
            return None
        requests, tokens, bits = (sum(column) for column in zip(*found, strict=True))
        return Mismatch(requests=requests, different_tokens=tokens, different_bits=bits)

    def gpus(self, system: str) -> int:
        """All GPUs of a system; 0: it has none, or the files do not say."""
        of_system = (entry for entry in self.systems if entry["system"] == system)
        return next((whole(mapping(entry, "gpus"), "total") for entry in of_system), 0)


def read(path: Path) -> Json:
    """One result file. Raises InvalidArgumentError where it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(str(path), str(error), "must be JSON") from error
    if not isinstance(document, dict):
        raise InvalidArgumentError(str(path), type(document).__name__, "must be a JSON object")
    if document.get("schema") != SCHEMA and "kernels" not in document:
        raise InvalidArgumentError(f"{path}: schema", document.get("schema"), f"must be {SCHEMA}")
    return document


def merge(documents: Mapping[str, Json]) -> Results:
    """Files by their names as one result. Raises InvalidArgumentError if they cannot be compared."""
    _check_models(documents)
    results = Results(
        documents=tuple({**document, "file": file} for file, document in documents.items()),
        systems=_concatenated(documents, "systems", ("system",)),
        runs=_concatenated(documents, "runs", ("system", "workload")),
        mismatches=_concatenated(documents, "mismatches", ("system", "workload")),
        kernels=_concatenated(documents, "kernels", ("kernel", "variant")),
    )
    _check_gpus(results)
    return results


def in_order(names: Iterable[str]) -> list[str]:
    """Each name once: known systems first, variants of the cluster next, foreign ones last."""
    unique = _unique(names)
    known = [name for name in ORDER if name in unique]
    variants = [name for name in unique if name.startswith("cluster:") and name not in known]
    return [*known, *variants, *(name for name in unique if name not in {*known, *variants})]


def is_ablation(system: str) -> bool:
    """Is it STD with one of CoRun's constraints, and not a system that anybody would serve with?"""
    return system.startswith(_ABLATION)


def padding_of(workload: str) -> int | None:
    """N of a workload "padding=N": one request, and steps of N rows."""
    match = _PADDING.fullmatch(workload)
    return int(match[1]) if match else None


def spread(runs: Sequence[Json], key: str) -> Spread | None:
    """A number over repeats; None if no run has it."""
    values = [value for run in runs if (value := number(run, key)) is not None]
    if not values:
        return None
    return Spread(median=statistics.median(values), low=min(values), high=max(values), count=len(values))


def median(runs: Sequence[Json], key: str) -> float | None:
    found = spread(runs, key)
    return found.median if found else None


def number(values: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a JSON object; None if there is none under this key."""
    return _finite(values.get(key))


def numbers(values: Mapping[str, Any], key: str) -> list[float]:
    """The finite numbers of a JSON list; empty if there is no list under this key."""
    found = values.get(key)
    items = found if isinstance(found, list) else []
    return [value for item in items if (value := _finite(item)) is not None]


def whole(values: Mapping[str, Any], key: str) -> int:
    """A count of a JSON object; 0 if there is none under this key."""
    return round(number(values, key) or 0)


def mapping(values: Mapping[str, Any], key: str) -> Json:
    """An object within a JSON object; empty if there is none under this key."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _TOO_LARGE else None


def _concurrency(run: Json) -> float:
    return number(run, "max_concurrency") or 0.0


def _texts(entries: Iterable[Json], key: str) -> list[str]:
    return [entry[key] for entry in entries]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _concatenated(documents: Mapping[str, Json], key: str, names: tuple[str, ...]) -> tuple[Json, ...]:
    entries: list[Json] = []
    for file, document in documents.items():
        found = document.get(key) or []
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise InvalidArgumentError(f"{file}: {key}", type(found).__name__, "must be a list of JSON objects")
        for entry in found:
            _check_names(entry, names, f"{file}: {key}")
        entries += found
    return tuple(entries)


def _check_names(entry: Json, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if not isinstance(entry.get(name), str):
            raise InvalidArgumentError(f"{where}: {name}", entry.get(name), "must be text")


def _check_models(documents: Mapping[str, Json]) -> None:
    models = {file: mapping(document, "conditions").get("model") for file, document in documents.items()}
    named = {file: model for file, model in models.items() if model is not None}
    for file, model in named.items():
        first = next(iter(named))
        if model != named[first]:
            limit = f"must be the model of all files, and {first} has {named[first]!r}"
            raise InvalidArgumentError(f"{file}: model", model, limit)


def _check_gpus(results: Results) -> None:
    """Repeats on one GPU and on two are no repeats of each other."""
    for entry in results.systems:
        total = whole(mapping(entry, "gpus"), "total")
        if total != (first := results.gpus(entry["system"])):
            limit = f"must be {first} as in the other file: a system stands for one number of GPUs"
            raise InvalidArgumentError(f"system {entry['system']}: gpus", total, limit)
