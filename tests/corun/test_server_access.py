"""Who may call a server: TLS, tokens, and what a client with a token may have at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.cli import issue_certs, main
from corun.client.client import AsyncClient
from corun.config.fields import TlsConfig
from corun.errors import InvalidArgumentError, OverloadedError, UnauthenticatedError, UnavailableError
from corun.rpc.auth import Gate, bearer, read_client_tokens
from corun.rpc.channel import Access, channel
from corun.rpc.interceptor import caller, peer_host
from corun.rpc.server import GrpcServer
from corun.v1 import cluster_service_pb2 as pb
from tests.answers import refusal, until
from tests.corun.serving import DEADLINE_S, Servicer, connected, serving, texts
from tests.secrets import Secrets


def gate_of(secrets: Secrets, line: str = "") -> Gate:
    path = secrets.directory / "limited.tokens"
    path.write_text(f"client: {secrets.token('client')} {line}\n")
    return Gate(cluster=secrets.token("cluster"), clients=read_client_tokens("f", str(path)))


def release(link: Any, message: bytes = b"") -> Any:
    return link.unary_unary("/corun.v1.DecodeService/Release")(message, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5123", "10.0.0.7"),
        ("ipv6:[::1]:5123", "::/64"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:5123", "2001:db8:1:2::/64"),
        ("ipv6:[2001:db8:1:2::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:5123", "10.0.0.7"),
        ("ipv6:[fe80::1%25eth0]:5123", "fe80::/64"),
        ("unix:", "unix"),
    ],
)
def test_a_client_without_a_token_is_its_host(peer: str, host: str) -> None:
    assert peer_host(peer) == host


async def test_a_handler_knows_who_calls(tmp_path: Path) -> None:
    found = []

    class Asking(Servicer):
        async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
            found.append(caller())
            self.other = asyncio.Event()
            return pb.GetClusterResponse()

        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
            if request.request_id == "b":  # The other call comes and ends meanwhile.
                await self.other.wait()
            found.append(caller())
            self.other.set()
            yield pb.GenerateResponse()

    file = tmp_path / "tokens"
    file.write_text(f"alice: {'a' * 16}\nbob: {'b' * 16} max_requests=9\n")
    for gate in (None, Gate(clients=read_client_tokens("client_tokens_file", str(file)))):
        async with connected(Asking(), server={"gate": gate}) as stub:

            async def read(name: str, stub: Any = stub) -> None:
                request = pb.GenerateRequest(request_id=name)
                own = (("corun-client", "forged"), *bearer(name * 16))
                assert [each async for each in stub.Generate(request, metadata=own, timeout=DEADLINE_S)]

            await stub.GetCluster(pb.GetClusterRequest(), metadata=bearer("a" * 16), timeout=DEADLINE_S)
            await asyncio.gather(read("b"), read("a"))
    assert [each.name for each in found] == ["127.0.0.1"] * 3 + ["alice", "alice", "bob"]


async def test_a_router_and_its_client_must_fit(secrets: Secrets, tmp_path: Path) -> None:
    other = Secrets.make(tmp_path)
    async with serving(tls=secrets.tls_of("member"), mutual=False) as server:
        async with AsyncClient(server.address, tls=secrets.tls, timeout_s=DEADLINE_S) as client:
            assert (await client.get_cluster()).router_id == "r"
        async with AsyncClient(server.address, tls=other.tls, connect_timeout_s=0.3) as client:
            with pytest.raises(UnavailableError, match="over TLS: the certificates may not be those"):
                await client.get_cluster()
        async with AsyncClient(server.address, connect_timeout_s=0.3) as client:
            with pytest.raises(UnavailableError, match=r"no router answers at .* without TLS"):
                await client.get_cluster()


async def test_members_must_show_a_certificate_of_their_authority(secrets: Secrets, tmp_path: Path) -> None:
    stranger = Secrets.make(tmp_path).tls_of("member")
    mixed = TlsConfig(ca=secrets.path("ca.pem"), cert=stranger.cert, key=stranger.key)
    async with serving(tls=secrets.tls_of("member")) as server:
        for tls in (secrets.tls, mixed):
            async with channel(server.address, access=Access(tls=tls, token=secrets.token("cluster"))) as link:
                await refusal(release(link), UnavailableError)
        async with channel(server.address, access=secrets.member) as link:
            await release(link)


async def test_a_name_other_than_the_address(secrets: Secrets, tmp_path: Path) -> None:
    issue_certs.make(tmp_path, ["members.corun"])
    other = Secrets(tmp_path)
    async with serving(tls=other.tls_of("member"), mutual=False) as server:
        named = TlsConfig(ca=other.path("ca.pem"), name="members.corun")
        async with AsyncClient(server.address, tls=named, timeout_s=DEADLINE_S) as client:
            assert (await client.get_cluster()).router_id == "r"
        async with AsyncClient(server.address, tls=other.tls, connect_timeout_s=0.3) as client:
            with pytest.raises(UnavailableError):
                await client.get_cluster()


async def test_a_key_of_another_certificate(secrets: Secrets) -> None:
    tls = TlsConfig(cert=secrets.path("member.pem"), key=secrets.path("client.key"), ca=secrets.path("ca.pem"))
    with pytest.raises(InvalidArgumentError, match=r"tls_key = .*client\.key.*must be that of .*member\.pem"):
        await GrpcServer(tls=tls).start()


async def test_each_service_wants_its_own(secrets: Secrets) -> None:
    async with serving(gate=gate_of(secrets), max_message_bytes=1024) as server:
        for token in ("", "wrong-" * 5, secrets.token("client")):
            async with channel(server.address, access=Access(token=token)) as link:
                stream = link.unary_stream("/corun.v1.DecodeService/StreamSteps")(b"", timeout=DEADLINE_S)
                # A refused message is not read, however long it is.
                for refused in (release(link), stream.read(), release(link, b"x" * 10_000_000)):
                    await refusal(refused, UnauthenticatedError)
        async with channel(server.address, access=Access(token=secrets.token("cluster"))) as link:
            await release(link)


async def test_health_needs_none_and_reflection_is_off(secrets: Secrets) -> None:
    async with serving(gate=gate_of(secrets)) as server, channel(server.address) as link:
        health: Any = health_pb2_grpc.HealthStub(link)
        await health.Check(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)
        call = link.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(timeout=DEADLINE_S).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_requests_at_once(secrets: Secrets) -> None:
    """A call that ends, or whose client leaves, makes room for the next."""
    access = Access(token=secrets.token("client"))
    limited = gate_of(secrets, "max_requests=1")
    async with connected(Servicer(), server={"gate": limited}, access=access) as stub:
        for _ in range(3):
            first = stub.Generate(pb.GenerateRequest(text="forever"), timeout=DEADLINE_S)
            assert (await first.read()).text == "one"
            error = await refusal(texts(stub), OverloadedError)
            assert error.retry_after_s == 1.0
            first.cancel()
            await until(lambda: not limited._running["client"])


async def test_the_options_and_the_variable_of_a_command(
    secrets: Secrets, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tls=secrets.tls_of("member"), mutual=False, gate=gate_of(secrets)) as server:
        argv = ["status", "--router", server.address, "--tls-ca", secrets.path("ca.pem"), "--json"]

        assert await asyncio.to_thread(main, argv) == 2
        assert "needs a client's token" in capsys.readouterr().err
        with_token = [*argv, "--token-file", secrets.path("client.token")]
        assert await asyncio.to_thread(main, with_token) == 4  # There are no nodes.
        assert '"router_id":"r"' in capsys.readouterr().out.replace(" ", "")
        monkeypatch.setenv("CORUN_TOKEN_FILE", secrets.path("client.token"))
        assert await asyncio.to_thread(main, argv) == 4
        assert not [text for text in secrets.texts if text in "".join(capsys.readouterr())]


def test_a_token_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidArgumentError, match="a token of 5 characters"):
        Access(token="short")
