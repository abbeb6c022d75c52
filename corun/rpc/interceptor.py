"""What happens around every call that a server answers: admission, the client's patience, errors as statuses.

This module must not know any service of ours, nor how the server is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from corun.errors import (
    CorunError,
    InvalidArgumentError,
    Shown,
    UnauthenticatedError,
    internal_error,
    to_status,
    too_large_error,
)
from corun.rpc.auth import Caller, Gate
from corun.rpc.pump import LateClientError, Patience, Pump, Source

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MAX_FIELDS = 16_384
"""The most fields of a request and of messages in it, entries of lists included, but not the fields of such entries.
The limits on the single fields add up to less."""
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


@functools.lru_cache(maxsize=1024)  # One connection has many calls, all with the same name.
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
        deserialize = _guard(handler.request_deserializer, self._request_limit(details.method))
        respond = self._responder(handler, details.method, permit)
        # All our methods look like methods that take a stream to gRPC. For a unary method, gRPC would wait for ever for
        # the message, and would not answer a call that ends without one.
        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(respond, deserialize, handler.response_serializer)
        serialize: Any = handler.response_serializer
        # A handler may encode its many messages itself.
        return grpc.stream_stream_rpc_method_handler(
            respond, deserialize, lambda m: m if type(m) is bytes else serialize(m)
        )

    def _responder(self, handler: Any, method: str, permit: AbstractContextManager[Caller | None]) -> Any:
        """Return the coroutine function that runs one call of a method.

        For a stream it writes the messages itself, and is no generator that yields them. So it notices when the client
        goes away, and closes the handler's generator, with all that it holds, before the call ends.
        """

        async def respond(_: Any, context: Context) -> Any:
            async with _translated(context, method):
                patience = Patience(self._client_timeout_s)
                is_one = not handler.request_streaming
                request = await _read(context, patience) if is_one else None
                if request is _EOF:
                    raise InvalidArgumentError("message", Shown("none"), "must be sent before the call's end")
                with permit as known:
                    _call.set((known, context.peer()))
                    if not handler.response_streaming:
                        return await handler.unary_unary(request, context)
                    if is_one:
                        responses = handler.unary_stream(request, context)
                    else:
                        responses = handler.stream_stream(_requests(context, patience), context)
                    return await _write(responses, context, patience, method)

        return respond


def _refusal(error: CorunError) -> Handler:
    """Return a handler that ends a call without reading its message. Only a method that takes a stream can do so."""

    async def refuse(_: Any, context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _guard(deserialize: Any, max_message_bytes: int) -> Callable[[bytes], Any]:
    """Return a deserializer that returns an error in place of a request that it refuses: only a call can raise it."""
    kind = deserialize(b"").DESCRIPTOR

    def guarded(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            return too_large_error(len(data), max_message_bytes)
        if has_more_fields(data, MAX_FIELDS, kind):
            found = Shown(f"more than {MAX_FIELDS} fields")
            return InvalidArgumentError("message", found, f"must have at most {MAX_FIELDS}")
        try:
            return deserialize(data)
        except DecodeError:
            return InvalidArgumentError("message", Shown(f"{len(data)} bytes"), "must be valid protobuf")

    return guarded


def has_more_fields(data: bytes, most: int, kind: Descriptor) -> bool:
    """Return whether a message of this kind has more than `most` fields, before it is parsed.

    The fields of messages in it count, too, but not those of a list's entries. An empty entry of a list takes two bytes
    on the wire, but up to 130 bytes of memory once it is parsed. The two ends of a group count as fields, and so do the
    fields in it. The time of this check is bounded by `most`. For bytes that are no message the answer may be anything,
    since the parser refuses them.
    """
    return len(data) > 2 * most and _fields_left(memoryview(data), most, kind) < 0


def _fields_left(data: memoryview, left: int, kind: Descriptor) -> int:
    """Return `left` less the number of fields of a message; below 0 if it has more."""
    at, end = 0, len(data)
    try:
        while at < end and left >= 0:
            left -= 1
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == 0:
                _, at = _varint(data, at)
            elif wire == 2:
                size, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None and not field.is_repeated:
                    left = _fields_left(data[at : at + size], left, field.message_type)
                at += size
            else:
                at += {1: 8, 5: 4}.get(wire, 0)
    except IndexError:  # The message ends in the middle of a field, or is none.
        pass
    return left


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends. Raises IndexError if it has no end, or more than ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("the parser refuses a longer number, so this check must not read it to its end")


async def _read(context: Context, patience: Patience) -> Any:
    """Return the client's next message, or `_EOF` after its last one. Raises InvalidArgumentError if it is refused."""
    with patience.expecting("sent no whole request"):
        request = await context.read()
    if isinstance(request, InvalidArgumentError):
        raise request
    return request


async def _requests(context: Context, patience: Patience) -> AsyncIterator[Any]:
    """Yield the messages of a client that sends several. It may take as long for each as for the only one of a call."""
    while (request := await _read(context, patience)) is not _EOF:
        yield request


async def _write(responses: Any, context: Context, patience: Patience, method: str) -> None:
    """Write what a handler yields, and close the handler if it does not come to its end."""
    if not isinstance(responses, AsyncGenerator):
        await responses  # The handler writes by itself.
        return
    has_begun = False
    try:
        async for response in responses:
            if not has_begun:
                # Send the header by itself. If it went with a message that gets stuck, it would count as not sent, and
                # no error could be sent after it.
                await _sent(context.send_initial_metadata(()))
                has_begun = True
            with patience.expecting("took no message"):
                if isinstance(response, Source):
                    await Pump(response, context, patience).run()
                else:
                    await _sent(context.write(response))
    except BaseException:  # Otherwise the handler has ended by itself, and holds nothing.
        await _close(responses, method)
        raise


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
        logger.warning("%s: %s", method, error)
        try:
            await asyncio.wait_for(_abort(context, error), _FAREWELL_S)
        except asyncio.TimeoutError:
            # The error waits in gRPC until the client reads, or its connection ends. What the call holds is released.
            raise asyncio.CancelledError from error
    except CorunError as error:
        await _abort(context, error)
    except Exception as error:
        if context.cancelled():
            logger.debug("%s: the client was gone", method, exc_info=error)
            raise asyncio.CancelledError from error
        await _abort(context, internal_error(error, method, logger))


async def _abort(context: Context, error: CorunError) -> None:
    if context.cancelled():
        raise asyncio.CancelledError from error  # The client is gone, so there is nobody to tell.
    status = rpc_status.to_status(to_status(error))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        # Both are kept as long as the call. With where they came from, they would keep the call: a cycle, which only a
        # garbage collection ends. gRPC handles the first one until it waits.
        asyncio.get_running_loop().call_soon(_forget_origins, aborted, error)
        raise
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from error  # The client went away at this moment.


def _forget_origins(*errors: BaseException) -> None:
    for error in errors:
        error.__traceback__ = error.__context__ = error.__cause__ = None
