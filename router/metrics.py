"""The router's metrics: their names, types and help texts for Prometheus. This module must not know where the figures
come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from corun.observe.metrics import counter, counters, gauge, gauges, histogram, info
from corun.types import AuditStatus, NodeRole, NodeState, NodeStatus
from router.tally import Tally

P = "corun_router_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The figures that the metrics show. Counts start when the router starts."""

    router_id: str
    version: str
    fingerprint: str
    """The cluster contract's fingerprint; empty while it is not known."""
    tally: Tally
    queued_samples: int
    """The number of samples that wait now."""
    queued_tokens: int
    """The prompt tokens of the samples that wait now."""
    finished_samples: int
    mismatches: int
    audit: AuditStatus
    nodes: Sequence[NodeStatus]
    has_pair: bool
    """Whether a certified pair of nodes takes work."""
    still_s: float
    """For how many seconds the event loop has stood still (`router.lag`)."""


def families(now: Figures) -> Iterator[Metric]:
    """Yield all metrics of a router."""
    facts = {"router": now.router_id, "version": now.version, "fingerprint": now.fingerprint}
    yield info(f"{P}info", "What this router is; always 1", facts)
    text = "Seconds in which the event loop stood still, so that nothing was read or sent"
    yield counter(f"{P}still_seconds", text, now.still_s)
    yield from _requests(now)
    yield from _samples(now)
    yield from _audits(now)
    yield from _nodes(now)


def _requests(now: Figures) -> Iterator[Metric]:
    tally = now.tally
    ended = {("finished", ""): 0, ("cancelled", ""): 0, ("refused", "overloaded"): 0, ("failed", "unavailable"): 0}
    yield counters(
        f"{P}requests",
        "Requests that have ended: finished; cancelled by their client; refused, or failed, for a reason",
        ("outcome", "reason"),
        {**ended, **tally.requests},
    )
    yield counter(f"{P}resumed_requests", "Requests that came back for the rest of their output", tally.resumed)


def _samples(now: Figures) -> Iterator[Metric]:
    tally = now.tally
    yield gauge(f"{P}queued_samples", "Samples waiting for a slot", now.queued_samples)
    yield gauge(f"{P}queued_prompt_tokens", "Prompt tokens of the samples that wait for a slot", now.queued_tokens)
    yield counter(f"{P}finished_samples", "Samples that ended well", now.finished_samples)
    yield counter(f"{P}prompt_tokens", "Prompt tokens of the samples that ended well", tally.prompt_tokens)
    yield counter(f"{P}output_tokens", "Tokens delivered to clients, counted when a run ends", tally.output_tokens)
    yield counters(
        f"{P}sample_retries",
        "Runs of samples that a node failed: it was lost in them, or answered with a fault",
        ("reason",),
        {("lost",): tally.retries["lost"], ("fault",): tally.retries["fault"]},
    )
    yield histogram(f"{P}queue_seconds", "Wait of a sample for a slot, once for every run", tally.queue_s)
    yield histogram(
        f"{P}time_to_first_token_seconds", "From a request's arrival to a sample's first token", tally.first_token_s
    )
    yield histogram(
        f"{P}time_per_output_token_seconds",
        "Mean over a sample's tokens after the first, of finished samples",
        tally.token_s,
    )
    yield histogram(
        f"{P}sample_seconds", "From a request's arrival to a sample's end, if it ended well", tally.finished_s
    )


def _audits(now: Figures) -> Iterator[Metric]:
    audit = now.audit
    yield counter(f"{P}mismatches", "Samples whose repeated run gave other bits, audits included", now.mismatches)
    results = {("match",): audit.matched, ("mismatch",): audit.mismatched, ("error",): audit.failed}
    text = "Samples that were run again, by what came of it"
    yield counters(f"{P}audited_samples", text, ("result",), results)
    text = "Samples chosen for an audit that found no time or room"
    yield counter(f"{P}audit_skipped", text, audit.skipped)


def _nodes(now: Figures) -> Iterator[Metric]:
    found = Counter((status.node.role.value, status.state.value) for status in now.nodes)
    states = {(role.value, state.value): 0 for role in NodeRole for state in NodeState}
    yield gauges(f"{P}nodes", "Nodes that the router knows, by role and state", ("role", "state"), {**states, **found})
    text = "Whether a certified prefill and decode node, connected to each other, take work"
    yield gauge(f"{P}certified_pair", text, now.has_pair)
    decodes = [
        status
        for status in now.nodes
        if status.node.role is NodeRole.DECODE and status.state not in (NodeState.LOST, NodeState.REFUSED)
    ]
    total = {(status.node.ref.node_id,): status.node.slots for status in decodes}
    used = {(status.node.ref.node_id,): status.load.used_slots for status in decodes}
    yield gauges(f"{P}slots", "Slots of a decode node", ("node",), total)
    yield gauges(f"{P}used_slots", "Slots of a decode node that are leased, by whatever router", ("node",), used)
