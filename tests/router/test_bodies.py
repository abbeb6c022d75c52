"""What a request may have of anything is compared with its limit before each of it is looked at.

Sixteen MiB are as many as eight million entries: made into Python's objects, they stop the event loop for seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, from_rpc_error
from corun.observe.tracing import Span
from corun.params import SamplingParams
from corun.records.verification import VerifyCase
from corun.rpc import codec
from corun.rpc.auth import ANYONE
from corun.testing.cluster import WAIT_S
from corun.testing.engines import MAX_MODEL_LEN
from corun.v1 import cluster_service_pb2 as pb
from router import service
from router.request import Request
from tests.clusters import FakeCluster, cluster, send

PROMPT = (5, 6, 7)
MIB = 2**20


class Unread(Sequence[Any]):
    """Has a length, and fails whoever looks at an entry."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("an entry was read")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an entry was read")


class UnreadMapping(Unread, Mapping[Any, Any]):  # type: ignore[misc]
    """The same as an object's fields."""


@pytest.mark.parametrize(
    ("field", "limit", "kind"),
    [("stop", 16, Unread), ("stop_token_ids", 64, Unread), ("logit_bias", 1024, UnreadMapping)],
    ids=str,
)
def test_parameters_are_counted_first(field: str, limit: int, kind: type[Unread]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"sampling_params\.{field} = 9999999 .*: must be at most {limit}"):
        SamplingParams(**{field: kind(9_999_999)})


def test_nothing_of_a_message_is_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(codec, "SamplingParams", lambda **values: seen.update(values))
    monkeypatch.setattr(service, "caller", lambda: ANYONE)
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
    message.sampling_params.stop_token_ids.extend(range(2 * codec.MAX_KEPT_BYTES))
    assert type(service._request(message, Span()).prompt) is type(message.token_ids.ids)
    for field in ("stop", "stop_token_ids", "logit_bias"):
        assert type(seen[field]) is type(getattr(message.sampling_params, field))


async def test_a_message_is_not_parsed_if_no_prompt_of_the_model_is_so_long(model: str) -> None:
    most = MAX_MODEL_LEN * 6 + MIB  # Token ids may take more bytes than a text here.
    async with cluster(model) as fake:
        request = codec.generate_request("x" * MIB, SamplingParams())
        with pytest.raises(InvalidArgumentError, match=r"prompt\.text = 1048576 bytes"):
            await send(fake, request)
        request.token_ids.ids.extend([1] * most)
        with pytest.raises(InvalidArgumentError, match=rf"message = \d+ bytes: must be at most {most} bytes"):
            await send(fake, request)
        assert fake.router.request_limit("/corun.v1.ClusterService/Verify") == most + 4 * MIB
        fake.router.registry._preparation.model = None  # Nothing is known of it yet.
        assert fake.router.request_limit("/corun.v1.ClusterService/Generate") == 16 * MIB
        assert fake.router.request_limit("/corun.v1.ClusterService/Verify") == 16 * MIB


async def test_lists_of_parameters_are_counted_before_they_are_parsed(model: str) -> None:
    """Each empty stop string takes two bytes, and a router's event loop as long as many tokens."""
    request = codec.generate_request(PROMPT, SamplingParams())
    request.sampling_params.stop.extend([""] * 20_000)
    async with cluster(model) as fake:
        with pytest.raises(InvalidArgumentError, match="message = more than 16384 fields: must have at most 16384"):
            await send(fake, request)


async def test_a_prompt_is_counted_first(model: str) -> None:
    async with cluster(model) as fake:
        request = Request(prompt=Unread(9_999_999), params=SamplingParams())
        with pytest.raises(InvalidArgumentError, match=rf"9999999 tokens: must be at most {MAX_MODEL_LEN - 1} tokens"):
            await fake.router.requests.accept(request, asyncio.get_running_loop().time() + WAIT_S)


async def test_resume_points_are_counted_first(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "resume_point_from_proto", lambda _: pytest.fail("an entry was read"))
    async with cluster(model) as fake:
        request = codec.generate_request(PROMPT, SamplingParams(n=2), request_id="r")
        request.resume.extend(pb.ResumePoint() for _ in range(257))
        with pytest.raises(InvalidArgumentError, match="resume = 257 entries: must be 0 to 256"):
            await send(fake, request)


async def verify(fake: FakeCluster, request: pb.VerifyRequest) -> None:
    async with fake.stub() as stub:
        try:
            async for _ in stub.Verify(request, timeout=WAIT_S):
                pass
        except Exception as error:
            raise from_rpc_error(error) if hasattr(error, "code") else error from None


async def test_cases_and_their_prompts_are_counted_first(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "verify_case_from_proto", lambda _: pytest.fail("an entry was read"))
    long = VerifyCase(prompt_token_ids=(1,) * MAX_MODEL_LEN, sampling_params=SamplingParams(), seed=1)
    refused = {
        r"cases\[0\]\.prompt\.token_ids = 512 tokens: must be at most 511": codec.verify_request([long]),
        "cases = 9: must be 1 to 8 cases": pb.VerifyRequest(cases=[pb.VerifyCase()] * 9),
        # Each entry takes two bytes, and more than a hundred of memory.
        "message = more than 16384 fields: must have at most 16384": pb.VerifyRequest(cases=[pb.VerifyCase()] * 20_000),
        "conditions = 5: must be at most 4 conditions": pb.VerifyRequest(cases=[pb.VerifyCase()], conditions=[1] * 5),
    }
    async with cluster(model, max_queued_samples=8) as fake:
        for message, request in refused.items():
            with pytest.raises(InvalidArgumentError, match=message):
                await verify(fake, request)


async def test_the_loop_runs_between_two_cases(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    read = codec.verify_case_from_proto

    def note(message: pb.VerifyCase) -> VerifyCase:
        order.append("case")
        asyncio.get_running_loop().call_soon(order.append, "loop")
        return read(message)

    monkeypatch.setattr(codec, "verify_case_from_proto", note)
    case = VerifyCase(prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=1), seed=1)
    async with cluster(model) as fake:
        await verify(fake, codec.verify_request([case, case]))
    assert order[:4] == ["case", "loop", "case", "loop"]
