"""Conversion between plain values and protobuf messages. Only this module builds messages or reads values from them.

A value and its message have the same fields: names, order and types. `_mirror` compares them when this module is
imported, and returns `x_to_proto` and `x_from_proto`, which are each other's inverse. Only what has no such mirror is
converted by hand. Log probabilities travel as fp32, with their exact bits. The values check their own ranges. This
module must not know what a value is for.
"""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from types import GenericAlias
from typing import Any, TypeVar, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from corun.completion import Prompt, Score, Scores
from corun.errors import InternalError, InvalidArgumentError, Shown, renaming
from corun.params import (
    CONSTRAINTS,
    MAX_KEPT,
    SamplingParams,
    check_continuations,
    check_request_id,
    check_seed,
    check_text,
    check_token_ids,
)
from corun.receipt import Receipt
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.types import (
    Alternatives,
    AuditStatus,
    ClientStatus,
    ClusterStatus,
    Distribution,
    FinishReason,
    FreedomStatus,
    KvHandle,
    KvOwner,
    KvReads,
    ModelStatus,
    NixlEndpoint,
    NodeInfo,
    NodeLoad,
    NodeRef,
    NodeRole,
    NodeState,
    NodeStatus,
    Priority,
    ResumePoint,
    SlotSamples,
    SpecialToken,
    TemplateSource,
    Tokens,
    TokenScores,
)
from corun.v1 import cluster_service_pb2 as cluster_pb2
from corun.v1 import prefill_service_pb2 as prefill_pb2
from corun.v1 import registry_service_pb2 as registry_pb2
from corun.v1 import types_pb2

V = TypeVar("V")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=enum.Enum)
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The Python type of a field, and how its values travel. None: as they are."""

    python: Any
    to_proto: Convert | None = None
    from_proto: Convert | None = None


_SCALARS = {
    FieldDescriptor.TYPE_BOOL: _Kind(bool),
    FieldDescriptor.TYPE_DOUBLE: _Kind(float),
    FieldDescriptor.TYPE_FLOAT: _Kind(float),
    FieldDescriptor.TYPE_STRING: _Kind(str),
    FieldDescriptor.TYPE_UINT32: _Kind(int),
    FieldDescriptor.TYPE_UINT64: _Kind(int),
}
_kinds: dict[str, _Kind] = {}
"""The enums and messages that a message may hold, by their full protobuf names."""


def _enum(python: type[E], proto: Any, field: str) -> tuple[Callable[[E], Any], Callable[[int], E]]:
    """Return the functions that convert an enum's members to their numbers and back.

    The second function raises InvalidArgumentError for an unknown number; the error names `field`.

    Raises TypeError if the two enums do not have the same members.
    """
    prefix = proto.Name(0).removesuffix("UNSPECIFIED")
    _check_names(python, [member.name for member in python], [name.removeprefix(prefix) for name in proto.keys()[1:]])
    numbers = {member: proto.Value(prefix + member.name) for member in python}
    members = {number: member for member, number in numbers.items()}

    def from_proto(number: int) -> E:
        if number not in members:
            raise InvalidArgumentError(field, number, "must be one of " + ", ".join(e.value for e in python))
        return members[number]

    _kinds[proto.DESCRIPTOR.full_name] = _Kind(python, numbers.__getitem__, from_proto)
    return numbers.__getitem__, from_proto


def _mirror(python: type[V], proto: type[M]) -> tuple[Callable[[V], M], Callable[[M], V]]:
    """Return the functions that convert a dataclass to its message and back.

    Raises TypeError if the two do not have the same fields, and KeyError for a field of a kind that is not known yet.
    """
    _check_names(python, [f.name for f in fields(python)], [f.name for f in proto.DESCRIPTOR.fields])  # type: ignore[arg-type]
    hints = get_type_hints(python)
    converters = [(field.name, *_converters(field, hints[field.name])) for field in proto.DESCRIPTOR.fields]

    def to_proto(value: V) -> M:
        return proto(**{name: write(value) for name, write, _ in converters})

    def from_proto(message: M) -> V:
        return python(**{name: read(message) for name, _, read in converters})

    _kinds[proto.DESCRIPTOR.full_name] = _Kind(python, to_proto, from_proto)
    return to_proto, from_proto


def _converters(field: Any, hint: Any) -> tuple[Convert, Convert]:
    """Return how a field (a FieldDescriptor) is read from a value for its message, and how from the message.

    Raises TypeError if the field's type in the value (`hint`) does not fit the message.
    """
    named = field.message_type or field.enum_type
    kind = _SCALARS[field.type] if named is None else _kinds[named.full_name]
    if field.is_repeated:
        kind = _Kind(GenericAlias(tuple, (kind.python, ...)), _each(kind.to_proto), _each(kind.from_proto))
    get = attrgetter(field.name)
    write, read = _then(get, kind.to_proto), _then(get, kind.from_proto)
    if hint == kind.python:
        return write, read
    if field.has_presence and hint == kind.python | None:
        return (
            lambda value: None if get(value) is None else write(value),
            lambda message: read(message) if message.HasField(field.name) else None,
        )
    raise TypeError(f"{field.full_name} must be {kind.python}, not {hint}")


def _each(convert: Convert | None) -> Convert:
    return tuple if convert is None else lambda values: tuple(map(convert, values))


def _then(get: Convert, convert: Convert | None) -> Convert:
    return get if convert is None else lambda owner: convert(get(owner))


def _check_names(python: type, names: list[str], proto_names: list[str]) -> None:
    if names != proto_names:
        raise TypeError(f"{python.__name__} has {names}, but its protobuf type has {proto_names}")


MAX_KEPT_BYTES = 1024
"""The most bytes of the message of parameters that are kept. Longer ones are rare, and they would take memory."""
_PARAMS = types_pb2.SamplingParams.DESCRIPTOR.fields
_check_names(SamplingParams, [f.name for f in fields(SamplingParams)], [f.name for f in _PARAMS])
_SCALAR_PARAMS = [(f.name, f.has_presence) for f in _PARAMS if not f.is_repeated and f.message_type is None]


def sampling_params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert sampling parameters. Every field is set, so that the reader's defaults do not matter."""
    return types_pb2.SamplingParams(
        **{name: getattr(params, name) for name, _ in _SCALAR_PARAMS},
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias_map,
        structured_outputs=_constraint_to_proto(params.constraint),
    )


def _constraint_to_proto(constraint: tuple[str, str] | None) -> types_pb2.StructuredOutputs | None:
    if constraint is None:
        return None
    kind, text = constraint
    value = types_pb2.Choices(texts=json.loads(text)) if kind == "choice" else text
    return types_pb2.StructuredOutputs(**{kind: value})  # type: ignore[arg-type]


def _constraint_from_proto(params: types_pb2.SamplingParams) -> dict[str, Any]:
    if not params.HasField("structured_outputs"):
        return {}
    message = params.structured_outputs
    kind = message.WhichOneof("constraint")
    if kind is None:  # A later version may know more kinds.
        limit = "must be one of those that this version knows: " + ", ".join(CONSTRAINTS)
        raise InvalidArgumentError("sampling_params.structured_outputs", Shown("a constraint"), limit)
    return {kind: message.choice.texts if kind == "choice" else getattr(message, kind)}


def sampling_params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters. Unset fields get their defaults.

    Raises InvalidArgumentError for a value outside its limit.
    """
    if message.ByteSize() > MAX_KEPT_BYTES:
        return _read_params(message)
    return _kept_params(message.SerializeToString())


@functools.lru_cache(MAX_KEPT)
def _kept_params(data: bytes) -> SamplingParams:
    """Read sampling parameters as `sampling_params_from_proto` does, but equal bytes only once."""
    return _read_params(types_pb2.SamplingParams.FromString(data))


def _read_params(message: types_pb2.SamplingParams) -> SamplingParams:
    # Lists are passed on as they are. They may be long, so SamplingParams counts them before it copies them.
    # Only some scalars have presence on the wire. Any other field that is unset reads as its default: zero or empty.
    values = {
        name: getattr(message, name)
        for name, has_presence in _SCALAR_PARAMS
        if not has_presence or message.HasField(name)
    }
    return SamplingParams(
        **values,
        stop=message.stop,
        stop_token_ids=message.stop_token_ids,
        logit_bias=message.logit_bias,
        structured_outputs=_constraint_from_proto(message),
    )


_kinds[types_pb2.SamplingParams.DESCRIPTOR.full_name] = _Kind(
    SamplingParams, sampling_params_to_proto, sampling_params_from_proto
)
_kinds[prefill_pb2.BlockIds.DESCRIPTOR.full_name] = _Kind(
    tuple[int, ...], lambda ids: prefill_pb2.BlockIds(ids=ids), lambda message: tuple(message.ids)
)
_enum(NodeRole, registry_pb2.NodeRole, "node.role")
_enum(NodeState, cluster_pb2.NodeState, "node.state")
priority_to_proto, _known_priority = _enum(Priority, cluster_pb2.Priority, "priority")
condition_to_proto, condition_from_proto = _enum(Condition, cluster_pb2.Condition, "condition")
_number_of_reason, _known_reason = _enum(FinishReason, types_pb2.FinishReason, "finish_reason")
_enum(FinishReason, types_pb2.FinishReason, "receipt.finish_reason")  # The only message below that has one.

node_ref_to_proto, node_ref_from_proto = _mirror(NodeRef, types_pb2.NodeRef)
nixl_endpoint_to_proto, nixl_endpoint_from_proto = _mirror(NixlEndpoint, registry_pb2.NixlEndpoint)
_mirror(KvOwner, prefill_pb2.KvOwner)
kv_handle_to_proto, kv_handle_from_proto = _mirror(KvHandle, prefill_pb2.KvHandle)
_mirror(FreedomStatus, registry_pb2.FreedomStatus)
node_info_to_proto, node_info_from_proto = _mirror(NodeInfo, registry_pb2.NodeInfo)
_mirror(KvReads, registry_pb2.KvReads)
node_load_to_proto, node_load_from_proto = _mirror(NodeLoad, registry_pb2.NodeLoad)
_mirror(SlotSamples, cluster_pb2.SlotSamples)
_mirror(NodeStatus, cluster_pb2.NodeStatus)
_mirror(Distribution, cluster_pb2.Distribution)
_mirror(ClientStatus, cluster_pb2.ClientStatus)
_mirror(AuditStatus, cluster_pb2.AuditStatus)
_mirror(ModelStatus, cluster_pb2.ModelStatus)
cluster_status_to_proto, cluster_status_from_proto = _mirror(ClusterStatus, cluster_pb2.GetClusterResponse)
_mirror(SpecialToken, cluster_pb2.SpecialToken)
template_to_proto, template_from_proto = _mirror(TemplateSource, cluster_pb2.GetChatTemplateResponse)
tokens_to_proto, tokens_from_proto = _mirror(Tokens, cluster_pb2.TokenizeResponse)
token_scores_to_proto, token_scores_from_proto = _mirror(TokenScores, prefill_pb2.ScoreTokensResponse)
_mirror(Score, cluster_pb2.Score)
scores_to_proto, scores_from_proto = _mirror(Scores, cluster_pb2.ScoreResponse)
receipt_to_proto, receipt_from_proto = _mirror(Receipt, types_pb2.Receipt)
resume_point_to_proto, resume_point_from_proto = _mirror(ResumePoint, cluster_pb2.ResumePoint)
verify_case_to_proto, verify_case_from_proto = _mirror(VerifyCase, cluster_pb2.VerifyCase)
verify_result_to_proto, verify_result_from_proto = _mirror(VerifyResult, cluster_pb2.VerifyResponse)


def readable(answer: M | None) -> M:
    """Return a server's answer. Raises InternalError if it is no message of its kind: gRPC then gives None."""
    if answer is None:
        raise InternalError("the answer cannot be read")
    return answer


def read_answer(read: Callable[[Any], V], answer: Message | None) -> V:
    """Return what `read` makes of a server's answer.

    Raises InternalError if it cannot be read, also for a value that is unknown here, such as one of a later version: no
    argument of the caller is wrong.
    """
    try:
        return read(readable(answer))
    except InvalidArgumentError as error:
        raise InternalError(f"the answer cannot be read: {error}") from error


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason:
    """Convert a finish reason. None, for a sample that has not ended, becomes UNSPECIFIED."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _number_of_reason(reason)


def finish_reason_from_proto(number: types_pb2.FinishReason) -> FinishReason | None:
    """Read a finish reason. UNSPECIFIED, for a sample that has not ended, becomes None."""
    return None if number == types_pb2.FINISH_REASON_UNSPECIFIED else _known_reason(number)


def priority_from_proto(number: cluster_pb2.Priority) -> Priority:
    """Read a priority. UNSPECIFIED becomes NORMAL."""
    return Priority.NORMAL if number == cluster_pb2.PRIORITY_UNSPECIFIED else _known_priority(number)


def response_head(request_id: str, sample_index: int, seed: int, call_number: int = 0) -> bytes:
    """Return what all responses of one sample have in common, encoded."""
    return cluster_pb2.GenerateResponse(
        request_id=request_id, sample_index=sample_index, seed=seed, call_number=call_number
    ).SerializeToString()


def outputs_response(stream_id: str = "") -> cluster_pb2.StreamOutputsResponse:
    """Return a message of a shared stream, to be filled. stream_id: only for the stream's first message."""
    return cluster_pb2.StreamOutputsResponse(stream_id=stream_id)


def fill_response(
    message: cluster_pb2.GenerateResponse,
    head: bytes,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float] = (),
    receipt: Receipt | None = None,
    prompt_token_ids: Sequence[int] = (),
    fingerprint: str = "",
    token_texts: Sequence[str] = (),
) -> cluster_pb2.GenerateResponse:
    """Fill an empty message with new output of a sample, and return it.

    A router does this for every token. To parse a head takes less time than to copy one or to set its fields.

    logprobs: one fp32 value per token id, or none. token_texts: one text per token id, or none. receipt: only for the
    sample's last message.
    """
    message.MergeFromString(head)
    message.text = text
    message.token_ids.extend(token_ids)
    if logprobs:
        message.logprobs.extend(logprobs)
    if token_texts:
        message.token_texts.extend(token_texts)
    if prompt_token_ids or fingerprint:
        message.prompt_token_ids.extend(prompt_token_ids)
        message.fingerprint = fingerprint
    if receipt is not None:
        message.finish_reason = finish_reason_to_proto(receipt.finish_reason)
        message.receipt.CopyFrom(receipt_to_proto(receipt))
    return message


def add_alternatives(message: cluster_pb2.GenerateResponse, tops: Alternatives) -> None:
    """Add the alternatives of one token to a message that has the token."""
    message.top_logprobs.add(token_ids=tops.token_ids, logprobs=tops.logprobs, texts=tops.texts)


def alternatives_from_proto(message: cluster_pb2.GenerateResponse) -> tuple[Alternatives, ...]:
    """Return the alternatives of each new token; empty if they were not asked for."""
    return tuple(
        Alternatives(tuple(each.token_ids), tuple(each.logprobs), tuple(each.texts)) for each in message.top_logprobs
    )


def generate_request(
    prompt: str | Iterable[int],
    params: SamplingParams,
    *,
    seed: int | None = None,
    request_id: str = "",
    priority: Priority = Priority.NORMAL,
    token_texts: bool = False,
) -> cluster_pb2.GenerateRequest:
    """Return a checked request.

    Raises InvalidArgumentError for values that no model could accept. The router checks the rest.
    """
    request = cluster_pb2.GenerateRequest(
        request_id=check_request_id(request_id),
        sampling_params=sampling_params_to_proto(params),
        seed=None if seed is None else check_seed(seed),
        priority=priority_to_proto(priority),
        token_texts=token_texts,
    )
    if isinstance(prompt, str):
        request.text = check_text("prompt.text", prompt)
    else:
        request.token_ids.ids.extend(check_token_ids(prompt, None))
    return request


def score_request(
    prompt: Prompt,
    continuations: Sequence[Prompt],
    *,
    request_id: str = "",
    priority: Priority = Priority.NORMAL,
    token_texts: bool = False,
) -> cluster_pb2.ScoreRequest:
    """Return a checked request.

    Raises InvalidArgumentError for values that no model could accept. The router checks the rest.
    """
    check_continuations(continuations)
    return cluster_pb2.ScoreRequest(
        request_id=check_request_id(request_id),
        prompt=_text_or_tokens("prompt", prompt),
        continuations=[_text_or_tokens(f"continuations[{i}]", each) for i, each in enumerate(continuations)],
        priority=priority_to_proto(priority),
        token_texts=token_texts,
    )


def _text_or_tokens(field: str, value: Prompt) -> cluster_pb2.TextOrTokens:
    if isinstance(value, str):
        return cluster_pb2.TextOrTokens(text=check_text(f"{field}.text", value))
    ids = check_token_ids(value, None, f"{field}.token_ids")
    return cluster_pb2.TextOrTokens(token_ids=cluster_pb2.TokenIds(ids=ids))


def text_or_tokens_from_proto(message: cluster_pb2.TextOrTokens) -> Prompt:
    """Return a text, or the token ids as the message holds them: they are copied once the model is known to accept so
    many."""
    return message.text if message.WhichOneof("value") == "text" else message.token_ids.ids


def resumed_request(
    request: cluster_pb2.GenerateRequest, points: Iterable[ResumePoint], fingerprint: str
) -> cluster_pb2.GenerateRequest:
    """Return the request for the missing output, when part of the output has been received."""
    resumed = cluster_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.resume.extend(resume_point_to_proto(point) for point in points)
    resumed.fingerprint = fingerprint
    return resumed


def verify_request(
    cases: Sequence[VerifyCase], conditions: Sequence[Condition] = (), *, order_seed: int = 0
) -> cluster_pb2.VerifyRequest:
    """Return a checked request. No conditions means all of them. The router checks what depends on the model.

    Raises InvalidArgumentError for a prompt or a seed that no model could accept.
    """
    with renaming(lambda _: "order_seed"):
        order_seed = check_seed(order_seed)
    for i, case in enumerate(cases):
        check_token_ids(case.prompt_token_ids, None, f"cases[{i}].prompt_token_ids")
        check_seed(case.seed)
    return cluster_pb2.VerifyRequest(
        cases=[verify_case_to_proto(case) for case in cases],
        conditions=[condition_to_proto(condition) for condition in conditions],
        order_seed=order_seed,
    )
