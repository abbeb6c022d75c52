"""How many rows a decode step has: one per slot, or fewer if the self-test found that fewer give the same bits.

The contract is the step with a row for every slot. A smaller step may run in its place once the node's self-test has
compared the two, bit by bit, on its own model and device (decode_node/certify.py). If they differ, steps keep all
their rows. This module is pure. Must not know: how a step is padded or compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SMALLER = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
"""The numbers of rows that are tried, as far as they are below the number of slots."""


def smaller_than(slots: int) -> tuple[int, ...]:
    """Return the numbers of rows below `slots` to try, ascending."""
    return tuple(rows for rows in SMALLER if rows < slots)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The numbers of rows that steps may have."""

    slots: int
    certified: tuple[int, ...] = ()
    """The certified numbers of rows below `slots`, ascending."""

    @classmethod
    def of(cls, slots: int, certified: Iterable[int]) -> Ladder:
        return cls(slots, tuple(sorted({*certified} - {slots})))

    def rows(self, live: int) -> int:
        """Return the least allowed number of rows for `live` requests; a longer step, as of a prompt, stays as is."""
        return next((rows for rows in (*self.certified, self.slots) if rows >= live), live)
