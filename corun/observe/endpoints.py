"""What a process shows about itself from start to end, over HTTP if a port is configured: its metrics and its probes.

| path | 200 means | 503 means |
|---|---|---|
| `/livez` | the process is as it should be: it loads, serves, drains, or failed its self-test | restart it |
| `/startedz` | all has been loaded and the main port listens; to the end of the process | wait |
| `/readyz` | it takes work | send it none |

The probes say what health on the main port says (`corun.rpc.health`), but without TLS, which a kubelet's probes do not
know. They answer from the start of the process to its end, even while an engine loads and blocks the event loop. This
module must not know what a process does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from corun.config.fields import MemberConfig
from corun.observe.metrics import MetricsServer
from corun.rpc.health import LIVE, STARTED, HealthService
from corun.rpc.server import join_address

LIVEZ, STARTEDZ, READYZ = "/livez", "/startedz", "/readyz"
LOOP_TIMEOUT_S = 5.0
"""The number of seconds after which an event loop that does not answer counts as stuck. The process must then be
restarted."""
log = logging.getLogger(__name__)


class Observation:
    """The health, probes and metrics of one process. Start it before anything that takes long, and stop it last.

    Lifecycle: `start` → `note_started` → `stop`.
    """

    def __init__(self, config: MemberConfig, ready_service: str = "") -> None:
        """Create it. ready_service: the service whose health says whether the process is ready."""
        self.health = HealthService()
        """The health service, which the process's main port serves."""
        services = {LIVEZ: LIVE, STARTEDZ: STARTED, READYZ: ready_service}
        self.metrics = MetricsServer({path: partial(self._passes, name) for path, name in services.items()})
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None  # None before the start has ended.

    async def start(self) -> None:
        """Start to listen. Raises UnavailableError if the address cannot be used."""
        config = self._config
        self.health.set(LIVE, True)
        for service in ("", STARTED):
            self.health.set(service, False)
        if config.metrics_port is not None:
            await self.metrics.start(config.metrics_host, config.metrics_port)
            log.info("metrics on http://%s/metrics", join_address(config.metrics_host, self.metrics.port))

    def note_started(self) -> None:
        """Note that all is loaded and that the main port listens. From now on the event loop has to answer."""
        self.health.set(STARTED, True)
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        await self.metrics.stop()

    def _passes(self, service: str) -> bool:
        """Return whether a service serves, and the event loop is not stuck. It is called in another thread."""
        if not self.health.is_serving(service):
            return False
        if self._loop is None:  # It may be blocked, by an engine that loads.
            return True
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # The loop is closed, since the process ends.
            return False
        return answered.wait(LOOP_TIMEOUT_S)


@asynccontextmanager
async def observed(config: MemberConfig) -> AsyncIterator[Observation]:
    """Start an observation, and stop it when the context ends. Raises what `Observation.start` raises."""
    observation = Observation(config)
    await observation.start()
    try:
        yield observation
    finally:
        await observation.stop()
