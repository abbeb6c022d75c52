"""A colocated node's tests of `mixed` and of `scores`: rows and prompts of one step move no bit of each other, and rows
have the bits of prompts.

Owns: which prompts the rows of the self-test have beside them, and the comparison of both with what they give alone;
and which drawn tokens are computed once more as a prompt. It runs in the engine's worker before the node serves. Must
not know: vLLM's internals, gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from corun.node.certificate import VOID
from corun.node.vllm.selftest import BlockPool, Stepper, TestSequence, Trace, first_difference
from decode_node.certify import SEED, STEPS, Certification, Sampling
from prefill_node.scenes import chunks

ScoreOf = Callable[[Trace], bytes]
"""A function from the last trace of a prompt to the score of the token that was drawn there: an fp32 number's bytes."""

LENGTHS = (16, 336, 1008, 2048)
"""The lengths of prompts beside rows, in tokens, rounded up to whole blocks, so that all of their KV is compared."""
SAMPLES = 2
"""The number of samples that begin in their prompt's last step in the test: they read the same blocks."""


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
        room = stepper.num_blocks // 4 * stepper.block_size
        longest = min(longest, stepper.max_model_len - 1, room) // stepper.block_size * stepper.block_size
        whole = {-(-length // stepper.block_size) * stepper.block_size for length in LENGTHS}
        self._prompt_lengths = sorted(length for length in {*whole, longest} if 0 < length <= longest)
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


class ScoreCertification:
    """Draws some tokens in steps of rows, and computes all of them once more as a prompt."""

    def __init__(self, stepper: Stepper, sampling: Any, chunk: int, score: ScoreOf) -> None:
        """Create the test. chunk: the most tokens of a prompt in one step, by the contract."""
        self.steps = 0
        self.comparisons = 0
        self._stepper = stepper
        self._sampling = sampling
        self._chunk = chunk
        self._score = score
        self._draw = random.Random(SEED)
        size = stepper.block_size
        most = min(stepper.max_model_len - 1, (stepper.num_blocks - 1 - SAMPLES) // 2 * size)
        # The longest ends soon after a chunk: few queries and many keys, which attention that looks at both would cut.
        whole = {-(-length // size) * size for length in (*LENGTHS, chunk + 1)}
        self._lengths = sorted(length for length in whole if STEPS < length <= most)
        blocks = 2 * max(self._lengths, default=0) // size + SAMPLES
        self._pool = BlockPool(stepper, blocks, self._draw, SEED)

    def difference(self) -> str:
        """Return the first difference between drawn tokens and the same tokens in a prompt in words; empty if there is
        none. Without one, attention with other splits has to differ, or nothing was shown."""
        if not self._lengths:
            return "no whole block fits the model behind drawn tokens, so nothing was compared"
        for length in self._lengths:
            if found := self._stepper.agree(self._compared(length, nullcontext())):
                return found
        control = self._compared(self._lengths[-1], self._stepper.other_splits())
        return "" if self._stepper.agree(control) else VOID

    def _compared(self, length: int, way: AbstractContextManager[None]) -> str:
        """Return what differs first between `length` tokens of which the last `STEPS` ran as rows, and the same tokens
        as a prompt, which is computed in this way."""
        self.comparisons += 1
        count = length // self._stepper.block_size
        mine, other, last = self._pool.take(count), self._pool.take(count), self._pool.take(SAMPLES)
        tokens, row = self._drawn(length, mine)
        with way:
            prompt, samples = self._prefilled("as a prompt", tokens, other, last)
        stage = self._stepper.layer_that_differs(mine, other) or first_difference(row, prompt)
        if not stage and self._score(prompt) != row.logprob:
            stage = "the score"
        for block, sample in zip(last, samples, strict=True):
            found = self._stepper.layer_that_differs(other[-1:], (block,)) or first_difference(row, sample)
            if found and not stage:
                stage = f"{found} of a sample that begins in its last step"
        self._pool.give_back((*mine, *other, *last))
        return f"of {length} tokens, the last {STEPS} drawn, a prompt differs first in {stage}" if stage else ""

    def _drawn(self, length: int, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], Trace]:
        """Return all tokens that ran, as many as `length`, and the trace of the last one, a row."""
        tokens = tuple(self._draw.choices(range(self._stepper.vocab_size), k=length - STEPS + 1))
        self._prefilled("before rows", tokens, blocks, ())
        # As on a decode node, the first row computes the prompt's last token again.
        sequence = self._sequence("rows", tokens, blocks, computed=len(tokens) - 1)
        traces = [self._stepper.step([(sequence, 1)])[sequence.name] for _ in range(STEPS)]
        self._close(STEPS)
        return (*tokens, *(trace.token for trace in traces[:-1])), replace(traces[-1], kv=())

    def _prefilled(
        self, name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], last: tuple[int, ...]
    ) -> tuple[Trace, list[Trace]]:
        """Compute a prompt in the contract's chunks, and return its last trace without KV, and those of its samples.

        last: a block for each sample that begins in the prompt's last step. It reads all other blocks where they are
        while they are written, and computes the tokens behind them itself.
        """
        whole = len(blocks) - 1
        shared, computed = blocks[:whole], whole * self._stepper.block_size
        sequence = self._sequence(name, tokens, blocks)
        samples = [
            self._sequence(f"sample {number}", tokens, (*shared, block), computed) for number, block in enumerate(last)
        ]
        counts = tuple(chunks(len(tokens), self._chunk))
        for count in counts[:-1]:
            self._stepper.step([(sequence, count)], rows=0)
        begins = [(sample, len(tokens) - computed) for sample in samples]
        traces = self._stepper.step([(sequence, counts[-1]), *begins], rows=0)
        self._close(len(counts))
        prompt, *others = (replace(traces[each.name], kv=()) for each in (sequence, *samples))
        return prompt, others

    def _sequence(self, name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], computed: int = 0) -> TestSequence:
        return TestSequence(name=name, prompt=tokens, blocks=blocks, computed=computed, sampling=self._sampling)

    def _close(self, steps: int) -> None:
        self._stepper.close()
        self.steps += steps
