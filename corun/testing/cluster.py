"""A whole cluster in this process: real routers and real node services around fake engines, on free ports.

`local_cluster` is for tests of programs that use the SDK or the gateway. It needs no engine, GPU or model.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from corun.config.fields import ColocatedConfig, DecodeConfig, LinkConfig, NodeConfig, PrefillConfig, RouterConfig
from corun.errors import NotFoundError
from corun.node.life import Role
from corun.testing.engines import STEP_MS, FakeKv
from corun.testing.model import write_tokenizer
from corun.testing.nodes import LocalNode, decode_role, prefill_role
from corun.types import NodeRef, NodeRole, NodeState, NodeStatus, new_generation
from router.app import Router
from router.nodes.node import Node

WAIT_S = 30.0
"""The longest wait for anything that has to happen."""
POLL_S = 0.002
T = TypeVar("T")
ROUTER_DEFAULTS: dict[str, Any] = {
    "port": 0,
    "seed_key": "00" * 32,
    "heartbeat_interval_ms": 50,
    "heartbeat_timeout_ms": 2000,
    "audit_fraction": 0,  # Otherwise one sample of a thousand would run twice.
}
NODE_DEFAULTS: dict[str, Any] = {"slots": 8, "lease_ttl_ms": 60_000}
"""The settings of `local_cluster` that go to nodes that sample; all others go to routers."""
LINKS = {field.name for field in fields(LinkConfig)}
"""The settings that all members of a cluster share: certificates and the cluster's token."""
MAKERS: dict[NodeRole, Callable[..., Any]] = {NodeRole.PREFILL: prefill_role, NodeRole.DECODE: decode_role}
"""What makes the parts of each role."""


def router_config(**settings: Any) -> RouterConfig:
    """Return the config of a router on a free port, with timeouts that suit tests."""
    return RouterConfig(**{**ROUTER_DEFAULTS, **settings})


class LocalCluster:
    """Routers and nodes of one process. `local_cluster` makes it.

    Prefill nodes are named p1, p2, ..., decode nodes d1, d2, ... and colocated nodes c1, c2, ...; routers know c1 as
    two nodes, c1-prefill and c1-decode. Each node has an `engine` with a pace and faults (`corun.testing.engines`).
    """

    def __init__(self, model: str, config: RouterConfig, *, step_ms: float = STEP_MS) -> None:
        self.model = model
        self.routers: list[Router] = []
        self.nodes: list[LocalNode] = []
        """All nodes, in the order of their starts, those that have ended included."""
        self.kv = FakeKv()
        self.ends_quarantined = True
        """Whether a node ends when a router says that it may have given wrong bits, as real ones do."""
        self._config = config
        self._step_ms = step_ms
        # The config and the settings of the newest generation of each node.
        self._kinds: dict[str, tuple[type[NodeConfig], dict[str, Any]]] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the routers, each host:port."""
        return tuple(router.server.address for router in self.routers)

    @property
    def address(self) -> str:
        """The same with commas between them, as `AsyncClient` takes them."""
        return ",".join(self.addresses)

    @property
    def router(self) -> Router:
        """The first router."""
        return self.routers[0]

    def node(self, node_id: str) -> LocalNode:
        """Return the newest generation of a node, by its name or by that of one of its sides.

        Raises NotFoundError if there is none.
        """
        found = [node for node in self.nodes if node_id in (ref.node_id for ref in (node.ref, *node.refs))]
        if not found:
            raise NotFoundError(f"there is no node {node_id!r}")
        return found[-1]

    async def start(
        self, prefill: int = 1, decode: int = 1, routers: int = 1, colocated: int = 0, **decode_settings: Any
    ) -> None:
        """Start so many routers and nodes, and wait until the nodes are READY."""
        for _ in range(routers):
            await self.add_router()
        for number in range(1, prefill + 1):
            await self.add_prefill(f"p{number}")
        for number in range(1, decode + 1):
            await self.add_decode(f"d{number}", **decode_settings)
        for number in range(1, colocated + 1):
            await self.add_colocated(f"c{number}", **decode_settings)
        if (prefill or colocated) and (decode or colocated):
            await self.ready(*(ref.node_id for node in self.nodes for ref in node.refs))

    async def add_router(self) -> Router:
        """Start a router. Only nodes that are added later know it."""
        router = Router(self._config)
        await router.start()
        self.routers.append(router)
        return router

    async def add_prefill(self, node_id: str = "p1", **settings: Any) -> LocalNode:
        """Start a prefill node; see `add_decode`."""
        return await self._add(PrefillConfig, node_id, settings)

    async def add_decode(self, node_id: str = "d1", **settings: Any) -> LocalNode:
        """Start a decode node, and make it join the routers unless `join` is False.

        settings: fields of its config; `kv_blocks`; `engine_id`, the same for the two sides of a colocated node; fields
        of its model contract that are to differ.
        """
        return await self._add(DecodeConfig, node_id, {**NODE_DEFAULTS, **settings})

    async def add_colocated(self, node_id: str = "c1", **settings: Any) -> LocalNode:
        """Start a colocated node: one process with a prefill and a decode side; see `add_decode`."""
        return await self._add(ColocatedConfig, node_id, {**NODE_DEFAULTS, **settings})

    async def _add(self, kind: type[NodeConfig], node_id: str, settings: dict[str, Any]) -> LocalNode:
        self._kinds[node_id] = kind, settings
        names = {field.name for field in fields(kind)} - {"threads", "dtype"}  # Here these only name a contract.
        links = {name: getattr(self._config, name) for name in LINKS}
        own = {name: value for name, value in settings.items() if name in names}
        others = {name: value for name, value in settings.items() if name not in names and name != "join"}
        values: dict[str, Any] = {"model": self.model, "node_id": node_id, "router": self.addresses, **links, **own}
        config: Any = kind(**values)
        ref = NodeRef(node_id=node_id, generation=new_generation())
        refs = {NodeRole.PREFILL: ref} if kind is PrefillConfig else {NodeRole.DECODE: ref}
        if kind is ColocatedConfig:
            refs = {role: replace(ref, node_id=f"{node_id}-{role.value}") for role in NodeRole}
            others = {"engine_id": f"engine-{ref.generation}", **others}
        roles: list[Role] = []
        for role, own_ref in reversed(refs.items()):  # A colocated node's side that decodes comes first.
            other_side = {"samples": roles[0].service} if roles else {}
            roles.insert(0, MAKERS[role](config, own_ref, self.kv, **others, **other_side))
        node = LocalNode(config, roles, ref)
        if NodeRole.DECODE in node.sides:
            node.engine.step_ms = self._step_ms
        await node.start()
        if not self.ends_quarantined:
            for agent in node.agents:
                agent.on_quarantine = lambda reason: None
        self.nodes.append(node)
        if settings.get("join", True):
            node.join()
        return node

    async def kill(self, node_id: str) -> None:
        """End a node at once, like a process that dies. Its streams go on at another node."""
        await self.node(node_id).kill()

    async def stop(self, node_id: str) -> None:
        """Tell a node to end, like SIGTERM, and wait until it has finished its work."""
        node = self.node(node_id)
        node.stop.set()
        await node.end()

    async def restart(self, node_id: str) -> LocalNode:
        """Start a new generation of a node with its settings, after killing the one that runs. It is READY then."""
        old = self.node(node_id)
        await old.kill()
        kind, settings = self._kinds[old.ref.node_id]
        node = await self._add(kind, old.ref.node_id, settings)
        await self.ready(*map(str, node.refs))
        return node

    async def kill_router(self, index: int = 0) -> None:
        """End a router at once, like a process that dies: it gives nothing back."""
        router = self.routers[index]
        router._activity.draining = True
        members: list[Node[Any]] = [*router.registry._decodes.values(), *router.registry._prefills.values()]
        for member in members:
            router.registry.lose(member, "the router was killed")
        await router.stop()

    async def restart_router(self, index: int = 0, **settings: Any) -> Router:
        """Start a router at the address of one that was killed. settings: fields of its config that are to differ."""
        config = replace(self._config, **{"port": self.routers[index].server.port, **settings})
        self.routers[index] = Router(config)
        await self.routers[index].start()
        return self.routers[index]

    async def ready(self, *names: str) -> None:
        """Wait until each of these nodes, by id or as id@generation, is READY at each router that runs."""
        live = [router for router in self.routers if not router._activity.draining]
        await self.until(lambda: all(self.state(name, router) is NodeState.READY for name in names for router in live))

    def state(self, name: str, router: Router | None = None) -> NodeState | None:
        """Return a node's state at a router, by default at the first; None if the router does not know the node."""
        found = self._statuses(name, router or self.router)
        return found[0].state if found else None

    def detail(self, name: str) -> str:
        """Return why a node is in its state at the first router."""
        return "".join(status.detail for status in self._statuses(name, self.router)[:1])

    def _statuses(self, name: str, router: Router) -> list[NodeStatus]:
        return [s for s in router.registry.statuses() if name in (s.node.ref.node_id, str(s.node.ref))]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition. Raises AssertionError if it has not come after `WAIT_S` seconds."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "the condition did not come"
            await asyncio.sleep(POLL_S)

    async def idle(self) -> None:
        """Wait until nothing is held anywhere: no lease, no KV, no place in the queue, no claim of a router."""
        try:
            await self.until(lambda: not self.held())
        except AssertionError:
            raise AssertionError(f"still held: {self.held()}") from None

    def held(self) -> list[str]:
        """Return a text for each thing that requests hold in the cluster."""
        live = [node for node in self.nodes if node.is_member]
        sides = [node.sides[NodeRole.PREFILL] for node in live if NodeRole.PREFILL in node.sides]
        engines = {side.engine.endpoint.engine_id for side in sides}
        found = [f"{node.leases} leases of {node.ref}" for node in live if node.leases]
        found += [f"KV {key}" for key in self.kv.held if key[0] in engines]
        for router in self.routers:
            decodes, prefills = router.registry._decodes.values(), router.registry._prefills.values()
            found += [f"{router.queue.waiting} samples wait"] * (router.queue.waiting > 0)
            found += [f"claim on a place of {node.info.ref}" for node in decodes if node.room._leases.own]
            found += [f"claim on KV of {node.info.ref}" for node in decodes if node.room._blocks.own]
            found += [f"claim on a turn of {node.info.ref}" for node in prefills if node.room._in_flight]
        return found

    async def close(self) -> None:
        """End all routers and nodes at once."""
        for router in self.routers:
            await router.stop()
        for node in self.nodes:
            await node.kill()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine such as `cluster.kill("d1")` for a caller in another thread; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextlib.asynccontextmanager
async def _running(
    counts: Mapping[str, int], model: str | None, step_ms: float, settings: Mapping[str, Any]
) -> AsyncIterator[LocalCluster]:
    own = {name: value for name, value in settings.items() if name in NODE_DEFAULTS}
    config = router_config(**{name: value for name, value in settings.items() if name not in NODE_DEFAULTS})
    with tempfile.TemporaryDirectory(prefix="corun-testing-") as directory:
        cluster = LocalCluster(model or write_tokenizer(Path(directory)), config, step_ms=step_ms)
        try:
            await cluster.start(**counts, **own)
            yield cluster
        finally:
            await cluster.close()


class Running:
    """A cluster that runs while this context is entered. `with` runs it on the loop of a thread of its own."""

    def __init__(self, context: contextlib.AbstractAsyncContextManager[LocalCluster]) -> None:
        self._context = context

    async def __aenter__(self) -> LocalCluster:
        return await self._context.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._context.__aexit__(*error)

    def __enter__(self) -> LocalCluster:
        self._over: Future[None] = Future()
        started: Future[LocalCluster] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(started),), name="local cluster")
        try:
            self._thread.start()
            return started.result()
        except BaseException:  # Also Ctrl-C, which must leave no thread.
            with contextlib.suppress(RuntimeError):  # A thread that is not known to run yet ends by itself.
                self.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:
        self._over.set_result(None)
        self._thread.join()

    async def _live(self, started: Future[LocalCluster]) -> None:
        try:
            async with self._context as cluster:
                started.set_result(cluster)
                await asyncio.wrap_future(self._over)
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)


def local_cluster(
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    *,
    colocated: int = 0,
    model: str | None = None,
    step_ms: float = STEP_MS,
    **settings: Any,
) -> Running:
    """Run a cluster of real services around fake engines, until the context ends. Its nodes are READY.

    prefill, decode, routers, colocated: the number of each. model: a directory with a tokenizer.json; by default one
    with a token per byte. step_ms: the time between two tokens of a sample, in milliseconds. settings: fields of
    `RouterConfig`, and `slots` and `lease_ttl_ms` of nodes that sample.

    Example:
        async with local_cluster(decode=2) as cluster, AsyncClient(cluster.address) as client:
            done = await client.generate("Once upon a time", seed=1)

    Raises TypeError or InvalidArgumentError for settings that are wrong.
    """
    counts = {"prefill": prefill, "decode": decode, "routers": routers, "colocated": colocated}
    return Running(_running(counts, model, step_ms, settings))
