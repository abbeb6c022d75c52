"""A colocated node's test of `mixed`: rows and prompts of one step move no bit of each other.

Owns: which prompts the rows of the self-test have beside them, and the comparison of both with what they give alone.
It runs in the engine's worker before the node serves. Must not know: vLLM's internals, gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from corun.node.vllm.selftest import Stepper, TestSequence, Trace, first_difference
from decode_node.certify import Certification, Sampling

LENGTHS = (16, 336, 1008, 2048)
"""The lengths of prompts beside rows, in tokens, rounded up to whole blocks, so that all of their KV is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """A prompt that ran alone in one step."""

    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    trace: Trace
    """What it gave, without KV, which stays in its blocks."""


class MixedCertification(Certification):
    """The probes of a decode node, and prompts that ran alone, side by side in the same steps."""

    def __init__(self, stepper: Stepper, slots: int, sampling: Sampling, longest: int) -> None:
        """Compute the expected bits of rows. longest: the most tokens of a prompt in one step."""
        whole = {-(-length // stepper.block_size) * stepper.block_size for length in LENGTHS}
        longest = min(longest, stepper.max_model_len - 1)
        self._prompt_lengths = sorted(length for length in whole if length <= longest)
        size = max(self._prompt_lengths, default=0) // stepper.block_size + 1
        last = stepper.num_blocks
        self._places = (range(last - 2 * size, last - size), range(last - size, last))
        self._beside: Alone | None = None
        self._difference = ""
        super().__init__(stepper, slots, sampling, company_blocks=2 * size)

    def difference(self, slots: int) -> str:
        """Return the first difference in words; empty if there is none.

        Each prompt has another number of rows beside it: all slots, a few, half of the slots.
        """
        if not self._prompt_lengths:
            return "no whole block of a prompt fits into a step, so nothing was compared"
        for number, length in enumerate(self._prompt_lengths):
            rows = (slots, min(len(self._probes), slots), max(1, slots // 2))[number % 3]
            self._beside = self._alone(length)
            traces = self._in_groups(rows, part=1, moving=rows < slots)  # Rows that move are not all busy at once.
            self._beside = None
            name = f"{rows} rows beside a prompt of {length} tokens"
            if found := self._stepper.agree(self._difference or self._compared(traces, name)):
                return found
        return ""

    def _alone(self, length: int) -> Alone:
        prompt, blocks = self._prompt(length), tuple(self._places[0][: length // self._stepper.block_size])
        sequence = self._prefill("alone", prompt, blocks)
        trace = self._stepper.step([(sequence, length)], rows=0)[sequence.name]
        self._stepper.close()
        self.steps += 1
        return Alone(prompt=prompt, blocks=blocks, trace=replace(trace, kv=()))

    def _prefill(self, name: str, prompt: tuple[int, ...], blocks: tuple[int, ...]) -> TestSequence:
        return TestSequence(name=name, prompt=prompt, blocks=blocks, computed=0, sampling=self._sampling(3))

    def _company(self) -> list[tuple[TestSequence, int]]:
        if self._beside is None:
            return []
        self._names += 1
        alone = self._beside
        blocks = tuple(self._places[1][: len(alone.blocks)])
        return [(self._prefill(f"prompt-{self._names}", alone.prompt, blocks), len(alone.prompt))]

    def _note_company(self, company: Sequence[tuple[TestSequence, int]], found: Mapping[str, Trace]) -> None:
        for sequence, length in company:
            assert self._beside is not None
            self.comparisons += 1
            stage = self._stepper.layer_that_differs(self._beside.blocks, sequence.blocks)
            stage = stage or first_difference(self._beside.trace, replace(found[sequence.name], kv=()))
            if stage and not self._difference:
                self._difference = f"a prompt of {length} tokens beside rows differs first in {stage}"
