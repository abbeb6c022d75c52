"""Metrics that nodes of both roles have: who the node is, whether it may serve, and what its engine says of itself.

vLLM counts in prometheus_client's own registry (v1/metrics/loggers.py), in this process, once it is asked to
(`corun.node.vllm.start.shared_arguments`). What of it is passed on is said here: nothing that our nodes do not feed.
This module must not know vLLM, roles or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

from corun import __version__
from corun.contract import Contract
from corun.observe.metrics import gauge, info
from corun.types import NodeInfo, NodeRole

BOTH = (
    "vllm:cache_config_info",
    "vllm:iteration_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
)
PASSED = {
    NodeRole.PREFILL: (
        *BOTH,
        "vllm:prompt_tokens",
        "vllm:request_prefill_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_success",
    ),
    NodeRole.DECODE: (
        *BOTH,
        "vllm:generation_tokens",
        "vllm:nixl_bytes_transferred",
        "vllm:nixl_num_descriptors",
        "vllm:nixl_num_failed_notifications",
        "vllm:nixl_num_failed_transfers",
        "vllm:nixl_post_time_seconds",
        "vllm:nixl_xfer_time_seconds",
    ),
}
"""vLLM's families that say what they mean on a node of the role. A decode node does not run the output loop that feeds
those of single requests; a prefill node's token is thrown away, and to vLLM, KV that was released has expired."""


def node_metrics(node: NodeInfo, *, certified: bool, serving: bool) -> Iterator[Metric]:
    """Who the node is, and whether it works."""
    facts = {
        "node": node.ref.node_id,
        "generation": node.ref.generation,
        "role": node.role.value,
        "model": node.model,
        "version": __version__,
        "fingerprint": Contract.from_json(node.contract_json).fingerprint(),
    }
    yield info(
        "corun_node_info", "What this node is; always 1. The fingerprint is of its own part of the contract", facts
    )
    yield gauge("corun_node_certified", "Whether the node's self-test found that no company changes a bit", certified)
    yield gauge("corun_node_serving", "Whether the node takes work", serving)


class EngineCollector(Collector):
    """Passes on what vLLM has counted."""

    def __init__(self, role: NodeRole, registry: CollectorRegistry = REGISTRY) -> None:
        self._names = frozenset(PASSED[role])
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in self._registry.collect() if metric.name in self._names]
