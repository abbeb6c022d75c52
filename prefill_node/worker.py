"""The vLLM worker of a prefill node: the stock worker, with observation and a self-test.

Prefill steps need no padding: the shape of an isolated prompt's steps depends on its own length alone. The self-test
checks that a prompt's KV does not depend on earlier prompts or on the KV blocks that hold it. It runs with the loaded
model's own steps, before the node serves. Must not know: gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from corun.node.vllm.selftest import NULL_BLOCK, BlockPool, Stepper, TestSequence, Trace, compare
from corun.node.vllm.worker import NodeWorker

SEED = 20_26
PROMPTS = 6


class PrefillWorker(NodeWorker):
    """Computes isolated prompts with the stock model runner."""

    def certify(self) -> str:
        """Return the first difference that the self-test finds; empty if there is none."""
        chunk_size = self.vllm_config.scheduler_config.long_prefill_token_threshold
        buckets = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, detokenize=False)
        with torch.inference_mode():
            finding = certify(Stepper(self), chunk_size, sorted(buckets), sampling)
        torch.accelerator.empty_cache()
        return finding


def lengths(chunk_size: int, buckets: Sequence[int], longest: int) -> list[int]:
    """Return at most `PROMPTS` prompt lengths, on both sides of the edges where shapes change, none above `longest`."""
    middle = buckets[len(buckets) // 2] if buckets else chunk_size // 2
    edges = [1, middle, middle + 1, chunk_size - 1, chunk_size, chunk_size + 1]
    return sorted({length for length in edges if 1 <= length <= longest})[:PROMPTS]


class Bench:
    """Runs prompts one at a time, each in other KV blocks than the one before."""

    def __init__(self, stepper: Stepper, chunk_size: int, longest: int, sampling: Any) -> None:
        self._stepper = stepper
        self._chunk = chunk_size
        self._sampling = sampling
        self._draw = random.Random(SEED)
        blocks = list(range(NULL_BLOCK + 1, 1 + min(4 * self._blocks_of(longest), stepper.num_blocks - 1)))
        stepper.scramble(blocks, SEED)
        self._draw.shuffle(blocks)
        self._pool = BlockPool(free=blocks)

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(self._stepper.vocab_size), k=length))

    def contents(self, length: int) -> tuple[torch.Tensor, ...]:
        """Return the contents of a prompt's blocks before it runs; they matter because its last block is not filled."""
        taken = self._pool.take(self._blocks_of(length))
        found = self._stepper.read(taken)
        self._pool.give_back(taken)
        return found

    def run(self, name: str, prompt: tuple[int, ...], contents: Sequence[torch.Tensor] | None = None) -> Trace:
        """Prefill one prompt in chunks and return a trace with all of its KV."""
        blocks = self._pool.take(self._blocks_of(len(prompt)))
        if contents is not None:
            self._stepper.write(blocks, contents)
        sequence = TestSequence(name=name, prompt=prompt, blocks=blocks, computed=0, sampling=self._sampling)
        traces: dict[str, Trace] = {}
        while not traces:
            count = min(self._chunk, len(prompt) - sequence.computed)
            traces = self._stepper.step([(sequence, count)])
        trace = self._stepper.whole(sequence, traces[name])
        self._stepper.close()
        self._pool.give_back(blocks)
        return trace

    def _blocks_of(self, length: int) -> int:
        return -(-(length + 1) // self._stepper.block_size)


def certify(stepper: Stepper, chunk_size: int, buckets: Sequence[int], sampling: Any) -> str:
    """Run each prompt twice; the second run comes after another prompt and uses other KV blocks.

    Returns:
        The first difference in words; empty if every bit is the same.
    """
    room = (stepper.num_blocks - 1) // 4 * stepper.block_size - 1
    tested = lengths(chunk_size, buckets, min(stepper.max_model_len - 1, room))
    bench = Bench(stepper, chunk_size, tested[-1], sampling)
    for length in tested:
        name, prompt, contents = f"a prompt of {length} tokens", bench.prompt(length), bench.contents(length)
        first = bench.run(name, prompt, contents)
        bench.run("another prompt", bench.prompt(tested[-1]))
        second = bench.run(name, prompt, contents)
        if difference := compare({name: [first]}, {name: [second]}, "after another prompt, in other KV blocks"):
            return difference
    return ""
