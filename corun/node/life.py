"""The life of a node process: load, register, serve, drain, stop.

Owns: the order of these steps, which is the same for all nodes. A colocated node has both roles, with one engine, and
registers for each. Must not know: what either role does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from corun.config.fields import NodeConfig
from corun.errors import CorunError, DataLossError, UnavailableError
from corun.node import kept, scratch
from corun.node.membership import NodeAgent
from corun.node.metrics import NodeMetrics, engine_metrics
from corun.node.watchdog import Pulse
from corun.observe import stages, tracing
from corun.observe.endpoints import Observation
from corun.observe.metrics import Metrics
from corun.rpc.auth import Gate
from corun.rpc.channel import Access
from corun.rpc.server import GrpcServer
from corun.types import NixlEndpoint, NodeInfo, NodeLoad, NodeRef, NodeRole, new_generation

EXIT_DIED = 1
"""The engine died, or was stuck for too long, or a second signal ended the drain."""
EXIT_QUARANTINED = 3
"""A router said that this generation may have given wrong bits. Only a new process, which tests itself, may be used."""
NEWS_TIMEOUT_S = 0.5
"""The time for routers to learn that the engine is stuck, before its streams end, or that it takes no new work."""
QUARANTINE_TIMEOUT_S = 5.0
"""The time for all routers to learn that a quarantined node must not be used."""
log = logging.getLogger(__name__)


class Service(Protocol):
    """The members that the life cycle needs from a role's service."""

    draining: bool
    """Whether the service finishes its running work and takes no new work."""
    closed: str
    """The reason why no work can be started now; empty if it can."""

    async def load(self) -> NodeLoad: ...

    def give_up(self, reason: str) -> None:
        """End all running work with an error, so that routers run it elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The parts of a node that differ by role, once its engine has started."""

    engine: Any
    service: Service
    service_name: str
    register: Callable[[Any, Any], None]  # the generated add_XServicer_to_server
    info: Callable[[str], NodeInfo]  # takes the server's address
    metrics: Metrics  # the metrics of this role only


def log_to_stderr() -> None:
    """Log one line per event to stderr; vLLM's own log goes there, too, in its own format."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def start_tracing(ref: NodeRef, kind: str) -> None:
    """Record spans if the environment asks for it. Then remove these variables: otherwise the engine's processes would
    inherit them and export spans of their own (vllm/tracing/otel.py)."""
    tracing.start(f"corun-{kind}", str(ref))
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]


def node_ref(config: NodeConfig, role: NodeRole) -> NodeRef:
    """Return this process's node reference: a configured or host-derived id, and a new generation."""
    name = config.node_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}"
    return NodeRef(node_id=name, generation=new_generation())


def side_refs(config: NodeConfig) -> dict[NodeRole, NodeRef]:
    """Return the node references of a colocated node's two sides: one generation, since they are one process."""
    name, generation = config.node_id or f"colocated-{socket.gethostname()}-{os.getpid()}", new_generation()
    return {role: NodeRef(node_id=f"{name}-{role.value}", generation=generation) for role in NodeRole}


def node_info(
    config: NodeConfig,
    ref: NodeRef,
    role: NodeRole,
    engine: Any,
    *,
    slots: int = 0,
    step_tokens: int = 0,
    nixl: NixlEndpoint | None = None,
) -> Callable[[str], NodeInfo]:
    """Return a function from the server's address to what the node tells routers about itself and its engine."""
    facts = engine.facts
    return lambda address: NodeInfo(
        ref=ref,
        role=role,
        address=config.advertise or address,
        contract_json=engine.contract.canonical_json(),
        slots=slots,
        kv_blocks=facts.kv_blocks,
        block_size=facts.block_size,
        step_tokens=step_tokens,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        nixl=nixl,
        model=config.model,
        finding=facts.finding,
        freedoms=engine.certificate.freedoms,
        certificate=engine.certificate.digest,
        engine_id=engine.engine_id,
    )


class Life:
    """A node that listens, from its first registration to its last release."""

    def __init__(self, config: NodeConfig, roles: Sequence[Role], observation: Observation) -> None:
        access = Access.of_member(config)
        self._roles = roles
        self._config = config
        self._observation = observation
        gate = Gate(cluster=access.token)
        self.server = GrpcServer(config.host, config.port, tls=access.tls, gate=gate, health=observation.health)
        for role in roles:
            self.server.add(role.register, role.service)
        self._access = access
        self.agents: list[NodeAgent] = []
        """What keeps each role registered, in their order."""
        self._quarantined = ""
        self._finding = ""
        self._watches: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[CorunError] = asyncio.get_running_loop().create_future()
        """The error that forces the process to end; it stays unset when the process is asked to stop."""

    async def start(self) -> None:
        """Listen and watch the engine. A node that failed its self-test stays NOT_SERVING."""
        config = self._config
        await self.server.start()
        for role in self._roles:
            role.engine.on_death = lambda: self._end(UnavailableError("the engine died"))
            role.engine.on_finding = self._note_finding
            agent = NodeAgent(role.info(self.server.address), config.router, role.service.load, self._access)
            agent.on_quarantine = self._note_quarantine
            self.agents.append(agent)
            self._observation.metrics.show(role.metrics)
        # One of them is enough: they have the same engine. The steps that show are those of the last one.
        engine = self._roles[-1].engine
        pulse = Pulse(engine, self._note_stuck, timeout_s=config.engine_timeout_s, restart_s=config.engine_restart_s)
        self._watch(pulse.run())
        self._tell_health()
        self._observation.metrics.show(NodeMetrics(self._infos, lambda: self._is_serving))
        roles = [info.role for info in self._infos()]
        self._observation.metrics.add(lambda: engine_metrics(roles))
        self._observation.note_started()
        if finding := engine.facts.finding:
            # Routers learn the finding and refuse the node. The process stays up, so that the reason can be read.
            log.error("not serving on %s: the self-test failed: %s", self.server.address, finding)
            kept.forget()
        else:
            log.info("serving on %s", self.server.address)

    def _infos(self) -> list[NodeInfo]:
        return [agent.info for agent in self.agents]

    def join(self) -> list[asyncio.Task[None]]:
        """Join the routers. Return the tasks that keep the node registered."""
        # Membership ends by itself only when the engine can no longer be asked for its load.
        return [self._watch(agent.run()) for agent in self.agents]

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        watch = asyncio.create_task(work)
        watch.add_done_callback(self._note_end)
        self._watches.append(watch)
        return watch

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain and close. Raises the error if one ends the node before that."""
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((stopped, self._ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        error = None if stop.is_set() else self._ended.result()
        for role, agent in zip(self._roles, self.agents, strict=True):
            role.service.draining = agent.draining = True
            agent.tell()
        if error is not None:
            self._say(str(error))
        self._tell_health()
        await self._heard(NEWS_TIMEOUT_S)  # A node without running work ends right after this.
        if error is None:
            await self._drain()
        elif isinstance(error, DataLossError):
            await self._heard(QUARANTINE_TIMEOUT_S)
        await self.close()
        if error is not None:
            raise error

    async def close(self, grace_s: float = 1.0) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.wait(self._watches)
        await self.server.stop(grace_s)
        for role in reversed(self._roles):  # A decode side asks the engine for its last figures before it ends it.
            await role.engine.close()

    async def _drain(self) -> None:
        """Wait for the running work. After `drain_grace_s` seconds, end what is left, so that other nodes do it."""
        grace_s = self._config.drain_grace_s
        deadline = asyncio.get_running_loop().time() + grace_s
        # Only the engine's worker knows when the last KV was read, and it must be polled.
        while await self._is_busy():
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("work still runs after %g s: other nodes have to do it", grace_s)
                self._give_up(f"it was told to stop {grace_s:g} s ago")
                return
            await asyncio.sleep(0.05)

    def _note_quarantine(self, reason: str) -> None:
        """Give up all work at once, even in a drain, because the running work may be wrong."""
        if not self._quarantined:
            self._quarantined = reason
            self._say(reason)
            self._give_up(reason)
            self._end(DataLossError(reason))
            kept.forget()

    def _note_finding(self, finding: str) -> None:
        """Take the node out of service for good, because it computed bits that it should not have. The process stays
        up, so that the reason can be read; only a new process, which tests itself, may be used."""
        log.error("not serving any more: %s", finding)
        self._finding = finding
        for role, agent in zip(self._roles, self.agents, strict=True):
            agent.describe(role.info(self.server.address))
        self._watches.append(asyncio.create_task(self._refuse_work(finding)))
        kept.forget()

    async def _note_stuck(self, stuck: str) -> None:
        if not self._quarantined and not self._finding:
            await self._refuse_work(stuck)

    async def _refuse_work(self, reason: str) -> None:
        """Refuse all work and give up what runs, so that other nodes do it. An empty reason allows work again."""
        self._say(reason)
        try:
            self._tell_health()
            if reason:
                await self._heard(NEWS_TIMEOUT_S)  # Otherwise routers may retry the ended work on this node.
        finally:
            if reason:
                self._give_up(reason)

    def _say(self, reason: str) -> None:
        """Refuse work for a reason and tell all routers. An empty reason allows work again."""
        for role, agent in zip(self._roles, self.agents, strict=True):
            role.service.closed = agent.stuck = reason
            agent.tell()

    def _give_up(self, reason: str) -> None:
        for role in self._roles:
            role.service.give_up(reason)

    async def _heard(self, timeout_s: float) -> None:
        await asyncio.gather(*(agent.heard(timeout_s) for agent in self.agents))

    def _tell_health(self) -> None:
        for name in ("", *(role.service_name for role in self._roles)):
            self.server.set_serving(name, self._is_serving)

    @property
    def _is_serving(self) -> bool:
        role = self._roles[0]
        return not (role.service.draining or role.service.closed or role.engine.facts.finding)

    async def _is_busy(self) -> bool:
        if self._roles[0].service.closed or self._ended.done():
            return False  # The running work has been given up, or has ended with the engine.
        try:
            loads = [await role.service.load() for role in self._roles]
        except Exception:
            log.exception("the engine cannot be asked what still runs")
            return False
        return any(load.used_kv_blocks > 0 or load.queued_prompt_tokens > 0 for load in loads)

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


async def live(config: NodeConfig, roles: Sequence[Role], stop: asyncio.Event, observation: Observation) -> None:
    """Serve until `stop` is set, then drain. Raises the error if one ends the process before that."""
    life = Life(config, roles, observation)
    await life.start()
    life.join()
    await life.run(stop)


async def live_and_leave(
    config: NodeConfig, roles: Sequence[Role], stop: asyncio.Event, observation: Observation
) -> NoReturn:
    """Run `live`, then end the process: with exit code 0 after a drain, else with one of the codes above.

    The process ends at once (`os._exit`), since all our resources are closed by then. vLLM's sockets and NIXL's threads
    have been seen to block a normal exit of the interpreter.
    """
    code = 0
    stages.enter(stages.LAST)
    gc.collect()
    gc.freeze()  # A full collection would look at all that the engine has loaded: 0.4 s, for which streams stand still.
    try:
        await live(config, roles, stop, observation)
    except CorunError as error:
        log.error("%s", error)
        code = EXIT_QUARANTINED if isinstance(error, DataLossError) else EXIT_DIED
    except asyncio.CancelledError:  # A second signal: the node is to stop at once.
        code = EXIT_DIED
    await tracing.stop()
    scratch.leave()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
