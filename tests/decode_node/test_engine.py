"""From vLLM's step outputs to rows, and from our parameters to vLLM's."""

from __future__ import annotations

import asyncio
import math
import os
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.fields import DecodeConfig
from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun.node.kv.handle import owner
from corun.node.kv.handshake import UNDER_WAY
from corun.node.kv.stamps import stamps
from corun.node.vllm import start as base
from corun.node.vllm.start import EngineFacts
from corun.params import SamplingParams
from corun.testing.engines import certificate
from corun.types import FinishReason, KvOwner, NixlEndpoint, NodeRole
from decode_node.engine import VllmDecodeEngine, arguments
from decode_node.service import DecodeRequest, OwnPrompt, StepRow
from tests.handles import a_handle
from tests.loading import load

FACTS = EngineFacts(
    kv_blocks=4, block_size=16, step_tokens=64, max_model_len=512, vocab_size=256, eos_token_ids=(0, 9), finding=""
)
PROMPT = (*range(1, 41),)
OWNERS = KvOwner(request_id="prefill-0", num_blocks=2), KvOwner(request_id="prefill-1", num_blocks=1)
HANDLE = a_handle(PROMPT, block_ids=((4, 5, 6),), owners=OWNERS)


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    load("vllm.v1.engine")


@pytest.fixture
def engine() -> VllmDecodeEngine:
    """An engine whose core keeps what it is asked for."""
    llm, contract = SimpleNamespace(engine_core=SimpleNamespace(asked=[])), None

    async def add_request_async(request: Any) -> None:
        llm.engine_core.asked.append(request)

    llm.engine_core.add_request_async = add_request_async
    return VllmDecodeEngine(llm, FACTS, contract, certificate(NodeRole.DECODE), "own")  # type: ignore[arg-type]


LIVE = 5
"""The number of requests in the steps of these tests."""


def output(name: str, token: int | None = None, logprob: float = 0.0, reason: Any = None) -> Any:
    """What one step gives one request (vllm/v1/engine/__init__.py: EngineCoreOutput)."""
    drawn = [] if token is None else [token, *struct.unpack("<I", struct.pack("<f", logprob)), LIVE]
    return SimpleNamespace(request_id=name, new_token_ids=drawn, finish_reason=reason, stop_reason=None)


def rows_of(engine: VllmDecodeEngine, *outputs: Any) -> list[StepRow]:
    steps: list[tuple[list[StepRow], int]] = []
    engine.on_step = lambda *step: steps.append(step)
    engine.take(list(outputs))
    ((rows, live),) = steps
    assert live == (LIVE if any(output.new_token_ids for output in outputs) else 0)
    return rows


def test_a_step_is_handed_on_whole_with_the_bits_of_log_probabilities(engine: VllmDecodeEngine) -> None:
    value = struct.unpack("<f", struct.pack("<I", 0xBDCCCCCD))[0]
    rows = rows_of(engine, output("a", 7, -0.5), output("b", 8, value))
    assert rows == [StepRow("a", 7, -0.5), StepRow("b", 8, value)]
    assert struct.pack("<f", rows[1].logprob) == struct.pack("<I", 0xBDCCCCCD)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_ends_its_request_alone(engine: VllmDecodeEngine, value: float) -> None:
    """Whatever made it so, on either runner: the token means nothing, and nothing after it does."""
    rows = rows_of(engine, output("a", 7, -1.0), output("b", 8, value), output("c", 9, -0.25))
    detail = "the logits of the next token are not finite"
    assert rows == [
        StepRow("a", 7, -1.0),
        StepRow("b", None, 0.0, FinishReason.ERROR, detail, not_finite=True),
        StepRow("c", 9, -0.25),
    ]


def test_an_end_comes_with_the_last_token_or_alone(engine: VllmDecodeEngine) -> None:
    """Stop and length are ends; all other reasons of vLLM mean that the sample has to run again."""
    ours = {"STOP": FinishReason.STOP, "LENGTH": FinishReason.LENGTH}
    for reason in load("vllm.v1.engine").FinishReason:
        finish = ours.get(reason.name, FinishReason.ERROR)
        detail = "" if reason.name in ours else f"the engine ended the request: {reason}"
        assert rows_of(engine, output("a", 8, -2.0, reason), output("b", reason=reason)) == [
            StepRow("a", 8, -2.0, finish, detail),
            StepRow("b", None, 0.0, finish, detail),
        ]


def test_what_has_neither_a_token_nor_an_end_has_been_read(engine: VllmDecodeEngine) -> None:
    """It is told before the rows of the step, and is no step of its own."""
    told: list[Any] = []
    engine.on_read = told.append
    engine.on_step = lambda rows, live: told.append(rows)
    engine.take([output("b"), output("a", 7, -0.5), output("c")])
    engine.take([output("d")])
    assert told == [["b", "c"], [StepRow("a", 7, -0.5)], ["d"]]


PEER = NixlEndpoint(engine_id="p0-engine", host="10.0.0.9", port=7000, tp_size=1, stamp_addresses=(1,))


@pytest.mark.parametrize("failing", ["connect", "warm"])
async def test_why_a_prefill_node_cannot_be_connected_is_said(
    engine: VllmDecodeEngine, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """As a typed error: an internal one would be an id, with a traceback, every few seconds."""

    under_way = [["", UNDER_WAY]]

    async def call_workers(llm: Any, method: str, *_: Any, timeout_s: float) -> list[str]:
        if under_way:
            return under_way.pop()
        return ["", "it has other weights"] if method == failing else ["", ""]

    monkeypatch.setattr(base, "call_workers", call_workers)
    monkeypatch.setattr("decode_node.engine.CONNECT_POLL_S", 0.001)
    with pytest.raises(UnavailableError, match=r"10\.0\.0\.9:7000: it has other weights"):
        await engine.connect(PEER)


async def test_a_handshake_that_takes_too_long_is_given_up(
    engine: VllmDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call_workers(llm: Any, method: str, *_: Any, timeout_s: float) -> list[str]:
        return ["", UNDER_WAY]

    monkeypatch.setattr(base, "call_workers", call_workers)
    monkeypatch.setattr("decode_node.engine.CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError, match=r"10\.0\.0\.9:7000: the handshake took longer than 0 s"):
        await engine.connect(PEER)


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
        ({"top_k": 1.5}, "top_k", "top_k must be an integer, got float"),
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
        await engine.start(DecodeRequest("/lease-1", HANDLE, PROMPT, beyond_limits(**fields), seed=1))
    assert (caught.value.field, caught.value.limit) == (f"sampling_params.{field}", limit)
    with pytest.raises(InvalidArgumentError, match="seed"):
        await engine.start(DecodeRequest("/lease-1", HANDLE, PROMPT, SamplingParams(), seed=2**63))
    assert engine._llm.engine_core.asked == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ((*PROMPT, 256), 16, r"prompt.token_ids\[40\]"),
        ((1,) * 512, 1, "prompt.token_ids"),
        (PROMPT, 473, "sampling_params.max_tokens"),
    ],
)
async def test_a_prompt_that_no_prefill_of_this_model_computes_is_refused(
    engine: VllmDecodeEngine, prompt: tuple[int, ...], max_tokens: int, field: str
) -> None:
    """A row of a token that the model does not have, or behind its last position, would end the engine."""
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(InvalidArgumentError, match=f"^{field}"):
        await engine.start(DecodeRequest("/lease-1", a_handle(prompt), prompt, params, seed=1))
    assert engine._llm.engine_core.asked == []


def test_a_cpu_cuts_no_row_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "prepare", lambda *args: None)
    config = DecodeConfig(model=str(tiny.ensure()), decode_split="own-length")
    endpoint = NixlEndpoint(engine_id="d0", host="127.0.0.1", port=7000, tp_size=1)
    with pytest.raises(InvalidArgumentError, match="must be none on a CPU") as caught:
        arguments(config, endpoint)
    assert caught.value.field == "decode_split"
    assert arguments(replace(config, decode_split="none"), endpoint).max_num_seqs == config.slots


@pytest.mark.parametrize(("claim", "read"), [("", "prefill-1"), ("prefill-2", "prefill-1/prefill-2")])
async def test_the_handle_becomes_a_read(engine: VllmDecodeEngine, claim: str, read: str) -> None:
    """Each reader of shared KV has an id of its own: vLLM renews the lease of what is read by a set of ids, and with
    one id, the end of one read would end it for all. The blocks must be those of the prefills that computed them."""
    handle = replace(HANDLE, claim=claim)
    owners = [(owner("prefill-0", HANDLE.prefill_node), 2), (owner("prefill-1", HANDLE.prefill_node), 1)]
    await engine.start(DecodeRequest("/lease-1", handle, PROMPT, SamplingParams(), seed=2**63 - 1))
    (asked,) = engine._llm.engine_core.asked
    assert (asked.request_id, asked.prompt_token_ids, asked.sampling_params.seed) == ("/lease-1", [*PROMPT], 2**63 - 1)
    assert asked.sampling_params.extra_args["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p0-engine",
        "remote_request_id": read,
        "remote_block_ids": [[4, 5, 6]],
        "remote_host": "127.0.0.1",
        "remote_port": 7000,
        "tp_size": 1,
        "corun_stamps": stamps(owners, PROMPT, 16),
    }


async def test_a_sample_that_comes_when_the_engine_has_died_is_told_so(engine: VllmDecodeEngine) -> None:
    """Its router then knows of a lost node, and not of one that fails, whose KV it would doubt."""
    died: list[str] = []
    engine.on_death = lambda: died.append("d")

    async def add_request_async(request: Any) -> None:
        raise load("vllm.v1.engine.exceptions").EngineDeadError

    engine._llm.engine_core.add_request_async = add_request_async
    with pytest.raises(UnavailableError, match="the engine died"):
        await engine.start(DecodeRequest("/lease-1", HANDLE, PROMPT, SamplingParams(), seed=1))
    assert died == ["d"]


async def test_of_a_prompt_that_is_not_computed_the_scheduler_learns_which_it_is(engine: VllmDecodeEngine) -> None:
    own = OwnPrompt("prefill-1", HANDLE.prefill_node)
    await engine.start(DecodeRequest("/lease-1", own, PROMPT, SamplingParams(), seed=1))
    (asked,) = engine._llm.engine_core.asked
    assert asked.sampling_params.extra_args["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine.engine_id,
        "remote_request_id": "prefill-1//lease-1",
        "remote_block_ids": [[]],
        "remote_host": "",
        "remote_port": 0,
        "tp_size": 1,
        "corun_own_prompt": ["prefill-1", HANDLE.prefill_node.node_id, HANDLE.prefill_node.generation],
    }


async def test_the_memory_of_a_prefill_node_that_died_is_let_go(
    engine: VllmDecodeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone, ours is not. The first time a read is under way, then the engine is stuck, and then UCX has
    no memory left."""
    ended, answered = await asyncio.create_subprocess_exec("sleep", "60"), asyncio.Event()
    answers: list[Any] = [
        [""],
        [""],
        [[ended.pid, os.getpid()], []],
        [True, False],
        UnavailableError("stuck"),
        RuntimeError("Call to collective_rpc method failed"),
        [True, True],
    ]
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
    await engine.connect(PEER)
    ended.kill()
    await ended.wait()
    watch = asyncio.create_task(engine._let_go())
    await asyncio.wait_for(answered.wait(), 30.0)
    await asyncio.sleep(0.01)
    watch.cancel()
    assert asked[2:] == [("mapped_pids",), *[("unmap", [ended.pid])] * 4], "and never again"
    assert engine._mapped.keys() == {os.getpid()}
