"""The router's metrics: what it counts of its requests and samples, and what it shows of its state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from corun import __version__
from corun.errors import CorunError, kind_of
from corun.observe.metrics import STEPS_S, Metrics, Values
from corun.types import AuditStatus, NodeRole, NodeState, NodeStatus
from router.flexing import Flexing
from router.nodes.registry import Registry
from router.queue import SampleQueue

REFUSALS = ("contract_mismatch", "invalid_argument", "overloaded", "permission_denied", "unauthenticated")
"""The kinds of errors that refuse a request, in this form or at this time. All other errors count as failures."""

RETRIES = ("lost", "fault")
"""Why a sample runs again: its node went away, or answered with an error of its own."""


@dataclass
class Ending:
    """How one request ends."""

    has_finished: bool = False
    """Whether the client was sent everything."""
    error: CorunError | None = None
    """The error that ended the request's output early."""


class RouterMetrics(Metrics):
    """A router's metrics since its start."""

    def __init__(
        self,
        router_id: str,
        registry: Registry,
        queue: SampleQueue,
        flexing: Flexing,
        audit: Callable[[], AuditStatus],
    ) -> None:
        super().__init__("corun_router_")
        self._add_counts()
        self._show_state(router_id, registry, queue, audit)
        text = (
            "Seconds that a prompt which comes now should wait for its computation; 0 without a target for first tokens"
        )
        self.gauge("expected_first_token_seconds", text).set_function(lambda: flexing.wait_s)
        text = "Colocated nodes that take prompts only, under a target for first tokens"
        self.gauge("prompts_only_nodes", text).set_function(lambda: flexing.num_prompts_only)

    @contextmanager
    def request(self) -> Iterator[Ending]:
        """Count one request when it ends, whatever its outcome."""
        ending = Ending()
        try:
            yield ending
        except CorunError as error:
            ending.error = error
            raise
        finally:
            outcome, reason = "finished" if ending.has_finished else "cancelled", ""
            if ending.error is not None:
                reason = kind_of(ending.error)
                outcome = "refused" if reason in REFUSALS else "failed"
            self.requests.labels(outcome, reason).inc()

    @property
    def num_retries(self) -> int:
        """The number of runs of samples and scores that a node failed."""
        return sum(int(self.sample_retries.labels(reason).value) for reason in RETRIES)

    def note_sample(self, arrived: float, first_token: float | None, num_prompt: int, num_tokens: int) -> None:
        """Count the tokens and times of a sample that has finished. Times are on the loop's clock."""
        now = asyncio.get_running_loop().time()
        self.prompt_tokens.inc(num_prompt)
        self.sample_seconds.observe(now - arrived)
        if first_token is not None and num_tokens > 1:
            self.time_per_output_token_seconds.observe((now - first_token) / (num_tokens - 1))

    def _add_counts(self) -> None:
        text = "Requests that have ended: finished; cancelled by their client; refused, or failed, for a reason"
        self.requests = self.counter("requests", text, ("outcome", "reason"))
        for ended in (("finished", ""), ("cancelled", ""), ("refused", "overloaded"), ("failed", "unavailable")):
            self.requests.labels(*ended)
        self.resumed_requests = self.counter("resumed_requests", "Requests that came back for the rest of their output")
        self.finished_samples = self.counter("finished_samples", "Samples that ended well")
        self.prompt_tokens = self.counter("prompt_tokens", "Prompt tokens of the samples that ended well")
        self.output_tokens = self.counter("output_tokens", "Tokens delivered to clients, counted when a run ends")
        self.scored_tokens = self.counter("scored_tokens", "Tokens of continuations whose scores were computed")
        text = "Runs of samples and scores that a node failed: it was lost in them, or answered with a fault"
        self.sample_retries = self.counter("sample_retries", text, ("reason",))
        for reason in RETRIES:
            self.sample_retries.labels(reason)
        self.queue_seconds = self.histogram("queue_seconds", "Wait of a sample for room on nodes, once for every run")
        text = "From a request's arrival to a sample's first token"
        self.time_to_first_token_seconds = self.histogram("time_to_first_token_seconds", text)
        text = "Mean over a sample's tokens after the first, of finished samples"
        self.time_per_output_token_seconds = self.histogram("time_per_output_token_seconds", text, STEPS_S)
        text = "From a request's arrival to a sample's end, if it ended well"
        self.sample_seconds = self.histogram("sample_seconds", text)

    def _show_state(
        self, router_id: str, registry: Registry, queue: SampleQueue, audit: Callable[[], AuditStatus]
    ) -> None:
        def info() -> Values:
            return {(router_id, __version__, registry.contract.fingerprint): 1}

        def audited() -> Values:
            found = audit()
            return {("match",): found.matched, ("mismatch",): found.mismatched, ("error",): found.failed}

        labels = "router", "version", "fingerprint"
        self.gauges_of("info", "What this router is; always 1", labels, info)
        text = "Seconds in which the event loop stood still, so that nothing was read or sent"
        self.counters_of("still_seconds", text, (), lambda: {(): registry.clock.still_s})
        self.gauge("queued_samples", "Samples waiting for room on nodes").set_function(lambda: queue.waiting)
        text = "Prompt tokens of the samples that wait for room on nodes"
        self.gauge("queued_prompt_tokens", text).set_function(lambda: queue.waiting_tokens)
        text = "Samples whose repeated run gave other bits, audits included"
        self.counters_of("mismatches", text, (), lambda: {(): registry.mismatches})
        self.counters_of("audited_samples", "Samples that were run again, by what came of it", ("result",), audited)
        text = "Samples chosen for an audit that found no time or room"
        self.counters_of("audit_skipped", text, (), lambda: {(): audit().skipped})
        self.gauges_of(
            "nodes", "Nodes that the router knows, by role and state", ("role", "state"), lambda: _nodes(registry)
        )
        text = "Whether a certified prefill and decode node, connected to each other, take work"
        self.gauge("certified_pair", text).set_function(lambda: not registry.missing())
        self.gauges_of(
            "slots", "Slots of a decode node", ("node",), lambda: _slots(registry, lambda each: each.node.slots)
        )
        text = "Slots of a decode node in which samples decode, of whatever router"
        self.gauges_of("used_slots", text, ("node",), lambda: _slots(registry, lambda each: each.load.used_slots))


def _nodes(registry: Registry) -> Values:
    """Return the number of nodes by role and state, with a 0 for every state in which there are none."""
    found = Counter((status.node.role.value, status.state.value) for status in registry.statuses())
    return {(role.value, state.value): found[role.value, state.value] for role in NodeRole for state in NodeState}


def _slots(registry: Registry, slots: Callable[[NodeStatus], int]) -> Values:
    """Return a number of slots for each decode node in use, by its id."""
    return {
        (status.node.ref.node_id,): slots(status)
        for status in registry.statuses()
        if status.node.role is NodeRole.DECODE and status.is_in_use
    }
