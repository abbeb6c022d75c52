"""The prefill node's self-test against models with one flaw each."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.loading import load
from tests.stepper import FakeStepper, Flaw


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("prefill_node.worker")


def test_prompts_lie_around_the_edges_of_shapes(module: ModuleType) -> None:
    assert module.lengths(128, (), 1000) == [1, 64, 65, 127, 128, 129]
    assert module.lengths(128, (16, 32, 64), 1000) == [1, 32, 33, 127, 128, 129]
    assert module.lengths(128, (), 100) == [1, 64, 65]


def test_a_model_without_a_flaw_is_certified(module: ModuleType) -> None:
    assert module.certify(FakeStepper(), 64, (), None) == ""


FLAWS: dict[str, Flaw] = {
    "the KV blocks": lambda row, batch, sequence: sequence.blocks[0],
    "what ran before": lambda row, batch, sequence: _calls.append(0) or len(_calls),  # type: ignore[func-returns-value]
}
_calls: list[int] = []


@pytest.mark.parametrize("leak", FLAWS)
@pytest.mark.parametrize("stage", ["kv", "hidden", "logits"])
def test_what_leaks_into_a_prompt_is_found(module: ModuleType, leak: str, stage: str) -> None:
    found = module.certify(FakeStepper(flaw=FLAWS[leak], stage=stage), 64, (), None)
    assert "a prompt of 1 tokens differs" in found
