"""vLLM's NIXL connector with two more verbs: release KV early, and connect ahead of the first request.

Owns: nothing of the transfer itself. Must not know: gRPC, leases of routers.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

# A release of KV that was read in the same moment finds nothing to free; it is forgotten after this long.
RELEASE_TTL_S = 60.0
LOWEST_PRIORITY = 19


@dataclass(slots=True)
class Handoffs:
    """NIXL READs since start. Seconds are each one's own, from post to completion; those of parallel ones overlap."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed: int = 0


class CorunNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Pull mode: a decode node reads the KV that a prefill node holds."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        threads = _threads()
        super().__init__(vllm_config, role, kv_cache_config)
        if current_platform.is_cpu():
            # NIXL's progress thread never sleeps; it must not take a core from the threads that compute.
            for thread in _threads() - threads:
                os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
        self.handoffs = Handoffs()
        self._released: dict[str, float] = {}  # request id -> when to forget the release
        self._handshakes: dict[str, Future[Any]] = {}  # by engine id of the peer

    def get_kv_connector_stats(self) -> Any:
        """vLLM's own figures of the last step, added up on the way."""
        stats = super().get_kv_connector_stats()
        if stats is not None:
            self.handoffs.count += len(stats.data["transfer_duration"])
            self.handoffs.bytes += sum(stats.data["bytes_transferred"])
            self.handoffs.seconds += sum(stats.data["transfer_duration"])
            self.handoffs.failed += len(stats.data["num_failed_transfers"])
        return stats

    def release(self, request_id: str) -> None:
        """Ends the lease of `request_id`'s KV; it is freed in the next step."""
        self._released[request_id] = time.monotonic() + RELEASE_TTL_S

    def held(self) -> list[str]:
        """The requests whose KV waits to be read, soonest expiry first."""
        return list(self.connector_worker._reqs_to_send)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        worker = self.connector_worker
        leases = worker._reqs_to_send  # request id -> expiry, soonest first
        ended = [name for name in self._released if name in leases]
        if ended:
            # The expiry check reads from the front and stops at the first live lease.
            worker._reqs_to_send = dict.fromkeys(ended, 0.0) | {k: v for k, v in leases.items() if k not in ended}
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        # A heartbeat read in this very step has renewed its lease: such a release is for the next step.
        now = time.monotonic()
        self._released = {
            name: until
            for name, until in self._released.items()
            if name in worker._reqs_to_send or (name not in ended and until > now)
        }
        return finished

    def connect(self, engine_id: str, host: str, port: int, tp_size: int) -> bool:
        """Begins the handshake with a prefill engine; True once it is complete.

        Raises:
            RuntimeError: the handshake failed, for example because the peers are not compatible.
        """
        worker = self.connector_worker
        future = self._handshakes.get(engine_id) or worker._ensure_handshake(engine_id, host, port, tp_size)
        if future is None:
            return True
        self._handshakes[engine_id] = future
        if future.done():
            del self._handshakes[engine_id]
            future.result()
        return engine_id in worker._remote_agents


def _threads() -> set[int]:
    """Ids of this process's threads, native ones included."""
    return {int(name) for name in os.listdir("/proc/self/task")}
