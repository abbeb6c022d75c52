"""grpc.health.v1 on a port of its own, for whoever cannot make a TLS connection: a kubelet's probes.

It says what the main port says (`corun.rpc.health`), from threads of its own, so that it answers from the start of the
process to its end, also while an engine loads and the event loop stands still. This module must not know any service of
ours.
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
"""An event loop that does not answer for so long stands still: the process is to be restarted."""
THREADS = 4
MAX_CHECKS = 64
"""At once; further ones are refused."""
MAX_MESSAGE_BYTES = 4096
LONGEST_CHECK_S = 30.0

_Response = health_pb2.HealthCheckResponse


class HealthPort:
    """A plaintext server of health checks. Lifecycle: `start` → `watch_loop` → `stop`.

    Watch is not implemented: each watcher would hold a thread. The main port has it.
    """

    def __init__(self, health: HealthService, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._probe = _Probe(health)
        self._server: Any = None

    @property
    def port(self) -> int:
        """The port asked for; after `start`, the one in use."""
        return self._port

    def start(self) -> None:
        """Listens; port 0 picks a free one. Raises UnavailableError if the address cannot be had."""
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
        """From now on, nothing is SERVING while the running loop stands still. Not before an engine has loaded."""
        self._probe.loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Refuses new checks, and waits for the running ones."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop(0).wait)
            self._server = None


class _Probe(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # It has no types.
    """Answers in gRPC's threads."""

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
        except RuntimeError:  # It is closed: the process ends.
            return False
        return answered.wait(LOOP_TIMEOUT_S)
