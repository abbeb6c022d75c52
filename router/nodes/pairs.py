"""NIXL connections between decode and prefill nodes. They are made before a pair gets its first sample.

Owns: the task that connects each pair, and the record of which pairs are connected. This module must not know
registration or placement.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from corun.errors import CorunError
from router.nodes.node import DecodeNode, Node, PrefillNode
from router.nodes.node_client import NodeClient

CONNECT_TIMEOUT_S = 30.0
FIRST_RETRY_S = 0.25
LONGEST_RETRY_S = 5.0

log = logging.getLogger(__name__)


async def until_done(what: str, attempt: Callable[[], Awaitable[None]], failed: Callable[[str], None]) -> None:
    """Call `attempt` with growing delays until it succeeds or this task is cancelled.

    failed: is called with the reason after each failed try, in words that begin with `what`. The reason is logged when
        it differs from the one before.
    """
    delay, said = FIRST_RETRY_S, ""
    while True:
        try:
            await attempt()
        except CorunError as error:
            reason = f"{what}: {error}"
            failed(reason)
            if reason != said:
                log.warning("%s", reason)
            said = reason
        else:
            return
        await asyncio.sleep(delay)
        delay = min(2 * delay, LONGEST_RETRY_S)


def spawn(work: Awaitable[None], what: str) -> asyncio.Future[None]:
    """Run `work` as a task, and log its unexpected exceptions."""

    def report(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", what, exc_info=error)

    task = asyncio.ensure_future(work)
    task.add_done_callback(report)
    return task


class Pairs:
    """All pairs of open nodes, which are being connected or are warm."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tasks: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._warm: dict[tuple[str, str], tuple[DecodeNode, PrefillNode]] = {}  # (decode id, prefill id)

    def is_warm(self, decode_id: str, prefill_id: str) -> bool:
        return (decode_id, prefill_id) in self._warm

    def connect(self, decode: DecodeNode, prefill: PrefillNode) -> None:
        """Start to connect a pair, unless it is being connected or is connected already."""
        key = (decode.node_id, prefill.node_id)
        if key not in self._tasks:
            self._tasks[key] = spawn(self._connect(decode, prefill), f"connecting {key[0]} to {key[1]}")

    def forget(self, node: Node[NodeClient]) -> None:
        """Drop every pair of a lost node."""
        for key in [key for key in self._tasks if node.node_id in key]:
            self._tasks.pop(key).cancel()
            if pair := self._warm.pop(key, None):
                self._mark(pair)

    async def _connect(self, decode: DecodeNode, prefill: PrefillNode) -> None:
        def failed(reason: str) -> None:
            decode.lacks = prefill.lacks = reason

        async def attempt() -> None:
            assert prefill.info.nixl is not None  # Registration has checked this.
            await decode.client.connect(prefill.info.nixl, CONNECT_TIMEOUT_S)

        await until_done(f"{decode.node_id} cannot connect to {prefill.node_id}", attempt, failed)
        self._warm[decode.node_id, prefill.node_id] = decode, prefill
        self._mark((decode, prefill))
        log.info("%s is connected to %s", decode.info.ref, prefill.info.ref)
        self._changed()

    def _mark(self, pair: tuple[DecodeNode, PrefillNode]) -> None:
        decode, prefill = pair
        decode.is_warm = any(key[0] == decode.node_id for key in self._warm)
        prefill.is_warm = any(key[1] == prefill.node_id for key in self._warm)
