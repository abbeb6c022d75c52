"""One gRPC server for every process: limits, certificates, health, lifecycle.

This module must not know any service of ours.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from corun.config.fields import CLIENT_TIMEOUT_S, MAX_MESSAGE_BYTES, TlsConfig
from corun.errors import CorunError, UnavailableError, shown
from corun.rpc.auth import Gate
from corun.rpc.certificates import Identity, identity
from corun.rpc.channel import KEEPALIVE_MS, Options, link_options
from corun.rpc.health import HealthService
from corun.rpc.interceptor import CallInterceptor

logger = logging.getLogger(__name__)

S = TypeVar("S")

MAX_STREAMS = 1024
"""The most calls in progress on one connection. Further calls wait on the client's side."""
MAX_CONNECTIONS = 16_384
"""The most connections at once. Further ones are closed."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""The time in milliseconds for a new connection to finish TLS and HTTP/2. gRPC's default is two minutes."""
IDLE_TIMEOUT_MS = 600_000
"""The time in milliseconds after which a connection without calls is closed. Clients make a new one when they need
it."""
MAX_CONNECTION_AGE_S = 3600.0
"""The longest life of a connection in seconds, on servers whose calls are not endless. It stops a client that answers
pings but reads nothing: gRPC has no other way to end a stream to such a client."""
SPARE_FILES = 256
"""The number of a process's file descriptors that are not for connections: without any, it could refuse none."""

_GRPC_LOG = "grpc._cython.cygrpc"


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, longest_call_s: float | None = None) -> Options:
    """Return the gRPC options of a server. They permit the pings of `channel`.

    longest_call_s: the longest that a call may take, in seconds; None if calls are endless.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ages: Options = [
        ("grpc.max_connection_age_ms", round(1000 * MAX_CONNECTION_AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1000 * (longest_call_s or 0))),
    ]
    return [
        *(ages if longest_call_s is not None else ()),
        *link_options(max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max(1, min(MAX_CONNECTIONS, files - SPARE_FILES))),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.so_reuseport", 0),  # Two processes on one port must be an error.
    ]


def raise_file_limit() -> None:
    """Raise this process's limit on file descriptors as far as allowed: the usual 1024 allow few connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class GrpcServer:
    """A grpc.aio server with typed errors, health, tokens and limits. Make it inside a running loop.

    Lifecycle: `add` services → `start` → `set_serving` → `stop`. Health says NOT_SERVING until `set_serving`.

    tls: the PEM files; None: no TLS. mutual: whether clients must show a certificate that the authorities of `tls`
    signed. gate: who may call what; None: anyone may call anything. request_limit: the most bytes of a request to a
    method, checked before the request is parsed; None: max_message_bytes. client_timeout_s: the longest that a client
    may take to send its request, or to take a message, in seconds. longest_call_s: the longest that a call may take, in
    seconds; None: calls are endless. health: the health service to serve; None: a new one.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: TlsConfig | None = None,
        mutual: bool = True,
        gate: Gate | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        request_limit: Callable[[str], int] | None = None,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
        longest_call_s: float | None = None,
        health: HealthService | None = None,
    ) -> None:
        self.host = host
        self._port = port
        self._tls = tls
        self._mutual = mutual
        self._health = health or HealthService()
        logging.getLogger(_GRPC_LOG).addFilter(_without_clients_faults)
        self._server = grpc.aio.server(
            interceptors=[
                CallInterceptor(gate or Gate(), request_limit or (lambda _: max_message_bytes), client_timeout_s)
            ],
            options=server_options(max_message_bytes, longest_call_s),
        )
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)

    @property
    def port(self) -> int:
        """The port that was asked for; after `start`, the port in use."""
        return self._port

    @property
    def address(self) -> str:
        """The server's address as host:port."""
        return join_address(self.host, self._port)

    def add(self, register: Callable[[S, Any], None], servicer: S) -> None:
        """Add a service. `register` is the generated `add_XServicer_to_server`."""
        register(servicer, self._server)

    async def start(self) -> None:
        """Start to listen.

        Raises UnavailableError if the address cannot be used, and InvalidArgumentError for bad certificates.
        """
        self.set_serving("", False)
        try:
            if self._tls is None:
                self._port = self._server.add_insecure_port(self.address)
            else:
                credentials = _credentials(self._tls, self._mutual)
                self._port = self._server.add_secure_port(self.address, credentials)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self.address}: is the port in use?") from error
        await self._server.start()

    def set_serving(self, service: str, serving: bool) -> None:
        """Set what health says of a service, by its full name; "" is the whole process."""
        self._health.set(service, serving)

    async def stop(self, grace_s: float) -> None:
        """Set health to NOT_SERVING, refuse new calls, give running calls `grace_s` seconds, then cancel them."""
        self._health.end()
        await self._server.stop(grace_s)


def _credentials(tls: TlsConfig, mutual: bool) -> Any:
    """Return the certificates that a server shows and trusts on each new connection. Renewed files are read again."""

    files = identity(tls)
    used = files.current()

    def configuration(found: Identity) -> Any:
        return grpc.ssl_server_certificate_configuration([(found.key or b"", found.cert or b"")], found.ca)

    def renewed() -> Any:
        """Return the certificates for the next handshake, or None if they have not changed.

        gRPC calls this before each handshake, in a thread of its own.
        """
        nonlocal used
        if (current := files.current()) is used:
            return None
        used = current
        return configuration(current)

    return grpc.dynamic_ssl_server_credentials(configuration(used), renewed, mutual)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a process. `main` gets an event that the first SIGTERM or SIGINT sets, and returns when it has drained.

    The process then exits with 0. A second signal cancels `main`. A CorunError that `main` raises is logged. In both
    cases the process exits with 1.
    """
    try:
        run_command(main)
    except CorunError as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise SystemExit(1) from error


def run_command(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run a process as `run` does, but raise a CorunError of `main`, for a command that shows errors itself.

    The loop is uvloop's: on two cores, one request's first token came 5 % sooner when nodes used it, too.
    """
    import uvloop  # noqa: PLC0415  # A bare install has none, and uses other parts of this module.

    try:
        uvloop.run(_until_stopped(main))
    except asyncio.CancelledError:
        raise SystemExit(1) from None


async def _until_stopped(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            logger.warning("%s again: stopping at once", number.name)
            task.cancel()
        else:
            logger.info("%s: draining", number.name)
            stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await task


def _without_clients_faults(record: logging.LogRecord) -> bool:
    """Return whether to keep a record of gRPC's own log.

    Bytes that are not UTF-8 in a text field, and a client that has gone before its answer, are not our errors. With a
    traceback for each of them, anyone could fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (UnicodeDecodeError, grpc.aio.BaseError)):
        return True
    logger.debug("a client's fault: %s", shown(record.getMessage()))
    return False
