"""The result file of a benchmark: one JSON object. It is written whole, and its schema is checked.

    {"schema": "corun-bench-1", "command": [word, …],
     "conditions": {"date", "hardware": {…}, "versions": {…}, "clocks": {…}, "model"},
     "systems": [{"system", "gpus": {"prefill", "decode", "total"}, "slots", "ready_s", "memory": {process: MiB},
                  "gpu_memory": {…}, "fingerprint", "settings": {…},
                  "handoff": {"count", "bytes", "failed", "mean_ms", "gb_per_s"} | null}],
     "runs": [{"system", "workload", "repeat", …corun_bench.metrics.summarize…}],
     "mismatches": [{"system", "workload", "requests", "different_tokens", "different_bits", "tokens_only", "rate"}]}

The result file of `corun bench kernels` is read here as well, because a report shows both: {"schema":
"corun-bench-kernels-1", "kernels": [{"kernel", "variant", …}], …}. A handoff is the reading of one prompt's KV by a
decode node. This module must not know how anything was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError, Shown
from corun_bench.metrics import Mismatch, Spread, spread

SCHEMA = "corun-bench-1"
KERNELS_SCHEMA = "corun-bench-kernels-1"
Json = dict[str, Any]
"""A JSON object in a file."""
Result = dict[str, Any]
"""The whole content of a file."""
Cell = tuple[str, str]
"""A pair (workload, system)."""

_PARTS: Mapping[str, Mapping[str, type]] = {
    SCHEMA: {"command": list, "conditions": dict, "systems": list, "runs": list, "mismatches": list},
    KERNELS_SCHEMA: {"kernels": list},
}
_NAMED: Mapping[str, tuple[str, ...]] = {
    "systems": ("system",),
    "runs": ("system", "workload"),
    "mismatches": ("system", "workload"),
    "kernels": ("kernel", "variant"),
}
_COUNTS = ("requests", "different_tokens", "different_bits", "tokens_only")
_TOO_LARGE = 1e300  # Python reads infinities, NaN and integers of any size from JSON.
_COMPARED_CONDITIONS = ("hardware", "versions", "model")
_COMPARED_SETTINGS = ("gpus", "slots", "settings")


def write(path: Path, result: Result) -> None:
    """Write a line of JSON: the file appears in full or not at all. Raises InvalidArgumentError for another schema."""
    text = json.dumps(_checked(path, result, (SCHEMA,)), allow_nan=False, separators=(",", ":"))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path, schemas: Sequence[str] = (SCHEMA,)) -> Result:
    """Read a result file; raises InvalidArgumentError if it has none of these schemas, OSError if it is unreadable."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # It is not UTF-8, or not JSON.
        raise InvalidArgumentError("result", str(path), "is not JSON") from None
    return _checked(path, result, schemas)


def group(rows: Iterable[Json]) -> dict[Cell, list[Json]]:
    """Return the rows of each workload on each system, in the file's order."""
    cells: dict[Cell, list[Json]] = {}
    for row in rows:
        cells.setdefault((row["workload"], row["system"]), []).append(row)
    return cells


def spread_of(runs: Iterable[Mapping[str, Any]], key: str) -> Spread | None:
    """Return the spread of one metric over repeats; None if no repeat has it."""
    values = [value for run in runs if (value := number(run, key)) is not None]
    return spread(values) if values else None


def median_of(runs: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Return the median of one metric over repeats; None if no repeat has it."""
    found = spread_of(runs, key)
    return found.median if found else None


def mismatch_of(rows: Iterable[Json]) -> Mismatch | None:
    """Return several comparisons as one; None if nothing was compared."""
    sums = dict.fromkeys(_COUNTS, 0)
    for row in rows:
        sums = {key: count + whole(row, key) for key, count in sums.items()}
    return Mismatch(not_compared=(), **sums) if sums["requests"] else None


def mismatch_rates(result: Result) -> dict[Cell, float | None]:
    """Return the share of compared requests that differ, for each cell in which something was compared."""
    found = {cell: mismatch_of(rows) for cell, rows in group(result["mismatches"]).items()}
    return {cell: mismatch.rate for cell, mismatch in found.items() if mismatch}


def differing_conditions(first: Result, second: Result) -> dict[str, tuple[str, str]]:
    """Return what makes two results hard to compare: hardware, versions, model, settings of systems that both have."""
    a, b = _conditions(first), _conditions(second)
    shared = {name for name in a.keys() | b.keys() if _system(name) in _systems(a) & _systems(b)}
    pairs = {name: (a.get(name, "none"), b.get(name, "none")) for name in sorted(shared)}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def number(values: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number of a JSON object; None if there is none under this key."""
    return _finite(values.get(key))


def numbers(values: Mapping[str, Any], key: str) -> list[float]:
    """Return the finite numbers of a JSON list; empty if there is no list under this key."""
    found = values.get(key)
    items = found if isinstance(found, list) else []
    return [value for item in items if (value := _finite(item)) is not None]


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


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _TOO_LARGE else None


def _conditions(result: Result) -> dict[str, str]:
    conditions = {name: result["conditions"].get(name) for name in _COMPARED_CONDITIONS}
    for row in result["systems"]:
        settings = {name: row.get(name) for name in _COMPARED_SETTINGS}
        conditions |= {f"{row['system']}: {name}": value for name, value in settings.items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in leaves(conditions)}


def _systems(flat: Iterable[str]) -> set[str]:
    return {_system(name) for name in flat}


def _system(name: str) -> str:
    """Return the system that a condition belongs to; empty if it belongs to the whole run."""
    return name.partition(": ")[0] if ": " in name else ""


def _checked(path: Path, result: Any, schemas: Sequence[str]) -> Result:
    schema = result.get("schema") if isinstance(result, dict) else None
    if not isinstance(schema, str) or schema not in schemas:
        raise InvalidArgumentError("schema", schema, f"must be {' or '.join(map(repr, schemas))} in {path.name}")
    for part, kind in _PARTS[schema].items():
        if not isinstance(result.get(part), kind):
            raise _wrong(path, part, f"must be a JSON {'object' if kind is dict else 'list'}")
    for part in (part for part in _NAMED if part in _PARTS[schema]):
        for i, row in enumerate(result[part]):
            if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _NAMED[part]):
                raise _wrong(path, f"{part}[{i}]", f"must be an object with {' and '.join(_NAMED[part])}")
    return dict(result)


def _wrong(path: Path, field: str, limit: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, Shown(f"in {path.name}"), limit)
