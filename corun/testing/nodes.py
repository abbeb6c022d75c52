"""Whole nodes around fake engines: the real life, service, agent and watch over the engine, in this process.

This module must not know routers: nodes find them at addresses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig
from corun.node.life import Life, Role
from corun.node.membership import NodeAgent
from corun.observe.endpoints import Observation
from corun.testing.engines import KV_BLOCKS, Facts, FakeDecodeEngine, FakeKv, FakePrefillEngine
from corun.testing.model import contract
from corun.types import NodeInfo, NodeRef, NodeRole
from decode_node import service as decode_service
from prefill_node import service as prefill_service


def prefill_role(
    config: PrefillConfig,
    ref: NodeRef,
    kv: FakeKv,
    *,
    kv_blocks: int = KV_BLOCKS,
    engine_id: str = "",
    samples: Any = None,
    **changes: Any,
) -> Role:
    """Return the parts of a prefill node. engine_id: of its engine. samples: the service of a colocated node's other
    side. changes: other values for fields of its model contract."""
    model, facts = contract(NodeRole.PREFILL, config.model, **changes), Facts(kv_blocks=kv_blocks)
    return prefill_service.role(config, ref, FakePrefillEngine(model, kv, facts, ref, engine_id), samples)


def decode_role(
    config: DecodeConfig,
    ref: NodeRef,
    kv: FakeKv,
    *,
    kv_blocks: int = KV_BLOCKS,
    engine_id: str = "",
    **changes: Any,
) -> Role:
    """Return the parts of a decode node; see `prefill_role`."""
    model = contract(NodeRole.DECODE, config.model, slots=config.slots, **changes)
    return decode_service.role(config, ref, FakeDecodeEngine(model, kv, Facts(kv_blocks=kv_blocks), engine_id))


class LocalNode(Life):
    """One generation of a node, from its start to its end. Make it inside a running loop, and `start` it.

    To a router it is a node process: it may be stopped, which drains it, or killed. A colocated node has two roles, the
    decode side last, and a router knows it as two nodes.
    """

    def __init__(self, config: NodeConfig, roles: Sequence[Role], ref: NodeRef) -> None:
        self.observation = Observation(config)
        super().__init__(config, roles, self.observation)
        self._role = roles[-1]
        self.ref = ref
        """The name of the process and its generation. The sides of a colocated node add their roles to the name."""
        self.sides: dict[NodeRole, Role] = {role.engine.contract.role: role for role in roles}
        self.engine: Any = self._role.engine
        """The engine; of a colocated node, its decode side."""
        self.service: Any = self._role.service
        self.stop = asyncio.Event()
        """Set this to ask the node to end, like SIGTERM: it drains first."""
        self.memberships: list[asyncio.Task[None]] = []
        """The tasks that keep the sides registered; empty before the node has joined."""
        self.info: NodeInfo
        """What it tells routers of itself; of a colocated node, what its decode side does."""
        self.life: asyncio.Task[None]
        """The task that is this node's process. It raises the error that ends the node."""

    async def start(self) -> None:
        """Listen and watch the engine; `join` is what makes routers use the node."""
        await self.observation.start()
        await super().start()
        self.info = self.agent.info
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            await self.run(self.stop)
        finally:
            await self.observation.stop()

    @property
    def agent(self) -> NodeAgent:
        """What keeps the node registered, once it has started. Tests replace it."""
        return self.agents[-1]

    @agent.setter
    def agent(self, agent: NodeAgent) -> None:
        self.agents = [agent]

    @property
    def refs(self) -> tuple[NodeRef, ...]:
        """The nodes that routers know it as."""
        return tuple(agent.info.ref for agent in self.agents)

    @property
    def is_member(self) -> bool:
        """Whether the node keeps itself registered now."""
        return bool(self.memberships) and not any(membership.done() for membership in self.memberships)

    @property
    def leases(self) -> int:
        """The number of leases that routers hold on a node that samples."""
        return len(self.service._table) if NodeRole.DECODE in self.sides else 0

    @property
    def drawn_tokens(self) -> int:
        """The number of tokens that a node that samples has drawn since its start."""
        return int(self.service.metrics.tokens.value)

    @property
    def queued_tokens(self) -> int:
        """The number of tokens of the prompts that a node is to compute."""
        service: Any = self.sides[NodeRole.PREFILL].service
        return int(service.queued_tokens)

    @property
    def hanging(self) -> bool:
        """Whether the engine computes nothing, on any side, although it answers."""
        return bool(self.engine.hanging)

    @hanging.setter
    def hanging(self, hanging: bool) -> None:
        for role in self.sides.values():
            role.engine.hanging = hanging

    def join(self) -> list[asyncio.Task[None]]:
        """Register with the routers and send heartbeats."""
        self.memberships = super().join()
        return self.memberships

    async def fall_silent(self) -> None:
        """Stop the heartbeats; the service still answers. `join` ends the silence."""
        for membership in self.memberships:
            membership.cancel()
        if self.memberships:
            await asyncio.wait(self.memberships)

    async def kill(self) -> None:
        """End at once, like a process that dies."""
        if not self.life.done():
            self.hanging = True  # It draws nothing more while the server closes.
            self.life.cancel()
            await self.close(grace_s=0.0)
        await asyncio.wait((self.life,))
        if not self.life.cancelled():
            self.life.exception()  # It has been looked at: what ended the node is no error of this process.

    async def end(self) -> None:
        """Wait until the node has ended. Raises the error that ended it, if any."""
        await asyncio.shield(self.life)
