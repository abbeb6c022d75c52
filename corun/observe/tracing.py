"""Spans of a process of the cluster, for OpenTelemetry, if the standard environment variables ask for them.

This module owns whether there is tracing, and everything that touches OpenTelemetry, which is imported only if there is
tracing. A span never holds a prompt, an output or the text of an error. Parent spans are passed on explicitly, because
a request's work is spread over tasks and a context variable would be copied into each of them. This module must not
know requests or nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from corun import __version__
from corun.config.extras import how_to_get
from corun.errors import CorunError, InvalidArgumentError, UnavailableError, kind_of
from corun.observe.trace_context import Metadata, TraceContext, read

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED = "OTEL_SDK_DISABLED"
SHUTDOWN_TIMEOUT_S = 5.0
"""The number of seconds for sending the last spans."""

Value = str | bool | int | float | Sequence[str]
Lap = tuple[str, float, float]
"""A name, a beginning and an end. Times are on the running loop's clock, in seconds."""

log = logging.getLogger(__name__)


class Span:
    """A span, or `OFF`, which records nothing. Either use it as a context manager or call `end`, once."""

    def __init__(self, tracing: _Tracing | None = None, span: Any = None) -> None:
        self._tracing = tracing
        self._span = span
        self._has_failed = False
        self.metadata: Metadata = ()
        """The metadata that makes a call part of this span."""
        if tracing is not None:
            context = span.get_span_context()
            sampled = bool(context.trace_flags.sampled)
            self.metadata = TraceContext(context.trace_id, context.span_id, sampled).metadata()

    def child(self, name: str, attributes: Mapping[str, Value] | None = None) -> Span:
        """Return a span within this one. It begins now."""
        if self._tracing is None:
            return self
        return Span(self._tracing, self._tracing.start(name, self._span, attributes))

    def laps(self, laps: Sequence[Lap], attributes: Mapping[str, Value] | None = None) -> None:
        """Add finished spans within this one."""
        if self._tracing is None:
            return
        zero = _zero_ns()  # All laps share one zero, so that they meet exactly.
        for name, began, ended in laps:
            span = self._tracing.start(name, self._span, attributes, at=zero + round(began * 1e9))
            span.end(zero + round(ended * 1e9))

    def note(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes that have become known."""
        if self._tracing is not None:
            self._span.set_attributes(attributes)

    def event(self, name: str, at: float) -> None:
        """Add an event. at: its time on the running loop's clock."""
        if self._tracing is not None:
            self._span.add_event(name, timestamp=_zero_ns() + round(at * 1e9))

    def fail(self, error: BaseException) -> None:
        """Note that the work of this span has failed. Only the kind of the first error is kept."""
        if self._tracing is None or self._has_failed:
            return
        self._has_failed = True
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):  # A cancellation is no failure.
            self._span.set_attribute("error.type", "cancelled")
            return
        known = next((one for one in (error, error.__cause__) if isinstance(one, CorunError)), None)
        self._span.set_attribute("error.type", kind_of(known) if known else "internal")
        self._span.set_status(self._tracing.failed)

    def end(self, error: BaseException | None = None) -> None:
        """End the span now, with success or with an error."""
        if error is not None:
            self.fail(error)
        if self._tracing is not None:
            self._span.end()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)


OFF = Span()
"""The span to use when there is no tracing."""


class _Tracing:
    """OpenTelemetry, loaded and set up. Raises UnavailableError if it is not installed."""

    def __init__(self, service: str, instance: str) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise UnavailableError(f"traces need OpenTelemetry ({error}); {how_to_get('tracing')}") from error
        own = {"service.name": service, "service.instance.id": instance, "service.version": __version__}
        given = OTELResourceDetector().detect().attributes
        resource = Resource.create({name: value for name, value in own.items() if name not in given})
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self.provider.get_tracer("corun", __version__)
        self._trace = trace
        self.failed = trace.Status(trace.StatusCode.ERROR)

    def start(
        self, name: str, parent: Any, attributes: Mapping[str, Value] | None = None, at: int | None = None
    ) -> Any:
        context = None if parent is None else self._trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=at)

    def remote(self, context: TraceContext) -> Any:
        """Return a span of another process, to use as a parent."""
        trace = self._trace
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if context.sampled else trace.TraceFlags.DEFAULT)
        return trace.NonRecordingSpan(trace.SpanContext(context.trace_id, context.span_id, True, flags))


_running: list[_Tracing] = []
"""The tracing of this process: one entry, or none if there is no tracing."""


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Return whether the standard variables ask for traces. Raises InvalidArgumentError for what is not supported."""
    exporter = environment.get(EXPORTER, "")
    if exporter not in ("", "otlp", "none"):
        raise InvalidArgumentError(f"environment variable {EXPORTER}", exporter, "must be otlp or none")
    named = exporter == "otlp" or any(environment.get(name) for name in ENDPOINTS)
    if exporter == "none" or not named or environment.get(DISABLED, "").lower() == "true":
        return False
    for name in PROTOCOLS:
        if environment.get(name, "grpc") not in ("", "grpc"):
            raise InvalidArgumentError(f"environment variable {name}", environment[name], "must be grpc")
    return True


def start(service: str, instance: str) -> None:
    """Begin to record this process's spans, if the environment asks for it. Call it once, before anything else runs.

    Args:
        service: the process's `service.name`, unless the environment gives another.
        instance: the process's `service.instance.id`, unless the environment gives another.

    Raises:
        InvalidArgumentError: the environment asks for something that is not supported.
        UnavailableError: OpenTelemetry is not installed.
    """
    if is_asked_for(os.environ):
        _running.append(_Tracing(service, instance))
        log.info("traces are exported as %s", service)


async def stop() -> None:
    """Send the last spans, or give up on them after SHUTDOWN_TIMEOUT_S."""
    while _running:
        # The loop would wait for the end of one of its own threads, so this is another one.
        ending = threading.Thread(target=_running.pop().provider.shutdown, name="last spans", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, SHUTDOWN_TIMEOUT_S)
        if ending.is_alive():
            log.warning("the last spans could not be sent within %g s", SHUTDOWN_TIMEOUT_S)


def of_call(call: Any, name: str) -> Span:
    """Return a span for a call that is being answered (its gRPC context), within the caller's span if there is one."""
    if not _running:
        return OFF
    context = read(call.invocation_metadata() or ())
    parent = None if context is None else _running[0].remote(context)
    return Span(_running[0], _running[0].start(name, parent))


def caller_of(call: Any) -> Span:
    """Return the caller's own span, to make spans within it; OFF if the caller has none. Do not end it."""
    if not _running or (context := read(call.invocation_metadata() or ())) is None:
        return OFF
    return Span(_running[0], _running[0].remote(context))


def _zero_ns() -> int:
    """Return the time when the running loop's clock was zero, in nanoseconds since 1970."""
    return time.time_ns() - round(asyncio.get_running_loop().time() * 1e9)
