"""Two runs of one sample gave different bits: an error, counted, and the nodes of both are out until they restart."""

from __future__ import annotations

import asyncio

import pytest

from corun.errors import DataLossError, UnavailableError
from corun.params import SamplingParams
from corun.testing.engines import expected
from corun.testing.nodes import LocalNode
from corun.types import NodeState
from router import service
from tests.clusters import FakeCluster, cluster, generate

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=60, logprobs=True)


async def mismatch(fake: FakeCluster, *, at: LocalNode, by: LocalNode) -> None:
    """A sample starts at one decode node, which dies, and goes on at another, which lies."""
    run = asyncio.ensure_future(generate(fake, PROMPT, PARAMS, seed=8, request_id="lied"))
    await fake.until(lambda: at.drawn_tokens > 10)
    by.engine.corrupt = True
    await at.kill()
    with pytest.raises(DataLossError, match="differs at token 0"):
        await run


async def test_the_nodes_of_both_runs_are_out_and_counted(model: str) -> None:
    async with cluster(model, prefills=2, decodes=3, lease_ttl_ms=600) as fake:
        d1, d2, d3 = fake.nodes[2:]
        await mismatch(fake, at=d1, by=d2)
        status = await fake.status()
        assert status.mismatches == 1
        states = {node.node.ref.node_id: (node.state, node.detail) for node in status.nodes}
        out = {name for name, (state, _) in states.items() if state is NodeState.REFUSED}
        assert {"d1", "d2"} < out
        assert "d3" not in out
        assert states["d2"][1] == "gave other bits for sample 0 of request 'lied'"
        assert out & {"p1", "p2"}
        await d2.fall_silent()
        d2.join()  # The same generation may not come back, however it tries.
        await asyncio.sleep(0.1)
        assert fake.state("d2") is NodeState.REFUSED
        for number in (1, 2):
            if f"p{number}" in out:
                await fake.nodes[number - 1].kill()
                new = await fake.add_prefill(f"p{number}")
                await fake.ready(str(new.info.ref))
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert output.receipt.decode_node == d3.info.ref


async def test_a_restarted_node_is_trusted_again(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ANSWER_S", 1.0)
    async with cluster(model, decodes=2, lease_ttl_ms=600) as fake:
        p1, d1, d2 = fake.nodes
        await mismatch(fake, at=d1, by=d2)
        with pytest.raises(UnavailableError, match=r"no prefill node is in use .*p1 is refused: gave other bits"):
            await generate(fake, PROMPT, PARAMS, timeout_s=2.0)
        with pytest.raises(DataLossError, match="gave other bits for sample 0 of request 'lied': restart it"):
            fake.router.registry.register(d2.info)
        for node in (p1, d2):
            await node.kill()
        news = [await fake.add_prefill("p1"), await fake.add_decode("d2")]
        await fake.ready(*(str(node.info.ref) for node in news))
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert output.token_ids == expected(PROMPT, PARAMS, 9)[0]


async def test_what_ran_on_a_quarantined_node_runs_again_elsewhere(model: str) -> None:
    """And a node that only shows that the quarantined one lied stays in use."""
    async with cluster(model, prefills=3, decodes=3, lease_ttl_ms=600) as fake:
        d1, d2, d3 = fake.nodes[3:]
        for node in (d1, d2, d3):
            node.engine.step_ms = 10
        d2.engine.corrupt = True
        runs = [asyncio.ensure_future(generate(fake, (i, 2), PARAMS, seed=i)) for i in range(9)]
        await fake.until(lambda: all(node.used_slots and node.drawn_tokens > 15 for node in (d1, d2, d3)))
        await d1.kill()
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        right = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        assert len(right) >= 3
        for i in right:
            assert outcomes[i][0].token_ids == expected((i, 2), PARAMS, i)[0]  # type: ignore[index]
            assert outcomes[i][0].logprobs == expected((i, 2), PARAMS, i)[1]  # type: ignore[index]
        assert all(isinstance(outcome, (list, DataLossError)) for outcome in outcomes)
        assert fake.state("d3") is NodeState.READY
        status = await fake.status()
        assert status.mismatches == 9 - len(right) > 0


async def test_a_request_that_takes_its_nodes_with_it_is_named(model: str) -> None:
    async with cluster(model, decodes=3, max_attempts=2) as fake:
        run = asyncio.ensure_future(generate(fake, PROMPT, SamplingParams(max_tokens=400), seed=8, request_id="toxic"))
        lost = []
        for _ in range(2):
            await fake.until(lambda: any(node.used_slots for node in fake.nodes[1:] if node not in lost))
            lost.append(next(node for node in fake.nodes[1:] if node.used_slots and node not in lost))
            await fake.until(lambda: lost[-1].drawn_tokens > 3)
            await lost[-1].kill()
        with pytest.raises(UnavailableError) as caught:
            await run
        nodes = ", ".join(str(node.info.ref) for node in lost)
        assert str(caught.value) == (
            f"request 'toxic' may be poison: 2 runs of its sample 0 ended with a lost node ({nodes})"
        )
        assert caught.value.retry_after_s is None  # No client is to try it elsewhere.
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert output.token_ids == expected(PROMPT, PARAMS, 9)[0]
