"""A cluster that is looked at again and again: its last status, how old that is, and what it does in a second.

This module must not know how anything is shown.
"""

from __future__ import annotations

import time
from collections import deque

from corun.client.client import AsyncClient
from corun.errors import CancelledByPeerError, DeadlineError, OverloadedError, UnavailableError
from corun.observe.rates import History, Look, tokens
from corun.types import ClusterStatus, NodeRole

ASK_TIMEOUT_S = 10.0
"""The longest time for one answer."""
WINDOW_S = 5.0
"""The seconds over which a rate is the mean, at least."""
CURVE = 60
"""The number of rates that are kept for a curve."""


class Watched:
    """The last answer of a cluster's router, and the rates up to it. clients: ask what clients have, too."""

    def __init__(self, status: ClusterStatus, *, clients: bool = False) -> None:
        self.curves: dict[NodeRole, deque[float]] = {role: deque(maxlen=CURVE) for role in NodeRole}
        """Tokens a second of all nodes of a role, the newest last. It begins once the rate of each of them is known."""
        self._history = History(WINDOW_S)
        self._clients = clients
        self._trouble = ""
        """Why the router did not answer when it was asked last. Empty: it did."""
        self.take(status)

    def take(self, status: ClusterStatus) -> None:
        self.status, self._at = status, time.monotonic()
        self._history.add(Look(self._at, status))
        self.rates = self._history.rates()
        for role, curve in self.curves.items():
            rate = self.rates.of(role, tokens)
            if rate is not None and (curve or self.knows(role)):
                curve.append(rate)

    def knows(self, *roles: NodeRole) -> bool:
        """Return whether the rate of each node of these roles is known."""
        nodes = [each.node for each in self.status.nodes if each.node.role in roles and each.is_in_use]
        return all(self.rates.of_node(node.ref, tokens) is not None for node in nodes)

    async def ask(self, client: AsyncClient) -> None:
        """Take the router's answer. If there is none, the last one stays."""
        try:
            status = await client.get_cluster(clients=self._clients, contracts=False, timeout_s=ASK_TIMEOUT_S)
            self.take(status)
            self._trouble = ""
        except (UnavailableError, OverloadedError, DeadlineError, CancelledByPeerError) as error:
            self._trouble = str(error)

    @property
    def trouble(self) -> str:
        """How old the last answer is, and why there is no newer one. Empty: there is."""
        return f"no answer for {time.monotonic() - self._at:.0f} s: {self._trouble}" if self._trouble else ""
