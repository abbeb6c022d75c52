"""Clients that leave, stall or say nothing; gateways that drain; routers that die; connections that are kept."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corun.errors import InvalidArgumentError, OverloadedError, UnavailableError
from corun.gateway import clients as gateway_clients
from corun.gateway.answers import merged
from corun.gateway.app import Gateway
from corun.gateway.clients import Clients
from corun.gateway.config import GatewayConfig
from corun.gateway.streams import EventStream
from corun.testing.cluster import WAIT_S
from tests.answers import until
from tests.clusters import FakeCluster, cluster
from tests.gateway.serving import joined, read_events, serving
from tests.secrets import Secrets

START_S = 60.0
"""The limit for a gateway process to start or end, on a busy machine."""
LONG = {"prompt": [1, 2], "max_tokens": 500, "seed": 1}


def leases(fake: FakeCluster) -> int:
    return sum(node.leases for node in fake.nodes)


def drawn_tokens(fake: FakeCluster) -> int:
    return sum(node.drawn_tokens for node in fake.nodes if node.info.slots)


LEAVING: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("completions", LONG),
    "samples": ("completions", {**LONG, "n": 3}),
    "prompts": ("completions", {**LONG, "prompt": ["a", "b"]}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}),
}


@pytest.mark.parametrize(("path", "body"), LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(
    chat_model: str, stream: bool, path: str, body: dict[str, Any]
) -> None:
    async with cluster(chat_model) as fake, serving(fake) as http:
        task = asyncio.ensure_future(http.post({**body, "stream": stream}, f"/v1/{path}"))
        await fake.until(lambda: leases(fake) >= 1)
        assert http.gateway.activity.running >= 1
        task.cancel()
        await asyncio.wait((task,))
        await fake.idle()  # It is idle long before all steps are over:
        assert drawn_tokens(fake) < 400
        await fake.until(lambda: http.gateway.activity.running == 0)


async def test_a_client_that_leaves_before_its_first_token_ends_its_request(model: str) -> None:
    async with cluster(model, slots=1) as fake, serving(fake) as http:
        holding = asyncio.ensure_future(http.post(LONG))
        await fake.until(lambda: leases(fake) == 1)
        waiting = asyncio.ensure_future(http.post({**LONG, "stream": True}))
        await fake.until(lambda: fake.router.queue.waiting == 1)
        waiting.cancel()
        await fake.until(lambda: fake.router.queue.waiting == 0)
        assert leases(fake) == 1
        holding.cancel()
        await fake.until(lambda: http.gateway.activity.running == 0)


async def test_a_stream_survives_its_router(model: str) -> None:
    async with cluster(model, lease_ttl_ms=600) as fake, serving(fake) as http:
        whole = await http.complete(max_tokens=300, seed=5, return_token_ids=True)
        running = asyncio.ensure_future(http.stream(max_tokens=300, seed=5, return_token_ids=True))
        await fake.until(lambda: drawn_tokens(fake) > 310)  # The second run is on, and its KV has been read.
        await fake.kill_router()
        await fake.restart_router()
        events = await asyncio.wait_for(running, WAIT_S)
        ids = [token_id for event in events for token_id in event["choices"][0]["token_ids"]]
        assert ids == whole["choices"][0]["token_ids"]
        assert not any("error" in event for event in events)


async def test_draining_ends_what_runs_and_takes_nothing_new(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        running = asyncio.ensure_future(http.stream(max_tokens=150, seed=1, return_token_ids=True))
        await fake.until(lambda: leases(fake) == 1)
        idle = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        await _ask(idle)
        port = http.gateway.port
        draining = asyncio.ensure_future(http.gateway.drain())
        await asyncio.sleep(0)
        assert b" 503 " in await _ask(idle)  # An existing connection still gets an answer.
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        assert len(joined(await running)["token_ids"]) == 150
        await asyncio.wait_for(draining, WAIT_S)
        assert await idle[0].read() == b""
        idle[1].close()


async def _ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    connection[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await connection[0].readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await connection[0].readexactly(length)
    return head


async def test_what_does_not_end_in_time_is_ended(model: str) -> None:
    async with cluster(model) as fake, serving(fake, drain_grace_s=0.05) as http:
        running = asyncio.ensure_future(http.stream(max_tokens=500, seed=1))
        await fake.until(lambda: drawn_tokens(fake) > 50)  # The stream has begun.
        await http.gateway.drain()
        await http.gateway.stop()
        events = await running  # The stream itself says that it was ended.
        assert events[-1]["error"]["code"] == 503
        assert len(events) < 500
        await fake.idle()


async def test_the_command_drains_on_sigterm(model: str) -> None:
    async with cluster(model) as fake:
        command = ("-m", "corun", "gateway", "--port", "0", "--router", fake.address)
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            line = (await asyncio.wait_for(process.stderr.readline(), START_S)).decode()
            url = line.partition("listens on ")[2].split()[0]
            body = {"prompt": [1], "max_tokens": 300, "seed": 1, "stream": True, "return_token_ids": True}
            async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
                first = await response.content.readuntil(b"\n\n")
                process.send_signal(signal.SIGTERM)
                events = read_events((first + await response.read()).decode())
            assert len(joined(events)["token_ids"]) == 300
            assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
            _, rest = await process.communicate()
        assert b"Traceback" not in rest


async def test_a_port_is_shared_only_if_that_is_wanted(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http, serving(fake, reuse_port=True) as sharing:
        port = http.gateway.port
        with pytest.raises(InvalidArgumentError, match=rf"^port = {port}: cannot be listened on at 127"):
            async with serving(fake, port=port):
                pass
        command = ("-m", "corun", "gateway", "--port", str(port), "--router", fake.address)
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(process.communicate(), START_S)
        assert (process.returncode, told.decode().count("\n")) == (2, 1)
        assert told.startswith(b"corun: port = ")
        async with serving(fake, port=sharing.gateway.port, reuse_port=True):
            pass


async def test_a_host_that_is_no_name_is_refused() -> None:
    gateway = Gateway(GatewayConfig(host="a..b", port=0, insecure=True))
    with pytest.raises(InvalidArgumentError, match=r"^port = 0: cannot be listened on at a\.\.b: "):
        await gateway.start()
    await gateway.stop()


async def test_a_connection_that_says_nothing_is_closed(model: str) -> None:
    async with cluster(model) as fake, serving(fake, client_timeout_s=1.0) as http:
        silent = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        slow = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        slow[1].write(b"GET /health HTTP/1.1\r\nHo")
        heard = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        await _ask(heard)
        half = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        half[1].write(head)
        for reader, writer in (silent, slow):
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
        assert b" 408 " in await asyncio.wait_for(half[0].readline(), WAIT_S)  # Its body did not come.
        half[1].close()
        assert b" 200 " in await _ask(heard)  # A connection that has sent something may be quiet.
        heard[1].close()


async def test_a_client_that_takes_no_page_is_dropped(model: str, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(model) as fake, serving(fake, client_timeout_s=0.2) as http:
        asking = socket.create_connection(("127.0.0.1", http.gateway.port))
        try:
            asking.setblocking(False)
            request = b"GET /playground HTTP/1.1\r\nHost: x\r\n\r\n"
            await asyncio.get_running_loop().sock_sendall(asking, request * 1000)  # More than the machine keeps.
            server = http.gateway._runner.server
            assert server is not None
            await until(lambda: server.requests_count > 0 and not server.connections)
        finally:
            asking.close()
    assert not caplog.records


async def test_a_client_that_leaves_is_not_an_error_of_ours(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: Any) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    async with cluster(model) as fake, serving(fake) as http:
        monkeypatch.setattr(EventStream, "send", gone)
        url = http.gateway.url + "/v1/completions"
        async with http.session.post(url, json={"prompt": "a", "stream": True}) as response:
            assert response.status == 499  # The client of this test has not left.
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_first_error_of_several_streams_ends_all() -> None:
    ended = []

    async def stream(number: int) -> Any:
        try:
            yield number
            if number:
                raise UnavailableError("gone")
            await asyncio.sleep(3600)
        finally:
            ended.append(number)

    chunks = merged([stream(0), stream(1)])
    assert sorted([await anext(chunks), await anext(chunks)]) == [(0, 0), (1, 1)]
    with pytest.raises(UnavailableError):
        await anext(chunks)
    assert sorted(ended) == [0, 1]


def test_a_file_that_cannot_be_used_any_more_is_no_fault_of_a_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = Secrets.make(tmp_path).path("ca.pem")
    clients = Clients(GatewayConfig(tls_ca=ca))
    Path(ca).unlink()
    with pytest.raises(UnavailableError, match=r"^the gateway cannot call the routers now$"), clients.lease("token"):
        pass
    assert "tls_ca = " in caplog.text


async def test_https_and_renewed_certificates(model: str, tmp_path: Path) -> None:
    secrets = Secrets.make(tmp_path)
    files = {"https_cert": secrets.path("member.pem"), "https_key": secrets.path("member.key")}
    async with cluster(model) as fake, serving(fake, **files) as http:
        trusting = ssl.create_default_context(cafile=secrets.path("ca.pem"))
        assert http.gateway.url.startswith("https://")
        assert (await http.get("/health", ssl=trusting))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get("/health", ssl=ssl.create_default_context())
        other = Secrets.make(tmp_path / "other")
        for name in ("member.pem", "member.key"):
            (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
        renewed = ssl.create_default_context(cafile=other.path("ca.pem"))
        assert (await http.get("/health", ssl=renewed))[0] == 200


async def test_connections_are_kept_by_token_and_given_up_when_idle() -> None:
    clients = Clients(GatewayConfig(router="127.0.0.1:1", max_tokens_kept=2))
    a, b, c = ("a" * 20, "b" * 20, "c" * 20)
    with clients.lease(a) as first:
        with clients.lease(a) as same:
            assert same is first
        with clients.lease(b) as second:
            assert second is not first
            with pytest.raises(OverloadedError), clients.lease(c):
                pass
        with clients.lease(c), clients.lease(a) as again:  # b was idle.
            assert again is first
    with clients.lease(a, gateway_clients.MAX_CALLS) as full, clients.lease(a) as more:
        assert more is not full
        with clients.lease(a, gateway_clients.MAX_CALLS) as third:  # All of them would not fit beside that of `more`.
            assert third not in (full, more)
    await clients.close()
