"""Logits that are not finite: of the request if two runs find it, of a node if only one does."""

from __future__ import annotations

import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun.params import SamplingParams
from corun.types import NodeState
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import right, started

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=12, logprobs=True)


def states(fake: FakeCluster) -> list[NodeState]:
    return [fake.state(node.info.ref.node_id) for node in fake.nodes]


@pytest.mark.parametrize("decodes", [1, 2])
async def test_what_two_runs_find_is_the_requests(model: str, decodes: int) -> None:
    """It ends with an error that no client repeats, no node is blamed, and a stream beside it keeps its bits."""
    long = SamplingParams(max_tokens=60, logprobs=True)
    async with cluster(model, decodes=decodes) as fake:
        beside = started(fake, (1, 2), long, seed=3)
        await fake.until(lambda: any(node.drawn_tokens > 8 for node in fake.nodes[1:]))
        for node in fake.nodes[1:]:
            node.engine.not_finite = [5] * 9
        with pytest.raises(InvalidArgumentError) as caught:
            await generate(fake, PROMPT, PARAMS, seed=9)
        assert (caught.value.field, str(caught.value.value)) == ("prompt", "3 tokens")
        assert caught.value.limit.startswith(
            "has logits that are not finite at output token 5 with these parameters (d"
        )
        assert fake.nodes[0].engine.prefilled.count(PROMPT) == 2
        for node in fake.nodes[1:]:
            node.engine.not_finite = []
        (output,) = await beside
        assert right(output, (1, 2), long, 3)
        assert set(states(fake)) == {NodeState.READY}
        assert (await fake.status()).mismatches == 0


async def test_with_one_attempt_one_run_is_enough(model: str) -> None:
    async with cluster(model, max_attempts=1) as fake:
        fake.nodes[1].engine.not_finite = [0]
        with pytest.raises(InvalidArgumentError, match="at output token 0"):
            await generate(fake, PROMPT, PARAMS)


@pytest.mark.parametrize("decodes", [1, 2])
async def test_what_the_next_run_does_not_find_is_the_nodes(model: str, decodes: int) -> None:
    """The client gets the output of the run that ended; the node that found nothing to draw from is out."""
    async with cluster(model, decodes=decodes, lease_ttl_ms=600) as fake:
        fake.nodes[1].engine.not_finite = [5]
        (output,) = await generate(fake, PROMPT, PARAMS, seed=9)
        assert right(output, PROMPT, PARAMS, 9)
        await fake.until(lambda: fake.state("d1") is NodeState.REFUSED)
        assert (await fake.status()).mismatches == 1
        if decodes == 2:
            assert [fake.state("p1"), fake.state("d2")] == [NodeState.READY] * 2
        else:
            assert set(states(fake)) == {NodeState.REFUSED}
            with pytest.raises(UnavailableError):
                await generate(fake, PROMPT, PARAMS, timeout_s=1.0)
