"""The result file of a benchmark: one JSON object. It is written whole, and its schema is checked.

    {"schema": "corun-bench-1", "command": [word, …],
     "conditions": {"date", "hardware": {…}, "versions": {…}, "clocks": {…}, "model"},
     "systems": [{"system", "gpus": {"prefill", "decode", "total"}, "slots", "ready_s", "memory": {process: MiB},
                  "gpu_memory": {…}, "fingerprint", "settings": {…},
                  "handoff": {"count", "bytes", "failed", "mean_ms", "gb_per_s"} | null}],
     "runs": [{"system", "workload", "repeat", …corun_bench.metrics.summarize…}],
     "mismatches": [{"system", "workload", "against", "requests", "different_tokens", "different_bits", "tokens_only",
                     "rate"}]}

The result file of `corun bench kernels` is read here as well, because a report shows both: {"schema":
"corun-bench-kernels-1", "kernels": [{"kernel", "variant", …}], …}. A handoff is the reading of one prompt's KV by a
decode node. Owns which runs stand for a system on a workload. This module must not know how anything was measured or
is drawn.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from corun.errors import InvalidArgumentError, Shown
from corun_bench.systems import KINDS

SCHEMA = "corun-bench-1"
KERNELS_SCHEMA = "corun-bench-kernels-1"
STD = "std"
PLACEMENTS = ("cluster", "cluster:1p1d", "cluster:shared", "cluster:colocated")
"""The placements of the kind that has several, in the order in which they are shown; other placements follow."""
Json = dict[str, Any]
"""A JSON object in a file, or the whole content of a file."""

_PARTS = {SCHEMA: ("command", "conditions", "systems", "runs", "mismatches"), KERNELS_SCHEMA: ("kernels",)}
_NAMED: Mapping[str, tuple[str, ...]] = {
    "systems": ("system",),
    "runs": ("system", "workload"),
    "mismatches": ("system", "workload"),
    "kernels": ("kernel", "variant"),
}
_TOO_LARGE = 1e300  # Python reads infinities, NaN and integers of any size from JSON.
_PADDING = re.compile(r"padding=(\d+)")


class Load(NamedTuple):
    """What repeats have in common."""

    workload: str
    concurrency: float = 0.0
    """The requests in flight; 0 if no number was set."""
    rate: float = 0.0
    """The requests that are sent a second; 0 in a closed loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The spread of one measurement over its repeats."""

    median: float
    min: float
    max: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one repeat."""
        return cls(median=statistics.median(values), min=min(values), max=max(values), repeats=len(values))

    def over(self, unit: float) -> Spread:
        """Return the same numbers in multiples of `unit`."""
        return Spread(median=self.median / unit, min=self.min / unit, max=self.max / unit, repeats=self.repeats)


def mismatch_rate(row: Mapping[str, Any]) -> float | None:
    """Return the share of the compared requests that differ; None if no request was compared."""
    return row["different_bits"] / row["requests"] if row["requests"] else None


def write(path: Path, result: Json) -> None:
    """Write a line of JSON: the file appears in full or not at all."""
    text = json.dumps(result, allow_nan=False, separators=(",", ":"))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path, schemas: Sequence[str] = (SCHEMA,)) -> Json:
    """Read a result file; raises InvalidArgumentError if it has none of these schemas, OSError if it is unreadable."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # It is not UTF-8, or not JSON.
        raise InvalidArgumentError("result", str(path), "is not JSON") from None

    def wrong(field: str, limit: str) -> InvalidArgumentError:
        return InvalidArgumentError(field, Shown(f"in {path.name}"), limit)

    schema = result.get("schema") if isinstance(result, dict) else None
    if not isinstance(schema, str) or schema not in schemas:
        raise InvalidArgumentError("schema", schema, f"must be {' or '.join(map(repr, schemas))} in {path.name}")
    for part in _PARTS[schema]:
        kind = dict if part == "conditions" else list
        if not isinstance(result.get(part), kind):
            raise wrong(part, f"must be a JSON {'object' if kind is dict else 'list'}")
        for i, row in enumerate(result[part] if part in _NAMED else ()):
            if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _NAMED[part]):
                raise wrong(f"{part}[{i}]", f"must be an object with {' and '.join(_NAMED[part])}")
    return dict(result)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """The whole content of some result files, as tuples of the files' own JSON objects."""

    documents: tuple[Json, ...] = ()
    systems: tuple[Json, ...] = ()
    runs: tuple[Json, ...] = ()
    mismatches: tuple[Json, ...] = ()
    kernels: tuple[Json, ...] = ()

    @property
    def names(self) -> list[str]:
        """All systems, in the order in which they are shown."""
        return in_order(row["system"] for row in (*self.runs, *self.systems))

    @property
    def workloads(self) -> list[str]:
        """All workloads except the steps of a padding sweep, as the files name them."""
        return [name for name in dict.fromkeys(run["workload"] for run in self.runs) if padding_of(name) is None]

    def runs_of(self, workload: str, system: str, concurrency: float | None = None) -> list[Json]:
        """Return the repeats of a system on a workload; concurrency None: of the load that stands for the workload."""
        runs = [run for run in self.runs if (run["workload"], run["system"]) == (workload, system)]
        if concurrency is None:
            load = self._load(workload)
            return [run for run in runs if load_of(run) == load]
        return [run for run in runs if load_of(run).concurrency == concurrency]

    def concurrency(self, workload: str) -> float:
        """Return the concurrency that stands for a workload."""
        return self._load(workload).concurrency

    def _load(self, workload: str) -> Load:
        """Return the load that most systems ran; of several, one of a closed loop, or else the largest."""
        systems: dict[Load, set[str]] = {}
        for run in self.runs:
            if run["workload"] == workload:
                systems.setdefault(load_of(run), set()).add(run["system"])
        return max(systems, key=lambda load: (len(systems[load]), not load.rate, *load), default=Load(workload))

    def concurrencies(self, workload: str) -> list[float]:
        """Return all concurrencies of a workload, the smallest first; 0 means that none was set."""
        return sorted({load_of(run).concurrency for run in self.runs if run["workload"] == workload})

    def mismatch(self, system: str, workload: str | None = None) -> dict[str, int] | None:
        """Return how many requests ran again and how many had other bits, for one workload or all; None if none did."""
        rows = [row for row in self.mismatches if row["system"] == system and workload in {None, row["workload"]}]
        sums = {key: sum(whole(row, key) for row in rows) for key in ("requests", "different_bits")}
        return sums if sums["requests"] else None

    def gpus(self, system: str) -> int:
        """Return the number of all GPUs of a system; 0 if it has none, or if the files do not say."""
        of_system = (entry for entry in self.systems if entry["system"] == system)
        return next((whole(mapping(entry, "gpus"), "total") for entry in of_system), 0)


def merge(documents: Mapping[str, Json]) -> Results:
    """Merge the files of `read`, by file name.

    Raises InvalidArgumentError if they have different models, or a system with different numbers of GPUs: such runs are
    not repeats of each other. Files of kernels name their model in another way, and no system is compared with them.
    """
    models = {
        file: mapping(document, "conditions").get("model")
        for file, document in documents.items()
        if document.get("schema") == SCHEMA
    }
    named = {file: model for file, model in models.items() if model is not None}
    for file, model in named.items():
        first = next(iter(named))
        if model != named[first]:
            limit = f"must be the model of all files, and {first} has {named[first]!r}"
            raise InvalidArgumentError(f"{file}: model", model, limit)
    parts = {part: tuple(row for found in documents.values() for row in found.get(part, ())) for part in _NAMED}
    files = tuple({**document, "file": file} for file, document in documents.items())
    results = Results(documents=files, **parts)
    for entry in results.systems:
        total = whole(mapping(entry, "gpus"), "total")
        if total != (first_total := results.gpus(entry["system"])):
            limit = f"must be {first_total} as in the other file: a system stands for one number of GPUs"
            raise InvalidArgumentError(f"system {entry['system']}: gpus", total, limit)
    return results


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once, sorted by kind and then by placement. Foreign systems come last, in their order."""

    def place(known: Sequence[str], name: str) -> int:
        return known.index(name) if name in known else len(known)

    return sorted(
        dict.fromkeys(names), key=lambda name: (place([*KINDS], name.partition(":")[0]), place(PLACEMENTS, name))
    )


def is_ablation(system: str) -> bool:
    """Return whether a system is STD with some of CoRun's constraints, which is not meant for serving."""
    return system.startswith("std+")


def padding_of(workload: str) -> int | None:
    """Return N of a workload "padding=N" (one request, and steps of N rows); None for any other workload."""
    match = _PADDING.fullmatch(workload)
    return int(match[1]) if match else None


def load_of(run: Json) -> Load:
    """Return the load of a run."""
    return Load(run["workload"], number(run, "max_concurrency") or 0.0, number(run, "request_rate") or 0.0)


def spread_of(runs: Iterable[Json], key: str) -> Spread | None:
    """Return the spread of one metric over repeats; None if no repeat has it."""
    values = [value for run in runs if (value := number(run, key)) is not None]
    return Spread.of(values) if values else None


def good_share(runs: Iterable[Json]) -> Spread | None:
    """Return which share of the requests kept all limits of `--goodput`; None if no repeat had limits."""
    shares = []
    for run in runs:
        good_per_s, duration_s = number(run, "request_goodput"), number(run, "duration")
        requests = whole(run, "completed") + whole(run, "failed")
        if good_per_s is not None and duration_s is not None and requests:
            shares.append(good_per_s * duration_s / requests)
    return Spread.of(shares) if shares else None


def median_of(runs: Iterable[Json], key: str) -> float | None:
    """Return the median of one metric over repeats; None if no repeat has it."""
    found = spread_of(runs, key)
    return found.median if found else None


def number(values: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a JSON object; None if there is none under this key."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _TOO_LARGE else None


def numbers(values: Mapping[str, Any], key: str) -> list[float]:
    """Return the finite numbers of a JSON list; empty if there is no list under this key."""
    found = values.get(key)
    items = found if isinstance(found, list) else []
    return [value for item in items if (value := number({key: item}, key)) is not None]


def whole(values: Mapping[str, Any], key: str) -> int:
    """Return a count of a JSON object; 0 if there is none under this key."""
    return round(number(values, key) or 0)


def mapping(values: Mapping[str, Any], key: str) -> Json:
    """Return an object within a JSON object; empty if there is none under this key."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not an object, or is an empty one, with its dotted name."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
