"""A process's metrics for Prometheus: the objects that count, and the HTTP server that shows them and answers probes.

This module owns what the `Metrics` of all components have in common. The server has threads of its own, but the event
loop itself reads the metrics when they are asked for, so that all of them are from the same moment. This module must
not know what the metrics are, or what the probes say.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Metric, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from corun.config.fields import CLIENT_TIMEOUT_S
from corun.errors import UnavailableError
from corun.types import Distribution

LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""The bounds, in seconds, for work that takes from milliseconds to minutes."""
STEPS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
"""The bounds, in seconds, for the time of a step, or of a token."""
LOOP_TIMEOUT_S = 5.0
"""The number of seconds that an event loop has to give its numbers. A scrape that has to wait longer fails."""

# Otherwise there would be a series beside each one: when it was made.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

Values = Mapping[tuple[str, ...], float]
"""The values of a metric, by the values of its labels."""


class Counter(prometheus_client.Counter):
    """A counter that its owner can read, too, because nodes and routers tell some counts over gRPC."""

    @property
    def value(self) -> float:
        return float(self._value.get())


class Histogram(prometheus_client.Histogram):
    """A histogram that its owner can read, too, so that what is told over gRPC is what the metrics show."""

    @property
    def value(self) -> Distribution:
        return Distribution(
            bounds=tuple(self._upper_bounds[:-1]),
            counts=tuple(int(bucket.get()) for bucket in self._buckets),
            sum=float(self._sum.get()),
        )


class Metrics:
    """The metrics of one component, in a registry of their own, since several components may share a process.

    The component counts where the event happens. Every count takes a lock and about a microsecond, so code that runs
    for every token adds up first and counts once per step.
    """

    def __init__(self, prefix: str) -> None:
        """Create the registry. prefix: the beginning of all names."""
        self.registry = CollectorRegistry()
        self._prefix = prefix

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Return a new counter. `_total` is added to its name when it is shown."""
        return Counter(self._prefix + name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str) -> Gauge:
        """Return a new gauge. Give it a function with `set_function` if it shows a state."""
        return Gauge(self._prefix + name, text, registry=self.registry)

    def histogram(self, name: str, text: str, bounds: Sequence[float] = LATENCIES_S) -> Histogram:
        """Return a new histogram. bounds: the upper ends of its intervals, inclusive, ascending."""
        return Histogram(self._prefix + name, text, buckets=bounds, registry=self.registry)

    def counters_of(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        """Show the counts that another object keeps. `read` returns them whenever they are asked for."""
        self._show(lambda: CounterMetricFamily(self._prefix + name, text, labels=labels), read)

    def gauges_of(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Values]) -> None:
        """Show a state whose labels change. `read` returns it whenever it is asked for."""
        self._show(lambda: GaugeMetricFamily(self._prefix + name, text, labels=labels), read)

    def _show(self, new: Callable[[], CounterMetricFamily | GaugeMetricFamily], read: Callable[[], Values]) -> None:
        def collect() -> list[Metric]:
            family = new()
            for labels, value in read().items():
                family.add_metric(labels, value)
            return [family]

        self.registry.register(_View(collect))


class _View(Collector):
    """Shows the metrics that a function returns whenever they are asked for."""

    def __init__(self, collect: Callable[[], list[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> list[Metric]:
        return self._collect()


class MetricsServer:
    """Answers GET /metrics with figures of the process (CPU seconds, memory, files, tasks) and of its components.

    Probes are answered, too, with 200 or 503. Every request has a thread, so a scrape never keeps a probe waiting.
    """

    def __init__(self, probes: Mapping[str, Callable[[], bool]]) -> None:
        """Create the server. probes: by path, a function that another thread calls, and that says whether it is 200."""
        self._probes = probes
        self._registry = CollectorRegistry()
        self._metrics_app: Any = make_wsgi_app(self._registry)
        ProcessCollector(registry=self._registry)
        self._running: tuple[_Server, Thread] | None = None

    @property
    def port(self) -> int:
        """The port that the server listens on; 0 if it does not listen."""
        return self._running[0].server_port if self._running else 0

    def show(self, metrics: Metrics) -> None:
        """Show a component's metrics from now on. The running event loop reads them, because gauges look at objects
        that only the loop may touch. A scrape fails if it does not answer in `LOOP_TIMEOUT_S` seconds."""
        loop = asyncio.get_running_loop()

        def read(made: Future[list[Metric]]) -> None:
            try:
                made.set_result(list(metrics.registry.collect()))
            except Exception as error:
                made.set_exception(error)

        def collect() -> list[Metric]:
            made: Future[list[Metric]] = Future()
            loop.call_soon_threadsafe(read, made)  # A coroutine would take several turns of a busy loop.
            return made.result(LOOP_TIMEOUT_S)

        self.add(collect)

    def add(self, collect: Callable[[], list[Metric]]) -> None:
        """Show the metrics that a function returns from now on. It is called from another thread."""
        self._registry.register(_View(collect))

    async def start(self, host: str, port: int) -> None:
        """Start to listen; port 0 picks a free one. Raises UnavailableError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        tasks = Gauge("corun_tasks", "Tasks of the event loop that have not ended", registry=self._registry)
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))  # Called in a thread, so also if the loop hangs.
        try:
            server = await asyncio.to_thread(make_server, host, port, self._answer, _Server, _Handler)
        except OSError as error:
            raise UnavailableError(f"metrics cannot listen on {host}:{port}: {error}") from error
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        self._running = server, thread

    async def stop(self) -> None:
        """Stop listening. If this is cancelled, only the wait for the end is."""
        if self._running is None:
            return
        server, thread = self._running
        self._running = None

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        ending = Thread(target=end, name="metrics end")
        ending.start()
        await asyncio.to_thread(ending.join)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        probe = self._probes.get(environ["PATH_INFO"])
        if probe is None:
            return self._metrics_app(environ, start_response)
        is_passed = probe()
        status = "200 OK" if is_passed else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain")])
        return [b"yes\n" if is_passed else b"no\n"]


class _Server(ThreadingWSGIServer):
    """Answers every request in a thread of its own. The address may be one of IPv6."""

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        super().__init__(address, handler)


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S  # A client that neither sends nor takes anything has a thread and a file here.

    def handle(self) -> None:
        """Answer a request. Log nothing of a client that is gone, or that sends nothing."""
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing, because requests come every few seconds."""
