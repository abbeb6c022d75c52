"""A collector of OpenTelemetry's traces: a real gRPC server that keeps the spans it is sent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

WAIT_S = 60.0


@dataclass(frozen=True)
class Received:
    """One span."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, Any]
    events: dict[str, int]

    @classmethod
    def of(cls, service: str, span: Any) -> Received:
        ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        times = span.start_time_unix_nano, span.end_time_unix_nano
        events = {event.name: event.time_unix_nano for event in span.events}
        return cls(service, span.name, *ids, *times, span.status.code == 2, _values(span.attributes), events)

    def __str__(self) -> str:
        return f"{self.service}: {self.name}"


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What has come so far."""

    address: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: bytes = b""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans.extend(Received.of(service, span) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, count: int) -> list[Received]:
        """The spans, once there are so many."""
        deadline = time.monotonic() + WAIT_S
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(self.spans) >= count, [str(span) for span in self.spans]
        return self.spans

    def tree(self) -> dict[str, Any]:
        """The names of all spans, within those of their parents; the order is that of their beginnings."""
        known = {span.span for span in self.spans}
        return {f"{one.name}": self._below(one) for one in self._sorted() if one.parent not in known}

    def _below(self, parent: Received) -> list[Any]:
        return [[str(one), *self._below(one)] for one in self._sorted() if one.parent == parent.span]

    def _sorted(self) -> list[Received]:
        return sorted(self.spans, key=lambda span: span.began)

    def named(self, name: str) -> list[Received]:
        return [span for span in self._sorted() if span.name == name]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def variables(collector: Collector) -> dict[str, str]:
    """The environment of a process that is to send its spans there, soon."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
