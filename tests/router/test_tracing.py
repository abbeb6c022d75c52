"""One trace for a request, whatever becomes of it, as a collector of OpenTelemetry's receives it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient, Client
from corun.errors import InvalidArgumentError, UnavailableError
from corun.observe import trace_context, tracing
from corun.params import SamplingParams
from corun.rpc import codec
from corun.rpc.channel import channel
from corun.testing.cluster import WAIT_S
from corun.v1 import cluster_service_pb2_grpc
from tests.clusters import cluster, generate
from tests.gateway.serving import serving
from tests.otlp import Collector, collecting, variables

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=6, logprobs=True)
ROOT = Path(__file__).parents[2]
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        for name, value in variables(collector).items():
            monkeypatch.setenv(name, value)
        yield collector


@pytest.fixture
async def traced(collector: Collector) -> AsyncIterator[Collector]:
    """Router and nodes of one process, so they are one service."""
    tracing.start("corun", "test")
    yield collector
    await tracing.stop()


RUN = [
    ["corun: queue"],
    ["corun: reserve"],
    ["corun: prefill", ["corun: queue"], ["corun: compute"]],
    ["corun: decode"],
    ["corun: handoff"],
]
"""The parts of a run that no node failed, in their order."""


async def test_a_request_is_one_trace(model: str, traced: Collector, tmp_path: Path) -> None:
    """Between members with a token, too: the router's calls to nodes carry both."""
    (tmp_path / "token").write_text("m" * 16)
    async with cluster(model, cluster_token_file=str(tmp_path / "token")) as fake:
        (done,) = await generate(fake, PROMPT, PARAMS, seed=8, request_id="r1")
        await tracing.stop()
        assert traced.tree() == {"corun.request": [["corun: attempt", *RUN]]}
        assert len({span.trace for span in traced.spans}) == 1
        assert not any(span.failed for span in traced.spans)
        (request,), (attempt,), (decode,) = map(traced.named, ("corun.request", "attempt", "decode"))
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.max_tokens": 6,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.response.finish_reasons": ["length"],
            "corun.request_id": "r1",
            "corun.router": fake.router.router_id,
            "corun.resumed": False,
        }
        assert {name: request.attributes[name] for name in expected} == expected
        assert attempt.attributes == {
            "corun.sample_index": 0,
            "corun.attempt": 1,
            "gen_ai.request.seed": done.seed,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 6,
            "gen_ai.response.finish_reasons": ["length"],
            "corun.prefill_node": str(fake.nodes[0].info.ref),
            "corun.decode_node": str(fake.nodes[1].info.ref),
        }
        assert decode.began < decode.events["first_token"] < decode.ended


async def test_every_attempt_is_a_span_of_its_own(model: str, traced: Collector) -> None:
    async with cluster(model, decodes=2) as fake:
        fake.nodes[1].engine.fail_after = fake.nodes[2].engine.fail_after = 3
        await generate(fake, PROMPT, PARAMS, seed=8)
    await tracing.stop()
    attempts = traced.named("attempt")
    assert [span.attributes["corun.attempt"] for span in attempts] == [1, 2, 3]
    assert [span.failed for span in attempts] == [True, True, False]
    assert [span.attributes.get("error.type") for span in attempts] == ["internal", "internal", None]
    assert traced.tree() == {"corun.request": [["corun: attempt", *RUN]] * 3}


async def test_how_a_request_ends_is_in_its_span_and_no_text_is(model: str, traced: Collector) -> None:
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        with pytest.raises(InvalidArgumentError):
            await generate(fake, "nobody's", SamplingParams(stop=("nobody's",), max_tokens=10_000))
        fake.nodes[0].engine.errors = [RuntimeError("no such luck")] * 3
        with pytest.raises(UnavailableError):
            await generate(fake, PROMPT, PARAMS)
        call = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(max_tokens=400)))
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 0)
        call.cancel()
        await fake.until(lambda: not fake.router._activity.running)
        (done,) = await generate(fake, "a prompt that is nobody's business", PARAMS, seed=8)
    await tracing.stop()
    ends = [(span.failed, span.attributes.get("error.type")) for span in traced.named("corun.request")]
    assert ends == [(True, "invalid_argument"), (True, "unavailable"), (False, "cancelled"), (False, None)]
    for text in (b"no such luck", b"nobody's", done.text.encode()):
        assert text not in traced.raw


async def _send(address: str, metadata: Any) -> None:
    async with channel(address) as link:
        stub: Any = cluster_service_pb2_grpc.ClusterServiceStub(link)  # type: ignore[no-untyped-call]
        request = codec.generate_request(PROMPT, SamplingParams(max_tokens=1), seed=1)
        async for _ in stub.Generate(request, timeout=WAIT_S, metadata=metadata):
            pass


HOSTILE = [
    "",
    "00",
    "x" * 40_000,
    PARENT.upper().replace("00-", "00-", 1),
    PARENT + "-00",
    PARENT + "\n".strip() + " ",
    "ff" + PARENT[2:],
    "00-" + "0" * 32 + "-" + "b" * 16 + "-01",
    "00-" + "a" * 32 + "-" + "0" * 16 + "-01",
    "00-" + "g" * 32 + "-" + "b" * 16 + "-01",
    "00-" + "-" * 32 + "-" + "b" * 16 + "-01",
]


def test_contexts_are_read_as_they_are_written_and_only_if_they_are_well_formed() -> None:
    found = trace_context.read([("other", "x"), ("traceparent", PARENT)])
    assert found is not None
    assert found.metadata() == (("traceparent", PARENT),)
    assert trace_context.read([("traceparent", PARENT.encode())]) is None
    assert trace_context.read([]) is None
    for value in HOSTILE:
        assert trace_context.read([("traceparent", value)]) is None, value
        assert trace_context.read([("traceparent", PARENT), ("traceparent", value)]) is None, value


async def test_the_trace_of_the_caller_goes_on_and_hostile_ones_begin_anew(model: str, traced: Collector) -> None:
    """A trace that its caller does not record is not recorded."""
    values = [value for value in HOSTILE if value]
    async with cluster(model) as fake:
        await _send(fake.address, (("traceparent", PARENT),))
        await _send(fake.address, (("traceparent", PARENT[:-2] + "00"),))
        for value in values:
            await _send(fake.address, (("traceparent", value), ("tracestate", "x=" + "y" * 1000)))
    await tracing.stop()
    own = [span for span in traced.spans if span.trace == "a" * 32]
    assert len({span.trace for span in traced.spans}) == 1 + len(values)
    assert [span.parent for span in traced.named("corun.request")].count("") == len(values)
    (request,) = [span for span in own if span.parent == "b" * 16]
    assert request in traced.named("corun.request")


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_client_passes_its_callers_span_on(model: str, traced: Collector, blocking: bool) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    async with cluster(model) as fake:
        with TracerProvider(shutdown_on_exit=False).get_tracer("caller").start_as_current_span("work") as span:
            known = span.get_span_context()
            if blocking:
                with Client(fake.address, timeout_s=WAIT_S) as client:
                    await asyncio.to_thread(client.generate_many, [PROMPT, PROMPT], PARAMS, progress=False)
            else:
                async with AsyncClient(fake.address, timeout_s=WAIT_S) as several:
                    await several.generate_many([PROMPT, PROMPT], PARAMS, progress=False)
        assert not trace.get_current_span().get_span_context().is_valid
    await tracing.stop()
    found = {(request.trace, request.parent) for request in traced.named("corun.request")}
    assert found == {(f"{known.trace_id:032x}", f"{known.span_id:016x}")}
    assert len(traced.named("corun.request")) == 2


async def test_a_client_passes_its_callers_span_on_with_what_it_has_scored(model: str, traced: Collector) -> None:
    context = trace_context.read([("traceparent", PARENT)])
    async with cluster(model) as fake, AsyncClient(fake.address, timeout_s=WAIT_S) as client:
        with trace_context.within(context):
            await client.score(PROMPT, [PROMPT])
    await tracing.stop()
    assert [(span.trace, span.parent) for span in traced.named("corun.score")] == [("a" * 32, "b" * 16)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_passes_the_span_of_its_http_client_on(model: str, traced: Collector, stream: bool) -> None:
    sent = [{"traceparent": PARENT}, {"traceparent": HOSTILE[3]}, {}]
    async with cluster(model) as fake, serving(fake) as http:
        for headers in sent:
            body = {"prompt": [[5, 6], [7]], "max_tokens": 1, "stream": stream}
            async with http.session.post(http.gateway.url + "/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
    await tracing.stop()
    parents = sorted((span.parent, span.trace == "a" * 32) for span in traced.named("corun.request"))
    assert parents == [("", False)] * 4 + [("b" * 16, True)] * 2


def test_only_the_environment_turns_traces_on_and_what_is_not_supported_is_refused() -> None:
    endpoint, grpc, http = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, "grpc", "http/protobuf"
    asked = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4317"}, {"OTEL_TRACES_EXPORTER": "otlp"}
    for environment in (endpoint, *asked, {"OTEL_EXPORTER_OTLP_PROTOCOL": grpc, "OTEL_TRACES_EXPORTER": "otlp"}):
        assert tracing.is_asked_for(environment), environment
    for environment in (
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_METRICS_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_TRACES_EXPORTER": "none", **endpoint},
        {"OTEL_SDK_DISABLED": "true", **endpoint},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": http},
    ):
        assert not tracing.is_asked_for(environment), environment
    for environment in (
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": http},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
    ):
        with pytest.raises(InvalidArgumentError, match="environment variable OTEL_"):
            tracing.is_asked_for(environment)


def test_a_collector_that_is_not_there_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        tracing.start("corun", "test")
        with tracing.Span(tracing._running[0], tracing._running[0].start("x", None, None)):
            pass
        await tracing.stop()

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(tracing, "SHUTDOWN_TIMEOUT_S", 0.2)
    asyncio.run(asyncio.wait_for(work(), WAIT_S))


@pytest.mark.parametrize("configured", [False, True])
def test_nothing_is_imported_unless_it_is_asked_for(configured: bool) -> None:
    script = """
import asyncio, sys
from router.app import Router
from corun.config.fields import RouterConfig
from corun.observe import tracing
import prefill_node.__main__, decode_node.__main__
async def main():
    tracing.start("corun-router", "r")
    router = Router(RouterConfig(port=0))
    await router.start()
    await router.stop()
    await tracing.stop()
asyncio.run(main())
print(sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry")[:1])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if configured:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    child = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=environment, text=True, timeout=60)
    assert child.strip() == ("['opentelemetry']" if configured else "[]")
