"""What happens around every call that a server answers: admission, the client's patience, errors as statuses.

This module must not know any service of ours, nor how the server is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from corun.errors import (
    CorunError,
    InternalError,
    InvalidArgumentError,
    Shown,
    UnauthenticatedError,
    to_status,
    too_large_error,
)
from corun.rpc.auth import Caller, Gate
from corun.rpc.messages import has_more_fields
from corun.rpc.patience import LateClientError, Patience
from corun.rpc.pump import Pump, Source

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_FIELDS = 16_384
"""The most fields of a request at its top level, entries of lists included. The limits on the single fields add up to
less."""
_CLOSE_TIMEOUT_S = 30.0
"""The number of seconds that a handler has to release what it holds when its client is gone."""
_FAREWELL_S = 1.0
"""The number of seconds for sending an error to a client that has stopped reading or sending."""
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # Not in the stubs.

_call: ContextVar[tuple[Caller | None, str]] = ContextVar("call")
"""The caller by its token, and the peer. It holds plain values only, never the call's context: a timer or a task that a
handler leaves behind keeps this value alive. With a context, the call would live on, too, and would still count as one
of the connection's calls."""


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


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # Generic in the stubs only.
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


def _refusal(error: CorunError) -> Handler:
    """Return a handler that ends a call without reading its message. Only a method that takes a stream can do so."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guard(deserialize: Any, max_message_bytes: int) -> Callable[[bytes], Any]:
    """Return a deserializer that returns an error in place of a request that it refuses: only a call can raise it."""

    def guarded(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            return too_large_error(len(data), max_message_bytes)
        if has_more_fields(data, MAX_FIELDS):
            found = Shown(f"more than {MAX_FIELDS} fields")
            return InvalidArgumentError("message", found, f"must have at most {MAX_FIELDS}")
        try:
            return deserialize(data)
        except DecodeError:
            return InvalidArgumentError("message", Shown(f"{len(data)} bytes"), "must be valid protobuf")

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
                with contextlib.closing(Patience(self._timeout_s)) as patience:
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
                with contextlib.closing(Patience(self._timeout_s)) as patience:
                    request = await _read(context, patience)
                    with self._permit as known:
                        _call.set((known, context.peer()))
                        await self._respond(handler(request, context), context, patience)

        return respond

    async def _respond(self, responses: Any, context: Context, patience: Patience) -> None:
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


async def _read(context: Context, patience: Patience) -> Any:
    """Return the one message of a call.

    Raises InvalidArgumentError if there is none or it cannot be read, and DeadlineError if the client is late.
    """
    with patience.expecting("sent no whole request"):
        request = await context.read()
    if request is _EOF:
        raise InvalidArgumentError("message", Shown("none"), "must be sent before the call's end")
    if isinstance(request, InvalidArgumentError):
        raise request
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
    except LateClientError as error:
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
