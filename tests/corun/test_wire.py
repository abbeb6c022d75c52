"""Every value survives the wire, through bytes, bit by bit."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.verification import Condition, VerifyCase, VerifyResult
from corun.rpc import codec
from corun.types import (
    AuditStatus,
    ClusterStatus,
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
    ResumePoint,
)
from corun.v1 import cluster_service_pb2, prefill_service_pb2, registry_service_pb2, types_pb2

UINT32 = st.integers(0, 2**32 - 1)
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

REF = NodeRef(node_id="d1", generation="g2")
VALUES: dict[str, Any] = {
    "cluster_status": ClusterStatus(
        router_id="r1",
        fingerprint="f2",
        nodes=(
            NodeStatus(
                node=NodeInfo(
                    ref=REF,
                    role=NodeRole.PREFILL,
                    address="a3",
                    contract_json="c4",
                    slots=5,
                    kv_blocks=6,
                    block_size=7,
                    max_model_len=8,
                    vocab_size=9,
                    nixl=NixlEndpoint(engine_id="e1", host="h2", port=3, tp_size=4, stamp_addresses=(2**63, 5)),
                    model="m11",
                    finding="f12",
                    freedoms=(FreedomStatus(name="n13", refused="r13"), FreedomStatus(name="rows")),
                    certificate="c14",
                ),
                load=NodeLoad(
                    used_slots=1,
                    used_kv_blocks=2,
                    queued_prompt_tokens=3,
                    steps=2**40,
                    tokens=5,
                    kv_reads=KvReads(count=1, bytes=2, seconds=0.25, failed=4, shared_tokens=5, prompt_tokens=6),
                    leases=8,
                    cached_tokens=2**41,
                ),
                state=NodeState.DRAINING,
                detail="d4",
                last_heartbeat_ms=300,
            ),
        ),
        queued_samples=4,
        max_queued_samples=5,
        finished_samples=6,
        mismatches=7,
        refused_requests=8,
        audit=AuditStatus(matched=1, mismatched=2, failed=3, skipped=4, same_node=5, waiting=6, last_mismatch="l7"),
        model=ModelStatus(name="n1", max_model_len=2, max_prompt_bytes=3),
    ),
    "kv_handle": KvHandle(
        prefill_node=NodeRef(node_id="p1", generation="g1"),
        engine_id="e2",
        request_id="r3",
        block_ids=((1, 300), ()),
        host="h5",
        port=6,
        tp_size=7,
        num_tokens=8,
        prompt_digest="d9",
        reader=REF,
        binding="b11",
        claim="c12",
        owners=(KvOwner(request_id="o1", num_blocks=2),),
        cached_tokens=14,
    ),
    "verify_case": VerifyCase(
        prompt_token_ids=(1, 300),
        sampling_params=SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=3,
            min_p=0.125,
            max_tokens=16,
            min_tokens=6,
            stop=("a", "ü"),
            stop_token_ids=(0, 8),
            ignore_eos=True,
            presence_penalty=-1.0,
            frequency_penalty=1.5,
            repetition_penalty=2.0,
            logit_bias={13: -0.5, 5: 2.0},
            logprobs=True,
            n=1,
        ),
        seed=2**63 - 1,
        output_digest="o4",
        text="t5",
    ),
    "verify_result": VerifyResult(
        case_index=1,
        condition=Condition.SHUFFLED,
        match=True,
        expected_digest="e4",
        receipt=Receipt(
            fingerprint="f1",
            request_id="r2",
            sample_index=3,
            seed=4,
            prompt_digest="p5",
            params_digest="p6",
            output_digest="o7",
            num_prompt_tokens=8,
            num_output_tokens=9,
            finish_reason=FinishReason.LENGTH,
            prefill_node=NodeRef(node_id="p1", generation="g1"),
            decode_node=REF,
            tokens_digest="t13",
            cached_tokens=14,
            certificates="c15",
        ),
        error="e6",
        text_digest="t7",
        alternatives_digest="a8",
    ),
    "resume_point": ResumePoint(sample_index=1, seed=2, num_tokens=3, output_digest="o4", text_bytes=5, done=True),
}
BYTES = {
    "cluster_status": (
        "0a027231120266321a96010a5c0a080a0264311202673210011a026133220263342805300638074008480952190a026531120268"
        "32180320042a0b80808080808080808001055a036d313162036631326a0a0a036e313312037231336a060a04726f777372036331"
        "34122d0801100218032080808080802028053a130801100219000000000000d03f20042805300640084880808080804018052202"
        "643428ac02200428053006380740084a100801100218032004280530063a026c3752080a026e3110021803"
    ),
    "kv_handle": (
        "0a080a02703112026731120265321a02723322050a0301ac0222002a0268353006380740084a02643952080a026431120267325a"
        "0362313162036331326a060a026f311002700e"
    ),
    "verify_case": (
        "0a0301ac02125f09000000000000e03f11000000000000d03f180321000000000000c03f281030063a01613a02c3bc4202000848"
        "0151000000000000f0bf59000000000000f83f6100000000000000406a07080d15000000bf6a07080515000000407001780118ff"
        "ffffffffffffff7f22026f342a027435"
    ),
    "verify_result": (
        "080110041801220265342a3e0a02663112027232180320042a027035320270363a026f374008480950025a080a02703112026731"
        "62080a026431120267326a03743133700e7a03633135320265363a02743742026138"
    ),
    "resume_point": "08011002180322026f3428053001",
}
"""The messages of VALUES in hex, as every version on the wire has written them."""


@pytest.mark.parametrize("name", VALUES)
def test_the_bytes_stay_the_same(name: str) -> None:
    message = getattr(codec, f"{name}_to_proto")(VALUES[name])
    assert message.SerializeToString(deterministic=True).hex() == BYTES[name]
    assert getattr(codec, f"{name}_from_proto")(type(message).FromString(bytes.fromhex(BYTES[name]))) == VALUES[name]


@settings(max_examples=50)
@given(PARAMS)
def test_params_survive(params: SamplingParams) -> None:
    message = codec.sampling_params_to_proto(params)
    back = codec.sampling_params_from_proto(types_pb2.SamplingParams.FromString(message.SerializeToString()))
    assert (back, back.digest()) == (params, params.digest())


def test_what_is_unset_stays_unset() -> None:
    (node,) = VALUES["cluster_status"].nodes
    values = {
        "node_info": replace(node.node, nixl=None, model=""),
        "node_load": NodeLoad(),
        "cluster_status": replace(VALUES["cluster_status"], nodes=(), audit=AuditStatus(), model=None, fingerprint=""),
        "kv_handle": replace(VALUES["kv_handle"], block_ids=(), claim=""),
        "verify_result": replace(VALUES["verify_result"], receipt=None, match=False),
        "resume_point": replace(VALUES["resume_point"], done=False, seed=0),
    }
    for name, value in values.items():
        message = getattr(codec, f"{name}_to_proto")(value)
        back = type(message).FromString(message.SerializeToString())
        assert getattr(codec, f"{name}_from_proto")(back) == value


@pytest.mark.parametrize(
    "changed",
    [
        {"node_id": str},
        {"node_id": str, "generation": str, "address": str},
        {"generation": str, "node_id": str},
        {"node_id": str, "generation": int},
        {"node_id": str, "generation": str | None},
        {"node_id": str, "generation": tuple[str, ...]},
    ],
    ids=str,
)
def test_a_value_that_is_not_its_message_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"NodeRef has \['|corun\.v1\.NodeRef\.generation must be <class 'str'>, not "):
        codec._mirror(make_dataclass("NodeRef", changed.items()), types_pb2.NodeRef)


def test_a_list_that_may_be_unset_is_refused() -> None:
    """An empty list and none at all are the same on the wire."""
    kind = make_dataclass("BlockIds", {"ids": tuple[int, ...] | None}.items())
    with pytest.raises(TypeError, match=r"BlockIds\.ids must be tuple\[int, \.\.\.\], not "):
        codec._mirror(kind, prefill_service_pb2.BlockIds)


def test_unset_params_are_the_defaults_and_a_set_zero_is_none() -> None:
    assert codec.sampling_params_from_proto(types_pb2.SamplingParams()) == SamplingParams()
    assert codec.sampling_params_from_proto(types_pb2.SamplingParams(temperature=0)).greedy
    for name in ("top_p", "max_tokens", "repetition_penalty", "n"):
        zero: dict[str, Any] = {name: 0}
        with pytest.raises(InvalidArgumentError, match=rf"^sampling_params\.{name} = 0"):
            codec.sampling_params_from_proto(types_pb2.SamplingParams(**zero))


def test_an_enum_that_is_not_its_protobuf_enum_is_refused() -> None:
    names = [member.name for member in NodeState]
    for changed in (names[:-1], [*names, "BUSY"], names[::-1]):
        with pytest.raises(TypeError, match=r"NodeState has .* but its protobuf type has "):
            codec._enum(Enum("NodeState", changed), cluster_service_pb2.NodeState, "node.state")


def test_enum_values() -> None:
    for reason in (None, *FinishReason):
        assert codec.finish_reason_from_proto(codec.finish_reason_to_proto(reason)) is reason
    with pytest.raises(InvalidArgumentError, match=r"condition = 0: must be one of alone, crowded"):
        codec.condition_from_proto(cluster_service_pb2.CONDITION_UNSPECIFIED)
    with pytest.raises(InvalidArgumentError, match=r"node\.role = 0: must be one of prefill, decode"):
        codec.node_info_from_proto(registry_service_pb2.NodeInfo())
    with pytest.raises(InvalidArgumentError, match=r"receipt\.finish_reason = 0"):
        codec.receipt_from_proto(types_pb2.Receipt())


def test_a_case_without_a_prompt_is_refused_by_its_number() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^cases\[0\]\.prompt_token_ids = no tokens: must not be empty"):
        codec.verify_request([VerifyCase(prompt_token_ids=(), sampling_params=SamplingParams(), seed=7)])


@pytest.mark.parametrize("order_seed", [-1, 2**64, 1.5])
def test_an_order_seed_that_is_none_is_refused_by_its_name(order_seed: Any) -> None:
    case = VerifyCase(prompt_token_ids=(1,), sampling_params=SamplingParams(), seed=7)
    with pytest.raises(InvalidArgumentError, match=r"^order_seed = "):
        codec.verify_request([case], order_seed=order_seed)


RECEIPT = VALUES["verify_result"].receipt
FIRST = {"prompt_token_ids": list(range(500)), "fingerprint": "f" * 64}


@pytest.mark.parametrize(
    "output",
    [
        {"text": "", "token_ids": []},
        {"text": " word", "token_ids": [300], "logprobs": [-1.5], **FIRST},
        {"text": "", "token_ids": [0, 2**32 - 1], "logprobs": [-0.0, float("-inf")], "token_texts": ["", "ä€🦀\0"]},
        {"text": "a", "token_ids": [7], "receipt": RECEIPT, **FIRST},
        {"text": "", "token_ids": [], "receipt": replace(RECEIPT, finish_reason=FinishReason.STOP)},
    ],
)
def test_a_response_has_what_all_of_its_sample_have_and_what_is_new(output: dict[str, Any]) -> None:
    head = codec.response_head("r", 3, 2**63 - 1, 2**64 - 1)
    message = codec.outputs_response().responses.add()
    assert codec.fill_response(message, head, **output) is message
    receipt = output.get("receipt")
    assert message == cluster_service_pb2.GenerateResponse(
        request_id="r",
        sample_index=3,
        seed=2**63 - 1,
        call_number=2**64 - 1,
        finish_reason=codec.finish_reason_to_proto(receipt and receipt.finish_reason),
        **output | {"receipt": receipt and codec.receipt_to_proto(receipt)},
    )


@pytest.mark.parametrize("data", [b"", b"\x2a\x01a"])
def test_a_constraint_that_is_not_known_is_refused_and_not_left_out(data: bytes) -> None:
    """A later version may send a kind of its own; field 5 is none of this one's."""
    message = types_pb2.SamplingParams(structured_outputs=types_pb2.StructuredOutputs.FromString(data))
    with pytest.raises(InvalidArgumentError, match="structured_outputs"):
        codec.sampling_params_from_proto(message)


def test_equal_parameters_are_read_once_unless_they_are_long() -> None:
    def sent(params: SamplingParams) -> types_pb2.SamplingParams:
        return types_pb2.SamplingParams.FromString(codec.sampling_params_to_proto(params).SerializeToString())

    first, other = SamplingParams(max_tokens=7, stop=("x",)), SamplingParams(max_tokens=8, stop=("x",))
    long = SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0))
    for params, is_kept in ((first, True), (other, True), (long, False)):
        read = [codec.sampling_params_from_proto(sent(params)) for _ in range(2)]
        assert read == [params, params]
        assert (read[0] is read[1]) == is_kept
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"sampling_params\.top_p"):
            codec.sampling_params_from_proto(types_pb2.SamplingParams(top_p=2.0))
