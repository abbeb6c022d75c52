"""The error tree of the whole project and its one translation to and from gRPC statuses.

    CorunError
     ├ InvalidArgumentError    INVALID_ARGUMENT      google.rpc.BadRequest: field, value and limit
     ├ OverloadedError         RESOURCE_EXHAUSTED    google.rpc.RetryInfo: when to come back
     ├ UnavailableError        UNAVAILABLE           google.rpc.RetryInfo, if coming back helps
     ├ DeadlineError           DEADLINE_EXCEEDED
     ├ CancelledByPeerError    CANCELLED
     ├ ContractMismatchError   FAILED_PRECONDITION   google.rpc.PreconditionFailure: the differing fields
     ├ StaleGenerationError    ABORTED               google.rpc.ErrorInfo: node, expected and actual generation
     ├ NotFoundError           NOT_FOUND
     ├ UnauthenticatedError    UNAUTHENTICATED
     ├ PermissionDeniedError   PERMISSION_DENIED     google.rpc.BadRequest: field, value and limit
     ├ DataLossError           DATA_LOSS
     └ InternalError           INTERNAL              never carries internals

Each class says which details its status carries, and reads them again; `to_status` and `from_rpc_error` are the only
places that translate. The exit code of an interrupted command is here, too, because all packages with commands import
this module. It must not know any service.
"""

from __future__ import annotations

import json
import logging
import re
import reprlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

INTERRUPTED = 130
"""The exit code of a command that a signal ended before it was done."""
MAX_SHOWN_VALUE = 64
"""The most characters of a value that an error shows."""
DEFAULT_RETRY_S = 1.0
"""The retry delay, in seconds, when an overloaded peer names none."""

# A status travels in HTTP/2 trailers. A peer accepts 8 KiB of them by default; beyond that the error itself is lost.
_MAX_MESSAGE_BYTES = 1000
_MAX_DIFFERENCES_BYTES = 3500
_MAX_SHOWN_DIFFERENCE = 40

_DOMAIN = "corun.v1"
_DETAILS_KEY = "grpc-status-details-bin"
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")


class Shown(str):
    """Text that an error shows as it is, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


Details = Sequence[any_pb2.Any]
"""The google.rpc details of a status."""


_BY_CODE: dict[grpc.StatusCode, type[CorunError]] = {}


class CorunError(Exception):
    """The base of every error that this project raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls):  # A class without a code of its own travels as what it is derived from.
            _BY_CODE.setdefault(cls.code, cls)  # Classes of other packages do not read our peers' errors.

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def _pack(self) -> list[Message]:
        """Return the details of this error's status."""
        return []

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        """Return the error of a status with this class's code."""
        return cls(text)


class _RefusedValueError(CorunError):
    """What both errors about one value have in common."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} = {shown(value)}: {limit}")
        self.args = (field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def _pack(self) -> list[Message]:
        value = shown(self.value)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=clip(self.field, 128), description=clip(f"{value}: {self.limit}", 256)
        )
        info = _info(self.code.name, value=value, limit=clip(self.limit, 256))
        return [error_details_pb2.BadRequest(field_violations=[violation]), info]

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        request, info = _find(error_details_pb2.BadRequest(), details), _metadata(details)
        if not request.field_violations:
            return cls("request", Shown("refused"), text)
        violation = request.field_violations[0]
        limit = info.get("limit", violation.description)
        return cls(violation.field, Shown(info.get("value", "refused")), limit)


class InvalidArgumentError(_RefusedValueError):
    """A value is outside its limit. The same request would fail again.

    Nothing was started or reserved, unless only the model could find the value unfit.
    """

    code = grpc.StatusCode.INVALID_ARGUMENT


class PermissionDeniedError(_RefusedValueError):
    """This caller may not use a value that other callers may use. Nothing was started or reserved."""

    code = grpc.StatusCode.PERMISSION_DENIED


class _RetryableError(CorunError):
    """What both errors that may say when to come back have in common."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s

    def _pack(self) -> list[Message]:
        if self.retry_after_s is None:
            return []
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(self.retry_after_s * 1e9)))
        return [retry]

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        retry = _find(error_details_pb2.RetryInfo(), details)
        if not retry.HasField("retry_delay"):
            return cls(text)
        return cls(text, retry.retry_delay.ToNanoseconds() / 1e9)


class UnavailableError(_RetryableError):
    """Something that the call needs is not there; the message says what.

    `retry_after_s` is the number of seconds after which another try will help; None if it will not.
    """

    code = grpc.StatusCode.UNAVAILABLE


class OverloadedError(_RetryableError):
    """There is no room now. Try again after `retry_after_s` seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_s: float

    def __init__(self, message: str, retry_after_s: float = DEFAULT_RETRY_S) -> None:
        super().__init__(message, retry_after_s)

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        if not details and (too_large := _TOO_LARGE.search(text)):  # gRPC refused it before our code saw it.
            return too_large_error(int(too_large[1]), int(too_large[2]))
        return super()._unpack(text, details)


class DeadlineError(CorunError):
    """The call did not finish before its deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledByPeerError(CorunError):
    """The other side ended the call."""

    code = grpc.StatusCode.CANCELLED


class ContractMismatchError(CorunError):
    """Two contracts differ, so their outputs may differ. `differences` maps a dotted field to its two values."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str, differences: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(message)
        self.args = (message, dict(differences))
        self.differences = dict(differences)

    def __str__(self) -> str:
        if not self.differences:
            return self.message
        pairs = (f"{field}: {clip(a)} != {clip(b)}" for field, (a, b) in sorted(self.differences.items()))
        return f"{self.message}: " + "; ".join(pairs)

    def _pack(self) -> list[Message]:
        failure = error_details_pb2.PreconditionFailure()
        for field, pair in sorted(self.differences.items()):
            # The values travel as JSON, so that any text in them comes back unchanged.
            values = json.dumps([clip(value, _MAX_SHOWN_DIFFERENCE) for value in pair], ensure_ascii=False)
            failure.violations.add(type="CONTRACT", subject=clip(field, 128), description=values)
            if failure.ByteSize() > _MAX_DIFFERENCES_BYTES:
                del failure.violations[-1]
                break
        return [failure]

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        differences: dict[str, tuple[str, str]] = {}
        for violation in _find(error_details_pb2.PreconditionFailure(), details).violations:
            try:
                a, b = json.loads(violation.description)
            except (TypeError, ValueError, RecursionError):
                a, b = violation.description, ""  # Another implementation wrote this text.
            differences[violation.subject] = str(a), str(b)
        return cls(text, differences)


class StaleGenerationError(CorunError):
    """A node process was replaced. Whatever the caller holds of the old process is no longer valid."""

    code = grpc.StatusCode.ABORTED

    def __init__(self, node_id: str, expected: str, actual: str) -> None:
        super().__init__(f"node {node_id} is generation {actual}, not {expected}")
        self.args = (node_id, expected, actual)
        self.node_id = node_id
        self.expected = expected
        self.actual = actual

    def _pack(self) -> list[Message]:
        values = {"node_id": self.node_id, "expected": self.expected, "actual": self.actual}
        return [_info("STALE_GENERATION", **{name: clip(value, 128) for name, value in values.items()})]

    @classmethod
    def _unpack(cls, text: str, details: Details) -> CorunError:
        info = _metadata(details)
        if not {"node_id", "expected", "actual"} <= set(info):
            return InternalError(f"the peer answered ABORTED: {text}")
        return cls(info["node_id"], info["expected"], info["actual"])


class NotFoundError(CorunError):
    """The named thing does not exist here."""

    code = grpc.StatusCode.NOT_FOUND


class UnauthenticatedError(CorunError):
    """The caller did not show the token that this call needs."""

    code = grpc.StatusCode.UNAUTHENTICATED


class DataLossError(CorunError):
    """Bits differ although the contract says that they are equal."""

    code = grpc.StatusCode.DATA_LOSS


class InternalError(CorunError):
    """There is a bug on the other side. The message has an id to look up in that side's log, and nothing else.

    An answer that cannot be read is this error, too: the other side may be of a later version.
    """

    code = grpc.StatusCode.INTERNAL


def internal_error(error: Exception, where: str, log: logging.Logger) -> InternalError:
    """Log an error that nobody foresaw, and return the one that a client is told: all it has is the id of that line."""
    error_id = secrets.token_hex(4)
    log.error("internal error %s in %s", error_id, where, exc_info=error)
    return InternalError(f"internal error, id {error_id}")


@contextmanager
def renaming(name: Callable[[str], str]) -> Iterator[None]:
    """Raise an InvalidArgumentError again under the name that the caller knows its field by. `name` returns it."""
    try:
        yield
    except InvalidArgumentError as error:
        raise InvalidArgumentError(name(error.field), error.value, error.limit) from error


def kind_of(error: CorunError) -> str:
    """Return the name of an error's class in snake case, without "Error": "overloaded" for an OverloadedError."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).lower()


def shown(value: object) -> str:
    """Return `value` as errors show it: its repr, abbreviated to 64 characters."""
    if isinstance(value, Shown):
        return clip(str(value))
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long integers.
    return clip(_repr.repr(value))


def to_status(error: CorunError) -> status_pb2.Status:
    """Return the rich status of `error`, for `grpc_status.rpc_status.to_status`."""
    status = status_pb2.Status(code=error.code.value[0], message=_message(error))
    for detail in error._pack():
        status.details.add().Pack(detail)
    return status


def from_rpc_error(error: grpc.RpcError) -> CorunError:
    """Return the typed error of a failed call."""
    failed: Any = error  # Only the errors that calls raise have these methods.
    code, text = failed.code() or grpc.StatusCode.UNKNOWN, failed.details() or "no details"
    if code not in _BY_CODE:
        return InternalError(f"the peer answered {code.name}: {text}")
    details: Details = []
    for key, value in failed.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            with suppress(DecodeError):
                details = status_pb2.Status.FromString(value).details
    return _BY_CODE[code]._unpack(text, details)


def is_answered(error: grpc.RpcError) -> bool:
    """Return whether one of our processes ended the call with a typed error.

    If not, the network failed or the peer died.
    """
    trailers: Any = error.trailing_metadata()
    return any(key == _DETAILS_KEY for key, _ in trailers or ())


def too_large_error(size: int, limit: int) -> InvalidArgumentError:
    """Return the error that refuses a message of `size` bytes."""
    return InvalidArgumentError("message", Shown(f"{size} bytes"), f"must be at most {limit} bytes")


def _message(error: CorunError) -> str:
    # A mismatch carries its differences as details. The other side makes the text from them again.
    text = error.message if isinstance(error, ContractMismatchError) else str(error)
    room = _MAX_MESSAGE_BYTES
    for i, char in enumerate(text):
        room -= 1 if " " <= char <= "~" else 3 * len(char.encode("utf-8", "replace"))  # gRPC writes it as %XX.
        if room < 0:
            return clip(text, i + 1)
    return clip(text, len(text))


def clip(text: str, length: int = MAX_SHOWN_VALUE) -> str:
    """Return at most `length` characters of `text` as valid Unicode, since protobuf refuses lone surrogates."""
    clipped = text if len(text) <= length else text[: length - 1] + "…"
    return clipped.encode("utf-8", "replace").decode()


def _find(message: Any, details: Details) -> Any:
    """Fill a message from the first detail of its type. It stays empty if there is none."""
    with suppress(DecodeError):  # The peer is not one of our processes. The code and the text still say enough.
        any(detail.Unpack(message) for detail in details)
    return message


def _metadata(details: Details) -> Mapping[str, str]:
    """Return the metadata of our own ErrorInfo; empty if there is none."""
    info = _find(error_details_pb2.ErrorInfo(), details)
    return dict(info.metadata) if info.domain == _DOMAIN else {}


def _info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN, metadata=metadata)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 2 * MAX_SHOWN_VALUE
