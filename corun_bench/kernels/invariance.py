"""Whether the bits of a row depend on the batch that it is computed in, or on its place there.

Invariance is measured, never assumed (paper, Section III): with batch invariance a row has the same bits in a batch as
alone; with position invariance rows that change places keep their bits. Bits are compared, never values within a
tolerance. This module must not know what a kernel computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

IDLE = -1
"""The number of the idle row, which fills a batch up to a fixed number of rows."""
TARGETS = 16
"""The most rows of each drawn batch that are also computed in other batches."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Launch = Callable[[], torch.Tensor]
Prepare = Callable[[Sequence[int]], Launch]
"""Makes a kernel's inputs from these rows of a pool, in this order. Returns the launch, which returns [rows, ...]."""


def verdict(counts: Sequence[int]) -> bool | None:
    """Return whether all compared rows were equal; None if there was nothing to compare."""
    equal, compared = counts
    return equal == compared if compared else None


def invariance(
    prepare: Prepare, *, rows: int, pool: int, draws: int, seed: int, places: int = 0
) -> dict[str, list[int]]:
    """Run a kernel on `draws` random batches, and on changed copies of them that should give the same bits.

    rows: the number of rows drawn for a batch. pool: the number of different rows to draw from. places: the number of
    rows of every batch, filled up with IDLE; 0: as many as are drawn. A single row is compared with other batches and
    orders only if it has places to move to.

    Returns [equal rows, compared rows] for "batch" (the same rows in batches of other sizes, or, at a fixed size,
    among other rows), "position" (the batch in another order) and "repeat" (the batch computed again).

    Raises:
        ArithmeticError: an output is not finite, or all zeros, so that equal bits would prove nothing.
    """
    chance = random.Random(seed)
    found = {"batch": [0, 0], "position": [0, 0], "repeat": [0, 0]}

    def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        found[name][0] += int((a == b).flatten(1).all(1).sum())
        found[name][1] += len(a)

    for _ in range(draws):
        line = _line(chance.sample(range(pool), rows), places, chance)
        output = _bits(prepare, line)
        compare("repeat", _of(output, line, line), _of(_bits(prepare, line), line, line))
        orders = [line[::-1], line[-1:] + line[:-1], chance.sample(line, len(line))] if len(line) > 1 else []
        for order in orders:
            compare("position", _of(output, line, line), _of(_bits(prepare, order), order, line))
        members = [row for row in line if row != IDLE]
        # The row is alone first. At a fixed size it is also in a batch with other rows at all other places.
        sizes = [size for size in (1, places) if size and (places or size != rows)]
        for target in chance.sample(members, min(TARGETS, rows)):
            others = [row for row in range(pool) if row != target]
            for size in sizes:
                crowd = _line([target, *chance.sample(others, size - 1)], places, chance)
                compare("batch", _of(output, line, [target]), _of(_bits(prepare, crowd), crowd, [target]))
    return found


def _line(members: Sequence[int], places: int, chance: random.Random) -> list[int]:
    """Return the rows of a batch at random places, filled up with IDLE."""
    line = [*members, *[IDLE] * (places - len(members))]
    return chance.sample(line, len(line))


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
