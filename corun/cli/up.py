"""`corun up`: run a whole cluster with one command. The work is done in `corun.launch`, which needs the serving
packages."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from corun.config.cluster_file import PATHS, ROLES, ClusterSpec, PoolSpec, Security, read
from corun.config.extras import default_slots, needs_extra
from corun.errors import InvalidArgumentError
from corun.models import TINY

_Int = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
_Float = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
_Text = Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")]
_Path = Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]


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
    model: _Text = None
    """Path of a checkpoint or its id on the hub; "tiny", the default, is built in and needs no download."""
    prefill: _Int = None
    """Prefill nodes; 1 by default."""
    decode: _Int = None
    """Decode nodes; 1 by default."""
    slots: _Int = None
    """Decode slots of each decode node: the fixed number of rows of a step; by default 256 on GPUs, 8 on a CPU."""
    port: _Int = None
    """Port of the router; 0 picks a free one; 50051 by default."""
    host: _Text = None
    """Address the router listens on; 127.0.0.1 by default."""
    threads: _Int = None
    """CPU threads of each engine; 0, the default: its share of the machine."""
    chunk_size: _Int = None
    """Prompt tokens of one prefill step; 2048 by default."""
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"] | None, tyro.conf.arg(help_behavior_hint="")] = (
        None
    )
    """Type of the weights and the computation; auto, the default, is the checkpoint's."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Running Ray cluster to place the processes on; by default one is started here and ends with the command."""
    log_dir: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Directory for one log per process; by default a new one, whose path is printed."""
    tls_cert: _Path = None
    """PEM file of the certificate of every process; see corun certs."""
    tls_key: _Path = None
    """PEM file of its private key."""
    tls_ca: _Path = None
    """PEM file of the authorities that sign the certificates of processes, and of clients with --tls-clients."""
    tls_name: _Text = None
    """Name that the processes' certificate carries, where it is not the address that is called."""
    tls_clients: bool = False
    """Clients must show a certificate, too."""
    cluster_token_file: _Path = None
    """File of the token that processes of this cluster, and nobody else, have."""
    client_tokens_file: _Path = None
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N]."""
    insecure: bool = False
    """Serve on a public address without TLS and tokens."""
    audit_fraction: _Float = None
    """Share of the finished samples that run again on other nodes, when nothing else is to do, and are compared; 0.001
    by default."""
    audit_dir: _Path = None
    """Directory for a file per difference that an audit finds, with the prompt; else differences are only logged."""
    metrics_port: _Int = None
    """Port of the router's metrics for Prometheus, on loopback; by default there are none."""

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
        values = {name: getattr(self, name) for name in _OF_SPEC}
        given = {name: value for name, value in values.items() if value is not None and value is not False}
        if self.file is None:
            return _of_flags(**given)
        if given:
            name, value = next(iter(given.items()))
            raise InvalidArgumentError(name, value, f"must be left out: {self.file} says it")
        return read(self.file)


_OF_SPEC = tuple(known.name for known in fields(Up) if known.name not in ("file", "check", "ray_address", "log_dir"))
"""The options that a cluster.toml replaces."""


def _of_flags(**given: Any) -> ClusterSpec:
    """Return the spec of a cluster with one pool."""
    for name in PATHS:
        if given.get(name):
            given[name] = str(Path(given[name]).resolve())

    def of(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    pool = PoolSpec(
        common={"model": TINY, **of("model", "dtype", "threads")},
        router=of("host", "port", "audit_fraction", "audit_dir", "metrics_port"),
        prefill=of("chunk_size"),
        decode=of("slots"),
        replicas=of("prefill", "decode"),
        security=Security(**of(*(known.name for known in fields(Security)))),
    )
    return ClusterSpec(pools=(pool,))


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
