"""Errors over HTTP: the one table from this project's errors to statuses, and OpenAI's JSON for them.

This module must not know what the request was.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from aiohttp import web

from corun.errors import (
    CorunError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    PermissionDeniedError,
    Shown,
    UnavailableError,
    shown,
)

STATUSES: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "contract_mismatch_error"),
    grpc.StatusCode.ABORTED: (409, "conflict_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.INTERNAL: (500, "server_error"),
    grpc.StatusCode.DATA_LOSS: (500, "data_loss_error"),
    grpc.StatusCode.CANCELLED: (503, "service_unavailable_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""The HTTP status and the `error.type` of each kind of error."""

CLIENT_IS_GONE = 499
"""The status that proxies log when the client is gone. It is never sent."""
SAMPLING = "sampling_params."
"""The prefix of field names in the routers' errors. It is removed, since in HTTP these fields are at the top level."""

log = logging.getLogger(__name__)


def body_of(error: CorunError) -> dict[str, Any]:
    """Return OpenAI's error object, with field, value and limit if the error is about a field."""
    status, kind = STATUSES[error.code]
    body = _body(status, kind, str(error).replace(SAMPLING, ""))
    if isinstance(error, (InvalidArgumentError, PermissionDeniedError)):
        field = error.field.removeprefix(SAMPLING)
        body["error"] |= {"param": field, "value": shown(error.value), "limit": error.limit}
    return body


@contextmanager
def naming(field: str, name: str, *, whole: bool = False) -> Iterator[None]:
    """Name a field in errors as the client knows it, with what is below it unless the client knows it as a `whole`."""
    try:
        yield
    except InvalidArgumentError as error:
        if not error.field.startswith(field):
            raise
        below = "" if whole else error.field.removeprefix(field)
        raise InvalidArgumentError(name + below, error.value, error.limit) from error


def response_of(error: CorunError) -> web.Response:
    """Return the whole answer to a request that failed before any part of an answer was sent."""
    headers, status = {}, STATUSES[error.code][0]
    if isinstance(error, (OverloadedError, UnavailableError)) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body_of(error), status=status, headers=headers)


def event_of(error: CorunError) -> str:
    """Return an error as an event, for a stream that has begun."""
    return f"data: {json.dumps(body_of(error))}\n\n"


def plain_response(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return the answer to an error of HTTP itself: a wrong path, method, size or type of content."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return web.json_response(_body(status, kind, message), status=status, headers=headers)


def _body(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def typed(error: Exception) -> CorunError:
    """Return the error that a client is told. An error of this project is returned as it is. Any other error is logged
    and replaced by an internal error with the id of the log line."""
    if isinstance(error, CorunError):
        return error
    error_id = secrets.token_hex(4)
    log.error("internal error %s", error_id, exc_info=error)
    return InternalError(f"internal error, id {error_id}")


@web.middleware
async def translated(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn every exception of a handler into an answer. This is the only place that does so."""
    try:
        answer: web.StreamResponse = await handler(request)
    except web.HTTPNotFound:
        paths = sorted({resource.canonical for resource in request.app.router.resources()})
        return plain_response(404, f"{_asked(request)}: there is no such path here, but {', '.join(paths)}")
    except web.HTTPMethodNotAllowed as error:
        allow = error.headers["Allow"]
        return plain_response(405, f"{_asked(request)}: this path takes {allow}", {"Allow": allow})
    except web.HTTPException as error:
        return plain_response(error.status, error.text or error.reason)
    except ConnectionError:  # The client's connection: nobody would read an answer.
        return web.Response(status=CLIENT_IS_GONE)
    except Exception as error:
        return response_of(typed(error))
    return answer


def _asked(request: web.Request) -> str:
    return f"{request.method} {shown(Shown(request.path))}"
