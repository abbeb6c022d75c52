"""What a cluster does in a second, from what it had done when somebody looked at it, again and again.

The totals of a node are as old as its last heartbeat, so its rate is one between heartbeats, not between answers. This
module is pure: it must not know clocks, nor how anything is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from corun.types import ClusterStatus, NodeLoad, NodeRef, NodeRole, NodeStatus

_SAME_S = 0.01
"""Two looks whose heartbeats are less apart have heard the same one."""


@dataclass(frozen=True)
class Look:
    """A cluster's state when somebody looked."""

    at: float
    """The time in seconds, on any clock that runs evenly."""
    status: ClusterStatus

    @cached_property
    def nodes(self) -> dict[NodeRef, NodeStatus]:
        return {each.node.ref: each for each in self.status.nodes}


class History:
    """The last looks at a cluster: as many as a mean over `window_s` seconds needs."""

    def __init__(self, window_s: float) -> None:
        self.looks: list[Look] = []
        self._window_s = window_s

    def add(self, look: Look) -> None:
        """Add a look. What was seen of another router, or of this one before it started again, no longer counts."""
        if self.looks and _is_another(self.looks[-1].status, look.status):
            self.looks.clear()
        self.looks.append(look)
        while len(self.looks) > 2 and self.looks[1].at <= look.at - self._window_s:
            del self.looks[0]

    def rates(self) -> Rates:
        """Return the means up to the last look. There must be one."""
        return Rates(self.looks)


def _is_another(before: ClusterStatus, now: ClusterStatus) -> bool:
    return before.router_id != now.router_id or before.finished_samples > now.finished_samples


@dataclass(frozen=True, slots=True)
class _Change:
    """What a node did between two heartbeats, `seconds` apart."""

    role: NodeRole
    before: NodeLoad
    now: NodeLoad
    seconds: float

    def rate(self, read: Callable[[NodeLoad], float]) -> float:
        return (read(self.now) - read(self.before)) / self.seconds


class Rates:
    """What has changed from the first of some looks to the last. `read` gives one of a node's totals.

    A node counts from the first look that knows its totals: one that registers, maybe again, has none before its next
    heartbeat. Lost and refused nodes do not count.
    """

    def __init__(self, looks: list[Look]) -> None:
        first, now = looks[0], looks[-1]
        self.finished: float | None = None
        """Samples finished in a second; None if it is not known yet."""
        if now.at > first.at:
            self.finished = (now.status.finished_samples - first.status.finished_samples) / (now.at - first.at)
        self._changes: dict[NodeRef, _Change] = {}
        for ref, each in now.nodes.items():
            known = [look for look in looks if ref in look.nodes]
            look = next((look for look in known if look.nodes[ref].load != NodeLoad()), known[0])
            old = look.nodes[ref]
            passed = now.at - look.at - (each.last_heartbeat_ms - old.last_heartbeat_ms) / 1000
            # No time has passed where no earlier look knows the node.
            if each.is_in_use and passed > _SAME_S and each.load.tokens >= old.load.tokens:
                self._changes[ref] = _Change(each.node.role, old.load, each.load, passed)

    def of_node(self, ref: NodeRef, read: Callable[[NodeLoad], float]) -> float | None:
        """Return what a node's total grows by in a second; None if it is not known yet."""
        change = self._changes.get(ref)
        return None if change is None else change.rate(read)

    def of(self, role: NodeRole, read: Callable[[NodeLoad], float]) -> float | None:
        """Return what a total of all nodes of a role grows by in a second; None if it is not known of any yet."""
        found = [each.rate(read) for each in self._changes.values() if each.role is role]
        return sum(found) if found else None


def tokens(load: NodeLoad) -> float:
    """Return the output tokens that a decode node has drawn, or the prompt tokens that a prefill node has computed."""
    return load.tokens
