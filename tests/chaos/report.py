"""The report of a chaos run. Must not know how faults are made. Tests only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SPARE = {"memory_mib": 48.0, "engine_mib": 64.0, "fds": 16.0, "threads": 8.0, "tasks": 16.0, "kv_blocks": 0.0}
"""By how much each measure of an idle process may exceed the one before. Connections come and go, and allocators keep
the memory that a burst needed."""


@dataclass(kw_only=True)
class Hit:
    """One fault. Times in seconds."""

    kind: str
    target: str
    at: float
    """The time of the fault, since the first moment at which a fault could have come."""
    ready_s: float = 0.0
    """The time from the fault until every router served again; 0 if every router kept serving."""
    whole_s: float | None = None
    """The time from the fault until every router used the hit members again; None if the fault hit no process."""
    pauses_s: list[float] = field(default_factory=list)
    """For each stream in flight, the time from the fault to its next token, be it the first one, or to its end."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, but of all pauses only their number and the longest."""
        own = {name: value for name, value in asdict(self).items() if name != "pauses_s"}
        return {**own, "streams": len(self.pauses_s), "longest_pause_s": max(self.pauses_s, default=None)}


@dataclass(kw_only=True)
class Report:
    """The results of one run."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    vanished: int = 0
    refused: int = 0
    """The number of calls that a full queue refused, with a delay after which to come back."""
    reruns: int = 0
    """The number of runs of samples that a fault ended and that routers started again, on real engines."""
    allowed: Counter[str] = field(default_factory=Counter)
    """The number of requests that ended with an error that the contract allows, by the error's text."""
    wrong: list[str] = field(default_factory=list)
    """Requests whose output was not the right one."""
    failed: list[str] = field(default_factory=list)
    """Requests that ended with any other error, and everything else that should not have happened."""
    leaked: list[str] = field(default_factory=list)
    """Everything that was still held or running at the end."""
    hits: list[Hit] = field(default_factory=list)
    """The faults, in order."""
    resources: dict[str, Any] = field(default_factory=dict)
    """The measures of each process of a real-engine run while all was idle: at the start, half-way and at the end."""
    grown: dict[str, list[str]] = field(default_factory=dict)
    """Measures that had grown too much: until half-way, while caches fill, and from there to the end, when none do."""
    verified: int = 0
    """The number of verification runs beside the traffic that were compared and found equal."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        return 3 if self.wrong else 1 if self.failed or self.leaked else 0

    def as_dict(self) -> dict[str, Any]:
        values = {**vars(self), "faults": dict(sorted(self.faults.items())), "fault_count": self.faults.total()}
        values["hits"] = [hit.as_dict() for hit in self.hits]
        if self.hits:
            values["ready_s"] = quantiles([hit.ready_s for hit in self.hits])
            values["whole_s"] = quantiles([hit.whole_s for hit in self.hits if hit.whole_s is not None])
            values["longest_pause_s"] = quantiles([max(hit.pauses_s) for hit in self.hits if hit.pauses_s])
            values["pause_s"] = quantiles([pause for hit in self.hits for pause in hit.pauses_s])
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The measures of one process with its engine, in one of its lives."""

    life: int
    memory_mib: float
    """Resident memory of the process that serves."""
    engine_mib: float
    """Resident memory of all processes that it has started."""
    fds: int
    threads: int
    tasks: int | None
    """The number of tasks of its event loop; None for a process that does not report it."""
    kv_blocks: int
    """The number of KV blocks that are held for readers or reserved for leases."""


def growth(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> list[str]:
    """Return a text for each measure that has grown by more than it may."""
    return [
        f"{name} has {measure} {new:g}, and had {old:g}"
        for name, now in after.items()
        if now.life == before[name].life
        for measure, spare in SPARE.items()
        if (new := getattr(now, measure) or 0) > (old := getattr(before[name], measure) or 0) + spare
    ]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the nearest-rank p50 and p99, the largest value and the count; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {**at, "max": ordered[-1], "count": len(ordered)}
