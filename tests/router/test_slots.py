"""What is told of the samples in slots: places that stay, and details for those whose samples they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corun.client.client import AsyncClient
from corun.params import SamplingParams
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.types import NodeRole, SlotSamples
from router.nodes.node_client import RemoteLease
from router.views import place
from tests.clusters import FakeCluster, cluster
from tests.router.asking import token_of, with_tokens

OPERATOR, ALICE, BOB = token_of("ops"), token_of("alice"), token_of("bob")


async def lease(*, decodes: bool = False) -> RemoteLease:
    made = RemoteLease(lambda token_id, logprob: False, 1)
    made.first_row_at = 1.0 if decodes else None
    return made


def places(leases: Sequence[RemoteLease]) -> list[int | None]:
    return [each.place for each in leases]


async def test_a_sample_keeps_its_place_and_the_lowest_free_one_is_next() -> None:
    leases = [await lease() for _ in range(4)]
    place(leases, 8)
    assert places(leases) == [0, 1, 2, 3]
    stay = [leases[0], leases[2], leases[3], await lease(), await lease()]
    place(stay, 8)
    assert places(stay) == [0, 2, 3, 1, 4]


async def test_who_decodes_has_a_slot() -> None:
    """Samples may begin in another order than that of their leases."""
    leases = [await lease() for _ in range(5)]
    place(leases, 2)
    assert places(leases) == [0, 1, 2, 3, 4]
    leases[3].first_row_at = 1.0
    place(leases, 2)
    assert places(leases) == [3, 1, 2, 0, 4], "it changes places with one that does not decode"
    leases[4].first_row_at = 1.0
    place(leases, 2)
    assert places(leases) == [3, 4, 2, 0, 1]
    leases[2].first_row_at = 1.0
    place(leases, 2)
    assert places(leases) == [3, 4, 2, 0, 1], "there is no third slot"
    place([*leases[:3], leases[4]], 2)
    assert places(leases)[2] == 0, "a slot is free now"


async def samples(fake: FakeCluster, token: str) -> SlotSamples:
    async with AsyncClient(fake.address, token=token, timeout_s=WAIT_S) as client:
        status = await client.get_cluster(samples=True, contracts=False)
    (found,) = (each.samples for each in status.nodes if each.node.role is NodeRole.DECODE)
    assert all(not each.node.contract_json for each in status.nodes)
    assert all(each.samples is None for each in status.nodes if each.node.role is NodeRole.PREFILL)
    assert found is not None
    return found


async def test_a_client_is_told_of_its_own_samples_alone(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = with_tokens(tmp_path, "ops operator", "alice", "bob")
    async with cluster(model, client=Access(token=ALICE), **settings) as fake:
        fake.nodes[1].engine.step_ms = 2.0
        params = SamplingParams(max_tokens=400, n=2)
        async with AsyncClient(fake.address, token=ALICE) as alice, AsyncClient(fake.address, token=BOB) as bob:
            asked = (
                alice.generate([1, 2], params, seed=7, request_id="of-alice"),
                bob.generate([3], seed=8, params=params),
            )
            running = [asyncio.ensure_future(each) for each in asked]
            node = fake.router.registry.decodes["d1"].client
            await fake.until(lambda: len([each for each in node.leases if each.first_row_at is not None]) == 4)
            fake.nodes[1].engine.hanging = True
            found = await samples(fake, ALICE)
            assert found.decoding == (True,) * 4
            assert sorted(found.places) == [0, 1, 2, 3]
            assert len(found.ages_ms) == 4
            assert found.others == 0
            assert found.request_ids == ("of-alice",) * 2
            seed_of = dict(zip(found.sample_indices, found.seeds, strict=True))  # Either may have reserved first.
            assert sorted(seed_of) == [0, 1]
            assert len(set(found.seeds)) == 2
            assert found.max_tokens == (400, 400)
            assert all(0 < number <= 400 for number in found.num_tokens)
            assert {len(column) for column in (found.told, found.seeds, found.num_tokens)} == {2}
            of_bob = await samples(fake, BOB)
            assert len(of_bob.places) == 4
            assert "of-alice" not in str(of_bob)
            assert not set(of_bob.seeds) & set(found.seeds)
            assert not set(of_bob.told) & set(found.told)
            everything = await samples(fake, OPERATOR)
            assert everything.told == (0, 1, 2, 3)
            assert set(everything.seeds) == {*found.seeds, *of_bob.seeds}
            fake.nodes[1].engine.hanging = False
            results = await asyncio.gather(*running)
            assert [each.seed for each in results[0].samples] == [seed_of[0], seed_of[1]]
        assert (await samples(fake, OPERATOR)).places == ()


async def test_the_router_tells_what_it_measured(model: str) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address) as client:
        await client.generate([1, 2, 3], SamplingParams(max_tokens=5), seed=1)
        status = await client.get_cluster()
        assert all(each.samples is None for each in status.nodes), "samples are told to who asks"
        assert status.first_token_seconds is not None
        assert status.output_token_seconds is not None
        for found in (status.first_token_seconds, status.output_token_seconds):
            assert sum(found.counts) == 1
            assert len(found.counts) == len(found.bounds) + 1
            assert found.sum > 0
        assert (status.sample_retries, status.queued_prompt_tokens) == (0, 0)
        load = {each.node.role: each.load for each in fake.router.registry.statuses()}[NodeRole.DECODE]
        while load.timed_steps < 4:
            await asyncio.sleep(0.01)
            load = {each.node.role: each.load for each in fake.router.registry.statuses()}[NodeRole.DECODE]
        assert (load.rows, load.used_rows) == (5 * 8, 5)
        assert load.step_seconds > 0
