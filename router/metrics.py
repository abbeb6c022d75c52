"""A router's figures for Prometheus, read when they are asked for.

Owns the metrics' names and the HTTP endpoint, which has a thread of its own: it reads numbers that the event loop
writes, and never writes. This module must not know where the figures come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from corun.cluster import AuditStatus
from corun.errors import UnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is shown, since the router started."""

    queued_samples: int
    """Now."""
    finished_samples: int
    mismatches: int
    audit: AuditStatus


class RouterCollector(Collector):
    """Makes metrics of a router's figures."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        now = self._figures()
        yield GaugeMetricFamily("corun_router_queued_samples", "Samples waiting for a slot", now.queued_samples)
        yield CounterMetricFamily("corun_router_finished_samples", "Samples that ended well", now.finished_samples)
        yield CounterMetricFamily(
            "corun_router_mismatches", "Samples whose repeated run gave other bits, audits included", now.mismatches
        )
        audited = CounterMetricFamily(
            "corun_router_audited_samples", "Samples that were run again, by what came of it", labels=["result"]
        )
        results = {"match": now.audit.matched, "mismatch": now.audit.mismatched, "error": now.audit.failed}
        for result, value in results.items():
            audited.add_metric([result], value)
        yield audited
        yield CounterMetricFamily(
            "corun_router_audit_skipped", "Samples chosen for an audit that found no time or room", now.audit.skipped
        )


class MetricsServer:
    """Answers GET /metrics."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RouterCollector(figures))
        self._running: tuple[WSGIServer, Thread] | None = None

    @property
    def port(self) -> int:
        """That it listens on; 0 if it does not."""
        return self._running[0].server_port if self._running else 0

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 picks a free one. Raises UnavailableError if the address cannot be had."""
        try:
            self._running = await asyncio.to_thread(start_http_server, port, addr=host, registry=self._registry)
        except OSError as error:
            raise UnavailableError(f"metrics cannot listen on {host}:{port}: {error}") from error

    async def stop(self) -> None:
        if self._running is not None:
            server, thread = self._running
            self._running = None
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)
