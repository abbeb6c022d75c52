"""Errors in OpenAI's shape: the one table from this project's errors to HTTP statuses, and the JSON for them.

This module must not know what the request was, nor how an answer is sent: `corun batch` writes these errors to a file.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import grpc

from corun.errors import (
    MAX_SHOWN_VALUE,
    CorunError,
    InvalidArgumentError,
    PermissionDeniedError,
    Shown,
    clip,
    renaming,
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

MAX_FIELD, MAX_LIMIT = 128, 1000
"""The most characters of a field's name and of its limit in an error. Both may be of the client's making, as long as
its request."""
SAMPLING = "sampling_params."
"""The prefix of field names in the routers' errors. It is removed, since in HTTP these fields are at the top level."""


def body_of(error: CorunError) -> dict[str, Any]:
    """Return OpenAI's error object, with field, value and limit if the error is about a field."""
    status, kind = STATUSES[error.code]
    if not isinstance(error, (InvalidArgumentError, PermissionDeniedError)):
        return body(status, kind, str(error).replace(SAMPLING, ""))
    field, value = clip(error.field.removeprefix(SAMPLING), MAX_FIELD), _as_json(error.value)
    limit = clip(error.limit, MAX_LIMIT)
    found = body(status, kind, f"{field} = {value}: {limit}".replace(SAMPLING, ""))
    found["error"] |= {"param": field, "value": value, "limit": limit}
    return found


def _as_json(value: object) -> str:
    """Return a value as `shown` does, but in JSON, as the client wrote it. No more is written than is shown."""
    if isinstance(value, Shown):
        return shown(value)
    pieces = json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value)
    return shown(Shown("".join(islice(pieces, MAX_SHOWN_VALUE + 1))))


def event_of(error: CorunError) -> str:
    """Return an error as an event, for a stream that has begun."""
    return f"data: {json.dumps(body_of(error))}\n\n"


def body(status: int, kind: str, message: str) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def naming(field: str, name: str, *, whole: bool = False) -> AbstractContextManager[None]:
    """Name a field in errors as the client knows it, with what is below it unless the client knows it as a `whole`."""

    def known(found: str) -> str:
        if not found.startswith(field):
            return found
        return name if whole else name + found.removeprefix(field)

    return renaming(known)
