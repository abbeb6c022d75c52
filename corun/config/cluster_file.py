"""A whole cluster as one value: its pools, their processes and their settings. `cluster.toml` is its file.

    [security]               # for every process: tls_cert, tls_key, tls_ca, tls_name, cluster_token_file; for routers:
                             # client_tokens_file, tls_clients; insecure = true allows a public address without them
    [pools.main]             # what prefill and decode nodes have in common
    model = "Qwen/Qwen3-8B"
    [pools.main.router]      # RouterConfig
    port = 50051
    [pools.main.prefill]     # PrefillConfig
    replicas = 2
    [pools.main.decode]      # DecodeConfig
    slots = 256

Keys are the fields of the config classes, which own every limit. There are two more keys: `replicas` is the number of
processes of a role, and `nodes_per_gpu`, in a pool's table, is the number of its nodes that share a GPU. Paths are
relative to the file. The file has three rules of its own:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from corun.config.fields import (
    DecodeConfig,
    LinkConfig,
    NodeConfig,
    PrefillConfig,
    RouterConfig,
    Scope,
    is_loopback,
)
from corun.errors import InvalidArgumentError, Shown
from corun.models import TINY, resolve_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS: dict[str, type[RouterConfig] | type[PrefillConfig] | type[DecodeConfig]] = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
ROLES = tuple(CONFIGS)
MAX_REPLICAS = 1024
MAX_NODES_PER_GPU = 32

_COMMON = (Scope.POOL, None)
"""The scopes of settings that the table of a pool has for both of its node roles."""
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
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N]."""
    insecure: bool = False
    """Serve on a public address without TLS and tokens."""

    def missing(self, host: str) -> list[str]:
        """Return the names of the settings that a router needs to listen on `host` and does not have."""
        if self.insecure or is_loopback(host):
            return []
        needed = ("tls_cert", "tls_key", "tls_ca", "cluster_token_file", "client_tokens_file")
        return [name for name in needed if not getattr(self, name)]

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings of a process of `role`, without empty ones."""
        return {name: getattr(self, name) for name in _names(role, Scope.SECURITY) if getattr(self, name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSpec:
    """One contract and the processes that share it: routers and their nodes.

    It holds only the settings that were given, by their names in the config classes.
    """

    name: str = "main"
    common: Mapping[str, Any]
    """The settings of both node roles. They include the model."""
    router: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    """The number of processes by role; 1 for a role that is not in it."""
    nodes_per_gpu: int | None = None
    """The number of nodes that share a GPU; None: the program that starts them decides."""
    security: Security = field(default_factory=Security)
    source: str = ""
    """The file that the pool was read from; empty: it was given on a command line."""

    @property
    def model(self) -> str:
        return str(self.common["model"])

    def count(self, role: str) -> int:
        """Return the number of processes of a role."""
        return self.replicas.get(role, 1)

    def settings(self, role: str) -> dict[str, Any]:
        """Return all settings that were given for a process of a role."""
        common = {} if role == "router" else self.common
        return {**self.security.settings(role), **common, **getattr(self, role)}

    def config(self, role: str, **own: Any) -> Any:
        """Return the configuration of a process of a role. own: the settings of that process alone.

        Raises InvalidArgumentError, which names where a value was given, if the value is outside its limit.
        """
        with self._saying_where(role):
            return CONFIGS[role](**{**self.settings(role), **own})

    def check_files(self, role: str) -> None:
        """Raise InvalidArgumentError, which names where a file was given, unless a role's files can be used."""
        config = self.config(role)
        with self._saying_where(role):
            config.check_files()

    @contextmanager
    def _saying_where(self, role: str) -> Iterator[None]:
        try:
            yield
        except InvalidArgumentError as error:
            raise InvalidArgumentError(self.where(role, error.field), error.value, error.limit) from None

    def ports(self, role: str, index: int) -> dict[str, int]:
        """Return the ports that are not 0 of the process number `index` of a role, from 0, by their settings."""
        config = self.config(role)
        names = (known.name for known in fields(config) if known.name == "port" or known.name.endswith("_port"))
        return {name: port + index for name in names if (port := getattr(config, name))}

    def scaled(self, counts: Mapping[str, int]) -> PoolSpec:
        """Return the pool with other numbers of processes, by role. Raises InvalidArgumentError for a bad number."""
        for role, count in counts.items():
            check_replicas(self.where(role, "replicas"), count)
        return replace(self, replicas={**self.replicas, **counts})

    @property
    def tensor_parallel_size(self) -> int:
        """The number of GPUs over which each node splits the model."""
        return int(self.config("decode").tensor_parallel_size)

    def where(self, role: str, name: str) -> str:
        """Return the place of a setting as text, for errors: file, table and key, or the name alone."""
        if not self.source:
            return role if name == "replicas" else name
        table = f"pools.{self.name}.{role}"
        if name in _names(role, Scope.SECURITY):
            table = "security"
        elif role != "router" and (
            name in ("nodes_per_gpu", *_names(role, Scope.POOL))
            or (name in self.common and name not in getattr(self, role))
        ):
            table = f"pools.{self.name}"
        return f"{self.source}: [{table}] {name}"

    def check(self) -> None:
        """Raise InvalidArgumentError unless the configuration of every process of the pool is valid. Read no file.

        This includes that a router on a public address is protected.
        """
        host = self.router.get("host", RouterConfig().host)
        if missing := self.security.missing(host):
            raise InvalidArgumentError(
                self.where("router", "host"), host, _unprotected(missing, is_file=bool(self.source))
            )
        for role in ROLES:
            check_replicas(self.where(role, "replicas"), self.count(role))
            self.config(role, **self.ports(role, self.count(role) - 1))
        check_nodes_per_gpu(self.where("prefill", "nodes_per_gpu"), self.nodes_per_gpu)
        if self.nodes_per_gpu is not None and self.tensor_parallel_size > 1:
            limit = f"must be left out: each node needs {self.tensor_parallel_size} GPUs (tensor_parallel_size)"
            raise InvalidArgumentError(self.where("prefill", "nodes_per_gpu"), self.nodes_per_gpu, limit)


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

        Raises InvalidArgumentError as `pool`, `PoolSpec.scaled` and `check` do.
        """
        changed = self.pool(name).scaled(counts)
        spec = ClusterSpec(pools=tuple(changed if pool.name == changed.name else pool for pool in self.pools))
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
            for role in ROLES:
                first = pool.ports(role, 0)
                for port, name in ((first[name] + i, name) for i in range(pool.count(role)) for name in first):
                    where = pool.where(role, name)
                    if port in taken:
                        raise InvalidArgumentError(where, first[name], f"must leave {port} to {taken[port]}, or be 0")
                    taken[port] = where

    def check_files(self) -> None:
        """Raise InvalidArgumentError unless the files of all processes can be used on this machine."""
        for pool in self.pools:
            for role in ROLES:
                pool.check_files(role)


def read(path: str | Path) -> ClusterSpec:
    """Read the cluster of a file, in which every key is known and has the right type. `check` checks that it can run.

    Raises:
        InvalidArgumentError: the file is not valid. The error names file, table, key, value and limit.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError("config", str(path), f"must be a readable TOML file: {reason}") from error
    return _Reader(str(path)).cluster(content)


def process_settings(path: str | Path, pool: str, config: type[Any]) -> dict[str, Any]:
    """Return the settings that a file gives for one process, by the class of its configuration.

    Raises InvalidArgumentError as `read` does, and for values of this role that are outside their limits, or files that
    cannot be used. What only other roles need, such as their secrets, need not exist.
    """
    found = read(path).pool(pool)
    role = next(name for name, cls in CONFIGS.items() if cls is config)
    found.check_files(role)
    settings = found.settings(role)
    return settings if role == "router" else {**settings, "model": resolve_model(found.model)}


def check_replicas(where: str, count: object) -> None:
    """Raise InvalidArgumentError unless `count` is an allowed number of processes of a role."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_REPLICAS:
        raise InvalidArgumentError(where, count, f"must be at least 1 and at most {MAX_REPLICAS}")


def check_nodes_per_gpu(where: str, count: object) -> None:
    """Raise InvalidArgumentError unless `count` is an allowed number of nodes per GPU. None is allowed: it is unset."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_NODES_PER_GPU:
        limit = f"must be an integer of at least 1 and at most {MAX_NODES_PER_GPU}"
        raise InvalidArgumentError(where, count, limit)


class _Reader:
    """Turns the content of one file into a spec."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._base = Path(path).resolve().parent

    def cluster(self, content: Mapping[str, Any]) -> ClusterSpec:
        self._check_keys("", content, ("security", "pools"))
        security = Security(**self._values("security", self._table("security", content), _security_types(), {}))
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
        own = {key: value for key, value in table.items() if key not in ROLES}
        nodes_per_gpu = own.pop("nodes_per_gpu", None)
        check_nodes_per_gpu(f"{self._path}: [{path}] nodes_per_gpu", nodes_per_gpu)
        common = self._values(path, own, _common_types(), _elsewhere(name))
        if "model" not in common:
            raise InvalidArgumentError(f"{self._path}: [{path}] model", "", "must be given")
        given: dict[str, dict[str, Any]] = {}
        replicas: dict[str, int] = {}
        for role, values in roles.items():
            where = f"{path}.{role}"
            if (count := values.pop("replicas", None)) is not None:
                check_replicas(f"{self._path}: [{where}] replicas", count)
                replicas[role] = count
            given[role] = self._values(where, values, _types(role), _elsewhere(name, role))
        return PoolSpec(
            name=name,
            common=common,
            **given,
            replicas=replicas,
            nodes_per_gpu=nodes_per_gpu,
            security=security,
            source=self._path,
        )

    def _table(self, name: str, parent: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        table = parent.get(name, {})
        if not isinstance(table, dict):
            raise InvalidArgumentError(f"{self._path}: {path}{name}", table, f"must be a table: [{path}{name}]")
        return dict(table)

    def _values(
        self, path: str, table: Mapping[str, Any], types: Mapping[str, Any], elsewhere: Mapping[str, str]
    ) -> dict[str, Any]:
        self._check_keys(path, table, types, elsewhere)
        for key, value in table.items():
            kinds, limit = _TYPES[types[key]]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidArgumentError(f"{self._path}: [{path}] {key}", value, limit)
        return {key: absolute(key, value, self._base) for key, value in table.items()}

    def _check_keys(
        self, path: str, table: Mapping[str, Any], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        """Raise InvalidArgumentError for the first key that is not known. elsewhere: special messages for some keys."""
        for key in (key for key in table if key not in known):
            limit = (elsewhere or {}).get(key, "")
            if not limit:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
                limit = f"is not a key here; the nearest is {near[0]}"
            value = Shown("a secret") if key == "seed_key" else table[key]
            where = f"{self._path}: [{path}] {key}" if path else f"{self._path}: {key}"
            raise InvalidArgumentError(where, Shown("a table") if isinstance(value, dict) else value, limit)


def absolute(key: str, value: Any, base: Path) -> Any:
    """Return a path as absolute, relative to the directory `base`. Other values, and links, stay as they are.

    A mounted secret is a link that its renewal changes, so the path of the link must be kept. A model is a path if it
    begins like one, or if it exists.
    """
    if key == "model":
        is_path = value != TINY and (value.startswith((".", "~")) or (base / value / "config.json").is_file())
    else:
        is_path = key in path_settings() and value != ""
    return os.path.abspath(base / Path(value).expanduser()) if is_path else value


@functools.cache
def path_settings() -> frozenset[str]:
    """Return the settings that are always paths. `model` may be a path, too."""
    return frozenset(
        known.name for config in CONFIGS.values() for known in fields(config) if known.metadata.get("path")
    )


def toml(pool: PoolSpec) -> str:
    """Return the content of a `cluster.toml` that has one pool, with the values that were given and no others."""
    security = {known.name: value for known in fields(Security) if (value := getattr(pool.security, known.name))}
    tables: dict[str, dict[str, Any]] = {"security": security}
    own = {} if pool.nodes_per_gpu is None else {"nodes_per_gpu": pool.nodes_per_gpu}
    tables[f"pools.{pool.name}"] = {**pool.common, **own}
    for role in ROLES:
        count = {"replicas": pool.replicas[role]} if role in pool.replicas else {}
        tables[f"pools.{pool.name}.{role}"] = {**getattr(pool, role), **count}
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items()), ""])
        for name, table in tables.items()
    )


def _toml_value(value: str | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON leaves DEL as it is.
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _elsewhere(pool: str, role: str = "") -> dict[str, str]:
    """Return what an error says about known keys that do not belong in the table of a pool or of one of its roles."""
    found = {name: scope.value for scope in Scope for other in ROLES for name in _names(other, scope)}
    found["seed_key"] = "must not be in this file, which is no secret: use seed_key_file"
    found["nodes_per_gpu"] = Scope.POOL.value
    if not role:
        own = {name: other for other in ROLES for name in _types(other) if name not in _common_types()}
        found |= {name: f"belongs in [pools.NAME.{other}]" for name, other in own.items()}
    return {name: text.replace("pools.NAME", f"pools.{pool}") for name, text in found.items()}


@functools.cache
def _names(role: str, scope: Scope | None) -> tuple[str, ...]:
    """Return the settings of a role that have the given scope, without secrets."""
    return tuple(
        known.name
        for known in fields(CONFIGS[role])
        if known.metadata.get("scope") is scope and not known.metadata.get("secret")
    )


@functools.cache
def _types(role: str) -> dict[str, Any]:
    """Return the keys of a role's table with their types, without `replicas`."""
    return _hints(CONFIGS[role], _names(role, None))


@functools.cache
def _security_types() -> dict[str, Any]:
    return _hints(Security, [known.name for known in fields(Security)])


@functools.cache
def _common_types() -> dict[str, Any]:
    """Return the keys of a pool's table with their types, without those of its roles."""
    return _hints(NodeConfig, [known.name for known in fields(NodeConfig) if known.metadata.get("scope") in _COMMON])


def _hints(cls: type[Any], names: Iterable[str]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in names}


def _unprotected(missing: Sequence[str], *, is_file: bool) -> str:
    if is_file:
        return f"is a public address, so [security] needs {', '.join(missing)} as well; or insecure = true there"
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
    return f"is a public address, so it needs {flags} as well; or say --insecure"
