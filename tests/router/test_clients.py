"""What is told of clients: their samples in slots, in line and in the queue, to operators and to themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from corun.client.client import AsyncClient
from corun.params import SamplingParams
from corun.rpc.channel import Access
from corun.testing.cluster import WAIT_S
from corun.types import ClientStatus
from tests.clusters import FakeCluster, cluster
from tests.router.asking import token_of, with_tokens

OPERATOR, ALICE, BOB = token_of("ops"), token_of("alice"), token_of("bob")


async def clients(fake: FakeCluster, token: str) -> dict[str, ClientStatus]:
    async with AsyncClient(fake.address, token=token, timeout_s=WAIT_S) as client:
        status = await client.get_cluster(clients=True)
        assert (await client.get_cluster()).clients == (), "it is told to who asks"
    return {each.name: each for each in status.clients}


async def test_an_operator_is_told_of_all_clients_and_a_client_of_itself(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = with_tokens(tmp_path, "ops operator", "alice weight=3", "bob")
    async with cluster(model, slots=2, client=Access(token=ALICE), **settings) as fake:
        engine = fake.node("d1").engine
        params = SamplingParams(max_tokens=400)
        async with AsyncClient(fake.address, token=ALICE) as alice, AsyncClient(fake.address, token=BOB) as bob:
            running = [asyncio.ensure_future(alice.generate([number], params, seed=number)) for number in range(2)]
            node = fake.router.registry.decodes["d1"].client
            await fake.until(lambda: len([each for each in node.leases if each.first_row_at is not None]) == 2)
            engine.hanging = True
            running += [asyncio.ensure_future(bob.generate([number], params, seed=number)) for number in range(4)]
            await fake.until(lambda: fake.router.queue.waiting + len(node.leases) == 6)
            in_line = len(node.leases) - 2
            waiting = 4 - in_line
            assert waiting > 0
            everybody = await clients(fake, OPERATOR)
            assert everybody == {
                "alice": ClientStatus(name="alice", weight=3, leased_samples=2, decoding_samples=2),
                "bob": ClientStatus(name="bob", waiting_samples=waiting, leased_samples=in_line),
            }
            assert await clients(fake, BOB) == {"bob": everybody["bob"]}
            assert await clients(fake, token_of("ops")) == everybody
            engine.hanging = False
            await asyncio.gather(*running)
        assert await clients(fake, OPERATOR) == {}
        assert list(fake.router.queue.callers()) == []


async def test_an_audit_is_no_sample_of_its_client(model: str, tmp_path: Path) -> None:
    """The client has had its answer, and may not have so many samples."""
    settings: dict[str, Any] = with_tokens(tmp_path, "ops operator", "alice")
    async with cluster(model, client=Access(token=ALICE), audit_fraction=1.0, **settings) as fake:
        engine, node = fake.node("d1").engine, fake.router.registry.decodes["d1"].client
        async with AsyncClient(fake.address, token=ALICE) as alice:
            await alice.generate([1], SamplingParams(max_tokens=40), seed=1)
        await fake.until(lambda: [each for each in node.leases if each.first_row_at is not None])
        engine.hanging = True
        assert await clients(fake, OPERATOR) == {}
        assert await clients(fake, ALICE) == {}
        engine.hanging = False
        await fake.until(lambda: fake.router.auditor.status().matched)
