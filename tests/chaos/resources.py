"""Measure what each process of a real cluster holds while the cluster is idle, and what has grown. Tests only.

Owns the measures and the limits of growth. A process that was replaced in between is compared with nothing, because
its measures began anew. Must not know which faults there were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.scraping import scrape

if TYPE_CHECKING:
    from tests.chaos.processes import Process

SPARE = {"memory_mib": 48.0, "engine_mib": 64.0, "fds": 16.0, "threads": 8.0, "tasks": 16.0, "kv_blocks": 0.0}
"""By how much each measure of an idle process may exceed the one before. Connections come and go, and allocators keep
the memory that a burst needed."""
_HELD_KV = ("corun_prefill_held_kv_blocks", "corun_decode_reserved_kv_blocks")


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


async def usage(process: Process) -> Usage:
    """Return the measures of a process now."""
    root, tree = process.root, process.tree
    told: Mapping[str, float] = {}
    if process.metrics_port:
        with suppress(OSError):  # A process that did not come back answers nothing; the report says so elsewhere.
            told = await scrape(process.metrics_port)
    tasks = told.get("corun_tasks")
    return Usage(
        life=process.lives,
        memory_mib=_resident_mib(root),
        engine_mib=_resident_mib([pid for pid in tree if pid not in root]),
        fds=sum(_entries(pid, "fd") for pid in tree),
        threads=sum(_entries(pid, "task") for pid in tree),
        tasks=None if tasks is None else int(tasks),
        kv_blocks=int(sum(told.get(name, 0) for name in _HELD_KV)),
    )


def _resident_mib(pids: list[int]) -> float:
    pages = 0
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # The process has just ended.
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def _entries(pid: int, folder: str) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    return 0
