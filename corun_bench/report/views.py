"""The data of tables and figures: plain numbers out of result files, with several files merged into one.

Owns which runs stand for a system on a workload. This module must not know how anything is drawn or measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corun.errors import InvalidArgumentError
from corun_bench.metrics import Mismatch
from corun_bench.results import SCHEMA, Json, mapping, mismatch_of, number, whole

STD = "std"
ORDER = ("std", "std+nosplit", "std+isolated", "bi", "colocated", "colocated+ladder", "pd-std", "cluster")
"""Kinds of systems in the order in which they are shown; other systems follow in the order of the files."""
PLACEMENTS = ("cluster", "cluster:1p1d", "cluster:shared")
"""The placements of the kind that has several, in the order in which they are shown; other placements follow."""

_ABLATION = "std+"
_PADDING = re.compile(r"padding=(\d+)")


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
        return in_order([*_texts(self.runs, "system"), *_texts(self.systems, "system")])

    @property
    def workloads(self) -> list[str]:
        """All workloads except the steps of a padding sweep, as the files name them."""
        return [name for name in _unique(_texts(self.runs, "workload")) if padding_of(name) is None]

    def runs_of(self, workload: str, system: str, concurrency: float | None = None) -> list[Json]:
        """Return the repeats of a system on a workload; concurrency None: the one that stands for the workload."""
        wanted = self.concurrency(workload) if concurrency is None else concurrency
        return [
            run
            for run in self.runs
            if (run["workload"], run["system"]) == (workload, system) and _concurrency(run) == wanted
        ]

    def concurrency(self, workload: str) -> float:
        """Return the concurrency that stands for a workload: the one that most systems ran, or the largest such."""
        systems: dict[float, set[str]] = {}
        for run in self.runs:
            if run["workload"] == workload:
                systems.setdefault(_concurrency(run), set()).add(run["system"])
        return max(systems, key=lambda value: (len(systems[value]), value), default=0.0)

    def concurrencies(self, workload: str) -> list[float]:
        """Return all concurrencies of a workload, the smallest first; 0 means that none was set."""
        return sorted({_concurrency(run) for run in self.runs if run["workload"] == workload})

    def mismatch(self, system: str, workload: str | None = None) -> Mismatch | None:
        """Return the result of running requests again, for one workload or all; None if that was not done."""
        of_system = (row for row in self.mismatches if row["system"] == system)
        return mismatch_of(row for row in of_system if workload in {None, row["workload"]})

    def gpus(self, system: str) -> int:
        """Return the number of all GPUs of a system; 0 if it has none, or if the files do not say."""
        of_system = (entry for entry in self.systems if entry["system"] == system)
        return next((whole(mapping(entry, "gpus"), "total") for entry in of_system), 0)


def merge(documents: Mapping[str, Json]) -> Results:
    """Merge the files of `results.read`, by file name. Raises InvalidArgumentError if they cannot be compared."""
    _check_models(documents)
    results = Results(
        documents=tuple({**document, "file": file} for file, document in documents.items()),
        systems=_concatenated(documents, "systems"),
        runs=_concatenated(documents, "runs"),
        mismatches=_concatenated(documents, "mismatches"),
        kernels=_concatenated(documents, "kernels"),
    )
    _check_gpus(results)
    return results


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once, sorted by kind and then by placement, with foreign systems last."""
    return sorted(_unique(names), key=lambda name: (_place(ORDER, name.partition(":")[0]), _place(PLACEMENTS, name)))


def is_ablation(system: str) -> bool:
    """Return whether a system is STD with some of CoRun's constraints, which is not meant for serving."""
    return system.startswith(_ABLATION)


def padding_of(workload: str) -> int | None:
    """Return N of a workload "padding=N" (one request, and steps of N rows); None for any other workload."""
    match = _PADDING.fullmatch(workload)
    return int(match[1]) if match else None


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def _concurrency(run: Json) -> float:
    return number(run, "max_concurrency") or 0.0


def _texts(entries: Iterable[Json], key: str) -> list[str]:
    return [entry[key] for entry in entries]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _concatenated(documents: Mapping[str, Json], key: str) -> tuple[Json, ...]:
    return tuple(entry for document in documents.values() for entry in document.get(key, ()))


def _check_models(documents: Mapping[str, Json]) -> None:
    """Raise InvalidArgumentError if files have different models.

    Files of kernels are left out: no system is compared with them, and they name their model in another way.
    """
    runs = {file: document for file, document in documents.items() if document.get("schema") == SCHEMA}
    models = {file: mapping(document, "conditions").get("model") for file, document in runs.items()}
    named = {file: model for file, model in models.items() if model is not None}
    for file, model in named.items():
        first = next(iter(named))
        if model != named[first]:
            limit = f"must be the model of all files, and {first} has {named[first]!r}"
            raise InvalidArgumentError(f"{file}: model", model, limit)


def _check_gpus(results: Results) -> None:
    """Raise InvalidArgumentError if a system has different numbers of GPUs: such runs are not repeats of each other."""
    for entry in results.systems:
        total = whole(mapping(entry, "gpus"), "total")
        if total != (first := results.gpus(entry["system"])):
            limit = f"must be {first} as in the other file: a system stands for one number of GPUs"
            raise InvalidArgumentError(f"system {entry['system']}: gpus", total, limit)
