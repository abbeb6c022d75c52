"""One gRPC server for every process: error translation, health, limits, lifecycle.

This module must not know any service of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from corun.config.fields import CLIENT_TIMEOUT_S, MAX_MESSAGE_BYTES, TlsConfig
from corun.errors import (
    CorunError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    Shown,
    UnauthenticatedError,
    UnavailableError,
    shown,
    to_status,
    too_large_error,
)
from corun.rpc.auth import Caller, Gate
from corun.rpc.certificates import Identity, identity
from corun.rpc.channel import HARD_LIMIT_FACTOR, KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_METADATA_BYTES, Options
from corun.rpc.health import HealthService
from corun.rpc.messages import has_more_fields
from corun.rpc.pump import Pump, Source

logger = logging.getLogger(__name__)

S = TypeVar("S")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_FIELDS = 16_384
"""The most fields of a request at its top level, entries of lists included. The limits on the single fields add up to
less."""
MAX_STREAMS = 1024
"""The most calls in progress on one connection. Further calls wait on the client's side."""
MAX_CONNECTIONS = 16_384
"""The most connections at once. Further ones are closed."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""The time in milliseconds for a new connection to finish TLS and HTTP/2. gRPC's default is two minutes."""

_call: ContextVar[tuple[Caller | None, str]] = ContextVar("call")
"""The caller by its token, and the peer. It holds plain values only, never the call's context: a timer or a task that a
handler leaves behind keeps this value alive. With a context, the call would live on, too, and would still count as one
of the connection's calls."""

IDLE_TIMEOUT_MS = 600_000
"""The time in milliseconds after which a connection without calls is closed. Clients make a new one when they need
it."""
MAX_CONNECTION_AGE_S = 3600.0
"""The longest life of a connection in seconds, on servers whose calls are not endless. It stops a client that answers
pings but reads nothing: gRPC has no other way to end a stream to such a client."""
SPARE_FILES = 256
"""The number of a process's file descriptors that are not for connections."""

_GRPC_LOG = "grpc._cython.cygrpc"
_CLOSE_TIMEOUT_S = 30.0
"""The number of seconds that a handler has to release what it holds when its client is gone."""
_FAREWELL_S = 1.0
"""The number of seconds for sending an error to a client that has stopped reading or sending."""


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, longest_call_s: float | None = None) -> Options:
    """Return the gRPC options of a server. They permit the pings of `channel_options`.

    longest_call_s: the longest that a call may take, in seconds; None if calls are endless.
    """
    ages: Options = [
        ("grpc.max_connection_age_ms", round(1000 * MAX_CONNECTION_AGE_S)),
        ("grpc.max_connection_age_grace_ms", round(1000 * (longest_call_s or 0))),
    ]
    return [
        *(ages if longest_call_s is not None else ()),
        ("grpc.max_receive_message_length", max_message_bytes * HARD_LIMIT_FACTOR),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # Notices clients whose machine is gone.
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.so_reuseport", 0),  # Two processes on one port must be an error.
    ]


def max_connections() -> int:
    """Return how many connections this process accepts.

    It keeps spare file descriptors: without any, it could not even refuse a connection.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, files - SPARE_FILES))


def raise_file_limit() -> None:
    """Raise this process's limit on file descriptors as far as allowed: the usual 1024 allow few connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def caller() -> Caller:
    """Return who makes the call that the current handler answers.

    The caller is named by its token, or by its host if no tokens tell callers apart. In that case each caller is an
    operator.
    """
    known, peer = _call.get()
    return known or Caller(name=peer_host(peer), is_operator=True)


def peer_host(peer: str) -> str:
    """Return the host in gRPC's name for a peer, without the port.

    For IPv6 it is the host's /64 network, since one host may use any address of it.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind  # The peer uses a socket on this machine.
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None:
        return str(getattr(address, "ipv4_mapped", address))
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def join_address(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class GrpcServer:
    """A grpc.aio server with typed errors, health, tokens and limits. Make it inside a running loop.

    Lifecycle: `add` services → `start` → `set_serving` → `stop`. Health says NOT_SERVING until `set_serving`.
    Reflection is never served.

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
                _CallInterceptor(gate or Gate(), request_limit or (lambda _: max_message_bytes), client_timeout_s)
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
        await self.set_serving("", False)
        try:
            self._port = self._bind()
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self.address}: is the port in use?") from error
        await self._server.start()

    def _bind(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(self.address)
        renewed = _Certificates(self._tls)
        credentials = grpc.dynamic_ssl_server_credentials(renewed.first, renewed.next, self._mutual)
        return self._server.add_secure_port(self.address, credentials)

    async def set_serving(self, service: str, serving: bool) -> None:
        """Set what health says of a service, by its full name; "" is the whole process."""
        self._health.set(service, serving)

    async def stop(self, grace_s: float) -> None:
        """Set health to NOT_SERVING, refuse new calls, give running calls `grace_s` seconds, then cancel them."""
        self._health.end()
        await self._server.stop(grace_s)


class _Certificates:
    """The certificates that a server shows and trusts on each new connection. Renewed files are read again."""

    def __init__(self, tls: TlsConfig) -> None:
        self._identity = identity(tls)
        self._used = self._identity.current()
        self.first = _configuration(self._used)

    def next(self) -> Any:
        """Return the certificates for the next handshake, or None if they have not changed.

        gRPC calls this before each handshake, in a thread of its own.
        """
        current = self._identity.current()
        if current is self._used:
            return None
        self._used = current
        return _configuration(current)


def _configuration(found: Identity) -> Any:
    return grpc.ssl_server_certificate_configuration([(found.key or b"", found.cert or b"")], found.ca)


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
    """Run a process as `run` does, but raise a CorunError of `main`, for a command that shows errors itself."""
    try:
        asyncio.run(_until_stopped(main))
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


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for a request that could not be read, until there is a context in which to refuse it."""

    error: InvalidArgumentError


class _CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # Generic in the stubs only.
    """The one place where calls are admitted and exceptions become statuses."""

    def __init__(self, gate: Gate, request_limit: Callable[[str], int], client_timeout_s: float) -> None:
        self._gate = gate
        self._request_limit = request_limit
        self._client_timeout_s = client_timeout_s

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if not handler:
            return handler  # There is no such method; gRPC answers that by itself.
        try:
            permit = self._gate.admit(details.method, details.invocation_metadata)
        except UnauthenticatedError as error:
            return _refusal(error)
        if handler.request_streaming:
            return handler  # No service of ours takes a stream.
        deserialize = _guard(handler.request_deserializer, self._request_limit(details.method))
        call = _Calls(details.method, permit, self._client_timeout_s)
        # All our methods look like methods that take a stream to gRPC. For a unary method, gRPC would wait for ever for
        # the message, and would not answer a call that ends without one.
        if handler.response_streaming:
            respond = call.streaming(handler.unary_stream)
            serialize = _unless_bytes(handler.response_serializer)
            return grpc.stream_stream_rpc_method_handler(respond, deserialize, serialize)
        answer = call.unary(handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(answer, deserialize, handler.response_serializer)


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


def _refusal(error: CorunError) -> Handler:
    """Return a handler that ends a call without reading its message. Only a method that takes a stream can do so."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guard(deserialize: Any, max_message_bytes: int) -> Callable[[bytes], Any]:
    def guarded(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            return _Refused(too_large_error(len(data), max_message_bytes))
        if has_more_fields(data, MAX_FIELDS):
            found = Shown(f"more than {MAX_FIELDS} fields")
            return _Refused(InvalidArgumentError("message", found, f"must have at most {MAX_FIELDS}"))
        try:
            return deserialize(data)
        except DecodeError:
            return _Refused(InvalidArgumentError("message", Shown(f"{len(data)} bytes"), "must be valid protobuf"))

    return guarded


def _unless_bytes(serialize: Any) -> Callable[[Any], bytes]:
    """Return a serializer that passes bytes on as they are, so that a handler may encode its many messages itself."""
    return lambda message: message if type(message) is bytes else serialize(message)


class _Calls:
    """How one call of a method runs."""

    def __init__(self, method: str, permit: AbstractContextManager[Caller | None], client_timeout_s: float) -> None:
        self._method = method
        self._permit = permit
        self._timeout_s = client_timeout_s

    def unary(self, handler: Any) -> Any:
        async def answer(_: Any, context: Context) -> Any:
            async with _translated(context, self._method):
                with _Patience(self._timeout_s) as patience:
                    request = await _read(context, patience)
                with self._permit as known:
                    _call.set((known, context.peer()))
                    return await handler(request, context)

        return answer

    def streaming(self, handler: Any) -> Any:
        # A coroutine that writes is used here, not a generator that yields. So this code notices when the client goes
        # away, and closes the handler's generator, with all that it holds, before the call ends.
        async def respond(_: Any, context: Context) -> None:
            async with _translated(context, self._method):
                with _Patience(self._timeout_s) as patience:
                    request = await _read(context, patience)
                    with self._permit as known:
                        _call.set((known, context.peer()))
                        await self._respond(handler(request, context), context, patience)

        return respond

    async def _respond(self, responses: Any, context: Context, patience: _Patience) -> None:
        if not isinstance(responses, AsyncGenerator):
            await responses  # The handler writes by itself.
            return
        has_begun = False
        taking = patience.expecting("took no message")
        try:
            async for response in responses:
                if not has_begun:
                    # Send the header by itself. If it went with a message that gets stuck, it would count as not sent,
                    # and no error could be sent after it.
                    await _sent(context.send_initial_metadata(()))
                    has_begun = True
                with taking:
                    if isinstance(response, Source):
                        await Pump(response, context, taking).run()
                    else:
                        await _sent(context.write(response))
        finally:
            await _close(responses, self._method)


class _Expecting:
    """Marks the waits for a client, one after the other.

    It is a class and not a generator function for speed, since it is entered for every message.
    """

    __slots__ = ("_late", "_patience", "_time")

    def __init__(self, patience: _Patience, late: str) -> None:
        self._patience = patience
        self._late = late
        self._time = asyncio.get_running_loop().time

    def begin(self) -> None:
        self._patience.since = self._time()

    def end(self) -> None:
        self._patience.since = None

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.end()
        if kind is asyncio.CancelledError and self._patience.is_over:
            raise _LateClientError(self._late) from None


class _Patience:
    """Ends waits for a client that take longer than `timeout_s`.

    All waits of a call share one timer, since there are as many waits as messages. Make it, enter it and wait in the
    call's own task.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self.since: float | None = None
        """When the wait in progress began, on the loop's clock. None: the call does not wait for its client."""
        self.is_over = False
        """Whether a wait took too long, and the call's task was cancelled for it."""

    def __enter__(self) -> _Patience:
        self._timer = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def expecting(self, failed: str) -> _Expecting:
        """Return a context within which the call waits for the client.

        The context raises DeadlineError if the client is late. The error says what the client did not do (`failed`).
        """
        return _Expecting(self, f"the client {failed} for {self._timeout_s:g} s")

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self.since is None else self.since
        if now < since + self._timeout_s:
            self._timer = self._loop.call_at(since + self._timeout_s, self._look)
            return
        self.is_over = True
        assert self._task is not None  # This object was made in a task.
        self._task.cancel()  # While `since` is set, the task waits in `expecting` and nowhere else.


_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # Not in the stubs.


class _LateClientError(DeadlineError):
    """A client sends nothing, or takes no message, so it may not take this error either."""


async def _read(context: Context, patience: _Patience) -> Any:
    """Return the one message of a call.

    Raises InvalidArgumentError if there is none or it cannot be read, and DeadlineError if the client is late.
    """
    with patience.expecting("sent no whole request"):
        request = await context.read()
    if request is _EOF:
        raise InvalidArgumentError("message", Shown("none"), "must be sent before the call's end")
    if isinstance(request, _Refused):
        raise request.error
    return request


async def _sent(sending: Awaitable[None]) -> None:
    try:
        await sending
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error  # The client is gone; gRPC's cancellation may still be on its way.


async def _close(responses: AsyncGenerator[Any, Any], method: str) -> None:
    """Close a handler and wait for it. A cancellation in the meantime must not cut short its release of resources."""
    closing = asyncio.ensure_future(responses.aclose())
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    cancelled = False
    while not closing.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait({closing}, timeout=deadline - time.monotonic())
        except asyncio.CancelledError:
            cancelled = True
    if not closing.done():
        logger.error("%s: the handler did not close within %g s", method, _CLOSE_TIMEOUT_S)
        closing.cancel()
    elif not closing.cancelled():
        closing.result()  # Raises what the handler raised.
    if cancelled:
        raise asyncio.CancelledError


@contextlib.asynccontextmanager
async def _translated(context: Context, method: str) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise  # The handler ended the call by itself.
    except _LateClientError as error:
        await _abort_late(context, method, error)
    except CorunError as error:
        await _abort(context, error)
    except Exception as error:
        if context.cancelled():
            logger.debug("%s: the client was gone", method, exc_info=error)
            raise asyncio.CancelledError from error
        error_id = secrets.token_hex(4)
        logger.exception("internal error %s in %s", error_id, method)
        await _abort(context, InternalError(f"internal error, id {error_id}"))


async def _abort(context: Context, error: CorunError) -> None:
    if context.cancelled():
        raise asyncio.CancelledError from error  # The client is gone, so there is nobody to tell.
    status = rpc_status.to_status(to_status(error))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from error  # The client went away at this moment.


async def _abort_late(context: Context, method: str, error: CorunError) -> None:
    """End a call whose client may be unreachable. What the call holds is released whether or not it gets the error."""
    logger.warning("%s: %s", method, error)
    try:
        await asyncio.wait_for(_abort(context, error), _FAREWELL_S)
    except asyncio.TimeoutError:
        # The error waits in gRPC until the client reads, or its connection ends.
        raise asyncio.CancelledError from error
