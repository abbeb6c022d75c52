"""Constrained outputs on the real cluster: they are what was asked for, and their bits do not depend on company."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from corun import Client, InvalidArgumentError, SamplingParams
from corun.gateway.app import Gateway
from corun.gateway.config import GatewayConfig
from corun.gateway.tool_calls import CallReader, CallStyle
from tests.e2e.conftest import SLOTS, Cluster
from tests.e2e.test_determinism import Case, bits, differing, make_cases, run, verify_all

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": r"[a-f]{3}-[0-9]{4}"},
    {"choice": ["yes", "no", "nobody knows"]},
    {"grammar": 'root ::= "(" root ")" | "x"'},
)


def constrained(count: int) -> list[Case]:
    draw = random.Random(17)
    return [
        (
            [draw.randrange(3, 500) for _ in range(draw.randrange(1, 200))],
            SamplingParams(
                max_tokens=48,
                logprobs=True,
                temperature=(1.0, 0.0, 0.7)[i % 3],
                top_p=(1.0, 0.9)[i % 2],
                structured_outputs=CONSTRAINTS[i % len(CONSTRAINTS)],
            ),
            draw.randrange(2**63),
        )
        for i in range(count)
    ]


def test_constrained_rows_have_their_bits_alone_and_in_a_crowd_of_free_rows(cluster: Cluster) -> None:
    cases, free = constrained(15), make_cases(15)
    with cluster.client() as client:
        alone, free_alone = run(client, cases, concurrency=1), run(client, free, concurrency=1)
        mixed = [case for pair in zip(cases, free, strict=True) for case in pair]
        crowded = run(client, mixed, concurrency=20)
        verify_all(client, cases[:5])
        unmasked = run(client, [(p, replace(q, structured_outputs=()), s) for p, q, s in cases], concurrency=8)
    assert differing(alone, crowded[::2]) == []
    assert differing(free_alone, crowded[1::2]) == []
    assert differing(alone, unmasked) == list(range(15))  # The control: masks matter, and a difference is noticed.
    assert len({bits(generation) for generation in alone}) == len(alone)


def test_finished_outputs_are_what_was_asked_for(cluster: Cluster) -> None:
    cases = constrained(30)
    with cluster.client() as client:
        done = run(client, cases, concurrency=8)
    finished = [(q, g) for (_, q, _), g in zip(cases, done, strict=True) if g.samples[0].finish_reason.value == "stop"]
    assert len({q.constraint for q, _ in finished}) >= 4
    for params, generation in finished:
        kind, text = params.constraint or ("", "")
        _check(kind, text, generation.text)


def test_a_forced_tool_call_is_one_that_is_read(cluster: Cluster) -> None:
    """As the gateway asks for it where a template writes calls between tags."""
    style = CallStyle(begin="<tool_call>\n", end="\n</tool_call>", opening='{"name": ', middle=', "arguments": ')
    grammar = style.grammar({"register": SCHEMA, "leave": {"type": "object"}}, several=False)
    params = SamplingParams(max_tokens=200, structured_outputs={"grammar": grammar})
    with cluster.client() as client:
        done = [client.generate([5, 6, i], params, seed=i) for i in range(6)]
    called = 0
    for generation in done:
        if generation.finish_reason.value == "stop":
            reader = CallReader(style, ())
            first, *rest = [*reader.push(generation.text).calls, *reader.finish().calls]
            assert (first.name in ("register", "leave"), rest) == (True, [])
            found = json.loads(first.arguments)
            assert first.name == "leave" or (len(found["name"]) <= 4 and 0 <= found["age"] <= 99)
            called += 1
    assert called > 0


def test_alternatives_are_the_same_alone_and_in_a_crowd_and_have_the_bits_of_drawn_tokens(cluster: Cluster) -> None:
    """Neighbours ask for none or other numbers, or are constrained. A greedy token is its own first alternative."""
    cases = [
        (p, replace(q, logprobs=True, top_logprobs=(0, 3, 20)[i % 3]), s) for i, (p, q, s) in enumerate(make_cases(18))
    ]
    cases += [(p, replace(q, top_logprobs=5), s) for p, q, s in constrained(6)]
    with cluster.client() as client:
        alone, crowded = run(client, cases, concurrency=1), run(client, cases, concurrency=20)
        plain = run(client, [(p, replace(q, top_logprobs=0), s) for p, q, s in cases], concurrency=8)
    assert differing(alone, crowded) == differing(alone, plain) == []
    among = 0
    for (_, params, _), one, other in zip(cases, alone, crowded, strict=True):
        first, second = one.samples[0], other.samples[0]
        assert first.top_logprobs == second.top_logprobs
        assert len(first.top_logprobs) == (len(first.token_ids) if params.top_logprobs else 0)
        for token_id, logprob, tops in zip(first.token_ids, first.logprobs, first.top_logprobs, strict=False):
            assert len(tops.token_ids) == params.top_logprobs
            assert list(tops.logprobs) == sorted(tops.logprobs, reverse=True)
            among += token_id in tops.token_ids
            assert dict(zip(*tops[:2], strict=True)).get(token_id, logprob) == logprob
            plain_greedy = params.greedy and params.constraint is None and params.repetition_penalty == 1
            free = not (params.presence_penalty or params.frequency_penalty or params.logit_bias or params.min_tokens)
            assert tops.token_ids[0] == token_id or not (plain_greedy and free)
    assert among > 100


async def test_openais_own_client_gets_json_by_its_schema(cluster: Cluster) -> None:
    openai = pytest.importorskip("openai")
    gateway = Gateway(GatewayConfig(port=0, router=cluster.address))
    await gateway.start()
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    asked = {"messages": [{"role": "user", "content": "Who?"}], "max_completion_tokens": 200, "response_format": form}

    async def chat(client: Any, seed: int) -> tuple[str, str]:
        (choice,) = (await client.chat.completions.create(model=name, seed=seed, **asked)).choices
        return choice.finish_reason, choice.message.content

    try:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="EMPTY", max_retries=0) as client:
            name = (await client.models.list()).data[0].id
            alone = [await chat(client, seed) for seed in range(4)]
            crowd = await asyncio.gather(*(chat(client, seed) for seed in range(2 * SLOTS)))
            asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(client, 0)
    finally:
        await gateway.stop()
    assert crowd[:4] == alone
    whole = [json.loads(text) for finish, text in crowd if finish == "stop"]
    assert len(whole) > SLOTS
    assert all(len(found["name"]) <= 4 and 0 <= found["age"] <= 99 for found in whole)
    assert refused.value.param == "response_format"


def _check(kind: str, text: str, output: str) -> None:
    if kind == "json":
        found = json.loads(output)
        assert isinstance(found, dict)
        assert "properties" not in text or (len(found["name"]) <= 4 and 0 <= found["age"] <= 99)
    elif kind == "regex":
        assert re.fullmatch(text, output)
    elif kind == "choice":
        assert output in json.loads(text)
    else:
        assert re.fullmatch(r"(\(*)x(\)*)", output)
        assert output.count("(") == output.count(")")


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"type": "array", "uniqueItems": True}},  # not built in llguidance
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}},
        {"json": {"type": "integer", "allOf": [{"multipleOf": n} for n in (9973, 9967, 9949, 9941)]}},  # an explosion
        {"regex": "(("},
        {"regex": r"[^\s\S]"},  # nothing at all
        {"grammar": "root :=="},
    ],
)
def test_what_cannot_be_followed_is_refused_by_name_and_hurts_nobody(cluster: Cluster, constraint: object) -> None:
    with cluster.client() as client:
        with pytest.raises(InvalidArgumentError) as caught:
            client.generate([5, 6], SamplingParams(structured_outputs=constraint), seed=1)  # type: ignore[arg-type]
        assert caught.value.field.startswith("sampling_params.structured_outputs")
        _serves(client)


def test_an_output_that_becomes_too_ambiguous_ends_with_an_error(cluster: Cluster) -> None:
    """It may end as it should before. No tokens of its own end it, and the engine goes on."""
    grammar = 'start: a\na: a a a | b a c | "x" | "xx" | ""\nb: a a | "y"\nc: a b | c c | "x"'
    params = SamplingParams(max_tokens=200, structured_outputs={"grammar": grammar}, logit_bias={509: -100.0})
    with cluster.client() as client:
        with pytest.raises(InvalidArgumentError, match="structured_outputs"):
            client.generate([5, 6], params, seed=1)
        _serves(client)


def _serves(client: Client) -> None:
    assert client.generate([5, 6], SamplingParams(max_tokens=2), seed=1).token_ids
