"""The registry side of a router, and a resolver of names, that answer as a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from corun.errors import CorunError
from corun.rpc import codec
from corun.rpc.server import GrpcServer
from corun.types import NixlEndpoint, NodeInfo, NodeRef, NodeRole
from corun.v1 import registry_service_pb2 as pb
from corun.v1 import registry_service_pb2_grpc as pb_grpc
from tests.answers import until

INFO = NodeInfo(
    ref=NodeRef(node_id="p0", generation="a" * 16),
    role=NodeRole.PREFILL,
    address="127.0.0.1:7001",
    contract_json="{}",
    kv_blocks=100,
    block_size=16,
    max_model_len=512,
    vocab_size=256,
    nixl=NixlEndpoint(engine_id="p0-engine", host="127.0.0.1", port=7000, tp_size=1),
    model="/models/tiny",
)
DEADLINE_S = 20.0


class Router(pb_grpc.RegistryServiceServicer):
    """Answers as it is told; `refuse_*` are raised, or end the call with a status, until they are cleared."""

    def __init__(self) -> None:
        self.registered: list[NodeInfo] = []
        self.beats: list[pb.HeartbeatRequest] = []
        self.refuse_register: CorunError | None = None
        self.refuse_beat: CorunError | grpc.StatusCode | None = None
        self.quarantined = ""
        self.quarantined_at_once = ""
        self.interval_ms = 5
        self.hang = False
        self.hanging = asyncio.Event()

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.refuse_register:
            raise self.refuse_register
        self.registered.append(codec.node_info_from_proto(request.node))
        return pb.RegisterResponse(
            router_id="r0", heartbeat_interval_ms=self.interval_ms, quarantined=self.quarantined_at_once
        )

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.beats.append(request)
        if self.hang:
            self.hanging.set()
            await asyncio.sleep(DEADLINE_S)
        if isinstance(self.refuse_beat, grpc.StatusCode):
            await context.abort(self.refuse_beat, "told to")
        elif self.refuse_beat is not None:
            raise self.refuse_beat
        return pb.HeartbeatResponse(quarantined=self.quarantined)


class Names:
    """A resolver: `at` has the addresses of each host, or what a lookup of it raises."""

    def __init__(self, **at: Sequence[str] | Exception) -> None:
        self.at = at
        self.asked: list[tuple[str, int]] = []
        self.hang = False
        self.hanging = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        self.hanging += 1
        while self.hang:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        self.hanging -= 1
        answer = self.at.get(host, OSError("no such name"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def look_again(self) -> None:
        """Until two more lookups have been answered, the second of them a whole one."""
        seen = len(self.asked)
        await until(lambda: len(self.asked) > seen + 2)


@contextlib.asynccontextmanager
async def serving(router: Router, port: int = 0, **options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(port=port, **options)
    server.add(pb_grpc.add_RegistryServiceServicer_to_server, router)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)
