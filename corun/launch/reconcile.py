"""The steps that turn the running processes into the wanted processes.

This module is pure. It must not know how processes are started and stopped, nor who wants them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from corun.launch.members import ProcessSpec
from corun.launch.supervisor import ProcessState, ProcessStatus


@dataclass(frozen=True, slots=True)
class Steps:
    """The processes to start and to stop next; both are empty when everything is as wanted."""

    start: tuple[ProcessSpec, ...] = ()
    stop: tuple[ProcessSpec, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.start or self.stop)


def steps(wanted: Sequence[ProcessSpec], running: Collection[ProcessSpec], stopping: Collection[ProcessSpec]) -> Steps:
    """Return the missing processes to start and the surplus processes to stop.

    running: all processes that have not ended, including those in `stopping`. A stopping process that is wanted again
    starts once it has ended.
    """
    start = tuple(member for member in wanted if member not in running)
    excess = [member for member in running if member not in wanted and member not in stopping]
    return Steps(start=start, stop=tuple(sorted(excess, key=lambda m: (m.pool, m.role, -m.index))))


def unsettled(
    nodes: Collection[ProcessSpec],
    wanted: Collection[ProcessSpec],
    running: Collection[ProcessSpec],
    stopping: Collection[ProcessSpec],
    in_use: Mapping[str, Sequence[Collection[str]]],
) -> frozenset[ProcessSpec]:
    """Return the nodes that are not yet as wanted: running and in use by every router, or ended and in use by none.

    in_use: for each pool, and for each of its routers that answers, the names of the nodes that it uses.
    """

    def is_settled(node: ProcessSpec) -> bool:
        used, is_wanted = in_use[node.pool], node in wanted
        runs_as_wanted = node not in stopping and (node in running) == is_wanted
        return runs_as_wanted and bool(used) and all((node.name in names) == is_wanted for names in used)

    return frozenset(node for node in nodes if not is_settled(node))


def in_turn(starting: Sequence[ProcessSpec], loading: Collection[ProcessSpec]) -> tuple[ProcessSpec, ...]:
    """Return the nodes that share a GPU and may start now: one at a time, and only while no other node loads.

    An engine takes its part of the memory that it finds free. It fails, or takes another amount, if the free memory
    changes while it measures (vllm/v1/worker/gpu_worker.py: `determine_available_memory`). A node that restarts after
    it died does not wait for a turn: its supervisor starts it at once, even while other nodes load.
    """
    return () if loading else tuple(starting[:1])


def failure(
    wanted: Sequence[ProcessSpec], statuses: Mapping[ProcessSpec, ProcessStatus], ready: Collection[str]
) -> ProcessSpec | None:
    """Return the failed process without which the cluster cannot go on, or None.

    Before a pool is ready, this is any failed process of the pool. Later it is a failed process whose role has no other
    process left in the pool. ready: the names of the pools that have been ready.
    """
    failed = [m for m in wanted if m in statuses and statuses[m].state is ProcessState.FAILED]
    alive = {(m.pool, m.role) for m in wanted if m not in failed}
    return next((m for m in failed if m.pool not in ready or (m.pool, m.role) not in alive), None)
