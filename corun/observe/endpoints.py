"""What a process shows about itself from start to end: its health, and its metrics if they are configured.

This module owns the ports for both, and what health says about the process as a whole. It must not know what a process
does.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from corun.config.fields import MemberConfig
from corun.observe.metrics import MetricsServer
from corun.observe.probes import HealthPort
from corun.rpc.health import LIVE, STARTED, HealthService
from corun.rpc.server import join_address

log = logging.getLogger(__name__)


class Observation:
    """The health and metrics of one process. Start it before anything that takes long, and stop it last.

    Lifecycle: `start` → `note_started` → `stop`.
    """

    def __init__(self, config: MemberConfig) -> None:
        self.health = HealthService()
        """The health service. The process's main port serves it, too."""
        self.metrics = MetricsServer()
        self.port: HealthPort | None = None
        """The port of health checks in plain text; None if there is none."""
        self._config = config

    async def start(self) -> None:
        """Start to listen. Raises UnavailableError if an address cannot be used."""
        config = self._config
        self.health.set(LIVE, True)
        for service in ("", STARTED):
            self.health.set(service, False)
        if config.metrics_port is not None:
            await self.metrics.start(config.metrics_host, config.metrics_port)
            log.info("metrics on http://%s/metrics", join_address(config.metrics_host, self.metrics.port))
        if config.health_port is not None:
            self.port = HealthPort(self.health, config.health_host, config.health_port)
            try:
                self.port.start()
            except BaseException:
                await self.metrics.stop()
                raise
            log.info("health checks on %s", join_address(config.health_host, self.port.port))

    def note_started(self) -> None:
        """Note that all is loaded and that the main port listens. From now on the event loop has to answer."""
        self.health.set(STARTED, True)
        if self.port is not None:
            self.port.watch_loop()

    async def stop(self) -> None:
        if self.port is not None:
            await self.port.stop()
        await self.metrics.stop()


@asynccontextmanager
async def observed(config: MemberConfig) -> AsyncIterator[Observation]:
    """Start an observation, and stop it when the context ends. Raises what `Observation.start` raises."""
    observation = Observation(config)
    await observation.start()
    try:
        yield observation
    finally:
        await observation.stop()
