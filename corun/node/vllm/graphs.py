"""Which CUDA graph a step runs, of those that vLLM's V2 model runner has captured.

vLLM captures a step of prompts in parts, and launches attention between them, layer by layer. With one request at a
time the GPU waits for these launches. So steps with prompts get graphs of the whole step (`plan`), with the same
kernels, where attention allows it. By itself vLLM then runs the shortest graph that is long enough; here a node says
which one (`choose`, `guard`). Everything changes one manager (vllm/v1/worker/gpu/cudagraph_utils.py).

Must not know: roles, the contract, schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def can_be_whole(builders: Sequence[Any]) -> bool:
    """Return whether attention's metadata builders let any step be captured, not only one of rows, and keep the buffers
    and the one split that a graph reads again (corun/node/vllm/attention.py)."""
    always = AttentionCGSupport.ALWAYS
    return all(
        one.get_cudagraph_support(one.vllm_config, one.kv_cache_spec) == always
        and one.use_full_cuda_graph
        and one.max_num_splits == 1
        for one in builders
    )


def plan(
    manager: Any, builders: Sequence[Any], lengths: Collection[int], rows: Collection[int], *, whole: bool
) -> None:
    """Let steps with prompts have graphs of these lengths alone, and decode steps of these numbers of rows, before any
    is captured. With `whole`, those of prompts are of the whole step, for any number of requests below its tokens.

    A graph keeps the kernel of the longest query that it was captured with, here its own length. That of one token has
    no causal mask (FlashAttention's hopper/flash_api.cpp), so a step of such queries alone must not run it (`guard`).
    """
    of_rows = [one for one in manager._capture_descs.get(FULL, ()) if one.num_tokens in rows]
    parts = [one for one in manager._capture_descs.get(PIECEWISE, ()) if one.num_tokens in lengths]
    planned = {one: one for one in (*parts, *of_rows)}
    for one in parts if whole else ():
        planned[one] = replace(one, cg_mode=FULL, num_reqs=min(one.num_tokens - 1, manager.max_num_reqs))
    # The longest graph is captured first: vLLM makes the buffers of results as long as its own.
    ordered = sorted(planned.values(), key=lambda one: int(one.num_tokens), reverse=True)
    manager._capture_descs = {mode: [one for one in ordered if one.cg_mode == mode] for mode in (PIECEWISE, FULL)}
    for key, candidates in manager._candidates.items():
        manager._candidates[key] = [planned[one] for one in candidates if one in planned]
    for builder in builders if whole else ():
        _capture_longest(builder)


def _capture_longest(builder: Any) -> None:
    """Let attention of prompts be captured as for one query of all tokens. vLLM's own queries follow from the most
    requests of the engine, and whether FlashAttention takes one warp group or two follows from the longest query."""
    build = builder.build_for_cudagraph_capture

    def build_longest(common: Any) -> Any:
        longest = common.num_actual_tokens if common.max_query_len > 1 else 1
        return build(replace(common, max_query_len=longest))

    builder.build_for_cudagraph_capture = build_longest


def choose(
    manager: Any, *, rows_of: Callable[[int], int] | None = None, length_of: Callable[[int], int] | None = None
) -> None:
    """Let steps run only these captured graphs.

    rows_of: from a number of rows to that of the graph that a decode step of so many runs; 0: it runs none. None:
        leave all.
    length_of: from the tokens of a step with prompts to the length of its graph; 0: it runs none. None: the length that
        vLLM would take.
    Raises KeyError if there is no such graph.
    """
    rows = {one.num_tokens: one for one in manager.graphs if _is_of_rows(one)}
    every = (one for candidates in manager._candidates.values() for one in candidates)
    prompts = {(one.num_tokens, one.num_active_loras): one for one in every if not _is_of_rows(one)}
    for (tokens, loras), candidates in list(manager._candidates.items()):
        chosen = [one for one in candidates if _is_of_rows(one)]
        if rows_of is not None:
            chosen = [rows[size]] if (size := rows_of(tokens)) else []
        if length_of is None:
            chosen += [one for one in candidates if not _is_of_rows(one)]
        elif length := length_of(tokens):
            chosen.append(prompts[length, loras])
        manager._candidates[tokens, loras] = chosen


def guard(manager: Any, holds_prompts: Callable[[], bool]) -> None:
    """Let no step with prompts run a graph of rows, even if each prompt has one token, and no step of such queries a
    whole graph: it is padded to that graph's length, and runs without it.

    So the steps of a node that has graphs of rows are those of one that has none.
    """
    dispatch = manager.dispatch

    def of_step(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any) -> Any:
        found = dispatch(num_reqs, num_tokens, None if holds_prompts() else uniform_token_count, *args, **kwargs)
        if found.cg_mode == FULL and num_reqs == num_tokens and not _is_of_rows(found):
            return replace(found, cg_mode=NONE, num_reqs=num_reqs)
        return found

    manager.dispatch = of_step


@contextmanager
def without(manager: Any) -> Iterator[None]:
    """Let steps run no captured graph. They stay as long as with it: another length could have other bits by itself."""
    dispatch = manager.dispatch

    def of_step(num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        return replace(dispatch(num_reqs, *args, **kwargs), cg_mode=NONE, num_reqs=num_reqs)

    manager.dispatch = of_step
    try:
        yield
    finally:
        manager.dispatch = dispatch


def of_rows(manager: Any) -> list[int]:
    """Return the numbers of rows that have a graph, ascending."""
    return sorted(one.num_tokens for one in manager.graphs if _is_of_rows(one))


def _is_of_rows(graph: Any) -> bool:
    return graph.uniform_token_count is not None
