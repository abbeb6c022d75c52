"""A router that tells its services: a client without proto files calls Generate from descriptors alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from corun.errors import DeadlineError, InvalidArgumentError, OverloadedError, UnauthenticatedError
from corun.params import SamplingParams
from corun.rpc.auth import bearer
from corun.rpc.channel import Access, channel
from corun.testing.cluster import WAIT_S
from corun.testing.engines import expected
from router.app import OF_CLIENTS
from router.reflection import MAX_STREAMS, MAX_STREAMS_OF_CLIENT
from tests.answers import refusal
from tests.clusters import FakeCluster, cluster, generate
from tests.secrets import Secrets

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=12, logprobs=True)
FIELDS = {"token_ids": {"ids": PROMPT}, "sampling_params": {"max_tokens": 12, "logprobs": True}, "seed": 42}


def asked(link: Any, *questions: Any, **options: Any) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(link)  # type: ignore[no-untyped-call]
    return stub.ServerReflectionInfo(iter(questions), timeout=WAIT_S, **options)


def asked_once(link: Any, **options: Any) -> Any:
    """Ask in one piece. A client that still writes when it is refused may see its own write fail first."""
    call = link.unary_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    return call(question(list_services="").SerializeToString(), timeout=WAIT_S, **options)


def question(**fields: Any) -> Any:
    return reflection_pb2.ServerReflectionRequest(**fields)


@contextmanager
def foreign(fake: FakeCluster, secrets: Secrets, *, token: str) -> Iterator[grpc.Channel]:
    """A channel of plain grpcio: nothing of ours is in it, not even an option."""
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(Path(secrets.path("ca.pem")).read_bytes()),
        grpc.access_token_call_credentials(token),
    )
    with grpc.secure_channel(fake.address, credentials) as link:
        yield link


def drawn(link: grpc.Channel) -> tuple[list[str], list[int], list[float]]:
    """Return the services that a server tells, and what Generate streams to a client that learned it from them."""
    known = ProtoReflectionDescriptorDatabase(link)
    services = list(known.get_services())
    method = DescriptorPool(known).FindServiceByName("corun.v1.ClusterService").FindMethodByName("Generate")
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    call = link.unary_stream(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=request.SerializeToString,
        response_deserializer=response.FromString,
    )
    messages: list[Any] = list(call(request(**FIELDS), timeout=WAIT_S))
    return services, [i for m in messages for i in m.token_ids], [x for m in messages for x in m.logprobs]


async def test_a_client_without_proto_files_draws_the_same_bits(model: str, secrets: Secrets) -> None:
    async with cluster(model, client=secrets.client, reflection=True, **secrets.settings) as fake:
        with foreign(fake, secrets, token=secrets.token("client")) as link:
            services, ids, logprobs = await asyncio.to_thread(drawn, link)
    assert set(services) == set(OF_CLIENTS)
    assert {"corun.v1.ClusterService", "grpc.health.v1.Health"} < set(services)
    assert (ids, logprobs) == expected(PROMPT, PARAMS, 42)[:2]


async def test_it_wants_a_clients_token(model: str, secrets: Secrets) -> None:
    async with cluster(model, client=secrets.client, reflection=True, **secrets.settings) as fake:
        for token in ("", "wrong-" * 5):
            async with channel(fake.address, access=Access(tls=secrets.tls)) as link:
                error = await refusal(asked_once(link, metadata=bearer(token)).read(), UnauthenticatedError)
                assert "client's token" in str(error)


async def test_it_is_off_unless_it_is_asked_for(model: str) -> None:
    async with cluster(model) as fake, channel(fake.address) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked_once(link).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def limited(secrets: Secrets) -> None:
    """Let the client have one request in progress."""
    Path(secrets.path("clients.tokens")).write_text(f"client: {secrets.token('client')} max_requests=1\n")


async def test_a_client_with_one_request_may_ask_meanwhile(model: str, tmp_path: Path) -> None:
    """Tools ask for descriptors, and keep that call while they make their own."""
    secrets = Secrets.make(tmp_path)
    limited(secrets)
    guarded = cluster(model, client=secrets.client, reflection=True, **secrets.settings)
    async with guarded as fake, channel(fake.address, access=secrets.client) as link:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(link)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(timeout=WAIT_S, metadata=bearer(secrets.token("client")))
        for _ in range(3):
            await call.write(question(list_services=""))
            assert (await call.read()).list_services_response.service
            (output,) = await generate(fake, PROMPT, PARAMS, seed=42)
            assert output.token_ids == expected(PROMPT, PARAMS, 42)[0]
        call.cancel()


async def test_a_client_that_asks_nothing_any_more_is_let_go(model: str) -> None:
    async with cluster(model, reflection=True, client_timeout_s=1.0) as fake, channel(fake.address) as link:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(link)  # type: ignore[no-untyped-call]
        call = stub.ServerReflectionInfo(timeout=WAIT_S)
        await call.write(question(list_services=""))
        assert (await call.read()).list_services_response.service
        error = await refusal(call.read(), DeadlineError)
    assert "sent no whole request for 1 s" in str(error)


MISSES = [
    question(file_by_filename="no/such.proto"),
    question(file_containing_symbol="corun.v1.Nothing"),
    question(file_containing_symbol="\0"),
    question(all_extension_numbers_of_type="corun.v1.Nothing"),
    question(file_containing_extension={"containing_type": "corun.v1.GenerateRequest", "extension_number": 7}),
    question(file_containing_extension={"containing_type": "", "extension_number": -1}),
    question(host="nothing is asked"),
]


async def test_what_cannot_be_told_ends_no_call(model: str, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(model, reflection=True) as fake, channel(fake.address) as link:
        answers = [answer async for answer in asked(link, *MISSES, question(list_services=""))]
    assert [answer.WhichOneof("message_response") for answer in answers[:-1]] == ["error_response"] * len(MISSES)
    assert answers[-1].list_services_response.service
    assert "internal error" not in caplog.text


async def test_a_message_that_is_none_is_refused(model: str) -> None:
    async with cluster(model, reflection=True, max_message_bytes=65_536) as fake, channel(fake.address) as link:
        call = link.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for bad, limit in ((b"\xff", "valid protobuf"), (question(host="a" * 65_536).SerializeToString(), "65536")):
            error = await refusal(call(iter([bad]), timeout=WAIT_S).read(), InvalidArgumentError)
            assert limit in str(error)


@pytest.mark.parametrize("of_client", [MAX_STREAMS_OF_CLIENT, 100], ids=["of a client", "in all"])
async def test_streams_of_questions_are_bounded(model: str, of_client: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may ask all the time, and answers are made in the router's loop. An ended one gives its place back."""
    monkeypatch.setattr("router.reflection.MAX_STREAMS_OF_CLIENT", of_client)
    async with cluster(model, reflection=True) as fake, channel(fake.address) as link:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(link)  # type: ignore[no-untyped-call]
        calls = []
        for _ in range(min(of_client, MAX_STREAMS)):
            calls.append(stub.ServerReflectionInfo(timeout=WAIT_S))
            await calls[-1].write(question(list_services=""))
            assert (await calls[-1].read()).list_services_response.service
        await refusal(asked_once(link).read(), OverloadedError)
        calls.pop().cancel()
        # A cancelled stream's place is free when the router has heard of it.
        answer = await answered(link)
        while answer is None:
            answer = await answered(link)
        for call in calls:
            call.cancel()


async def answered(link: Any) -> bytes | None:
    """The answer to a question; None if it was refused for want of room."""
    try:
        answer: bytes = await asked_once(link).read()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return None
    return answer
