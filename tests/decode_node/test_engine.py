"""From vLLM's step outputs to rows, and from our parameters to vLLM's."""

from __future__ import annotations

import asyncio
import math
import os
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun.node.kv.handle import owner_of
from corun.node.vllm import start as base
from corun.node.vllm.start import EngineFacts
from corun.params import SamplingParams
from corun.receipt import prompt_digest
from corun.types import FinishReason, KvHandle, NixlEndpoint, NodeRef
from decode_node.engine import VllmDecodeEngine
from decode_node.service import DecodeRequest, StepRow
from tests.loading import load

FACTS = EngineFacts(kv_blocks=4, block_size=16, max_model_len=512, vocab_size=256, eos_token_ids=(0, 9), finding="")
HANDLE = KvHandle(
    prefill_node=NodeRef(node_id="p0", generation="a" * 16),
    engine_id="p0-engine",
    request_id="prefill-1",
    block_ids=((4, 5),),
    host="127.0.0.1",
    port=7000,
    tp_size=1,
    num_tokens=3,
    prompt_digest=prompt_digest((1, 2, 3)),
    reader=NodeRef(node_id="d0", generation="d" * 16),
)


@pytest.fixture
def engine() -> VllmDecodeEngine:
    llm, contract = SimpleNamespace(), None
    return VllmDecodeEngine(llm, FACTS, contract)  # type: ignore[arg-type]


def output(name: str, tokens: list[int], logprobs: list[float], reason: Any = None) -> Any:
    """What one step gives one request (vllm/v1/engine/__init__.py: EngineCoreOutput)."""
    table = SimpleNamespace(logprobs=np.array([[value] for value in logprobs], dtype=np.float32))
    return SimpleNamespace(request_id=name, new_token_ids=tokens, new_logprobs=table, finish_reason=reason)


def rows_of(engine: VllmDecodeEngine, *outputs: Any) -> list[StepRow]:
    steps: list[list[StepRow]] = []
    engine.on_step = steps.append
    engine._take(list(outputs))
    (rows,) = steps
    return rows


def test_a_step_is_handed_on_whole(engine: VllmDecodeEngine) -> None:
    rows = rows_of(engine, output("a", [7], [-0.5]), output("b", [8], [-0.25]))
    assert rows == [StepRow("a", 7, -0.5), StepRow("b", 8, -0.25)]


def test_log_probabilities_keep_their_bits(engine: VllmDecodeEngine) -> None:
    value = struct.unpack("<f", struct.pack("<I", 0xBDCCCCCD))[0]
    (row,) = rows_of(engine, output("a", [7], [value]))
    assert struct.pack("<f", row.logprob) == struct.pack("<I", 0xBDCCCCCD)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_ends_its_request_alone(engine: VllmDecodeEngine, value: float) -> None:
    """Whatever made it so, on either runner: the token means nothing, and nothing after it does."""
    rows = rows_of(engine, output("a", [7, 8, 9], [-1.0, value, -1.0]), output("b", [8], [-0.25]))
    detail = "the logits of the next token are not finite"
    assert rows == [
        StepRow("a", 7, -1.0),
        StepRow("a", None, 0.0, FinishReason.ERROR, detail, not_finite=True),
        StepRow("b", 8, -0.25),
    ]


def test_every_reason_of_vllm_has_a_meaning(engine: VllmDecodeEngine) -> None:
    """Stop and length are ends; all others mean that the sample has to run again."""
    ours = {"STOP": FinishReason.STOP, "LENGTH": FinishReason.LENGTH}
    for reason in load("vllm.v1.engine").FinishReason:
        (row,) = rows_of(engine, output("a", [7], [-1.0], reason))
        assert row.finish is ours.get(reason.name, FinishReason.ERROR)
        assert bool(row.detail) is (row.finish is FinishReason.ERROR)


def test_an_end_comes_with_the_last_token_or_alone(engine: VllmDecodeEngine) -> None:
    reasons = load("vllm.v1.engine").FinishReason
    detail = "the engine ended the request: error"
    assert rows_of(engine, output("a", [7, 8], [-1.0, -2.0], reasons.STOP)) == [
        StepRow("a", 7, -1.0),
        StepRow("a", 8, -2.0, FinishReason.STOP),
    ]
    assert rows_of(engine, output("a", [], [], reasons.ERROR), output("b", [], [])) == [
        StepRow("a", None, 0.0, FinishReason.ERROR, detail)
    ]


PEER = NixlEndpoint(engine_id="p0-engine", host="10.0.0.9", port=7000, tp_size=1, stamp_addresses=(1,))


@pytest.mark.parametrize("failing", ["connect", "warm"])
async def test_why_a_prefill_node_cannot_be_connected_is_said(
    engine: VllmDecodeEngine, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """As a typed error: an internal one would be an id, with a traceback, every few seconds."""

    async def call_workers(llm: Any, method: str, *_: Any, timeout_s: float) -> list[str]:
        return ["", "it has other weights"] if method == failing else ["", ""]

    monkeypatch.setattr(base, "call_workers", call_workers)
    with pytest.raises(UnavailableError, match=r"10\.0\.0\.9:7000: it has other weights"):
        await engine.connect(PEER)


def sampling(engine: VllmDecodeEngine, **fields: Any) -> Any:
    request = DecodeRequest("lease-1", HANDLE, (1, 2, 3), SamplingParams(**fields), seed=2**63 - 1)
    return engine._sampling(request)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    load("vllm.sampling_params")


def test_all_parameters_reach_the_engine(engine: VllmDecodeEngine) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "max_tokens": 20,
        "min_tokens": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    made = sampling(engine, **fields, logit_bias={3: 1.5, 2: -2.0})
    assert {name: getattr(made, name) for name in fields} == fields
    assert (made.seed, made.n, made.logprobs, made.detokenize) == (2**63 - 1, 1, 0, False)
    assert made.logit_bias == {2: -2.0, 3: 1.5}


@pytest.mark.parametrize(
    ("fields", "stops"),
    [
        ({}, {0, 9}),
        ({"stop_token_ids": [5]}, {0, 5, 9}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [9]}, {9}),
    ],
)
def test_stop_tokens_are_explicit(engine: VllmDecodeEngine, fields: dict[str, Any], stops: set[int]) -> None:
    """The end of sequence is one of them: vLLM has no tokenizer here that would know it."""
    made = sampling(engine, **fields)
    assert set(made.stop_token_ids or ()) == stops
    assert made.ignore_eos


def beyond_limits(**fields: Any) -> SamplingParams:
    """As of a router with other limits than the engine's."""
    params = SamplingParams()
    for name, value in fields.items():
        object.__setattr__(params, name, value)
    return params


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"temperature": 2.5}, "temperature", "temperature must be in [0, 2], got 2.5."),
        ({"temperature": 0.001}, "temperature", "the engine would take it for 0.01"),
        ({"top_p": 1.5}, "top_p", "top_p must be in (0, 1], got 1.5."),
        ({"top_k": -2}, "top_k", "top_k must be 0 (disable), or at least 1, got -2."),
        ({"top_k": 1.5}, "top_k", "top_k must be an integer, got float"),
        ({"min_p": 2.0}, "min_p", "min_p must be in [0, 1], got 2.0."),
        ({"presence_penalty": 3.0}, "presence_penalty", "presence_penalty must be in [-2, 2], got 3.0."),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty must be greater than zero, got 0.0."),
        ({"min_tokens": 17}, "min_tokens", "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"logit_bias": ((256, 1.0),)}, "logit_bias", "must be in [0, 256)"),
        ({"stop_token_ids": (256,)}, "stop_token_ids[0]", "must be in [0, 256)"),
        (
            {"stop_token_ids": tuple(range(1, 129)), "min_tokens": 1},
            "stop_token_ids",
            "must be at most 126, since the model has 2 end tokens of its own and the engine room for 128",
        ),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_by_name(
    engine: VllmDecodeEngine, fields: dict[str, Any], field: str, limit: str
) -> None:
    """Nothing of it reaches the engine, which may end of it, and it is no fault of the node's."""
    with pytest.raises(InvalidArgumentError) as caught:
        await engine.start(DecodeRequest("lease-1", HANDLE, (1, 2, 3), beyond_limits(**fields), seed=1))
    assert (caught.value.field, caught.value.limit) == (f"sampling_params.{field}", limit)


async def test_a_seed_that_the_engine_cannot_hold_is_refused(engine: VllmDecodeEngine) -> None:
    with pytest.raises(InvalidArgumentError, match="seed"):
        await engine.start(DecodeRequest("lease-1", HANDLE, (1, 2, 3), SamplingParams(), seed=2**63))


def test_the_handle_becomes_a_read(engine: VllmDecodeEngine) -> None:
    transfer = sampling(engine).extra_args["kv_transfer_params"]
    assert (transfer["do_remote_prefill"], transfer["do_remote_decode"]) == (True, False)
    assert (transfer["remote_engine_id"], transfer["remote_request_id"]) == ("p0-engine", "prefill-1")
    assert (transfer["remote_block_ids"], transfer["remote_host"], transfer["remote_port"]) == (
        [[4, 5]],
        "127.0.0.1",
        7000,
    )
    assert transfer["corun_owner"] == owner_of(HANDLE)


def test_each_reader_of_shared_kv_has_an_id_of_its_own(engine: VllmDecodeEngine) -> None:
    """vLLM renews the lease of what is read by a set of ids: with one id, the end of one read would end it for all."""
    handle = replace(HANDLE, claim="prefill-2")
    transfer = engine._sampling(DecodeRequest("lease-1", handle, (1, 2, 3), SamplingParams(), seed=1)).extra_args
    assert transfer["kv_transfer_params"]["remote_request_id"] == "prefill-1/prefill-2"


async def test_the_memory_of_a_prefill_node_that_died_is_let_go(
    engine: VllmDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone, ours is not; the first time a read is under way, the second time the engine is stuck."""
    ended, answered = await asyncio.create_subprocess_exec("sleep", "60"), asyncio.Event()
    answers: list[Any] = [[[ended.pid, os.getpid()], []], [True, False], UnavailableError("stuck"), [True, True]]
    asked: list[tuple[Any, ...]] = []

    async def call_workers(llm: Any, *call: Any, timeout_s: float) -> Any:
        asked.append(call)
        answer = answers.pop(0)
        if not answers:
            answered.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(base, "call_workers", call_workers)
    monkeypatch.setattr("decode_node.engine.LET_GO_S", 0.001)
    await engine._note_mapped()
    ended.kill()
    await ended.wait()
    watch = asyncio.create_task(engine._let_go())
    await asyncio.wait_for(answered.wait(), 30.0)
    await asyncio.sleep(0.01)
    watch.cancel()
    assert asked == [("mapped_pids",), *[("unmap", [ended.pid])] * 3], "and never again"
    assert engine._mapped.keys() == {os.getpid()}
