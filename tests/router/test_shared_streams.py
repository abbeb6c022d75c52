"""The SDK's stream of many requests at a real router: each ends for itself, and none holds up another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from corun import AsyncClient, DeadlineError, InvalidArgumentError, OverloadedError, SamplingParams, UnavailableError
from corun.client import outputs
from corun.rpc import codec
from corun.testing.cluster import WAIT_S
from corun.testing.engines import expected
from corun.v1 import cluster_service_pb2 as pb
from router.delivery import OutputStream
from tests.clusters import FakeCluster, cluster, short_calls
from tests.fuzz.http2 import Connection, call, hello, widen
from tests.router.asking import token_of, with_tokens

PARAMS = SamplingParams(max_tokens=40, logprobs=True)
LONG = SamplingParams(max_tokens=300)
SERVICE = b"/corun.v1.ClusterService/"
RESOURCE_EXHAUSTED = 8


def open_streams(fake: FakeCluster) -> list[OutputStream]:
    return [stream for stream in fake.router.streams._open.values() if stream.owner != "nobody"]


async def test_many_requests_take_few_messages(model: str) -> None:
    messages: list[pb.StreamOutputsResponse] = []
    async with cluster(model, slots=16) as fake, fake.stub() as stub:
        fake.nodes[1].engine.step_ms = 5.0
        stream = stub.StreamOutputs(pb.StreamOutputsRequest())
        opening = await stream.read()
        requests = [codec.generate_request((i, 3), PARAMS, seed=i) for i in range(16)]
        for number, request in enumerate(requests):
            request.stream_id, request.call_number = opening.stream_id, number + 100
        calls = [stub.Generate(request, timeout=WAIT_S) for request in requests]
        ended: list[int] = []
        while len(ended) < len(calls):
            messages.append(await stream.read())
            ended += messages[-1].ended
        for one in calls:
            assert [each async for each in one] == []  # All responses came on the stream.
        stream.cancel()
    assert sorted(ended) == list(range(100, 116))
    for number in range(16):
        mine = [each for m in messages for each in m.responses if each.call_number == number + 100]
        ids, logprobs, _ = expected((number, 3), PARAMS, number)
        assert [token for each in mine for token in each.token_ids] == ids
        assert [value for each in mine for value in each.logprobs] == logprobs
        assert [each.HasField("receipt") for each in mine] == [False] * (len(mine) - 1) + [True]
    assert len(messages) < 16 * 40 / 3


async def test_a_slow_reader_holds_up_no_other_and_gets_all(model: str) -> None:
    async with cluster(model, slots=4, max_unsent_tokens=50) as fake, AsyncClient(fake.address) as client:
        slow = client.stream((1, 2), LONG, seed=1, timeout_s=WAIT_S)
        chunks = [await anext(slow)]
        done = await asyncio.gather(*(client.generate((9, i), PARAMS, seed=i, timeout_s=WAIT_S) for i in range(12)))
        for i, each in enumerate(done):
            assert list(each.token_ids) == expected((9, i), PARAMS, i)[0]
        await fake.until(
            lambda: not fake.held()
        )  # The slow reader's slot is free, too: its output waits in the client.
        assert len(open_streams(fake)) == 1
        chunks += [chunk async for chunk in slow]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected((1, 2), LONG, 1)[0]


async def test_a_client_that_reads_nothing_loses_its_requests_one_by_one(model: str) -> None:
    """Their slots are free long before the samples would have ended, and each call says why."""
    async with cluster(model, max_unsent_tokens=50) as fake:
        link = await Connection.open(fake.address, hello(0))
        fake.nodes[1].engine.step_ms = 5.0  # 2.5 s for each of them.
        link.send(call(1, SERVICE + b"StreamOutputs", b""))
        await fake.until(lambda: open_streams(fake))
        name = open_streams(fake)[0].stream_id
        for number in (3, 5, 7):
            request = codec.generate_request((number,), SamplingParams(max_tokens=500), seed=1)
            request.stream_id, request.call_number = name, number
            link.send(call(number, SERVICE + b"Generate", request.SerializeToString()))
        await fake.until(lambda: fake.nodes[1].leases == 3)
        # Nothing was read of the stream, whose window is closed. HPACK shortens the later ones of equal answers.
        assert await link.until_ended(3, WAIT_S) == RESOURCE_EXHAUSTED
        for number in (5, 7):
            await link.until_ended(number, WAIT_S)
            assert len(link.ended[number]) > 4  # It is no RST_STREAM.
        await fake.until(lambda: not fake.held())
        assert fake.nodes[1].drawn_tokens < 3 * 500
        link.send(widen(0, 1 << 24) + widen(1, 1 << 24))
        link.close()


@pytest.mark.parametrize("way", ["left", "cancelled", "deadline", "refused"])
async def test_a_request_that_ends_early_ends_alone(model: str, way: str) -> None:
    async with cluster(model, slots=4) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        fake.nodes[1].engine.step_ms = 4.0
        others = [asyncio.ensure_future(client.generate((5, i), PARAMS, seed=i)) for i in range(3)]
        await fake.until(lambda: fake.nodes[1].leases == 3)
        if way == "left":
            stream = client.stream((7,), LONG)
            await anext(stream)
            await stream.aclose()
        elif way == "cancelled":
            task = asyncio.ensure_future(client.generate((7,), LONG))
            await fake.until(lambda: fake.nodes[1].leases == 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "deadline":
            fake.nodes[1].engine.step_ms = 20.0
            with short_calls(), pytest.raises(DeadlineError, match="deadline"):
                await client.generate((7,), LONG)
        else:
            with pytest.raises(InvalidArgumentError) as caught:
                await client.generate([10**6], PARAMS)
            assert (caught.value.field, str(caught.value.value)) == ("prompt.token_ids[0]", "1000000")
        for i, each in enumerate(await asyncio.gather(*others)):
            assert list(each.token_ids) == expected((5, i), PARAMS, i)[0]
        await fake.until(lambda: not fake.held())
        assert len(open_streams(fake)) == 1


async def test_a_stream_is_no_request_of_its_token(model: str, tmp_path: Path) -> None:
    async with (
        cluster(model, **with_tokens(tmp_path, "one max_requests=1")) as fake,
        AsyncClient(fake.address, token=token_of("one"), timeout_s=WAIT_S) as client,
    ):
        assert list((await client.generate((1,), PARAMS, seed=1)).token_ids) == expected((1,), PARAMS, 1)[0]
        fake.nodes[1].engine.step_ms = 10.0
        first = asyncio.ensure_future(client.generate((1,), PARAMS, seed=1))
        await fake.until(lambda: fake.nodes[1].leases == 1)
        with pytest.raises(OverloadedError, match="in progress"):
            await client.generate((2,), PARAMS)
        await first


async def test_an_old_stream_gets_no_new_requests(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        fake.nodes[1].engine.step_ms = 5.0
        monkeypatch.setattr(outputs, "ROTATE_S", 0.0)
        runs = [asyncio.ensure_future(client.generate((i,), PARAMS, seed=i)) for i in range(3)]
        await fake.until(lambda: fake.nodes[1].leases == 3)
        assert len(open_streams(fake)) == 3
        for i, each in enumerate(await asyncio.gather(*runs)):
            assert list(each.token_ids) == expected((i,), PARAMS, i)[0]


async def test_a_stream_that_the_router_ended_is_opened_again(model: str) -> None:
    """As it does with one that was idle; and a request on its way then comes back by itself."""
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        for turn in range(3):
            done = await client.generate((turn,), PARAMS, seed=turn)
            assert list(done.token_ids) == expected((turn,), PARAMS, turn)[0]
            (stream,) = open_streams(fake)
            if turn == 0:
                stream.end()
                await fake.until(lambda: not fake.router.streams._open)
            else:  # The router does not know the stream any more, and the client cannot see that.
                stream.owner = "nobody"


async def test_a_router_that_drains_ends_its_streams_and_opens_no_others(model: str) -> None:
    """Before its server stops: gRPC complains of calls that are still open then. What runs is delivered first."""
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        fake.nodes[1].engine.step_ms = 5.0
        run = asyncio.ensure_future(client.generate((1,), PARAMS, seed=1))
        await fake.until(lambda: fake.nodes[1].leases == 1)
        fake.router._activity._away_s = 2 * WAIT_S  # A client does not wait for so long.
        await fake.router.drain()
        assert list((await run).token_ids) == expected((1,), PARAMS, 1)[0]
        assert open_streams(fake) == []
        with pytest.raises(UnavailableError, match="the router is shutting down"):
            await client.generate((2,), PARAMS)
        assert open_streams(fake) == []
