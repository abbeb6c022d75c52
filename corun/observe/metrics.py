"""A process's metrics for Prometheus, over HTTP.

This module owns the endpoint, which has threads of its own, and the way from there to the numbers that the event loop
writes. The loop itself reads them when they are asked for, so that all of them are from the same moment. This module
must not know what the numbers are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from corun.errors import UnavailableError
from corun.observe.figures import Histogram

K = TypeVar("K", bound=tuple[str, ...])
LOOP_TIMEOUT_S = 5.0
"""The number of seconds that an event loop has to give its numbers. A scrape that has to wait longer fails."""


class MetricsServer:
    """Answers GET /metrics with figures of the process (CPU seconds, memory, files, tasks) and of added collectors."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._running: tuple[WSGIServer, Thread] | None = None

    @property
    def port(self) -> int:
        """The port that the server listens on; 0 if it does not listen."""
        return self._running[0].server_port if self._running else 0

    def add(self, collector: Collector) -> None:
        """Show a collector's metrics from now on. The collector is called from another thread."""
        self._registry.register(collector)

    async def start(self, host: str, port: int) -> None:
        """Start to listen; port 0 picks a free one. Raises UnavailableError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        tasks = Gauge("corun_tasks", "Tasks of the event loop that have not ended", registry=self._registry)
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))  # Called in a thread, so also if the loop hangs.
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


class LoopCollector(Collector):
    """A collector whose metrics the running event loop makes whenever they are asked for."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics. It is called in another thread. Raises TimeoutError if the loop does not answer."""
        made: Future[list[Metric]] = Future()
        self._loop.call_soon_threadsafe(self._collect, made)
        return made.result(LOOP_TIMEOUT_S)

    def _collect(self, made: Future[list[Metric]]) -> None:
        try:
            made.set_result(list(self._make()))
        except Exception as error:
            made.set_exception(error)


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels. `_total` is added to its name."""
    return CounterMetricFamily(name, text, value)


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value)


def histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=values.buckets(), sum_value=values.sum)


def counters(name: str, text: str, labels: tuple[str, ...], values: Mapping[K, float]) -> Metric:
    """Return a counter with labels. `values` maps the values of the labels to the counter's value."""
    made = CounterMetricFamily(name, text, labels=labels)
    for given, value in values.items():
        made.add_metric(given, value)
    return made


def gauges(name: str, text: str, labels: tuple[str, ...], values: Mapping[K, float]) -> Metric:
    """Return a gauge with labels. `values` maps the values of the labels to the gauge's value."""
    made = GaugeMetricFamily(name, text, labels=labels)
    for given, value in values.items():
        made.add_metric(given, value)
    return made


def info(name: str, text: str, facts: Mapping[str, str]) -> Metric:
    """Return a gauge that is always 1 and whose labels are `facts`."""
    return gauges(name, text, tuple(facts), {tuple(facts.values()): 1})
