"""Two runs of one sample gave different bits: an error, counted, and the nodes of both are out until they restart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from corun.errors import DataLossError, UnavailableError
from corun.params import SamplingParams
from corun.testing.engines import FakeDecodeEngine, expected
from corun.testing.nodes import LocalNode
from corun.types import NodeState
from decode_node.service import DecodeRequest
from router.output import SampleOutput
from tests.clusters import FakeCluster, cluster, generate, short_calls
from tests.router.asking import started

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=60, logprobs=True)


async def mismatch(fake: FakeCluster, *, at: LocalNode, by: LocalNode) -> None:
    """A sample starts at one decode node, which dies, and goes on at another, which lies."""
    run = started(fake, PROMPT, PARAMS, seed=8, request_id="lied")
    await fake.until(lambda: at.drawn_tokens > 10)
    by.engine.corrupt = True
    await at.kill()
    with pytest.raises(DataLossError, match="differs at token 0"):
        await run


async def test_the_nodes_of_both_runs_are_out_until_they_restart(model: str) -> None:
    async with cluster(model, decodes=3, lease_ttl_ms=600) as fake:
        p1, d1, d2, d3 = fake.nodes
        await mismatch(fake, at=d1, by=d2)
        status = await fake.status()
        assert status.mismatches == 1
        details = {node.node.ref.node_id: node.detail for node in status.nodes if node.state is NodeState.REFUSED}
        assert details == dict.fromkeys(("p1", "d1", "d2"), "gave other bits for sample 0 of request 'lied'")
        refusal = r"no prefill node is in use .*p1 is refused: gave other bits"
        with short_calls(), pytest.raises(UnavailableError, match=refusal):
            await generate(fake, PROMPT, PARAMS)
        await d2.fall_silent()
        d2.join()  # The same generation may not come back, however it tries.
        with pytest.raises(DataLossError, match="gave other bits for sample 0 of request 'lied': restart it"):
            fake.router.registry.register(d2.info)
        await asyncio.sleep(0.1)
        assert fake.state("d2") is NodeState.REFUSED
        for node in (p1, d2, d3):
            await node.kill()
        news = [await fake.add_prefill("p1"), await fake.add_decode("d2")]
        await fake.ready(*(str(node.info.ref) for node in news))
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert output.token_ids == expected(PROMPT, PARAMS, 9)[0]


async def test_a_run_that_differs_and_then_fails_is_the_last_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the nodes of the next run would be out instead of its own."""
    found, is_different, start = asyncio.Event(), SampleOutput._is_different, FakeDecodeEngine.start

    def noted(output: SampleOutput, *record: Any) -> bool:
        if differs := is_different(output, *record):
            found.set()
        return differs

    async def start_and_fail(engine: FakeDecodeEngine, request: DecodeRequest) -> None:
        await start(engine, request)
        if engine.corrupt:
            await found.wait()
            raise UnavailableError("the engine is gone")

    monkeypatch.setattr(SampleOutput, "_is_different", noted)
    monkeypatch.setattr(FakeDecodeEngine, "start", start_and_fail)
    async with cluster(model, decodes=3, lease_ttl_ms=600) as fake:
        _, d1, d2, d3 = fake.nodes
        await mismatch(fake, at=d1, by=d2)
        names = "p1", "d1", "d2", "d3"
        assert [name for name in names if fake.state(name) is NodeState.REFUSED] == ["p1", "d1", "d2"]
        assert d3.drawn_tokens == 0


async def test_what_ran_on_a_quarantined_node_runs_again_elsewhere(model: str) -> None:
    """And a node that only shows that the quarantined one lied stays in use."""
    async with cluster(model, prefills=3, decodes=3, lease_ttl_ms=600) as fake:
        d1, d2, d3 = fake.nodes[3:]
        for node in (d1, d2, d3):
            node.engine.step_ms = 10
        d2.engine.corrupt = True
        runs = [started(fake, (i, 2), PARAMS, seed=i) for i in range(9)]
        await fake.until(lambda: all(node.leases and node.drawn_tokens > 15 for node in (d1, d2, d3)))
        await d1.kill()
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        right = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        assert len(right) >= 3
        for i in right:
            (output,) = outcomes[i]  # type: ignore[misc]
            assert (output.token_ids, output.logprobs) == expected((i, 2), PARAMS, i)[:2]
        assert all(isinstance(outcome, (list, DataLossError)) for outcome in outcomes)
        assert fake.state("d3") is NodeState.READY
        status = await fake.status()
        assert status.mismatches == 9 - len(right) > 0
