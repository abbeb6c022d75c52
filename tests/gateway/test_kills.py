"""A client can have the node killed that runs its own request, if the operator allows it, and no other."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.gateway import kills as gateway_kills
from corun.gateway.config import GatewayConfig
from tests.answers import settle
from tests.clusters import FakeCluster, cluster
from tests.gateway.serving import Http, joined, serving
from tests.secrets import Secrets

LONG = {"prompt": [1, 2], "max_tokens": 300, "seed": 1, "request_id": "mine", "logprobs": 0}


@asynccontextmanager
async def supervisor(fake: FakeCluster, directory: Path, refused: str = "") -> AsyncIterator[dict[str, Any]]:
    """The other end of the gateway's socket, and the settings of a gateway that knows it. It kills a fake node."""
    killed: list[asyncio.Future[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = json.loads(await reader.readline())
        if not refused and "kill" in question:
            killed.append(asyncio.ensure_future(fake.kill(question["kill"])))
        writer.write(json.dumps({"refused": refused}).encode() + b"\n")
        await writer.drain()
        writer.close()

    path = str(directory / "socket")
    server = await asyncio.start_unix_server(answer, path)
    try:
        yield {"allow_kills": True, "supervisor": path}
    finally:
        server.close()
        await asyncio.gather(*killed)


@asynccontextmanager
async def killing(model: str, directory: Path, refused: str = "") -> AsyncIterator[tuple[FakeCluster, Http]]:
    """A cluster with two decode nodes, and a gateway whose clients may have them killed."""
    async with (
        cluster(model, decodes=2) as fake,
        supervisor(fake, directory, refused) as allowed,
        serving(fake, **allowed) as http,
    ):
        yield fake, http


async def answered(http: Any, request_id: Any = "mine", **options: Any) -> tuple[int, Any]:
    status, answer, _ = await http.post({"request_id": request_id}, "/playground/kill", **options)
    return status, answer if status == 200 else answer["error"]["message"]


async def drawing(fake: FakeCluster, more_than: int = 0) -> None:
    await fake.until(lambda: sum(node.drawn_tokens for node in fake.nodes if node.info.slots) > more_than)


async def test_a_stream_goes_on_with_the_same_bits(model: str, tmp_path: Path) -> None:
    async with killing(model, tmp_path) as (fake, http):
        assert await http.get("/playground/kill") == (200, {"refused": ""})
        alone = joined(await http.stream(**LONG))
        running = asyncio.ensure_future(http.stream(**LONG))
        await drawing(fake, more_than=300)
        status, answer = await answered(http)
        assert status == 200
        killed = fake.node(answer["killed"])
        assert killed.info.slots
        after = joined(await running)
        receipt = after.pop("corun")["receipt"]
        assert receipt["output_digest"] == alone.pop("corun")["receipt"]["output_digest"]
        assert receipt["decode_node"]["node_id"] != killed.ref.node_id
        assert after == alone


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "the operator has not allowed it (corun up --http PORT --allow-kills)"),
        ({"supervisor": "/nowhere"}, "the operator has not allowed it (corun up --http PORT --allow-kills)"),
        ({"allow_kills": True}, "this gateway was not started by corun up, so nobody would start the node again"),
    ],
)
async def test_nobody_can_where_it_is_not_allowed(model: str, settings: dict[str, Any], why: str) -> None:
    async with cluster(model, decodes=2) as fake, serving(fake, **settings) as http:
        assert await http.get("/playground/kill") == (200, {"refused": why})
        assert await answered(http) == (403, f'request_id = "mine": must run on: {why}')


async def test_a_supervisor_that_is_gone_or_refuses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_kills, "BETWEEN_S", 0.0)
    nowhere = {"allow_kills": True, "supervisor": str(tmp_path / "nothing")}
    async with cluster(model, decodes=2) as fake, serving(fake, **nowhere) as http:
        _, answer = await http.get("/playground/kill")
        assert answer["refused"].startswith("corun up does not answer: [Errno 2] No such file")
        running = asyncio.ensure_future(http.stream(**LONG))
        await drawing(fake)
        assert (await answered(http))[0] == 503
        await running
    why = "decode-1 is not in use yet"
    async with killing(model, tmp_path, why) as (fake, http):
        assert await http.get("/playground/kill") == (200, {"refused": why})
        running = asyncio.ensure_future(http.stream(**LONG))
        await drawing(fake)
        status, message = await answered(http)
        assert (status, message.partition(" ")[2]) == (429, f"cannot be killed now: {why}")
        await running


@pytest.mark.parametrize("request_id", ["", None, 1, "x" * 200, "other"])
async def test_only_a_request_that_runs(model: str, tmp_path: Path, request_id: Any) -> None:
    async with killing(model, tmp_path) as (fake, http):
        running = asyncio.ensure_future(http.stream(**LONG))
        await drawing(fake)
        status, message = await answered(http, request_id)
        assert status == (404 if request_id == "other" else 400)
        assert message.startswith("no request 'other' of yours" if status == 404 else "request_id")
        await running
        assert all(node.is_member for node in fake.nodes)


async def test_tries_are_rare(model: str, tmp_path: Path) -> None:
    """Each costs a question to a router and wakes `corun up`."""
    async with killing(model, tmp_path) as (_, http):
        found: Sequence[int] = [status for status, _ in [await answered(http) for _ in range(3)]]
        assert found == [404, 429, 429]


async def test_a_client_cannot_reach_the_request_of_another(model: str, tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    other = "another-client-token"
    clients = tmp_path / "clients.tokens"
    clients.write_text(f"{clients.read_text()}other: {other}\n")
    own = {"tls_ca": secrets.path("ca.pem"), "allow_kills": True, "supervisor": str(tmp_path / "nothing")}
    async with cluster(model, client=secrets.client, **secrets.settings) as fake, serving(fake, **own) as http:
        assert (await answered(http))[0] == (await http.get("/playground/kill"))[0] == 401
        headers = {"Authorization": f"Bearer {secrets.token('client')}"}
        running = asyncio.ensure_future(http.post({**LONG, "stream": True}, headers=headers))
        await drawing(fake)
        assert (await answered(http, headers={"Authorization": f"Bearer {other}"}))[0] == 404
        assert (await running)[0] == 200


async def test_an_error_that_nobody_waits_for_any_more_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page may be closed while `corun up`, which has ended, is asked."""
    kills, ended = gateway_kills.Kills(GatewayConfig(allow_kills=True, supervisor="/nowhere")), asyncio.Event()

    async def exchange(_: bytes) -> bytes:
        await ended.wait()
        raise ConnectionResetError

    monkeypatch.setattr(kills, "_exchange", exchange)
    waiting = asyncio.ensure_future(kills.refused())
    await settle()
    waiting.cancel()
    await settle()
    ended.set()
    await settle()
    monkeypatch.undo()
    del kills, waiting
    gc.collect()
    assert caplog.text == ""
