"""The metrics of nodes of both roles: which node it is, whether it may serve, and what its engine reports.

vLLM counts in prometheus_client's own registry (v1/metrics/loggers.py), in this process, if its arguments enable that
(`corun.node.vllm.start.shared_arguments`). This module decides which of these metrics are passed on: only those that
our nodes feed. Must not know: vLLM, roles, gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Metric

from corun import __version__
from corun.contract import Contract
from corun.observe.metrics import Metrics, Values
from corun.types import NodeInfo, NodeRole

BOTH = (
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
)
PASSED = {
    NodeRole.PREFILL: BOTH,
    NodeRole.DECODE: (
        *BOTH,
        "vllm:generation_tokens",
        "vllm:iteration_tokens_total",
        "vllm:nixl_bytes_transferred",
        "vllm:nixl_num_descriptors",
        "vllm:nixl_num_failed_notifications",
        "vllm:nixl_num_failed_transfers",
        "vllm:nixl_post_time_seconds",
        "vllm:nixl_xfer_time_seconds",
    ),
}
"""vLLM's metric families that have their normal meaning on a node of the role. Others would mislead: no node runs the
output loop that feeds the metrics of single requests, and a prefill node's token is thrown away."""


class NodeMetrics(Metrics):
    """The metrics that tell which node it is, whether it works, and in which ways."""

    def __init__(self, infos: Callable[[], Sequence[NodeInfo]], is_serving: Callable[[], bool]) -> None:
        """Create the metrics. infos: returns what the node says of each of its roles now."""
        super().__init__("corun_node_")
        nodes = infos()
        text = "What this node is; always 1. The fingerprint is of its own part of the contract"
        labels = ("node", "generation", "role", "model", "version", "fingerprint")
        self.gauges_of("info", text, labels, lambda: dict.fromkeys(map(_names, nodes), 1))
        text = "Whether the node's self-test found that no company changes a bit"
        self.gauge("certified", text).set(not nodes[0].finding)
        text = "Whether the node computes in this way, by its certificate and by what was found since"
        self.gauges_of("freedom_held", text, ("freedom",), lambda: _held(infos()))
        self.gauge("serving", "Whether the node takes work").set_function(is_serving)


def _names(node: NodeInfo) -> tuple[str, ...]:
    fingerprint = Contract.from_json(node.contract_json).fingerprint()
    return node.ref.node_id, node.ref.generation, node.role.value, node.model, __version__, fingerprint


def _held(infos: Iterable[NodeInfo]) -> Values:
    """Return 1 for each freedom of the node that it holds, and 0 for the others, by name."""
    return {(one.name,): not one.refused for info in infos for one in info.freedoms}


def engine_metrics(roles: Iterable[NodeRole], registry: CollectorRegistry = REGISTRY) -> list[Metric]:
    """Return the metrics that vLLM has counted and that a node of these roles passes on."""
    names = {name for role in roles for name in PASSED[role]}
    return [metric for metric in registry.collect() if metric.name in names]
