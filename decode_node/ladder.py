"""How many rows a decode step has: all slots, or fewer where fewer were found to give the same bits.

The contract is the step of all slots. A smaller one may run in its place once the node's self-test has compared the
two on its own model and device, bit by bit (decode_node/certify.py); where that fails, steps keep all their rows. Pure;
must not know how a step is padded or compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SMALLER = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
"""What is tried, where there are more slots."""


def smaller_than(slots: int) -> tuple[int, ...]:
    """The numbers of rows to try beside all slots, ascending."""
    return tuple(rows for rows in SMALLER if rows < slots)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The numbers of rows that steps may have."""

    slots: int
    certified: tuple[int, ...] = ()
    """Fewer than the slots, ascending."""

    @classmethod
    def of(cls, slots: int, certified: Iterable[int]) -> Ladder:
        return cls(slots, tuple(sorted({*certified} - {slots})))

    def rows(self, live: int) -> int:
        """Of a step of `live` requests: the fewest that hold them. A longer step, as of a prompt, keeps its length."""
        return next((rows for rows in (*self.certified, self.slots) if rows >= live), live)
