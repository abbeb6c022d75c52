"""What real processes around real engines show: health while they load, metrics of theirs and of vLLM's, one trace."""

from __future__ import annotations

import pytest

from corun import SamplingParams
from tests.e2e.conftest import PROBES, SLOTS, Cluster
from tests.machine import wait_for
from tests.probing import probe

pytestmark = pytest.mark.e2e

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def test_a_node_is_alive_while_its_engine_loads(cluster: Cluster) -> None:
    assert cluster.while_loading == {"/livez": 200, "/startedz": 503, "/readyz": 503}
    for port in cluster.metrics.values():
        assert {path: probe(port, path) for path in PROBES} == dict.fromkeys(PROBES, 200)


def test_metrics_of_real_engines_are_fed(cluster: Cluster) -> None:
    cluster.kv_reads()  # Those of earlier tests are told.
    before = {name: cluster.shown(name) for name in cluster.metrics}
    with cluster.client() as client:
        client.generate("Once upon a time", PARAMS, seed=1)

    def grown(name: str, key: str) -> float:
        return cluster.shown(name).get(key, 0.0) - before[name].get(key, 0.0)

    # The reads are known some seconds later.
    wait_for(lambda: grown("decode", "corun_decode_kv_reads_total") == 1, "the KV read is counted")
    assert grown("decode", "corun_decode_kv_read_bytes_total") > 0
    assert grown("decode", "corun_decode_kv_read_seconds_total") > 0
    assert grown("decode", "corun_decode_tokens_total") == grown("decode", "corun_decode_used_rows_total") == 30
    # One request may run in steps of fewer rows, where they give the same bits.
    steps = {rows: grown("decode", f'corun_decode_steps_total{{rows="{rows}"}}') for rows in range(1, SLOTS + 1)}
    assert sum(steps.values()) == 30
    assert grown("decode", "corun_decode_rows_total") == sum(rows * count for rows, count in steps.items())
    assert grown("decode", "vllm:generation_tokens_total") == 30
    assert grown("decode", "vllm:iteration_tokens_total_count") >= 30
    assert grown("decode", "vllm:nixl_xfer_time_seconds_count") == 1
    assert cluster.shown("decode")["vllm:num_requests_running"] == 0
    assert grown("prefill", "corun_prefill_prompt_tokens_total") > 0
    assert grown("prefill", "corun_prefill_prompts_total") == 1
    assert grown("router", "corun_router_finished_samples_total") == 1
    for name in ("decode", "prefill"):
        assert before[name]["corun_node_certified"] == before[name]["corun_node_serving"] == 1
        unfed = [key for key, value in cluster.shown(name).items() if key.endswith("_count") and not value]
        assert [key for key in unfed if key.startswith("vllm:")] == []


def test_a_request_is_one_trace_through_all_processes(cluster: Cluster) -> None:
    with cluster.client() as client:
        done = client.generate("Once upon a time", PARAMS, seed=1, request_id="traced")
    spans = cluster.collector.spans

    def of_request() -> list[str]:
        traces = {span.trace for span in spans if span.attributes.get("corun.request_id") == "traced"}
        return sorted(str(span) for span in spans if span.trace in traces)

    expected = [
        "corun-decode: handoff",
        "corun-prefill: compute",
        "corun-prefill: queue",
        "corun-router: attempt",
        "corun-router: corun.request",
        "corun-router: decode",
        "corun-router: prefill",
        "corun-router: queue",
        "corun-router: reserve",
    ]
    wait_for(lambda: len(of_request()) >= len(expected), "all spans have come")
    assert of_request() == expected
    assert {span.service for span in spans} == {"corun-router", "corun-prefill", "corun-decode"}  # None of vLLM's.
    assert done.text.encode() not in cluster.collector.raw


def test_samples_of_one_prompt_are_prefilled_once(cluster: Cluster) -> None:
    """Also those that wait for slots. That they have the bits of samples that were prefilled alone:
    `test_n_samples_are_n_seeds`."""
    before = cluster.shown("prefill")
    with cluster.client() as client:
        samples = client.generate([7] * 400, SamplingParams(n=SLOTS + 4, max_tokens=2), seed=3).samples
    after = cluster.shown("prefill")
    assert len(samples) == SLOTS + 4
    grown = {
        name: after[name] - before[name]
        for name in ("corun_prefill_prompts_total", "corun_prefill_shared_prompts_total")
    }
    assert grown == {"corun_prefill_prompts_total": 1, "corun_prefill_shared_prompts_total": SLOTS + 3}
    wait_for(lambda: cluster.shown("prefill")["corun_prefill_held_kv_blocks"] == 0, "all have read, and it is freed")


def test_what_came_from_the_cache_is_computed_again_while_the_node_is_idle(cluster: Cluster) -> None:
    """Alone and without the cache, and its KV has the same bits. Here every prompt is checked."""

    def grown(result: str) -> float:
        key = f'corun_prefill_rechecked_prompts_total{{result="{result}"}}'
        return cluster.shown("prefill")[key] - before[key]

    before = cluster.shown("prefill")
    with cluster.client() as client:
        for last in (5, 6):
            client.generate([9] * 299 + [last], SamplingParams(max_tokens=2), seed=3)
    assert cluster.shown("prefill")["corun_prefill_cached_tokens_total"] > before["corun_prefill_cached_tokens_total"]
    wait_for(lambda: grown("equal") >= 1, "the second prompt is computed again")
    assert grown("different") == 0
