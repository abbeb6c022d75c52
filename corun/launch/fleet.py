"""The processes of one launch. Each runs under a supervisor, which is a Ray actor on the machine that Ray chose.

This module owns actors and placement groups. When a node's actor or its machine dies, Ray starts the actor again, on
the same or another machine. A router keeps its machine, since nodes and clients know its address. This module must not
know which processes are wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corun.config.cluster_file import PoolSpec, toml
from corun.launch import runtime
from corun.launch.members import MODULES, ProcessSpec, command
from corun.launch.placement import Group, Share, groups, reuse
from corun.launch.supervisor import ProcessState, ProcessStatus, Supervisor

STATUS_TIMEOUT_S = 2.0
_END_S = 10.0
"""The time in seconds that a process has to end once it has drained."""
_LATE_S = 20.0
"""The extra time in seconds, after the grace time, before a process that does not end is given up."""
_WAITING = ProcessStatus(state=ProcessState.WAITING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What an actor needs to start its process on any machine."""

    pool: PoolSpec
    member: ProcessSpec
    routers: tuple[str, ...]
    """The host:port of each router."""
    host: str = ""
    """The address at which a node is reached; empty: the address of its machine."""
    share: Share = field(default_factory=Share)
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment that the actor finds on its machine."""
    modules: Mapping[str, str] = field(default_factory=lambda: dict(MODULES))

    @property
    def grace_s(self) -> float:
        """The time in seconds between asking the process to end and killing it."""
        return float(self.pool.config(self.member.role).drain_grace_s) + _END_S


class _Actor(Supervisor):
    """A supervisor as a Ray actor."""

    def __init__(self, order: Order) -> None:
        name = order.member.name
        self._file, self._settings = order.logs / f"{name}.toml", toml(order.pool)
        argv = command(
            order.pool,
            order.member,
            file=self._file,
            host=order.host or runtime.own_host(),
            routers=() if order.member.is_router else order.routers,
            gpu_share=order.share.gpus,
            modules=order.modules,
        )
        if order.share.cores:
            os.sched_setaffinity(0, order.share.cores)
        env = runtime.environment() | dict(order.environment)
        super().__init__(name, argv, order.logs / f"{name}.log", grace_s=order.grace_s, env=env)

    def _prepare(self) -> None:
        # The process reads a copy: this machine may not have the user's file, and restarts must find what was started.
        super()._prepare()
        self._file.write_text(self._settings, encoding="utf-8")


@dataclass(eq=False, slots=True)
class _Placed:
    """A process that has an actor."""

    actor: Any
    order: Order
    status: ProcessStatus = _WAITING
    """The last known status of the process."""
    group: Group | None = None
    host: str = ""
    """The address of the machine that a router keeps; empty for a node."""
    node_id: str = ""
    """Ray's id of that machine."""
    is_lost: bool = False
    """True if the router was lost with that machine. Ray does not start it again."""
    question: Any = None
    """The pending call for the status. There is one at a time, since calls would pile up at an actor that waits for its
    machine."""
    gone_at: float | None = None
    """The time at which the process is given up; None until it is asked to end."""

    @property
    def is_unplaced(self) -> bool:
        """True while no machine has room for the process; the status says so."""
        return self.group is not None and _is_waiting(self.status) and self.status.detail != ""

    @property
    def has_ended(self) -> bool:
        if self.gone_at is None:
            return self.is_lost
        if time.monotonic() > self.gone_at or self.is_unplaced:
            return True
        return self.question is None and not self.status.may_run


class Fleet:
    """Every process that was started and is not gone yet. only_host: the address of the one machine that nodes may run
    on; empty: any machine."""

    def __init__(self, only_host: str = "") -> None:
        self._only_host = only_host
        self._placed: dict[ProcessSpec, _Placed] = {}
        self._groups: list[Group] = []

    @property
    def running(self) -> list[ProcessSpec]:
        """The processes in the order of their starts, including those that were asked to end."""
        return list(self._placed)

    @property
    def stopping(self) -> list[ProcessSpec]:
        return [member for member, placed in self._placed.items() if placed.gone_at is not None]

    def grace_s(self, members: Iterable[ProcessSpec]) -> float:
        """Return the longest time in seconds that any member has between being asked to end and being killed."""
        return max((self._placed[member].order.grace_s for member in members), default=0.0)

    def start(self, orders: Sequence[Order], router_hosts: Mapping[ProcessSpec, str]) -> None:
        """Place processes. They start as soon as there is room, in no particular order.

        Nodes that start together are placed near each other where possible. router_hosts: the address of each router's
        machine; a router is left out if it has none or if that machine is not alive.
        """
        alive = runtime.hosts()
        anywhere = runtime.on(alive[self._only_host]) if self._only_host else {"scheduling_strategy": "SPREAD"}
        on_gpus = {}
        for order in sorted(orders, key=lambda order: not order.member.is_router):
            if order.member.is_router:
                if (host := router_hosts.get(order.member)) in alive:
                    self._place(order, runtime.on(alive[host]), host=host, node_id=alive[host])
            elif order.share.gpus:
                on_gpus[order.member] = order
            else:
                self._place(order, anywhere)
        self._place_on_gpus(on_gpus)

    def _place_on_gpus(self, orders: Mapping[ProcessSpec, Order]) -> None:
        reuse(self._groups, {member: order.share.gpus for member, order in orders.items()}, self._placed)
        kept = {member: group for group in self._groups for member in group.members}
        for near in groups([member for member in orders if member not in kept]):
            gpus = orders[near[0]].share.gpus
            # In Ray, every machine has a resource that is named after its address.
            bundle = {"GPU": gpus} | ({f"node:{self._only_host}": 0.001} if self._only_host else {})
            handle = runtime.api().util.placement_group([bundle for _ in near], strategy="PACK")
            group = Group(handle, list(near), gpus)
            self._groups.append(group)
            kept |= dict.fromkeys(near, group)
        strategy = runtime.api().util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for member, order in orders.items():
            group = kept[member]
            place = strategy(group.handle, placement_group_bundle_index=group.members.index(member))
            self._place(order, {"scheduling_strategy": place, "num_gpus": group.gpus}, group=group)

    def _place(self, order: Order, placement: Mapping[str, Any], **facts: Any) -> None:
        actor = runtime.api().remote(_Actor).options(num_cpus=0, max_restarts=-1, **placement).remote(order)
        self._placed[order.member] = _Placed(actor, order, **facts)

    def stop(self, members: Iterable[ProcessSpec]) -> None:
        """Ask processes to end; asking again kills them. `forget_ended` notices when they have ended."""
        for placed in (self._placed[member] for member in members):
            placed.actor.stop.remote()
            # An older status does not tell whether the process has ended, so ask again.
            placed.question = placed.actor.status.remote()
            placed.gone_at = placed.gone_at or time.monotonic() + placed.order.grace_s + _LATE_S

    def kill(self, member: ProcessSpec) -> None:
        """Kill a process, which its supervisor then starts again."""
        self._placed[member].actor.kill.remote()

    def forget_ended(self) -> list[ProcessSpec]:
        """Release the processes that ended after they were asked to, and the routers whose machine is gone. Return
        these processes."""
        ended = [member for member, placed in self._placed.items() if placed.has_ended]
        for member in ended:
            runtime.api().kill(self._placed.pop(member).actor)
        for group in [group for group in self._groups if not any(member in self._placed for member in group.members)]:
            runtime.api().util.remove_placement_group(group.handle)
            self._groups.remove(group)
        return ended

    def statuses(self, members: Iterable[ProcessSpec] | None = None) -> dict[ProcessSpec, ProcessStatus]:
        """Return what each process does now, or did when it last answered."""
        asked = {m: p for m, p in self._placed.items() if members is None or m in members}
        for placed in asked.values():
            placed.question = placed.question or placed.actor.status.remote()
        questions = [placed.question for placed in asked.values()]
        if questions:
            answered, _ = runtime.api().wait(questions, num_returns=len(questions), timeout=STATUS_TIMEOUT_S)
            for placed in asked.values():
                if placed.question in answered:
                    placed.status, placed.question = _answer(placed.question), None
                # If the supervisor gave the process up, the status counts deaths. If it died itself, there are none.
                is_dead = placed.status.state is ProcessState.FAILED and not placed.status.deaths
                placed.is_lost = is_dead and placed.node_id not in ("", *runtime.living())
                if placed.is_lost:
                    placed.status = replace(_WAITING, detail=f"its machine, {placed.host}, is gone")
                elif placed.group is not None and _is_waiting(placed.status):
                    placed.status = replace(placed.status, detail=_why(placed.group))
        return {member: placed.status for member, placed in asked.items()}


def _is_waiting(status: ProcessStatus) -> bool:
    """Return whether the process waits for a machine, and not for its next restart."""
    return status.state is ProcessState.WAITING and not status.deaths


def _answer(question: Any) -> ProcessStatus:
    errors = runtime.api().exceptions
    try:
        status: ProcessStatus = runtime.api().get(question)
    except (errors.ActorDiedError, errors.ActorUnschedulableError) as error:
        return ProcessStatus(state=ProcessState.FAILED, detail=f"its supervisor died: {error}")
    except errors.RayActorError:
        return _WAITING  # Ray starts the actor again, on this or another machine.
    return status


def _why(group: Group) -> str:
    """Return what a node that is not placed waits for; empty if its group is placed."""
    if runtime.api().util.placement_group_table(group.handle).get("state") == "CREATED":
        return ""
    size = f"{group.gpus:g} free GPU{'' if group.gpus <= 1 else 's'}"
    together = "" if len(group.members) == 1 else f" for each of {', '.join(member.name for member in group.members)}"
    return f"no machine has {size}{together}"
