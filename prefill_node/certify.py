"""A prefill node's tests: a prompt's bits must not depend on what ran before it and where its KV lies, and the node
may pack prompts and cut them anywhere only if that moves no bit either.

Owns: how prompts are run and compared. It runs in the engine's worker, with the loaded model's own steps, before the
node serves. Must not know: vLLM's internals, gRPC, which steps show what (prefill_node/scenes.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from corun.node.certificate import VOID
from corun.node.vllm.selftest import BlockPool, Stepper, TestSequence, Trace, compare, differences
from corun.types import Freedom
from prefill_node import scenes
from prefill_node.scenes import Limits, Scene

SEED = 20_26
PROMPTS = 6


def lengths(chunk_size: int, buckets: Sequence[int], longest: int) -> list[int]:
    """Return at most `PROMPTS` prompt lengths, on both sides of the edges where shapes change, none above `longest`."""
    middle = buckets[len(buckets) // 2] if buckets else chunk_size // 2
    edges = [1, middle, middle + 1, chunk_size - 1, chunk_size, chunk_size + 1]
    return sorted({length for length in edges if 1 <= length <= longest})[:PROMPTS]


class Bench:
    """Runs prompts one at a time, each in other KV blocks than all whose KV is still held."""

    def __init__(self, stepper: Stepper, chunk_size: int, tested: Sequence[int], sampling: Any) -> None:
        """Create it. tested: the prompts' lengths, ascending. There must be four times the blocks of the longest."""
        self._stepper = stepper
        self._chunk = chunk_size
        self._sampling = sampling
        self._draw = random.Random(SEED)
        self._longest = self._blocks_of(tested[-1])
        wanted = sum(self._blocks_of(length) for length in tested) + 2 * self._longest
        self._pool = BlockPool(stepper, min(wanted, stepper.num_blocks - 1), self._draw, SEED)
        self._before = self._pool.take(self._longest)

    def groups(self, tested: Sequence[int]) -> list[list[int]]:
        """Put lengths into as few groups as have room in KV blocks, all prompts of one and the longest one beside."""
        groups, free = list[list[int]](), 0
        for length in tested:
            count = self._blocks_of(length)
            if count > free:
                groups.append([])
                free = len(self._pool.free) - self._longest
            groups[-1].append(length)
            free -= count
        return groups

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(self._stepper.vocab_size), k=length))

    def contents(self, length: int) -> tuple[torch.Tensor, ...]:
        """Return the contents of a prompt's blocks before it runs; they matter because its last block is not filled.
        They lie in blocks of their own, in which nothing runs."""
        return self._stepper.read(self._before[: self._blocks_of(length)])

    def run(
        self, name: str, prompt: tuple[int, ...], contents: Sequence[torch.Tensor] | None = None
    ) -> tuple[TestSequence, Trace]:
        """Prefill one prompt in chunks. Its KV stays in its blocks until `give_back`."""
        blocks = self._pool.take(self._blocks_of(len(prompt)))
        if contents is not None:
            self._stepper.write(blocks, contents)
        sequence = TestSequence(name=name, prompt=prompt, blocks=blocks, computed=0, sampling=self._sampling)
        traces: dict[str, Trace] = {}
        while not traces:
            count = min(self._chunk, len(prompt) - sequence.computed)
            traces = self._stepper.step([(sequence, count)], rows=0)
        self._stepper.close()
        return sequence, traces[name]

    def give_back(self, *sequences: TestSequence) -> None:
        for sequence in sequences:
            self._pool.give_back(sequence.blocks)

    def _blocks_of(self, length: int) -> int:
        return -(-(length + 1) // self._stepper.block_size)


def certify(stepper: Stepper, chunk_size: int, buckets: Sequence[int], sampling: Any) -> str:
    """Run each prompt twice; the second run comes after another prompt and uses other KV blocks.

    The other prompt is as long as the longest one, so it costs most, and all prompts whose KV can be held meanwhile
    share it. Before it they run from the shortest up, each right behind a shorter one. After it they run from the
    longest down, each right behind a longer one or the other prompt, so other tokens were left behind its end.

    Returns:
        The first difference of the shortest prompt that has one in words; empty if every bit is the same.
    """
    room = (stepper.num_blocks - 1) // 4 * stepper.block_size - 1
    tested = lengths(chunk_size, buckets, min(stepper.max_model_len - 1, room))
    bench = Bench(stepper, chunk_size, tested, sampling)
    for group in bench.groups(tested):
        firsts = [
            bench.run(f"a prompt of {length} tokens", bench.prompt(length), bench.contents(length)) for length in group
        ]
        other, _ = bench.run("another prompt", bench.prompt(tested[-1]))
        bench.give_back(other)
        difference = ""
        for first, expected in reversed(firsts):
            second, found = bench.run(first.name, first.prompt, bench.contents(len(first.prompt)))
            left, right = stepper.with_kv(first, expected), stepper.with_kv(second, found)
            scene = "after another prompt, in other KV blocks"
            difference = compare({first.name: [left]}, {first.name: [right]}, scene) or difference
            bench.give_back(first, second)
        if difference := stepper.agree(difference):
            return difference
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A prompt that has run alone, in the contract's chunks."""

    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    """The KV blocks that hold its KV until the test ends."""
    tail: tuple[torch.Tensor, ...]
    """The contents that its last block had before, per layer: the prompt does not fill it."""
    trace: Trace
    """What else it gave."""


class Freedoms:
    """Compares prompts in company, and cut elsewhere, with the same prompts alone in the contract's chunks."""

    def __init__(self, stepper: Stepper, limits: Limits, sampling: Any) -> None:
        self.steps = 0
        self.comparisons = 0
        self._stepper = stepper
        self._limits = limits
        self._sampling = sampling
        self._draw = random.Random(SEED)
        self._names = 0
        self._known: dict[int, Reference] = {}
        self._pool = BlockPool(stepper, scenes.blocks_wanted(limits, stepper.block_size), self._draw, SEED)

    def refused(self, wanted: Sequence[str]) -> dict[str, str]:
        """Return why each wanted freedom is refused; empty: it is held.

        A freedom ends with its first difference. If there was none at all, sums in another order must give one, or
        nothing was shown: dummy weights, for example, make every way to compute look the same.
        """
        found = dict.fromkeys(wanted, "")
        if Freedom.PACKED.value in found:
            found[Freedom.PACKED.value] = self._first(scenes.packed)
        if Freedom.CHUNKS.value in found:
            packs = not found.get(Freedom.PACKED.value, "not tested")
            found[Freedom.CHUNKS.value] = self._first(scenes.cut) or (
                self._first(scenes.cut_and_packed) if packs else ""
            )
        if found and not any(found.values()) and not self._stepper.agree(self._control()):
            return dict.fromkeys(wanted, VOID)
        return found

    def _first(self, kind: Callable[[Limits], Iterator[Scene]]) -> str:
        """Return the first difference in the scenes of one kind in words; empty if there is none."""
        found = (self._stepper.agree(self._play(scene)) for scene in scenes.planned(kind, self._limits))
        return next((difference for difference in found if difference), "")

    def _control(self) -> str:
        """Return what differs if attention cuts KV in another way; empty if nothing does."""
        # Its last step is one token after a whole chunk, which attention that looks at the batch cuts into pieces.
        length = min(self._limits.chunk + 1, self._limits.longest)
        expected = self._reference(length)
        with self._stepper.other_splits():
            steps = tuple((scenes.Piece(0, count),) for count in scenes.chunks(length, self._limits.chunk))
            return self._play(Scene("attention with other splits", (length,), (), steps), {0: expected})

    def _play(self, scene: Scene, expected: dict[int, Reference] | None = None) -> str:
        """Run a scene and return its first difference in words; empty if there is none."""
        expected = expected or {number: self._reference(length) for number, length in enumerate(scene.probes)}
        sequences = [self._sequence(one.prompt, one.tail) for one in expected.values()]
        sequences += [self._sequence(self._prompt(length)) for length in scene.others]
        probes = {sequence.name: number for number, sequence in enumerate(sequences[: len(scene.probes)])}
        traces: dict[str, Trace] = {}
        for step in scene.steps:
            traces |= self._step([(sequences[piece.prompt], piece.count) for piece in step], probes)
        blocks = [(expected[at].blocks, sequences[at].blocks) for at in probes.values()]
        found = differences(self._stepper, blocks, [(expected[at].trace, traces[name]) for name, at in probes.items()])
        self.comparisons += len(probes)
        names = (f"a prompt of {length} tokens, {scene.name}, differs first in" for length in scene.probes)
        difference = next((f"{name} {stage}" for name, stage in zip(names, found, strict=True) if stage), "")
        self._stepper.close()
        for sequence in sequences:
            self._pool.give_back(sequence.blocks)
        return difference

    def _step(self, tokens: Sequence[tuple[TestSequence, int]], traced: Iterable[str]) -> dict[str, Trace]:
        self.steps += 1
        return self._stepper.step(tokens, traced=frozenset(traced), rows=0)

    def _reference(self, length: int) -> Reference:
        """Return the prompt of this length alone, in the contract's chunks; it runs once."""
        if length not in self._known:
            sequence = self._sequence(self._prompt(length))
            tail = self._stepper.read(sequence.blocks[-1:])
            for count in scenes.chunks(length, self._limits.chunk):
                traces = self._step([(sequence, count)], [sequence.name])
            self._stepper.close()
            self._known[length] = Reference(
                prompt=sequence.prompt, blocks=sequence.blocks, tail=tail, trace=traces[sequence.name]
            )
        return self._known[length]

    def _sequence(self, prompt: tuple[int, ...], tail: tuple[torch.Tensor, ...] = ()) -> TestSequence:
        """Return a sequence in blocks of its own. Only the contents of its last block are set: it writes the others."""
        self._names += 1
        blocks = self._pool.take(self._blocks_of(len(prompt)))
        if tail:
            self._stepper.write(blocks[-1:], tail)
        return TestSequence(
            name=f"prompt-{self._names}", prompt=prompt, blocks=blocks, computed=0, sampling=self._sampling
        )

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(self._stepper.vocab_size), k=length))

    def _blocks_of(self, length: int) -> int:
        return -(-length // self._stepper.block_size)
