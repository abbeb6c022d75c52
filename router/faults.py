"""The node faults in the attempts of one sample or score: which of them count, and what they say of the nodes.

Samples and scores are judged alike, here and nowhere else. This module must not know what an attempt does.
"""

from __future__ import annotations

import logging

from corun.config.fields import RouterConfig
from corun.errors import DeadlineError, OverloadedError
from corun.types import NodeRef
from router.attempt import NodeFaultError
from router.clock import loop_time
from router.metrics import RouterMetrics
from router.nodes.node_client import NotFiniteError
from router.nodes.registry import Registry

CLOCK_SLACK_S = 0.1
"""By how much gRPC's clock may be ahead of the loop's."""
NOT_FINITE_ATTEMPTS = 2
"""The number of attempts without finite logits after which the request is at fault. A single one may have been on a
broken node."""
log = logging.getLogger(__name__)


class Faults:
    """The faults so far.

    name: what logs and errors call the sample or score. deadline: the time by which it must have ended, on the loop's
    clock.
    """

    def __init__(
        self, name: str, deadline: float, registry: Registry, config: RouterConfig, metrics: RouterMetrics
    ) -> None:
        self.nodes: list[NodeRef] = []
        """The nodes that failed attempts, without excused ones."""
        self.losses = 0
        """How many of these went away in the attempt."""
        self.num_failed = 0
        """The number of attempts that a fault ended, including excused ones."""
        self.not_finite: list[tuple[NodeRef, ...]] = []
        """Where the attempts without finite logits ran."""
        self._name = name
        self._deadline = deadline
        self._registry = registry
        self._config = config
        self._metrics = metrics

    @property
    def lack_finite_logits(self) -> bool:
        """Whether so many attempts had no finite logits that the request itself is at fault."""
        return len(self.not_finite) >= min(NOT_FINITE_ATTEMPTS, self._config.max_attempts)

    def note(self, fault: NodeFaultError, ran_on: tuple[NodeRef, ...], still_s: float) -> None:
        """Count the fault that ended an attempt, unless it is excused, and tell the registry of it. Raises
        DeadlineError, and does neither, if the attempt had no time left.

        ran_on: the nodes of the attempt.
        still_s: for how many seconds this router itself stood still in the attempt. Nodes end the streams and leases of
            a router that is silent for too long. The failed attempt is then not their fault, and it is no reason to
            give the request up before its deadline. Each such attempt takes so long that even a request that kills
            nodes kills only a few.

        A node that was told to end does not fail an attempt either: it ends once, whatever it is asked. Nor does one
        that was too busy with the work of others; it says so only after a wait, so the deadline bounds such attempts.
        """
        slack_s = CLOCK_SLACK_S if isinstance(fault.error, DeadlineError) else 0.0
        if loop_time() >= self._deadline - slack_s:  # Otherwise short deadlines could keep the node from work.
            log.info("an attempt of %s ended: %s", self._name, fault)
            raise DeadlineError(f"the deadline passed in an attempt of {self._name}") from fault
        log.warning("an attempt of %s failed: %s", self._name, fault)
        self._metrics.sample_retries.labels("lost" if fault.is_loss else "fault").inc()
        self.num_failed += 1
        if still_s > self._config.heartbeat_timeout_ms / 1000:
            log.warning("it does not count: this router stood still for %.1f s in it", still_s)
        elif fault.is_planned:
            log.info("it does not count: %s was told to end", fault.node.info.ref)
        elif isinstance(fault.error, OverloadedError):
            log.info("it does not count: %s had too much else to do", fault.node.info.ref)
        else:
            self.nodes.append(fault.node.info.ref)
            self.losses += fault.is_loss
        if isinstance(fault.error, NotFiniteError):
            self.not_finite.append(ran_on)
        self._registry.note_fault(fault.node, fault.error)

    def contradict(self, ran_on: tuple[NodeRef, ...]) -> None:
        """Quarantine the nodes that had no finite logits, once an attempt has shown that the logits are finite. Its own
        nodes are suspects only if there are no others."""
        suspects = [ref for refs in self.not_finite for ref in refs]
        if suspects:
            others = [ref for ref in suspects if ref not in ran_on]
            self._registry.quarantine(others or suspects, self._name)

    def __str__(self) -> str:
        return ", ".join(map(str, self.nodes))
