"""A schedule of faults: their kinds, how a seed draws them, and what a run has to know of the cluster that they hit.

`fakes` and `processes` each have a cluster. Must not know how a fault is made nor which requests the cluster gets.
Tests only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from corun.types import NodeState
from tests.chaos.report import Usage
from tests.chaos.traffic import Case

SIDES = {"r": "r", "p": "p", "d": "d", "c": "pd"}
"""What a member does, by the first letter of its name: route, prefill, decode. A colocated node does two of them."""
CLIENTS = "clients"
"""The target of a fault that hits no process."""
LONGEST_WAIT_S = 10.0
FIND_S = 20.0
"""The limit for a node that is to be hit to be in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault."""

    fault: Callable[[Any, str, float], Awaitable[None]] | None = None
    """Makes the fault: gets the cluster, the name of a member and the strength. None for faults of clients."""
    roles: str = ""
    """The roles of its targets, by first letter; empty for clients."""
    weight: int = 1
    """How often it is drawn; with 0 it comes only when it is asked for by name."""
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


def draw(
    kinds: Mapping[str, Kind],
    seed: int,
    count: int,
    members: Sequence[str],
    only: Sequence[str] = (),
    lasting: Sequence[str] = (),
    pause_s: float = 3.0,
) -> list[Planned]:
    """Draw a schedule; it is a function of the arguments.

    only: names of kinds; if empty, all kinds that are drawn without being asked for.
    lasting: members that no fault may replace, so that growth in them over a long run can be seen.
    pause_s: the mean wait between two faults.
    """
    rng = random.Random(seed)
    names = list(only) or [name for name, kind in kinds.items() if kind.weight and not (lasting and kind.all_of_role)]
    weights = [max(1, kinds[name].weight) for name in names]
    plan = []
    for name in rng.choices(names, weights, k=count):
        kept = lasting if kinds[name].replaces else ()
        targets = [member for member in members if member[0] in kinds[name].roles and member not in kept] or [CLIENTS]
        wait_s = min(LONGEST_WAIT_S, rng.expovariate(1 / pause_s))
        plan.append(Planned(kind=name, target=rng.choice(targets), wait_s=wait_s, strength=rng.random()))
    return plan


class Target:
    """A cluster that faults hit. The names of its routers begin with r, of prefill nodes with p, of decode nodes with
    d, and of colocated nodes with c."""

    kinds: ClassVar[Mapping[str, Kind]]
    """The kinds of faults that it can be hit by."""
    pause_s: float
    """The mean wait between two faults."""
    think_s: float
    """The mean pause of a client between two requests."""
    request_timeout_s: float
    burst: int
    """The number of requests that are more than one router's queue and all slots hold."""
    gateway = ""
    """The URL of the gateway; empty if there is none."""
    routers: list[str]
    """The addresses at which clients reach the routers."""
    addresses: list[str]
    """The routers' own addresses."""

    def __init__(self) -> None:
        self.hit: set[str] = set()
        """Members that a fault has hit and that are not in use again yet."""
        self.wrong_ends: list[str] = []

    def names(self, roles: str = "rpdc") -> list[str]:
        """Return the names of the members of some roles."""
        raise NotImplementedError

    async def cases(self) -> list[Case]:
        """Return requests with their right answers."""
        raise NotImplementedError

    async def status(self, router: str) -> Any:
        """Return the status that a router reports; None if it does not answer."""
        raise NotImplementedError

    async def usage(self) -> dict[str, Usage]:
        """Return what each process holds while all is idle, by name; nothing if there are no processes."""
        return {}

    def reruns(self) -> int:
        """Return how many runs of samples failed at a node."""
        return 0

    async def stop(self) -> list[str]:
        """End everything in good order. Return what went wrong."""
        return []

    async def mark(self, name: str, *, replaces: bool) -> Any:
        """Return what `back` has to know of a member that a fault is going to hit: the generation that must go."""
        deadline = time.monotonic() + FIND_S
        while replaces and name[0] != "r" and time.monotonic() < deadline:
            for router in self.names("r"):
                if found := (await self._ready(router)).get(node_ids(name)[0]):
                    return found
            await asyncio.sleep(0.1)
        return ""

    async def back(self, name: str, mark: Any, timeout_s: float) -> bool:
        """Wait until a member is in use again. Return False if that does not happen in time."""
        deadline = time.monotonic() + timeout_s
        while not await self._in_use(name, mark):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    async def serves(self) -> bool:
        """Return whether every router uses at least one node that prefills and one that decodes."""
        ready = [await self._ready(router) for router in self.names("r")]
        return all({side for name in used for side in SIDES[name[0]]} == {"p", "d"} for used in ready)

    def may_lose(self, names: Sequence[str]) -> bool:
        """Return whether other members, that are not hit, do all that these members do."""
        left = {side for name in self.names() if name not in names and name not in self.hit for side in SIDES[name[0]]}
        return left.issuperset(side for name in names for side in SIDES[name[0]])

    async def held(self) -> list[str]:
        """Return a text for each thing that routers and nodes still hold."""
        found = []
        for router in self.names("r"):
            status = await self.status(router)
            if status is None:
                found.append(f"{router} does not answer")
                continue
            found += [f"{router}: {status.queued_samples} samples wait"] * (status.queued_samples > 0)
            for node in status.nodes:
                name, load = f"{router}: {node.node.ref.node_id}", node.load
                used = (load.leases, load.used_kv_blocks, load.queued_prompt_tokens)
                found += [f"{name} holds {used} slots, KV blocks, prompt tokens"] * any(used)
                found += [f"{name} is {node.state.value}: {node.detail}"] * (node.state is not NodeState.READY)
        return found

    async def _in_use(self, name: str, replaced: str) -> bool:
        """Return whether a member is in use.

        A node is if every router that is not hit uses it in another generation than `replaced`. A router is if it uses
        every node that is not hit.
        """
        routers = [name] if name[0] == "r" else [router for router in self.names("r") if router not in self.hit]
        members = [name] if name[0] != "r" else [node for node in self.names("pdc") if node not in self.hit]
        nodes = [node for member in members for node in node_ids(member)]
        ready = [await self._ready(router) for router in routers]
        return all(node in seen and seen[node] != replaced for seen in ready for node in nodes)

    async def _ready(self, router: str) -> dict[str, str]:
        """Return the generations of the nodes that a router uses, by node id."""
        status = await self.status(router)
        nodes = status.nodes if status is not None else ()
        return {node.node.ref.node_id: node.node.ref.generation for node in nodes if node.state is NodeState.READY}


def nodes(pairs: int, colocated: int) -> list[str]:
    """Return the names of a cluster's nodes: prefill nodes, as many decode nodes, colocated nodes."""
    counts = {"p": pairs, "d": pairs, "c": colocated}
    return [f"{role}{number}" for role, count in counts.items() for number in range(count)]


def node_ids(name: str) -> tuple[str, ...]:
    """Return the nodes that routers know a member as."""
    return (f"{name}-prefill", f"{name}-decode") if name[0] == "c" else (name,)


async def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait for a condition. Return whether it came in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
