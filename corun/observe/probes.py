"""grpc.health.v1 on a port of its own, for probes that cannot make a TLS connection, such as a kubelet's.

It says what the main port says (`corun.rpc.health`), but from threads of its own. So it answers from the start of the
process to its end, even while an engine loads and blocks the event loop. This module must not know any service of ours.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.errors import UnavailableError, shown
from corun.rpc.health import HealthService
from corun.rpc.server import join_address, server_options

LOOP_TIMEOUT_S = 5.0
"""The number of seconds after which an event loop that does not answer counts as stuck. The process must then be
restarted."""
THREADS = 4
MAX_CHECKS = 64
"""The most checks at once. Further ones are refused."""
MAX_MESSAGE_BYTES = 4096
LONGEST_CHECK_S = 30.0

_Response = health_pb2.HealthCheckResponse


class HealthPort:
    """A plaintext server of health checks. Lifecycle: `start` → `watch_loop` → `stop`.

    Watch is not implemented here, because each watcher would hold a thread. The main port has it.
    """

    def __init__(self, health: HealthService, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._probe = _Probe(health)
        self._server: Any = None

    @property
    def port(self) -> int:
        """The port that was asked for; after `start`, the port in use."""
        return self._port

    def start(self) -> None:
        """Start to listen; port 0 picks a free one. Raises UnavailableError if the address cannot be used."""
        server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="health"),
            options=server_options(MAX_MESSAGE_BYTES, LONGEST_CHECK_S),
            maximum_concurrent_rpcs=MAX_CHECKS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._probe, server)
        address = join_address(self._host, self._port)
        try:
            self._port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise UnavailableError(f"health checks cannot be answered on {address}: is the port in use?") from error
        server.start()
        self._server = server

    def watch_loop(self) -> None:
        """From now on, answer NOT_SERVING while the running loop is stuck. Call this after an engine has loaded."""
        self._probe.loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Refuse new checks and wait until the server has stopped."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop(0).wait)
            self._server = None


class _Probe(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # It has no types.
    """Answers health checks in gRPC's threads."""

    def __init__(self, health: HealthService) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._health = health

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        status = self._health.status(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {shown(request.service)} here")
        return _Response(status=status if self._loop_answers() else _Response.NOT_SERVING)

    def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "the main port has it")

    def _loop_answers(self) -> bool:
        if self.loop is None:
            return True
        answered = threading.Event()
        try:
            self.loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # The loop is closed, since the process ends.
            return False
        return answered.wait(LOOP_TIMEOUT_S)
