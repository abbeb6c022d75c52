"""Conversion between plain values and protobuf messages. Only this module builds messages or reads values from them.

`x_to_proto` and `x_from_proto` are each other's inverse. Log probabilities travel as fp32, with their exact bits. The
values check their own ranges. This module must not know what a value is for.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from corun.errors import InvalidArgumentError
from corun.params import SamplingParams, check_request_id, check_seed, check_text, check_token_ids
from corun.receipt import Receipt
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.types import (
    AuditStatus,
    ClusterStatus,
    FinishReason,
    KvHandle,
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
)
from corun.v1 import cluster_service_pb2 as cluster_pb2
from corun.v1 import prefill_service_pb2 as prefill_pb2
from corun.v1 import registry_service_pb2 as registry_pb2
from corun.v1 import types_pb2

E = TypeVar("E", bound=enum.Enum)

_SCALAR_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "n",
)
_FINISH_REASONS: dict[types_pb2.FinishReason, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_NODE_ROLES: dict[registry_pb2.NodeRole, NodeRole] = {
    registry_pb2.NODE_ROLE_PREFILL: NodeRole.PREFILL,
    registry_pb2.NODE_ROLE_DECODE: NodeRole.DECODE,
}
_NODE_STATES: dict[cluster_pb2.NodeState, NodeState] = {
    cluster_pb2.NODE_STATE_READY: NodeState.READY,
    cluster_pb2.NODE_STATE_JOINING: NodeState.JOINING,
    cluster_pb2.NODE_STATE_LOST: NodeState.LOST,
    cluster_pb2.NODE_STATE_REFUSED: NodeState.REFUSED,
    cluster_pb2.NODE_STATE_DRAINING: NodeState.DRAINING,
}
_CONDITIONS: dict[cluster_pb2.Condition, Condition] = {
    cluster_pb2.CONDITION_ALONE: Condition.ALONE,
    cluster_pb2.CONDITION_CROWDED: Condition.CROWDED,
    cluster_pb2.CONDITION_OTHER_SLOTS: Condition.OTHER_SLOTS,
    cluster_pb2.CONDITION_SHUFFLED: Condition.SHUFFLED,
}

_PRIORITIES: dict[cluster_pb2.Priority, Priority] = {
    cluster_pb2.PRIORITY_HIGH: Priority.HIGH,
    cluster_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    cluster_pb2.PRIORITY_LOW: Priority.LOW,
}


def sampling_params_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Convert sampling parameters. Every field is set, so that the reader's defaults do not matter."""
    return types_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SCALAR_PARAMS},
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias_map,
    )


def sampling_params_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters. Unset fields get their defaults.

    Raises InvalidArgumentError for a value outside its limit.
    """
    # Lists are passed on as they are. They may be long, so SamplingParams counts them before it copies them.
    # Only some scalars have presence on the wire. Any other field that is unset reads as its default: zero or empty.
    values = {name: getattr(message, name) for name in _SCALAR_PARAMS if not _unset(message, name)}
    return SamplingParams(
        **values,
        stop=message.stop,
        stop_token_ids=message.stop_token_ids,
        logit_bias=message.logit_bias,
    )


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason:
    """Convert a finish reason. None, for a sample that has not ended, becomes UNSPECIFIED."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _number(_FINISH_REASONS, reason)


def finish_reason_from_proto(number: types_pb2.FinishReason) -> FinishReason | None:
    """Read a finish reason. UNSPECIFIED, for a sample that has not ended, becomes None."""
    if number == types_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _member(_FINISH_REASONS, "finish_reason", number)


def condition_to_proto(condition: Condition) -> cluster_pb2.Condition:
    number: cluster_pb2.Condition = _number(_CONDITIONS, condition)
    return number


def condition_from_proto(number: cluster_pb2.Condition) -> Condition:
    return _member(_CONDITIONS, "condition", number)


def priority_to_proto(priority: Priority) -> cluster_pb2.Priority:
    number: cluster_pb2.Priority = _number(_PRIORITIES, priority)
    return number


def priority_from_proto(number: cluster_pb2.Priority) -> Priority:
    """Read a priority. UNSPECIFIED becomes NORMAL."""
    if number == cluster_pb2.PRIORITY_UNSPECIFIED:
        return Priority.NORMAL
    return _member(_PRIORITIES, "priority", number)


def node_ref_to_proto(ref: NodeRef) -> types_pb2.NodeRef:
    return types_pb2.NodeRef(node_id=ref.node_id, generation=ref.generation)


def node_ref_from_proto(message: types_pb2.NodeRef) -> NodeRef:
    return NodeRef(node_id=message.node_id, generation=message.generation)


def nixl_endpoint_to_proto(endpoint: NixlEndpoint) -> registry_pb2.NixlEndpoint:
    return registry_pb2.NixlEndpoint(
        engine_id=endpoint.engine_id,
        host=endpoint.host,
        port=endpoint.port,
        tp_size=endpoint.tp_size,
        stamp_addresses=endpoint.stamp_addresses,
    )


def nixl_endpoint_from_proto(message: registry_pb2.NixlEndpoint) -> NixlEndpoint:
    return NixlEndpoint(
        engine_id=message.engine_id,
        host=message.host,
        port=message.port,
        tp_size=message.tp_size,
        stamp_addresses=tuple(message.stamp_addresses),
    )


def kv_handle_to_proto(handle: KvHandle) -> prefill_pb2.KvHandle:
    return prefill_pb2.KvHandle(
        prefill_node=node_ref_to_proto(handle.prefill_node),
        engine_id=handle.engine_id,
        request_id=handle.request_id,
        block_ids=[prefill_pb2.BlockIds(ids=ids) for ids in handle.block_ids],
        host=handle.host,
        port=handle.port,
        tp_size=handle.tp_size,
        num_tokens=handle.num_tokens,
        prompt_digest=handle.prompt_digest,
        reader=node_ref_to_proto(handle.reader),
        binding=handle.binding,
        claim=handle.claim,
    )


def kv_handle_from_proto(message: prefill_pb2.KvHandle) -> KvHandle:
    return KvHandle(
        prefill_node=node_ref_from_proto(message.prefill_node),
        engine_id=message.engine_id,
        request_id=message.request_id,
        block_ids=tuple(tuple(group.ids) for group in message.block_ids),
        host=message.host,
        port=message.port,
        tp_size=message.tp_size,
        num_tokens=message.num_tokens,
        prompt_digest=message.prompt_digest,
        reader=node_ref_from_proto(message.reader),
        binding=message.binding,
        claim=message.claim,
    )


def node_info_to_proto(info: NodeInfo) -> registry_pb2.NodeInfo:
    return registry_pb2.NodeInfo(
        ref=node_ref_to_proto(info.ref),
        role=_number(_NODE_ROLES, info.role),
        address=info.address,
        contract_json=info.contract_json,
        slots=info.slots,
        kv_blocks=info.kv_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        nixl=None if info.nixl is None else nixl_endpoint_to_proto(info.nixl),
        model=info.model,
        finding=info.finding,
    )


def node_info_from_proto(message: registry_pb2.NodeInfo) -> NodeInfo:
    return NodeInfo(
        ref=node_ref_from_proto(message.ref),
        role=_member(_NODE_ROLES, "node.role", message.role),
        address=message.address,
        contract_json=message.contract_json,
        slots=message.slots,
        kv_blocks=message.kv_blocks,
        block_size=message.block_size,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        nixl=nixl_endpoint_from_proto(message.nixl) if message.HasField("nixl") else None,
        model=message.model,
        finding=message.finding,
    )


def kv_reads_to_proto(reads: KvReads) -> registry_pb2.KvReads:
    return registry_pb2.KvReads(count=reads.count, bytes=reads.bytes, seconds=reads.seconds, failed=reads.failed)


def kv_reads_from_proto(message: registry_pb2.KvReads) -> KvReads:
    return KvReads(count=message.count, bytes=message.bytes, seconds=message.seconds, failed=message.failed)


def node_load_to_proto(load: NodeLoad) -> registry_pb2.NodeLoad:
    return registry_pb2.NodeLoad(
        used_slots=load.used_slots,
        used_kv_blocks=load.used_kv_blocks,
        queued_prompt_tokens=load.queued_prompt_tokens,
        steps=load.steps,
        tokens=load.tokens,
        slots_in_use=load.slots_in_use,
        kv_reads=kv_reads_to_proto(load.kv_reads),
    )


def node_load_from_proto(message: registry_pb2.NodeLoad) -> NodeLoad:
    return NodeLoad(
        used_slots=message.used_slots,
        used_kv_blocks=message.used_kv_blocks,
        queued_prompt_tokens=message.queued_prompt_tokens,
        steps=message.steps,
        tokens=message.tokens,
        slots_in_use=tuple(message.slots_in_use),
        kv_reads=kv_reads_from_proto(message.kv_reads),
    )


def node_status_to_proto(status: NodeStatus) -> cluster_pb2.NodeStatus:
    return cluster_pb2.NodeStatus(
        node=node_info_to_proto(status.node),
        load=node_load_to_proto(status.load),
        state=_number(_NODE_STATES, status.state),
        detail=status.detail,
        last_heartbeat_ms=status.last_heartbeat_ms,
    )


def node_status_from_proto(message: cluster_pb2.NodeStatus) -> NodeStatus:
    return NodeStatus(
        node=node_info_from_proto(message.node),
        load=node_load_from_proto(message.load),
        state=_member(_NODE_STATES, "node.state", message.state),
        detail=message.detail,
        last_heartbeat_ms=message.last_heartbeat_ms,
    )


def audit_status_to_proto(status: AuditStatus) -> cluster_pb2.AuditStatus:
    return cluster_pb2.AuditStatus(
        matched=status.matched,
        mismatched=status.mismatched,
        failed=status.failed,
        skipped=status.skipped,
        same_node=status.same_node,
        waiting=status.waiting,
        last_mismatch=status.last_mismatch,
    )


def audit_status_from_proto(message: cluster_pb2.AuditStatus) -> AuditStatus:
    return AuditStatus(
        matched=message.matched,
        mismatched=message.mismatched,
        failed=message.failed,
        skipped=message.skipped,
        same_node=message.same_node,
        waiting=message.waiting,
        last_mismatch=message.last_mismatch,
    )


def model_status_to_proto(model: ModelStatus) -> cluster_pb2.ModelStatus:
    return cluster_pb2.ModelStatus(
        name=model.name, max_model_len=model.max_model_len, max_prompt_bytes=model.max_prompt_bytes
    )


def model_status_from_proto(message: cluster_pb2.ModelStatus) -> ModelStatus:
    return ModelStatus(
        name=message.name, max_model_len=message.max_model_len, max_prompt_bytes=message.max_prompt_bytes
    )


def cluster_status_to_proto(status: ClusterStatus) -> cluster_pb2.GetClusterResponse:
    return cluster_pb2.GetClusterResponse(
        router_id=status.router_id,
        fingerprint=status.fingerprint,
        nodes=[node_status_to_proto(node) for node in status.nodes],
        queued_samples=status.queued_samples,
        max_queued_samples=status.max_queued_samples,
        finished_samples=status.finished_samples,
        mismatches=status.mismatches,
        refused_requests=status.refused_requests,
        audit=audit_status_to_proto(status.audit),
        model=None if status.model is None else model_status_to_proto(status.model),
    )


def cluster_status_from_proto(message: cluster_pb2.GetClusterResponse) -> ClusterStatus:
    return ClusterStatus(
        router_id=message.router_id,
        fingerprint=message.fingerprint,
        nodes=tuple(node_status_from_proto(node) for node in message.nodes),
        queued_samples=message.queued_samples,
        max_queued_samples=message.max_queued_samples,
        finished_samples=message.finished_samples,
        mismatches=message.mismatches,
        refused_requests=message.refused_requests,
        audit=audit_status_from_proto(message.audit),
        model=model_status_from_proto(message.model) if message.HasField("model") else None,
    )


def receipt_to_proto(receipt: Receipt) -> types_pb2.Receipt:
    return types_pb2.Receipt(
        fingerprint=receipt.fingerprint,
        request_id=receipt.request_id,
        sample_index=receipt.sample_index,
        seed=receipt.seed,
        prompt_digest=receipt.prompt_digest,
        params_digest=receipt.params_digest,
        output_digest=receipt.output_digest,
        num_prompt_tokens=receipt.num_prompt_tokens,
        num_output_tokens=receipt.num_output_tokens,
        finish_reason=finish_reason_to_proto(receipt.finish_reason),
        prefill_node=node_ref_to_proto(receipt.prefill_node),
        decode_node=node_ref_to_proto(receipt.decode_node),
        tokens_digest=receipt.tokens_digest,
    )


def receipt_from_proto(message: types_pb2.Receipt) -> Receipt:
    return Receipt(
        fingerprint=message.fingerprint,
        request_id=message.request_id,
        sample_index=message.sample_index,
        seed=message.seed,
        prompt_digest=message.prompt_digest,
        params_digest=message.params_digest,
        output_digest=message.output_digest,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        finish_reason=_member(_FINISH_REASONS, "receipt.finish_reason", message.finish_reason),
        prefill_node=node_ref_from_proto(message.prefill_node),
        decode_node=node_ref_from_proto(message.decode_node),
        tokens_digest=message.tokens_digest,
    )


def resume_point_to_proto(point: ResumePoint) -> cluster_pb2.ResumePoint:
    return cluster_pb2.ResumePoint(
        sample_index=point.sample_index,
        seed=point.seed,
        num_tokens=point.num_tokens,
        output_digest=point.output_digest,
        text_bytes=point.text_bytes,
        done=point.done,
    )


def resume_point_from_proto(message: cluster_pb2.ResumePoint) -> ResumePoint:
    return ResumePoint(
        sample_index=message.sample_index,
        seed=message.seed,
        num_tokens=message.num_tokens,
        output_digest=message.output_digest,
        text_bytes=message.text_bytes,
        done=message.done,
    )


def verify_case_to_proto(case: VerifyCase) -> cluster_pb2.VerifyCase:
    return cluster_pb2.VerifyCase(
        prompt_token_ids=case.prompt_token_ids,
        sampling_params=sampling_params_to_proto(case.sampling_params),
        seed=case.seed,
        output_digest=case.output_digest,
        text=case.text,
    )


def verify_case_from_proto(message: cluster_pb2.VerifyCase) -> VerifyCase:
    return VerifyCase(
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling_params=sampling_params_from_proto(message.sampling_params),
        seed=message.seed,
        output_digest=message.output_digest,
        text=message.text,
    )


def verify_result_to_proto(result: VerifyResult) -> cluster_pb2.VerifyResponse:
    return cluster_pb2.VerifyResponse(
        case_index=result.case_index,
        condition=_number(_CONDITIONS, result.condition),
        match=result.match,
        expected_digest=result.expected_digest,
        receipt=None if result.receipt is None else receipt_to_proto(result.receipt),
        error=result.error,
        text_digest=result.text_digest,
    )


def verify_result_from_proto(message: cluster_pb2.VerifyResponse) -> VerifyResult:
    return VerifyResult(
        case_index=message.case_index,
        condition=_member(_CONDITIONS, "condition", message.condition),
        match=message.match,
        expected_digest=message.expected_digest,
        receipt=receipt_from_proto(message.receipt) if message.HasField("receipt") else None,
        error=message.error,
        text_digest=message.text_digest,
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
        request.token_ids.ids.extend(check_token_ids(prompt, 2**32))
    return request


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
    for i, case in enumerate(cases):
        check_token_ids(case.prompt_token_ids, 2**32, f"cases[{i}].prompt_token_ids")
        check_seed(case.seed)
    return cluster_pb2.VerifyRequest(
        cases=[verify_case_to_proto(case) for case in cases],
        conditions=[condition_to_proto(condition) for condition in conditions],
        order_seed=order_seed,
    )


def _unset(message: types_pb2.SamplingParams, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name[name]
    return field.has_presence and not message.HasField(field.name)


def _number(table: Mapping[Any, E], member: E) -> Any:
    return next(number for number, value in table.items() if value is member)


def _member(table: Mapping[Any, E], field: str, number: int) -> E:
    if number not in table:
        raise InvalidArgumentError(field, number, "must be one of " + ", ".join(e.value for e in table.values()))
    return table[number]
