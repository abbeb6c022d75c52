"""The prefill node's self-test, and the test of its freedoms, against models with one flaw each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.loading import load
from tests.stepper import FakeStepper, Flaw


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("prefill_node.certify")


def test_prompts_lie_around_the_edges_of_shapes(module: ModuleType) -> None:
    assert module.lengths(128, (), 1000) == [1, 64, 65, 127, 128, 129]
    assert module.lengths(128, (16, 32, 64), 1000) == [1, 32, 33, 127, 128, 129]
    assert module.lengths(128, (), 100) == [1, 64, 65]


def test_a_model_without_a_flaw_is_certified(module: ModuleType) -> None:
    stepper = FakeStepper()
    assert module.certify(stepper, 64, (), None) == ""
    assert {*stepper.told} == {0}, "the worker was not told that each step holds prompts"


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


LENGTHS = (1, 32, 33, 63, 64, 65)
"""What is tested with a chunk of 64 tokens."""
OTHER = "another prompt"
MANY, FEW = 200, 21
"""Numbers of KV blocks. With few, three groups of prompts run one after the other."""
BLOCKS = pytest.mark.parametrize("blocks", [MANY, FEW], ids=["many", "few"])


@pytest.mark.parametrize(
    ("blocks", "groups"),
    [(MANY, [LENGTHS]), (FEW, [LENGTHS[:3], LENGTHS[3:5], LENGTHS[5:]])],
    ids=["many", "few"],
)
def test_all_prompts_whose_kv_has_room_share_the_other_prompt(
    module: ModuleType, blocks: int, groups: Sequence[Sequence[int]]
) -> None:
    stepper = FakeStepper(num_blocks=blocks)
    assert module.certify(stepper, 64, (), None) == ""
    expected = list[str]()
    for names in ([f"a prompt of {length} tokens" for length in group] for group in groups):
        expected += [*names, OTHER, *reversed(names)]
    steps = [name for step in stepper.steps for name in step]
    assert [name for name, _ in itertools.groupby(steps)] == expected
    assert steps.count(OTHER) == 2 * len(groups), "it is a token longer than a chunk, as the longest prompt is"


@BLOCKS
@pytest.mark.parametrize("length", LENGTHS)
def test_the_kv_blocks_of_each_length_are_compared(module: ModuleType, length: int, blocks: int) -> None:
    def flaw(row: int, batch: list[Any], sequence: Any) -> Any:
        return sequence.blocks[0] if len(sequence.prompt) == length else None

    found = module.certify(FakeStepper(flaw=flaw, num_blocks=blocks), 64, (), None)
    assert f"a prompt of {length} tokens differs" in found


def left_by_others(leak: str, length: int) -> Flaw:
    """Return a flaw by which what ran before leaks into prompts of this length alone."""
    ran: list[tuple[int, ...]] = [()]
    places: list[int] = []  # The tokens of the last prompt that was as long, at each place.

    def flaw(row: int, batch: list[Any], sequence: Any) -> Any:
        end = len(sequence.prompt)
        found = {"the last one": ran[-1], "the longest": max(map(len, ran)), "behind its end": tuple(places[end:])}
        places[:end] = sequence.prompt
        if sequence.computed + 64 >= end:
            ran.append(sequence.prompt)
        return found[leak] if end == length else None

    return flaw


@BLOCKS
@pytest.mark.parametrize(
    ("leak", "lengths"),
    # Nothing is as long as the longest prompt, and what an earlier group had beside it stays the longest.
    [("the last one", LENGTHS), ("behind its end", LENGTHS[:-1]), ("the longest", LENGTHS[:3])],
)
def test_what_other_prompts_leave_behind_is_found_at_each_length(
    module: ModuleType, leak: str, lengths: Sequence[int], blocks: int
) -> None:
    for length in lengths:
        found = module.certify(FakeStepper(flaw=left_by_others(leak, length), num_blocks=blocks), 64, (), None)
        assert f"a prompt of {length} tokens differs" in found


# The freedoms.

LIMITS = {"chunk": 32, "budget": 96, "sequences": 6, "longest": 164, "buckets": (16, 32)}


def rows(row: int, batch: list[Any], sequence: Any) -> Any:
    return len(batch)


def chunk_start(row: int, batch: list[Any], sequence: Any) -> Any:
    return sequence.computed % 32


def company_only_if_cut(row: int, batch: list[Any], sequence: Any) -> Any:
    """Neither packed prompts in the contract's chunks nor cut ones alone show this."""
    return len(batch) > 1 and sequence.computed % 32 != 0


def refused(module: ModuleType, wanted: Sequence[str] = ("packed", "chunks"), **model: Any) -> dict[str, str]:
    stepper = FakeStepper(by_position=True, num_blocks=2000, **model)
    limits = load("prefill_node.scenes").Limits(**LIMITS)
    found: dict[str, str] = module.Freedoms(stepper, limits, None).refused(wanted)
    return found


@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
def test_a_model_without_a_flaw_has_all_freedoms(module: ModuleType, stage: str) -> None:
    assert refused(module, stage=stage) == {"packed": "", "chunks": ""}


@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
def test_a_model_whose_bits_follow_the_number_of_rows_may_not_pack(module: ModuleType, stage: str) -> None:
    found = refused(module, flaw=rows, stage=stage)
    assert "a prompt of 1 tokens, 3 prompts in a step of 32, differs first in " in found["packed"]
    assert found["chunks"] == ""  # A prompt alone is one row of the fake, however it is cut.


@pytest.mark.parametrize("stage", ["kv", "hidden"])
def test_a_model_whose_bits_follow_chunks_may_pack_but_not_cut(module: ModuleType, stage: str) -> None:
    found = refused(module, flaw=chunk_start, stage=stage)
    assert found["packed"] == ""
    assert "cut into pieces of" in found["chunks"]


def test_what_only_cut_prompts_in_company_show_refuses_chunks(module: ModuleType) -> None:
    found = refused(module, flaw=company_only_if_cut, stage="kv")
    assert found["packed"] == ""
    assert "in the same steps" in found["chunks"]
    assert refused(module, ["chunks"], flaw=company_only_if_cut, stage="kv") == {"chunks": ""}


def test_a_test_that_would_notice_nothing_grants_nothing(module: ModuleType) -> None:
    """Dummy weights make every way to compute look the same."""
    void = load("corun.node.certificate").VOID
    assert refused(module, is_dead=True) == {"packed": void, "chunks": void}
    assert refused(module, ["packed"], is_dead=True) == {"packed": void}
    # A difference shows that the test notices what differs, so no control is needed.
    assert refused(module, is_dead=True, flaw=chunk_start)["packed"] == ""


def test_only_what_is_wanted_is_tested(module: ModuleType) -> None:
    assert refused(module, ["chunks"], flaw=rows) == {"chunks": ""}
    assert set(refused(module, ["packed"], flaw=rows)) == {"packed"}


def test_all_ranks_stop_at_a_difference_that_one_sees(module: ModuleType) -> None:
    """Else the others would wait for it in their next step."""
    stepper = FakeStepper(by_position=True, num_blocks=2000)
    stepper.agree = lambda finding: "another rank found a difference"  # type: ignore[method-assign]
    limits = load("prefill_node.scenes").Limits(**LIMITS)
    test = module.Freedoms(stepper, limits, None)
    assert test.refused(["packed", "chunks"]) == dict.fromkeys(("packed", "chunks"), stepper.agree(""))
    assert test.comparisons == 4  # the first scene of each kind: three prompts, and one
    assert {*stepper.told} == {0}, "the worker was not told that each step holds prompts"


def test_prompts_under_test_have_kv_blocks_of_their_own_and_room(module: ModuleType) -> None:
    """A model that reads what its last block held before, which is the same in every run."""
    scenes = load("prefill_node.scenes")
    limits = scenes.within(scenes.Limits(**LIMITS), 60, 16)
    stepper = FakeStepper(by_position=True, num_blocks=61)
    assert module.Freedoms(stepper, limits, None).refused(["packed", "chunks"]) == {"packed": "", "chunks": ""}
