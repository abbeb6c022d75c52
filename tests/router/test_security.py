"""A whole cluster with TLS and tokens, and the router as a process that keeps its secrets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient, Client
from corun.errors import UnauthenticatedError, UnavailableError
from corun.node.membership import NodeAgent
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import Access, channel
from corun.testing.cluster import WAIT_S
from corun.v1 import decode_service_pb2 as decode_pb
from corun.v1 import decode_service_pb2_grpc, registry_service_pb2_grpc
from corun.v1 import registry_service_pb2 as registry_pb
from tests.answers import refusal
from tests.clusters import cluster, generate
from tests.machine import free_port
from tests.router.asking import right
from tests.secrets import Secrets

PARAMS = SamplingParams(max_tokens=12, logprobs=True)
PROMPT = (5, 6, 7)


@pytest.mark.parametrize("tls_clients", [False, True])
async def test_a_request_through_a_protected_cluster(model: str, secrets: Secrets, tls_clients: bool) -> None:
    """With a certificate of the client, where the router says that it needs one."""
    tls = secrets.tls_of("client") if tls_clients else secrets.tls
    access = Access(tls=tls, token=secrets.token("client"))
    async with cluster(model, client=access, tls_clients=tls_clients, **secrets.settings) as fake:
        (output,) = await generate(fake, PROMPT, PARAMS, seed=42)
        assert right(output, PROMPT, PARAMS, 42)
        async with AsyncClient(fake.address, tls=tls, token=access.token, timeout_s=WAIT_S) as client:
            done = await client.generate(PROMPT, PARAMS, seed=42)
            assert list(done.token_ids) == output.token_ids
            shown = f"{await client.get_cluster()}"
        assert not [text for text in secrets.texts if text in shown]
        if tls_clients:
            async with AsyncClient(fake.address, tls=secrets.tls, token=access.token, connect_timeout_s=0.5) as without:
                with pytest.raises(UnavailableError):
                    await without.get_cluster()


async def test_a_client_cannot_act_as_a_member(model: str, secrets: Secrets) -> None:
    """Not as a node to the router, nor as a router to a node, even with a certificate."""
    client = Access(tls=secrets.tls_of("client"), token=secrets.token("client"))
    async with cluster(model, client=client, **secrets.settings) as fake:
        d1 = fake.nodes[1].info
        async with channel(fake.address, access=client) as link:
            registry: Any = registry_service_pb2_grpc.RegistryServiceStub(link)  # type: ignore[no-untyped-call]
            register = registry_pb.RegisterRequest(node=codec.node_info_to_proto(d1))
            beat = registry_pb.HeartbeatRequest(ref=codec.node_ref_to_proto(d1.ref), draining=True)
            for call in (registry.Register(register, timeout=WAIT_S), registry.Heartbeat(beat, timeout=WAIT_S)):
                await refusal(call, UnauthenticatedError)
        async with channel(d1.address, access=client) as link:
            decode: Any = decode_service_pb2_grpc.DecodeServiceStub(link)  # type: ignore[no-untyped-call]
            release = decode_pb.ReleaseRequest(lease_id=1, generation=d1.ref.generation)
            await refusal(decode.Release(release, timeout=WAIT_S), UnauthenticatedError)
            steps = decode_pb.StreamStepsRequest(router_id="r", generation=d1.ref.generation)
            await refusal(decode.StreamSteps(steps, timeout=WAIT_S).read(), UnauthenticatedError)
        await generate(fake, PROMPT, PARAMS, seed=1)


async def test_a_node_without_the_token_does_not_join(
    model: str, secrets: Secrets, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(model, prefills=0, decodes=0, client=secrets.client, **secrets.settings) as fake:
        stranger = await fake.add_prefill("stranger", join=False)
        stranger.agent = NodeAgent(stranger.info, [fake.address], stranger.service.load, secrets.client)
        stranger.join()
        await fake.until(lambda: "needs the cluster's token" in caplog.text)
        assert fake.state("stranger") is None
        assert not [text for text in secrets.texts if text in caplog.text]


@pytest.fixture
def process(secrets: Secrets) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    flags = [word for name, path in secrets.settings.items() for word in (f"--{name.replace('_', '-')}", path)]
    argv = [sys.executable, "-m", "router", "--port", str(port), *flags]
    with ExitStack() as stack:
        found = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        stack.callback(found.wait)
        stack.callback(found.kill)
        yield found, port


def test_a_process_shows_no_secret(process: tuple[subprocess.Popen[str], int], secrets: Secrets) -> None:
    """Neither in its command line and environment, nor in its log, nor in what it answers."""
    router, port = process
    address = f"127.0.0.1:{port}"
    with Client(address, tls=secrets.tls, token=secrets.token("client"), timeout_s=60.0) as client:  # It starts.
        seen = [str(client.get_cluster())]
    with Client(address, tls=secrets.tls, token="wrong-" * 5, timeout_s=WAIT_S) as client:
        with pytest.raises(UnauthenticatedError) as caught:
            client.get_cluster()
        seen.append(str(caught.value))
    seen += [Path(f"/proc/{router.pid}/{name}").read_text() for name in ("cmdline", "environ")]
    router.terminate()
    seen.append(router.communicate(timeout=WAIT_S)[1])
    assert router.returncode == 0, seen[-1]
    assert "listens on" in seen[-1]
    assert secrets.path("cluster.token") in seen[2]
    assert not [text for text in [*secrets.texts, "wrong-" * 5] if any(text in one for one in seen)]
