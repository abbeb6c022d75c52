"""The file that a benchmark leaves: one JSON object, written whole, read with its schema checked.

    {"schema": "corun-bench-1", "command": [word, …],
     "conditions": {"date", "hardware": {…}, "versions": {…}, "clocks": {…}, "model"},
     "systems": [{"system", "gpus": {"prefill", "decode", "total"}, "slots", "ready_s", "memory": {process: MiB},
                  "gpu_memory": {…}, "fingerprint", "settings": {…}}],
     "runs": [{"system", "workload", "repeat", …corun.bench.metrics.summarize…,
               "handoff": {"count", "bytes", "gb_per_s", "mean_ms"} | null}],
     "mismatches": [{"system", "workload", "requests", "different_tokens", "different_bits", "rate"}]}

This module must not know how anything was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corun.bench.metrics import Spread, spread
from corun.errors import InvalidArgumentError, Shown

SCHEMA = "corun-bench-1"
Result = dict[str, Any]
Cell = tuple[str, str]
"""(workload, system)."""

_PARTS: Mapping[str, type] = {"command": list, "conditions": dict, "systems": list, "runs": list, "mismatches": list}
_NAMED: Mapping[str, tuple[str, ...]] = {
    "systems": ("system",),
    "runs": ("system", "workload"),
    "mismatches": ("system", "workload"),
}
_COMPARED_CONDITIONS = ("hardware", "versions", "model")
_COMPARED_SETTINGS = ("gpus", "slots", "settings")


def write(path: Path, result: Result) -> None:
    """One line of JSON. The file is there in full or not at all; raises InvalidArgumentError for another schema."""
    text = json.dumps(_checked(path, result), allow_nan=False, separators=(",", ":"))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> Result:
    """A file that `write` made; raises InvalidArgumentError for anything else, OSError if it cannot be read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # Neither UTF-8 nor JSON.
        raise InvalidArgumentError("result", str(path), "is not JSON") from None
    return _checked(path, result)


def group(result: Result) -> dict[Cell, list[dict[str, Any]]]:
    """The repeats of each workload on each system, in the file's order."""
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        cells.setdefault((run["workload"], run["system"]), []).append(run)
    return cells


def spread_of(runs: Iterable[Mapping[str, Any]], key: str) -> Spread | None:
    """Of one metric over repeats; None if no repeat has it."""
    values = [run[key] for run in runs if isinstance(run.get(key), (int, float))]
    return spread(values) if values else None


def mismatch_rates(result: Result) -> dict[Cell, float]:
    """Share of the compared requests that differ, over all comparisons; none where nothing was compared."""
    counts: dict[Cell, list[int]] = {}
    for row in result["mismatches"]:
        count = counts.setdefault((row["workload"], row["system"]), [0, 0])
        count[0] += int(row.get("different_bits", 0))
        count[1] += int(row.get("requests", 0))
    return {cell: different / requests for cell, (different, requests) in counts.items() if requests}


def differing_conditions(first: Result, second: Result) -> dict[str, tuple[str, str]]:
    """What makes two results hard to compare: hardware, versions, model, and settings of systems that both have."""
    a, b = _conditions(first), _conditions(second)
    shared = {name for name in a.keys() | b.keys() if _system(name) in _systems(a) & _systems(b)}
    pairs = {name: (a.get(name, "none"), b.get(name, "none")) for name in sorted(shared)}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def _conditions(result: Result) -> dict[str, str]:
    conditions = {name: result["conditions"].get(name) for name in _COMPARED_CONDITIONS}
    for row in result["systems"]:
        settings = {name: row.get(name) for name in _COMPARED_SETTINGS}
        conditions |= {f"{row['system']}: {name}": value for name, value in settings.items()}
    return dict(_flat(conditions))


def _systems(flat: Iterable[str]) -> set[str]:
    return {_system(name) for name in flat}


def _system(name: str) -> str:
    """The system that a condition belongs to; empty: to the whole run."""
    return name.partition(": ")[0] if ": " in name else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _checked(path: Path, result: Any) -> Result:
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise InvalidArgumentError("schema", schema, f"must be {SCHEMA!r} in {path.name}")
    for part, kind in _PARTS.items():
        if not isinstance(result.get(part), kind):
            raise _wrong(path, part, f"must be a JSON {'object' if kind is dict else 'list'}")
    for part, names in _NAMED.items():
        for i, row in enumerate(result[part]):
            if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in names):
                raise _wrong(path, f"{part}[{i}]", f"must be an object with {' and '.join(names)}")
    return dict(result)


def _wrong(path: Path, field: str, limit: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, Shown(f"in {path.name}"), limit)
