"""Which graph a step runs, on vLLM's own manager, without a GPU: nothing is captured here."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loading import load

SIZES = (1, 2, 4, 8, 12, 16, 32, 48, 64, 256)
"""Lengths of prompts' graphs are multiples of 16, and 256 is a full step; the others are rows'."""
LENGTHS, ROWS, MOST = (16, 32, 48, 64, 256), (1, 2, 4, 8, 12), 40


graphs: Any
utils: Any


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Import what needs vLLM."""
    global graphs, utils
    graphs, utils = load("corun.node.vllm.graphs"), load("vllm.v1.worker.gpu.cudagraph_utils")


def manager(mode: str = "FULL_AND_PIECEWISE") -> Any:
    """Return vLLM's manager of these sizes, with everything that it would capture captured."""
    made = object.__new__(utils.CudaGraphManager)
    made.vllm_config = SimpleNamespace(speculative_config=None)
    made.compilation_config = SimpleNamespace(cudagraph_capture_sizes=list(SIZES), max_cudagraph_capture_size=SIZES[-1])
    made.cudagraph_mode, made.max_num_reqs, made.decode_query_len = utils.CUDAGraphMode[mode], MOST, 1
    made.use_breakable_cg, made.lora_capture_cases, made._lora_dispatch_map = False, [0], {}
    made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
    made._init_candidates()
    return made


def captured(made: Any) -> None:
    made.graphs = dict.fromkeys(made._capture_descs.get(graphs.FULL, ()))


def length_of(tokens: int) -> int:
    return next((length for length in LENGTHS[:-1] if length >= tokens), 256 if tokens >= 224 else 0)


def rows_of(live: int) -> int:
    return next((rows for rows in ROWS if rows >= live), 0)


def planned(*, whole: bool = True, rows: bool = True) -> Any:
    made = manager() if rows else manager("PIECEWISE")
    graphs.plan(made, (), LENGTHS, ROWS if rows else (), whole=whole)
    captured(made)
    graphs.choose(made, rows_of=rows_of if rows else None, length_of=length_of)
    return made


def run(made: Any, *queries: int) -> tuple[str, int, int | None]:
    """Return the mode of a step with such queries, the tokens to which it is padded, and its requests with padding."""
    uniform = utils.get_uniform_token_count(len(queries), sum(queries), max(queries))
    found = made.dispatch(len(queries), sum(queries), uniform, 0)
    return found.cg_mode.name, found.num_tokens, found.num_reqs


def test_only_what_steps_run_is_captured_and_the_longest_first() -> None:
    """vLLM would capture parts of the lengths of rows, too, and rows of the lengths of prompts."""
    made = planned()
    found = {mode: [(one.num_tokens, one.num_reqs) for one in some] for mode, some in made._capture_descs.items()}
    whole = [(256, 40), (64, 40), (48, 40), (32, 31), (16, 15)]
    assert found == {
        graphs.PIECEWISE: [],
        graphs.FULL: [*whole, *((rows, rows) for rows in reversed(ROWS))],
    }
    parts = planned(whole=False)._capture_descs
    assert [one.num_tokens for one in parts[graphs.PIECEWISE]] == list(reversed(LENGTHS))
    assert [one.num_tokens for one in parts[graphs.FULL]] == list(reversed(ROWS))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rows", [True, False], ids=["colocated", "prefill"])
def test_a_prompt_alone_is_as_long_in_each_engine(rows: bool, whole: bool) -> None:
    """Its bits without any freedom may follow from the length to which its step is padded."""
    made = planned(whole=whole, rows=rows)
    graphs.guard(made, lambda: True)
    found = {tokens: run(made, tokens)[1] for tokens in range(1, 257)}
    assert found == {tokens: length_of(tokens) or tokens for tokens in found}


def test_a_step_of_prompts_runs_a_whole_graph_whoever_is_in_it() -> None:
    made = planned()
    graphs.guard(made, lambda: True)
    assert run(made, 40) == run(made, 8, 32) == run(made, *(1,) * 38, 2) == ("FULL", 48, 40)
    assert run(made, 65) == ("NONE", 65, 1)
    assert run(made, *(6,) * 40) == ("FULL", 256, 40)
    assert run(made, *(5,) * 41, 40)[0] == "NONE", "more requests than an engine has"


@pytest.mark.parametrize("rows", [True, False], ids=["colocated", "prefill"])
@pytest.mark.parametrize("holds", [True, False])
def test_no_whole_graph_runs_or_is_captured_with_queries_of_one_token_alone(rows: bool, holds: bool) -> None:
    """FlashAttention has no causal mask then. The step is as long as with the graph."""
    made = planned(rows=rows)
    graphs.guard(made, lambda: holds)
    for requests in range(13, MOST + 1):
        assert run(made, *(1,) * requests) == ("NONE", length_of(requests), requests)
    for one in made._capture_descs[graphs.FULL]:
        if one.uniform_token_count is None:  # vllm/v1/worker/gpu/input_batch.py: `make_dummy`
            assert one.num_tokens // one.num_reqs + one.num_tokens % one.num_reqs > 1


def test_attention_is_captured_as_for_one_query_of_all_tokens() -> None:
    """Rows are captured as they are."""

    @dataclass
    class Common:
        num_actual_tokens: int
        max_query_len: int

    builder = SimpleNamespace(build_for_cudagraph_capture=lambda common: common.max_query_len)
    graphs.plan(manager(), [builder], LENGTHS, ROWS, whole=False)
    assert builder.build_for_cudagraph_capture(Common(64, 24)) == 24
    graphs.plan(manager(), [builder], LENGTHS, ROWS, whole=True)
    assert [builder.build_for_cudagraph_capture(Common(64, longest)) for longest in (1, 2, 24)] == [1, 64, 64]


def test_steps_of_rows_run_the_graphs_of_rows_that_are_allowed() -> None:
    made = planned()
    holds = [False]
    graphs.guard(made, lambda: holds[0])
    assert [run(made, *(1,) * live) for live in (1, 3, 9)] == [("FULL", 1, 1), ("FULL", 4, 4), ("FULL", 12, 12)]
    graphs.choose(made, rows_of=lambda live: 8 if live <= 8 else 0, length_of=length_of)
    assert run(made, 1, 1, 1) == ("FULL", 8, 8)
    assert run(made, *(1,) * 9) == ("NONE", 16, 9), "nine rows have no graph now"
    assert graphs.of_rows(made) == list(ROWS)
    holds[0] = True
    assert run(made, 1, 1, 1) == ("NONE", 16, 3)


def test_by_itself_a_step_of_prompts_keeps_the_graph_that_vllm_would_take() -> None:
    """The benchmark's engines plan nothing, and choose rows alone."""
    made = manager()
    captured(made)
    before = [run(made, tokens) for tokens in range(2, 257)]
    graphs.choose(made, rows_of=rows_of)
    assert [run(made, tokens) for tokens in range(2, 257)] == before
    assert run(made, 1, 1, 1) == ("FULL", 4, 4)


def test_without_graphs_steps_are_as_long_as_with_them() -> None:
    made = planned()
    with graphs.without(made):
        assert [run(made, 40), run(made, 1, 1, 1), run(made, 65)] == [("NONE", 48, 1), ("NONE", 4, 3), ("NONE", 65, 1)]
    assert run(made, 40)[0] == "FULL"


def test_a_length_without_a_graph_is_said() -> None:
    made = planned()
    with pytest.raises(KeyError, match="24"):
        graphs.choose(made, length_of=lambda tokens: 24)


@pytest.mark.parametrize("lacks", ["", "support", "buffers", "one split"])
def test_a_step_is_whole_only_if_all_attention_may_be_captured(lacks: str) -> None:
    def builder(lacks: str) -> Any:
        support = graphs.AttentionCGSupport.UNIFORM_BATCH if lacks == "support" else graphs.AttentionCGSupport.ALWAYS
        return SimpleNamespace(
            get_cudagraph_support=lambda config, spec: support,
            vllm_config=None,
            kv_cache_spec=None,
            use_full_cuda_graph=lacks != "buffers",
            max_num_splits=16 if lacks == "one split" else 1,
        )

    assert graphs.can_be_whole([builder(""), builder(lacks)]) is (not lacks)
