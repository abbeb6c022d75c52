"""A schedule of faults: their kinds, and how a seed draws them, whichever cluster they are for.

Must not know how a fault is made nor which requests the cluster gets. Tests only.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLIENTS = "clients"
"""The target of a fault that hits no process."""
LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault."""

    fault: Callable[[Any, str, float], Awaitable[None]] | None = None
    """Makes the fault: gets the cluster, the name of a member and the strength. None for faults of clients."""
    roles: str = ""
    """The roles of its targets, by first letter; empty for clients."""
    weight: int = 1
    """How often it is drawn; with 0 it comes only when it is asked for by name."""
    replaces: bool = False
    """Whether a new process has to take the place of the target's."""
    is_mild: bool = False
    """Whether it may hit the last process of a role."""
    all_of_role: bool = False
    """Whether it hits every process of the target's role at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One fault of a schedule."""

    kind: str
    target: str
    wait_s: float
    """The wait after the fault before; longer if that fault or another one must have passed first."""
    strength: float
    """The strength in [0, 1): how long, how slow or how many."""

    def __str__(self) -> str:
        return f"{self.kind} {self.target} ({self.strength:.2f}, after {self.wait_s:.1f} s)"


def draw(
    kinds: Mapping[str, Kind],
    seed: int,
    count: int,
    members: Sequence[str],
    only: Sequence[str] = (),
    lasting: Sequence[str] = (),
    pause_s: float = 3.0,
) -> list[Planned]:
    """Draw a schedule; it is a function of the arguments.

    only: names of kinds; if empty, all kinds that are drawn without being asked for.
    lasting: members that no fault may replace, so that growth in them over a long run can be seen.
    pause_s: the mean wait between two faults.
    """
    rng = random.Random(seed)
    names = list(only) or [name for name, kind in kinds.items() if kind.weight and not (lasting and kind.all_of_role)]
    weights = [max(1, kinds[name].weight) for name in names]
    plan = []
    for name in rng.choices(names, weights, k=count):
        kept = lasting if kinds[name].replaces else ()
        targets = [member for member in members if member[0] in kinds[name].roles and member not in kept] or [CLIENTS]
        wait_s = min(LONGEST_WAIT_S, rng.expovariate(1 / pause_s))
        plan.append(Planned(kind=name, target=rng.choice(targets), wait_s=wait_s, strength=rng.random()))
    return plan
