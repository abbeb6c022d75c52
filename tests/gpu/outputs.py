"""The bits of everything that a run of the suite drew, by case, so that runs can be compared with each other.

The cases of a model are the same in every run, whatever its nodes are free to do. Must not know what a check compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from corun import Generation
from tests.e2e.test_determinism import Case, bits
from tests.gpu.report import Outcome


@dataclass
class Outputs:
    """The first output of every case; whether later ones agree is what checks look at."""

    found: dict[str, str] = field(default_factory=dict)
    """The digest of a case's output, by the digest of prompt, parameters and seed."""
    tokens: int = 0
    """The number of drawn tokens, those of repeated cases included."""

    def note(self, cases: Sequence[Case], generations: Sequence[Generation]) -> None:
        for case, generation in zip(cases, generations, strict=True):
            self.found.setdefault(_digest(repr(case).encode()), _digest(bits(generation)))
            self.tokens += len(generation.token_ids)

    @property
    def digest(self) -> str:
        """One digest over all cases and outputs, 64 hex digits; equal for runs of the same cases with the same bits."""
        return hashlib.sha256(json.dumps(self.found, sort_keys=True).encode()).hexdigest()

    def against(self, earlier: Mapping[str, str]) -> Iterator[Outcome]:
        """Compare with the outputs of an earlier run, in the cases that both have. Say if it lacks some of these."""
        shared = self.found.keys() & earlier.keys()
        equal = sum(self.found[case] == earlier[case] for case in shared)
        detail = {"cases here": len(self.found), "cases there": len(earlier)}
        yield Outcome(name="the bits of an earlier run", total=len(shared), equal=equal, detail=detail)
        if missing := len(self.found) - len(shared):
            yield Outcome(name="all cases of an earlier run", skipped=f"{missing} of {len(self.found)} are not there")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
