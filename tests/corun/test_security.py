"""TLS, tokens and limits of a server and its clients, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from corun.cli import issue_certs, main
from corun.client.client import AsyncClient, Client
from corun.config.cluster_file import ClusterSpec, PoolSpec, Security, toml
from corun.config.fields import DecodeConfig, PrefillConfig, RouterConfig, TlsConfig, is_loopback
from corun.config.flags import parse
from corun.errors import (
    CorunError,
    InvalidArgumentError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
)
from corun.launch.members import command, members
from corun.rpc.auth import Gate, read_client_tokens
from corun.rpc.channel import Access, channel
from corun.rpc.server import GrpcServer
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import cluster_service_pb2_grpc, decode_service_pb2_grpc
from corun.v1 import decode_service_pb2 as decode_pb
from tests.secrets import Secrets

DEADLINE_S = 60


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets.make(tmp_path_factory.mktemp("secrets"))


class Cluster(cluster_service_pb2_grpc.ClusterServiceServicer):
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetClusterResponse(router_id="r")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield pb.GenerateResponse(text="one")
        await self.go_on.wait()


class Decode(decode_service_pb2_grpc.DecodeServiceServicer):
    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802
        return decode_pb.ReleaseResponse()

    async def StreamSteps(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield decode_pb.StreamStepsResponse(step=0)


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[GrpcServer]:
    server = GrpcServer(**options)
    server.add(cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, Cluster())
    server.add(decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, Decode())
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


def gate(secrets: Secrets, line: str = "") -> Gate:
    clients = read_client_tokens("f", secrets.path("clients.tokens"))
    if line:
        path = secrets.directory / "limited.tokens"
        path.write_text(f"client: {secrets.token('client')} {line}\n")
        clients = read_client_tokens("f", str(path))
    return Gate(cluster=secrets.token("cluster"), clients=clients)


async def failure(call: Any) -> CorunError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def release(link: Any) -> Any:
    stub = decode_service_pb2_grpc.DecodeServiceStub(link)
    return stub.Release(decode_pb.ReleaseRequest(), timeout=DEADLINE_S)


class TestTls:
    async def test_a_router_and_its_client_must_fit(self, secrets: Secrets, tmp_path: Path) -> None:
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

    async def test_members_must_show_a_certificate_of_their_authority(self, secrets: Secrets, tmp_path: Path) -> None:
        stranger = Secrets.make(tmp_path).tls_of("member")
        mixed = TlsConfig(ca=secrets.path("ca.pem"), cert=stranger.cert, key=stranger.key)
        async with serving(tls=secrets.tls_of("member")) as server:
            for tls in (secrets.tls, mixed):
                async with channel(server.address, access=Access(tls=tls, token=secrets.token("cluster"))) as link:
                    assert isinstance(await failure(release(link)), UnavailableError)
            async with channel(server.address, access=secrets.member) as link:
                await release(link)

    async def test_a_name_other_than_the_address(self, secrets: Secrets, tmp_path: Path) -> None:
        issue_certs.make(tmp_path, ["members.corun"])
        other = Secrets(tmp_path)
        async with serving(tls=other.tls_of("member"), mutual=False) as server:
            named = TlsConfig(ca=other.path("ca.pem"), name="members.corun")
            async with AsyncClient(server.address, tls=named, timeout_s=DEADLINE_S) as client:
                assert (await client.get_cluster()).router_id == "r"
            async with AsyncClient(server.address, tls=other.tls, connect_timeout_s=0.3) as client:
                with pytest.raises(UnavailableError):
                    await client.get_cluster()

    async def test_a_key_of_another_certificate(self, secrets: Secrets) -> None:
        tls = TlsConfig(cert=secrets.path("member.pem"), key=secrets.path("client.key"), ca=secrets.path("ca.pem"))
        with pytest.raises(InvalidArgumentError, match=r"tls_key = .*client\.key.*must be that of .*member\.pem"):
            await GrpcServer(tls=tls).start()


class TestTokens:
    async def test_each_service_wants_its_own(self, secrets: Secrets) -> None:
        async with serving(gate=gate(secrets), max_message_bytes=1024) as server:
            for token in ("", "wrong-" * 5, secrets.token("client")):
                async with channel(server.address, access=Access(token=token)) as link:
                    assert isinstance(await failure(release(link)), UnauthenticatedError)
                    stub: Any = decode_service_pb2_grpc.DecodeServiceStub(link)  # type: ignore[no-untyped-call]
                    stream = stub.StreamSteps(decode_pb.StreamStepsRequest(), timeout=DEADLINE_S)
                    assert isinstance(await failure(stream.read()), UnauthenticatedError)
                    # A refused message is not read.
                    call = link.unary_unary("/corun.v1.DecodeService/Release")
                    assert isinstance(await failure(call(b"x" * 10_000_000, timeout=DEADLINE_S)), UnauthenticatedError)
            async with channel(server.address, access=Access(token=secrets.token("cluster"))) as link:
                await release(link)

    async def test_both_clients_send_theirs(self, secrets: Secrets) -> None:
        async with serving(gate=gate(secrets)) as server:
            async with AsyncClient(server.address, token="wrong-" * 5, timeout_s=DEADLINE_S) as client:
                with pytest.raises(UnauthenticatedError, match="needs a client's token"):
                    await client.get_cluster()
            with Client(server.address, token=secrets.token("client"), timeout_s=DEADLINE_S) as blocking:
                assert (await asyncio.to_thread(blocking.get_cluster)).router_id == "r"
            async with AsyncClient(server.address, token=secrets.token("client"), timeout_s=DEADLINE_S) as client:
                assert (await client.get_cluster()).router_id == "r"

    async def test_health_needs_none_and_reflection_is_off(self, secrets: Secrets) -> None:
        async with serving(gate=gate(secrets)) as server, channel(server.address) as link:
            health: Any = health_pb2_grpc.HealthStub(link)
            await health.Check(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)
            call = link.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(timeout=DEADLINE_S).read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_requests_at_once(self, secrets: Secrets) -> None:
        """A call that ends, or whose client leaves, makes room for the next."""
        access = Access(token=secrets.token("client"))
        limited = gate(secrets, "max_requests=1")
        async with serving(gate=limited) as server, channel(server.address, access=access) as link:
            stub: Any = cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
            for _ in range(3):
                first = stub.Generate(pb.GenerateRequest(), timeout=DEADLINE_S)
                assert (await first.read()).text == "one"
                second = stub.Generate(pb.GenerateRequest(), timeout=DEADLINE_S)
                error = await failure(second.read())
                assert isinstance(error, OverloadedError)
                assert error.retry_after_s == 1.0
                first.cancel()
                while limited._running["client"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)


class TestLimits:
    async def test_streams_of_one_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("corun.rpc.server.MAX_STREAMS", 2)
        async with serving() as server, channel(server.address) as link:
            stub: Any = cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
            calls = [stub.Generate(pb.GenerateRequest(), timeout=DEADLINE_S) for _ in range(2)]
            for call in calls:
                await call.read()
            third = stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)
            await asyncio.sleep(0.2)
            assert not third.done()
            calls[0].cancel()
            assert (await third).router_id == "r"

    async def test_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("corun.rpc.server.MAX_CONNECTIONS", 3)
        async with serving() as server:
            links = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(8)]
            refused = 0
            for reader, _ in links:
                # A server that keeps a connection says its settings first.
                refused += not await asyncio.wait_for(reader.read(1), DEADLINE_S)
            assert refused >= 4
            for _, writer in links:
                writer.close()


class TestSettings:
    def test_all_of_tls_or_none(self, secrets: Secrets) -> None:
        with pytest.raises(InvalidArgumentError, match="TLS between members needs"):
            RouterConfig(tls_cert=secrets.path("member.pem"), tls_key=secrets.path("member.key"))
        with pytest.raises(InvalidArgumentError, match="tls_clients"):
            RouterConfig(tls_clients=True)
        with pytest.raises(InvalidArgumentError, match="every client may act as a node"):
            RouterConfig(client_tokens_file=secrets.path("clients.tokens"))
        with pytest.raises(InvalidArgumentError, match="PEM file"):
            TlsConfig(ca=secrets.path("cluster.token"))
        with pytest.raises(InvalidArgumentError, match="readable file"):
            TlsConfig(ca=secrets.path("none.pem"))
        with pytest.raises(InvalidArgumentError, match="both, or neither"):
            TlsConfig(cert=secrets.path("member.pem"))

    def test_values_show_no_secret(self, secrets: Secrets) -> None:
        config = RouterConfig(**secrets.settings)
        shown = f"{config!r} {secrets.member!r} {secrets.client!r}"
        assert not [text for text in secrets.texts if text in shown]
        assert "c0ffee" not in repr(RouterConfig(seed_key="c0ffee"))

    def test_a_command_line_takes_no_secret(self, secrets: Secrets, capsys: pytest.CaptureFixture[str]) -> None:
        for argv in (["--seed-key", "c0ffee"], ["--seed-key=c0ffee"], ["--seed_key", "c0ffee"]):
            with pytest.raises(SystemExit) as caught:
                parse(RouterConfig, argv)
            assert caught.value.code == 2
            shown = capsys.readouterr().err
            assert "use seed_key_file" in shown
            assert "c0ffee" not in shown

    def test_a_seed_key_comes_from_a_file(self, secrets: Secrets, tmp_path: Path) -> None:
        assert len(parse(RouterConfig, ["--seed-key-file", secrets.path("seed.key")]).seed_key_bytes) == 32
        path = tmp_path / "key"
        path.write_text("not-hexadecimal-at-all")
        with pytest.raises(InvalidArgumentError, match="hexadecimal") as caught:
            RouterConfig(seed_key_file=str(path)).check_files()
        assert "not-hex" not in str(caught.value)

    def test_what_up_starts_gets_paths_only(self, secrets: Secrets, tmp_path: Path) -> None:
        security = Security(**secrets.settings, tls_clients=True)
        pool = PoolSpec(common={"model": "m"}, router={"host": "0.0.0.0"}, security=security)
        first, *nodes = members(ClusterSpec(pools=(pool,)))
        file = tmp_path / "cluster.toml"
        file.write_text(toml(pool))
        assert not [text for text in secrets.texts if text in file.read_text()]
        router = command(pool, first, file=file, host="")
        assert parse(RouterConfig, router[3:]) == RouterConfig(host="0.0.0.0", tls_clients=True, **secrets.settings)
        for node, config in zip(nodes, (PrefillConfig, DecodeConfig), strict=True):
            argv = command(pool, node, file=file, routers=("10.0.0.1:1",), host="10.0.0.2")
            assert parse(config, argv[3:]).cluster_token_file == secrets.path("cluster.token")
            assert not [text for text in secrets.texts if text in " ".join(argv)]


class TestUp:
    def test_a_public_address_needs_tls_and_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("ray")
        assert main(["up", "--host", "0.0.0.0", "--port", "0"]) == 2
        shown = capsys.readouterr().err
        assert "host = '0.0.0.0': is a public address, so it needs --tls-cert, --tls-key" in shown
        assert "--insecure" in shown

    def test_part_of_it_is_not_enough(self, secrets: Secrets) -> None:
        def check(**security: Any) -> None:
            PoolSpec(common={"model": "m"}, router={"host": "0.0.0.0"}, security=Security(**security)).check()

        for missing in ("tls_ca", "client_tokens_file", "cluster_token_file"):
            with pytest.raises(InvalidArgumentError, match=f"needs --{missing.replace('_', '-')} as well"):
                check(**{**secrets.settings, missing: ""})
        check(**secrets.settings)
        check(insecure=True)
        PoolSpec(common={"model": "m"}).check()

    def test_loopback(self) -> None:
        assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
        assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "localhost.example.org"))


class TestCommands:
    async def test_options_and_variable(
        self, secrets: Secrets, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with serving(tls=secrets.tls_of("member"), mutual=False, gate=gate(secrets)) as server:
            argv = ["status", "--router", server.address, "--tls-ca", secrets.path("ca.pem"), "--json"]

            assert await asyncio.to_thread(main, argv) == 2
            assert "needs a client's token" in capsys.readouterr().err
            with_token = [*argv, "--token-file", secrets.path("client.token")]
            assert await asyncio.to_thread(main, with_token) == 4  # There are no nodes.
            assert '"router_id":"r"' in capsys.readouterr().out.replace(" ", "")
            monkeypatch.setenv("CORUN_TOKEN_FILE", secrets.path("client.token"))
            assert await asyncio.to_thread(main, argv) == 4
            assert not [text for text in secrets.texts if text in "".join(capsys.readouterr())]

    def test_certs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        directory = tmp_path / "new"
        assert main(["certs", str(directory), "--hosts", "10.0.0.7", "r.example.org"]) == 0
        written = capsys.readouterr().out.split()
        assert sorted(written) == sorted(str(path) for path in directory.iterdir())
        secret = [path for path in directory.iterdir() if path.suffix in {".key", ".token", ".tokens"}]
        assert len(secret) == 7
        assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
        assert main(["certs", str(directory)]) == 2
        assert "must not hold ca.pem already" in capsys.readouterr().err


def test_a_token_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidArgumentError, match="a token of 5 characters"):
        Access(token="short")
