"""One gRPC server for every process: error translation, health, limits, lifecycle.

This module must not know any service of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_status import rpc_status

from corun.auth import Gate
from corun.channel import HARD_LIMIT_FACTOR, KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_METADATA_BYTES, Options
from corun.config import MAX_MESSAGE_BYTES, TlsConfig
from corun.errors import (
    CorunError,
    InternalError,
    InvalidArgumentError,
    Shown,
    UnauthenticatedError,
    UnavailableError,
    to_status,
    too_large_error,
)
from corun.renewal import Identity, identity

logger = logging.getLogger(__name__)

S = TypeVar("S")
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_STREAMS = 1024
"""Calls in progress on one connection; a client's further ones wait on its side."""
MAX_CONNECTIONS = 16_384
"""Connections at once; further ones are closed."""
HANDSHAKE_TIMEOUT_MS = 10_000
"""For a new connection to finish TLS and HTTP/2; gRPC's own limit is two minutes."""

_CLOSE_TIMEOUT_S = 30.0
"""For a handler to release what it holds, when its client is gone."""


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a server; they permit the pings of `channel_options`."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes * HARD_LIMIT_FACTOR),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # A client whose machine is gone frees what it holds.
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
        ("grpc.so_reuseport", 0),  # Two processes on one port must be an error, not a lottery.
    ]


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class GrpcServer:
    """A grpc.aio server with typed errors, health, tokens and limits. Make it inside a running loop.

    Lifecycle: `add` services → `start` → `set_serving` → `stop`. Health says NOT_SERVING until told otherwise.
    tls: with it, and `mutual`, clients must show a certificate that its authorities signed. gate: who may call what;
    None: anyone, anything. Reflection is never served.
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
    ) -> None:
        self.host = host
        self._port = port
        self._tls = tls
        self._mutual = mutual
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[_CallInterceptor(gate or Gate(), max_message_bytes)],
            options=server_options(max_message_bytes),
        )
        self.add(health_pb2_grpc.add_HealthServicer_to_server, self._health)

    @property
    def port(self) -> int:
        """The port asked for; after `start`, the one in use."""
        return self._port

    @property
    def address(self) -> str:
        """host:port."""
        return join_address(self.host, self._port)

    def add(self, register: Callable[[S, Any], None], servicer: S) -> None:
        """Adds a service: `register` is the generated `add_XServicer_to_server`."""
        register(servicer, self._server)

    async def start(self) -> None:
        """Listens. Raises UnavailableError if the address cannot be had, InvalidArgumentError for bad certificates."""
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
        """What health says of a service, by its full name; "" is the whole process."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(service, statuses.SERVING if serving else statuses.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Turns health off, refuses new calls, gives running ones `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _Certificates:
    """What a server shows, and whom it trusts, for each new connection: files that were renewed are read again."""

    def __init__(self, tls: TlsConfig) -> None:
        self._identity = identity(tls)
        self._used = self._identity.current()
        self.first = _configuration(self._used)

    def next(self) -> Any:
        """Called by gRPC, in a thread of its own, before each handshake; None: as for the last one."""
        current = self._identity.current()
        if current is self._used:
            return None
        self._used = current
        return _configuration(current)


def _configuration(found: Identity) -> Any:
    return grpc.ssl_server_certificate_configuration([(found.key or b"", found.cert or b"")], found.ca)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Runs a process: `main` gets an event that the first SIGTERM or SIGINT sets, and returns when it has drained.

    The process then ends with 0. A second signal cancels `main`, and a CorunError out of it is logged: both end with 1.
    """
    try:
        asyncio.run(_until_stopped(main))
    except asyncio.CancelledError:
        raise SystemExit(1) from None
    except CorunError as error:
        logger.error("%s: %s", type(error).__name__, error)
        raise SystemExit(1) from error


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
    """Stands in for a request that could not be read, until there is a context to refuse it in."""

    error: InvalidArgumentError


class _CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # Generic in the stubs only.
    """The one place where calls are admitted and exceptions become statuses."""

    def __init__(self, gate: Gate, max_message_bytes: int) -> None:
        self._gate = gate
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if not handler:
            return handler  # None: no such method, which gRPC answers.
        try:
            permit = self._gate.admit(details.method, details.invocation_metadata)
        except UnauthenticatedError as error:
            return _refusal(error)
        if handler.request_streaming:
            return handler  # No service of ours takes a stream.
        deserialize = _guard(handler.request_deserializer, self._max_message_bytes)
        if handler.response_streaming:
            respond = _stream(handler.unary_stream, details.method, permit)
            return grpc.unary_stream_rpc_method_handler(respond, deserialize, handler.response_serializer)
        answer = _unary(handler.unary_unary, details.method, permit)
        return grpc.unary_unary_rpc_method_handler(answer, deserialize, handler.response_serializer)


def _refusal(error: CorunError) -> Handler:
    """Ends a call without reading its message, which only a method that takes a stream can."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guard(deserialize: Any, max_message_bytes: int) -> Callable[[bytes], Any]:
    def guarded(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            return _Refused(too_large_error(len(data), max_message_bytes))
        try:
            return deserialize(data)
        except DecodeError:
            return _Refused(InvalidArgumentError("message", Shown(f"{len(data)} bytes"), "must be valid protobuf"))

    return guarded


def _unary(handler: Any, method: str, permit: AbstractContextManager[None]) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        async with _translated(context, method):
            _check_read(request)
            with permit:
                return await handler(request, context)

    return answer


def _stream(handler: Any, method: str, permit: AbstractContextManager[None]) -> Any:
    # Writing from a coroutine, not yielding from a generator: when the client goes away, that is noticed in here, and
    # the generator is closed, with all it holds, before the call ends.
    async def respond(request: Any, context: Context) -> None:
        async with _translated(context, method):
            _check_read(request)
            with permit:
                await _respond(handler(request, context), context, method)

    return respond


async def _respond(responses: Any, context: Context, method: str) -> None:
    if not isinstance(responses, AsyncGenerator):
        await responses  # The handler writes by itself.
        return
    try:
        async for response in responses:
            await _write(context, response)
    finally:
        await _close(responses, method)


async def _write(context: Context, response: Any) -> None:
    try:
        await context.write(response)
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError from error  # The client is gone; gRPC's own cancellation may be yet to come.


async def _close(responses: AsyncGenerator[Any, Any], method: str) -> None:
    """Closes a handler to its end: a cancellation meanwhile must not cut short the release of what it holds."""
    closing = asyncio.ensure_future(responses.aclose())
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    cancelled = False
    while not closing.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait({closing}, timeout=deadline - time.monotonic())
        except asyncio.CancelledError:  # Not a loop over items.
            cancelled = True
    if not closing.done():
        logger.error("%s: the handler did not close within %g s", method, _CLOSE_TIMEOUT_S)
        closing.cancel()
    elif not closing.cancelled():
        closing.result()  # Raises what the handler raised.
    if cancelled:
        raise asyncio.CancelledError


def _check_read(request: Any) -> None:
    if isinstance(request, _Refused):
        raise request.error


@contextlib.asynccontextmanager
async def _translated(context: Context, method: str) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise  # A handler that ended the call by itself.
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
        raise asyncio.CancelledError from error  # Nobody is there to be told.
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
