"""The processes of a cluster, by name, and the command line of each.

This module is pure, except that it keeps ports. It must not know how the processes are started.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from corun.config.cluster_file import COLOCATED, GATEWAY, ROLES, SIDES, ClusterSpec, PoolSpec
from corun.config.fields import HttpConfig
from corun.errors import InvalidArgumentError
from corun.rpc.ports import bound
from corun.rpc.server import join_address

LOOPBACK = "127.0.0.1"
ROUTER = "router"
MODULES: Mapping[str, str] = {
    "router": "router",
    "prefill": "prefill_node",
    "decode": "decode_node",
    COLOCATED: "colocated_node",
}
"""The module that runs for each role, as in `python -m MODULE`."""
_TRIES = 64


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process that a cluster should have. It is the same one when it is started again."""

    pool: str
    role: str
    index: int
    """The number of this process among the processes of its role in its pool."""
    name: str
    """The name of the process, and of its log file. For a node it is also the node id."""

    @property
    def is_router(self) -> bool:
        return self.role == ROUTER

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The nodes that routers know this process as: a colocated one as two; none for a router."""
        if self.role == COLOCATED:
            return tuple(f"{self.name}-{side}" for side in SIDES[COLOCATED])
        return () if self.is_router else (self.name,)


def members(spec: ClusterSpec) -> tuple[ProcessSpec, ...]:
    """Return all processes of a cluster: for each pool its routers, then its nodes by role."""
    found = []
    for pool in spec.pools:
        prefix = f"{pool.name}." if len(spec.pools) > 1 else ""
        for role in ROLES:
            is_only = role == ROUTER and pool.count(role) == 1
            names = [role] if is_only else [f"{role}-{index}" for index in range(pool.count(role))]
            found += [ProcessSpec(pool.name, role, index, prefix + name) for index, name in enumerate(names)]
    return tuple(found)


def command(
    pool: PoolSpec,
    member: ProcessSpec,
    *,
    file: Path,
    host: str,
    routers: Sequence[str] = (),
    gpu_share: float = 0.0,
    modules: Mapping[str, str] = MODULES,
) -> list[str]:
    """Return the command line of one process: what the pool gives is in `file`, and what it alone has is in flags.

    host: the address at which a node is reached. routers: the host:port of each router, for nodes only. gpu_share: the
    part of a GPU that a node gets.
    """
    flags: dict[str, object] = {"config": file, "pool": pool.name, **pool.ports(member.role, member.index)}
    if not member.is_router:
        flags |= {"node_id": member.name, "host": host, "nixl_host": host}
        if 0 < gpu_share < 1:
            share = gpu_share * pool.config(member.role).gpu_memory_utilization
            flags["gpu_memory_utilization"] = round(share, 3)
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-m", modules[member.role], *words, *(["--router", *routers] if routers else [])]


def gateway_command(pool: PoolSpec, http: HttpConfig, routers: Sequence[str], supervisor: str | Path = "") -> list[str]:
    """Return the command line of the pool's gateway. routers: the host:port of each router. supervisor: the path of the
    Unix socket that takes kills of nodes; empty: there is none."""
    security = pool.security
    flags = {
        "router": ",".join(routers),
        "host": http.host,
        "port": http.port,
        "https_cert": http.https_cert,
        "https_key": http.https_key,
        "foreign_origins": http.foreign_origins,
        "supervisor": supervisor,
        "tls_ca": security.tls_ca,
        "tls_name": security.tls_name,
        "tls_cert": security.tls_cert if security.tls_clients else "",
        "tls_key": security.tls_key if security.tls_clients else "",
        "token_file": security.cluster_token_file,
    }
    words = [word for name, value in flags.items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
    switches = {"--insecure": security.insecure, "--allow-kills": http.allow_kills}
    return [sys.executable, "-m", "corun", GATEWAY, *words, *(name for name, is_on in switches.items() if is_on)]


def gateway_url(http: HttpConfig) -> str:
    """Return the URL at which a gateway can be opened on its own machine, even if it listens on all addresses."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(http.host, http.host)
    return f"{'https' if http.https_cert else 'http'}://{join_address(host, http.port)}"


def listens_anywhere(pool: PoolSpec) -> bool:
    """Return whether the pool's routers listen on all addresses of their machine, so that any machine suits them."""
    return pool.config(ROUTER).host in ("0.0.0.0", "::")


def router_address(pool: PoolSpec, index: int, own_host: str) -> str:
    """Return the host:port at which a router is reached. own_host: the address of its machine, used if the router
    listens on all addresses."""
    host = own_host if listens_anywhere(pool) else pool.config(ROUTER).host
    return join_address(host, pool.ports(ROUTER, index)["port"])


def with_free_ports(spec: ClusterSpec) -> ClusterSpec:
    """Return the same cluster with real ports of routers and gateways: a free port replaces each 0.

    Raises InvalidArgumentError for a port that cannot be listened on here.
    """
    pools = []
    for pool in spec.pools:
        config = pool.config(ROUTER)
        port = free_ports(config.host, config.port, pool.count(ROUTER), pool.where(ROUTER, "port"))
        gateway = pool.gateway
        if gateway is not None and (http := pool.http()):
            gateway = {**gateway, "port": free_ports(http.host, http.port, where=pool.where(GATEWAY, "port"))}
        pools.append(replace(pool, router={**pool.router, "port": port}, gateway=gateway))
    return replace(spec, pools=tuple(pools))


def free_ports(host: str, port: int, count: int = 1, where: str = "port") -> int:
    """Return the first of `count` ports in a row that can all be listened on: `port` itself, or any free one for 0.

    They are kept until this process ends, so that no other process gets them before their servers listen.
    """
    for tries_left in reversed(range(_TRIES if port == 0 else 1)):
        first = port
        try:
            with ExitStack() as held:
                for index in range(count):
                    kept = held.enter_context(bound(host, first + index))
                    first = first or kept.getsockname()[1]
                atexit.register(held.pop_all().close)
        except (OSError, OverflowError, TypeError) as error:  # A host may be one that cannot be a name.
            if not tries_left:
                reason = error.strerror if isinstance(error, OSError) else error
                limit = f"cannot be listened on at {host}: {reason}; choose another one, or 0 for any"
                raise InvalidArgumentError(where, port, limit) from error
        else:
            return first
    raise AssertionError("a try returns or raises")
