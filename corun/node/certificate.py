"""A node's certificate: which freedoms it may use, why not the others, and the evidence in numbers.

Owns: the form of a certificate, how those of all tensor-parallel ranks become one, and its digest. A freedom is another
way to compute the contract's bits. So a certificate is no part of the contract or its fingerprint: a node that is
refused a freedom computes the contract as it stands, which is slower and gives the same bits. Must not know: how bits
are compared, engines, gRPC.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from corun.config.fields import NodeConfig
from corun.errors import InvalidArgumentError
from corun.types import Freedom, FreedomStatus, NodeRole

SELF_TEST_FAILED = "the self-test failed"
CUT_APART = "rows are cut by own-length, and prompts are not, so that they have no common steps, and not the same bits"
SWITCHES = {
    NodeRole.PREFILL: {
        Freedom.PACKED: "packed_prefill",
        Freedom.CHUNKS: "free_chunks",
        Freedom.MIXED: "mixed_steps",
        Freedom.SCORES: "mixed_steps",
    },
    NodeRole.DECODE: {Freedom.ROWS: "smaller_steps"},
}
"""The freedoms of each role, each with the setting that switches it off. A node without the setting has not got it.
Both that need rows and prompts in one engine have one setting."""
ONE_CUT = (Freedom.MIXED, Freedom.SCORES)
"""The freedoms of nodes whose attention cuts no rows, as it cuts no prompts."""
VOID = "the test of it would notice nothing here: sums in another order gave the same bits, too"


def untested(config: NodeConfig, role: NodeRole, finding: str) -> dict[Freedom, str]:
    """Return the freedoms of a role, each with the reason why it is not tested; empty: it is.

    finding: what the self-test found; empty: the node passed.
    """

    def reason(freedom: Freedom, setting: str) -> str:
        if not getattr(config, setting):
            return f"switched off by --no-{setting.replace('_', '-')}"
        if freedom in ONE_CUT and getattr(config, "decode_split", "none") != "none":
            return CUT_APART
        return SELF_TEST_FAILED if finding else ""

    known = SWITCHES[role].items()
    return {freedom: reason(freedom, setting) for freedom, setting in known if hasattr(config, setting)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What was done for a certificate, in numbers. A worker sends these fields as a dict."""

    steps: int = 0
    """Steps of the engine."""
    comparisons: int = 0
    """Sequences whose bits were compared with those of the contract's own form."""
    products: int = 0
    """Distinct shapes of matrix products that the library was asked about, at every number of rows."""
    algorithms: int = 0
    """Distinct algorithms that it named; each was run on real weights and compared."""
    versions: tuple[str, ...] = ()
    """What computed, as "name version"."""
    seconds: tuple[tuple[str, float], ...] = ()
    """The duration of each part of the test, in its order."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Evidence:
        """Read what a worker sent; tuples have become lists on the way."""
        seconds = tuple((str(part), float(value)) for part, value in values["seconds"])
        return cls(**{**values, "versions": tuple(values["versions"]), "seconds": seconds})


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The freedoms of a node's role: each is held, or refused with a reason."""

    freedoms: tuple[FreedomStatus, ...]
    evidence: Evidence = Evidence()

    @classmethod
    def of_ranks(cls, untested: Mapping[Freedom, str], ranks: Sequence[Mapping[str, Any]] = ()) -> Certificate:
        """Return the certificate that all ranks agree on: a freedom is held only if no rank refuses it.

        untested: all freedoms of the role, each with the reason why it was not tested; empty: it was.
        ranks: what the worker of each rank found, as {"refused": {name: reason or ""}, "evidence": {...}}.
        """
        freedoms = []
        for freedom, reason in untested.items():
            found = [rank["refused"][freedom.value] for rank in ranks] if not reason else []
            told = [f"rank {rank}: {why}" if len(found) > 1 else why for rank, why in enumerate(found) if why]
            freedoms.append(FreedomStatus(name=freedom.value, refused=reason or "; ".join(told)))
        evidence = Evidence.of(ranks[0]["evidence"]) if ranks else Evidence()
        return cls(freedoms=tuple(freedoms), evidence=evidence)

    @property
    def held(self) -> frozenset[str]:
        """The names of the freedoms that the node may use."""
        return frozenset(one.name for one in self.freedoms if not one.refused)

    @property
    def digest(self) -> str:
        """SHA-256 over all but the durations, so that nodes with the same evidence have the same; 64 hex digits."""
        values = asdict(replace(self, evidence=replace(self.evidence, seconds=())))
        return hashlib.sha256(b"corun.v1.certificate\0" + json.dumps(values, sort_keys=True).encode()).hexdigest()

    def without(self, freedom: Freedom, reason: str) -> Certificate:
        """Return this certificate with one freedom refused. A reason that it was refused for before stays.

        Raises InvalidArgumentError without a reason.
        """
        if not reason:
            raise InvalidArgumentError("reason", reason, "must say why the freedom is refused")
        freedoms = (
            replace(one, refused=one.refused or reason) if one.name == freedom.value else one for one in self.freedoms
        )
        return replace(self, freedoms=tuple(freedoms))

    def __str__(self) -> str:
        """Return the certificate as one line for a log."""
        refused = (f"{one.name} is refused ({one.refused})" if one.refused else one.name for one in self.freedoms)
        evidence = self.evidence
        parts = ", ".join(f"{part} {value:.2f} s" for part, value in evidence.seconds)
        done = f"{evidence.steps} steps, {evidence.comparisons} comparisons, {evidence.algorithms} algorithms"
        return f"{'; '.join(refused)}; {done} ({parts}); {', '.join(evidence.versions)}; {self.digest[:16]}"
