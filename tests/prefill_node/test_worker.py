"""Which graph a step with prompts runs on a GPU. The worker is vLLM's class without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prefill_node.engine import long_steps, prefill_buckets
from tests.loading import load


def worker(chunk: int, step: int, compiled: int = 8192) -> Any:
    """Return a prefill node's worker with the graphs that its engine asks for."""
    module = load("prefill_node.worker")
    made = object.__new__(module.PrefillWorker)
    sizes = [*prefill_buckets(chunk), *long_steps(step, chunk)]
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            long_prefill_token_threshold=chunk, max_num_scheduled_tokens=step, max_num_batched_tokens=compiled
        ),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
    )
    return made


def test_every_step_has_a_graph_and_one_above_a_chunk_has_little_padding() -> None:
    found = worker(chunk=2048, step=8192)
    lengths = (1, 2047, 2048, 2049, 4097, 7167, 7168, 7169, 8192)
    assert [found.graph_of(tokens) for tokens in lengths] == [16, 2048, 2048, 2176, 4608, 7168, 7168, 8192, 8192]
    assert found.buckets == [*prefill_buckets(2048)], "the contract's own"
    assert all(0 <= found.graph_of(tokens) - tokens < tokens * 0.18 for tokens in range(2049, 8193))


def test_a_colocated_node_runs_no_graph_of_rows_in_a_step_above_a_chunk() -> None:
    """Its rows may be more than the tokens of a chunk, and their graphs are among the captured lengths."""
    found = worker(chunk=128, step=8192)
    sizes = [*found.vllm_config.compilation_config.cudagraph_capture_sizes, 256, 192]
    found.vllm_config.compilation_config.cudagraph_capture_sizes = sizes
    found.__class__ = type("WithRows", (type(found),), {"row_lengths": (192, 256)})
    assert [found.graph_of(tokens) for tokens in (128, 129, 257)] == [128, 384, 384]


@pytest.mark.parametrize(("chunk", "step"), [(4096, 4096), (8192, 8192), (2049, 4096)])
def test_a_prompt_alone_never_has_the_graph_of_a_full_step(chunk: int, step: int) -> None:
    found = worker(chunk=chunk, step=step)
    lengths = {tokens: found.graph_of(tokens) for tokens in range(1, chunk + 1)}
    assert lengths == {
        tokens: next((bucket for bucket in prefill_buckets(chunk) if bucket >= tokens), 0) for tokens in lengths
    }


@pytest.mark.parametrize("uses_mla", [True, False])
def test_products_by_head_are_looked_at_with_mla_alone(monkeypatch: pytest.MonkeyPatch, uses_mla: bool) -> None:
    module = load("prefill_node.worker")

    def refuse(model: str, tokens: int) -> None:
        raise module.blas.RefusedError(f"{model} at {tokens} rows")

    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(module.blas, "Heuristic", lambda library: SimpleNamespace(version="1"))
    monkeypatch.setattr(module.blas, "products", lambda *_: [])
    monkeypatch.setattr(module.blas, "check_by_head", refuse)
    monkeypatch.setattr(module, "Stepper", lambda worker: SimpleNamespace(agree=lambda finding: finding))
    made = worker(chunk=2048, step=4096)
    made.versions = list
    made.vllm_config.scheduler_config.max_num_seqs = 64
    made.model_config = SimpleNamespace(use_mla=uses_mla)
    made.model_runner = SimpleNamespace(get_model=lambda: "the model")
    test = module.FreedomTest(made, ["packed"])
    test.by_products(["packed"])
    assert test.refused == {"packed": "the model at 4096 rows" if uses_mla else ""}
