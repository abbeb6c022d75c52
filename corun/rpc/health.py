"""grpc.health.v1: the status of a server's services, once (Check) or whenever it changes (Watch).

The service is open to anyone, so the number of watchers is bounded. grpcio's own servicer is not used, because it has a
bug: when one of several watchers of a service leaves, the others are told of no further change. This module must not
know any service of ours.

| service name | SERVING means | NOT_SERVING means |
|---|---|---|
| `live` | the process is as it should be, whatever it does: loads, serves, drains, failed its self-test | restart it |
| `started` | all has been loaded and the main port listens; to the end of the process | wait |
| a service's full name | it takes work: readiness | send it none |
| empty | the process takes new work, a router also while it has no nodes | send it none |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import NotFoundError, OverloadedError, shown

LIVE = "live"
"""The service name whose status says whether the process has to be restarted."""
STARTED = "started"
"""The service name whose status says whether the process has loaded all that it needs."""
MAX_WATCHERS = 1024
RETRY_S = 5.0
"""The retry delay, in seconds, that a watcher gets when there are too many."""

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # It has no types.
    """Answers health checks. After `end`, statuses do not change any more."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._watchers = 0
        self._has_ended = False

    def set(self, service: str, serving: bool) -> None:
        """Set the status of a service, by its full name; "" is the whole process."""
        if not self._has_ended:
            self._statuses[service] = _Response.SERVING if serving else _Response.NOT_SERVING
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def end(self) -> None:
        """Set every service to NOT_SERVING for good.

        `live` and `started` do not change, since the process itself still runs: it drains, and then it ends.
        """
        for service in self._statuses:
            if service not in (LIVE, STARTED):
                self.set(service, False)
        self._has_ended = True

    def is_serving(self, service: str) -> bool:
        """Return whether a service serves now. Any thread may call this."""
        return bool(self._statuses.get(service) == _Response.SERVING)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.service not in self._statuses:
            raise NotFoundError(f"there is no service {shown(request.service)} here")
        return _Response(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self._watchers >= MAX_WATCHERS:
            raise OverloadedError(f"{self._watchers} watchers are here, as many as there may be", RETRY_S)
        self._watchers += 1
        said = None
        try:
            while True:
                changed = self._changed
                status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
                if status != said:
                    said = status
                    yield _Response(status=status)
                else:
                    await changed.wait()  # The watcher's deadline, or its leaving, ends this wait.
        finally:
            self._watchers -= 1
