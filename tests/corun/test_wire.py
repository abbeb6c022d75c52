"""Every value survives the wire, through bytes, bit by bit."""

from __future__ import annotations

import struct
import typing
from dataclasses import fields
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun import types
from corun.errors import InvalidArgumentError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records import verification
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
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
    NodeStatus,
    ResumePoint,
)
from corun.v1 import cluster_service_pb2, prefill_service_pb2, registry_service_pb2, types_pb2

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=20)
SEED = st.integers(0, 2**63 - 1)
TOKENS = st.lists(UINT32, max_size=8).map(tuple)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.01, 2),
    top_p=st.floats(1e-9, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    max_tokens=st.integers(9, 2**32 - 1),
    min_tokens=st.integers(0, 9),
    stop=st.lists(st.text(min_size=1, max_size=9), max_size=16),
    stop_token_ids=st.lists(UINT32, max_size=64),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
    logit_bias=st.dictionaries(UINT32, st.floats(-100, 100), max_size=20),
    logprobs=st.booleans(),
    n=st.integers(1, 256),
)

HINTS = {**vars(types), **vars(verification)}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, within what the wire takes."""
    known = {
        int: UINT32,
        float: st.floats(0),
        str: TEXT,
        bool: st.booleans(),
        SamplingParams: PARAMS,
        tuple[int, ...]: TOKENS,
    }
    if kind in known:
        return known[kind]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if args:
        return st.one_of(*(st.none() if arg is type(None) else values_of(arg) for arg in args))
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    hints = typing.get_type_hints(kind, globalns=HINTS)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in fields(kind)})


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("node_ref", NodeRef),
        ("nixl_endpoint", NixlEndpoint),
        ("kv_handle", KvHandle),
        ("node_info", NodeInfo),
        ("kv_reads", KvReads),
        ("node_load", NodeLoad),
        ("node_status", NodeStatus),
        ("audit_status", AuditStatus),
        ("model_status", ModelStatus),
        ("cluster_status", ClusterStatus),
        ("receipt", Receipt),
        ("resume_point", ResumePoint),
        ("verify_case", VerifyCase),
        ("verify_result", VerifyResult),
        ("sampling_params", SamplingParams),
    ],
)
def test_round_trip(name: str, kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    message = getattr(codec, f"{name}_to_proto")(value)
    back = type(message).FromString(message.SerializeToString())
    assert getattr(codec, f"{name}_from_proto")(back) == value


def test_the_values_have_the_fields_of_the_messages() -> None:
    pairs: list[tuple[type[Any], Any]] = [
        (SamplingParams, types_pb2.SamplingParams),
        (Receipt, types_pb2.Receipt),
        (NodeRef, types_pb2.NodeRef),
        (NixlEndpoint, registry_service_pb2.NixlEndpoint),
        (KvHandle, prefill_service_pb2.KvHandle),
        (NodeInfo, registry_service_pb2.NodeInfo),
        (NodeLoad, registry_service_pb2.NodeLoad),
        (NodeStatus, cluster_service_pb2.NodeStatus),
        (AuditStatus, cluster_service_pb2.AuditStatus),
        (ModelStatus, cluster_service_pb2.ModelStatus),
        (ClusterStatus, cluster_service_pb2.GetClusterResponse),
        (ResumePoint, cluster_service_pb2.ResumePoint),
        (VerifyCase, cluster_service_pb2.VerifyCase),
        (VerifyResult, cluster_service_pb2.VerifyResponse),
    ]
    for value, message in pairs:
        assert [f.name for f in fields(value)] == [f.name for f in message.DESCRIPTOR.fields]


@given(SEED, UINT64)
def test_wide_integers(seed: int, count: int) -> None:
    case = VerifyCase(prompt_token_ids=(1,), sampling_params=SamplingParams(), seed=seed)
    assert codec.verify_case_from_proto(codec.verify_case_to_proto(case)).seed == seed
    load = NodeLoad(steps=count, tokens=count)
    assert codec.node_load_from_proto(codec.node_load_to_proto(load)) == load


@given(st.integers(0, 2**32 - 1).filter(lambda bits: (bits & 0x7F80_0000) != 0x7F80_0000))
def test_logprobs_keep_their_bits(bits: int) -> None:
    (logprob,) = struct.unpack("<f", struct.pack("<I", bits))
    message = cluster_service_pb2.GenerateResponse(logprobs=[logprob])
    back = cluster_service_pb2.GenerateResponse.FromString(message.SerializeToString())
    assert struct.pack("<f", back.logprobs[0]) == struct.pack("<I", bits)


@given(PARAMS)
def test_both_ends_have_one_digest_of_the_params(params: SamplingParams) -> None:
    message = codec.sampling_params_to_proto(params)
    back = codec.sampling_params_from_proto(types_pb2.SamplingParams.FromString(message.SerializeToString()))
    assert back.digest() == params.digest()


def test_unset_params_are_the_defaults() -> None:
    assert codec.sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams()


def test_a_set_zero_is_no_default() -> None:
    assert codec.sampling_params_from_proto(types_pb2.SamplingParams(temperature=0)).greedy
    for name in ("top_p", "max_tokens", "repetition_penalty", "n"):
        zero: dict[str, Any] = {name: 0}
        with pytest.raises(InvalidArgumentError, match=rf"^sampling_params\.{name} = 0"):
            codec.sampling_params_from_proto(types_pb2.SamplingParams(**zero))


def test_enums_mirror_the_protos() -> None:
    for table, enum, proto in (
        (codec._FINISH_REASONS, FinishReason, types_pb2.FinishReason),
        (codec._NODE_ROLES, types.NodeRole, registry_service_pb2.NodeRole),
        (codec._NODE_STATES, types.NodeState, cluster_service_pb2.NodeState),
        (codec._CONDITIONS, Condition, cluster_service_pb2.Condition),
    ):
        prefix = proto.Name(0).removesuffix("UNSPECIFIED")
        assert set(table) == set(proto.values()) - {0}
        assert {proto.Name(number): member for number, member in table.items()} == {prefix + m.name: m for m in enum}


def test_finish_reason_and_condition() -> None:
    for reason in (None, *FinishReason):
        assert codec.finish_reason_from_proto(codec.finish_reason_to_proto(reason)) is reason
    for condition in Condition:
        assert codec.condition_from_proto(codec.condition_to_proto(condition)) is condition


def test_unknown_enum_values() -> None:
    with pytest.raises(InvalidArgumentError, match=r"condition = 0: must be one of alone, crowded"):
        codec.condition_from_proto(cluster_service_pb2.CONDITION_UNSPECIFIED)
    with pytest.raises(InvalidArgumentError, match=r"node\.role = 0: must be one of prefill, decode"):
        codec.node_info_from_proto(registry_service_pb2.NodeInfo())
    with pytest.raises(InvalidArgumentError, match=r"receipt\.finish_reason = 0"):
        codec.receipt_from_proto(types_pb2.Receipt())


def test_generate_request() -> None:
    request = codec.generate_request("hi", SamplingParams(), seed=0, request_id="r")
    assert (request.text, request.WhichOneof("prompt"), request.request_id) == ("hi", "text", "r")
    assert request.HasField("seed")
    request = codec.generate_request([1, 2], SamplingParams())
    assert (list(request.token_ids.ids), request.HasField("seed")) == ([1, 2], False)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt.text"),
        ("\ud800", {}, "prompt.text"),
        ([], {}, "prompt.token_ids"),
        ([1, -1], {}, "prompt.token_ids[1]"),
        ([2**32], {}, "prompt.token_ids[0]"),
        (b"hi", {}, "prompt.token_ids"),
        (None, {}, "prompt.token_ids"),
        ("hi", {"seed": -1}, "seed"),
        ("hi", {"seed": 2**63}, "seed"),
        ("hi", {"request_id": "x" * 129}, "request_id"),
    ],
)
def test_bad_generate_requests(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        codec.generate_request(prompt, SamplingParams(), **options)
    assert caught.value.field == field


def test_verify_request() -> None:
    case = VerifyCase(prompt_token_ids=(1, 2), sampling_params=SamplingParams(), seed=7, output_digest="d")
    request = codec.verify_request([case], [Condition.ALONE], order_seed=3)
    assert codec.verify_case_from_proto(request.cases[0]) == case
    assert (list(request.conditions), request.order_seed) == ([cluster_service_pb2.CONDITION_ALONE], 3)
    with pytest.raises(InvalidArgumentError, match=r"^cases\[0\]\.prompt_token_ids = no tokens: must not be empty"):
        codec.verify_request([VerifyCase(prompt_token_ids=(), sampling_params=SamplingParams(), seed=7)])
