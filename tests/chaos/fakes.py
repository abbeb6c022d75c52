"""Chaos over fake engines: a real router and real node services in this process, and the faults that hit them.

The right answer of every request is known ahead. Tests only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from corun.params import SamplingParams, sample_seed
from corun.testing.engines import expected
from corun.testing.nodes import LocalNode
from corun.types import NodeRole
from tests.chaos.faults import Kind, Target, node_ids, nodes
from tests.chaos.run import Chaos
from tests.chaos.traffic import Case, with_answer
from tests.clusters import FakeCluster, cluster

NUM_CASES = 200
PAUSE_S = 0.06
"""Mean time between faults, divided by the pairs and the colocated nodes."""
LONGEST_S = 0.6
"""The longest that a fault lasts: longer than anybody waits."""
LEASE_TTL_MS = 1000
SLOTS = 8
CONFIG: dict[str, Any] = {
    "max_attempts": 1000,  # A run may be hit any number of times here.
    "step_timeout_s": 0.4,
    "prefill_timeout_s": 0.4,
    "reserve_timeout_s": 0.4,
    "heartbeat_timeout_ms": 300,
    "node_wait_s": 60.0,
}


class Fakes(Target):
    """A router, so many pairs of nodes and so many colocated nodes."""

    think_s = 0.0
    request_timeout_s = 60.0

    def __init__(self, fake: FakeCluster, pairs: int, colocated: int) -> None:
        super().__init__()
        self.fake = fake
        self.pause_s = PAUSE_S / (pairs + colocated)
        self.routers = self.addresses = list(fake.addresses)
        self._nodes = nodes(pairs, colocated)

    def names(self, roles: str = "rpdc") -> list[str]:
        return [name for name in ("r0", *self._nodes) if name[0] in roles]

    async def cases(self) -> list[Case]:
        return known_cases(longest=60)

    async def status(self, router: str) -> Any:
        router_ = self.fake.router
        return SimpleNamespace(nodes=router_.registry.statuses(), queued_samples=router_.queue.waiting)

    async def add(self, name: str) -> None:
        """Start a node. What a router holds there and has forgotten ends soon."""
        add = {"p": self.fake.add_prefill, "d": self.fake.add_decode, "c": self.fake.add_colocated}[name[0]]
        node = await add(name) if name[0] == "p" else await add(name, slots=SLOTS, lease_ttl_ms=LEASE_TTL_MS)
        if NodeRole.PREFILL in node.sides:
            node.sides[NodeRole.PREFILL].engine.kv_ttl_s = LEASE_TTL_MS / 1000

    def node(self, name: str) -> LocalNode:
        return self.fake.node(name)


def known_cases(longest: int) -> list[Case]:
    """Return requests to fakes for fewer tokens than `longest`, with their right answers."""
    draw, cases = random.Random(4), []
    for number in range(NUM_CASES):
        prompt = [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
        params = SamplingParams(max_tokens=draw.randrange(1, longest), n=draw.choice((1, 1, 3)), logprobs=True)
        answers = [expected(prompt, params, sample_seed(number, index))[:2] for index in range(params.n)]
        cases.append(with_answer(Case(number=number, prompt=prompt, params=params, seed=number), prompt, answers))
    return cases


async def kill(cluster: Fakes, name: str, strength: float) -> None:
    """SIGKILL; a new generation of the node starts a little later."""
    await cluster.node(name).kill()
    await asyncio.sleep(0.1 * strength)
    await cluster.add(name)


async def stop_and_continue(cluster: Fakes, name: str, strength: float) -> None:
    """SIGSTOP and SIGCONT: neither heartbeats nor steps for a while, longer or shorter than anybody waits."""
    cluster.node(name).hanging = True
    await silence(cluster, name, strength)
    cluster.node(name).hanging = False


async def stuck_engine(cluster: Fakes, name: str, strength: float) -> None:
    """The engine stands still while the node goes on to answer."""
    cluster.node(name).hanging = True
    await asyncio.sleep(LONGEST_S * strength)
    cluster.node(name).hanging = False


async def engine_error(cluster: Fakes, name: str, strength: float) -> None:
    sides = cluster.node(name).sides
    if NodeRole.PREFILL in sides:
        sides[NodeRole.PREFILL].engine.errors.append(RuntimeError("the engine failed"))
    if NodeRole.DECODE in sides:
        sides[NodeRole.DECODE].engine.fail_after = round(20 * strength)


async def silence(cluster: Fakes, name: str, strength: float) -> None:
    """Heartbeats are lost; everything else works."""
    await cluster.node(name).fall_silent()
    await asyncio.sleep(LONGEST_S * strength)
    cluster.node(name).join()


async def lost_kv(cluster: Fakes, name: str, strength: float) -> None:
    """KV that was held for readers is gone, as after a lease that ended."""
    cluster.fake.kv.held.clear()


Fakes.kinds = {
    "kill": Kind(fault=kill, roles="pdc", replaces=True),
    "stop and continue": Kind(fault=stop_and_continue, roles="pdc"),
    "stuck engine": Kind(fault=stuck_engine, roles="pdc"),
    "engine error": Kind(fault=engine_error, roles="pdc", is_mild=True),
    "silence": Kind(fault=silence, roles="pdc"),
    "lost KV": Kind(fault=lost_kv, roles="pc", is_mild=True),
    "vanish": Kind(),
}


@asynccontextmanager
async def under_chaos(model: str, seed: int, pairs: int = 2, colocated: int = 1, **config: Any) -> AsyncIterator[Chaos]:
    """A cluster of so many pairs and colocated nodes; at the end nothing may be held anywhere."""
    async with cluster(model, prefills=0, decodes=0, **{**CONFIG, **config}) as fake:
        target = Fakes(fake, pairs, colocated)
        for name in target.names("pdc"):
            await target.add(name)
        await fake.ready(*(node for name in target.names("pdc") for node in node_ids(name)))
        yield Chaos(target, seed)
