"""Whether the bits of a row depend on the batch that a kernel computes it in: measured, never assumed.

The two properties of the paper's Section III. Batch invariance: a row has the bits that it has alone. Position
invariance: at one shape, rows that change places take their bits along. Bits are compared, never values within a
tolerance. Must not know which kernels there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

IDLE = -1
"""Stands for a row that nobody asked for, in a batch of a fixed number of rows."""
TARGETS = 16
"""Rows of a batch that are computed alone as well, in every draw."""

Prepare = Callable[[Sequence[int]], Callable[[], torch.Tensor]]
"""Makes a kernel's inputs of these rows of a pool, in this order; returns what launches it: [rows, ...]."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True, slots=True)
class Tally:
    """Rows whose bits were equal, of those compared."""

    equal: int = 0
    compared: int = 0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compares [rows, ...] with [rows, ...]."""
        self.equal += int((a == b).flatten(1).all(1).sum())
        self.compared += len(a)

    @property
    def verdict(self) -> bool | None:
        """None: there was nothing to compare."""
        return self.equal == self.compared if self.compared else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Invariance:
    """What was compared at one number of rows."""

    batch: Tally
    """With the same rows in batches of other sizes, or in other crowds at a fixed size."""
    position: Tally
    """With the same batch in another order."""
    repeat: Tally
    """With the same batch, again."""


def measure(prepare: Prepare, *, rows: int, pool: int, draws: int, seed: int, places: int = 0) -> Invariance:
    """Runs a kernel on `draws` random batches, and on changes of them that should not matter.

    rows: of a batch. pool: different rows to draw from. places: rows of every batch, those that are not drawn IDLE; 0:
    as many as are drawn. A single row is only compared where it has places to move to.

    Raises:
        ArithmeticError: an output is not finite, or all zeros: nothing would follow from equal bits.
    """
    chance = random.Random(seed)
    found = Invariance(batch=Tally(), position=Tally(), repeat=Tally())
    for _ in range(draws):
        line = _line(chance.sample(range(pool), rows), places, chance)
        output = _bits(prepare, line)
        found.repeat.add(_of(output, line, line), _of(_bits(prepare, line), line, line))
        for order in _orders(line, chance):
            found.position.add(_of(output, line, line), _of(_bits(prepare, order), order, line))
        members = [row for row in line if row != IDLE]
        for target in chance.sample(members, min(TARGETS, rows)):
            for other in _crowds(target, rows, pool, places, chance):
                found.batch.add(_of(output, line, [target]), _of(_bits(prepare, other), other, [target]))
    return found


def _line(members: Sequence[int], places: int, chance: random.Random) -> list[int]:
    """The rows of a batch, at random places."""
    line = [*members, *[IDLE] * (places - len(members))]
    return chance.sample(line, len(line))


def _orders(line: list[int], chance: random.Random) -> list[list[int]]:
    """Backwards, everybody one place further, and any."""
    if len(line) == 1:
        return []
    return [line[::-1], line[-1:] + line[:-1], chance.sample(line, len(line))]


def _crowds(target: int, rows: int, pool: int, places: int, chance: random.Random) -> list[list[int]]:
    """Batches with the row that have another size or, at a fixed size, other rows beside it: alone, and all places."""
    sizes = [size for size in (1, places) if size and (places or size != rows)]
    others = [row for row in range(pool) if row != target]
    return [_line([target, *chance.sample(others, size - 1)], places, chance) for size in sizes]


def _of(bits: torch.Tensor, line: Sequence[int], members: Sequence[int]) -> torch.Tensor:
    """The output of some of the rows of a batch, in their own order."""
    place = {row: index for index, row in enumerate(line)}
    return bits[torch.tensor([place[row] for row in members if row != IDLE], device=bits.device)]


def _bits(prepare: Prepare, line: Sequence[int]) -> torch.Tensor:
    """A kernel's output as integers of the same bits, [rows, ...]."""
    output = prepare(line)()
    if len(output) != len(line):
        raise ArithmeticError(f"the kernel gave {len(output)} rows of {len(line)}")
    if not bool(torch.isfinite(output).all()):
        raise ArithmeticError("the kernel's output is not finite")
    bits = output.contiguous().view(_INTEGERS[output.element_size()]).reshape(len(line), -1)
    if not bool((bits != 0).any()):
        raise ArithmeticError("the kernel's output is all zeros")
    return bits
