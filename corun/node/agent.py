"""A node's membership: registers with every router and keeps telling it that the node lives.

Owns: the retry and heartbeat loop of one node. Must not know: engines, slots. Start order does not matter: a router
that is not there yet is tried until it is, and one that was restarted asks for a new registration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc

from corun import wire
from corun.channel import OPEN, Access, channel
from corun.cluster import NodeInfo, NodeLoad
from corun.errors import (
    ContractMismatchError,
    CorunError,
    DataLossError,
    NotFoundError,
    UnauthenticatedError,
    from_rpc_error,
)
from corun.v1 import registry_service_pb2 as pb
from corun.v1 import registry_service_pb2_grpc

RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


class NodeAgent:
    """Keeps one node registered with each of `routers` (host:port) while `run` runs."""

    def __init__(
        self, info: NodeInfo, routers: Sequence[str], load: Callable[[], Awaitable[NodeLoad]], access: Access = OPEN
    ) -> None:
        self.draining = False
        self._access = access
        self._info = info
        self._routers = routers
        self._load = load
        self._said: dict[str, str] = {}  # the last complaint about each router, so that it is logged once

    async def run(self) -> None:
        """Runs until cancelled."""
        await asyncio.gather(*(self._serve(router) for router in self._routers))

    async def _serve(self, router: str) -> None:
        async with channel(router, access=self._access) as link:
            stub = registry_service_pb2_grpc.RegistryServiceStub(link)  # type: ignore[no-untyped-call]
            while True:
                try:
                    interval = await self._register(stub, router)
                    await self._beat(stub, interval)
                except grpc.RpcError as failure:
                    self._complain(router, from_rpc_error(failure))
                await asyncio.sleep(RETRY_S)

    async def _register(self, stub: registry_service_pb2_grpc.RegistryServiceStub, router: str) -> float:
        """Registers and returns the heartbeat interval in seconds."""
        request = pb.RegisterRequest(node=wire.node_info_to_proto(self._info))
        answer = await stub.Register(request, timeout=CALL_TIMEOUT_S)
        log.info("registered with router %s at %s", answer.router_id, router)
        self._said.pop(router, None)
        return float(answer.heartbeat_interval_ms) / 1000

    async def _beat(self, stub: registry_service_pb2_grpc.RegistryServiceStub, interval: float) -> None:
        """Heartbeats until the router asks for a new registration; raises grpc.RpcError when it is gone."""
        ref = wire.node_ref_to_proto(self._info.ref)
        while True:
            load = wire.node_load_to_proto(await self._load())
            request = pb.HeartbeatRequest(ref=ref, load=load, draining=self.draining)
            try:
                await stub.Heartbeat(request, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as failure:
                if isinstance(from_rpc_error(failure), NotFoundError):
                    return
                raise
            await asyncio.sleep(interval)

    def _complain(self, router: str, error: CorunError) -> None:
        text = str(error)
        if self._said.get(router) != text:
            lasting = isinstance(error, (ContractMismatchError, DataLossError, UnauthenticatedError))
            level = logging.ERROR if lasting else logging.INFO
            log.log(level, "router %s: %s", router, text)
        self._said[router] = text
