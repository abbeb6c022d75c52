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


def trace(**parts: Any) -> Any:
    like = {"hidden": torch.zeros(4), "logits": torch.ones(9), "logprob": torch.zeros(1), "token": torch.tensor([3])}
    return load("corun.node.vllm.selftest").Trace(**{**like, **parts})


KV = tuple(torch.ones(2, 4, 8) for _ in range(LAYERS))


@pytest.mark.parametrize(
    ("parts", "stage"),
    [
        ({}, ""),
        ({"kv": (*KV[:2], KV[2] + 1)}, f"the KV of layer 2 of {LAYERS}"),
        ({"kv": (KV[0][:1], *KV[1:])}, f"the KV of layer 0 of {LAYERS}"),  # Fewer blocks, of the same contents.
        ({"hidden": -torch.zeros(4)}, "the last hidden state"),
        ({"logits": torch.ones(1)}, "the logits (lm_head)"),
        ({"logprob": torch.full((1,), torch.nan)}, "the log probability"),
        ({"token": torch.tensor([4])}, "the drawn token"),
    ],
)
def test_each_pair_of_traces_has_its_own_first_difference(parts: dict[str, Any], stage: str) -> None:
    expected = trace(kv=KV)
    pairs = [(expected, trace(kv=KV)), (expected, trace(**{"kv": KV, **parts})), (expected, trace(kv=KV))]
    assert load("corun.node.vllm.selftest").first_differences(pairs) == ["", stage, ""]


def test_traces_of_which_only_one_has_kv_are_not_compared() -> None:
    for pair in ((trace(), trace(kv=KV)), (trace(kv=KV), trace())):
        with pytest.raises(ValueError, match="zip"):
            load("corun.node.vllm.selftest").first_difference(*pair)


class FakeRunner:
    """A worker whose steps the device runs later, and which notes what is asked of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.logits = torch.zeros(2, 9)
        """The buffer of every step's logits, as in a captured graph."""
        self.model = SimpleNamespace(compute_logits=lambda hidden: self.logits.fill_(float(hidden[0, 0])))
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[0])
        self.kv_caches = equal_caches(1)
        self.model_runner = self
        cache = SimpleNamespace(block_size=BLOCK_SIZE)
        model = SimpleNamespace(max_model_len=99, get_vocab_size=lambda: 9)
        self.vllm_config = SimpleNamespace(cache_config=cache, model_config=model)
        self._names: list[str] = []
        self._number = 0

    def execute_model(self, output: Any) -> None:
        self._names = sorted(output.num_scheduled_tokens, reverse=True)  # A runner has an order of its own.
        self._number += 1
        self.notes.append(f"step {self._number}")

    def sample_tokens(self, _: None) -> Any:
        number = self._number
        self.model.compute_logits(torch.full((2, 4), float(number)))
        rows = torch.arange(2)[:, None]
        return SimpleNamespace(
            get_output=lambda: self.notes.append(f"end {number}"),
            model_runner_output=SimpleNamespace(req_ids=self._names),
            sampler_output=SimpleNamespace(
                sampled_token_ids=10 * number + rows,
                logprobs_tensors=SimpleNamespace(logprobs=torch.stack((rows[:, 0], rows[:, 0] + 7), 1) - 0.5 * number),
            ),
        )


def test_a_step_is_made_while_the_device_runs_the_one_before_it_and_no_other() -> None:
    """vLLM's V2 runner has the buffers of two steps."""
    module, runner = load("corun.node.vllm.selftest"), FakeRunner()
    made = module.Stepper(runner)
    both = [
        module.TestSequence(name=name, prompt=(1, 2), blocks=(block,), computed=1, sampling=None)
        for name, block in (("a", 1), ("b", 2))
    ]
    found = [made.step([(each, 1) for each in both]) for _ in range(3)]
    made.close()
    assert runner.notes == ["step 1", "step 2", "end 1", "step 3", "end 2", "end 3", "step 4"]
    for number, traces in enumerate(found, start=1):
        for row, name in enumerate(("b", "a")):
            one = traces[name]
            assert (int(one.token), float(one.logprob)) == (10 * number + row, row - 0.5 * number)
            assert {*one.logits.tolist(), *one.hidden.tolist()} == {number}, "a later step has other logits"
