"""A prefill node's metrics: their names, types and help texts in Prometheus. Must not know: vLLM, gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric

from corun.observe.metrics import counter, gauge, histogram
from prefill_node.service import PrefillService

P = "corun_prefill_"


class Engine(Protocol):
    """The figures about an engine's KV that are known without asking the engine."""

    expired_claims: int

    @property
    def known_kv_blocks(self) -> int: ...


def families(service: PrefillService, engine: Engine, *, kv_blocks: int) -> Iterator[Metric]:
    """Return all metrics of a prefill node except those that both roles have."""
    figures = service.figures
    yield counter(f"{P}prompts", "Prompts computed", figures.prompts)
    yield counter(f"{P}prompt_tokens", "Tokens of the prompts that were computed", figures.prompt_tokens)
    text = "Prompts that got the KV of an equal one of the same client"
    yield counter(f"{P}shared_prompts", text, service.sharing.shared)
    text = "Prompts that left without KV: cancelled, given up, or refused by the engine"
    yield counter(f"{P}failed_prompts", text, figures.failed_prompts)
    text = "Prompts in the node, the one that is being computed included"
    yield gauge(f"{P}queued_prompts", text, service.queued_prompts)
    yield gauge(f"{P}queued_prompt_tokens", "Tokens of the prompts in the node", service.queued_tokens)
    text = "How long the prompts in the node will take, at the rate of the last ones"
    yield gauge(f"{P}expected_wait_seconds", text, figures.rate.seconds_for(service.queued_tokens))
    yield histogram(f"{P}queue_seconds", "Wait of a prompt until it was computed", figures.queue_s)
    text = "Computation of a prompt, with its wait for KV room"
    yield histogram(f"{P}compute_seconds", text, figures.compute_s)
    yield gauge(f"{P}kv_blocks", "KV blocks that prompts can use", kv_blocks)
    yield gauge(f"{P}held_kv_blocks", "KV blocks that wait for their reader", engine.known_kv_blocks)
    text = "Prompts whose KV was neither read nor released before its lease ended"
    yield counter(f"{P}expired_claims", text, engine.expired_claims)
