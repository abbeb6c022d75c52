"""What a router and nodes show to Prometheus, over HTTP: whole processes' worth of them, around fake engines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from prometheus_client import Metric

from corun.client.client import AsyncClient
from corun.errors import InvalidArgumentError, OverloadedError, UnavailableError
from corun.node.certificate import Certificate
from corun.params import SamplingParams
from corun.testing.cluster import WAIT_S
from corun.testing.nodes import LocalNode
from corun.types import Freedom
from router.app import Router
from tests.clusters import FakeCluster, cluster, generate
from tests.scraping import families, scrape

PARAMS = SamplingParams(max_tokens=20, logprobs=True)
PROMPT = (5, 6, 7)
R = "corun_router_"


def port_of(router: Router) -> int:
    return router.observation.metrics.port


async def shown(fake: FakeCluster) -> dict[str, float]:
    return await scrape(port_of(fake.router))


async def test_metrics_are_what_the_router_counts(model: str) -> None:
    async with cluster(model, metrics_port=0, audit_fraction=1.0, heartbeat_timeout_ms=30_000) as fake:
        await generate(fake, PROMPT, PARAMS, seed=8)
        await fake.until(lambda: fake.router.auditor.status().matched == 1)
        found = await shown(fake)
        expected = {
            "finished_samples_total": 1,
            'requests_total{outcome="finished",reason=""}': 1,
            'requests_total{outcome="cancelled",reason=""}': 0,
            "prompt_tokens_total": 3,
            "output_tokens_total": 20,
            "queued_samples": 0,
            "queued_prompt_tokens": 0,
            "queue_seconds_count": 1,
            "time_to_first_token_seconds_count": 1,
            "time_per_output_token_seconds_count": 1,
            "sample_seconds_count": 1,
            "mismatches_total": 0,
            'audited_samples_total{result="match"}': 1,
            'audited_samples_total{result="mismatch"}': 0,
            'audited_samples_total{result="error"}': 0,
            "audit_skipped_total": 0,
            "certified_pair": 1,
            'nodes{role="prefill",state="ready"}': 1,
            'nodes{role="decode",state="ready"}': 1,
            'nodes{role="decode",state="lost"}': 0,
            'slots{node="d1"}': 8,
        }
        assert {name: found[R + name] for name in expected} == expected
        assert 0 <= found[f"{R}still_seconds_total"] < WAIT_S
        assert 0 < found[f"{R}time_to_first_token_seconds_sum"] < found[f"{R}sample_seconds_sum"] < WAIT_S
        token_s = found[f"{R}time_per_output_token_seconds_sum"]
        assert token_s == pytest.approx(
            (found[f"{R}sample_seconds_sum"] - found[f"{R}time_to_first_token_seconds_sum"]) / 19, rel=0.2
        )


async def test_every_end_of_a_request_is_counted_once(model: str) -> None:
    slow = SamplingParams(max_tokens=400)
    async with (
        cluster(model, slots=1, metrics_port=0, max_queued_samples=1) as fake,
        AsyncClient(fake.address, timeout_s=WAIT_S) as client,
    ):
        with pytest.raises(InvalidArgumentError):
            await generate(fake, PROMPT, SamplingParams(max_tokens=10_000))
        fake.nodes[1].engine.hanging = True
        calls = [asyncio.ensure_future(client.generate([n], slow, seed=n)) for n in (1, 2)]
        await fake.until(lambda: fake.router.queue.waiting == 1)
        with pytest.raises(OverloadedError):
            await client.generate([3], slow)
        fake.nodes[1].engine.hanging = False
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 0)
        for call in calls:  # One waits, one runs.
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await fake.until(lambda: not fake.router._activity.running)
        await generate(fake, PROMPT, PARAMS)
        found = await shown(fake)
        ended = {name: value for name, value in found.items() if name.startswith(f"{R}requests_total") and value}
        assert ended == {
            f'{R}requests_total{{outcome="finished",reason=""}}': 1,
            f'{R}requests_total{{outcome="cancelled",reason=""}}': 2,
            f'{R}requests_total{{outcome="refused",reason="overloaded"}}': 1,
            f'{R}requests_total{{outcome="refused",reason="invalid_argument"}}': 1,
        }


async def test_runs_that_nodes_failed_are_counted_and_no_token_twice(model: str) -> None:
    async with cluster(model, decodes=2, metrics_port=0) as fake:
        fake.nodes[1].engine.fail_after = fake.nodes[2].engine.fail_after = 7
        await generate(fake, PROMPT, PARAMS, seed=8)
        found = await shown(fake)
        assert found[f'{R}sample_retries_total{{reason="fault"}}'] == 2
        assert found[f'{R}sample_retries_total{{reason="lost"}}'] == 0
        assert found[f"{R}output_tokens_total"] == 20
        assert found[f"{R}queue_seconds_count"] == 3
        assert found[f"{R}time_to_first_token_seconds_count"] == 1
        fake.nodes[0].engine.errors = [RuntimeError("it fell over")] * 3
        with pytest.raises(UnavailableError):
            await generate(fake, PROMPT, PARAMS, seed=8)
        assert (await shown(fake))[f'{R}requests_total{{outcome="failed",reason="unavailable"}}'] == 1


@pytest.fixture
async def live(model: str) -> AsyncIterator[FakeCluster]:
    """A router and a whole node of each role, each with a port for metrics."""
    async with cluster(model, prefills=0, decodes=0, metrics_port=0) as fake:
        await fake.add_prefill(metrics_port=0)
        await fake.add_decode(metrics_port=0)
        await fake.ready("p1", "d1")
        yield fake


async def shown_by(node: LocalNode) -> dict[str, float]:
    return await scrape(node.observation.metrics.port)


def start(live: FakeCluster, prompt: Sequence[int] = PROMPT, **params: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(generate(live, prompt, SamplingParams(**params), seed=8))


async def test_nodes_show_what_they_do(live: FakeCluster) -> None:
    await start(live, max_tokens=20)
    prefill, decode = [await shown_by(node) for node in live.nodes]
    expected = {
        "corun_prefill_prompts_total": 1,
        "corun_prefill_prompt_tokens_total": 3,
        "corun_prefill_failed_prompts_total": 0,
        "corun_prefill_queued_prompts": 0,
        "corun_prefill_queued_prompt_tokens": 0,
        "corun_prefill_expected_wait_seconds": 0,
        "corun_prefill_queue_seconds_count": 1,
        "corun_prefill_compute_seconds_count": 1,
        "corun_prefill_kv_blocks": 1000,
        "corun_prefill_held_kv_blocks": 0,
        "corun_node_certified": 1,
        "corun_node_serving": 1,
    }
    assert {name: prefill[name] for name in expected} == expected
    expected = {
        'corun_decode_steps_total{rows="8"}': 20,
        "corun_decode_rows_total": 160,
        "corun_decode_used_rows_total": 20,
        "corun_decode_tokens_total": 20,
        "corun_decode_step_seconds_count": 19,
        "corun_decode_slots": 8,
        "corun_decode_used_slots": 0,
        "corun_decode_leases": 0,
        "corun_decode_kv_blocks": 1000,
        "corun_decode_reserved_kv_blocks": 0,
        "corun_decode_expired_leases_total": 0,
        "corun_decode_kv_reads_total": 0,
        "corun_decode_failed_kv_reads_total": 0,
        "corun_node_certified": 1,
    }
    assert {name: decode[name] for name in expected} == expected
    assert 0.019 < decode["corun_decode_step_seconds_sum"] < WAIT_S
    (name,) = (name for name in decode if name.startswith("corun_node_info"))
    for label in (f'generation="{live.nodes[1].ref.generation}"', 'node="d1"', 'role="decode"'):
        assert label in name


async def test_waits_at_a_prefill_node_are_foreseen_and_measured(live: FakeCluster) -> None:
    """Sleeps may be longer than asked for, never shorter. Equal prompts of a client wait for one computation."""
    node = live.nodes[0]
    node.engine.delay_s = 0.1
    await start(live, max_tokens=1)
    async with node.engine.turn:  # None is computed before all of them are there and looked at.
        runs = [start(live, (number, 6, 7), max_tokens=1) for number in (0, 1, 2, 2, 2)]
        # A prompt has arrived a moment before its tokens count.
        await live.until(lambda: (node.service.queued_prompts, node.queued_tokens) == (5, 9))
        found = await shown_by(node)
    assert found["corun_prefill_queued_prompt_tokens"] == 9
    assert 0.29 < found["corun_prefill_expected_wait_seconds"] < WAIT_S
    await asyncio.gather(*runs)
    found = await shown_by(node)
    assert 0.29 < found["corun_prefill_queue_seconds_sum"] < WAIT_S
    assert 0.39 < found["corun_prefill_compute_seconds_sum"] < WAIT_S
    assert (found["corun_prefill_prompts_total"], found["corun_prefill_shared_prompts_total"]) == (4, 2)
    assert found["corun_prefill_held_kv_blocks"] == 0


async def test_a_freedom_that_is_lost_in_service_is_shown(live: FakeCluster) -> None:
    node = live.nodes[0]
    held = [f'corun_node_freedom_held{{freedom="{name}"}}' for name in ("packed", "chunks")]
    certificate = Certificate.of_ranks({Freedom.PACKED: "", Freedom.CHUNKS: "switched off"})
    node.engine.certificate = certificate
    node.agent.describe(node._role.info(node.server.address))
    shown = await shown_by(node)
    assert [shown[name] for name in held] == [1, 0]
    node.engine.withdraw("other KV when it runs alone")
    shown = await shown_by(node)
    assert [shown[name] for name in held] == [0, 0]


async def test_a_node_that_drains_says_so(live: FakeCluster) -> None:
    node = live.nodes[1]
    node.engine.hanging = True
    running = start(live, max_tokens=100)
    await live.until(lambda: bool(node.service._running))
    node.stop.set()
    await live.until(lambda: node.service.draining)
    found = await shown_by(node)
    assert (found["corun_node_serving"], found["corun_node_certified"]) == (0, 1)
    assert (found["corun_decode_leases"], found["corun_decode_used_slots"]) == (1, 0), "it has no row yet"
    node.engine.hanging = False
    await running


NO_UNITS = ("_milliseconds", "_ms", "_s", "_us", "_minutes", "_hours", "_kib", "_mib", "_gib", "_percent", "_kb", "_mb")
NAME = re.compile(r"^(corun|process)_[a-z][a-z0-9_]*$")


def lint(metric: Metric) -> list[str]:
    """What Prometheus's rules for names have against a metric, as promtool says it."""
    name, kind, text = metric.name, metric.type, metric.documentation.strip()
    labels = {label for one in metric.samples for label in one.labels}
    totals = all(one.name.endswith(("_total", "_created")) for one in metric.samples)
    suffixed = name.endswith(("_total", "_count", "_sum", "_bucket"))
    faults = {
        "its name is not in snake case with a prefix": not NAME.match(name),
        "its help is missing, or ends with a full stop": not text or text.endswith("."),
        "a counter ends with _total": kind == "counter" and not totals,
        "only a counter ends with _total, and nothing with a histogram's suffixes": kind != "counter" and suffixed,
        "it does not have a base unit": name.endswith(NO_UNITS),
        "a histogram has a unit": kind == "histogram" and not name.endswith(("_seconds", "_bytes")),
        "it has no type": kind == "unknown",
        "le and quantile are not for it": kind != "histogram" and bool(labels & {"le", "quantile"}),
        "its labels are not in snake case": any(not re.match(r"^[a-z][a-z_]*$", label) for label in labels),
    }
    return [f"{name}: {what}" for what, holds in faults.items() if holds]


async def test_all_names_follow_the_rules_of_prometheus(live: FakeCluster) -> None:
    await start(live, max_tokens=4)
    ports = [port_of(live.router), *(node.observation.metrics.port for node in live.nodes)]
    shown = [metric for port in ports for metric in await asyncio.to_thread(families, port)]
    assert len({metric.name for metric in shown if metric.name.startswith("corun_")}) > 45
    ours = [metric for metric in shown if not metric.name.startswith("process_")]
    assert [metric.name for metric in ours if metric.name.endswith("_created")] == []
    assert [fault for metric in ours for fault in lint(metric)] == []
    broken = (("corun_wait_ms", "gauge"), ("corun_things_total", "gauge"), ("corun_wait", "histogram"))
    for name, kind in (*broken, ("corun_Wait_seconds", "gauge"), ("things", "gauge")):
        assert len(lint(Metric(name, "Things", kind))) == 1
    assert len(lint(Metric("corun_wait_seconds", "", "gauge"))) == 1
