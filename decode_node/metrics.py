"""A decode node's metrics: their names, types and help texts in Prometheus. Must not know: vLLM, gRPC."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric

from corun.observe.metrics import counter, counters, gauge, histogram
from corun.types import KvReads
from decode_node.service import DecodeService
from decode_node.slots import SlotTable

P = "corun_decode_"


def families(service: DecodeService, table: SlotTable) -> Iterator[Metric]:
    """Return all metrics of a decode node except those that both roles have."""
    figures = service.figures
    steps = {(str(rows),): steps for rows, steps in sorted(figures.steps_by_rows.items())}
    yield counters(f"{P}steps", "Steps, by the number of rows that they computed", ("rows",), steps)
    yield counter(f"{P}rows", "Rows that steps computed, padding included", figures.rows)
    yield counter(f"{P}used_rows", "Rows of steps that drew a token", figures.used_rows)
    yield counter(f"{P}tokens", "Tokens drawn for samples that held their lease", figures.tokens)
    text = "From one step's tokens to the next one's, while samples run"
    yield histogram(f"{P}step_seconds", text, figures.step_s)
    yield gauge(f"{P}slots", "Slots", table.slots)
    yield gauge(f"{P}leased_slots", "Slots that routers hold", len(table))
    yield gauge(f"{P}running_samples", "Samples that were started and have not ended", service.running_samples)
    yield gauge(f"{P}kv_blocks", "KV blocks that samples can use", table.kv_blocks)
    text = "KV blocks that are reserved for the whole of the leased samples"
    yield gauge(f"{P}reserved_kv_blocks", text, table.used_kv_blocks)
    text = "Leases that ended since their router's step stream broke and did not come back in time"
    yield counter(f"{P}expired_leases", text, figures.expired_leases)
    yield from _reads(service.kv_reads)


def _reads(reads: KvReads) -> Iterator[Metric]:
    yield counter(f"{P}kv_reads", "KV reads from prefill nodes, of the first rank; some seconds old", reads.count)
    yield counter(f"{P}kv_read_bytes", "Bytes of KV that were read, of the first rank", reads.bytes)
    text = "Time of the KV reads, each its own: those of parallel ones overlap"
    yield counter(f"{P}kv_read_seconds", text, reads.seconds)
    yield counter(f"{P}failed_kv_reads", "KV reads that failed, or whose KV was refused", reads.failed)
