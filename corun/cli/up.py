"""`corun up`: a whole cluster from one command. The work is `corun.launch`, which needs the serving packages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from corun.errors import CorunError


@dataclass(frozen=True, kw_only=True)
class Up:
    """Start a whole cluster; Ctrl-C ends all of it.

    examples:
      corun up                                              the built-in tiny model on this machine
      corun up --model Qwen/Qwen3-8B --prefill 2 --decode 2
      corun up --ray-address auto --model /models/qwen3     on a Ray cluster

    On another address than this machine's own loopback it starts with TLS and tokens only, or with --insecure.
    """

    model: str = "tiny"
    """Path of a checkpoint or its id on the hub; "tiny" is built in and needs no download."""
    prefill: int = 1
    """Prefill nodes."""
    decode: int = 1
    """Decode nodes."""
    slots: int = 256
    """Decode slots of each decode node: the fixed number of rows of a step."""
    port: int = 50051
    """Port of the router; 0 picks a free one."""
    host: str = "127.0.0.1"
    """Address the router listens on."""
    threads: int = 0
    """CPU threads of each engine; 0: its share of the machine."""
    chunk_size: int = 2048
    """Prompt tokens of one prefill step."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights and the computation; auto is the checkpoint's."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Running Ray cluster to place the processes on; by default one is started here and ends with the command."""
    log_dir: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Directory for one log per process; by default a new one, whose path is printed."""
    tls_cert: str = ""
    """PEM file of the certificate of every process; see corun certs."""
    tls_key: str = ""
    """PEM file of its private key."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the certificates of processes, and of clients with --tls-clients."""
    tls_name: str = ""
    """Name that the processes' certificate carries, where it is not the address that is called."""
    tls_clients: bool = False
    """Clients must show a certificate, too."""
    cluster_token_file: str = ""
    """File of the token that processes of this cluster, and nobody else, have."""
    client_tokens_file: str = ""
    """File of the clients' tokens, a line each: [NAME:] TOKEN [max_requests=N]."""
    insecure: bool = False
    """Serve on a public address without TLS and tokens."""
    audit_fraction: float = 0.001
    """Share of the finished samples that run again on other nodes, when nothing else is to do, and are compared."""
    audit_dir: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Directory for a file per difference that an audit finds, with the prompt; empty: differences are only logged."""
    metrics_port: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Port of the router's metrics for Prometheus, on loopback; by default there are none."""

    def run(self) -> int:
        with needs_extra("corun up"):
            launch = importlib.import_module("corun.launch")
            code: int = launch.up(**{option.name: getattr(self, option.name) for option in fields(self)})
        return code


@contextmanager
def needs_extra(command: str) -> Iterator[None]:
    """Says how to get a package that a bare install leaves out."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{command} needs package {error.name}, which a bare install leaves out: pip install 'corun[cpu]'"
        raise CorunError(f"{message}, or [gpu]") from error
