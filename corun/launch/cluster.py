"""One running cluster: it makes the running processes match the wanted ones, and tells the user what happens.

This module owns the list of wanted processes, from the first spec to the last `corun scale`. It must not know how
processes are placed.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from corun.client.client import Client
from corun.config.cluster_file import GATEWAY, NODES, ROLES, SIDES, ClusterSpec, PoolSpec
from corun.config.extras import installed_engine
from corun.config.fields import SEED_KEY_VARIABLE, is_loopback
from corun.errors import CorunError, DeadlineError, InvalidArgumentError, UnavailableError
from corun.launch import runtime
from corun.launch.control import Control, ScaleStatus, in_words, noted
from corun.launch.fleet import STATUS_TIMEOUT_S, Fleet, Order
from corun.launch.kills import Kills
from corun.launch.members import (
    LOOPBACK,
    MODULES,
    ROUTER,
    ProcessSpec,
    gateway_command,
    gateway_url,
    listens_anywhere,
    members,
    router_address,
)
from corun.launch.placement import INSTEAD, TURNS, Shares, on_joined, on_own, takes_turns
from corun.launch.progress import Progress, next_steps
from corun.launch.supervisor import ProcessState, ProcessStatus, Supervisor
from corun.types import ClusterStatus, NodeState, NodeStatus, state_in_words

_START_TIMEOUT_S = 3600.0  # The download of a model may take most of this time.
_POLL_S = 0.5


@dataclass(eq=False, slots=True)
class _Pool:
    """What is known about a pool through its routers."""

    spec: PoolSpec
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]
    """The address of each router's machine, in the order of `addresses`."""
    clients: tuple[Client, ...] = ()
    is_ready: bool = False
    """True once every router had all wanted nodes of the pool in use. It stays true."""
    gateway: str = ""
    """The name of its gateway; empty if it has none."""
    kills: Kills | None = None
    """What takes kills of its nodes from the gateway; None: clients may kill none."""
    in_use: tuple[set[str], ...] = ()
    """For each router that answered the last question, the names of the nodes that it uses."""


class Cluster:
    """The processes of one launch. joined: Ray ran before the launch, and may have more machines now or later."""

    def __init__(
        self,
        spec: ClusterSpec,
        logs: Path,
        say: Progress,
        modules: Mapping[str, str] = MODULES,
        *,
        joined: bool = False,
    ) -> None:
        self._spec, self._logs, self._say, self._modules, self._is_joined = spec, logs, say, modules, joined
        # If a router can be reached only from this machine, all nodes stay on this machine.
        self._is_spread = joined and not any(is_loopback(pool.config(ROUTER).host) for pool in spec.pools)
        self._fleet = Fleet()
        self._pools: dict[str, _Pool] = {}
        self._places: dict[ProcessSpec, int] = {}
        self._deaths: dict[ProcessSpec, int] = {}  # The number of deaths that the user was told about.
        self._shares: Shares
        self._gateways: dict[str, Supervisor] = {}
        """The gateway of each pool that has one. It runs on this machine, as a child of this process."""
        self._nodes_ever: set[ProcessSpec] = set()
        self._wake = threading.Event()
        """Set when the next look at the processes must not wait."""
        self._scaling = ""  # The change that the user was told about and that is not done yet.
        # A restarted router must derive the same seeds, so that clients can continue their requests.
        self._seed_key = os.environ.get(SEED_KEY_VARIABLE) or secrets.token_hex(32)

    def start(self) -> None:
        """Place every process. Each one starts as soon as there is room for it, in no particular order."""
        pools = self._spec.pools
        if len(runtime.living()) > 1 and not self._is_spread:
            pool = next(pool for pool in pools if is_loopback(pool.config(ROUTER).host))
            limit = "must be an address that the other machines reach"
            raise InvalidArgumentError(pool.where(ROUTER, "host"), pool.config(ROUTER).host, limit)
        self._fleet = Fleet("" if self._is_spread else runtime.own_host())
        self._pools = {pool.name: self._routers(pool) for pool in pools}
        gpus = int(runtime.api().cluster_resources().get("GPU", 0))
        has_threads = any(pool.config(role).threads for pool in pools for role in NODES)
        cores = () if self._is_spread or has_threads else sorted(os.sched_getaffinity(0))
        needs_gpus = installed_engine() == "gpu"
        if self._is_joined:  # The machines that Ray has now say little: others may join later.
            self._shares = on_joined(pools, has_gpus=gpus > 0 or needs_gpus, cores=cores)
        else:
            self._shares = on_own(pools, gpus=gpus, cores=cores, needs_gpus=needs_gpus)
            if takes_turns(pools, gpus):
                self._say(f"{TURNS}; {INSTEAD}")
        self._reconcile()
        self._start_gateways()

    def _routers(self, pool: PoolSpec) -> _Pool:
        """Choose the machine of each router. Routers that listen on all addresses are spread over the machines,
        beginning with this one."""
        own = runtime.own_host()
        spread = [own, *sorted(runtime.hosts().keys() - {own})] if self._is_spread and listens_anywhere(pool) else [own]
        hosts = tuple(spread[index % len(spread)] for index in range(pool.count(ROUTER)))
        reached = [host if self._is_spread else LOOPBACK for host in hosts]
        return _Pool(pool, tuple(router_address(pool, index, host) for index, host in enumerate(reached)), hosts)

    def _start_gateways(self) -> None:
        for pool in self._pools.values():
            if http := pool.spec.http():
                name = f"{pool.spec.name}.{GATEWAY}" if len(self._pools) > 1 else GATEWAY
                pool.kills = Kills(self._wake) if http.allow_kills else None
                argv = gateway_command(pool.spec, http, pool.addresses, pool.kills.path if pool.kills else "")
                pool.gateway = name
                self._gateways[name] = Supervisor(name, argv, self._logs / f"{name}.log")

    def watch(self, signals: runtime.StopSignals) -> None:
        """Keep the wanted processes running until a stop signal arrives, and report what happens.

        Raises UnavailableError when the cluster cannot work any more, and DeadlineError if it was not ready in time.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        security = self._spec.security
        with ExitStack() as stack:
            for pool in self._pools.values():
                made = (Client(address, tls=security.tls, token=security.cluster_token()) for address in pool.addresses)
                pool.clients = tuple(stack.enter_context(client) for client in made)
            control = Control(self._spec, is_alone=not self._is_spread)
            stack.enter_context(noted(control.name))
            while not signals.count:
                if time.monotonic() > deadline and not self.is_ready:
                    raise DeadlineError(f"the cluster was not ready in {_START_TIMEOUT_S:.0f} s")
                self._reconcile()
                answers = [(pool, _ask(pool)) for pool in self._pools.values()]
                statuses = self._fleet.statuses()  # Asked after the routers, so a node that they know shows as running.
                self._tell_processes(statuses)
                self._tell_gateways()
                for pool, heard in answers:
                    self._hear(pool, heard)
                    self._answer_kills(pool)
                self._tell_start(statuses)
                self._scale(control.report(self._scale_status(statuses)))
                self._wake.wait(_POLL_S)
                self._wake.clear()

    @property
    def is_ready(self) -> bool:
        """Whether every pool has been ready."""
        return bool(self._pools) and all(pool.is_ready for pool in self._pools.values())

    def _reconcile(self) -> None:
        """Do one round: forget ended processes, ask surplus processes to end, and start missing processes.

        A stopping process that is wanted again starts once it has ended.
        """
        for member in self._fleet.forget_ended():
            self._places.pop(member, None)
            self._say.change(member.name, "ended")
        wanted, running, stopping = members(self._spec), self._fleet.running, self._fleet.stopping
        surplus = [member for member in running if member not in wanted and member not in stopping]
        surplus.sort(key=lambda member: (member.pool, member.role, -member.index))
        self._fleet.stop(surplus)
        for member in surplus:
            self._say(f"stopping {member.name}")
        orders = [self._order(member) for member in wanted if member not in running]
        hosts = {
            order.member: self._pools[order.member.pool].hosts[order.member.index]
            for order in orders
            if order.member.is_router
        }
        self._fleet.start(orders, hosts)
        for member in (member for member in hosts if member not in self._fleet.running):
            self._say.change(member.name, f"waiting: its machine, {hosts[member]}, is gone")

    def _order(self, member: ProcessSpec) -> Order:
        if not member.is_router and member not in self._places:
            taken = set(self._places.values())
            self._places[member] = next(place for place in range(len(taken) + 1) if place not in taken)
        return Order(
            pool=self._spec.pool(member.pool),
            member=member,
            routers=self._pools[member.pool].addresses,
            host="" if self._is_spread else LOOPBACK,
            share=self._shares.of(member, self._places.get(member, 0)),
            logs=self._logs,
            environment={SEED_KEY_VARIABLE: self._seed_key} if member.is_router else {},
            modules=self._modules,
        )

    def _tell_processes(self, statuses: Mapping[ProcessSpec, ProcessStatus]) -> None:
        for member, status in statuses.items():
            if status.state is ProcessState.RUNNING:
                if status.deaths > self._deaths.get(member, 0):  # It died and restarted between two checks.
                    self._say.change(member.name, f"{ProcessState.WAITING.value}: {status.detail}")
                again = f", start {status.deaths + 1}" if status.deaths else ""
                self._say.change(member.name, f"process {status.pid}{again}")
            else:
                why = status.detail or ("being placed" if status.state is ProcessState.WAITING else "as asked")
                self._say.change(member.name, f"{status.state.value}: {why}")
        self._deaths = {member: status.deaths for member, status in statuses.items()}
        ready = [name for name, pool in self._pools.items() if pool.is_ready]
        if (failed := failure(members(self._spec), statuses, ready)) is not None:
            raise UnavailableError(f"{failed.name} {statuses[failed].detail}\nlogs in {self._logs}")

    def _tell_gateways(self) -> None:
        """Report what each gateway is doing. Raises UnavailableError if one failed before its pool was ready: later,
        clients that need no gateway are still served."""
        for pool in self._pools.values():
            if name := pool.gateway:
                status = self._gateways[name].status()
                if status.state is ProcessState.FAILED and not pool.is_ready:
                    raise UnavailableError(f"{name} {status.detail}\nlogs in {self._logs}")
                doing = f"process {status.pid}" if status.pid else f"{status.state.value}: {status.detail}"
                self._say.change(name, doing)

    def _tell_start(self, statuses: Mapping[ProcessSpec, ProcessStatus]) -> None:
        """Report what each node that no router uses yet is doing, until all pools are ready."""
        if not self.is_ready:
            used = set[str]().union(*(nodes for pool in self._pools.values() for nodes in pool.in_use))
            nodes = {member: status.doing for member, status in statuses.items() if not member.is_router}
            late = {node.name: doing for node, doing in nodes.items() if not used.issuperset(node.node_ids)}
            self._say.starting(late, nodes=len(nodes))

    def _hear(self, pool: _Pool, answers: Sequence[ClusterStatus]) -> None:
        """Take what the routers of a pool say of its nodes, and report it.

        Raises UnavailableError if a router refused a node before the pool was ready.
        """
        used = [
            {node.node.ref.node_id: node.node.slots for node in status.nodes if node.state is NodeState.READY}
            for status in answers
        ]
        pool.in_use = tuple(set(nodes) for nodes in used)
        if not answers:
            return
        statuses = [node for answer in answers for node in answer.nodes]
        told: dict[str, NodeStatus] = {}
        for node in statuses:  # Also report nodes that only a later router knows.
            told.setdefault(node.node.ref.node_id, node)
        running = {name for member in self._fleet.running for name in member.node_ids}
        for name, node in told.items():
            if name in running:
                self._say.change(f"{name} in cluster", state_in_words(node.state, node.detail))
            if node.state is NodeState.REFUSED and not pool.is_ready:
                raise UnavailableError(f"the router refused {name}: {node.detail}")
        wanted = {name for m in members(self._spec) if m.pool == pool.spec.name for name in m.node_ids}
        if not pool.is_ready and len(answers) == len(pool.clients) and all(nodes >= wanted for nodes in pool.in_use):
            pool.is_ready = True
            if self.is_ready:
                self._say.close()
            slots = sum(used[0][name] for name in wanted)
            line = f"ready: {','.join(pool.addresses)}, fingerprint {answers[0].fingerprint}, {slots} slots"
            with suppress(OSError):  # As in `Progress`.
                of_pool = f", pool {pool.spec.name}" if len(self._pools) > 1 else ""
                print(f"{line}{of_pool}", flush=True)
                if http := pool.spec.http():
                    print(f"http: {gateway_url(http)}/v1{of_pool}", flush=True)
                    print(f"page: {gateway_url(http)}/{of_pool}", flush=True)
            commands = "\n".join(f"  {command}" for command in next_steps(pool.spec, pool.addresses[0]))
            self._say(f"try, in another terminal:\n{commands}")

    def _answer_kills(self, pool: _Pool) -> None:
        """Kill the node that a client of the pool's gateway wants to see killed, if it may be killed now."""
        if pool.kills is None:
            return
        wanted = members(self._spec)
        nodes = {m.node_ids[-1]: m for m in wanted if m.pool == pool.spec.name and "decode" in SIDES[m.role]}

        def kill(node: str) -> None:
            self._say(f"killing {nodes[node].name}: a client of the gateway asked for it")
            self._fleet.kill(nodes[node])

        pool.kills.answer(tuple(nodes), pool.in_use, kill)

    def _scale_status(self, statuses: Mapping[ProcessSpec, ProcessStatus]) -> ScaleStatus:
        """Return how far the nodes are from what is wanted. Tell the user when a change is done."""
        wanted = {member for member in members(self._spec) if not member.is_router}
        self._nodes_ever |= wanted
        stopping = self._fleet.stopping
        failed = {
            member: f"{status.detail}\nlogs in {self._logs}"
            for member, status in statuses.items()
            if status.state is ProcessState.FAILED and member in wanted and member not in stopping
        }
        in_use = {name: pool.in_use for name, pool in self._pools.items()}
        left = unsettled(self._nodes_ever - failed.keys(), wanted, self._fleet.running, stopping, in_use)
        if self._scaling and not left:
            without = f", without {', '.join(member.name for member in failed)}" if failed else ""
            self._say(f"scaled {self._scaling}{without}")
            self._scaling = ""
        return ScaleStatus(spec=self._spec, unsettled=left, failed=failed)

    def _scale(self, wanted: ClusterSpec | None) -> None:
        """Take over what `corun scale` wants. wanted: None if it is not known yet."""
        if wanted is None or wanted == self._spec:
            return
        changes = []
        for pool in self._spec.pools:
            now = wanted.pool(pool.name)
            counts = {role: now.count(role) for role in ROLES if now.count(role) != pool.count(role)}
            if counts:
                changes.append(in_words(self._spec, pool.name, counts))
        if changes:  # None if a count was given that is the default: a change that is under way goes on.
            self._scaling = "; ".join(changes)
            self._say(f"scaling {self._scaling}")
        self._spec = wanted

    def _stop_gateways(self, signals: runtime.StopSignals) -> None:
        asked, running = 0, dict(self._gateways)
        while running:  # It ends, since each supervisor kills what does not end in time.
            if asked < 1 + (signals.count > 1):
                asked += 1
                self._say(f"{'stopping' if asked == 1 else 'killing'} {', '.join(running)}")
                for gateway in running.values():
                    gateway.stop()
            time.sleep(_POLL_S / 5)
            running = {name: gateway for name, gateway in running.items() if gateway.status().may_run}

    def stop(self, signals: runtime.StopSignals) -> None:
        """Stop the gateways and the routers, which drain, and then the nodes. A second stop signal kills what is still
        running."""
        self._stop_gateways(signals)
        for kills in (pool.kills for pool in self._pools.values() if pool.kills):
            kills.close()
        for is_router in (True, False):
            ending = [member for member in self._fleet.running if member.is_router is is_router]
            asked = 0
            deadline = time.monotonic() + self._fleet.grace_s(ending) + STATUS_TIMEOUT_S
            while running := [member for member, status in self._fleet.statuses(ending).items() if status.may_run]:
                names = ", ".join(member.name for member in running)
                if asked < 1 + (signals.count > 1):
                    asked += 1
                    self._say(f"{'stopping' if asked == 1 else 'killing'} {names}")
                    self._fleet.stop(running)
                if time.monotonic() > deadline:
                    self._say(f"{names} did not end in time")
                    break
                time.sleep(_POLL_S / 5)


def _ask(pool: _Pool) -> list[ClusterStatus]:
    """Return the status from each router of a pool that answers.

    Raises the error of a router that has one before the pool was ready: later, its nodes serve whatever it says here.
    """
    found = []
    passed_over = (CorunError,) if pool.is_ready else (UnavailableError, DeadlineError)
    for client in pool.clients:
        with suppress(*passed_over):
            found.append(client.get_cluster(timeout_s=STATUS_TIMEOUT_S))
    return found


def unsettled(
    nodes: Collection[ProcessSpec],
    wanted: Collection[ProcessSpec],
    running: Collection[ProcessSpec],
    stopping: Collection[ProcessSpec],
    in_use: Mapping[str, Sequence[Collection[str]]],
) -> frozenset[ProcessSpec]:
    """Return the nodes that are not yet as wanted: running and in use by every router, or ended and in use by none.

    in_use: for each pool, and for each of its routers that answers, the names of the nodes that it uses.
    """

    def is_settled(node: ProcessSpec) -> bool:
        used, is_wanted = in_use[node.pool], node in wanted
        runs_as_wanted = node not in stopping and (node in running) == is_wanted
        return runs_as_wanted and bool(used) and all((i in names) == is_wanted for names in used for i in node.node_ids)

    return frozenset(node for node in nodes if not is_settled(node))


def failure(
    wanted: Sequence[ProcessSpec], statuses: Mapping[ProcessSpec, ProcessStatus], ready: Collection[str]
) -> ProcessSpec | None:
    """Return the failed process without which the cluster cannot go on, or None.

    Before a pool is ready, this is any failed process of the pool. Later it is a failed process that did what no other
    process of the pool does. ready: the names of the pools that have been ready.
    """
    failed = [m for m in wanted if m in statuses and statuses[m].state is ProcessState.FAILED]
    alive = {(m.pool, side) for m in wanted if m not in failed for side in SIDES[m.role]}
    return next(
        (m for m in failed if m.pool not in ready or any((m.pool, s) not in alive for s in SIDES[m.role])), None
    )
