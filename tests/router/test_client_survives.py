"""The SDK over real routers and fake nodes: routers die, connections break, and the caller sees one unbroken stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from corun import AsyncClient, Chunk, Client, ContractMismatchError, SamplingParams, UnavailableError
from corun.params import derive_seed, sample_seed
from corun.receipt import output_digest
from corun.testing.engines import expected
from tests.clusters import FakeCluster, cluster
from tests.proxy import CuttingProxy

PROMPT = "Öne upon a tïme"
PARAMS = SamplingParams(max_tokens=120, logprobs=True, stop=["never to be seen"])
TIMEOUT_S = 30.0


def check(chunks: Sequence[Chunk], fake: FakeCluster, request_id: str, params: SamplingParams = PARAMS) -> None:
    """The chunks are one whole stream of the one right output, nothing twice, nothing missing."""
    tokenizer = fake.router.registry.model.tokenizer  # type: ignore[union-attr]
    prompt = tokenizer.encode(PROMPT)
    assert [chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids] == [prompt]
    assert [bool(chunk.fingerprint) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    for index in range(params.n):
        mine = [chunk for chunk in chunks if chunk.sample_index == index]
        seed = sample_seed(derive_seed(bytes(32), request_id), index)
        ids, logprobs, _ = expected(prompt, params, seed)
        assert [token_id for chunk in mine for token_id in chunk.token_ids] == ids
        assert [value for chunk in mine for value in chunk.logprobs] == (logprobs if params.logprobs else [])
        assert "".join(chunk.text for chunk in mine) == tokenizer.decode(ids)
        assert [chunk.receipt is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert {chunk.seed for chunk in mine} == {seed}
        assert mine[-1].receipt.output_digest == output_digest(ids, logprobs)  # type: ignore[union-attr]


async def restart(fake: FakeCluster, **config: Any) -> None:
    """Kills the router and starts another one on its port."""
    await fake.kill_router()
    await fake.restart_router(**config)


@contextlib.asynccontextmanager
async def slow(model: str, **settings: Any) -> AsyncIterator[tuple[FakeCluster, AsyncClient]]:
    """A cluster that takes its time, and a client of its routers."""
    async with cluster(model, lease_ttl_ms=600, **settings) as fake:
        for node in fake.nodes:
            if node.info.slots:
                node.engine.step_ms = 3.0
            else:
                node.engine.kv_ttl_s = 3.0  # A router that is killed leaves KV that nobody reads.
        async with AsyncClient(fake.address, timeout_s=TIMEOUT_S) as client:
            yield fake, client


class TestRouterRestart:
    async def test_streams_go_on(self, model: str) -> None:
        async with slow(model) as (fake, client):
            chunks = []
            async for chunk in client.stream(PROMPT, PARAMS, request_id="r"):
                chunks.append(chunk)
                if len(chunks) in (5, 30):
                    await restart(fake)
            check(chunks, fake, "r")

    @pytest.mark.parametrize(("seed", "n", "config"), [(None, 3, {}), (5, 1, {"seed_key": "11" * 32})])
    async def test_requests_survive(self, model: str, seed: int | None, n: int, config: dict[str, Any]) -> None:
        """Without an id of their own, too; samples that are done stay done, and a given seed needs no key."""
        async with slow(model) as (fake, client):
            params = SamplingParams(max_tokens=60, n=n)
            run = asyncio.ensure_future(client.generate(PROMPT, params, seed=seed))
            await fake.until(lambda: fake.nodes[1].drawn_tokens > 20 * n)
            await restart(fake, **config)
            done = await run
            seed = derive_seed(bytes(32), done.request_id) if seed is None else seed
            for index, sample in enumerate(done.samples):
                ids, _, _ = expected(done.prompt_token_ids, params, sample_seed(seed, index))
                assert (sample.token_ids, sample.logprobs) == (tuple(ids), ())

    async def test_another_seed_key_is_an_error_and_no_other_bits(self, model: str) -> None:
        async with slow(model) as (fake, client):
            stream = client.stream(PROMPT, PARAMS, request_id="r")
            chunks = [await anext(stream) for _ in range(10)]
            await restart(fake, seed_key="11" * 32)
            with pytest.raises(ContractMismatchError, match="another seed"):
                chunks += [chunk async for chunk in stream]
            got = [token_id for chunk in chunks for token_id in chunk.token_ids]
            prompt = chunks[0].prompt_token_ids
            assert got == expected(prompt, PARAMS, derive_seed(bytes(32), "r"))[0][: len(got)]

    async def test_without_any_router_the_deadline_ends_it(self, model: str) -> None:
        async with slow(model) as (fake, client):
            stream = client.stream(PROMPT, PARAMS, timeout_s=2.0)
            await anext(stream)
            await fake.kill_router()
            started = asyncio.get_running_loop().time()
            with pytest.raises(UnavailableError, match=fake.address):
                async for _ in stream:
                    pass
            assert asyncio.get_running_loop().time() - started < TIMEOUT_S / 2  # Its own deadline is 2 s.


class TestBrokenConnections:
    """With these seeds the first cuts come too early for a whole output, even if all its tokens came in one message."""

    @pytest.mark.parametrize("seed", [2, 36, 55])
    async def test_streams_over_a_connection_that_breaks_at_random_bytes(self, model: str, seed: int) -> None:
        async with (
            cluster(model) as fake,
            CuttingProxy(fake.address, seed=seed, cuts=12, longest=3000) as proxy,
            AsyncClient(proxy.address, timeout_s=TIMEOUT_S) as client,
        ):
            params = SamplingParams(max_tokens=120, n=2)
            chunks = [chunk async for chunk in client.stream(PROMPT, params, request_id="r")]
            assert proxy.num_cuts > 4
            check(chunks, fake, "r", params)

    async def test_many_requests_share_a_connection_that_breaks(self, model: str) -> None:
        async with (
            cluster(model, slots=16) as fake,
            CuttingProxy(fake.address, seed=1, cuts=8, longest=12_000) as proxy,
            AsyncClient(proxy.address, timeout_s=TIMEOUT_S) as client,
        ):
            params = SamplingParams(max_tokens=50)
            done = await client.generate_many([[i, 1] for i in range(30)], params, seeds=list(range(30)))
            assert proxy.num_cuts > 4
            for i, generation in enumerate(done):
                assert list(generation.token_ids) == expected([i, 1], params, i)[0]


class TestTwoRouters:
    async def test_a_draining_router_sends_its_clients_on(self, model: str) -> None:
        async with slow(model, routers=2) as (fake, client):
            fake.router._activity.draining = True
            done = await client.generate([1, 2], PARAMS, seed=3)
            assert list(done.token_ids) == expected([1, 2], PARAMS, 3)[0]
            fake.router._activity.draining = False

    async def test_the_first_that_answers_is_used(self, model: str) -> None:
        async with cluster(model) as fake:
            async with AsyncClient(f"127.0.0.1:1, {fake.address}", timeout_s=TIMEOUT_S) as client:
                assert (await client.get_cluster()).router_id == fake.router.router_id
            with Client(("127.0.0.1:1", fake.address), timeout_s=TIMEOUT_S) as blocking:
                status = await asyncio.to_thread(blocking.get_cluster)
                assert status.router_id == fake.router.router_id

    async def test_one_of_two_is_killed_under_load(self, model: str) -> None:
        """Leases are the nodes' own: what the dead router held comes back after its time to live, nothing is lost."""
        async with (
            slow(model, routers=2, prefills=2, decodes=2, slots=4) as (fake, moving),
            AsyncClient(fake.addresses[1], timeout_s=TIMEOUT_S) as staying,
        ):
            params = SamplingParams(max_tokens=40, logprobs=True)
            both = moving, staying
            runs = [asyncio.ensure_future(both[i % 2].generate([i, 8], params, seed=i)) for i in range(40)]
            decodes = [node.service for node in fake.nodes if node.info.slots]
            await fake.until(
                lambda: (
                    sum(node.drawn_tokens for node in fake.nodes if node.info.slots) > 100
                    and [node._table.used_slots for node in decodes] == [4] * 2
                    and all(router.queue.waiting for router in fake.routers)
                )
            )
            await fake.kill_router()
            for number, done in enumerate(await asyncio.gather(*runs)):
                ids, logprobs, _ = expected([number, 8], params, number)
                assert (list(done.token_ids), list(done.logprobs)) == (ids, logprobs)
            await fake.until(lambda: not any(node.leases for node in fake.nodes) and not fake.kv.held)
            assert not any(node.engine._running for node in fake.nodes if node.info.slots)
            assert not fake.held()
            assert fake.routers[1].context.metrics.finished_samples.value >= 30
