"""A decode node's self-test: a sample's bits must not depend on its neighbours, its row, its KV blocks or row moves.

Where attention cuts the KV of long sequences into pieces, some probes are long enough to be cut, and grow over the edge
of a piece while they are compared. The others stay short: the time of the test is that of its many steps.

Owns: which scenes are compared. It runs in the engine's worker, with the loaded model's own step, before the node
serves. Must not know: vLLM's internals, gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corun.node.vllm.selftest import BlockPool, Stepper, TestSequence, Trace, compare

PROBES = 6
"""The number of probes: one for each style of sampling (decode_node/worker.py)."""
STEPS = 4
STARTED = 2
"""The number of probes that start in each step after the first while rows move."""
LONGEST = 1024
"""The most tokens of a sequence under test that is not to be cut. One probe has them wherever they fit: FlashAttention
by its own heuristic, which is the control, cuts one row into pieces from about 700 tokens on."""
CUTS = (1, 2)
"""The edges, in pieces, that a probe grows over. Beyond the second one the pieces are more than two."""
SEED = 20_25

Sampling = Callable[[int], Any]
"""A function from a number to vLLM's `SamplingParams`. It decides which styles of sampling are in one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One sequence whose bits are compared. It has the same prompt and KV in every scene."""

    name: str
    prompt: tuple[int, ...]
    sampling: Any
    seed: int
    """The seed of the random contents of its KV blocks. A copy of these might not fit beside the KV cache."""


class Certification:
    """The probes, and the bits that each one has alone in a step of all slots."""

    def __init__(
        self, stepper: Stepper, slots: int, sampling: Sampling, piece: int = 0, company_blocks: int = 0
    ) -> None:
        """Compute the expected bits. The worker must use steps of all slots at this time.

        piece: the tokens of the pieces that attention cuts a sequence into; 0: it cuts none. company_blocks: the KV
        blocks that are left to other sequences in the steps (`_company`).

        Raises RuntimeError if there is less than a KV block for each slot.
        """
        self.steps = 0
        self.comparisons = 0
        self._stepper = stepper
        self._sampling = sampling
        self._draw = random.Random(SEED)
        self._names = 0
        room = stepper.num_blocks - 1 - company_blocks
        long = self._long(piece, min(room // 2, room - slots))
        taken = sum(map(self._blocks_of, long))
        share = (room - taken) // slots * stepper.block_size
        self._longest = min(LONGEST, stepper.max_model_len - STEPS, share - STEPS)
        if self._longest < 1:
            raise RuntimeError(f"{slots} slots have {room} KV blocks and need {slots}: give them memory, or take fewer")
        self._pool = BlockPool(stepper, taken + slots * self._blocks_of(self._longest), self._draw, SEED)
        short = min(PROBES, slots) - (0 if piece else len(long))
        lengths = [*(self._draw.randint(1, self._longest) for _ in range(short)), *long]
        self._probes = [self._probe(number, length) for number, length in enumerate(lengths)]
        self._tokens = self._prompt(2 * self._longest)
        """The neighbours' prompts are parts of these: it takes long to draw thousands of prompts."""
        self._expected = self._one_by_one()

    def check(self, rows: int) -> str:
        """Run the probes alone in other KV blocks, with half of the rows busy, with all rows busy, and with row moves.
        With few rows, some of these would be the same again.

        Returns:
            The first difference in words; empty if every bit is the same.
        """
        scenes: dict[str, Callable[[], dict[str, list[Trace]]]] = {"alone, in other KV blocks": self._one_by_one}
        if len(self._probes) % rows:  # Some group leaves rows to neighbours.
            scenes["half of the rows busy"] = lambda: self._in_groups(rows, part=2, moving=False)
        if rows > 1:
            scenes["all rows busy"] = lambda: self._in_groups(rows, part=1, moving=False)
            scenes["rows move"] = lambda: self._in_groups(rows, part=2, moving=True)
        findings = (self._stepper.agree(self._compared(scene(), name)) for name, scene in scenes.items())
        return next((finding for finding in findings if finding), "")

    def control(self) -> str:
        """Return what differs if attention cuts KV in another way, probe by probe; empty if nothing does, which means
        that this test would notice nothing."""
        with self._stepper.other_splits():
            return self._stepper.agree(self._compared(self._one_by_one(), "attention with other splits"))

    def _compared(self, found: dict[str, list[Trace]], scene: str) -> str:
        self.comparisons += len(found)
        return compare(self._expected, found, scene)

    def _one_by_one(self) -> dict[str, list[Trace]]:
        """Run each probe alone and return its traces, by name."""
        alone = (self._play([probe], crowd=0, moving=False) for probe in self._probes)
        return {name: traces for found in alone for name, traces in found.items()}

    def _in_groups(self, rows: int, *, part: int, moving: bool) -> dict[str, list[Trace]]:
        """Run the probes in groups that fit into `rows` rows, each beside neighbours in 1/`part` of the rows left."""
        groups = (self._probes[start : start + rows] for start in range(0, len(self._probes), rows))
        played = (self._play(group, crowd=(rows - len(group)) // part, moving=moving) for group in groups)
        return {name: traces for found in played for name, traces in found.items()}

    def _long(self, piece: int, room: int) -> list[int]:
        """Return the lengths of the probes that have room of their own, ascending: as many as the model allows and fit
        into `room` KV blocks together.

        Where attention cuts sequences, they lie at the edges of pieces; in its first step a probe reads one token less
        than whole pieces. Elsewhere it is one: with many slots and little KV, all others may be too short to be cut.
        """
        most = self._stepper.max_model_len - STEPS
        if not piece:
            length = min(LONGEST, most, room * self._stepper.block_size - STEPS)
            return [length] if length > 0 else []
        lengths: list[int] = []
        for length in (edge * piece - 1 for edge in CUTS):
            room -= self._blocks_of(length)
            if room >= 0 and length <= most:
                lengths.append(length)
        return lengths

    def _probe(self, number: int, length: int) -> Probe:
        prompt, sampling = self._prompt(length), self._sampling(number)
        return Probe(name=f"probe-{number}", prompt=prompt, sampling=sampling, seed=SEED + 1 + number)

    def _play(self, probes: list[Probe], *, crowd: int, moving: bool) -> dict[str, list[Trace]]:
        """Run `STEPS` steps of every probe among `crowd` neighbours, in a random order of rows.

        With `moving`, one probe starts in the first step and `STARTED` in each later one, and half of the neighbours
        end after each step and are replaced by others, so that sequences change their rows.
        """
        waiting = [self._sequence(probe.name, probe.prompt, probe.sampling, probe.seed) for probe in probes]
        neighbours = [self._neighbour() for _ in range(crowd)]
        traces: dict[str, list[Trace]] = {probe.name: [] for probe in probes}
        running: list[TestSequence] = []
        ended: list[TestSequence] = []
        while waiting or running:
            started = waiting[: (STARTED if running else 1) if moving else None]
            waiting = waiting[len(started) :]
            running += started
            rows = [*running, *neighbours]
            if started:
                self._draw.shuffle(rows)
                # Rows that fill no whole tile of a kernel come last, and may be computed in another way.
                rows.remove(running[-1])
                rows.append(running[-1])
            company = self._company()
            traced = {*traces, *(sequence.name for sequence, _ in company)}
            tokens = [*((sequence, 1) for sequence in rows), *company]
            found = self._stepper.step(tokens, ended, traced, rows=len(rows) if company else None)
            self.steps += 1
            self._note_company(company, found)
            for sequence in running:
                trace = found[sequence.name]
                # No step writes what another one wrote, so the last one's KV is that of all. The first one's KV says
                # where a difference begins: later steps differ as soon as another token was drawn.
                if sequence.drawn in (1, STEPS):
                    trace = self._stepper.with_kv(sequence, trace, len(sequence.prompt) - 1)
                traces[sequence.name].append(trace)
            ended = [sequence for sequence in running if sequence.drawn == STEPS]
            running = [sequence for sequence in running if sequence.drawn < STEPS]
            if moving:
                half = -(-crowd // 2)  # A single one ends, too: none has blocks for more than `STEPS` tokens.
                neighbours, gone = neighbours[half:], neighbours[:half]
                ended += gone
                self._free(gone)
                neighbours += [self._neighbour() for _ in gone]
            self._free(sequence for sequence in ended if sequence.name in traces)
            ended += (sequence for sequence, _ in company)
        self._free(neighbours)
        self._stepper.close()
        return traces

    def _company(self) -> list[tuple[TestSequence, int]]:
        """Return what else is in the next step, each sequence with its number of tokens: nothing on a decode node."""
        return []

    def _note_company(self, company: Sequence[tuple[TestSequence, int]], found: Mapping[str, Trace]) -> None:
        """Take the traces of the company."""

    def _free(self, sequences: Iterable[TestSequence]) -> None:
        for sequence in sequences:
            self._pool.give_back(sequence.blocks)

    def _neighbour(self) -> TestSequence:
        self._names += 1
        start, length = self._draw.randrange(self._longest), self._draw.randint(1, self._longest)
        prompt = self._tokens[start : start + length]
        return self._sequence(f"neighbour-{self._names}", prompt, self._sampling(self._names))

    def _sequence(self, name: str, prompt: tuple[int, ...], sampling: Any, seed: int | None = None) -> TestSequence:
        """Return a sequence whose KV has arrived from a prefill node: only the last prompt token has not run yet."""
        blocks = self._pool.take(self._blocks_of(len(prompt)))
        if seed is not None:
            self._stepper.scramble(blocks, seed)
        return TestSequence(name=name, prompt=prompt, blocks=blocks, computed=len(prompt) - 1, sampling=sampling)

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(self._stepper.vocab_size), k=length))

    def _blocks_of(self, length: int) -> int:
        return -(-(length + STEPS) // self._stepper.block_size)
