"""The processes of one launch, each under a supervisor, each supervisor a Ray actor on the machine that Ray chose.

Owns actors and placement groups. A node's actor is started again by Ray when it or its machine dies, there or on
another machine; a router keeps its machine, since nodes and clients know its address. Must not know which processes are
wanted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from corun.config.cluster_file import PoolSpec
from corun.launch import runtime
from corun.launch.members import MODULES, Member, command
from corun.launch.placement import Group, Share, groups, reuse
from corun.launch.supervisor import ProcessState, ProcessStatus, Supervisor

STATUS_TIMEOUT_S = 2.0
_END_S = 10.0
"""For a process to end once it has drained."""
_LATE_S = 20.0
"""After its grace, for a process that does not end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What an actor needs to start its process, wherever it is."""

    pool: PoolSpec
    member: Member
    routers: tuple[str, ...]
    """host:port of each."""
    host: str = ""
    """Where a node is reached; empty: its machine's address."""
    share: Share = field(default_factory=Share)
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside that of Ray on that machine."""
    modules: Mapping[str, str] = field(default_factory=lambda: dict(MODULES))

    @property
    def grace_s(self) -> float:
        """Between asking the process to end and killing it."""
        return float(self.pool.config(self.member.role).drain_grace_s) + _END_S


class _Actor:
    """One supervisor."""

    def __init__(self, order: Order) -> None:
        host, name = order.host or runtime.own_host(), order.member.name
        argv = command(
            order.pool,
            order.member,
            host=host,
            routers=order.routers,
            gpu_share=order.share.gpus,
            modules=order.modules,
        )
        order.logs.mkdir(parents=True, exist_ok=True)
        if order.share.cores:
            os.sched_setaffinity(0, order.share.cores)
        env = runtime.environment() | dict(order.environment)
        self._supervisor = Supervisor(name, argv, order.logs / f"{name}.log", grace_s=order.grace_s, env=env)

    def status(self) -> ProcessStatus:
        return self._supervisor.status()

    def stop(self) -> None:
        self._supervisor.stop()


@dataclass(eq=False, slots=True)
class _Placed:
    """A process that has an actor."""

    actor: Any
    status: ProcessStatus
    """The last that is known."""
    grace_s: float
    group: Group | None = None
    host: str = ""
    """Of a router: the address of the machine that it keeps."""
    node_id: str = ""
    """Ray's, of that machine."""
    is_unplaced: bool = False
    """No machine has room for it yet."""
    is_lost: bool = False
    """With that machine: Ray does not start it again."""
    question: Any = None
    """For the status, not yet answered. One at a time: they would pile up at an actor that waits for its machine."""
    gone_at: float | None = None
    """When it is given up, once it has been asked to end."""


class Fleet:
    """Every process that was started and is not gone yet. only_host: the address of the machine that nodes must be on;
    empty: any."""

    def __init__(self, only_host: str = "") -> None:
        self._only_host = only_host
        self._placed: dict[Member, _Placed] = {}
        self._groups: list[Group] = []

    @property
    def running(self) -> list[Member]:
        """In the order of their starts; those that are asked to end, too."""
        return list(self._placed)

    @property
    def last_statuses(self) -> dict[Member, ProcessStatus]:
        """As they were when the processes last answered."""
        return {member: placed.status for member, placed in self._placed.items()}

    def grace_s(self, members: Iterable[Member]) -> float:
        """The longest time that any of them has between being asked to end and being killed."""
        return max((self._placed[member].grace_s for member in members), default=0.0)

    @property
    def stopping(self) -> list[Member]:
        return [member for member, placed in self._placed.items() if placed.gone_at is not None]

    def start(self, orders: Sequence[Order], router_hosts: Mapping[Member, str], later: Sequence[Member] = ()) -> None:
        """Places processes; they start as soon as there is room, in no order. Nodes that start together are near each
        other where they can. router_hosts: the address of each router's machine; without it a router is left out.
        later: nodes that will start when these have, and are to be near them."""
        by_member = {order.member: order for order in orders}
        alive = runtime.hosts()
        for member, host in router_hosts.items():
            if member in by_member and host in alive:
                self._place(by_member[member], runtime.on(alive[host]), host=host, node_id=alive[host])
        nodes = [order for order in orders if not order.member.is_router]
        placement = runtime.on(alive[self._only_host]) if self._only_host else {"scheduling_strategy": "SPREAD"}
        for order in (order for order in nodes if not order.share.gpus):
            self._place(order, placement)
        self._place_on_gpus({order.member: order for order in nodes if order.share.gpus}, later)

    def _place_on_gpus(self, orders: Mapping[Member, Order], later: Sequence[Member]) -> None:
        reuse(self._groups, {member: order.share.gpus for member, order in orders.items()}, {*self._placed, *later})
        kept = {member: group for group in self._groups for member in group.members}
        for near in groups([member for member in (*orders, *later) if member not in kept]):
            if not (now := [member for member in near if member in orders]):
                continue
            gpus = orders[now[0]].share.gpus
            # Every machine has a resource of its address's name.
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
        self._placed[order.member] = _Placed(actor, _waiting(order.member), order.grace_s, **facts)

    def stop(self, members: Iterable[Member]) -> None:
        """Asks processes to end; asking again kills them. `forget_ended` notes when they have."""
        for placed in (self._placed[member] for member in members):
            placed.actor.stop.remote()
            # What was known before says nothing of whether it has ended.
            placed.question = placed.actor.status.remote()
            placed.gone_at = placed.gone_at or time.monotonic() + placed.grace_s + _LATE_S

    def forget_ended(self) -> list[Member]:
        """Gives back what those held that were asked to end, and have; and routers whose machine is gone."""
        ended = [member for member, placed in self._placed.items() if _has_ended(placed)]
        for member in ended:
            runtime.api().kill(self._placed.pop(member).actor)
        for group in [group for group in self._groups if not any(member in self._placed for member in group.members)]:
            runtime.api().util.remove_placement_group(group.handle)
            self._groups.remove(group)
        return ended

    def statuses(self, members: Iterable[Member] | None = None) -> dict[Member, ProcessStatus]:
        """What the processes do now, or did when they last answered."""
        asked = {m: p for m, p in self._placed.items() if members is None or m in members}
        for placed in asked.values():
            placed.question = placed.question or placed.actor.status.remote()
        questions = [placed.question for placed in asked.values()]
        if questions:
            answered, _ = runtime.api().wait(questions, num_returns=len(questions), timeout=STATUS_TIMEOUT_S)
            for member, placed in asked.items():
                if placed.question in answered:
                    placed.status, placed.question = _answer(member, placed.question), None
                placed.is_lost = _is_dead(placed.status) and placed.node_id not in ("", *runtime.living())
                if placed.is_lost:
                    placed.status = replace(_waiting(member), detail=f"its machine, {placed.host}, is gone")
                placed.is_unplaced = False
                if placed.group is not None and _is_waiting(placed.status):
                    placed.status = replace(placed.status, detail=_why(placed.group))
                    placed.is_unplaced = placed.status.detail != ""
        return {member: placed.status for member, placed in asked.items()}


def _has_ended(placed: _Placed) -> bool:
    if placed.gone_at is None:
        return placed.is_lost
    if time.monotonic() > placed.gone_at or placed.is_unplaced:
        return True
    return placed.question is None and not may_run(placed.status)


def may_run(status: ProcessStatus) -> bool:
    """False for one that has not been placed, too: its process could start only once its actor runs."""
    return status.state is ProcessState.RUNNING or (status.state is ProcessState.WAITING and status.deaths > 0)


def _is_waiting(status: ProcessStatus) -> bool:
    """For a machine, and not for its next start."""
    return status.state is ProcessState.WAITING and not status.deaths


def _is_dead(status: ProcessStatus) -> bool:
    """Its supervisor is, which has not given it up."""
    return status.state is ProcessState.FAILED and not status.deaths


def _waiting(member: Member) -> ProcessStatus:
    return ProcessStatus(name=member.name, state=ProcessState.WAITING)


def _answer(member: Member, question: Any) -> ProcessStatus:
    errors = runtime.api().exceptions
    try:
        status: ProcessStatus = runtime.api().get(question)
    except (errors.ActorDiedError, errors.ActorUnschedulableError) as error:
        return ProcessStatus(name=member.name, state=ProcessState.FAILED, detail=f"its supervisor died: {error}")
    except errors.RayActorError:
        return _waiting(member)  # It is started again, there or elsewhere.
    return status


def _why(group: Group) -> str:
    """What a node waits for that is not placed."""
    state = runtime.api().util.placement_group_table(group.handle).get("state")
    if state == "CREATED":
        return ""
    size = f"{group.gpus:g} free GPU{'' if group.gpus <= 1 else 's'}"
    together = "" if len(group.members) == 1 else f" for each of {', '.join(member.name for member in group.members)}"
    return f"no machine has {size}{together}"
