"""Chaos over fake engines: a seeded stream of faults against a real router and real node services.

The right answer of every request is known ahead. Faults come one after the other. A seed gives the same kinds again;
and the same nodes at the same times, as far as a machine's timing allows. Tests only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from corun.errors import CorunError
from corun.params import SamplingParams
from corun.seeds import sample_seed
from corun.testing.engines import expected
from corun.testing.nodes import LocalNode
from corun.types import NodeRole
from tests.chaos.report import Report
from tests.clusters import FakeCluster, cluster, generate

READY_AGAIN_S = 60.0
PAUSE_S = 0.06
"""Mean time between faults, divided by the pairs of nodes."""
REQUEST_TIMEOUT_S = 60.0
LEASE_TTL_MS = 1000
CONFIG: dict[str, Any] = {
    "max_attempts": 1000,  # A run may be hit any number of times here.
    "step_timeout_s": 0.4,
    "prefill_timeout_s": 0.4,
    "reserve_timeout_s": 0.4,
    "heartbeat_timeout_ms": 300,
    "node_wait_s": REQUEST_TIMEOUT_S,
}


class Chaos:
    """One run: requests come and go while faults hit the nodes."""

    def __init__(self, fake: FakeCluster, seed: int, pairs: int = 2) -> None:
        self.report = Report(seed=seed)
        self._pause_s = PAUSE_S / pairs
        self._fake = fake
        self._draw = random.Random(seed)
        self._kinds = random.Random(f"{seed} kinds")
        self._clients = random.Random(seed + 1)
        self._number = 0
        self._stop = asyncio.Event()
        self._repairs: set[asyncio.Task[None]] = set()

    async def run(self, *, faults: int, clients: int) -> Report:
        began = time.monotonic()
        streams = [asyncio.create_task(self._client()) for _ in range(clients)]
        while self.report.faults.total() < faults:
            await self._hit()
            await asyncio.sleep(self._draw.expovariate(1 / self._pause_s))
        await asyncio.gather(*self._repairs)
        calm = time.monotonic()
        await asyncio.wait_for(self._whole(), READY_AGAIN_S)
        self.report.ready_again_s = round(time.monotonic() - calm, 2)
        self._stop.set()
        await asyncio.gather(*streams)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    async def _client(self) -> None:
        """One request after the other, each with its known answer; some are given up half-way."""
        while not self._stop.is_set():
            self._number += 1
            number = self._number
            prompt = [self._clients.randrange(256) for _ in range(self._clients.randrange(1, 60))]
            params = SamplingParams(max_tokens=self._clients.randrange(1, 60), n=self._clients.choice((1, 1, 3)))
            params = SamplingParams(max_tokens=params.max_tokens, n=params.n, logprobs=True)
            call = asyncio.create_task(generate(self._fake, prompt, params, seed=number, timeout_s=REQUEST_TIMEOUT_S))
            if self._clients.random() < 0.1:
                await asyncio.wait((call,), timeout=self._clients.random() * 0.1)
                call.cancel()
                await asyncio.wait((call,))
                self.report.vanished += 1
            else:
                await self._judge(number, prompt, params, call)

    async def _judge(self, number: int, prompt: list[int], params: SamplingParams, call: Awaitable[Any]) -> None:
        try:
            outputs = await call
        except CorunError as error:
            self.report.failed.append(f"request {number}: {type(error).__name__}: {error}")
            return
        self.report.completed += 1
        for index, output in enumerate(outputs):
            ids, logprobs, _ = expected(prompt, params, sample_seed(number, index))
            if (output.token_ids, output.logprobs) != (ids, logprobs):
                self.report.wrong.append(f"request {number}, sample {index}")

    async def _hit(self) -> None:
        """One fault of a random kind on a random node that is up; there is always one more of its role."""
        up = [node for node in self._fake.nodes if _is_up(node)]
        candidates = [node for node in up if sum(other.info.role is node.info.role for other in up) > 1]
        if not candidates:
            return
        name, fault = self._kinds.choice(sorted(FAULTS.items()))
        self.report.faults[name] += 1
        node = self._draw.choice(sorted(candidates, key=lambda node: str(node.info.ref)))
        task = asyncio.create_task(fault(self, node, self._draw.random()))
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)

    async def kill(self, node: LocalNode, moment: float) -> None:
        """SIGKILL; a new generation of the node starts a little later."""
        await node.kill()
        await asyncio.sleep(0.1 * moment)
        await add(self._fake, node.info.role, node.info.ref.node_id)

    async def stop_and_continue(self, node: LocalNode, moment: float) -> None:
        """SIGSTOP and SIGCONT: neither heartbeats nor steps for a while, longer or shorter than anybody waits."""
        node.engine.hanging = True
        await node.fall_silent()
        await asyncio.sleep(0.6 * moment)
        node.engine.hanging = False
        node.join()

    async def stuck_engine(self, node: LocalNode, moment: float) -> None:
        """The engine stands still while the node goes on to answer."""
        node.engine.hanging = True
        await asyncio.sleep(0.6 * moment)
        node.engine.hanging = False

    async def engine_error(self, node: LocalNode, moment: float) -> None:
        if node.info.role is NodeRole.PREFILL:
            node.engine.errors.append(RuntimeError("the engine failed"))
        else:
            node.engine.fail_after = round(20 * moment)

    async def silence(self, node: LocalNode, moment: float) -> None:
        """Heartbeats are lost; everything else works."""
        await node.fall_silent()
        await asyncio.sleep(0.6 * moment)
        node.join()

    async def lost_kv(self, node: LocalNode, moment: float) -> None:
        """KV that was held for readers is gone, as after a lease that ended."""
        self._fake.kv.held.clear()

    async def _whole(self) -> None:
        names = {node.info.ref.node_id for node in self._fake.nodes}
        await self._fake.ready(*names)


FAULTS: dict[str, Callable[[Chaos, LocalNode, float], Awaitable[None]]] = {
    "kill": Chaos.kill,
    "stop and continue": Chaos.stop_and_continue,
    "stuck engine": Chaos.stuck_engine,
    "engine error": Chaos.engine_error,
    "silence": Chaos.silence,
    "lost KV": Chaos.lost_kv,
}


def _is_up(node: LocalNode) -> bool:
    return node.is_member and not node.engine.hanging


@asynccontextmanager
async def under_chaos(model: str, seed: int, pairs: int = 2) -> AsyncIterator[Chaos]:
    """A cluster of so many prefill and decode nodes; at the end nothing may be held anywhere."""
    async with cluster(model, prefills=0, decodes=0, **CONFIG) as fake:
        for number in range(1, pairs + 1):
            await add(fake, NodeRole.PREFILL, f"p{number}")
            await add(fake, NodeRole.DECODE, f"d{number}")
        await fake.ready(*(f"{role}{number}" for role in "pd" for number in range(1, pairs + 1)))
        yield Chaos(fake, seed, pairs)


async def add(fake: FakeCluster, role: NodeRole, node_id: str) -> None:
    """Starts a node; what a router holds there and has forgotten ends soon."""
    if role is NodeRole.PREFILL:
        node = await fake.add_prefill(node_id)
        node.engine.kv_ttl_s = LEASE_TTL_MS / 1000
    else:
        await fake.add_decode(node_id, slots=8, lease_ttl_ms=LEASE_TTL_MS)
