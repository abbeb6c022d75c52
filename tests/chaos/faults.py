"""Faults of real-engine mode: their kinds, how a schedule of them is drawn, and how each is made.

Must not know which requests the cluster gets. Tests only.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tests.chaos.processes import RealCluster

LONGEST_STOP_S = 12.0
"""The longest stop of a process: longer than the time after which a silent node is lost."""
LONGEST_DELAY_S = 0.5
CLIENTS = "clients"
"""The target of a fault that hits no process."""

Fault = Callable[[RealCluster, str, float], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault. weight: how often it is drawn; with 0 it comes only when it is asked for by name."""

    fault: Fault | None
    roles: str
    """The roles of its targets, by first letter; empty for clients."""
    weight: int
    replaces: bool = False
    """Whether a new process has to take the place of the target's."""
    is_mild: bool = False
    """Whether it may hit the last process of a role."""
    all_of_role: bool = False
    """Whether it hits every process of the target's role at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One fault of a schedule."""

    kind: str
    target: str
    wait_s: float
    """The wait after the fault before; longer if that fault or another one must have passed first."""
    strength: float
    """The strength in [0, 1): how long, how slow or how many."""

    def __str__(self) -> str:
        return f"{self.kind} {self.target} ({self.strength:.2f}, after {self.wait_s:.1f} s)"


async def kill(cluster: RealCluster, name: str, strength: float) -> None:
    cluster.processes[name].send(signal.SIGKILL, *cluster.processes[name].root, expect=128 + signal.SIGKILL)


async def kill_engine(cluster: RealCluster, name: str, strength: float) -> None:
    """Kill one of the engine's processes. The node has to notice it, and ends."""
    engine = cluster.processes[name].engine
    cluster.processes[name].send(signal.SIGKILL, engine[int(strength * len(engine))], expect=1)


async def terminate(cluster: RealCluster, name: str, strength: float) -> None:
    cluster.processes[name].send(signal.SIGTERM, *cluster.processes[name].root, expect=0)


async def stop_tree(cluster: RealCluster, name: str, strength: float) -> None:
    await _stop(cluster, name, cluster.processes[name].tree, strength)


async def stop_parent(cluster: RealCluster, name: str, strength: float) -> None:
    """Stop the process that serves gRPC while the engine goes on."""
    await _stop(cluster, name, cluster.processes[name].root, strength)


async def stop_engine(cluster: RealCluster, name: str, strength: float) -> None:
    """Stop the engine while the process that serves gRPC goes on answering."""
    await _stop(cluster, name, cluster.processes[name].engine, strength)


async def _stop(cluster: RealCluster, name: str, pids: Sequence[int], strength: float) -> None:
    process = cluster.processes[name]
    process.send(signal.SIGSTOP, *pids)
    try:
        await asyncio.sleep(LONGEST_STOP_S * strength)
    finally:
        process.send(signal.SIGCONT, *pids)


async def cut(cluster: RealCluster, name: str, strength: float) -> None:
    cluster.links[name].cut()


async def delay(cluster: RealCluster, name: str, strength: float) -> None:
    cluster.links[name].delay_s = LONGEST_DELAY_S * strength
    await asyncio.sleep(LONGEST_STOP_S / 2)
    cluster.links[name].delay_s = 0.0


async def silence(cluster: RealCluster, name: str, strength: float) -> None:
    cluster.links[name].silence(LONGEST_STOP_S * strength)
    await asyncio.sleep(LONGEST_STOP_S * strength)


KINDS: dict[str, Kind] = {
    "kill": Kind(fault=kill, roles="rpd", weight=6, replaces=True),
    "kill engine": Kind(fault=kill_engine, roles="pd", weight=2, replaces=True),
    "terminate": Kind(fault=terminate, roles="rpd", weight=4, replaces=True),
    "stop tree": Kind(fault=stop_tree, roles="rpd", weight=4),
    "stop parent": Kind(fault=stop_parent, roles="pd", weight=2),
    "stop engine": Kind(fault=stop_engine, roles="pd", weight=0),
    "cut": Kind(fault=cut, roles="rpd", weight=5, is_mild=True),
    "delay": Kind(fault=delay, roles="rpd", weight=3, is_mild=True),
    "silence": Kind(fault=silence, roles="rpd", weight=3),
    "burst": Kind(fault=None, roles="", weight=3),
    "vanish": Kind(fault=None, roles="", weight=3),
    "blackout": Kind(fault=kill, roles="rpd", weight=1, replaces=True, all_of_role=True),
}


def draw(
    seed: int, count: int, members: Sequence[str], only: Sequence[str] = (), lasting: Sequence[str] = ()
) -> list[Planned]:
    """Draw a schedule; it is a function of the arguments.

    only: names of kinds; if empty, all kinds that are drawn without being asked for.
    lasting: members that no fault may replace, so that growth in them over a long run can be seen.
    """
    rng = random.Random(seed)
    names = list(only) or [name for name, kind in KINDS.items() if kind.weight and not (lasting and kind.all_of_role)]
    weights = [max(1, KINDS[name].weight) for name in names]
    plan = []
    for name in rng.choices(names, weights, k=count):
        kept = lasting if KINDS[name].replaces else ()
        targets = [member for member in members if member[0] in KINDS[name].roles and member not in kept] or [CLIENTS]
        wait_s = min(10.0, rng.expovariate(1 / 3.0))
        plan.append(Planned(kind=name, target=rng.choice(targets), wait_s=wait_s, strength=rng.random()))
    return plan
