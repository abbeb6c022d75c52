"""The metrics of nodes of both roles: which node it is, whether it may serve, and what its engine reports.

vLLM counts in prometheus_client's own registry (v1/metrics/loggers.py), in this process, if its arguments enable that
(`corun.node.vllm.start.shared_arguments`). This module decides which of these metrics are passed on: only those that
our nodes feed. Must not know: vLLM, roles, gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

from corun import __version__
from corun.contract import Contract
from corun.observe.metrics import Metrics
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
"""vLLM's metric families that have their normal meaning on a node of the role. Others would mislead: a decode node does
not run the output loop that feeds the metrics of single requests, a prefill node's token is thrown away, and vLLM
counts released KV as expired."""


class NodeMetrics(Metrics):
    """The metrics that tell which node it is and whether it works."""

    def __init__(self, node: NodeInfo, is_serving: Callable[[], bool]) -> None:
        super().__init__("corun_node_")
        text = "What this node is; always 1. The fingerprint is of its own part of the contract"
        labels = ("node", "generation", "role", "model", "version", "fingerprint")
        names = (node.ref.node_id, node.ref.generation, node.role.value, node.model, __version__)
        self.gauges_of(
            "info", text, labels, lambda: {(*names, Contract.from_json(node.contract_json).fingerprint()): 1}
        )
        text = "Whether the node's self-test found that no company changes a bit"
        self.gauge("certified", text).set(not node.finding)
        self.gauge("serving", "Whether the node takes work").set_function(is_serving)


class EngineCollector(Collector):
    """Passes on the metrics that vLLM has counted."""

    def __init__(self, role: NodeRole, registry: CollectorRegistry = REGISTRY) -> None:
        self._names = frozenset(PASSED[role])
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in self._registry.collect() if metric.name in self._names]
