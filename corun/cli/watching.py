"""A cluster that is looked at again and again: its last status, how old that is, and speeds from counts.

A count of a node is as old as the node's last heartbeat, so its speed is between heartbeats, not between answers. This
module must not know how anything is shown.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from corun.client.client import AsyncClient
from corun.errors import DeadlineError, UnavailableError
from corun.types import ClusterStatus, NodeRole, NodeState, NodeStatus

ASK_TIMEOUT_S = 10.0
"""The longest time for one answer."""
WINDOW_S = 5.0
"""The seconds over which a speed is the mean, at least."""
_SAME_S = 0.05
"""Two answers whose heartbeats are less apart have heard the same one."""
HISTORY = 60
"""The number of sums that are kept for a curve."""


class Watched:
    """The last answer of a cluster's router, and the speeds up to it. clients: ask what clients have, too."""

    def __init__(self, status: ClusterStatus, *, clients: bool = False) -> None:
        self.rates = Rates()
        self._clients = clients
        self._trouble = ""
        """Why the router did not answer when it was asked last. Empty: it did."""
        self.take(status)

    def take(self, status: ClusterStatus) -> None:
        self.status, self._at = status, time.monotonic()
        self.rates.take(status, self._at)

    async def ask(self, client: AsyncClient) -> None:
        """Take the router's answer. If there is none, the last one stays."""
        try:
            status = await client.get_cluster(clients=self._clients, contracts=False, timeout_s=ASK_TIMEOUT_S)
            self.take(status)
            self._trouble = ""
        except (UnavailableError, DeadlineError) as error:
            self._trouble = str(error)

    @property
    def trouble(self) -> str:
        """How old the last answer is, and why there is no newer one. Empty: there is."""
        return f"no answer for {time.monotonic() - self._at:.0f} s: {self._trouble}" if self._trouble else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a node, or all nodes of a role, did in a second."""

    tokens: float = 0.0
    """Output tokens drawn, or prompt tokens computed."""
    cached_tokens: float = 0.0
    steps: float = 0.0


@dataclass(frozen=True, slots=True)
class _Count:
    at: float
    tokens: int
    cached_tokens: int = 0
    steps: int = 0


class Rates:
    """Speeds of one cluster. `take` is given each answer, with the time at which it came, in seconds on one clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, deque[_Count]] = {}
        self._finished: deque[_Count] = deque()
        self.router_id = ""
        self.history: dict[NodeRole, deque[float]] = {role: deque(maxlen=HISTORY) for role in NodeRole}
        """Tokens a second of all nodes of a role, the newest last."""

    def take(self, status: ClusterStatus, now: float) -> None:
        if status.router_id != self.router_id:  # Another router counts for itself.
            self._finished.clear()
            self.router_id = status.router_id
        _add(self._finished, _Count(now, status.finished_samples))
        known = {str(node.node.ref): node for node in status.nodes if node.state is not NodeState.LOST}
        self._nodes = {ref: self._nodes.get(ref, deque()) for ref in known}
        for ref, node in known.items():
            load = node.load
            at = now - node.last_heartbeat_ms / 1000
            _add(self._nodes[ref], _Count(at, load.tokens, load.cached_tokens, load.steps))
        for role, history in self.history.items():
            if (speed := self.of_role(role, status)) is not None:
                history.append(speed.tokens)

    @property
    def finished(self) -> float | None:
        """Samples finished in a second. None: not known yet."""
        speed = _speed(self._finished)
        return None if speed is None else speed.tokens

    def of(self, node: NodeStatus) -> Speed | None:
        """Return the speed of one node. None: not known yet."""
        return _speed(self._nodes.get(str(node.node.ref), deque()))

    def of_role(self, role: NodeRole, status: ClusterStatus) -> Speed | None:
        """Return the sum over the nodes of a role. None: not known yet. A node that comes later counts once it is."""
        nodes = [node for node in status.nodes if node.node.role is role and node.state is not NodeState.LOST]
        speeds = [speed for node in nodes if (speed := self.of(node)) is not None]
        if not speeds or (len(speeds) < len(nodes) and not self.history[role]):
            return None
        return Speed(
            tokens=sum(speed.tokens for speed in speeds),
            cached_tokens=sum(speed.cached_tokens for speed in speeds),
            steps=sum(speed.steps for speed in speeds),
        )


def _add(counts: deque[_Count], new: _Count) -> None:
    """Add a count, unless it is the last one again, and drop those that a mean over the window does not need."""
    if counts and (new.tokens < counts[-1].tokens or new.steps < counts[-1].steps):
        counts.clear()  # It counts from the beginning again.
    if not counts or new.at - counts[-1].at > _SAME_S:
        counts.append(new)
    while len(counts) > 2 and counts[-1].at - counts[1].at >= WINDOW_S:
        counts.popleft()


def _speed(counts: deque[_Count]) -> Speed | None:
    if len(counts) < 2:
        return None
    first, last = counts[0], counts[-1]
    seconds = last.at - first.at
    return Speed(
        tokens=(last.tokens - first.tokens) / seconds,
        cached_tokens=(last.cached_tokens - first.cached_tokens) / seconds,
        steps=(last.steps - first.steps) / seconds,
    )
