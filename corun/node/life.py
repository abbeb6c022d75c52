"""The life of a node process: load, register, serve, drain, stop.

Owns: the order of these steps, which is the same for both roles. Must not know: what either role does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from prometheus_client import Metric

from corun.config.fields import NodeConfig
from corun.errors import CorunError, DataLossError, UnavailableError
from corun.node.membership import NodeAgent
from corun.node.metrics import EngineCollector, node_metrics
from corun.node.watchdog import Pulse
from corun.observe import stages, tracing
from corun.observe.endpoints import Observation
from corun.observe.metrics import LoopCollector
from corun.rpc.auth import Gate
from corun.rpc.channel import Access
from corun.rpc.server import GrpcServer
from corun.types import Demand, NixlEndpoint, NodeInfo, NodeLoad, NodeRef, NodeRole, new_generation

EXIT_DIED = 1
"""The engine died, or was stuck for too long."""
EXIT_QUARANTINED = 3
"""A router said that this generation may have given wrong bits: only a new start, which tests itself, may be used."""
NEWS_TIMEOUT_S = 0.5
"""For routers to hear that a node's engine is stuck, before its streams end; or that it takes no new work."""
TELL_TIMEOUT_S = 5.0
"""For all routers to hear that a quarantined node must not be used."""
log = logging.getLogger(__name__)


class Service(Protocol):
    """What the life cycle needs of a role's service."""

    draining: bool
    """Finishes what it has."""
    closed: str
    """Why nothing can be started now; empty if it can."""

    async def load(self) -> NodeLoad: ...

    def give_up(self, reason: str) -> None:
        """Ends whatever runs with an error, so that routers run it elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One role's parts, once its engine has started."""

    engine: Any
    service: Service
    service_name: str
    register: Callable[[Any, Any], None]  # the generated add_XServicer_to_server
    info: Callable[[str], NodeInfo]  # from the server's address
    metrics: Callable[[], Iterable[Metric]]  # of the role
    on_demand: Callable[[Demand], None] = lambda demand: None  # Routers have some of decode nodes only.


def log_to_stderr() -> None:
    """One line per event on stderr, vLLM's own log included in its own format."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def start_tracing(ref: NodeRef, role: NodeRole) -> None:
    """Records spans if the environment asks for it. The engine's processes would inherit that and export spans of their
    own (vllm/tracing/otel.py), so it is taken from them."""
    tracing.start(f"corun-{role.value}", str(ref))
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]


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


class Life:
    """A node that listens, from its first registration to its last release."""

    def __init__(self, config: NodeConfig, role: Role, observation: Observation) -> None:
        access = Access.of_member(config)
        self._role = role
        self._config = config
        self._observation = observation
        gate = Gate(cluster=access.token)
        self._server = GrpcServer(config.host, config.port, tls=access.tls, gate=gate, health=observation.health)
        self._server.add(role.register, role.service)
        self._access = access
        self._agent: NodeAgent
        self._quarantined = ""
        self._watches: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[CorunError] = asyncio.get_running_loop().create_future()
        """Why the process has to end, unless it was asked to."""

    async def start(self) -> None:
        """Listens, and joins the routers; a node that failed its self-test stays NOT_SERVING."""
        role, config = self._role, self._config
        role.engine.on_death = lambda: self._end(UnavailableError("the engine died"))
        await self._server.start()
        info = role.info(self._server.address)
        self._agent = NodeAgent(info, config.router, role.service.load, self._access)
        self._agent.on_quarantine = self._note_quarantine
        self._agent.on_demand = role.on_demand
        pulse = Pulse(
            role.engine, self._note_stuck, timeout_s=config.engine_timeout_s, restart_s=config.engine_restart_s
        )
        # Membership ends by itself only when the engine can no longer be asked.
        for work in (self._agent.run(), pulse.run()):
            watch = asyncio.create_task(work)
            watch.add_done_callback(self._note_end)
            self._watches.append(watch)
        await self._tell_health()
        self._observation.metrics.add(LoopCollector(lambda: self._metrics(info)))
        self._observation.metrics.add(EngineCollector(info.role))
        self._observation.note_started()
        if finding := role.engine.facts.finding:
            # Routers are told, and refuse the node; it stays up so that whoever asks can read why.
            log.error("not serving on %s: the self-test failed: %s", self._server.address, finding)
        else:
            log.info("serving on %s", self._server.address)

    def _metrics(self, info: NodeInfo) -> Iterable[Metric]:
        yield from node_metrics(info, certified=not self._role.engine.facts.finding, serving=self._is_serving)
        yield from self._role.metrics()

    async def until_over(self, stop: asyncio.Event) -> CorunError | None:
        """Why the process has to end; None if it was asked to."""
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopped, self._ended), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return None if stop.is_set() else self._ended.result()

    async def drain(self) -> None:
        """Waits for the running work, and hands over to other nodes what takes longer than `drain_grace_s` seconds."""
        service, grace_s = self._role.service, self._config.drain_grace_s
        deadline = asyncio.get_running_loop().time() + grace_s
        # Only the engine's worker knows when the last KV was read, and it can only be asked.
        while await self._is_busy():
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("work still runs after %g s: other nodes have to do it", grace_s)
                service.give_up(f"it was told to stop {grace_s:g} s ago")
                return
            await asyncio.sleep(0.05)

    async def refuse(self, error: CorunError | None) -> None:
        """Takes no new work, and says so. error: what ends the process, if nobody has told it to end."""
        self._role.service.draining = self._agent.draining = True
        if error is None:
            self._agent.tell()
        else:
            self._say(str(error))
        await self._tell_health()
        await self._agent.heard(NEWS_TIMEOUT_S)  # A node with nothing to do is gone right after this.

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.wait(self._watches)
        await self._server.stop(1.0)
        await self._role.engine.close()

    async def say_farewell(self) -> None:
        """Waits until every router knows that the node is of no use any more."""
        await self._agent.heard(TELL_TIMEOUT_S)

    def _note_quarantine(self, reason: str) -> None:
        """At once, even in a drain: what it computes now may be wrong."""
        if not self._quarantined:
            self._quarantined = reason
            self._say(reason)
            self._role.service.give_up(reason)
            self._end(DataLossError(reason))

    async def _note_stuck(self, stuck: str) -> None:
        if self._quarantined:
            return
        self._say(stuck)
        await self._tell_health()
        if stuck:
            await self._agent.heard(NEWS_TIMEOUT_S)  # Else what is given up here may be tried here once more.
            self._role.service.give_up(stuck)

    def _say(self, reason: str) -> None:
        """Takes no work, for a reason; an empty one ends that. All routers hear it."""
        self._role.service.closed = self._agent.stuck = reason
        self._agent.tell()

    async def _tell_health(self) -> None:
        for name in ("", self._role.service_name):
            await self._server.set_serving(name, self._is_serving)

    @property
    def _is_serving(self) -> bool:
        service = self._role.service
        return not (service.draining or service.closed or self._role.engine.facts.finding)

    async def _is_busy(self) -> bool:
        if self._role.service.closed or self._ended.done():
            return False  # What ran has been given up, or has died with the engine.
        try:
            load = await self._role.service.load()
        except Exception:
            log.exception("the engine cannot be asked what still runs")
            return False
        return load.used_slots > 0 or load.used_kv_blocks > 0 or load.queued_prompt_tokens > 0

    def _end(self, error: CorunError) -> None:
        if not self._ended.done():
            self._ended.set_result(error)

    def _note_end(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        error = watch.exception()
        if not isinstance(error, CorunError):
            log.error("a watch over the node ended", exc_info=error)
            error = UnavailableError("the engine died")
        self._end(error)


async def live(config: NodeConfig, role: Role, stop: asyncio.Event, observation: Observation) -> None:
    """Serves until `stop` is set, then drains. Raises the error that ends the process before."""
    life = Life(config, role, observation)
    await life.start()
    error = await life.until_over(stop)
    await life.refuse(error)
    if error is None:
        await life.drain()
    elif isinstance(error, DataLossError):
        await life.say_farewell()
    await life.close()
    if error is not None:
        raise error


async def live_and_leave(config: NodeConfig, role: Role, stop: asyncio.Event, observation: Observation) -> NoReturn:
    """`live`, and the end of the process: with 0 after a drain, else with one of the codes above.

    At once, since everything of ours is closed by then: what vLLM's sockets and NIXL's threads still do when the
    interpreter ends has been seen to keep it from ending.
    """
    code = 0
    stages.enter("joining the routers")
    try:
        await live(config, role, stop, observation)
    except CorunError as error:
        log.error("%s", error)
        code = EXIT_QUARANTINED if isinstance(error, DataLossError) else EXIT_DIED
    await tracing.stop()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
