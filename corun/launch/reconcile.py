"""What has to be done so that the processes that run become those that are wanted.

Pure. Must not know how processes are started and stopped, nor who wants them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from corun.launch.members import Member
from corun.launch.supervisor import ProcessState, ProcessStatus


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do next; nothing when all is as wanted."""

    start: tuple[Member, ...] = ()
    stop: tuple[Member, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.start or self.stop)


def steps(wanted: Sequence[Member], running: Collection[Member], stopping: Collection[Member]) -> Steps:
    """Starts what is missing and stops what is too much. running: with those that are `stopping`, which start again,
    if they are wanted again, once they have ended."""
    start = tuple(member for member in wanted if member not in running)
    excess = [member for member in running if member not in wanted and member not in stopping]
    return Steps(start=start, stop=tuple(sorted(excess, key=lambda m: (m.pool, m.role, -m.index))))


def in_turn(starting: Sequence[Member], loading: Collection[Member]) -> tuple[Member, ...]:
    """Which of the nodes that share a GPU may start now: one at a time, when no other one loads.

    An engine takes its part of the memory that it finds free, and fails or takes another part if that changes while it
    looks (vllm/v1/worker/gpu_worker.py: `determine_available_memory`). A node that is started again after it died takes
    no turn: its supervisor starts it at once, whatever else loads.
    """
    return () if loading else tuple(starting[:1])


def failure(
    wanted: Sequence[Member], statuses: Mapping[Member, ProcessStatus], ready: Collection[str]
) -> Member | None:
    """The process without which a cluster cannot go on: any that fails before its pool was ready, later the last of its
    role there. ready: the names of the pools that were."""
    failed = [m for m in wanted if m in statuses and statuses[m].state is ProcessState.FAILED]
    alive = {(m.pool, m.role) for m in wanted if m not in failed}
    return next((m for m in failed if m.pool not in ready or (m.pool, m.role) not in alive), None)
