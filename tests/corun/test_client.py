"""The clients: what they send, what they make of answers, and what they refuse."""

from __future__ import annotations

import inspect
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import corun
from corun import (
    AsyncClient,
    Chunk,
    Client,
    Condition,
    DataLossError,
    DeadlineError,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    SamplingParams,
    UnavailableError,
)
from corun.completion import Assembler
from corun.receipt import output_digest
from corun.records.verification import VerifyCase
from corun.rpc import codec
from corun.types import Priority
from corun.v1 import cluster_service_pb2 as pb
from tests.corun.fake_router import WAIT_S, FakeRouter, make_receipt, sample_output, text_of

PROMPT = "Once upon a time"
PARAMS = SamplingParams(max_tokens=6, logprobs=True)


def expected(prompt: str, seed: int, count: int) -> list[tuple[int, float]]:
    return sample_output(tuple(prompt.encode()), seed, count)


def test_the_public_names_are_these() -> None:
    # fmt: off
    assert corun.__all__ == [
        "AsyncClient", "CancelledByPeerError", "Chunk", "Client", "ClusterStatus", "Condition",
        "ContractMismatchError", "CorunError", "DataLossError", "DeadlineError", "FinishReason", "Generation",
        "Generations",
        "InternalError", "InvalidArgumentError", "NotFoundError", "OverloadedError", "PermissionDeniedError",
        "Priority", "Prompt", "Receipt", "Sample", "SamplingParams", "Score", "Scores", "StaleGenerationError",
            "TlsConfig",
        "UnauthenticatedError", "UnavailableError", "VerifyCase", "VerifyResult", "__version__",
    ]
    # fmt: on
    assert all(hasattr(corun, name) for name in corun.__all__)


def test_generate_returns_everything_about_sample_0(client: Client, fake: FakeRouter) -> None:
    done = client.generate(PROMPT, PARAMS, seed=42, request_id="mine")
    tokens = expected(PROMPT, 42, 6)
    assert done.token_ids == tuple(token for token, _ in tokens)
    for found, (_, sent) in zip(done.logprobs, tokens, strict=True):
        assert found == struct.unpack("<f", struct.pack("<f", sent))[0] == sent
    assert done.text == "".join(text_of(token) for token in done.token_ids)
    assert (done.seed, done.finish_reason, done.request_id) == (42, FinishReason.LENGTH, "mine")
    assert done.receipt.output_digest == output_digest(done.token_ids, done.logprobs)
    assert fake.requests[0].text == PROMPT
    assert len(done.samples) == 1


def test_with_logprobs_come_the_texts_of_the_tokens(client: Client, fake: FakeRouter) -> None:
    done = client.generate(PROMPT, PARAMS)
    assert done.token_texts == tuple(text_of(token_id) for token_id in done.token_ids)
    assert "".join(done.token_texts) == done.text
    assert client.generate(PROMPT, SamplingParams(max_tokens=3)).token_texts == ()
    assert [request.token_texts for request in fake.requests] == [True, False]


def test_text_that_comes_after_the_last_token_is_its_own() -> None:
    """A character that is not finished: its text is known once no more tokens come."""
    token: dict[str, Any] = {"request_id": "r", "sample_index": 0, "seed": 1, "logprobs": (-0.5,)}
    receipt = make_receipt("r", 0, prompt=(1,), seed=1, params=PARAMS, tokens=[(5, -0.5), (6, -0.5)])
    assembler = Assembler(1, (1,))
    assembler.add(Chunk(text="a", token_ids=(5,), token_texts=("a",), **token))
    assembler.add(Chunk(text="", token_ids=(6,), token_texts=("",), **token))
    end = {**token, "logprobs": ()}
    assembler.add(Chunk(text="\ufffd", token_ids=(), finish_reason=FinishReason.LENGTH, receipt=receipt, **end))
    assert assembler.finish().token_texts == ("a", "\ufffd")


def test_what_is_not_given_is_drawn_or_left_out(client: Client, fake: FakeRouter) -> None:
    done = client.generate(PROMPT)
    assert (done.seed, len(done.token_ids), done.logprobs) == (77, SamplingParams().max_tokens, ())
    assert not fake.requests[0].HasField("seed")
    assert client.generate([1, 2, 3], PARAMS, seed=5).receipt.num_prompt_tokens == 3
    assert list(fake.requests[1].token_ids.ids) == [1, 2, 3]


def test_a_stream_comes_before_its_end_and_adds_up_to_generate(client: Client, fake: FakeRouter) -> None:
    done = client.generate(PROMPT, PARAMS, seed=3)
    fake.gate.clear()
    stream = client.stream(PROMPT, PARAMS, seed=3)
    first = next(stream)
    fake.gate.set()
    chunks = [first, *stream]
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == done.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + [FinishReason.LENGTH]
    assert [chunk.receipt is not None for chunk in chunks] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt.text"),
        ([], {}, "prompt.token_ids"),
        ([1, -1], {}, "prompt.token_ids[1]"),
        ([1, 2.5], {}, "prompt.token_ids[1]"),
        ([2**32], {}, "prompt.token_ids[0]"),
        ("a", {"seed": -1}, "seed"),
        ("a", {"seed": 2**63}, "seed"),
        ("a", {"request_id": "x" * 129}, "request_id"),
        ("a\ud800", {}, "prompt.text"),
        (b"hi", {}, "prompt.token_ids"),
        (7, {}, "prompt.token_ids"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    client: Client, fake: FakeRouter, prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.stream(prompt, **options)
    assert caught.value.field == field
    assert not fake.requests


@pytest.mark.parametrize("params", [{"max_tokens": 4}, "greedy", 0.5])
def test_parameters_of_another_type_are_refused_by_name(client: Client, fake: FakeRouter, params: object) -> None:
    for call in (client.generate, client.stream, lambda prompt, given: client.generate_many([prompt], given)):
        with pytest.raises(InvalidArgumentError, match="must be SamplingParams") as caught:
            call(PROMPT, params)  # type: ignore[operator]
        assert caught.value.field.endswith("params")
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[1\]\.sampling_params = .*: must be SamplingParams"):
        client.generate_many([PROMPT, PROMPT], [PARAMS, params])  # type: ignore[list-item]
    assert not fake.requests


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:50051",
        "https://a",
        "a:1,HTTP://b:2",
        "localhost",
        "localhost:99999",
        "localhost:0",
        "localhost:grpc",
        pytest.param("localhost:" + "1" * 5000, id="long"),
        "a:1, b",
        "",
        "a:1,",
        (),
        ("a:1", ""),
        "::1:50051",
        7,
        (7,),
    ],
)
def test_an_address_that_no_router_can_have_is_refused_at_once(address: Any) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match=r"^address = .*: must be host:port") as caught:
            kind(address)
        assert ("http" in caught.value.limit) == ("http" in str(address).lower())


@pytest.mark.parametrize("takes_connections", [True, False])
def test_whoever_waits_for_a_router_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, takes_connections: bool
) -> None:
    monkeypatch.setattr("corun.client.routers.NOTICE_S", 0.05)
    calls: list[Callable[[Client], Any]] = [
        lambda c: c.get_cluster(),
        lambda c: c.generate("a"),
        lambda c: [*c.verify([])],
    ]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1] if takes_connections else 1}"
        for connect_timeout_s, lines in ((1.0, 3), (0.05, 0)):  # The error itself comes at once.
            caplog.clear()
            started = time.monotonic()
            with Client(address, connect_timeout_s=connect_timeout_s) as client, ThreadPoolExecutor(3) as pool:
                for answer in [pool.submit(call, client) for call in calls]:
                    with pytest.raises(UnavailableError, match=f"no router answers at {address} "):
                        answer.result()
                    assert time.monotonic() - started > 0.9 * connect_timeout_s
            told = [record.getMessage() for record in caplog.records if record.name == "corun.client.routers"]
            assert len(told) == lines
            assert all(f"no router answers at {address} yet: trying for another 0." in line for line in told)


def test_a_message_beyond_the_limit_is_refused(client: Client, fake: FakeRouter) -> None:
    with pytest.raises(InvalidArgumentError, match=r"message = .*: must be at most 16777216 bytes"):
        client.generate("a" * (17 * 1024 * 1024))
    assert not fake.requests


def test_a_router_that_starts_later_is_waited_for(fake: FakeRouter) -> None:
    late = FakeRouter()
    with FakeRouter() as probe:
        address = probe.address  # Free again once this one has ended.
    with Client(address, connect_timeout_s=WAIT_S) as client:
        timer = threading.Timer(0.3, lambda: late.start(address))
        timer.start()
        try:
            assert client.generate(PROMPT, PARAMS, seed=1).seed == 1
        finally:
            timer.join()
            late.stop()


def test_the_deadline_ends_a_call(client: Client, fake: FakeRouter) -> None:
    fake.gate.clear()
    timeout_s = 0.3
    client.get_cluster()  # The connection stands, so that no call ends before it does.
    while not fake.requests:  # Where the machine is busy, a call may end before the router has it.
        with pytest.raises(DeadlineError):
            client.generate(PROMPT, PARAMS, timeout_s=timeout_s)
        timeout_s *= 2
    assert fake.cancelled.wait(WAIT_S)


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 1e10, pytest.param(10**400, id="long")])
def test_a_timeout_is_above_zero_and_what_grpc_can_count(client: Client, timeout: float) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        client.generate(PROMPT, timeout_s=timeout)


def test_wrong_answers_of_a_router_are_refused(client: Client, fake: FakeRouter) -> None:
    for flaw, message in (
        ("tamper", "output digest"),
        ("cut", "the stream ended before sample 0 did"),
        ("without_texts", "0 texts for 1 tokens"),
    ):
        setattr(fake, flaw, True)
        with pytest.raises(DataLossError, match=message):
            client.generate(PROMPT, PARAMS)
        setattr(fake, flaw, False)
    fake.errors.append(UnavailableError("no decode node has joined"))
    with pytest.raises(UnavailableError, match=rf"router {fake.address}: no decode node has joined"):
        client.generate(PROMPT)


@pytest.mark.parametrize(
    ("method", "answers"),
    [
        ("GetCluster", [b"\xff"]),  # These bytes are no message.
        ("GetCluster", [pb.GetClusterResponse(nodes=[pb.NodeStatus(state=99)])]),  # type: ignore[arg-type]
        ("Verify", [b"\xff"]),
        ("Verify", [pb.VerifyResponse(condition=99)]),  # type: ignore[arg-type]
        ("StreamOutputs", [b"\xff"]),
        ("StreamOutputs", [pb.StreamOutputsResponse(stream_id="s"), b"\xff"]),
        (
            "StreamOutputs",
            [
                pb.StreamOutputsResponse(stream_id="s"),
                pb.StreamOutputsResponse(responses=[pb.GenerateResponse(call_number=1, finish_reason=99)]),  # type: ignore[arg-type]
            ],
        ),
    ],
    ids=str,
)
def test_an_answer_that_cannot_be_read_is_no_fault_of_the_caller(method: str, answers: list[Any]) -> None:
    """A router of a later version may know more states and reasons than its client."""
    data = [each if isinstance(each, bytes) else each.SerializeToString() for each in answers]
    asked = threading.Event()

    def stream(request: Any, context: Any) -> Iterator[bytes]:
        for number, each in enumerate(data):
            assert not number or asked.wait(WAIT_S)
            yield each

    def generate(request: Any, context: Any) -> Iterator[bytes]:
        asked.set()
        yield from ()

    calls = {
        "GetCluster": grpc.unary_unary_rpc_method_handler(lambda request, context: data[0]),
        "Verify": grpc.unary_stream_rpc_method_handler(stream),
        "StreamOutputs": grpc.unary_stream_rpc_method_handler(stream),
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("corun.v1.ClusterService", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ask: dict[str, Callable[[Client], object]] = {
        "GetCluster": Client.get_cluster,
        "Verify": lambda client: list(client.verify([])),
        "StreamOutputs": lambda client: client.generate(PROMPT),
    }
    try:
        with (
            Client(f"127.0.0.1:{port}", timeout_s=WAIT_S) as client,
            pytest.raises(InternalError, match="the answer cannot be read"),
        ):
            ask[method](client)
    finally:
        server.stop(None)


def test_every_call_says_how_urgent_it_is(client: Client, fake: FakeRouter) -> None:
    client.generate("a", PARAMS)
    client.generate("b", PARAMS, priority="high")
    list(client.stream("c", PARAMS, priority=Priority.LOW))
    client.generate_many(["d"], PARAMS)
    client.generate_many(["e"], PARAMS, priority="normal")
    sent = [codec.priority_from_proto(request.priority) for request in fake.requests]
    assert sent == [Priority.NORMAL, Priority.HIGH, Priority.LOW, Priority.LOW, Priority.NORMAL]
    for call in (client.generate, client.stream):
        with pytest.raises(InvalidArgumentError) as caught:
            call("a", priority="urgent")
        assert (caught.value.field, caught.value.limit) == ("priority", "must be high, normal, low")


def test_a_router_that_says_come_back_is_asked_again(client: Client, fake: FakeRouter) -> None:
    fake.errors += [UnavailableError("shutting down", 0.01), UnavailableError("shutting down", 0.01)]
    assert client.generate("a", PARAMS, seed=4).seed == 4
    ids = [request.request_id for request in fake.requests]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert ids[0]


def test_a_blocking_method_is_described_by_that_of_the_other_client() -> None:
    for name in ("generate", "stream", "generate_many", "get_cluster", "verify"):
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters
        assert "async" not in f"{inspect.signature(blocking)}{blocking.__doc__}".lower().replace("asyncclient", "")
        assert "await" not in blocking.__doc__
        assert {"Raises:", "Example:"} <= set(blocking.__doc__.split())
        assert "Args:" in blocking.__doc__ or "The arguments are those of `generate`." in blocking.__doc__
    assert inspect.signature(Client) == inspect.signature(AsyncClient)


async def test_async_client_gives_the_same(client: Client, fake: FakeRouter) -> None:
    want = client.generate(PROMPT, PARAMS, seed=42, request_id="r")
    async with AsyncClient(fake.address) as aclient:
        done = await aclient.generate(PROMPT, PARAMS, seed=42, request_id="r")
        chunks = [chunk async for chunk in aclient.stream(PROMPT, PARAMS, seed=42)]
        status = await aclient.get_cluster()
        assert client.get_cluster() == status, "a client may block in the thread of a running loop, as in a notebook"
        case = VerifyCase(prompt_token_ids=(1, 2), sampling_params=PARAMS, seed=1)
        results = [result async for result in aclient.verify([case], [Condition.ALONE])]
    assert done == want
    assert "".join(chunk.text for chunk in chunks) == want.text
    assert (aclient.is_closed, status) == (True, fake.status)
    assert [result.match for result in results] == [True]
