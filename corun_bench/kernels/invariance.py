"""Measures whether the bits of a row depend on the batch that a kernel computes it in. Nothing is assumed.

The paper's Section III defines the two properties. Batch invariance: a row has the same bits in a batch as alone.
Position invariance: at one shape, rows that change places keep their bits. Bits are compared, never values within a
tolerance. Must not know which kernels there are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

IDLE = -1
"""The number of the idle row, which fills a batch up to a fixed number of rows."""
TARGETS = 16
"""The most rows of each drawn batch that are also computed in other batches."""

Prepare = Callable[[Sequence[int]], Callable[[], torch.Tensor]]
"""Makes a kernel's inputs from these rows of a pool, in this order. Returns the launch, which returns [rows, ...]."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True, slots=True)
class Tally:
    """The number of rows that were compared, and how many of them had equal bits."""

    equal: int = 0
    compared: int = 0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare two outputs row by row, [rows, ...] each."""
        self.equal += int((a == b).flatten(1).all(1).sum())
        self.compared += len(a)

    @property
    def verdict(self) -> bool | None:
        """Whether all compared rows were equal; None if there was nothing to compare."""
        return self.equal == self.compared if self.compared else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Invariance:
    """The comparisons that were made at one number of rows."""

    batch: Tally
    """Rows against the same rows in batches of other sizes, or, at a fixed size, among other rows."""
    position: Tally
    """Rows against the same batch in another order."""
    repeat: Tally
    """Rows against the same batch, computed again."""


def measure(prepare: Prepare, *, rows: int, pool: int, draws: int, seed: int, places: int = 0) -> Invariance:
    """Run a kernel on `draws` random batches, and on changed copies of them that should give the same bits.

    rows: the number of rows drawn for a batch. pool: the number of different rows to draw from. places: the number of
    rows of every batch, filled up with IDLE; 0: as many as are drawn. A single row is compared with other batches and
    orders only if it has places to move to.

    Raises:
        ArithmeticError: an output is not finite, or all zeros, so that equal bits would prove nothing.
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
    """Return the rows of a batch at random places, filled up with IDLE."""
    line = [*members, *[IDLE] * (places - len(members))]
    return chance.sample(line, len(line))


def _orders(line: list[int], chance: random.Random) -> list[list[int]]:
    """Return the batch backwards, moved by one place, and in a random order."""
    if len(line) == 1:
        return []
    return [line[::-1], line[-1:] + line[:-1], chance.sample(line, len(line))]


def _crowds(target: int, rows: int, pool: int, places: int, chance: random.Random) -> list[list[int]]:
    """Return batches with the target row and another size, or at a fixed size with other rows beside it.

    The row is alone in the first batch. At a fixed size a second batch has other rows at all other places.
    """
    sizes = [size for size in (1, places) if size and (places or size != rows)]
    others = [row for row in range(pool) if row != target]
    return [_line([target, *chance.sample(others, size - 1)], places, chance) for size in sizes]


def _of(bits: torch.Tensor, line: Sequence[int], members: Sequence[int]) -> torch.Tensor:
    """Return the output of some rows of a batch, in the order of `members`."""
    place = {row: index for index, row in enumerate(line)}
    return bits[torch.tensor([place[row] for row in members if row != IDLE], device=bits.device)]


def _bits(prepare: Prepare, line: Sequence[int]) -> torch.Tensor:
    """Return a kernel's output as integers of the same bits, [rows, ...]."""
    output = prepare(line)()
    if len(output) != len(line):
        raise ArithmeticError(f"the kernel gave {len(output)} rows of {len(line)}")
    if not bool(torch.isfinite(output).all()):
        raise ArithmeticError("the kernel's output is not finite")
    bits = output.contiguous().view(_INTEGERS[output.element_size()]).reshape(len(line), -1)
    if not bool((bits != 0).any()):
        raise ArithmeticError("the kernel's output is all zeros")
    return bits
