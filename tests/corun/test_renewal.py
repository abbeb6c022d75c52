"""Certificates, keys and tokens that are renewed on disk while servers and channels are in use, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient, Client
from corun.config.fields import TlsConfig
from corun.errors import InvalidArgumentError, UnauthenticatedError, UnavailableError
from corun.rpc.auth import Gate, bearer, read_client_tokens
from corun.rpc.certificates import Renewed, identity
from corun.rpc.channel import Access, channel
from corun.rpc.server import GrpcServer
from corun.v1 import cluster_service_pb2 as pb
from corun.v1 import cluster_service_pb2_grpc
from tests.corun.serving import DEADLINE_S, Servicer, serving
from tests.secrets import Secrets

GENERATE = "/corun.v1.ClusterService/Generate"


class Mounted:
    """Secrets behind a link that points to one version of them, as cert-manager and Kubernetes mount them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._versions = 0
        self.now = self.renew()
        self.files = Secrets(directory / "data")
        """The newest secrets, by the paths that stay."""

    def renew(self, *, is_broken: bool = False) -> Secrets:
        """Another authority, other certificates, other tokens; all at once. A broken key is not its certificate's."""
        self._versions += 1
        version, link = self._directory / f"v{self._versions}", self._directory / "next"
        made = Secrets.make(version)
        if is_broken:
            os.replace(made.path("client.key"), made.path("member.key"))
        link.symlink_to(version)
        os.replace(link, self._directory / "data")
        return made


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


def of_member(secrets: Secrets) -> TlsConfig:
    return secrets.tls_of("member")


async def answers(address: str, tls: TlsConfig, wait_s: float = DEADLINE_S) -> bool:
    """Whether a new client is served; wait_s: how long it tries to connect."""
    async with AsyncClient(address, tls=tls, timeout_s=DEADLINE_S, connect_timeout_s=wait_s) as client:
        try:
            return (await client.get_cluster()).router_id == "r"
        except UnavailableError:
            return False


class TestServer:
    async def test_new_connections_get_the_new_certificate_and_the_others_are_left_alone(
        self, mounted: Mounted
    ) -> None:
        """The new authority also decides who may come."""
        old = mounted.now
        async with (
            serving(tls=of_member(mounted.files)) as server,
            channel(server.address, access=Access(tls=of_member(old))) as link,
        ):
            stub: Any = cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
            assert (await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)).router_id == "r"
            new = mounted.renew()
            mixed = TlsConfig(ca=new.path("ca.pem"), cert=old.path("member.pem"), key=old.path("member.key"))
            assert await answers(server.address, of_member(new))
            for tls in (of_member(old), mixed):
                assert not await answers(server.address, tls, wait_s=0.5)
            assert (await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)).router_id == "r"

    async def test_bad_files_leave_the_old_ones_in_use(
        self, mounted: Mounted, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Said once, however many connections come; and the next good ones are taken."""
        old = mounted.now
        async with serving(tls=of_member(mounted.files), mutual=False) as server:
            mounted.renew(is_broken=True)
            for _ in range(3):
                assert await answers(server.address, old.tls)
            (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert "what was read before stays in use" in said.getMessage()
            assert "KEY_VALUES_MISMATCH" in said.getMessage()
            new = mounted.renew()
            assert await answers(server.address, new.tls)


class TestChannel:
    async def test_new_calls_follow_the_files(self, mounted: Mounted) -> None:
        """The server has moved to another authority. Clients that were made before follow, without being made anew.
        The control: one whose files stay does not come back."""
        options: dict[str, Any] = {"timeout_s": DEADLINE_S, "connect_timeout_s": 2.0}
        async with (
            serving(tls=of_member(mounted.files)) as server,
            AsyncClient(server.address, tls=of_member(mounted.files), timeout_s=DEADLINE_S) as client,
            AsyncClient(server.address, tls=of_member(mounted.now), **options) as left_behind,
        ):
            blocking = Client(server.address, tls=of_member(mounted.files), timeout_s=DEADLINE_S)
            assert {(await each.get_cluster()).router_id for each in (client, left_behind)} == {"r"}
            assert (await asyncio.to_thread(blocking.get_cluster)).router_id == "r"
            await server.stop(0)
            mounted.renew()
            async with serving(tls=of_member(mounted.files), port=server.port):
                assert (await client.get_cluster()).router_id == "r"
                assert (await asyncio.to_thread(blocking.get_cluster)).router_id == "r"
                with pytest.raises(UnavailableError):
                    await left_behind.get_cluster()
            await asyncio.to_thread(blocking.close)

    async def test_calls_in_progress_end_on_the_old_channel(self, mounted: Mounted) -> None:
        service = Servicer()
        service.wait_s = 1.0
        server = GrpcServer(tls=of_member(mounted.files))
        server.add(cluster_service_pb2_grpc.add_ClusterServiceServicer_to_server, service)
        await server.start()
        link = channel(server.address, access=Access(tls=of_member(mounted.files)))
        stub: Any = cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
        stream = stub.Generate(pb.GenerateRequest(text="late"), timeout=DEADLINE_S)
        assert (await stream.read()).text == "one"
        first = link.current()
        mounted.renew()
        assert (await stub.GetCluster(pb.GetClusterRequest(), timeout=DEADLINE_S)).router_id == "r"
        assert link.current() is not first
        assert (await stream.read()).text == "two"
        await link.close()
        await server.stop(0)


class TestTokens:
    def test_they_come_and_go(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path, one, two = tmp_path / "clients", "1" * 20, "2" * 20
        path.write_text(f"one: {one}\n")
        gate = Gate(clients=Renewed((str(path),), lambda: read_client_tokens("f", str(path))).current)

        def opens(token: str) -> bool:
            try:
                gate.admit(GENERATE, bearer(token))
            except UnauthenticatedError:
                return False
            return True

        assert [opens(one), opens(two), opens("")] == [True, False, False]
        path.write_text(f"two: {two}\n# one has left\n")
        assert [opens(one), opens(two), opens("")] == [False, True, False]
        for bad in ("", "# nobody\n", "two: short\n"):
            path.write_text(bad)
            assert [opens(one), opens(two), opens("")] == [False, True, False]
        path.unlink()
        assert [opens(one), opens(two), opens("")] == [False, True, False]
        assert two not in caplog.text
        assert caplog.text.count("stays in use") == 4
        path.write_text(f"one: {one}\ntwo: {two}\n")
        assert [opens(one), opens(two), opens("")] == [True, True, False]


class TestFiles:
    def test_files_that_do_not_change_are_not_read_again(self, tmp_path: Path) -> None:
        path, reads = tmp_path / "file", []
        path.write_text("a")

        def read() -> str:
            reads.append(1)
            return path.read_text()

        renewed = Renewed((str(path), ""), read)
        assert [renewed.current() for _ in range(3)] == ["a"] * 3
        assert len(reads) == 1
        path.write_text("bb")
        assert [renewed.current() for _ in range(3)] == ["bb"] * 3
        assert len(reads) == 2

    def test_a_file_that_may_be_read_at_last_is_read(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Its content is what it was: the mode alone has changed. Who tests as root may read every file."""
        path = tmp_path / "file"
        path.write_text("old")

        def read() -> str:
            if not path.stat().st_mode & 0o040:
                raise InvalidArgumentError("tls_key", str(path), "must be a readable file")
            return path.read_text()

        path.chmod(0o640)
        renewed = Renewed((str(path),), read)
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").chmod(0o600)
        os.replace(tmp_path / "new", path)
        assert renewed.current() == "old"
        path.chmod(0o640)
        assert renewed.current() == "new"
        assert caplog.text.count("stays in use") == 1

    @pytest.mark.parametrize(
        ("name", "content"), [("ca", "-----BEGIN CERTIFICATE-----\nno\n"), ("key", "-----BEGIN PRIVATE KEY-----\n")]
    )
    def test_what_openssl_cannot_read_is_refused(self, mounted: Mounted, name: str, content: str) -> None:
        tls = of_member(mounted.files)
        Path(getattr(tls, name)).write_text(content)
        with pytest.raises(InvalidArgumentError) as caught:
            identity(tls)
        assert caught.value.field == f"tls_{name}"

    def test_a_key_with_a_passphrase_asks_nobody(self, mounted: Mounted) -> None:
        from cryptography.hazmat.primitives import serialization

        tls = of_member(mounted.files)
        key = serialization.load_pem_private_key(Path(tls.key).read_bytes(), None)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
        Path(tls.key).write_bytes(secret)
        with pytest.raises(InvalidArgumentError, match="tls_key"):
            identity(tls)

    def test_an_identity_shows_no_key(self, mounted: Mounted) -> None:
        found = identity(of_member(mounted.files)).current()
        assert mounted.now.texts[3] not in repr(found)
        assert ssl.PEM_cert_to_DER_cert(found.cert.decode()) if found.cert else False
