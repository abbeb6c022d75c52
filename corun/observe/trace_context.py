"""W3C trace context in the metadata of calls: which span a call belongs to.

A trace context is plain text; nothing here loads OpenTelemetry. If a stranger sends one that is not well formed, it
counts as absent. This module must not know spans.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT = "traceparent"
"""The metadata key of a trace context, https://www.w3.org/TR/trace-context/."""

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_SAMPLED = 1

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The identity of one span of one trace."""

    trace_id: int
    """The trace's id: 128 bits, not 0."""
    span_id: int
    """The span's id: 64 bits, not 0."""
    sampled: bool
    """Whether the process that made the span records it."""

    def metadata(self) -> Metadata:
        return ((TRACEPARENT, f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"),)


_caller: ContextVar[TraceContext | None] = ContextVar("caller", default=None)


def read(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """Return the trace context of a call; None if there is none, more than one, or one that is not well formed."""
    values = [value for key, value in metadata if key == TRACEPARENT]
    if len(values) != 1 or not isinstance(values[0], str) or (found := _FORM.fullmatch(values[0])) is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceContext(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None


@contextmanager
def within(context: TraceContext | None) -> Iterator[None]:
    """Make the calls to a cluster in this context, and in tasks begun in it, part of a span of a remote caller."""
    token = _caller.set(context)
    try:
        yield
    finally:
        _caller.reset(token)


def of_caller() -> Metadata:
    """Return the metadata that makes a call part of the caller's active span, or else of the span that it is `within`.

    It is empty if there is no such span. A program with an active span has loaded OpenTelemetry. If it is not loaded,
    there is no active span.
    """
    if (trace := sys.modules.get("opentelemetry.trace")) is not None:
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            return TraceContext(span.trace_id, span.span_id, bool(span.trace_flags & _SAMPLED)).metadata()
    caller = _caller.get()
    return () if caller is None else caller.metadata()
