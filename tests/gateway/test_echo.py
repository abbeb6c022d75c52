"""Prompts that are echoed with log probabilities over HTTP, with a real router over fake nodes."""

from __future__ import annotations

from typing import Any

import pytest

from corun.params import SamplingParams
from corun.receipt import output_digest
from corun.testing.engines import MAX_MODEL_LEN, expected, expected_scores
from router.text import Tokenizer
from tests.clusters import cluster
from tests.gateway.serving import PROMPT, serving

IDS = (72, 105, 33, 34, 35)
"""The fake tokenizer has a token for each byte."""


def columns(ids: tuple[int, ...], *, tops: bool) -> dict[str, list[Any]]:
    """Return the columns of a prompt whose tokens are named by ids, without offsets."""
    found = expected_scores(ids, len(ids) - 1)
    named = []
    for token_id, logprob, top, top_logprob in zip(
        ids[1:], found.logprobs, found.top_token_ids, found.top_logprobs, strict=True
    ):
        named.append({f"token_id:{token_id}": logprob} | ({f"token_id:{top}": top_logprob} if tops else {}))
    return {
        "token_logprobs": [None, *found.logprobs],
        "tokens": [f"token_id:{token_id}" for token_id in ids],
        "top_logprobs": [None, *named],
    }


@pytest.mark.parametrize("logprobs", [0, 1])
async def test_a_prompt_is_scored_and_nothing_is_drawn(model: str, logprobs: int) -> None:
    fields = {"prompt": list(IDS), "echo": True, "max_tokens": 0, "logprobs": logprobs, "return_token_ids": True}
    async with cluster(model) as fake, serving(fake) as http:
        answer = await http.complete(**fields, return_tokens_as_token_ids=True)
        assert fake.node("d1").engine.most_running == 0
        fingerprint = fake.router.registry.contract.fingerprint
    (choice,) = answer["choices"]
    wanted = columns(IDS, tops=bool(logprobs))
    assert {name: choice["logprobs"][name] for name in wanted} == wanted
    assert (choice["finish_reason"], choice["text"]) == ("length", Tokenizer.load(model).decode(IDS))
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(IDS), [])
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    assert answer["system_fingerprint"] == fingerprint
    scores = expected_scores(IDS, 4)
    assert choice["corun"]["echo"]["output_digest"] == output_digest(IDS[1:], scores.logprobs)
    assert choice["corun"]["echo"]["equals_generation"] is False


async def test_what_is_drawn_follows_the_prompts_scores(model: str) -> None:
    """What lm-eval sends: max_tokens 1, and the last token is dropped."""
    ids, values, _ = expected(IDS, SamplingParams(max_tokens=1, temperature=0.0), 7)
    fields = {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 7, "n": 2}
    async with cluster(model) as fake, serving(fake) as http:
        answer = await http.complete(prompt=[list(IDS), list(PROMPT)], **fields, return_tokens_as_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for number, prompt in ((0, IDS), (1, IDS), (2, PROMPT), (3, PROMPT)):
        found = answer["choices"][number]["logprobs"]
        assert found["token_logprobs"][: len(prompt)] == columns(tuple(prompt), tops=True)["token_logprobs"]
        assert len(found["token_logprobs"]) == len(found["tokens"]) == len(found["text_offset"]) == len(prompt) + 1
        assert answer["choices"][number]["corun"]["receipt"]
    assert answer["choices"][0]["logprobs"]["tokens"][-1] == f"token_id:{ids[0]}"
    assert answer["choices"][0]["logprobs"]["token_logprobs"][-1] == values[0]


async def test_tokens_have_texts_that_add_up_to_the_prompt(model: str) -> None:
    text = "h\N{GRINNING FACE}i"
    async with cluster(model) as fake, serving(fake) as http:
        answer = await http.complete(prompt=text, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    assert (choice["text"], "".join(found["tokens"])) == (text, text)
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]


async def test_special_tokens_of_a_prompt_have_their_spelling(chat_model: str) -> None:
    async with cluster(chat_model) as fake, serving(fake) as http:
        answer = await http.complete(prompt="ab", echo=True, logprobs=0, max_tokens=0)
        plain = await http.complete(prompt="ab", echo=True, logprobs=0, max_tokens=0, add_special_tokens=False)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert plain["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


async def test_a_prompt_of_one_token_has_nothing_to_score(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        answer = await http.complete(prompt=[72], echo=True, logprobs=1, max_tokens=0)
        assert fake.node("p1").engine.scored == []
    found = answer["choices"][0]["logprobs"]
    assert (found["token_logprobs"], found["top_logprobs"], found["text_offset"]) == ([None], [None], [0])
    assert answer["system_fingerprint"]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}, "n"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"echo": True, "logprobs": 2}, "logprobs"),
    ({"echo": True, "logprobs": 1, "prompt": [1, 999]}, "prompt[1]"),
    ({"echo": True, "logprobs": 1, "prompt": ["a", [1, 999]]}, "prompt[1][1]"),
    ({"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": [1] * (MAX_MODEL_LEN + 1)}, "prompt"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSALS)
async def test_refusals_name_the_field(model: str, fields: dict[str, Any], field: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        assert await http.refused({"prompt": list(PROMPT), **fields}) == field
