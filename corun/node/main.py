"""The life of a node process: load, register, serve, drain, stop.

Owns: the order of these steps, which is the same for both roles. Must not know: what either role does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from corun.auth import Gate
from corun.channel import Access
from corun.cluster import NixlEndpoint, NodeInfo, NodeLoad, NodeRef, NodeRole, new_generation
from corun.config import NodeConfig
from corun.errors import UnavailableError
from corun.node.agent import NodeAgent
from corun.server import GrpcServer

log = logging.getLogger(__name__)


class Service(Protocol):
    """What the life cycle needs of a role's service."""

    draining: bool

    async def load(self) -> NodeLoad: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One role's parts, once its engine has started."""

    engine: Any
    service: Service
    service_name: str
    register: Callable[[Any, Any], None]  # the generated add_XServicer_to_server
    info: Callable[[str], NodeInfo]  # from the server's address


def log_to_stderr() -> None:
    """One line per event on stderr, vLLM's own log included in its own format."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def node_ref(config: NodeConfig, role: NodeRole) -> NodeRef:
    """This life of the node: a configured or host-derived id, and a new generation."""
    name = config.node_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    return NodeRef(node_id=name, generation=new_generation())


def node_info(
    config: NodeConfig, ref: NodeRef, role: NodeRole, engine: Any, *, slots: int = 0, nixl: NixlEndpoint | None = None
) -> Callable[[str], NodeInfo]:
    """What a node tells routers about itself and its started engine, once its server's address is known."""

    def at(address: str) -> NodeInfo:
        return NodeInfo(
            ref=ref,
            role=role,
            address=config.advertise or address,
            contract_json=engine.contract.canonical_json(),
            slots=slots,
            kv_blocks=engine.facts.kv_blocks,
            block_size=engine.facts.block_size,
            max_model_len=engine.facts.max_model_len,
            vocab_size=engine.facts.vocab_size,
            nixl=nixl,
            model=config.model,
            finding=engine.facts.finding,
        )

    return at


async def live(config: NodeConfig, role: Role, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains; a node that failed its self-test stays NOT_SERVING meanwhile.

    Raises:
        UnavailableError: the engine died; the process ends with 1 and its supervisor starts a new generation.
    """
    died = asyncio.Event()
    role.engine.on_death = died.set
    access = Access.of_member(config)
    server = GrpcServer(config.host, config.port, tls=access.tls, gate=Gate(cluster=access.token))
    server.add(role.register, role.service)
    await server.start()
    agent = NodeAgent(role.info(server.address), config.router, role.service.load, access)
    membership = asyncio.create_task(agent.run())
    # It ends by itself only when the engine can no longer be asked: an idle engine's death is seen here first.
    membership.add_done_callback(lambda task: None if task.cancelled() else died.set())
    finding = role.engine.facts.finding
    await _set_serving(server, role, not finding)
    if finding:
        # Routers are told, and refuse the node; it stays up so that whoever asks can read why.
        log.error("not serving on %s: the self-test failed: %s", server.address, finding)
    else:
        log.info("serving on %s", server.address)
    await _first(stop, died)
    await _set_serving(server, role, False)
    if not died.is_set():
        await _drain(role.service, agent, config.drain_grace_s)
    await _cancel(membership)
    await server.stop(1.0)
    await role.engine.close()
    if died.is_set():
        raise UnavailableError("the engine died")


async def live_and_leave(config: NodeConfig, role: Role, stop: asyncio.Event) -> NoReturn:
    """`live`, and the end of the process: with 0 after a drain, with 1 if the engine died.

    At once, since everything of ours is closed by then: what vLLM's sockets and NIXL's threads still do when the
    interpreter ends has been seen to keep it from ending.
    """
    code = 0
    try:
        await live(config, role, stop)
    except UnavailableError as error:
        log.error("%s", error)
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _set_serving(server: GrpcServer, role: Role, serving: bool) -> None:
    for name in ("", role.service_name):
        await server.set_serving(name, serving)


async def _drain(service: Service, agent: NodeAgent, grace_s: float) -> None:
    """Takes no new work and waits for the running work, at most `grace_s` seconds."""
    service.draining = agent.draining = True
    deadline = asyncio.get_running_loop().time() + grace_s
    # Only the engine's worker knows when the last KV was read, and it can only be asked.
    while _busy(await service.load()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _busy(load: NodeLoad) -> bool:
    return load.used_slots > 0 or load.used_kv_blocks > 0 or load.queued_prompt_tokens > 0


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("membership ended", exc_info=error)
