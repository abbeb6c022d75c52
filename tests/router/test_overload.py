"""Admission through a whole router: who calls is known by the token, classes and refusals reach the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.errors import InvalidArgumentError, OverloadedError, PermissionDeniedError
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.testing.engines import expected_digest
from router.prompts import PromptEncoder
from router.queue import SampleQueue
from tests.clusters import FakeCluster, cluster, send
from tests.router.asking import token_of, with_tokens

PARAMS = SamplingParams(max_tokens=4, logprobs=True)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return with_tokens(tmp_path, "alice", "bob", "capped max_priority=normal")


@contextlib.asynccontextmanager
async def two(model: str, settings: dict[str, Any], name: str = "alice") -> AsyncIterator[tuple[Any, ...]]:
    """A small cluster with a client of this name, which the cluster's own calls use too, and bob."""
    access = Access(token=token_of(name))
    async with (
        cluster(model, slots=2, client=access, max_queued_samples=3, **settings) as fake,
        AsyncClient(fake.address, token=token_of(name), timeout_s=WAIT_S) as one,
        AsyncClient(fake.address, token=token_of("bob"), timeout_s=WAIT_S) as bob,
    ):
        yield fake, one, bob


async def full(fake: FakeCluster, client: AsyncClient, waiting: int, **options: Any) -> list[asyncio.Task[Any]]:
    """Requests that fill every slot of a stopped node and `waiting` places of the queue."""
    fake.nodes[1].engine.hanging = True
    slots = fake.nodes[1].info.slots
    calls = []
    for number in range(slots + waiting):
        calls.append(asyncio.ensure_future(client.generate([number + 1], PARAMS, seed=number, **options)))
        await fake.until(lambda number=number: _inside(fake) == number + 1)  # type: ignore[misc]
    return calls


def _inside(fake: FakeCluster) -> int:
    return fake.router.queue.waiting + sum(m.room._leases.own for m in fake.router.registry._decodes.values())


async def test_a_small_client_gets_in_and_the_large_one_is_told(model: str, settings: dict[str, Any]) -> None:
    async with two(model, settings) as (fake, alice, bob):
        calls = await full(fake, alice, 3)
        with pytest.raises(OverloadedError) as caught:
            await alice.generate([9], PARAMS)
        assert caught.value.retry_after_s >= 0.1
        assert (await alice.get_cluster()).queued_samples == 3
        small = asyncio.ensure_future(bob.generate([7], PARAMS, seed=7))
        await fake.until(lambda: _inside(fake) == 6)  # Nobody had to go for it.
        fake.nodes[1].engine.hanging = False
        done = await asyncio.gather(*calls, small)
        assert done[-1].receipt.output_digest == expected_digest([7], PARAMS, 7)
        assert [each.receipt.output_digest for each in done[:-1]] == [
            expected_digest([number + 1], PARAMS, number) for number in range(5)
        ]
        assert (await alice.get_cluster()).refused_requests == 1


async def test_a_token_limits_the_priority(model: str, settings: dict[str, Any]) -> None:
    async with two(model, settings, "capped") as (fake, capped, bob):
        with pytest.raises(PermissionDeniedError) as caught:
            await capped.generate([1], PARAMS, priority="high")
        error = caught.value
        assert (error.field, str(error.value)) == ("priority", "'high'")
        assert error.limit == "must be normal or lower for client capped"
        for client, priority in ((capped, "normal"), (capped, "low"), (bob, "high")):
            assert (await client.generate([1], PARAMS, priority=priority)).token_ids
        request = codec.generate_request([1], PARAMS)
        request.priority = 9  # type: ignore[assignment]
        with pytest.raises(InvalidArgumentError, match="priority = 9: must be one of high, normal, low"):
            await send(fake, request)


async def test_text_is_not_tokenized_for_a_full_queue(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized: list[str] = []
    encode = PromptEncoder.encode

    async def counted(encoder: PromptEncoder, text: str, *rest: Any) -> Any:
        tokenized.append(text)
        return await encode(encoder, text, *rest)

    monkeypatch.setattr(PromptEncoder, "encode", counted)
    async with (
        cluster(model, slots=2, max_queued_samples=2) as fake,
        AsyncClient(fake.address, timeout_s=WAIT_S) as client,
    ):
        calls = await full(fake, client, 2)
        for _ in range(5):
            with pytest.raises(OverloadedError):
                await client.generate("x" * 100_000, PARAMS)
        assert tokenized == []
        fake.nodes[1].engine.hanging = False
        await asyncio.gather(*calls)
        await client.generate("x", PARAMS)
        assert tokenized == ["x"]


@pytest.mark.parametrize("keeps_its_place", [True, False])
async def test_a_sample_whose_node_failed_is_first_whatever_its_class(
    model: str, keeps_its_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And would not be, if it queued up again in its class."""
    if not keeps_its_place:
        again = SampleQueue.again
        monkeypatch.setattr(SampleQueue, "again", lambda queue, entry, ran=False: again(queue, entry))
    ended: list[str] = []
    async with cluster(model, slots=1, max_queued_samples=2) as fake, AsyncClient(fake.address) as client:

        async def ask(name: str, max_tokens: int) -> None:
            params = SamplingParams(max_tokens=max_tokens, logprobs=True)
            done = await client.generate([1], params, seed=1, priority=name, timeout_s=WAIT_S)
            assert done.receipt.output_digest == expected_digest([1], params, 1)
            ended.append(name)

        fake.nodes[1].engine.fail_after = 150
        low = asyncio.ensure_future(ask("low", 200))
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 0)
        high = asyncio.ensure_future(ask("high", 1))
        await asyncio.gather(low, high)
    assert ended == (["low", "high"] if keeps_its_place else ["high", "low"])
