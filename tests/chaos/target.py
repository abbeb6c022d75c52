"""A cluster under chaos as a run sees it: its members by name, and what its routers say of them. Tests only.

`fakes` and `processes` each have one. Must not know which faults there are nor which requests the cluster gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from corun.types import NodeState
from tests.chaos.faults import Kind
from tests.chaos.resources import Usage
from tests.chaos.traffic import Case

FIND_S = 20.0
"""The limit for a node that is to be hit to be in use."""


class Target:
    """A cluster that faults hit. The names of its routers begin with r, of prefill nodes with p, of decode nodes with
    d."""

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

    def names(self, roles: str = "rpd") -> list[str]:
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
                if found := (await self._ready(router)).get(name):
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

    async def whole(self, timeout_s: float) -> None:
        """Wait until every router uses every node."""
        waits = (Target.back(self, name, "", timeout_s) for name in self.names())
        assert all(await asyncio.gather(*waits)), f"the cluster was not whole within {timeout_s:.0f} s"

    async def serves(self) -> bool:
        """Return whether every router uses at least one prefill and one decode node."""
        return all([{node[0] for node in await self._ready(router)} == {"p", "d"} for router in self.names("r")])

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
                used = (load.used_slots, load.used_kv_blocks, load.queued_prompt_tokens)
                found += [f"{name} holds {used} slots, KV blocks, prompt tokens"] * any(used)
                found += [f"{name} is {node.state.value}: {node.detail}"] * (node.state is not NodeState.READY)
        return found

    async def _in_use(self, name: str, replaced: str) -> bool:
        """Return whether a member is in use.

        A node is if every router that is not hit uses it in another generation than `replaced`. A router is if it uses
        every node that is not hit.
        """
        routers = [name] if name[0] == "r" else [router for router in self.names("r") if router not in self.hit]
        nodes = [name] if name[0] != "r" else [node for node in self.names("pd") if node not in self.hit]
        ready = [await self._ready(router) for router in routers]
        return all(node in seen and seen[node] != replaced for seen in ready for node in nodes)

    async def _ready(self, router: str) -> dict[str, str]:
        """Return the generations of the nodes that a router uses, by node id."""
        status = await self.status(router)
        nodes = status.nodes if status is not None else ()
        return {node.node.ref.node_id: node.node.ref.generation for node in nodes if node.state is NodeState.READY}


async def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait for a condition. Return whether it came in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
