"""Errors over HTTP: what turns an exception of a handler into an answer.

This module must not know what the request was.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from corun.errors import (
    CorunError,
    OverloadedError,
    Shown,
    UnauthenticatedError,
    UnavailableError,
    internal_error,
    shown,
)
from corun.gateway.clients import sent_token
from corun.gateway.errors import STATUSES, body, body_of

CLIENT_IS_GONE = 499
"""The status that proxies log when the client is gone. It is never sent."""

log = logging.getLogger(__name__)


def is_ours(record: logging.LogRecord) -> bool:
    """Return whether to keep a record of aiohttp's own log.

    Bytes that are no HTTP are answered with 400, and are not our error. With a traceback for each of them, anyone could
    fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.debug("a client's fault: %s", shown(str(error)))
    return False


def response_of(error: CorunError) -> web.Response:
    """Return the whole answer to a request that failed before any part of an answer was sent."""
    headers, status = {}, STATUSES[error.code][0]
    if isinstance(error, (OverloadedError, UnavailableError)) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body_of(error), status=status, headers=headers)


def plain_response(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Return the answer to an error of HTTP itself: a wrong path, method, size or type of content."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return web.json_response(body(status, kind, message), status=status, headers=headers)


def typed(error: Exception) -> CorunError:
    """Return the error that a client is told. An error of this project is returned as it is. Any other error is logged
    and replaced by an internal error with the id of the log line."""
    if isinstance(error, CorunError):
        return error
    return internal_error(error, "the gateway", log)


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
        is_refused = isinstance(error, UnauthenticatedError)
        return response_of(_unauthenticated(request) if is_refused else typed(error))
    return answer


def _unauthenticated(request: web.Request) -> UnauthenticatedError:
    """Return the refusal of a request's token in HTTP's words: a router's names the metadata of its gRPC call."""
    if sent_token(request.headers.get("Authorization", "")):
        return UnauthenticatedError("the token is not one of this cluster's")
    return UnauthenticatedError("send a header 'Authorization: Bearer TOKEN'")


def _asked(request: web.Request) -> str:
    return f"{request.method} {shown(Shown(request.path))}"
