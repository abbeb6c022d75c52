"""Whole nodes around fake engines: the real life cycle, service, agent and watch, for routers that are real too.

A stuck engine does what a stopped process does: it neither steps nor answers, takes what it is sent into its inbox, and
when it goes on, it first ends the step that it was in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from corun.config.fields import DecodeConfig, NodeConfig, PrefillConfig
from corun.node.life import Role, live
from corun.observe.endpoints import Observation
from corun.rpc.channel import OPEN, Access
from corun.types import KvHandle, NodeInfo, NodeRef, NodeRole, new_generation
from corun.v1 import decode_service_pb2_grpc, prefill_service_pb2_grpc
from decode_node.service import SERVICE_NAME as DECODE_SERVICE
from decode_node.service import DecodeService
from decode_node.slots import SlotTable
from prefill_node.service import SERVICE_NAME as PREFILL_SERVICE
from prefill_node.service import PrefillService
from tests.fakes import (
    BLOCK_SIZE,
    KV_BLOCKS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    WAIT_S,
    FakeDecodeEngine,
    FakeKv,
    FakePrefillEngine,
    contract,
)


class Stoppable:
    """What both engines add to the fakes: they can be stopped, and go on."""

    def __init__(self) -> None:
        self.facts = SimpleNamespace(finding="")
        self.on_death: Callable[[], None] = lambda: None
        self.steps = 0
        self.stopped = False
        self.closed = False

    async def answer(self) -> None:
        while self.stopped:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    def computed_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.closed = True


class DecodeEngine(Stoppable, FakeDecodeEngine):
    def __init__(self, kv: FakeKv) -> None:
        FakeDecodeEngine.__init__(self, kv)
        Stoppable.__init__(self)

    def stop(self) -> None:
        self.stopped = self.hanging = True

    def go_on(self) -> None:
        """Its last step is done before it reads what came meanwhile."""
        self.on_step([self._step(*running) for running in list(self._running.values())])
        self.stopped = self.hanging = False

    async def abort(self, request_id: str) -> None:
        await self.answer()
        await super().abort(request_id)


class PrefillEngine(Stoppable, FakePrefillEngine):
    def __init__(self, ref: NodeRef, kv: FakeKv) -> None:
        FakePrefillEngine.__init__(self, ref, kv)
        Stoppable.__init__(self)

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False

    async def prefill(self, request_id: str, prompt_token_ids: Sequence[int], reader: NodeRef) -> KvHandle:
        handle = await super().prefill(request_id, prompt_token_ids, reader)
        await self.answer()
        return handle

    async def held_kv_blocks(self) -> int:
        await self.answer()
        return await super().held_kv_blocks()


class LiveNode:
    """One generation of a node, from its start to the end of its process."""

    def __init__(self, config: NodeConfig, role: Role, ref: NodeRef) -> None:
        self.ref = ref
        self.engine: Any = role.engine
        self.service: Any = role.service
        self.stop = asyncio.Event()
        self.observation = Observation(config)
        self.life = asyncio.create_task(self._live(config, role))

    async def _live(self, config: NodeConfig, role: Role) -> None:
        await self.observation.start()
        try:
            await live(config, role, self.stop, self.observation)
        finally:
            await self.observation.stop()

    async def end(self) -> None:
        """Returns when the process has ended with 0; raises what else ended it."""
        await asyncio.wait((self.life,), timeout=WAIT_S)
        assert self.life.done(), "the node did not end"
        self.life.result()


def start_node(
    model: str, role: NodeRole, node_id: str, kv: FakeKv, routers: Sequence[str], access: Access = OPEN, **settings: Any
) -> LiveNode:
    """A process of the role; `settings` go to its config."""
    ref = NodeRef(node_id=node_id, generation=new_generation())
    common: dict[str, Any] = {
        "model": model,
        "node_id": node_id,
        "router": tuple(routers),
        "engine_timeout_s": 0.2,
        "drain_grace_s": 2.0,
    }
    common |= settings
    if role is NodeRole.DECODE:
        config: NodeConfig = DecodeConfig(**{"slots": 8, "lease_ttl_ms": 20_000, **common})
        return LiveNode(config, decode_role(config, ref, kv), ref)
    config = PrefillConfig(**common)
    return LiveNode(config, prefill_role(config, ref, kv), ref)


def decode_role(config: Any, ref: NodeRef, kv: FakeKv) -> Role:
    engine = DecodeEngine(kv)
    table = SlotTable(slots=config.slots, kv_blocks=KV_BLOCKS, block_size=BLOCK_SIZE)
    service = DecodeService(ref, engine, table, lease_ttl_ms=config.lease_ttl_ms)
    engine.on_step = service.on_step
    return Role(
        engine=engine,
        service=service,
        service_name=DECODE_SERVICE,
        register=decode_service_pb2_grpc.add_DecodeServiceServicer_to_server,
        info=_info(config, ref, NodeRole.DECODE, slots=config.slots),
        metrics=service.metrics,
    )


def prefill_role(config: Any, ref: NodeRef, kv: FakeKv) -> Role:
    engine = PrefillEngine(ref, kv)
    service = PrefillService(ref, engine, kv_tokens=KV_BLOCKS * BLOCK_SIZE)
    service.metrics.show_engine(engine, KV_BLOCKS)
    return Role(
        engine=engine,
        service=service,
        service_name=PREFILL_SERVICE,
        register=prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server,
        info=_info(config, ref, NodeRole.PREFILL, nixl=engine.endpoint),
        metrics=service.metrics,
    )


def _info(config: NodeConfig, ref: NodeRef, role: NodeRole, **facts: Any) -> Callable[[str], NodeInfo]:
    info = NodeInfo(
        ref=ref,
        role=role,
        address="",
        contract_json=contract(role, config.model).canonical_json(),
        kv_blocks=KV_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        model=config.model,
        **facts,
    )
    return lambda address: replace(info, address=address)


@contextlib.asynccontextmanager
async def ending(nodes: list[LiveNode]) -> AsyncIterator[None]:
    """Ends all of them, however the test went."""
    try:
        yield
    finally:
        for node in nodes:
            node.engine.stopped = False
            node.stop.set()
        if lives := [node.life for node in nodes]:
            await asyncio.wait(lives, timeout=WAIT_S)
            await asyncio.gather(*(life for life in lives if life.done()), return_exceptions=True)  # Seen.
