"""The test of `mixed` against models with one flaw each, and what a worker grants by it."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corun.node.certificate import VOID
from tests.loading import load
from tests.stepper import FakeStepper, Flaw, no_flaw

SLOTS = 8
KV = "the KV of layer 0 of 1"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return load("colocated_node.certify")


def a_model(flaw: Flaw = no_flaw, **sizes: Any) -> FakeStepper:
    return FakeStepper(**{"flaw": flaw, "by_position": True, "num_blocks": 900, "max_model_len": 9999, **sizes})


def is_prompt(sequence: Any) -> bool:
    return names_prompt(sequence.name)


def names_prompt(name: str) -> bool:
    return name.startswith(("prompt-", "alone"))


def certify(module: ModuleType, model: FakeStepper, tokens: int = 2048, **room: Any) -> str:
    beside = module.Room(**{"tokens": tokens, "sequences": 8, "chunk": tokens, **room})
    test = module.MixedCertification(model, SLOTS, lambda number: number, beside)
    found: str = test.difference(SLOTS)
    assert test.steps == len(model.steps)
    return found


def test_rows_and_prompts_that_ignore_each_other_may_share_steps(module: ModuleType) -> None:
    """All lengths of prompts run, beside all slots and fewer rows, which move; and the worker is told of each step
    whether it holds a prompt."""
    model = a_model()
    assert certify(module, model) == ""
    held = [[*map(names_prompt, step)] for step in model.steps]
    assert model.told == [step.count(False) if any(step) else None for step in held]
    assert {SLOTS, 4, 1, None} <= {*model.told}
    assert model.steps.count(["alone"]) == 2 + len(module.LENGTHS)  # The two shortest also beside rows alone.


SHORT = [{(16, 0)}, {(336, 0)}]


@pytest.mark.parametrize(
    ("room", "beside"),
    [
        ({}, [*SHORT, {(16, 0), (336, 0), (1008, 0)}, {(2048, 0)}]),
        ({"sequences": 2}, [*SHORT, {(16, 0), (336, 0)}, {(1008, 0)}, {(2048, 0)}]),
        ({"sequences": 1}, [*SHORT, {(1008, 0)}, {(2048, 0)}]),
        ({"chunk": 16}, [{(16, 0), (32, 16)}]),
        ({"chunk": 336}, [*({*one, (352, 336)} for one in SHORT), {(16, 0), (336, 0), (352, 336)}]),
        (
            {"tokens": 2880, "chunk": 2048},
            [{*one, (2064, 2048)} for one in (*SHORT, {(16, 0), (336, 0), (1008, 0)}, {(2048, 0)})],
        ),
        (
            {"cuts": True},
            [{(16, 0)}, {(336, 0), (336, 160)}, {(16, 0), (336, 0), (1008, 0), (1008, 496)}, {(2048, 0)}],
        ),
        (
            {"samples": True, "tokens": 2080, "chunk": 2048},
            [
                {(16, 0), (2064, 2048)},
                {(336, 0), (2064, 2048), (336, 320)},
                {(16, 0), (336, 0), (1008, 0), (2064, 2048), (1008, 992)},
                {(2048, 0), (2064, 2048), (2048, 2032)},
            ],
        ),
        (
            {"cuts": True, "samples": True},
            [
                {(16, 0)},
                {(336, 0), (336, 160), (336, 320)},
                {(16, 0), (336, 0), (1008, 0), (1008, 496), (1008, 992)},
                {(2048, 0)},
            ],
        ),
    ],
)
def test_prompts_share_the_steps_that_they_fit_into(
    module: ModuleType, room: dict[str, Any], beside: list[set[tuple[int, int]]]
) -> None:
    """One of them also with a context, and with samples that begin in its step, each with its tokens."""
    found: list[set[tuple[int, int]]] = []

    def note(row: int, batch: list[Any], sequence: Any) -> Any:
        if row == 0 and any(one.name.startswith("prompt-") for one in batch):
            held = {(len(one.prompt), one.computed) for one in batch if one.name.startswith("prompt-")}
            found.extend([held] if held not in found else [])

    model = a_model(note)
    assert certify(module, model, **room) == ""
    assert found == beside


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize(
    ("max_model_len", "tokens", "chunk"), [(17, 64, 16), (350, 2048, 48), (640, 700, 2048), (5265, 7936, 7936)]
)
def test_there_are_blocks_for_all(
    module: ModuleType, max_model_len: int, tokens: int, chunk: int, samples: bool
) -> None:
    """Also for an odd number of them, whose second half is the larger one."""
    model = a_model(max_model_len=max_model_len, num_blocks=2500)
    assert certify(module, model, tokens, chunk=chunk, cuts=chunk == tokens, samples=samples) == ""


def beside_a_prompt(row: int, batch: list[Any], sequence: Any) -> Any:
    return None if is_prompt(sequence) else (any(map(is_prompt, batch)) or None)


def beside_a_long_prompt(row: int, batch: list[Any], sequence: Any) -> Any:
    return None if is_prompt(sequence) else (any(is_prompt(one) and len(one.prompt) > 1500 for one in batch) or None)


def a_row_among_many_tokens(row: int, batch: list[Any], sequence: Any) -> Any:
    """A prompt whose bits follow the rows beside it."""
    return (len(batch) > 1 or None) if is_prompt(sequence) else None


def beside_all_slots(row: int, batch: list[Any], sequence: Any) -> Any:
    return (len([one for one in batch if not is_prompt(one)]) == SLOTS or None) if is_prompt(sequence) else None


@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
@pytest.mark.parametrize("flaw", [beside_a_prompt, beside_a_long_prompt])
def test_a_row_that_a_prompt_leaks_into_is_found(module: ModuleType, flaw: Flaw, stage: str) -> None:
    length = 2048 if flaw is beside_a_long_prompt else 16
    found = certify(module, a_model(flaw, stage=stage))
    assert f"rows beside prompts of {length} tokens: probe-" in found


@pytest.mark.parametrize("stage", ["hidden", "logits", "logprob"])
@pytest.mark.parametrize("flaw", [a_row_among_many_tokens, beside_all_slots])
def test_a_prompt_that_rows_leak_into_is_found(module: ModuleType, flaw: Flaw, stage: str) -> None:
    found = certify(module, a_model(flaw, stage=stage))
    length = 16 if flaw is a_row_among_many_tokens else 336
    assert found.startswith(f"a prompt of {length} tokens beside rows differs first in ")


def test_a_prompt_whose_kv_follows_rows_is_found(module: ModuleType) -> None:
    model = a_model(a_row_among_many_tokens, stage="kv")
    assert certify(module, model) == f"a prompt of 16 tokens beside rows differs first in {KV}"


@pytest.mark.parametrize(
    ("block_size", "longest", "max_model_len", "lengths"),
    [
        (16, 2048, 9999, {16, 336, 1008, 2048}),
        (16, 512, 9999, {16, 336, 512, 528}),  # The last one has a block behind a whole chunk.
        (16, 2048, 1009, {16, 336, 1008}),  # A longer prompt than the model's own would overrun its buffers.
        (16, 2048, 1008, {16, 336, 992}),
        (64, 2048, 9999, {64, 384, 1024, 2048}),  # MLA's blocks.
        (64, 512, 9999, {64, 384, 512, 576}),
    ],
)
def test_prompts_are_whole_blocks_that_step_and_model_have_room_for(
    module: ModuleType, block_size: int, longest: int, max_model_len: int, lengths: set[int]
) -> None:
    ran: set[int] = set()

    def note(row: int, batch: list[Any], sequence: Any) -> Any:
        ran.update(len(one.prompt) for one in batch if is_prompt(one))

    model = a_model(note, block_size=block_size, max_model_len=max_model_len)
    assert certify(module, model, chunk=longest) == ""
    assert ran == lengths


@pytest.mark.parametrize("room", [{"cuts": True, "samples": True}, {"chunk": 48, "samples": True}, {"chunk": 16}])
@pytest.mark.parametrize("more", [1, 2, 5, 9, 12, 20, 30, 50])
def test_prompts_leave_a_block_for_each_slot(module: ModuleType, more: int, room: dict[str, Any]) -> None:
    """With little KV they are shorter, or there are none, and then nothing is granted."""
    found = certify(module, a_model(num_blocks=SLOTS + more), **room)
    assert bool(found) == (more < 9)


def test_a_test_without_a_prompt_grants_nothing(module: ModuleType) -> None:
    assert "nothing was compared" in certify(module, a_model(block_size=64), 63)


def of_two_prompts(row: int, batch: list[Any], sequence: Any) -> Any:
    return len([one for one in batch if is_prompt(one)]) > 1 or None


def of_a_context(row: int, batch: list[Any], sequence: Any) -> Any:
    """The second half of a prompt, whose other bits nothing else follows."""
    return (is_prompt(sequence) and 0 < sequence.computed < len(sequence.prompt) - 16) or None


def of_a_beginning_sample(row: int, batch: list[Any], sequence: Any) -> Any:
    return (is_prompt(sequence) and sequence.computed == len(sequence.prompt) - 16 > 0) or None


@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
@pytest.mark.parametrize(
    ("flaw", "found"),
    [
        (of_two_prompts, "a prompt of 16 tokens"),
        (of_a_context, "the second half of a prompt of 336 tokens"),
        (of_a_beginning_sample, "a sample that begins with a prompt of 336 tokens"),
    ],
)
def test_what_leaks_only_where_rows_are_beside_several_prompts_is_found(
    module: ModuleType, flaw: Flaw, found: str, stage: str
) -> None:
    assert certify(module, a_model(flaw, stage=stage), cuts=True, samples=True).startswith(found + " beside rows")


# What was drawn, as a prompt.


def score(trace: Any) -> bytes:
    """The score of a model in which a token's score is what was reported when it was drawn."""
    return bytes(trace.logprob.numpy().tobytes())


def certify_scores(module: ModuleType, model: FakeStepper, score: Any = score, chunk: int = 2048) -> str:
    test = module.ScoreCertification(model, None, chunk, score)
    found: str = test.difference()
    assert found.startswith("no whole block") or (test.steps, test.comparisons > 0) == (len(model.steps), True)
    return found


def in_a_row(row: int, batch: list[Any], sequence: Any) -> Any:
    """A model whose rows have other bits than its prompts."""
    return True if sequence.name == "rows" else None


def in_a_late_row(row: int, batch: list[Any], sequence: Any) -> Any:
    return True if sequence.name == "rows" and sequence.drawn == 3 and len(sequence.prompt) > 2000 else None


def test_rows_that_have_the_bits_of_prompts_may_be_scored(module: ModuleType) -> None:
    """All rows are in steps of rows, and all chunks in steps of prompts."""
    model = a_model()
    assert certify_scores(module, model) == ""
    assert [told is None for told in model.told] == [step == ["rows"] for step in model.steps]


@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
@pytest.mark.parametrize(("flaw", "length"), [(in_a_row, 16), (in_a_late_row, 2048)])
def test_a_row_with_other_bits_than_a_prompt_is_found(module: ModuleType, flaw: Flaw, length: int, stage: str) -> None:
    found = certify_scores(module, a_model(flaw, stage=stage))
    assert found.startswith(f"of {length} tokens, the last 4 drawn, a prompt differs first in ")


@pytest.mark.parametrize("sample", [0, 1])
@pytest.mark.parametrize("stage", ["kv", "hidden", "logits", "logprob"])
def test_a_sample_with_other_bits_in_its_prompts_last_step_is_found(
    module: ModuleType, stage: str, sample: int
) -> None:
    """It reads blocks in the step that writes them, and so does another sample of the prompt."""
    model = a_model(lambda row, batch, sequence: sequence.name == f"sample {sample}" or None, stage=stage)
    found = certify_scores(module, model)
    assert found.startswith("of 16 tokens, the last 4 drawn, a prompt differs first in ")
    assert found.endswith(" of a sample that begins in its last step")


def test_a_score_with_other_bits_than_the_rows_is_found(module: ModuleType) -> None:
    assert certify_scores(module, a_model(), lambda trace: b"1").endswith("differs first in the score")


def test_a_rank_that_sees_a_difference_scores_with_the_others(module: ModuleType) -> None:
    """Ranks compute lm_head together, and KV may differ in the part of one of them only."""
    scored: list[Any] = []

    def counted(trace: Any) -> bytes:
        scored.append(trace)
        return score(trace)

    assert KV in certify_scores(module, a_model(in_a_row, stage="kv"), counted)
    assert len(scored) == 1


def test_a_test_that_would_notice_nothing_grants_no_scores(module: ModuleType) -> None:
    assert certify_scores(module, a_model(is_dead=True)) == VOID
    assert "nothing was compared" in certify_scores(module, a_model(max_model_len=8))


# The worker.


class Worker:
    """What the worker's test of freedoms needs of a colocated worker, around a fake model."""

    slots, chunk_size, budget, places = SLOTS, 2048, 4096, 8

    def versions(self) -> list[str]:
        return []

    def score_of(self, trace: Any) -> bytes:
        return score(trace)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that tests a prefill side's freedoms; `model` is its model."""
    module, prefill = load("colocated_node.worker"), load("prefill_node.worker")
    made: Any = Worker()
    made.model = a_model()
    made.module, made.prefill = module, prefill
    for found in (module, prefill):
        monkeypatch.setattr(found, "Stepper", lambda worker: worker.model)
    for name in ("test_mixed", "test_scores", "rows_of", "execute_model", "observe", "_builders"):
        monkeypatch.setattr(Worker, name, getattr(module.ColocatedWorker, name), raising=False)
    return made


def refused(worker: Any, freedom: str = "mixed", **before: str) -> str:
    """Return why a freedom is refused; before: what is known before its test to be refused, and why."""
    test = worker.prefill.FreedomTest(worker, [*before, freedom])
    test.refused |= before
    getattr(worker, f"test_{freedom}")(test)
    assert (test.evidence().comparisons > 0) == bool(worker.model.steps)
    return str(test.refused[freedom])


def test_mixed_is_granted_where_nothing_leaks(worker: Any) -> None:
    assert refused(worker, packed="", chunks="other bits") == ""
    assert worker.model.steps


@pytest.mark.parametrize("flaw", [beside_a_prompt, a_row_among_many_tokens])
def test_mixed_is_refused_where_rows_and_prompts_move_each_others_bits(worker: Any, flaw: Flaw) -> None:
    worker.model = a_model(flaw)
    assert " beside " in refused(worker, packed="")


def test_without_packed_there_is_no_mixed(worker: Any) -> None:
    """And nothing is run for it: only the test of `packed` has a control."""
    assert refused(worker, packed="rows differ") == "rows differ"
    assert "packed" in refused(worker)
    assert "packed" in refused(worker, chunks="")
    assert worker.model.steps == []


@pytest.mark.parametrize("wanted", [[], ["packed"], ["packed", "chunks"]])
def test_mixed_is_not_tested_if_it_is_not_wanted(worker: Any, wanted: list[str]) -> None:
    test = worker.prefill.FreedomTest(worker, wanted)
    worker.test_mixed(test)
    assert (list(test.refused), worker.model.steps) == (wanted, [])


def test_what_is_known_of_it_before_refuses_it(worker: Any) -> None:
    assert refused(worker, packed="", mixed="the algorithm follows rows") == "the algorithm follows rows"
    assert worker.model.steps == []


@pytest.mark.parametrize(
    ("before", "reason"),
    [({"chunks": ""}, ""), ({"chunks": "a CPU"}, "a CPU"), ({"packed": ""}, "free chunks"), ({"scores": "x"}, "x")],
)
def test_scores_are_those_of_generation_where_prompts_may_be_cut(
    worker: Any, before: dict[str, str], reason: str
) -> None:
    found = refused(worker, "scores", **before)
    assert reason in found
    assert bool(found) == bool(reason) == (not worker.model.steps)


def test_scores_are_tested_with_greedy_tokens(worker: Any) -> None:
    """Others follow their place in the output, which is not the same in rows and in a prompt."""
    drawn: set[float] = set()
    worker.model = a_model(lambda row, batch, sequence: drawn.add(sequence.sampling.temperature))
    assert (refused(worker, "scores", chunks=""), drawn) == ("", {0.0})


def test_scores_are_not_those_of_generation_where_rows_differ(worker: Any) -> None:
    worker.model = a_model(in_a_row)
    assert "differs first" in refused(worker, "scores", chunks="")


def test_steps_are_of_the_kind_that_the_scheduler_says(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts have their own length, and those of rows a fixed one, in service and in self-tests. vLLM's own
    warm-up says nothing."""
    connector = load("corun.node.kv.connector")
    ran: list[tuple[bool, int]] = []
    worker.sizes, worker.piece = [4, SLOTS], 0
    base = SimpleNamespace(execute_model=lambda output: None, rows_of=lambda live: 4 if live <= 4 else SLOTS)
    monkeypatch.setattr(worker.module, "super", lambda: base, raising=False)
    steps = [connector.CorunNixlConnector.nothing_to_do(rows) for rows in (None, 0, 2, None, 2)]
    for meta in (*steps, connector.HandoffMetadata(), None):
        worker.execute_model(SimpleNamespace(kv_connector_metadata=meta))
        ran.append((worker.holds_prompts, worker.rows_of(3)))
    rows, prompts = (False, 4), (True, 3)
    assert ran == [rows, prompts, prompts, rows, prompts, rows, rows]


def test_attention_cuts_rows_in_their_own_steps_only(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = load("corun.node.kv.connector")
    builder = SimpleNamespace(max_num_splits=16)
    worker.model_runner = SimpleNamespace(attn_groups=[[SimpleNamespace(metadata_builders=[builder])]])
    worker.piece = 2048
    limits: list[int] = []
    base = SimpleNamespace(execute_model=lambda output: limits.append(builder.max_num_splits))
    monkeypatch.setattr(worker.module, "super", lambda: base, raising=False)
    for rows in (None, 0, None, None):
        meta = connector.CorunNixlConnector.nothing_to_do(rows)
        worker.execute_model(SimpleNamespace(kv_connector_metadata=meta))
    assert limits == [16, 1, 16, 16]
    with pytest.raises(RuntimeError, match="a step of prompts holds 2 rows"):
        worker.execute_model(SimpleNamespace(kv_connector_metadata=connector.CorunNixlConnector.nothing_to_do(2)))


def test_what_steps_of_prompts_cut_is_observed_as_they_run(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit that their steps have; then rows are cut again. What an unfit builder lacks is said elsewhere."""
    builder = SimpleNamespace(max_num_splits=16)
    worker.model_runner = SimpleNamespace(attn_groups=[[SimpleNamespace(metadata_builders=[builder])]])
    worker.piece, worker.unfit_attention = 2048, ""
    monkeypatch.setattr(worker.module, "super", lambda: SimpleNamespace(observe=dict), raising=False)
    monkeypatch.setattr(worker.module.attention, "policy", lambda builders: f"limit {builders[0].max_num_splits}")
    assert worker.observe() == {"prompt_split_policy": "limit 1"}
    assert builder.max_num_splits == 16
    worker.unfit_attention = "unknown: there is no schedule"
    assert worker.observe() == {}
