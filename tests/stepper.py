"""A stand-in for a worker's stepper, whose model can be given one flaw. For tests of the self-tests only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from corun.node.vllm.selftest import TestSequence, Trace

Flaw = Callable[[int, list[TestSequence], TestSequence], Any]
"""From the row, the step's sequences and the sequence itself to something that leaks into its bits."""


def no_flaw(row: int, batch: list[TestSequence], sequence: TestSequence) -> Any:
    return None


def _bits(*facts: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(repr(facts).encode()).digest()), dtype=torch.float32)


@dataclass
class FakeStepper:
    """One layer of KV; a sequence's bits hash its prompt, its KV and its position, and what the flaw leaks."""

    flaw: Flaw = no_flaw
    stage: str = "hidden"
    num_blocks: int = 200
    block_size: int = 16
    vocab_size: int = 100
    max_model_len: int = 200
    by_position: bool = False
    """Whether the KV of each position follows from the prompt up to it, wherever it is cut. Otherwise a step's KV also
    follows from where the step began, and from what its blocks held."""
    is_dead: bool = False
    """Whether other splits in attention change nothing, as with dummy weights."""
    cut_from: int = 0
    """The tokens from which on other splits cut a sequence; shorter ones keep their bits."""
    steps: list[list[str]] = field(default_factory=list)
    told: list[int | None] = field(default_factory=list)
    """The number of decode rows beside prompts that each step was given; None: it holds no prompts."""

    def __post_init__(self) -> None:
        self._cache = torch.zeros(self.num_blocks, 8)
        self._known: set[str] = set()
        self._drawn: dict[str, tuple[int, ...]] = {}
        self._splits = 1

    def agree(self, finding: str) -> str:
        return finding

    @contextmanager
    def other_splits(self) -> Iterator[None]:
        self._splits = 2
        yield
        self._splits = 1

    def layer_that_differs(self, a: Sequence[int], b: Sequence[int]) -> str:
        left, right = (self._cache[list(blocks)].view(torch.uint8) for blocks in (a, b))
        return "" if torch.equal(left, right) else "the KV of layer 0 of 1"

    def scramble(self, blocks: Sequence[int], seed: int) -> None:
        self._cache[list(blocks)] = torch.randn(len(blocks), 8, generator=torch.Generator().manual_seed(seed))

    def read(self, blocks: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return (self._cache[list(blocks)],)

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        self._cache[list(blocks)] = contents[0]

    def step(
        self,
        tokens: Sequence[tuple[TestSequence, int]],
        ended: Iterable[TestSequence] = (),
        traced: Container[str] | None = None,
        rows: int | None = None,
    ) -> dict[str, Trace]:
        batch = [sequence for sequence, _ in tokens]
        self.told.append(rows)
        names = {sequence.name for sequence in batch}
        gone = {sequence.name for sequence in ended}
        assert len(names) == len(batch)
        assert not names & gone
        assert gone <= self._known
        written = [block for sequence in batch for block in sequence.blocks[sequence.computed // self.block_size :]]
        assert len({0, *written}) == 1 + len(written), "two sequences write to a KV block"
        self._known = self._known - gone | names
        self.steps.append([sequence.name for sequence in batch])
        found = {s.name: self._run(row, batch, s, count) for row, (s, count) in enumerate(tokens)}
        complete = {sequence.name for sequence in batch if sequence.computed >= len(sequence.prompt)}
        return {name: found[name] for name in found if name in complete and (traced is None or name in traced)}

    def _run(self, row: int, batch: list[TestSequence], sequence: TestSequence, count: int) -> Trace:
        leak = self.flaw(row, batch, sequence)
        start = sequence.computed
        sequence.computed += count
        sequence.drawn += 1
        splits = 1 if self.is_dead or sequence.computed < self.cut_from else self._splits
        tokens = (*sequence.prompt, *self._drawn.get(sequence.name, ()))[: sequence.computed]
        own = (tokens, splits) if self.by_position else self._contents(sequence, start, splits)
        first = start // self.block_size
        written = sequence.blocks[first : -(-sequence.computed // self.block_size)]
        assert len(sequence.blocks) * self.block_size >= sequence.computed, "a sequence lacks blocks"
        shown = leak if self.stage == "kv" else None
        if self.by_position:
            for number, block in enumerate(written, start=first):
                end = min(sequence.computed, (number + 1) * self.block_size)
                self._cache[block] = _bits("kv", tokens[:end], splits, shown)
        else:
            self._cache[list(written)] = _bits("kv", own, shown)
        trace = Trace(
            hidden=_bits(own), logits=_bits("logits", own), logprob=torch.zeros(1), token=torch.tensor([len(own[0])])
        )
        if sequence.computed >= len(sequence.prompt):
            self._drawn[sequence.name] = (*self._drawn.get(sequence.name, ()), int(trace.token))
        if leak is None or self.stage == "kv":
            return trace
        return replace(trace, **{self.stage: _bits(leak)[: len(getattr(trace, self.stage))]})

    def _contents(self, sequence: TestSequence, start: int, splits: int) -> tuple[Any, ...]:
        return (sequence.prompt, start, [self._cache[block].tolist() for block in sequence.blocks], splits)

    def with_kv(self, sequence: TestSequence, last: Trace, start: int = 0) -> Trace:
        written = slice(start // self.block_size, -(-sequence.computed // self.block_size))
        return replace(last, kv=self.read(sequence.blocks[written]))

    def close(self) -> None:
        self._known, self._drawn = set(), {}
