"""The decode node's self-test against models with one flaw each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.loading import load
from tests.stepper import FakeStepper, Flaw, no_flaw

ROWS = 16


def number_of(number: int) -> int:
    """The style of sampling of a sequence, where it does not matter."""
    return number


def certify(stepper: FakeStepper, rows: int = ROWS, sampling: Any = number_of, piece: int = 0) -> str:
    return str(load("decode_node.certify").Certification(stepper, rows, sampling, piece).check(rows))


def test_every_row_is_busy_in_some_step_and_rows_move() -> None:
    stepper = FakeStepper()
    assert certify(stepper) == ""
    assert max(map(len, stepper.steps)) == ROWS
    assert min(map(len, stepper.steps)) == 1
    rows_of_probe = {step.index("probe-0") for step in stepper.steps if "probe-0" in step}
    assert len(rows_of_probe) > 2
    assert {*stepper.told} == {None}, "no step holds prompts"


@pytest.mark.parametrize(("rows", "scenes"), [(1, 1), (2, 3), (4, 4), (6, 3), (7, 4)])
def test_no_scene_is_played_again_where_few_rows_leave_no_room_for_another(rows: int, scenes: int) -> None:
    """Beside groups of as many probes as there are rows no neighbour fits, and one row is always alone."""
    stepper = FakeStepper(num_blocks=2000)
    made = load("decode_node.certify").Certification(stepper, ROWS, number_of)
    before = made.comparisons
    assert made.check(rows) == ""
    assert made.comparisons - before == scenes * 6


FLAWS: dict[str, Flaw] = {
    "the number of rows": lambda row, batch, sequence: len(batch),
    "the row": lambda row, batch, sequence: row,
    "a neighbour's prompt": lambda row, batch, sequence: batch[row - 1].prompt[0],
    "the longest neighbour": lambda row, batch, sequence: max(s.computed for s in batch),
    "the KV blocks": lambda row, batch, sequence: sequence.blocks[0],
}


@pytest.mark.parametrize("leak", FLAWS)
def test_what_leaks_into_a_row_is_found(leak: str) -> None:
    assert "probe-" in certify(FakeStepper(flaw=FLAWS[leak]))


@pytest.mark.parametrize("rows", [2, 32, 64])
def test_a_last_row_that_has_other_bits_is_found(rows: int) -> None:
    """Kernels compute the rows that fill no whole tile in another way, as fp32 products on a CPU with 32 rows."""
    stepper = FakeStepper(flaw=lambda row, batch, sequence: row == rows - 1, num_blocks=900)
    assert "all rows busy: probe-" in certify(stepper, rows)


STAGES = {"kv": "the KV of layer 0 of 1", "hidden": "hidden state", "logits": "lm_head", "logprob": "log probability"}


@pytest.mark.parametrize(("stage", "words"), STAGES.items())
def test_it_names_the_first_stage_that_differs(stage: str, words: str) -> None:
    assert words in certify(FakeStepper(flaw=FLAWS["the number of rows"], stage=stage))


@pytest.mark.parametrize(("rows", "num_blocks"), [(1, 200), (2, 200), (3, 200), (ROWS, ROWS + 1)])
def test_few_rows_and_little_room_suffice(rows: int, num_blocks: int) -> None:
    assert certify(FakeStepper(num_blocks=num_blocks), rows) == ""


def test_less_than_a_block_for_each_slot_is_refused_in_words() -> None:
    with pytest.raises(RuntimeError, match=f"{ROWS} slots have {ROWS - 1} KV blocks and need {ROWS}: "):
        certify(FakeStepper(num_blocks=ROWS))


PIECE = 64
"""The tokens of a piece, where attention cuts long sequences. In 62 blocks, sequences that are not to be cut are
shorter."""


def lengths_of(flaw: Flaw, **sizes: int) -> tuple[str, set[int]]:
    """What the test finds where attention cuts by `PIECE`, and the tokens that its probes have read in some step."""
    read: set[int] = set()

    def noted(row: int, batch: list[Any], sequence: Any) -> Any:
        if sequence.name.startswith("probe-"):
            read.add(sequence.computed + 1)
        return flaw(row, batch, sequence)

    return certify(FakeStepper(flaw=noted, **sizes), piece=PIECE), read


def cut_by_the_batch(row: int, batch: list[Any], sequence: Any) -> Any:
    """Attention cuts a long sequence into other pieces if the batch is large. Short ones are never cut."""
    return len(batch) if sequence.computed >= 2 * PIECE else None


def test_sequences_that_attention_cuts_are_tested_around_the_edges_of_their_pieces() -> None:
    """Only those can show a cut that looks at the batch: all others are shorter than a piece."""
    finding, read = lengths_of(no_flaw, num_blocks=63, max_model_len=999)
    assert finding == ""
    assert {PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1} <= read
    assert "probe-7 differs in step 2" in lengths_of(cut_by_the_batch, num_blocks=63, max_model_len=999)[0]


@pytest.mark.parametrize(
    ("sizes", "longest"),
    [
        ({"num_blocks": 63, "max_model_len": 2 * PIECE + 2}, PIECE + 2),  # The model has no longer sequences.
        ({"num_blocks": 63, "max_model_len": PIECE}, PIECE - 1),
        ({"num_blocks": 24, "max_model_len": 999}, PIECE + 2),  # More than half of the KV is left to the others.
        ({"num_blocks": ROWS + 1, "max_model_len": 999}, 15),
    ],
)
def test_sequences_are_cut_as_far_as_model_and_kv_allow(sizes: dict[str, int], longest: int) -> None:
    finding, read = lengths_of(no_flaw, **sizes)
    assert (finding, max(read) <= longest) == ("", True)
    assert (PIECE + 1 in read) == (longest > PIECE)


@pytest.mark.parametrize("fewer", [1, 2, 4, 5, 6, 7, ROWS // 2])
@pytest.mark.parametrize("bits_depend_on_rows", [False, True])
def test_fewer_rows_are_compared_with_all_slots(bits_depend_on_rows: bool, fewer: int) -> None:
    """There are more probes than the smallest steps have rows; no step may have more rows than it is certified for."""
    rows_of_a_step = ROWS

    def flaw(row: int, batch: list[Any], sequence: Any) -> Any:
        return rows_of_a_step if bits_depend_on_rows else None

    stepper = FakeStepper(flaw=flaw)
    test = load("decode_node.certify").Certification(stepper, ROWS, number_of)
    assert test.check(ROWS) == ""
    stepper.steps.clear()
    rows_of_a_step = fewer
    finding = test.check(fewer)
    assert ("probe-0 differs in step 0" in finding) == bits_depend_on_rows
    assert max(map(len, stepper.steps)) == (1 if bits_depend_on_rows else fewer)
    probes = {name for step in stepper.steps for name in step if name.startswith("probe")}
    assert bits_depend_on_rows or probes == {f"probe-{number}" for number in range(6)}, "in groups, if need be"


def test_every_style_of_sampling_is_probed() -> None:
    """The style after the last probe's is the first one's again."""
    style = load("decode_node.worker").sampling_style
    probes = load("decode_node.certify").PROBES
    kinds = [str({**msgspec.structs.asdict(style(number)), "seed": 0}) for number in range(probes + 1)]
    assert len(set(kinds)) == probes
    assert kinds[0] == kinds[probes]


def filters(batch: list[Any]) -> tuple[bool, bool]:
    """What vLLM compiles its filter of logits by: whether any row of the step has top-k, and whether any has top-p."""
    styles = [sequence.sampling for sequence in batch]
    return any(style.top_k > 0 for style in styles), any(style.top_p < 1 for style in styles)


@pytest.mark.parametrize("own", [(False, True), (True, False)], ids=["top_p only", "top_k only"])
@pytest.mark.parametrize("rows", [3, ROWS])
def test_a_filter_that_is_compiled_for_the_neighbours_is_found(own: tuple[bool, bool], rows: int) -> None:
    """A row with one of the two filters, whose bits depend on whether a neighbour has the other one."""

    def flaw(row: int, batch: list[Any], sequence: Any) -> Any:
        return filters(batch) if filters([sequence]) == own else None

    style = load("decode_node.worker").sampling_style
    assert "probe-" in certify(FakeStepper(flaw=flaw, stage="logprob"), rows, style)
    assert certify(FakeStepper(), rows, style) == ""


def test_the_control_sees_other_splits_and_a_dead_one_does_not() -> None:
    def control(stepper: FakeStepper) -> str:
        return str(load("decode_node.certify").Certification(stepper, ROWS, number_of).control())

    assert "attention with other splits: probe-0 differs in step 0" in control(FakeStepper())
    assert control(FakeStepper(is_dead=True)) == ""


def test_one_row_is_long_enough_for_the_control_where_slots_leave_little_room_for_each() -> None:
    """With as many slots as here all others are short, and the control cuts none of them."""
    stepper = FakeStepper(num_blocks=3000, max_model_len=8192, cut_from=700)
    certification = load("decode_node.certify").Certification(stepper, 256, number_of)
    assert "attention with other splits: probe-5 differs in step 0" in certification.control()


class Worker:
    """A decode worker around a fake stepper: what the test of smaller steps needs of it."""

    def __init__(self, stepper: FakeStepper) -> None:
        self.slots = 48
        self.piece = 0
        self.rows = self.slots
        self.stepper = stepper

    def use(self, *sizes: int) -> None:
        self.rows = sizes[-1]

    def versions(self) -> list[str]:
        return ["vllm 0.26.0"]


def certified(monkeypatch: pytest.MonkeyPatch, **model: Any) -> dict[str, Any]:
    """What the worker's own test of smaller steps finds. Its sizes are 16 and 32."""
    module = load("decode_node.worker")
    worker = Worker(FakeStepper(num_blocks=700, **model))
    if (flaw := model.get("flaw")) is not None:
        worker.stepper.flaw = lambda row, batch, sequence: flaw(worker.rows)
    monkeypatch.setattr(module, "Stepper", lambda worker: worker.stepper)
    monkeypatch.setattr(module, "sampling_style", number_of)
    monkeypatch.setattr(module, "smaller_than", lambda slots: (16, 32))
    for name in ("_finding", "_control"):
        monkeypatch.setattr(Worker, name, getattr(module.FixedShapeWorker, name), raising=False)
    found: dict[str, Any] = module.FixedShapeWorker.certify_freedoms(worker, ["rows"])
    assert worker.rows == worker.slots
    return found


def test_smaller_steps_need_a_control_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = certified(monkeypatch)
    assert (found["sizes"], found["refused"]) == ([16, 32], {"rows": ""})
    assert found["evidence"]["steps"] > 100
    assert found["evidence"]["comparisons"] == 6 * (
        2 * 4 + 1
    )  # probes, in four scenes of each size, and in the control
    void = certified(monkeypatch, is_dead=True)
    assert (void["sizes"], void["refused"]) == ([], {"rows": load("corun.node.certificate").VOID})


def test_a_size_that_differs_is_left_out_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's bits differ at 16 rows. This is a difference that was seen, so a dead control does not matter."""
    found = certified(monkeypatch, flaw=lambda rows: rows == 16 or None, is_dead=True)
    assert (found["sizes"], found["refused"]) == ([32], {"rows": ""})
    found = certified(monkeypatch, flaw=lambda rows: rows < 48 or None)
    assert found["sizes"] == []
    assert found["refused"]["rows"].startswith("steps of 16 rows: alone, in other KV blocks: probe-0 differs in step 0")
