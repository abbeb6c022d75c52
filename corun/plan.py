"""What `corun up` runs: how many processes of which kind, and the command line of each.

Pure but for looking at files and ports. Must not know how the processes are started (`corun.launch`).
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.config import DecodeConfig, PrefillConfig, RouterConfig, is_loopback
from corun.errors import InvalidArgumentError

TINY = "tiny"
"""The model name that stands for the built-in model."""
ROUTER = "router"
LOOPBACK = "127.0.0.1"

_ANY_HOST = ("0.0.0.0", "::")
# Nodes that share a GPU share this much of its memory.
_GPU_MEMORY = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Security:
    """What the links of a cluster are protected with: paths of files, the same for all processes."""

    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    cluster_token_file: str = ""
    tls_clients: bool = False
    client_tokens_file: str = ""
    insecure: bool = False
    """Serves on a public address without protection."""

    def check(self, host: str) -> None:
        """Raises InvalidArgumentError for a public address without protection, unless that is wanted."""
        if self.insecure or is_loopback(host):
            return
        needed = ("tls_cert", "tls_key", "tls_ca", "cluster_token_file", "client_tokens_file")
        if missing := [name for name in needed if not getattr(self, name)]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            limit = f"is a public address, so it needs {flags} as well; or say --insecure"
            raise InvalidArgumentError("host", host, limit)

    def of_member(self) -> dict[str, Any]:
        """Settings of every process, without those that say nothing."""
        names = ("tls_cert", "tls_key", "tls_ca", "tls_name", "cluster_token_file")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def of_router(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("client_tokens_file", "tls_clients") if getattr(self, name)}
        return self.of_member() | own


NO_SECURITY = Security()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run. Checked when made, so that nothing starts if any process would refuse its configuration."""

    model: str
    prefill: int = 1
    decode: int = 1
    slots: int = 256
    host: str = LOOPBACK
    """Where the router listens."""
    port: int = 50051
    threads: int = 0
    chunk_size: int = 2048
    dtype: str = "auto"
    security: Security = NO_SECURITY
    audit_fraction: float = 0.001
    audit_dir: str = ""
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, getattr(self, name), "must be at least 1")
        self.security.check(self.host)
        RouterConfig(**self.of_router())
        PrefillConfig(model=self.model, dtype=self.dtype, threads=self.threads, chunk_size=self.chunk_size)
        DecodeConfig(model=self.model, dtype=self.dtype, threads=self.threads, slots=self.slots)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node ids; they stay the same when a process is started again."""
        prefill = (f"prefill-{index}" for index in range(self.prefill))
        decode = (f"decode-{index}" for index in range(self.decode))
        return (*prefill, *decode)

    def of_router(self) -> dict[str, Any]:
        """Settings of the router."""
        found: dict[str, Any] = {"host": self.host, "port": self.port, "audit_fraction": self.audit_fraction}
        found |= {"audit_dir": self.audit_dir} if self.audit_dir else {}
        found |= {} if self.metrics_port is None else {"metrics_port": self.metrics_port}
        return found | self.security.of_router()

    def router_address(self, own_host: str) -> str:
        """host:port at which the router is reached. own_host: the router's machine, for one that listens anywhere."""
        return f"{own_host if self.host in _ANY_HOST else self.host}:{self.port}"


def role_of(name: str) -> str:
    """What a process of a plan is: router, prefill or decode."""
    return name.partition("-")[0]


def command(plan: Plan, name: str, *, router: str, host: str, gpu_share: float = 0.0) -> list[str]:
    """The command line of one process. router: its host:port. host: where a node is reached."""
    if name == ROUTER:
        return [sys.executable, "-m", "router", *_words(plan.of_router())]
    role = role_of(name)
    flags: dict[str, Any] = {
        "model": plan.model,
        "router": router,
        "node-id": name,
        "host": host,
        "nixl-host": host,
        "dtype": plan.dtype,
        "threads": plan.threads,
    }
    flags |= {"chunk-size": plan.chunk_size} if role == "prefill" else {"slots": plan.slots}
    if 0 < gpu_share < 1:
        flags["gpu-memory-utilization"] = round(_GPU_MEMORY * gpu_share, 3)
    return [sys.executable, "-m", f"{role}_node", *_words(flags | plan.security.of_member())]


def _words(flags: dict[str, Any]) -> list[str]:
    """The flags of a command line; True is one that takes no value."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in flags.items())
    return [word for flag, value in pairs for word in ((flag,) if value is True else (flag, str(value)))]


def share_of_gpu(gpus: float, nodes: int) -> float:
    """The share of one GPU that each node gets: a whole one where there are enough, 0 where there are none."""
    return min(1.0, int(1000 * gpus / nodes) / 1000)


def share_of_cores(cores: Sequence[int], nodes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Cores for each node of a machine: equally many, since they share a contract; its own where there are enough."""
    size = max(1, len(cores) // len(nodes))
    starts = {name: index * size % (len(cores) - size + 1) for index, name in enumerate(nodes)}
    return {name: tuple(cores[start : start + size]) for name, start in starts.items()}


def resolve_model(model: str) -> str:
    """The path of a local model, made first if it is the built-in one; a hub id stays as it is."""
    if model == TINY:
        from corun import tiny  # Needs numpy and safetensors, which no other model does.  # noqa: PLC0415

        return str(tiny.ensure())
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InvalidArgumentError("model", model, "must be 'tiny', a directory with a config.json, or a hub id")
    return model


def free_port(host: str, port: int) -> int:
    """The port itself if it can be listened on, or a free one for 0."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InvalidArgumentError("port", port, f"cannot be listened on at {host}: {error}") from error
        return int(probe.getsockname()[1])
