"""The CPU engine's sampler is total: no parameters and no logits end it, and a bad row touches no other row.

It runs as in the engine: over vLLM's own biases, minimum lengths and penalties, which come before the draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.sampling import IDLE, Draw, sample
from tests.loading import load

VOCAB = 32
PROMPT = [5, 6, 7]
QUIET: dict[str, Any] = {"temperature": 1.0}
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> Iterator[None]:
    """Loaded once; one thread, since waking a second takes far longer than these tiny tensors do."""
    load("decode_node.worker")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def requested(fields: dict[str, Any]) -> Any:
    """vLLM's parameters, also those that it would refuse."""
    params = load("vllm.sampling_params").SamplingParams(seed=7)
    for name, value in fields.items():
        setattr(params, name, value)
    params._all_stop_token_ids = set(params.stop_token_ids)
    return params


def column(batch: Sequence[Any], name: str) -> torch.Tensor:
    return torch.tensor([getattr(params, name) for params in batch], dtype=torch.float32)


def metadata(batch: Sequence[Any], outputs: list[list[int]]) -> Any:
    """As the runner makes it for these requests, all of whose prompts are `PROMPT`."""
    processors = load("vllm.v1.sample.logits_processor.builtin")
    update = SimpleNamespace(
        batch_size=len(batch),
        added=[(i, params, PROMPT, outputs[i]) for i, params in enumerate(batch)],
        removed=[],
        moved=[],
    )
    used = [
        processors.LogitBiasLogitsProcessor(None, torch.device("cpu"), False),
        processors.MinTokensLogitsProcessor(None, torch.device("cpu"), False),
    ]
    for processor in used:
        processor.update_state(update)
    return load("vllm.v1.sample.metadata").SamplingMetadata(
        temperature=None,
        all_greedy=False,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT] * len(batch)),
        frequency_penalties=column(batch, "frequency_penalty"),
        presence_penalties=column(batch, "presence_penalty"),
        repetition_penalties=column(batch, "repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=load("vllm.v1.sample.logits_processor").LogitsProcessors(used),
    )


def drawn(logits: torch.Tensor, *fields: dict[str, Any], masks: Any = None) -> list[tuple[int, float]]:
    """Each request's token and log probability in one step; see `stepped`."""
    output = stepped(logits, *fields, masks=masks)
    tokens = output.sampled_token_ids[:, 0].tolist()
    return list(zip(tokens, output.logprobs_tensors.logprobs[:, 0].tolist(), strict=True))


def stepped(logits: torch.Tensor, *fields: dict[str, Any], masks: Any = None) -> Any:
    """The output of one step for these requests; the last row of the logits belongs to nobody.

    masks: vLLM's `GrammarOutput`, as the runner gets it.
    """
    batch = [requested(each) for each in fields]
    outputs = [[9] * 3 for _ in batch]
    names = [str(i) for i in range(len(batch))]
    states = {
        name: SimpleNamespace(sampling_params=params, output_token_ids=output)
        for name, params, output in zip(names, batch, outputs, strict=True)
    }
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=len(batch), req_ids=names), requests=states)
    sampler = load("decode_node.worker").FixedRowSampler(runner)
    sampler.grammar_output = masks
    return sampler(logits, metadata(batch, outputs))


def asks(count: int) -> dict[str, Any]:
    return {**QUIET, "extra_args": {"kv_transfer_params": {"corun_tops": count}}}


def alternatives(output: Any, row: int) -> list[tuple[int, float]]:
    """A row's alternatives, as the scheduler reads them."""
    found = output.logprobs_tensors.tolists()
    numbers = load("decode_node.scheduler").alternatives_of(found, row)
    ids, bits = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    return list(zip(ids, np.array(bits, dtype=np.uint32).view(np.float32).tolist(), strict=True))


def test_a_row_gets_its_alternatives_and_neighbours_that_ask_for_none_get_none() -> None:
    """They are those of the raw logits, with the bits that each token would get if it were drawn, in any company."""
    logits = rows(3)
    log_probabilities = load("corun.node.vllm.logprobs").log_probabilities
    output = stepped(logits.clone(), asks(4), QUIET, {**asks(2), "temperature": 0.5, "logit_bias": {3: 50.0}})
    for row, count in ((0, 4), (2, 2)):
        found = alternatives(output, row)
        assert [token for token, _ in found] == logits[row].argsort(descending=True)[:count].tolist()
        for token, value in found:
            alone = log_probabilities(logits, torch.full((len(logits),), token))[row].item()
            assert value == alone
    assert alternatives(output, 1) == []
    plain = stepped(logits.clone(), QUIET, QUIET, {"temperature": 0.5, "logit_bias": {3: 50.0}})
    assert plain.logprobs_tensors.logprob_token_ids.numel() == 0
    assert torch.equal(output.logprobs_tensors.logprobs[:, :1], plain.logprobs_tensors.logprobs)
    assert torch.equal(output.sampled_token_ids, plain.sampled_token_ids)
    assert alternatives(stepped(logits.clone()[[0, 3]], asks(4)), 0) == alternatives(output, 0)


def test_a_constrained_rows_alternatives_are_of_all_tokens() -> None:
    logits = rows(1)
    words = np.array([[1 << int(logits[0].argmin())]], dtype=np.uint32).view(np.int32)
    masks = SimpleNamespace(structured_output_request_ids=["0"], grammar_bitmask=words)
    assert alternatives(stepped(logits.clone(), asks(3), masks=masks), 0) == alternatives(stepped(logits, asks(3)), 0)


def rows(count: int, seed: int = 0, scale: float = 5.0) -> torch.Tensor:
    """Logits of so many requests and of one row that nobody uses."""
    return torch.randn(count + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_row_draws_by_its_own_seed_and_position() -> None:
    """`drawn` gives every request the seed 7 and three tokens so far."""
    logits = rows(2)
    draw = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7, position=3)
    expected, _ = sample(logits, [draw, draw, IDLE])
    assert [token for token, _ in drawn(logits.clone(), QUIET, QUIET)] == expected[:2].tolist()
    elsewhere, _ = sample(logits, [replace(draw, position=0)] * 2 + [IDLE])
    assert elsewhere[:2].tolist() != expected[:2].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constrained_row_draws_what_it_may_and_tells_the_log_probability_of_all(temperature: float) -> None:
    """Its neighbours draw as they did. The control is the row without its mask, which draws another token."""
    logits, fields = rows(3), {"temperature": temperature}
    free = drawn(logits, *[fields] * 3)
    other = (free[1][0] + 1) % VOCAB
    words = np.array([[1 << other]], dtype=np.uint32).view(np.int32)
    masks = SimpleNamespace(structured_output_request_ids=["1"], grammar_bitmask=words)
    found = drawn(logits, *[fields] * 3, masks=masks)
    assert (found[0], found[2]) == (free[0], free[2])
    assert found[1][0] == other
    unmasked = load("corun.node.vllm.logprobs").log_probabilities(logits, torch.tensor([0, other, 0, 0]))
    assert found[1][1] == unmasked[1].item() < 0


def test_an_infinite_logit_ends_its_request_alone() -> None:
    """1 / 1e-40 is infinite in fp32, so a positive logit of the prompt becomes infinite, and the softmax NaN."""
    poison = {"temperature": 1.0, "repetition_penalty": 1e-40, "logit_bias": {5: 100.0}}
    logits = rows(3)
    before = drawn(logits.clone(), QUIET, QUIET, QUIET)
    after = drawn(logits.clone(), QUIET, poison, QUIET)
    assert (after[0], after[2]) == (before[0], before[2])
    assert 0 <= after[1][0] < VOCAB
    assert math.isnan(after[1][1])


TOKENS = st.integers(0, VOCAB - 1)


def parameters(bias: st.SearchStrategy[float], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return parameters that always have a temperature, and any of the other fields."""
    optional = {
        "logit_bias": st.dictionaries(TOKENS, bias),
        "min_tokens": st.integers(0, 5),
        "stop_token_ids": st.lists(TOKENS, max_size=VOCAB - 1),
    }
    return st.fixed_dictionaries({"temperature": fields.pop("temperature")}, optional={**fields, **optional})


LEGAL = parameters(
    st.floats(-100, 100, width=32),
    temperature=st.just(0.0) | st.floats(0.01, 2),
    top_p=st.floats(1e-9, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
)
ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)
REALS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
ILLEGAL = parameters(ANY, top_k=st.integers(-(2**63), 2**63 - 1), **dict.fromkeys(REALS, ANY))


@settings(max_examples=60)
@given(LEGAL, LEGAL, st.integers(0, 99), st.sampled_from([1e-3, 1.0, 30.0, 1e4, 1e30]))
def test_legal_parameters_draw_from_every_finite_row(
    one: dict[str, Any], other: dict[str, Any], seed: int, scale: float
) -> None:
    for token, logprob in drawn(rows(2, seed, scale), one, other):
        assert 0 <= token < VOCAB
        assert math.isfinite(logprob)


@settings(max_examples=60)
@given(ILLEGAL, LEGAL, st.lists(ANY, min_size=VOCAB, max_size=VOCAB))
def test_nothing_ends_the_sampler_nor_moves_another_row(
    poison: dict[str, Any], other: dict[str, Any], values: list[float]
) -> None:
    """Whatever the parameters of a request and its logits are, its token is one, and the others' bits stay."""
    logits = rows(3)
    before = drawn(logits.clone(), QUIET, QUIET, other)
    for row in (logits[1], torch.tensor(values)):
        logits[1] = row
        after = drawn(logits.clone(), QUIET, poison, other)
        assert (after[0], after[2]) == (before[0], before[2])
        assert 0 <= after[1][0] < VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_row_of_the_model_that_is_not_finite_is_told(
    temperature: float, value: float, filters: dict[str, float]
) -> None:
    for at in (0, 9, VOCAB - 1):
        logits = rows(1)
        logits[0, at] = value
        ((token, logprob),) = drawn(logits, {"temperature": temperature, **filters})
        assert 0 <= token < VOCAB
        assert math.isnan(logprob)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_nothing_is_left_is_told(temperature: float) -> None:
    """Every token is held back until there are enough tokens."""
    fields = {"temperature": temperature, "min_tokens": 4, "stop_token_ids": list(range(VOCAB))}
    ((token, logprob),) = drawn(rows(1), fields)
    assert 0 <= token < VOCAB
    assert math.isnan(logprob)
