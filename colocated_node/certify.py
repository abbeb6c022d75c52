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
from corun.node.vllm.selftest import BlockPool, Stepper, TestSequence, Trace, differences, first_difference
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
    """A prompt that ran alone."""

    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    trace: Trace
    """What else it gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Companion:
    """The whole or the end of a prompt, or the beginning of its sample, beside rows."""

    name: str
    alone: Alone
    """What it must be equal to."""
    blocks: tuple[int, ...]
    """The blocks of what was computed before, and then its own."""
    computed: int = 0
    """The tokens before it: whole blocks."""

    @property
    def count(self) -> int:
        """Its tokens in a step."""
        return len(self.alone.prompt) - self.computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a step has beside rows."""

    tokens: int
    sequences: int
    chunk: int
    """The most tokens of one prompt."""
    cuts: bool = False
    """Whether prompts may be cut anywhere; otherwise what was computed of one before is whole chunks."""
    samples: bool = False
    """Whether samples may begin in their prompt's last step."""


class MixedCertification(Certification):
    """The probes of a decode node, and prompts that ran alone, side by side in the same steps: a short prompt, or
    several, one of which has a context, and samples that begin with it."""

    def __init__(self, stepper: Stepper, slots: int, sampling: Sampling, room: Room) -> None:
        """Compute the expected bits of rows."""
        size = stepper.block_size
        # Beside them lies the KV of the same prompts alone, and a half again, and of one more. Each slot needs a block.
        tokens = min(room.tokens, min(stepper.num_blocks // 5, (stepper.num_blocks - slots - 5) * 2 // 7) * size)
        most = min(tokens, stepper.max_model_len - 1)
        longest = min(most, room.chunk) // size * size
        whole = {-(-length // size) * size for length in LENGTHS}
        self._room = replace(room, tokens=tokens)
        self._groups = self._grouped(sorted(length for length in {*whole, longest} if 0 < length <= longest))
        behind = room.chunk + size
        self._behind = 0 if room.cuts or room.chunk % size or behind > most else behind
        """The tokens of a prompt whose last block is computed behind a whole chunk; 0: there is none."""
        blocks = max((SAMPLES - (-5 * sum(group) // (2 * size)) for group in self._groups), default=0)
        blocks += self._behind // size + 1 if self._behind else 0
        self._spare = range(stepper.num_blocks - blocks, stepper.num_blocks)
        self._beside: list[Companion] = []
        self._difference = ""
        super().__init__(stepper, slots, sampling, company_blocks=blocks)

    def difference(self, slots: int) -> str:
        """Return the first difference in words; empty if there is none.

        Few rows, all slots, and half of the slots take turns beside the groups of prompts.
        """
        if not self._groups:
            return "no whole block of a prompt fits into a step, so nothing was compared"
        sizes = (min(len(self._probes), slots), slots, max(1, slots // 2))
        for number in range(max(len(sizes), len(self._groups))):
            lengths, rows = self._groups[number % len(self._groups)], sizes[number % len(sizes)]
            self._beside = self._company_of(lengths)
            traces = self._in_groups(rows, part=1, moving=rows < slots)  # Rows that move are not all busy at once.
            self._beside = []
            name = f"{rows} rows beside prompts of {', '.join(map(str, lengths))} tokens"
            if found := self._stepper.agree(self._difference or self._compared(traces, name)):
                return found
        return ""

    def _grouped(self, lengths: Sequence[int]) -> list[list[int]]:
        """Put lengths, the shortest first, into groups that fit into a step. Before these come two short ones alone,
        since a step in service mostly holds one short prompt beside many rows."""
        groups: list[list[int]] = []
        for length in lengths:
            if groups and sum(groups[-1]) + length <= self._room.tokens and len(groups[-1]) < self._room.sequences:
                groups[-1].append(length)
            else:
                groups.append([length])
        return [*([length] for length in lengths[:2] if [length] not in groups), *groups]

    def _company_of(self, lengths: Sequence[int]) -> list[Companion]:
        """Run prompts of these lengths alone. Return them as company of rows, with the end of one behind its context
        and samples of the longest one as far as a step has room."""
        size, free, company = self._stepper.block_size, iter(self._spare), list[Companion]()

        def take(count: int) -> tuple[int, ...]:
            return tuple(next(free) for _ in range(count))

        def add(name: str, alone: Alone, start: Sequence[int]) -> None:
            """Add the rest of a prompt behind these blocks, if a step has room."""
            count = len(alone.prompt) - len(start) * size
            if sum(one.count for one in company) + count <= self._room.tokens and len(company) < self._room.sequences:
                blocks = (*start, *take(len(alone.blocks) - len(start)))
                company.append(Companion(name=name, alone=alone, blocks=blocks, computed=len(start) * size))

        for length in lengths:
            add(f"a prompt of {length} tokens", self._alone(length, take(length // size)), ())
        longest, whole = company[-1], company[-1].alone.blocks
        if self._room.cuts and len(whole) > 1:
            add(f"the second half of {longest.name}", longest.alone, whole[: len(whole) // 2])
        if self._behind:
            alone = self._alone(self._behind, take(self._behind // size))
            add(f"the end of a prompt of {self._behind} tokens", alone, alone.blocks[:-1])
        for _ in range(SAMPLES if self._room.samples else 0):
            add(f"a sample that begins with {longest.name}", longest.alone, longest.blocks[:-1])
        return company

    def _alone(self, length: int, blocks: tuple[int, ...]) -> Alone:
        """Run a prompt in the contract's chunks, or, where it may be cut anywhere, in one step."""
        prompt = self._prompt(length)
        sequence, traces = self._prefill("alone", prompt, blocks), dict[str, Trace]()
        for count in chunks(length, self._room.chunk):
            traces = self._stepper.step([(sequence, count)], rows=0)
            self.steps += 1
        self._stepper.close()
        return Alone(prompt=prompt, blocks=blocks, trace=traces[sequence.name])

    def _prefill(self, name: str, prompt: tuple[int, ...], blocks: tuple[int, ...], computed: int = 0) -> TestSequence:
        # A greedy token is the same at any place of its output.
        return TestSequence(name=name, prompt=prompt, blocks=blocks, computed=computed, sampling=self._sampling(3))

    def _company(self) -> list[tuple[TestSequence, int]]:
        found = []
        for one in self._beside:
            self._names += 1
            name = f"prompt-{self._names}"
            found.append((self._prefill(name, one.alone.prompt, one.blocks, one.computed), one.count))
        return found

    def _note_company(self, company: Sequence[tuple[TestSequence, int]], found: Mapping[str, Trace]) -> None:
        self.comparisons += len(company)
        size, pairs = self._stepper.block_size, list(zip(self._beside, company, strict=True))
        own = [(one.alone.blocks[one.computed // size :], one.blocks[one.computed // size :]) for one, _ in pairs]
        traces = [(one.alone.trace, found[sequence.name]) for one, (sequence, _) in pairs]
        for one, stage in zip(self._beside, differences(self._stepper, own, traces), strict=True):
            if stage and not self._difference:
                self._difference = f"{one.name} beside rows differs first in {stage}"


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
        # All ranks compute lm_head together, so a rank that has found a difference scores, too.
        score = self._score(prompt)
        stage = self._stepper.layer_that_differs(mine, other) or first_difference(row, prompt)
        if not stage and score != row.logprob.cpu().numpy().tobytes():
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
        return (*tokens, *(int(trace.token) for trace in traces[:-1])), traces[-1]

    def _prefilled(
        self, name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], last: tuple[int, ...]
    ) -> tuple[Trace, list[Trace]]:
        """Compute a prompt in the contract's chunks, and return its last trace, and those of its samples.

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
        prompt, *others = (traces[each.name] for each in (sequence, *samples))
        return prompt, others

    def _sequence(self, name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], computed: int = 0) -> TestSequence:
        return TestSequence(name=name, prompt=tokens, blocks=blocks, computed=computed, sampling=self._sampling)

    def _close(self, steps: int) -> None:
        self._stepper.close()
        self.steps += steps
