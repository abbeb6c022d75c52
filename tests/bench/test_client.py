"""The benchmark's view of an OpenAI-compatible server: our own gateway, and servers that say less, or lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from corun.errors import CorunError, InvalidArgumentError, UnavailableError
from corun.params import MAX_SAMPLES, SamplingParams, sample_seed
from corun.testing.engines import expected
from corun.v1 import cluster_service_pb2 as pb
from corun_bench import client
from corun_bench.client import ClusterTarget, OpenAiTarget, _Call
from corun_bench.driver import Outcome, Request, Target
from corun_bench.systems import TEMPERATURE
from tests.answers import until
from tests.clusters import cluster
from tests.gateway.serving import serving

PROMPT = (5, 6, 7)


async def measured(target: Target, max_tokens: int = 8, *, logprobs: bool = False, seed: int = 1) -> Outcome:
    request = Request(index=0, prompt_token_ids=PROMPT, max_tokens=max_tokens, seed=seed)
    outcome = Outcome(request=request)
    try:
        await target.run(outcome, logprobs=logprobs)
    except CorunError as error:
        outcome.error = str(error)
    return outcome


class Stranger:
    """A server that sends what a test tells it to."""

    def __init__(self) -> None:
        self.status = 200
        self.parts: Sequence[bytes] = ()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for part in self.parts:
            await response.write(part)
            await asyncio.sleep(0.002)
        return response

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield site.name if not site.name.endswith(":0") else f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(text: str = "a", reason: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more})


def usage(count: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": count}}


DONE = event(b"[DONE]")


async def test_the_gateway_and_the_router_are_measured_token_by_token(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http, OpenAiTarget(http.gateway.url).connected() as target:
        for node in fake.nodes:
            if node.info.slots:
                node.engine.step_ms = 20.0  # Steps that come faster are sent together.
        router = ClusterTarget(fake.address)
        outcomes = [await measured(one, 20, logprobs=True, seed=7) for one in (target, router)]
        router.settle()
        assert "max_tokens = 600" in (await measured(router, 600)).error
        forged = Outcome(request=outcomes[0].request)
        message = pb.GenerateResponse(token_ids=[1], logprobs=[-1.0])
        message.receipt.output_digest = "0" * 64
        router._calls.append(_Call(outcomes=[forged], received=[(0.0, message.SerializeToString())]))
        router.settle()
        assert forged.error == "its receipt is of other tokens"
        await router.aclose()
        plain = await measured(target, 20, seed=7)
    ids, logprobs, _ = expected(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, temperature=TEMPERATURE), 7)
    for outcome in outcomes:
        assert (outcome.error, outcome.token_ids, outcome.logprobs) == ("", ids, logprobs)
        assert sum(count for _, count in outcome.arrivals) == 20
        times = [at for at, _ in outcome.arrivals]
        assert times == sorted(times)
        assert len(times) > 10  # Tokens come one by one, and each has its time.
    assert (plain.token_ids, plain.logprobs) == (ids, [])
    assert target.model == Path(model).name


def sample_of(prompt: tuple[int, ...], place: int, max_tokens: int = 5) -> Outcome:
    return Outcome(
        request=Request(
            index=place, prompt_token_ids=prompt, max_tokens=max_tokens, seed=sample_seed(7, place), place=place
        )
    )


async def test_samples_of_a_prompt_that_are_sent_together_are_one_request(model: str) -> None:
    """They are drawn as if each were a request of its own. Those in another order are alone."""
    other = tuple(PROMPT[::-1])
    async with cluster(model) as fake, aclosing(ClusterTarget(fake.address)) as target:
        group = [sample_of(PROMPT, place) for place in range(3)] + [sample_of(other, place) for place in range(2)]
        await asyncio.gather(*(target.run(outcome, logprobs=True) for outcome in group))
        later = [sample_of(PROMPT, place) for place in (2, 1, 0)]
        await asyncio.gather(*(target.run(outcome, logprobs=True) for outcome in later))
        assert [len(call.outcomes) for call in target._calls] == [3, 2, 1, 1, 1]
        target.settle()
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=TEMPERATURE)
    for outcome in (*group, *later):
        request = outcome.request
        ids, logprobs, _ = expected(request.prompt_token_ids, params, request.seed)
        assert (outcome.error, outcome.token_ids, outcome.logprobs) == ("", ids, logprobs)
        assert sum(count for _, count in outcome.arrivals) == 5


async def test_a_request_has_no_more_samples_than_it_may(model: str) -> None:
    """The samples that are left are another request, and are drawn as well."""
    async with cluster(model, slots=64) as fake, aclosing(ClusterTarget(fake.address)) as target:
        for node in fake.nodes:
            if node.info.slots:
                node.engine.step_ms = 0.0
        group = [sample_of(PROMPT, place, 1) for place in range(MAX_SAMPLES + 2)]
        await asyncio.wait_for(asyncio.gather(*(target.run(one, logprobs=True) for one in group)), 60.0)
        assert [len(call.outcomes) for call in target._calls] == [MAX_SAMPLES, 1, 1]
        target.settle()
    assert {len(outcome.token_ids) for outcome in group} == {1}


async def test_a_group_that_fails_or_takes_too_long_leaves_no_sample_waiting(model: str) -> None:
    async with cluster(model) as fake, aclosing(ClusterTarget(fake.address)) as target:
        too_long = [target.run(sample_of(PROMPT, place, 600), logprobs=True) for place in range(2)]
        errors = await asyncio.gather(*too_long, return_exceptions=True)
        assert ["max_tokens = 600" in str(error) for error in errors] == [True, True]
        for node in fake.nodes:
            if node.info.slots:
                node.engine.step_ms = 3_600_000.0
        endless = [asyncio.ensure_future(target.run(sample_of(PROMPT, place), logprobs=True)) for place in range(2)]
        decode = next(node for node in fake.nodes if node.info.slots)
        await until(lambda: decode.leases == 2)
        endless[0].cancel()
        await asyncio.wait(endless[:1])
        assert decode.leases == 2  # The other one goes on.
        endless[1].cancel()
        await until(lambda: decode.leases == 0)


async def test_hundreds_of_requests_at_once(model: str) -> None:
    patient: dict[str, Any] = {"heartbeat_timeout_ms": 60_000}  # All of it is one process, and busy.
    async with (
        cluster(model, slots=64, **patient) as fake,
        serving(fake) as http,
        OpenAiTarget(http.gateway.url).connected() as target,
    ):
        for node in fake.nodes:
            if node.info.slots:
                node.engine.step_ms = 0.0
        outcomes = await asyncio.gather(*(measured(target, 1, seed=seed) for seed in range(300)))
    assert {outcome.error for outcome in outcomes} == {""}


async def test_errors_are_noted(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        async with OpenAiTarget(http.gateway.url, model="another").connected() as target:
            assert (await measured(target)).error.startswith("HTTP 404: the model 'another' does not exist")
        async with OpenAiTarget(http.gateway.url).connected() as target:
            assert "max_tokens = 600: must be at most" in (await measured(target, 600)).error
    async with OpenAiTarget("http://127.0.0.1:1", model="m").connected() as target:
        assert "ClientConnectorError" in (await measured(target)).error
    stranger = Stranger()
    stranger.status, stranger.parts = 502, [b"<html>\n" + b"x" * 1000]
    async with stranger.serving() as url:
        async with OpenAiTarget(url, model="m").connected() as target:
            error = (await measured(target)).error
        with pytest.raises(UnavailableError, match="HTTP 404"):
            await OpenAiTarget(url).connected().__aenter__()
    assert error.startswith("HTTP 502: <html> xxx")
    assert len(error) <= 200
    with pytest.raises(UnavailableError):
        await OpenAiTarget("http://127.0.0.1:1").connected().__aenter__()
    with pytest.raises(InvalidArgumentError):
        OpenAiTarget("127.0.0.1:8000")


COUNTED: dict[str, tuple[list[bytes], list[int]]] = {
    "one a message": ([token(), token(), token(reason="length"), DONE], [1, 1, 1]),
    "an end of its own": ([token(), token(), token(), token("", "length"), DONE], [1, 1, 1]),
    "continuous usage": ([token(**usage(2)), token("", **usage(2)), token(reason="length", **usage(3)), DONE], [2, 1]),
    "usage at the end": ([token(), token(reason="length"), event({"choices": [], **usage(3)}), DONE], [1, 2]),
    "null fields": ([token(usage=None), token(), token(reason="length", error=None), DONE], [1, 1, 1]),
}


@pytest.mark.parametrize("name", COUNTED)
async def test_tokens_are_counted_as_well_as_the_server_lets_us(name: str) -> None:
    stranger = Stranger()
    stranger.parts, counts = COUNTED[name]
    async with stranger.serving() as url, OpenAiTarget(url, model="m").connected() as target:
        outcome = await measured(target, 3)
    assert (outcome.error, [count for _, count in outcome.arrivals]) == ("", counts)
    assert outcome.token_ids == []


BROKEN: dict[str, tuple[list[bytes], str]] = {
    "cut": ([token(), token()], "the stream broke off after 2 tokens"),
    "empty": ([], "the stream broke off after 0 tokens"),
    "short": ([token(reason="stop"), DONE], "1 of 3 tokens came"),
    "error": ([token(), event({"error": {"message": "no room"}}), DONE], "in the stream: no room"),
    "text": ([event(b"<html>")], "another shape"),
    "shape": ([event({"choices": [5]})], "another shape"),
    "logprobs": ([event({"choices": [{"text": "a", "logprobs": {"content": []}}]})], "another shape"),
    "depth": ([event(b"[" * 100_000)], "another shape"),
    "endless": ([token(), event(b'{"choices": [], "usage": {"completion_tokens": 1e999}}')], "another shape"),
    "count": ([token(), token(), token(reason="length", **usage(7)), DONE], "7 tokens|7 of 3 tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_answer_is_an_error(name: str) -> None:
    stranger = Stranger()
    stranger.parts, message = BROKEN[name]
    async with stranger.serving() as url, OpenAiTarget(url, model="m").connected() as target:
        outcome = await measured(target, 3)
    assert any(part in outcome.error for part in message.split("|")), outcome.error


async def test_a_server_that_stops_or_sends_for_ever_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Stranger()
    stranger.parts = [b": ping\n\n"] * 500
    async with stranger.serving() as url:
        with monkeypatch.context() as patched:
            patched.setattr(client, "TIMEOUT_S", 0.1)
            async with OpenAiTarget(url, model="m").connected() as target:
                assert (await measured(target)).error == "no end after 0.1 s"
        monkeypatch.setattr(client, "MAX_EVENT_BYTES", 2**10)
        stranger.parts = [b"data: " + b"x" * 2**16]
        async with OpenAiTarget(url, model="m").connected() as target:
            assert "LineTooLong" in (await measured(target)).error
