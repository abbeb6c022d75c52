"""The vLLM worker of a prefill node: the stock worker, with observation, a self-test, and the test of its freedoms.

Prefill steps need no padding: the shape of an isolated prompt's steps depends on its own length alone. The self-test
checks that a prompt's KV does not depend on earlier prompts or on the KV blocks that hold it. Both tests run with the
loaded model's own steps, before the node serves. Must not know: gRPC.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from corun.node.certificate import Evidence
from corun.node.vllm import blas, structure
from corun.node.vllm.selftest import Stepper
from corun.node.vllm.worker import NodeWorker
from corun.types import Freedom
from prefill_node.certify import Freedoms, certify
from prefill_node.scenes import Limits, within

LONGEST = 4096 + 100
"""The least length of the longest prompt under test, if the model and the KV cache have room: its last chunk has so
much context that attention's heuristic would cut it."""
CPU_LONGEST, CPU_BUDGET, CPU_SCENES = 1600, 2048, 2
"""The longest prompt, the most tokens of a step and the number of scenes of each kind on a CPU, where the test grants
nothing and only finds what differs."""
CPU_UNKNOWN = "a CPU's libraries do not tell in which order they sum for other numbers of rows"
log = init_logger(f"vllm.{__name__}")  # In engine processes only vLLM's own loggers print.


class PrefillWorker(NodeWorker):
    """Computes prompts with the stock model runner."""

    def certify(self) -> str:
        """Return the first difference that the self-test finds; empty if there is none."""
        with torch.inference_mode():
            finding = certify(Stepper(self), self.chunk_size, self.buckets, _sampling())
        torch.accelerator.empty_cache()
        return finding

    def certify_freedoms(self, wanted: Sequence[str], by_name: bool = True) -> dict[str, Any]:
        """Return why each wanted freedom is refused; empty: it is held. With it comes the evidence, in numbers.

        A freedom is held only if three things hold: nothing of the engine is known to follow the number of rows, all
        algorithms of its matrix products give a row the same bits, and whole steps found no difference.
        by_name: whether to look at what is known; tests switch it off, to see the other parts find the same.
        """
        test = FreedomTest(self, wanted)
        with torch.inference_mode():
            if current_platform.is_cpu():
                test.run("steps", test.by_steps)
                test.refuse(dict.fromkeys(Freedom, CPU_UNKNOWN))
            else:
                if by_name:
                    test.refuse(structure.refused(self.vllm_config, self.model_runner.get_model()))
                test.run("products", test.by_products)
                test.run("steps", test.by_steps)
                self.test_mixed(test)
        torch.accelerator.empty_cache()
        return {"refused": test.refused, "evidence": asdict(test.evidence())}

    def test_mixed(self, test: FreedomTest) -> None:
        """Test `mixed` if it is wanted. No step of a prefill node has rows, so it is not."""

    @property
    def chunk_size(self) -> int:
        """The most tokens of one prompt in a step, by the contract."""
        return int(self.vllm_config.scheduler_config.long_prefill_token_threshold or self.budget)

    @property
    def buckets(self) -> list[int]:
        """The lengths of steps that have a graph, ascending."""
        return sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or [])

    @property
    def budget(self) -> int:
        """The most prompt tokens of a step."""
        return int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def places(self) -> int:
        """The most prompts of a step."""
        return int(self.vllm_config.scheduler_config.max_num_seqs)

    def limits(self, stepper: Stepper) -> Limits:
        """Return the sizes of this engine's steps, and the longest prompt that the test of freedoms has room for."""
        on_cpu = current_platform.is_cpu()
        longest = CPU_LONGEST if on_cpu else max(LONGEST, 2 * self.chunk_size + 100)
        limits = Limits(
            chunk=self.chunk_size,
            budget=min(self.budget, max(CPU_BUDGET, self.chunk_size) if on_cpu else 2**31),
            sequences=self.places,
            longest=min(longest, stepper.max_model_len - 1),
            buckets=tuple(self.buckets),
            scenes=CPU_SCENES if on_cpu else 2**20,
        )
        return within(limits, stepper.num_blocks - 1, stepper.block_size)


class FreedomTest:
    """The parts of the test of freedoms, what they refused, and what they did."""

    def __init__(self, worker: PrefillWorker, wanted: Sequence[str]) -> None:
        self.refused = dict.fromkeys(wanted, "")
        self._worker = worker
        self._stepper = Stepper(worker)
        self._counts: dict[str, int] = {}
        self._seconds: list[tuple[str, float]] = []
        self._versions = worker.versions()

    def run(self, name: str, part: Callable[[list[str]], None]) -> None:
        """Run a part of the test for the freedoms that are not refused yet; none: it is left out."""
        if left := [freedom for freedom, reason in self.refused.items() if not reason]:
            began = time.monotonic()
            part(left)
            self._seconds.append((name, round(time.monotonic() - began, 3)))

    def refuse(self, found: dict[Freedom, str]) -> None:
        """Refuse freedoms for these reasons, unless there is one already."""
        for freedom, reason in found.items():
            if freedom.value in self.refused:
                self.refused[freedom.value] = self.refused[freedom.value] or reason

    def by_products(self, left: list[str]) -> None:
        """Refuse all freedoms if cuBLASLt splits K, or if an algorithm gives rows other bits, at any number of rows."""
        worker, reason = self._worker, ""
        scheduler = worker.vllm_config.scheduler_config
        try:
            heuristic = blas.Heuristic(ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}"))
            self._versions.append(f"cuBLASLt {heuristic.version}")
            rows = -(-scheduler.max_num_seqs // 16) * 16  # A decode node's `lm_head` has multiples of 16.
            products = blas.products(worker.model_runner.get_model(), scheduler.max_num_batched_tokens, rows)
            with self._timed("heuristic"):
                found = blas.surveyed(heuristic, products)
            self._counts |= {"products": len(products), "algorithms": sum(map(len, found))}
            with self._timed("algorithms"):
                for product, algorithms in zip(products, found, strict=True):
                    blas.check(product, algorithms)
        except (blas.RefusedError, OSError) as error:
            reason = str(error)
        self.refused |= dict.fromkeys(left, self._stepper.agree(reason))

    def by_steps(self, left: list[str]) -> None:
        """Refuse the freedoms for which a whole step gives other bits than the contract's own form, but for `mixed`."""
        test = Freedoms(self._stepper, self._worker.limits(self._stepper), _sampling())
        self.refused |= test.refused([name for name in left if name != Freedom.MIXED.value])
        self._counts |= {"steps": test.steps, "comparisons": test.comparisons}

    def add(self, name: str, steps: int, comparisons: int, seconds: float) -> None:
        """Count what another part of the test has done."""
        self._counts["steps"] = self._counts.get("steps", 0) + steps
        self._counts["comparisons"] = self._counts.get("comparisons", 0) + comparisons
        self._seconds.append((name, round(seconds, 3)))

    def evidence(self) -> Evidence:
        return Evidence(**self._counts, versions=tuple(self._versions), seconds=tuple(self._seconds))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds.append((part, round(time.monotonic() - began, 3)))


def _sampling() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, detokenize=False)
