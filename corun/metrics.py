"""A process's metrics for Prometheus, over HTTP.

Owns the endpoint, which has a thread of its own: what it shows is read when it is asked for, from numbers that the
event loop writes, and nothing is written. This module must not know what the metrics are.
"""

from __future__ import annotations

import asyncio
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.registry import Collector

from corun.errors import UnavailableError


class MetricsServer:
    """Answers GET /metrics, with the process's own figures (CPU seconds, memory, files) and those of `add`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._running: tuple[WSGIServer, Thread] | None = None

    @property
    def port(self) -> int:
        """That it listens on; 0 if it does not."""
        return self._running[0].server_port if self._running else 0

    def add(self, collector: Collector) -> None:
        """Shows a collector's metrics from now on. It is asked from another thread."""
        self._registry.register(collector)

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
