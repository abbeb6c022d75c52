"""How the self-tests compare KV: in place, all layers at once, and bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.loading import load

BLOCKS, BLOCK_SIZE, LAYERS = 10, 4, 3
A, B = [1, 7, 4], [2, 3, 9]
"""Two lists of blocks. What follows is for caches whose kernels split each block into one row or into two."""


def stepper(caches: list[torch.Tensor]) -> Any:
    cache = SimpleNamespace(block_size=BLOCK_SIZE)
    model = SimpleNamespace(max_model_len=99, get_vocab_size=lambda: 9)
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(num_blocks=BLOCKS), kv_caches=caches)
    config = SimpleNamespace(cache_config=cache, model_config=model)
    return load("corun.node.vllm.selftest").Stepper(SimpleNamespace(model_runner=runner, vllm_config=config))


def equal_caches(parts: int) -> list[torch.Tensor]:
    """Caches in which the blocks `A` have the same contents as the blocks `B`."""
    made = torch.randn(LAYERS, BLOCKS, parts, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    made[:, B] = made[:, A]
    return list(made.reshape(LAYERS, BLOCKS * parts, 2, 8))


@pytest.mark.parametrize("parts", [1, 2])
def test_equal_kv_and_the_first_layer_that_differs(parts: int) -> None:
    caches = equal_caches(parts)
    made = stepper(caches)
    assert made.layer_that_differs(A, B) == ""
    assert made.layer_that_differs(A, list(reversed(B))) == f"the KV of layer 0 of {LAYERS}"
    last = B[-1] * parts + parts - 1  # The last row of the last block.
    for layer in (2, 1):
        caches[layer][last, -1, -1] += 1
        assert made.layer_that_differs(A, B) == f"the KV of layer {layer} of {LAYERS}"


def test_zeros_of_both_signs_differ_and_a_nan_equals_itself() -> None:
    caches = equal_caches(1)
    for cache in caches:
        cache[[A[0], B[0]]] = torch.nan
    made = stepper(caches)
    assert made.layer_that_differs(A, B) == ""
    caches[1][A[1]], caches[1][B[1]] = 0.0, -0.0
    assert made.layer_that_differs(A, B) == f"the KV of layer 1 of {LAYERS}"


@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_are_written_as_they_were_read(parts: int) -> None:
    caches = equal_caches(parts)
    made = stepper(caches)
    made.scramble(B, seed=2)
    assert made.layer_that_differs(A, B) == f"the KV of layer 0 of {LAYERS}"
    made.write(B, made.read(A))
    assert made.layer_that_differs(A, B) == ""
