"""What a PromQL expression asks for: metrics with the labels that it names. Must not know what there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True)
class Asked:
    """One selector, or one grouping over selectors."""

    metric: str
    equal: tuple[tuple[str, str], ...]
    """Labels with the values that they must have."""
    labels: frozenset[str]
    """All labels that are named, those of groupings around the selector included."""


def asked(text: str) -> list[Asked]:
    """Raises ValueError if the text is no PromQL, types included."""
    return list(_asked(promql_parser.parse(text), frozenset()))


def _asked(found: Any, grouped: frozenset[str]) -> Iterator[Asked]:
    if isinstance(found, promql_parser.MatrixSelector):
        found = found.vector_selector
    if isinstance(found, promql_parser.VectorSelector):
        matchers = found.matchers.matchers
        equal = tuple((one.name, one.value) for one in matchers if one.op == promql_parser.MatchOp.Equal)
        yield Asked(found.name, equal, grouped | {one.name for one in matchers})
        return
    if isinstance(found, promql_parser.AggregateExpr) and found.modifier is not None:
        grouped |= frozenset(found.modifier.labels)
    for name in ("expr", "lhs", "rhs"):
        if hasattr(found, name):
            yield from _asked(getattr(found, name), grouped)
    for argument in getattr(found, "args", ()):
        yield from _asked(argument, grouped)
