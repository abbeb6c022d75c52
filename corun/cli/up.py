"""`corun up`: run a whole cluster with one command. The work is done in `corun.launch`, which needs the serving
packages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from corun.config.cluster_file import CONFIGS, ROLES, ClusterSpec, PoolSpec, Security, absolute, read
from corun.config.docs import describe
from corun.config.extras import default_slots, needs_extra
from corun.errors import InvalidArgumentError
from corun.models import TINY

SETTINGS = {
    "common": ("model", "dtype", "threads"),
    "router": ("host", "port", "audit_fraction", "audit_dir", "metrics_port"),
    "prefill": ("chunk_size",),
    "decode": ("slots",),
}
"""The settings that are flags here, by the part of a pool that they belong to."""


def _setting(role: str, name: str, metavar: str) -> Any:
    """Return the flag of a setting, with the meaning and the default that the config class of its role gives it."""
    return tyro.conf.arg(metavar=metavar, help=describe(CONFIGS[role], name), help_behavior_hint="")


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start a whole cluster; Ctrl-C ends all of it.

    examples:
      corun up                                              the built-in tiny model on this machine
      corun up --model Qwen/Qwen3-8B --prefill 2 --decode 2
      corun up --ray-address auto --model /models/qwen3     on a Ray cluster
      corun up cluster.toml                                 pools, models, ports and security as the file says
      corun up --check cluster.toml                         the same, but only says what would run

    On another address than this machine's own loopback it starts with TLS and tokens only, or with --insecure.
    """

    file: tyro.conf.Positional[Path | None] = None
    """A cluster.toml; only --check, --ray-address and --log-dir may be given with it."""
    check: bool = False
    """Say what would run, and whether this machine has GPUs, memory, packages and ports for it, but start nothing."""
    model: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Path of a checkpoint or its id on the hub; "tiny", the default, is built in and needs no download."""
    prefill: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Prefill nodes; 1 by default."""
    decode: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Decode nodes; 1 by default."""
    slots: Annotated[int | None, _setting("decode", "slots", "INT")] = None
    port: Annotated[int | None, _setting("router", "port", "INT")] = None
    host: Annotated[str | None, _setting("router", "host", "STR")] = None
    threads: Annotated[int | None, _setting("decode", "threads", "INT")] = None
    chunk_size: Annotated[int | None, _setting("prefill", "chunk_size", "INT")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"] | None,
        _setting("decode", "dtype", "{auto,bfloat16,float16,float32}"),
    ] = None
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Running Ray cluster to place the processes on; by default one is started here and ends with the command."""
    log_dir: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Directory for one log per process; by default a new one, whose path is printed."""
    security: tyro.conf.OmitArgPrefixes[Security] = field(default_factory=Security)
    audit_fraction: Annotated[float | None, _setting("router", "audit_fraction", "FLOAT")] = None
    audit_dir: Annotated[str | None, _setting("router", "audit_dir", "PATH")] = None
    metrics_port: Annotated[int | None, _setting("router", "metrics_port", "INT")] = None

    def run(self) -> int:
        spec = self.spec()
        with needs_extra("corun up", "cpu"):
            launch = importlib.import_module("corun.launch")
            if self.check:
                launch.check(spec)
                return self._look(spec)
            code: int = launch.run(spec, ray_address=self.ray_address, log_dir=self.log_dir)
        return code

    def _look(self, spec: ClusterSpec) -> int:
        """Show what would run, and what this machine lacks for it. Return 1 if the cluster would not start here."""
        console = Console(highlight=False, markup=False)
        console.print(picture(spec))
        if self.ray_address is not None:
            console.print(f"\nnot looked at: the machines of the Ray cluster at {self.ray_address}")
            return 0
        preflight = importlib.import_module("corun.launch.preflight")
        found = preflight.look(spec)
        console.print()
        console.print(findings(found))
        if failing := preflight.failing(found):
            console.print(f"\nit would not start here: {', '.join(failing)}")
        return 1 if failing else 0

    def spec(self) -> ClusterSpec:
        """Return the spec of the cluster. Raises InvalidArgumentError for an invalid file, or flags beside a file."""
        names = ("prefill", "decode", *(name for part in SETTINGS.values() for name in part))
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        security = {known.name: value for known in fields(Security) if (value := getattr(self.security, known.name))}
        if self.file is None:
            return ClusterSpec(pools=(_pool(_absolute(given), Security(**_absolute(security))),))
        for name, value in {**given, **security}.items():
            raise InvalidArgumentError(name, value, f"must be left out: {self.file} says it")
        return read(self.file)


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: absolute(name, value, Path.cwd()) for name, value in values.items()}


def _pool(given: Mapping[str, Any], security: Security) -> PoolSpec:
    """Return the only pool of a cluster that has no file."""
    tables: dict[str, Any] = {
        part: {name: given[name] for name in names if name in given} for part, names in SETTINGS.items()
    }
    return PoolSpec(
        common={"model": TINY, **tables.pop("common")},
        **tables,
        replicas={role: given[role] for role in ("prefill", "decode") if role in given},
        security=security,
    )


def picture(spec: ClusterSpec) -> Table:
    """Return a table, for a terminal, of what a spec would run: a line for each role of each pool."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("pool", "role", "replicas", "model", "slots", "TP", "nodes/GPU", "ports"):
        table.add_column(name, overflow="fold")
    for pool in spec.pools:
        for role in ROLES:
            config, count = pool.config(role), pool.count(role)
            slots = str(config.slots or default_slots()) if role == "decode" else ""
            model, size, sharing = "", "", ""
            if role != "router":
                model, size, sharing = pool.model, str(config.tensor_parallel_size), str(pool.nodes_per_gpu or "")
            table.add_row(pool.name, role, str(count), model, slots, size, sharing, _ports(pool, role, count))
    return table


def findings(found: Sequence[Any]) -> Table:
    """Return a table, for a terminal, of what a cluster needs of a machine and what the machine has."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "needs", "has", ""):
        table.add_column(name, overflow="fold")
    for one in found:
        table.add_row(one.what, one.needs, one.has, one.state)
    return table


def _ports(pool: PoolSpec, role: str, count: int) -> str:
    last = pool.ports(role, count - 1)
    ranges = {name: f"{first}" + (f"-{last[name]}" if count > 1 else "") for name, first in pool.ports(role, 0).items()}
    return ", ".join(text if name == "port" else f"{name} {text}" for name, text in ranges.items()) or "any"
