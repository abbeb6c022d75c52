"""Every sampling parameter's limits against those of the pinned engine: what we accept, it accepts and leaves as it is.

A limit that is wider than the engine's costs whole prefills and ends as a node's fault; a value that the engine changes
gives one output two digests. The engine's verdict is asked of vLLM itself, on both sides of each of our limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.errors import InvalidArgumentError
from corun.node.vllm.start import EngineFacts
from corun.params import MAX_LOGIT_BIAS, SamplingParams, check_vocabulary
from decode_node.engine import MAX_HELD_BACK, engine_params
from tests.loading import load

VOCAB = 256
EOS = (0, 9)
FACTS = EngineFacts(
    kv_blocks=4, block_size=16, step_tokens=64, max_model_len=512, vocab_size=VOCAB, eos_token_ids=EOS, finding=""
)
NAN, INF = math.nan, math.inf
REFUSES, CHANGES, TAKES = "refuses", "changes", "takes"
TINY = math.ulp(0.0)


def above(value: float) -> float:
    return math.nextafter(value, INF)


def below(value: float) -> float:
    return math.nextafter(value, -INF)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """One field: values that we accept, at both limits, and values just beyond them with the engine's verdict.

    Where the verdict is "takes", we are stricter than the engine; `why` says why that is meant.
    """

    accepted: Sequence[Any]
    refused: Mapping[Any, str]
    why: str = ""
    fixed: tuple[Any, ...] = ()
    """What the engine is always given; empty: what the client gave."""


LIMITS: dict[str, Limits] = {
    "structured_outputs": Limits(
        accepted=[(), ("json", "{}"), ("regex", "a+"), ("choice", '["a", "b"]'), ("grammar", 'root ::= "a"')],
        refused={("json",): TAKES, ("wrong", "x"): TAKES},
        why="vLLM reads a constraint later",
    ),
    "temperature": Limits(
        accepted=[0, 0.01, above(0.01), 1, below(2), 2],
        refused={
            TINY: CHANGES,
            0.001: CHANGES,
            below(0.01): CHANGES,
            -TINY: REFUSES,
            above(2): REFUSES,
            2.5: REFUSES,
            NAN: REFUSES,
            INF: REFUSES,
            -INF: REFUSES,
        },
    ),
    "top_p": Limits(
        accepted=[1e-9, 0.5, below(1), 1],
        refused={0: REFUSES, -TINY: REFUSES, above(1): REFUSES, NAN: REFUSES, TINY: TAKES, 1e-46: TAKES},
        why="runners hold it in fp32, where it would become 0",
    ),
    "top_k": Limits(
        accepted=[0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1],
        refused={-2: REFUSES, -1: TAKES, 2**31: TAKES},
        why="-1 is another word for 0, and the wire holds 32 bits",
    ),
    "min_p": Limits(accepted=[0, TINY, 1], refused={-TINY: REFUSES, above(1): REFUSES, NAN: REFUSES}),
    "max_tokens": Limits(
        accepted=[1, 2**32 - 1], refused={0: REFUSES, -1: REFUSES, 2**32: TAKES}, why="the wire holds 32 bits"
    ),
    "min_tokens": Limits(accepted=[0, 16], refused={-1: REFUSES, 17: REFUSES}),  # At most max_tokens.
    "stop": Limits(
        accepted=[(), ("x" * 256,) * 16], refused={("",): REFUSES, ("x" * 257,): TAKES}, why="the router's", fixed=([],)
    ),
    "stop_token_ids": Limits(
        accepted=[(), (0,), (VOCAB - 1,), tuple(range(64))],
        refused={("1",): REFUSES, tuple(range(65)): TAKES, (-1,): TAKES},
        why="those and the model's own end tokens are at most 128, of which each is a token",
    ),
    "ignore_eos": Limits(accepted=[False, True], refused={1: TAKES}, why="must be a boolean", fixed=(True,)),
    "presence_penalty": Limits(accepted=[-2, 2], refused={below(-2): REFUSES, above(2): REFUSES, NAN: REFUSES}),
    "frequency_penalty": Limits(accepted=[-2, 2], refused={below(-2): REFUSES, above(2): REFUSES, NAN: REFUSES}),
    "repetition_penalty": Limits(
        accepted=[0.01, 1, 2],
        refused={
            0: REFUSES,
            -1: REFUSES,
            NAN: REFUSES,
            INF: REFUSES,
            below(0.01): TAKES,
            1e-40: TAKES,
            above(2): TAKES,
        },
        why="1/penalty, and what it multiplies, must be finite in fp32",
    ),
    "logit_bias": Limits(
        accepted=[{}, {0: -100.0, VOCAB - 1: 100.0}, dict.fromkeys(range(VOCAB), -100.0)],
        refused={((0, above(100)),): TAKES, ((0, NAN),): TAKES, ((-1, 0.0),): REFUSES, ((VOCAB, 0.0),): REFUSES},
        why="beyond 100 a bias only forces or forbids, and sums must be finite",
    ),
    "logprobs": Limits(accepted=[False, True], refused={5: TAKES}, why="the worker gives it of all", fixed=(None,)),
    "n": Limits(
        accepted=[1, 256], refused={0: REFUSES, 257: TAKES}, why="a sample is a request of its own", fixed=(1,)
    ),
}


OURS = "top_logprobs"
"""The field that vLLM has no name for: our own worker computes alternatives."""


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    load("vllm.sampling_params")


def assert_unchanged(params: SamplingParams) -> None:
    """The engine holds what the client asked for; with temperature 0 it drops the filters, which then do nothing."""
    made = engine_params(params, 1, FACTS, {})
    given = {name: limits.fixed[0] for name, limits in LIMITS.items() if limits.fixed}
    given |= {field.name: getattr(params, field.name) for field in fields(params) if field.name not in given}
    del given[OURS]
    if params.greedy:
        given |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    given["stop_token_ids"] = sorted({*params.stop_token_ids, *(() if params.ignore_eos else EOS)})
    given["logit_bias"] = dict(params.logit_bias) or None
    constraint = given.pop("structured_outputs") or None
    key = constraint and load("vllm.v1.structured_output.request").get_structured_output_key(made.structured_outputs)
    assert constraint == (key and (key[0].name.lower(), key[1]))
    assert {name: getattr(made, name) for name in given} == given


def verdict(name: str, value: Any) -> str:
    """What vLLM says to this value, without us."""
    vllm = load("vllm.sampling_params")
    value = {"stop": list, "stop_token_ids": list, "logit_bias": dict}.get(name, lambda same: same)(value)
    try:
        made = vllm.SamplingParams(**{name: value})
        made._validate_logit_bias(SimpleNamespace(get_vocab_size=lambda: VOCAB))
    except (ValueError, TypeError):
        return REFUSES
    return TAKES if getattr(made, name) == value or name == "logit_bias" else CHANGES


def test_every_field_is_compared() -> None:
    assert set(LIMITS) == {field.name for field in fields(SamplingParams)} - {OURS}


@pytest.mark.parametrize("name", LIMITS)
def test_what_we_accept_the_engine_accepts_unchanged(name: str) -> None:
    for value in LIMITS[name].accepted:
        params = SamplingParams(**{name: value})
        check_vocabulary(params, VOCAB)
        assert_unchanged(params)


@pytest.mark.parametrize("name", LIMITS)
def test_what_the_engine_refuses_or_changes_we_refuse(name: str) -> None:
    limits = LIMITS[name]
    for value, expected in limits.refused.items():
        with pytest.raises(InvalidArgumentError) as caught:
            check_vocabulary(SamplingParams(**{name: value}), VOCAB)
        assert caught.value.field.startswith(f"sampling_params.{name}")
        assert verdict(name, value) == expected, value
    assert bool(limits.why) is (TAKES in limits.refused.values() or bool(limits.fixed))


def test_the_gpu_runner_has_room_for_all_that_we_accept() -> None:
    """It ends its engine otherwise (vllm/v1/worker/gpu/sample/logit_bias.py)."""
    runner = load("vllm.v1.worker.gpu.sample.logit_bias")
    assert runner.MAX_NUM_LOGIT_BIAS_TOKENS >= MAX_LOGIT_BIAS
    assert runner.MAX_NUM_STOP_TOKEN_IDS == MAX_HELD_BACK


LEGAL = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.just(0.0) | st.floats(0.01, 2),
        "top_p": st.floats(1e-9, 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "top_k": st.integers(0, 2**31 - 1),
        "max_tokens": st.integers(16, 2**32 - 1),
        "min_tokens": st.integers(0, 16),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=64),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=20),
    },
)


@settings(max_examples=100)
@given(LEGAL)
def test_so_do_all_together(given_fields: dict[str, Any]) -> None:
    params = SamplingParams(**given_fields)
    assert_unchanged(params)
