"""A whole cluster as one value: its pools, their processes and their settings. `cluster.toml` is its file.

    [security]               # for every process: tls_cert, tls_key, tls_ca, tls_name, cluster_token_file; for routers:
                             # client_tokens_file, tls_clients; insecure = true allows a public address without them
    [pools.main]             # what all nodes have in common
    model = "Qwen/Qwen3-8B"
    [pools.main.router]      # RouterConfig
    port = 50051
    [pools.main.prefill]     # PrefillConfig
    replicas = 2
    [pools.main.decode]      # DecodeConfig
    slots = 256
    [pools.main.colocated]   # ColocatedConfig: nodes that do both in one engine
    replicas = 0
    [pools.main.gateway]     # HttpConfig: OpenAI's HTTP API on the machine of `corun up`; none without this table
    port = 8000

Keys are the fields of the config classes, which own every limit. There are two more keys: `replicas` is the number of
processes of a role, and `nodes_per_gpu`, in a pool's table, is the number of its nodes that share a GPU. Without
`replicas`, a role that has a table has one process; without a table, there is one router, and a prefill and a decode
node unless the pool has colocated nodes. Paths are relative to the file. The file has three rules of its own:

- It does not have settings that name one process or one machine: node_id, router_id, advertise, nixl_host, and host and
  router of nodes. The program that starts the processes sets them.
- A port that is not 0 is the port of the first process of its role. The next processes of a pool count up from it.
- The settings of the model in the contract (model, dtype, max_model_len, tensor_parallel_size) belong to the pool, not
  to a role.

This module must not know how processes are started, nor where.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import sys
import typing
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from corun.config.fields import (
    ColocatedConfig,
    DecodeConfig,
    HttpConfig,
    LinkConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
    Scope,
    is_loopback,
)
from corun.errors import InvalidArgumentError, Shown, renaming
from corun.models import NAMED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COLOCATED, GATEWAY = "colocated", "gateway"
CONFIGS: dict[str, type[RouterConfig] | type[NodeConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    COLOCATED: ColocatedConfig,
}
ROLES = tuple(CONFIGS)
"""The kinds of processes of a pool."""
NODES = ROLES[1:]
"""The kinds that are nodes."""
SIDES = {"router": ("router",), "prefill": ("prefill",), "decode": ("decode",), COLOCATED: ("prefill", "decode")}
"""What a process of each role does for its pool, which needs all of it."""
MAX_REPLICAS = 1024
MAX_NODES_PER_GPU = 32

_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "must be text"),
    bool: ((bool,), "must be true or false"),
    int: ((int,), "must be an integer"),
    int | None: ((int,), "must be an integer"),
    float: ((int, float), "must be a number"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Security(LinkConfig):
    """How the links of a cluster are protected. The paths are the same for all processes."""

    tls_clients: bool = False
    """Clients must show a certificate, too."""
    client_tokens_file: str = ""
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N] [max_priority=high|normal|low]
    [weight=N] [operator]."""
    insecure: bool = False
    """Serve on a public address without TLS and tokens."""

    def missing(self, host: str) -> list[str]:
        """Return the names of the settings that a router needs to listen on `host` and does not have."""
        if self.insecure or is_loopback(host):
            return []
        needed = ("tls_cert", "tls_key", "tls_ca", "cluster_token_file", "client_tokens_file")
        return [name for name in needed if not getattr(self, name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """One contract and the processes that share it: routers and their nodes.

    It holds only the settings that were given, by their names in the config classes.
    """

    name: str = "main"
    common: Mapping[str, Any]
    """The settings of all nodes. They include the model."""
    router: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    colocated: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    """The number of processes by role; `count` knows what is not in it."""
    gateway: Mapping[str, Any] | None = None
    """The settings of the gateway beside the pool; None: there is none."""
    nodes_per_gpu: int | None = None
    """The number of nodes that share a GPU; None: the program that starts them decides."""
    security: Security = field(default_factory=Security)
    source: str = ""
    """The file that the pool was read from; empty: it was given on a command line."""

    @property
    def model(self) -> str:
        return str(self.common["model"])

    def count(self, role: str) -> int:
        """Return the number of processes of a role.

        Where it was not given, there is one router, and a prefill and a decode node unless there are colocated nodes.
        """
        has_pair = not self.replicas.get(COLOCATED)
        return self.replicas.get(role, int(role != COLOCATED and (has_pair or role not in NODES)))

    def settings(self, role: str) -> dict[str, Any]:
        """Return all settings that were given for a process of a role."""
        known = {each.name for each in fields(CONFIGS[role])} & _keys()["security"].keys()
        security = {name: value for name in sorted(known) if (value := getattr(self.security, name))}
        common = {} if role == "router" else self.common
        return {**security, **common, **getattr(self, role)}

    def config(self, role: str, **own: Any) -> Any:
        """Return the configuration of a process of a role. own: the settings of that process alone.

        Raises InvalidArgumentError, which names where a value was given, if the value is outside its limit.
        """
        with self.saying_where(role):
            return CONFIGS[role](**{**self.settings(role), **own})

    def http(self) -> HttpConfig | None:
        """Return the configuration of the pool's gateway; None: there is none. Raises the errors of `config`."""
        if self.gateway is None:
            return None
        with self.saying_where(GATEWAY):
            config = HttpConfig(**self.gateway)
            config.check_public(self.security.insecure)
            return config

    def check_files(self, role: str) -> None:
        """Raise InvalidArgumentError, which names where a file was given, unless a role's files can be used."""
        config = self.config(role)
        with self.saying_where(role):
            config.check_files()

    def saying_where(self, role: str) -> AbstractContextManager[None]:
        """Name where a value was given in errors about the settings of a role."""
        return renaming(lambda name: self.where(role, name))

    def ports(self, role: str, index: int) -> dict[str, int]:
        """Return the ports that are not 0 of the process number `index` of a role, from 0, by their settings.

        `port` is the first: it has a default, so another one must give way to it.
        """
        config = self.config(role)
        names = ["port", *(known.name for known in fields(config) if known.name.endswith("_port"))]
        return {name: port + index for name in names if (port := getattr(config, name))}

    @property
    def tensor_parallel_size(self) -> int:
        """The number of GPUs over which each node splits the model."""
        return int(self.config("decode").tensor_parallel_size)

    def where(self, role: str, name: str) -> str:
        """Return the place of a setting as text, for errors: file, table and key, or the name alone."""
        if not self.source:
            return "http" if role == GATEWAY else role if name == "replicas" else name
        table = f"pools.{self.name}.{role}"
        if name in _keys()["security"]:
            table = "security"
        elif (
            role != "router"
            and name in _keys()["pool"]
            and (name not in _keys()[role] or (name in self.common and name not in getattr(self, role)))
        ):
            table = f"pools.{self.name}"
        return f"{self.source}: [{table}] {name}"

    def check(self) -> None:
        """Raise InvalidArgumentError unless the configuration of every process of the pool is valid. Read no file.

        This includes that a router on a public address is protected.
        """
        host = self.router.get("host", RouterConfig().host)
        if missing := self.security.missing(host):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            limit = f"it needs {flags} as well; or say --insecure"
            if self.source:
                limit = f"[security] needs {', '.join(missing)} as well; or insecure = true there"
            raise InvalidArgumentError(self.where("router", "host"), host, f"is a public address, so {limit}")
        self.check_counts()
        self.http()
        for role in ROLES:
            self.config(role, **self.ports(role, max(0, self.count(role) - 1)))
        if self.nodes_per_gpu is not None and self.tensor_parallel_size > 1:
            limit = f"must be left out: each node needs {self.tensor_parallel_size} GPUs (tensor_parallel_size)"
            raise InvalidArgumentError(self.where("prefill", "nodes_per_gpu"), self.nodes_per_gpu, limit)

    def check_counts(self) -> None:
        """Raise InvalidArgumentError unless the numbers of processes are allowed."""
        for role in ROLES:
            check_replicas(role, self.count(role), self.where(role, "replicas"))
        for side in SIDES[COLOCATED]:
            if not any(self.count(role) for role in ROLES if side in SIDES[role]):
                limit = f"must be at least 1 and at most {MAX_REPLICAS}, or there must be a {COLOCATED} node"
                raise InvalidArgumentError(self.where(side, "replicas"), 0, limit)
        if self.nodes_per_gpu is not None:
            _check_count(self.where("prefill", "nodes_per_gpu"), self.nodes_per_gpu, 1, MAX_NODES_PER_GPU)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """The whole cluster to run."""

    pools: tuple[PoolSpec, ...]

    @property
    def security(self) -> Security:
        """How the links are protected, which is the same for all pools."""
        return self.pools[0].security

    def pool(self, name: str = "") -> PoolSpec:
        """Return the pool of that name, or the only pool if no name is given.

        Raises InvalidArgumentError if there is no such pool, or several.
        """
        found = [pool for pool in self.pools if name in ("", pool.name)]
        if len(found) == 1:
            return found[0]
        limit = f"must be one of {', '.join(pool.name for pool in self.pools)}"
        raise InvalidArgumentError("pool", name, limit)

    def scaled(self, name: str, counts: Mapping[str, int]) -> ClusterSpec:
        """Return the cluster with other numbers of processes in one pool, by role.

        Raises InvalidArgumentError as `pool` and `check` do.
        """
        old = self.pool(name)
        # All counts, since some defaults depend on other counts.
        new = replace(old, replicas={**{role: old.count(role) for role in ROLES}, **counts})
        spec = ClusterSpec(pools=tuple(new if pool is old else pool for pool in self.pools))
        spec.check()
        return spec

    def check(self) -> None:
        """Raise InvalidArgumentError unless the whole cluster can run.

        Every configuration must be valid, no two processes may have the same port, and a public router must be
        protected.
        """
        taken: dict[int, str] = {}
        for pool in self.pools:
            pool.check()
            given = [
                (pool.where(role, name), first, first + index)
                for role in ROLES
                for index in range(pool.count(role))
                for name, first in pool.ports(role, 0).items()
            ]
            if (http := pool.http()) and http.port:
                given.append((pool.where(GATEWAY, "port"), http.port, http.port))
            for where, first, port in given:
                if port in taken:
                    raise InvalidArgumentError(where, first, f"must leave {port} to {taken[port]}, or be 0")
                taken[port] = where

    def check_files(self) -> None:
        """Raise InvalidArgumentError unless the files of all processes can be used on this machine."""
        for pool in self.pools:
            for role in ROLES:
                pool.check_files(role)
            if http := pool.http():
                with pool.saying_where(GATEWAY):
                    _ = http.https


def read(path: str | Path) -> ClusterSpec:
    """Read the cluster of a file, in which every key is known and has the right type. `check` checks that it can run.

    Raises:
        InvalidArgumentError: the file is not valid. The error names file, table, key, value and limit.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError("config", str(path), f"must be a readable TOML file: {reason}") from error
    return _Reader(str(path)).cluster(content)


def check_replicas(role: str, count: object, where: str) -> None:
    """Raise InvalidArgumentError unless `count` is an allowed number of processes of a role."""
    _check_count(where, count, 0 if role in NODES else 1, MAX_REPLICAS)


def _check_count(where: str, count: object, least: int, most: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not least <= count <= most:
        raise InvalidArgumentError(where, count, f"must be at least {least} and at most {most}")


class _Reader:
    """Turns the content of one file into a spec."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._base = Path(path).resolve().parent

    def cluster(self, content: Mapping[str, Any]) -> ClusterSpec:
        for key, value in content.items():
            _check_known(f"{self._path}: {key}", key, value, ("security", "pools"))
        security = Security(**self._values("security", self._table("security", content), "security", "NAME"))
        pools = self._table("pools", content)
        if not pools:
            raise InvalidArgumentError(f"{self._path}: [pools]", Shown("empty"), "must have a pool, as in [pools.main]")
        return ClusterSpec(pools=tuple(self._pool(name, pools, security) for name in pools))

    def _pool(self, name: str, pools: Mapping[str, Any], security: Security) -> PoolSpec:
        if not 0 < len(name) <= 63 or not all(c.isascii() and (c.isalnum() or c in "-_") for c in name):
            limit = "must be called with up to 63 letters, digits, '-' or '_'"
            raise InvalidArgumentError(f"{self._path}: [pools]", name, limit)
        path, table = f"pools.{name}", self._table(name, pools, "pools.")
        roles = {role: self._table(role, table, f"{path}.") for role in ROLES}
        own = {key: value for key, value in table.items() if key not in (*ROLES, GATEWAY)}
        gateway = self._table(GATEWAY, table, f"{path}.")
        common = self._values(path, own, "pool", name)
        if "model" not in common:
            raise InvalidArgumentError(f"{self._path}: [{path}] model", "", "must be given")
        given = {role: self._values(f"{path}.{role}", values, role, name) for role, values in roles.items()}
        nodes_per_gpu = common.pop("nodes_per_gpu", None)
        replicas = {role: values.pop("replicas", 1) for role, values in given.items() if role in table}
        pool = PoolSpec(
            name=name,
            common=common,
            **given,
            gateway=self._values(f"{path}.{GATEWAY}", gateway, GATEWAY, name) if GATEWAY in table else None,
            replicas=replicas,
            nodes_per_gpu=nodes_per_gpu,
            security=security,
            source=self._path,
        )
        pool.check_counts()
        return pool

    def _table(self, name: str, parent: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        table = parent.get(name, {})
        if not isinstance(table, dict):
            raise InvalidArgumentError(f"{self._path}: {path}{name}", table, f"must be a table: [{path}{name}]")
        return dict(table)

    def _values(self, path: str, table: Mapping[str, Any], kind: str, pool: str) -> dict[str, Any]:
        """Return the values of a table, checked. kind: which keys it may have, as in `_keys`. What stands in a pool's
        table and is misspelled may also be one of its own tables."""
        types = _keys()[kind]
        known = (*types, *ROLES, GATEWAY) if kind == "pool" else tuple(types)
        for key, value in table.items():
            where = f"{self._path}: [{path}] {key}"
            _check_known(where, key, value, known, _place(key).replace("pools.NAME", f"pools.{pool}"))
            kinds, limit = _TYPES[types[key]]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidArgumentError(where, value, limit)
        return {key: absolute(key, value, self._base) for key, value in table.items()}


def _check_known(where: str, key: str, value: Any, known: Collection[str], place: str = "") -> None:
    """Raise InvalidArgumentError unless a key is one of `known`. place: what the error says of one elsewhere."""
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        shown = Shown("a secret") if key == "seed_key" else Shown("a table") if isinstance(value, dict) else value
        raise InvalidArgumentError(where, shown, place or f"is not a key here; the nearest is {near[0]}")


def _place(key: str) -> str:
    """Return what an error says about a known key that does not belong in a table; empty: it is unknown."""
    if key == "seed_key":
        return "must not be in this file, which is no secret: use seed_key_file"
    scopes = {each.metadata.get("scope") for cls in CONFIGS.values() for each in fields(cls) if each.name == key}
    if Scope.LAUNCHER in scopes and not any(key in table for table in _keys().values()):
        return Scope.LAUNCHER.value
    roles = {role: f"pools.NAME.{role}" for role in (*ROLES, GATEWAY)}
    places = {"security": "security", "pool": "pools.NAME", **roles}
    return next((f"belongs in [{place}]" for home, place in places.items() if key in _keys()[home]), "")


@functools.cache
def _keys() -> dict[str, dict[str, Any]]:
    """Return the keys of each kind of table with their types: security, pool, and the roles."""
    found = {"security": typing.get_type_hints(Security), GATEWAY: typing.get_type_hints(HttpConfig)}
    tables: dict[str, type[Any]] = {"pool": NodeConfig, **CONFIGS}
    for kind, config in tables.items():
        scopes = (Scope.POOL, None) if kind == "pool" else (None,)
        names = [
            each.name
            for each in fields(config)
            if each.metadata.get("scope") in scopes and not each.metadata.get("secret")
        ]
        hints = typing.get_type_hints(config)
        found[kind] = {**{name: hints[name] for name in names}, "nodes_per_gpu" if kind == "pool" else "replicas": int}
    return found


def absolute(key: str, value: Any, base: Path) -> Any:
    """Return a path as absolute, relative to the directory `base`. Other values, and links, stay as they are.

    A mounted secret is a link that its renewal changes, so the path of the link must be kept. A model is a path if it
    begins like one, or if it exists.
    """
    if key == "model":
        is_path = value not in NAMED and (value.startswith((".", "~")) or (base / value / "config.json").is_file())
    else:
        is_path = key in path_settings() and value != ""
    return os.path.abspath(base / os.path.expanduser(value)) if is_path else value


@functools.cache
def path_settings() -> frozenset[str]:
    """Return the settings that are always paths. `model` may be a path, too."""
    configs = (*CONFIGS.values(), HttpConfig)
    return frozenset(each.name for config in configs for each in fields(config) if each.metadata.get("path"))


def toml(pool: PoolSpec) -> str:
    """Return the content of a `cluster.toml` that has one pool: the values that were given, and all counts."""
    security = {known.name: value for known in fields(Security) if (value := getattr(pool.security, known.name))}
    tables: dict[str, dict[str, Any]] = {"security": security}
    own = {} if pool.nodes_per_gpu is None else {"nodes_per_gpu": pool.nodes_per_gpu}
    tables[f"pools.{pool.name}"] = {**pool.common, **own}
    for role in ROLES:
        tables[f"pools.{pool.name}.{role}"] = {**getattr(pool, role), "replicas": pool.count(role)}
    if pool.gateway is not None:
        tables[f"pools.{pool.name}.{GATEWAY}"] = dict(pool.gateway)
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items()), ""])
        for name, table in tables.items()
    )


def _toml_value(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL as it is.
    return str(value).lower() if isinstance(value, bool) else repr(value)
