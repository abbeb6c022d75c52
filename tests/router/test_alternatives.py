"""The alternatives of tokens on their way from a node to a client: with each token, and outside of every digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.completion import Sample
from corun.errors import DataLossError, InvalidArgumentError, OverloadedError
from corun.params import SamplingParams, check_vocabulary
from corun.testing.engines import expected, expected_alternatives
from corun.types import NO_ALTERNATIVES, Alternatives
from corun.v1 import decode_service_pb2
from router.nodes.node_client import _alternatives
from router.output import Outbox
from router.text import Tokenizer
from tests.clusters import cluster, generate, retries

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=9, logprobs=True, top_logprobs=3)


def check(sample: Sample, params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Compare a sample with what fake engines draw, and with what they give beside it."""
    ids, logprobs, _ = expected(PROMPT, params, sample.seed)
    assert (list(sample.token_ids), list(sample.logprobs)) == (ids, logprobs)
    for token_id, logprob, found in zip(ids, logprobs, sample.top_logprobs, strict=True):
        tops = expected_alternatives(token_id, logprob, params.top_logprobs)
        assert found == tops._replace(texts=tokenizer.texts_alone(tops.token_ids))


@pytest.mark.parametrize("fault", [False, True], ids=["one run", "a node fails in the middle"])
async def test_each_token_comes_with_its_own(model: str, fault: bool) -> None:
    """A repeated run gives only what is new. Receipts and digests are those of a request that asks for none."""
    tokenizer = Tokenizer.load(model)
    async with cluster(model, decodes=2) as fake, AsyncClient(fake.address) as client:
        plain = await client.generate(PROMPT, replace(PARAMS, top_logprobs=0), seed=3)
        if fault:
            for name in ("d1", "d2"):
                fake.node(name).engine.fail_after = 4
        done = await client.generate(PROMPT, replace(PARAMS, n=3), seed=3)
        for sample in done.samples:
            check(sample, PARAMS, tokenizer)
        assert bool(retries(fake)) is fault
        assert plain.samples[0].top_logprobs == ()
        assert plain.receipt.params_digest == done.receipt.params_digest
        assert plain.receipt.output_digest == done.receipt.output_digest


async def test_a_client_that_changes_routers_gets_each_once(model: str) -> None:
    tokenizer, params = Tokenizer.load(model), replace(PARAMS, max_tokens=60)
    async with cluster(model, routers=2) as fake, AsyncClient(fake.addresses) as client:
        chunks = []
        async for chunk in client.stream(PROMPT, params, seed=3, request_id="r"):
            chunks.append(chunk)
            if sum(len(each.token_ids) for each in chunks) >= 5 and len(fake.routers) == 2:
                await fake.kill_router(0)
        found = [tops for chunk in chunks for tops in chunk.top_logprobs]
        ids, logprobs, _ = expected(PROMPT, params, chunks[-1].seed)
        tops = [expected_alternatives(*drawn, 3) for drawn in zip(ids, logprobs, strict=True)]
        assert found == [each._replace(texts=tokenizer.texts_alone(each.token_ids)) for each in tops]


async def test_texts_are_only_made_where_they_are_asked_for(model: str) -> None:
    """A gRPC client that asks for no texts pays for none."""
    async with cluster(model) as fake:
        tokenizer = fake.router.registry.model.tokenizer
        await generate(fake, PROMPT, PARAMS)
        assert tokenizer._texts_alone == {}


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"top_logprobs": 21}, "must be in \\[0, 20\\]"),
        ({"top_logprobs": -1}, "must be in"),
        ({"top_logprobs": 5, "logprobs": False}, "must be 0 without logprobs"),
    ],
)
def test_bad_numbers_are_refused(fields: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit) as refused:
        SamplingParams(**{"logprobs": True, **fields})
    assert refused.value.field == "sampling_params.top_logprobs"


def step(**alternatives: Any) -> decode_service_pb2.StreamStepsResponse:
    message = decode_service_pb2.StreamStepsResponse(step=1, lease_ids=[1, 2], token_ids=[3, 4], logprobs=[-1.0, -2.0])
    message.alternatives.add(**alternatives)
    return message


def test_rows_of_a_step_have_their_own() -> None:
    message = step(row=1, token_ids=[4, 9], logprobs=[-2.0, -3.0])
    assert _alternatives(message) == [NO_ALTERNATIVES, Alternatives((4, 9), (-2.0, -3.0))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"row": 2, "token_ids": [4], "logprobs": [-2.0]},
        {"row": 0, "token_ids": [4], "logprobs": []},
        {"row": 0, "token_ids": [], "logprobs": []},
    ],
)
def test_what_belongs_to_no_row_breaks_the_stream(wrong: dict[str, Any]) -> None:
    with pytest.raises(DataLossError, match="not those of a row"):
        _alternatives(step(**wrong))


def test_they_count_while_they_wait_for_a_slow_client() -> None:
    """An outbox of 60 tokens holds 10 that have 20 alternatives each."""
    tops = expected_alternatives(1, -1.0, 20)
    outbox = Outbox(max_tokens=60)
    for number in range(11):
        assert outbox.error is None, number
        outbox.add(0, 7, 1, -1.0, tops=tops)
    assert isinstance(outbox.error, OverloadedError)


def test_more_than_the_vocabulary_has_is_refused() -> None:
    params = SamplingParams(logprobs=True, top_logprobs=17)
    check_vocabulary(params, 17)
    with pytest.raises(InvalidArgumentError, match="at most the vocabulary's size, 16"):
        check_vocabulary(params, 16)
