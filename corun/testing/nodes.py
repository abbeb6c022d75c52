"""Whole nodes around fake engines: the real life, service, agent and watch over the engine, in this process.

This module must not know routers: nodes find them at addresses.
"""

from __future__ import annotations

import asyncio
from typing import Any

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig
from corun.node.life import Life, Role, node_info
from corun.observe.endpoints import Observation
from corun.testing.engines import KV_BLOCKS, Facts, FakeDecodeEngine, FakeKv, FakePrefillEngine
from corun.testing.model import contract
from corun.types import NodeInfo, NodeRef, NodeRole
from corun.v1 import decode_service_pb2_grpc, prefill_service_pb2_grpc
from decode_node import service as decode_service
from decode_node.slots import SlotTable
from prefill_node import service as prefill_service


def prefill_role(
    config: PrefillConfig, ref: NodeRef, kv: FakeKv, *, kv_blocks: int = KV_BLOCKS, **changes: Any
) -> Role:
    """Return the parts of a prefill node. changes: other values for fields of its model contract."""
    facts = Facts(kv_blocks=kv_blocks)
    engine = FakePrefillEngine(contract(NodeRole.PREFILL, config.model, **changes), kv, facts, ref)
    service = prefill_service.PrefillService(ref, engine, kv_tokens=kv_blocks * facts.block_size)
    service.metrics.show_engine(engine, kv_blocks)
    return Role(
        engine=engine,
        service=service,
        service_name=prefill_service.SERVICE_NAME,
        register=prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
        info=node_info(config, ref, NodeRole.PREFILL, engine, nixl=engine.endpoint),
        metrics=service.metrics,
    )


def decode_role(config: DecodeConfig, ref: NodeRef, kv: FakeKv, *, kv_blocks: int = KV_BLOCKS, **changes: Any) -> Role:
    """Return the parts of a decode node. changes: other values for fields of its model contract."""
    facts = Facts(kv_blocks=kv_blocks)
    engine = FakeDecodeEngine(contract(NodeRole.DECODE, config.model, slots=config.slots, **changes), kv, facts)
    table = SlotTable(slots=config.slots, kv_blocks=kv_blocks, block_size=facts.block_size)
    service = decode_service.DecodeService(ref, engine, table, lease_ttl_ms=config.lease_ttl_ms)
    engine.on_step = service.on_step
    return Role(
        engine=engine,
        service=service,
        service_name=decode_service.SERVICE_NAME,
        register=decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
        info=node_info(config, ref, NodeRole.DECODE, engine, slots=config.slots),
        metrics=service.metrics,
    )


class LocalNode(Life):
    """One generation of a node, from its start to its end. Make it inside a running loop, and `start` it.

    To a router it is a node process: it may be stopped, which drains it, or killed.
    """

    def __init__(self, config: NodeConfig, role: Role, ref: NodeRef) -> None:
        self.observation = Observation(config)
        super().__init__(config, role, self.observation)
        self.ref = ref
        self.engine: Any = role.engine
        self.service: Any = role.service
        self.stop = asyncio.Event()
        """Set this to ask the node to end, like SIGTERM: it drains first."""
        self.membership: asyncio.Task[None] | None = None
        """The task that keeps the node registered; None before the node has joined."""
        self.info: NodeInfo
        self.life: asyncio.Task[None]
        """The task that is this node's process. It raises the error that ends the node."""

    async def start(self) -> None:
        """Listen and watch the engine; `join` is what makes routers use the node."""
        await self.observation.start()
        await super().start()
        self.info = self._role.info(self.server.address)
        self.life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        try:
            await self.run(self.stop)
        finally:
            await self.observation.stop()

    @property
    def is_member(self) -> bool:
        """Whether the node keeps itself registered now."""
        return self.membership is not None and not self.membership.done()

    @property
    def leases(self) -> int:
        """The number of leases on a decode node that routers hold."""
        return len(self.service._table) if self.info.role is NodeRole.DECODE else 0

    @property
    def drawn_tokens(self) -> int:
        """The number of tokens that a decode node has drawn since its start."""
        return int(self.service.metrics.tokens.value)

    @property
    def queued_tokens(self) -> int:
        """The number of tokens of the prompts that a prefill node is to compute."""
        return int(self.service.queued_tokens)

    def join(self) -> asyncio.Task[None]:
        """Register with the routers and send heartbeats."""
        self.membership = super().join()
        return self.membership

    async def fall_silent(self) -> None:
        """Stop the heartbeats; the service still answers. `join` ends the silence."""
        if self.membership is not None:
            self.membership.cancel()
            await asyncio.wait((self.membership,))

    async def kill(self) -> None:
        """End at once, like a process that dies."""
        if not self.life.done():
            self.engine.hanging = True  # It draws nothing more while the server closes.
            self.life.cancel()
            await self.close(grace_s=0.0)
        await asyncio.wait((self.life,))
        if not self.life.cancelled():
            self.life.exception()  # It has been looked at: what ended the node is no error of this process.

    async def end(self) -> None:
        """Wait until the node has ended. Raises the error that ended it, if any."""
        await asyncio.shield(self.life)
