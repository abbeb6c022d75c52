"""The nodes that may not join, or not yet. They are remembered for a time, with the reason, for the cluster's status.

This module must not know what the reasons are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from corun.types import NodeInfo, NodeLoad, NodeState, NodeStatus
from router.clock import loop_time

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A node that may not join."""

    info: NodeInfo
    state: NodeState
    """The node's state: REFUSED, or JOINING if the refusal may end by itself."""
    detail: str
    at: float


class Refusals:
    """Refusals by node id. Each is kept for `keep_s` seconds after the node's last try."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._known: dict[str, Refusal] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def note(self, info: NodeInfo, detail: str, state: NodeState = NodeState.REFUSED) -> None:
        """Note that a node has tried to join and was refused."""
        node_id, known = info.ref.node_id, self._known.get(info.ref.node_id)
        if known is None:
            asyncio.get_running_loop().call_later(self._keep_s, self._forget_late, node_id)
        if known is None or known.detail != detail:
            log.warning("node %s is %s: %s", info.ref, state.value, detail)
        self._known[node_id] = Refusal(info=info, state=state, detail=detail, at=loop_time())

    def drop(self, node_id: str) -> None:
        """Forget a node's refusal, because the node has joined."""
        self._known.pop(node_id, None)

    def statuses(self) -> Iterator[NodeStatus]:
        """Yield the status of each refused node, sorted by node id."""
        for _, refusal in sorted(self._known.items()):
            yield NodeStatus(
                node=refusal.info,
                load=NodeLoad(),
                state=refusal.state,
                detail=refusal.detail,
                last_heartbeat_ms=round(1000 * (loop_time() - refusal.at)),
            )

    def _forget_late(self, node_id: str) -> None:
        refusal = self._known.get(node_id)
        if refusal is None:
            return
        left = refusal.at + self._keep_s - loop_time()
        if left > 0:  # The node has tried again since.
            asyncio.get_running_loop().call_later(left, self._forget_late, node_id)
        else:
            del self._known[node_id]
