"""Every error survives the way to a status and back; nothing it carries can make that fail."""

from __future__ import annotations

import pickle
import urllib.parse
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from corun.errors import (
    CancelledByPeerError,
    ContractMismatchError,
    CorunError,
    DataLossError,
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    Shown,
    StaleGenerationError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
    is_answered,
    shown,
    to_status,
)
from tests.corun.fake_router import FailedCall

ERRORS: list[CorunError] = [
    InvalidArgumentError("sampling_params.top_p", 1.5, "must be in (0, 1]"),
    OverloadedError("the queue is full", 0.25),
    UnavailableError("no decode node has joined"),
    UnavailableError("it is about to join", 0.5),
    DeadlineError("no slot within 3 s"),
    CancelledByPeerError("the client is gone"),
    ContractMismatchError("refused", {"model.dtype": ("float32", "bfloat16"), "decode.slots": ("8", 'a != "b"')}),
    StaleGenerationError("decode-0", "0" * 16, "f" * 16),
    NotFoundError("no such node"),
    UnauthenticatedError("DecodeService needs the cluster's token"),
    PermissionDeniedError("priority", "high", "must be at most normal for client alice"),
    DataLossError("token 3 differs"),
    InternalError("internal error, id 12ab"),
]


def sent(error: CorunError) -> CorunError:
    status: Any = rpc_status.to_status(to_status(error))
    return from_rpc_error(FailedCall(status.code, status.details, status.trailing_metadata))


def leaves(cls: type[CorunError]) -> Iterator[type[CorunError]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from leaves(sub)


def test_the_examples_cover_the_tree_and_codes_are_unique() -> None:
    # One without a code of its own travels as what it is derived from.
    kinds = {type(error) for error in ERRORS}
    assert kinds == {cls for cls in leaves(CorunError) if "code" in vars(cls)}
    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_back_whole(error: CorunError) -> None:
    back = sent(error)
    assert (type(back), str(back)) == (type(error), str(error))
    shown_value = {"value": shown(error.value)} if hasattr(error, "value") else {}
    assert back.__dict__ == {**error.__dict__, **shown_value}
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_an_answer_is_not_a_broken_connection() -> None:
    status: Any = rpc_status.to_status(to_status(UnavailableError("no nodes")))
    answered: Any = FailedCall(status.code, status.details, status.trailing_metadata)
    broken: Any = FailedCall(status.code, status.details, ())
    assert (is_answered(answered), is_answered(broken)) == (True, False)


def test_texts() -> None:
    assert str(ERRORS[0]) == "sampling_params.top_p = 1.5: must be in (0, 1]"
    assert str(InvalidArgumentError("prompt", "", "must not be empty")) == "prompt = '': must not be empty"
    assert str(ERRORS[6]) == 'refused: decode.slots: 8 != a != "b"; model.dtype: float32 != bfloat16'


def test_bad_request_names_field_value_and_limit() -> None:
    """What a client in any other language reads."""
    request = error_details_pb2.BadRequest()
    assert to_status(ERRORS[0]).details[0].Unpack(request)
    violation = request.field_violations[0]
    assert (violation.field, violation.description) == ("sampling_params.top_p", "1.5: must be in (0, 1]")


@pytest.mark.parametrize(
    "value",
    ["x" * 1000, list(range(10**5)), 10**10_000, "\ud800", Shown("y" * 100), {1: 2}, b"\0" * 99, float("nan"), None],
    ids=lambda value: type(value).__name__,
)
def test_values_are_abbreviated(value: object) -> None:
    assert len(shown(value)) <= 64
    assert str(sent(InvalidArgumentError("f", value, "l"))) == f"f = {shown(value)}: l"


@given(st.text(), st.text(), st.dictionaries(st.text(alphabet="ab.c", max_size=40), st.tuples(st.text(), st.text())))
def test_any_text_travels_within_metadata_limits(message: str, value: str, differences: dict[str, Any]) -> None:
    for error in (
        InvalidArgumentError("f", value * 50, "l"),
        ContractMismatchError(message * 50, differences),
        UnavailableError(message),
    ):
        assert type(sent(error)) is type(error)


@pytest.mark.parametrize("char", ["a", "é", "語", "🙂", "\n", "\udc00"], ids=ascii)
def test_the_longest_errors_fit_http2_trailers(char: str) -> None:
    long = char * 5000
    for error in (
        ContractMismatchError(long, {f"model.{i:030}": (char * 500, char * 500) for i in range(100)}),
        InvalidArgumentError("f" * 5000, long, long),
    ):
        status: Any = rpc_status.to_status(to_status(error))
        base64_size = len(status.trailing_metadata[0][1]) * 4 // 3
        assert base64_size + len(urllib.parse.quote(status.details)) < 7900


def test_all_the_fields_of_a_contract_fit() -> None:
    error = ContractMismatchError("refused", {f"model.{i:020}": ("a" * 64, "b" * 64) for i in range(24)})
    back: Any = sent(error)
    assert back.differences.keys() == error.differences.keys()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (FailedCall(grpc.StatusCode.UNAVAILABLE, "connection refused"), UnavailableError("connection refused")),
        (FailedCall(grpc.StatusCode.CANCELLED, None), CancelledByPeerError("no details")),
        (FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy"), OverloadedError("busy", 1.0)),
        (
            FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (33 vs. 16)"),
            InvalidArgumentError("message", Shown("33 bytes"), "must be at most 16 bytes"),
        ),
        (
            FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "no"),
            InvalidArgumentError("request", Shown("refused"), "no"),
        ),
        (FailedCall(grpc.StatusCode.FAILED_PRECONDITION, "no"), ContractMismatchError("no", {})),
        (FailedCall(grpc.StatusCode.ABORTED, "no"), InternalError("the peer answered ABORTED: no")),
        (FailedCall(grpc.StatusCode.UNIMPLEMENTED, "no"), InternalError("the peer answered UNIMPLEMENTED: no")),
        (
            FailedCall(grpc.StatusCode.NOT_FOUND, "no", [("grpc-status-details-bin", b"\xff")]),
            NotFoundError("no"),
        ),
    ],
    ids=str,
)
def test_foreign_statuses(call: grpc.RpcError, expected: CorunError) -> None:
    got = from_rpc_error(call)
    assert (type(got), got.args) == (type(expected), expected.args)


def test_foreign_details_may_be_json_of_any_depth() -> None:
    failure = error_details_pb2.PreconditionFailure()
    failure.violations.add(subject="a.b", description="[" * 6000)
    status = status_pb2.Status(code=9, message="no")
    status.details.add().Pack(failure)
    metadata = [("grpc-status-details-bin", status.SerializeToString())]
    got = from_rpc_error(FailedCall(grpc.StatusCode.FAILED_PRECONDITION, "no", metadata))
    assert isinstance(got, ContractMismatchError)
    assert got.differences == {"a.b": ("[" * 6000, "")}


def test_foreign_details_are_ignored() -> None:
    status = status_pb2.Status(code=5, message="no")
    status.details.add(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff\xff")
    metadata = [("grpc-status-details-bin", status.SerializeToString())]
    assert isinstance(
        from_rpc_error(FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "no", metadata)), InvalidArgumentError
    )
