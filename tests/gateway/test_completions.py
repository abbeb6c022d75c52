"""Completions over HTTP, with a real router over fake nodes: every field, and bits equal to the SDK's."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest

from corun.client.client import AsyncClient
from corun.params import SamplingParams, derive_seed, sample_seed
from corun.testing.engines import MAX_MODEL_LEN, VOCAB_SIZE, expected, expected_alternatives
from corun.types import Priority
from router.text import Tokenizer
from tests.clusters import FakeCluster, cluster
from tests.gateway.serving import PROMPT, check_choice, joined, serving

ALL = {"logprobs": 0, "return_token_ids": True}
FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.25, {"top_p": 0.25}),
    "top_k": (7, {"top_k": 7}),
    "top_k of vLLM": (-1, {"top_k": 0}),
    "min_p": (0.125, {"min_p": 0.125}),
    "max_tokens": (3, {"max_tokens": 3}),
    "min_tokens": (2, {"min_tokens": 2}),
    "stop": ("\x01\x02", {"stop": ("\x01\x02",)}),
    "stop of several": (["\x01\x02", "\x03\x04\x05"], {"stop": ("\x01\x02", "\x03\x04\x05")}),
    "stop_token_ids": ([3, 4], {"stop_token_ids": (3, 4)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (-1, {"frequency_penalty": -1.0}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "logit_bias": ({"5": 1.5, "6": -2}, {"logit_bias": {5: 1.5, 6: -2.0}}),
}
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "user": ["somebody"],
    "metadata": [{"a": "b"}],
    "safety_identifier": ["x"],
    "echo": [False, None],
    "prompt_cache_key": ["x"],
    "best_of": [1, None],
    "suffix": ["", None],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "skip_special_tokens": [True],
    "add_special_tokens": [True],
    "prompt_logprobs": [None],
    "bad_words": [[]],
    "response_format": [{"type": "text"}],
    "logit_bias": [None],
    "temperature": [None],
    "max_tokens": [None],
    "stop": [None],
    "stream": [None, False],
    "stream_options": [None],
    "return_tokens_as_token_ids": [True, False, None],
    "priority": [0, -1, 5, "high", "low"],
}


def slow(fake: FakeCluster) -> None:
    """So that every token has a message of its own, on a busy machine as well."""
    for node in fake.nodes:
        node.engine.step_ms = 50.0


async def test_every_field_reaches_the_sampler_or_has_no_effect(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for name, (value, meaning) in FIELDS.items():
            params = SamplingParams(**{"max_tokens": 6, **meaning})
            answer = await http.complete(**{"max_tokens": 6, "seed": 9, **ALL, name.partition(" ")[0]: value})
            check_choice(answer["choices"][0], params, 9)
            # The control: the hash is of this parameter, too.
            other = SamplingParams(max_tokens=6, **({"top_k": 1} if name == "top_k of vLLM" else {}))
            assert expected(PROMPT, params, 9)[:2] != expected(PROMPT, other, 9)[:2], name
        plain = await http.complete(seed=9, request_id="r")
        for name, values in WITHOUT_EFFECT.items():
            for value in values:
                answer = await http.complete(seed=9, request_id="r", **{name: value})
                assert {**answer["choices"][0], "corun": 0} == {**plain["choices"][0], "corun": 0}, name


@pytest.mark.parametrize("prompt", [PROMPT, "some text", range(VOCAB_SIZE)], ids=["ids", "text", "whole vocabulary"])
async def test_whole_stream_and_sdk_give_the_same_bits(model: str, prompt: Any) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, n=3, logprobs=True)
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0.7, "n": 3, "seed": 41, **ALL}
    async with cluster(model) as fake, serving(fake) as http, AsyncClient(fake.address) as client:
        sdk = await client.generate(prompt, params, seed=41)
        whole = await http.complete(**fields)
        events = await http.stream(**fields)
    for sample in sdk.samples:
        choice, streamed = whole["choices"][sample.index], joined(events, sample.index)
        assert choice["index"] == sample.index
        check_choice(choice, params, sample_seed(41, sample.index), sdk.prompt_token_ids)
        assert (choice["text"], choice["token_ids"]) == (sample.text, list(sample.token_ids))
        assert choice["logprobs"]["token_logprobs"] == list(sample.logprobs)
        assert choice["prompt_token_ids"] == list(sdk.prompt_token_ids)
        assert choice["corun"]["receipt"]["output_digest"] == sample.receipt.output_digest
        for varies in (choice, streamed):  # The nodes' generations are equal; the request ids are not.
            del varies["corun"]["receipt"]["request_id"]
        assert streamed == choice
    tokens = sum(len(sample.token_ids) for sample in sdk.samples)
    size = len(sdk.prompt_token_ids)
    assert whole["usage"] == {"prompt_tokens": size, "completion_tokens": tokens, "total_tokens": size + tokens}
    assert whole["system_fingerprint"] == sdk.receipt.fingerprint


async def test_the_shape_of_responses_and_streams(model: str) -> None:
    usages = {"include_usage": True, "continuous_usage_stats": True}
    async with cluster(model) as fake, serving(fake) as http:
        answer = await http.complete(max_tokens=2, request_id="mine", seed=1)
        slow(fake)
        *chunks, usage = await http.stream(max_tokens=4, seed=1, stream_options={"include_usage": True})
        counted = await http.stream(prompt="abc", max_tokens=4, seed=1, stream_options=usages)
    begin, choice = {"id", "object", "created", "model", "choices"}, {"index", "text", "logprobs", "finish_reason"}
    assert set(answer) == {*begin, "usage", "system_fingerprint"}
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", Path(model).name)
    assert set(answer["choices"][0]) == {*choice, "corun"}
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["corun"]["receipt"]["request_id"] == "mine"
    assert len(chunks) == 4, "the last token and the end are one event"
    for number, event in enumerate(chunks):
        assert set(event["choices"][0]) == choice | ({"corun"} if number in (0, 3) else set())
        assert set(event) == begin | ({"system_fingerprint"} if number == 3 else set())
    assert chunks[0]["choices"][0]["corun"] == {"seed": 1}
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
    assert usage["system_fingerprint"] == chunks[-1]["system_fingerprint"] != ""
    assert [event["usage"]["completion_tokens"] for event in counted] == [1, 2, 3, 4, 4]
    assert {event["usage"]["prompt_tokens"] for event in counted} == {3}


async def test_log_probabilities_have_vllms_shape(model: str) -> None:
    ids, values, _ = expected(PROMPT, SamplingParams(max_tokens=2), 3)
    texts = texts_of(model, ids)
    async with cluster(model) as fake, serving(fake) as http:
        for count, as_ids in ((0, None), (1, False), (1, True), (4, True)):
            names = [f"token_id:{token_id}" for token_id in ids] if as_ids else texts
            answer = await http.complete(max_tokens=2, seed=3, logprobs=count, return_tokens_as_token_ids=as_ids)
            assert answer["choices"][0]["logprobs"] == {
                "text_offset": [0, len(texts[0])],
                "token_logprobs": values,
                "tokens": names,
                "top_logprobs": [
                    {
                        f"token_id:{other}": its
                        for other, its in zip(*expected_alternatives(token_id, value, count)[:2], strict=True)
                    }
                    if as_ids and count
                    else {name: value}
                    for token_id, name, value in zip(ids, names, values, strict=True)
                ],
            }


def texts_of(model: str, ids: list[int]) -> list[str]:
    """What each of the fakes' tokens, which are bytes, completes."""
    decoder, tokenizer = codecs.getincrementaldecoder("utf-8")("replace"), Tokenizer.load(model)
    texts = [decoder.decode(tokenizer.token_bytes(token_id)) for token_id in ids]
    texts[-1] += decoder.decode(b"", final=True)
    return texts


@pytest.mark.parametrize("paced", [False, True], ids=["at once", "each"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_have_texts_that_add_up(model: str, stream: bool, paced: bool) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        if paced:
            slow(fake)
        for seed in range(4 if paced else 40):  # Some end within a character.
            fields = {"max_tokens": 9, "seed": seed, "n": 2, "logprobs": 0, "return_token_ids": True}
            if stream:
                events = await http.stream(**fields)
                choices = [joined(events, index) for index in range(2)]
            else:
                choices = (await http.complete(**fields))["choices"]
            for choice in choices:
                found = choice["logprobs"]
                assert found["tokens"] == texts_of(model, choice["token_ids"])
                assert "".join(found["tokens"]) == choice["text"]
                assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(9)]
                assert [list(top) for top in found["top_logprobs"]] == [[text] for text in found["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_stop_string_cuts_off_is_of_tokens_too(model: str, stream: bool) -> None:
    """As in vLLM: tokens are whole, and the text ends where the stop string begins."""
    params = SamplingParams(max_tokens=60, stop=("a",))
    outputs = {seed: texts_of(model, expected(PROMPT, params, seed)[0]) for seed in range(100)}
    seed, texts = next((seed, texts) for seed, texts in outputs.items() if "a" in "".join(texts[10:50]))
    last = next(index for index, text in enumerate(texts) if "a" in text)
    fields = {"max_tokens": 60, "seed": seed, "logprobs": 0, "stop": "a"}
    async with cluster(model) as fake, serving(fake) as http:
        choice = joined(await http.stream(**fields)) if stream else (await http.complete(**fields))["choices"][0]
    assert (choice["finish_reason"], choice["logprobs"]["tokens"]) == ("stop", texts[: last + 1])
    assert choice["text"] == "".join(texts).partition("a")[0]


async def test_openais_own_client_reads_log_probabilities(model: str) -> None:
    openai = pytest.importorskip("openai")
    async with cluster(model) as fake, serving(fake) as http:
        client = openai.AsyncOpenAI(base_url=http.gateway.url + "/v1", api_key="EMPTY", max_retries=0)
        async with client:
            (card,) = (await client.models.list()).data
            asked = {"model": card.id, "prompt": list(PROMPT), "max_tokens": 8, "seed": 3, "logprobs": 1}
            whole = (await client.completions.create(**asked)).choices[0]
            parts = [event.choices[0] async for event in await client.completions.create(**asked, stream=True)]
            with pytest.raises(openai.NotFoundError, match="there is no such path here"):
                await client.embeddings.create(model=card.id, input="a")
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(**{**asked, "model": "another"})
    assert card.id == Path(model).name
    assert "".join(whole.logprobs.tokens) == whole.text == "".join(part.text for part in parts)
    assert whole.logprobs.tokens == [token for part in parts for token in part.logprobs.tokens]
    assert whole.logprobs.text_offset == [offset for part in parts for offset in part.logprobs.text_offset]
    assert len(whole.logprobs.token_logprobs) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_answered_in_their_order(model: str, stream: bool) -> None:
    params = SamplingParams(max_tokens=5, n=2)
    fields = {"prompt": [[1, 2], "ab", [9]], "n": 2, "max_tokens": 5, "seed": 4, "request_id": "r", **ALL}
    async with cluster(model) as fake, serving(fake) as http:
        if stream:
            events = await http.stream(**fields, stream_options={"include_usage": True})
            choices, usage = [joined(events, i) for i in range(6)], events[-1]["usage"]
        else:
            answer = await http.complete(**fields)
            choices, usage = answer["choices"], answer["usage"]
    prompts = [(1, 2), tuple(choices[2]["prompt_token_ids"]), (9,)]
    for index, choice in enumerate(choices):
        check_choice(choice, params, sample_seed(4, index % 2), prompts[index // 2])
        assert choice["corun"]["receipt"]["request_id"] == f"r-{index // 2}"
    assert usage == {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}


async def test_a_request_without_a_seed_gets_one_that_gives_it_again(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        first = await http.complete(request_id="r", **ALL)
        headers = {"X-Request-Id": "r"}
        _, again, _ = await http.post({"prompt": list(PROMPT), "request_id": "s", **ALL}, headers=headers)
        other = await http.complete(**ALL)
        seed = first["choices"][0]["corun"]["seed"]
        given = await http.complete(seed=seed, **ALL)
    assert seed == sample_seed(derive_seed(bytes(32), "r"), 0)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"] == given["choices"][0]["token_ids"]
    assert other["choices"][0]["corun"]["seed"] != seed
    assert again["id"] == "cmpl-r"


async def test_an_empty_header_is_no_id(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        for fields in ({"request_id": "mine"}, {}):
            answers = [
                (await http.post({"prompt": list(PROMPT), **fields}, headers={"X-Request-Id": ""}))[1] for _ in range(2)
            ]
            ids = [answer["id"] for answer in answers]
            assert ids == ["cmpl-mine"] * 2 if fields else len({*ids, "cmpl-"}) == 3


async def test_priorities_reach_the_router(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Priority] = []
    async with cluster(model) as fake, serving(fake) as http:
        accept = fake.router.requests.accept

        async def noting(request: Any, deadline: float) -> Any:
            seen.append(request.priority)
            return await accept(request, deadline)

        monkeypatch.setattr(fake.router.requests, "accept", noting)
        for priority in (-3, 0, 3, "high", "low", None):
            await http.complete(priority=priority, max_tokens=1)
    high, normal, low = Priority.HIGH, Priority.NORMAL, Priority.LOW
    assert seen == [high, normal, low, high, low, normal]


@pytest.mark.parametrize("served_name", ["", "mine"])
async def test_the_model_has_a_name(model: str, served_name: str, asked: list[Any]) -> None:
    name = served_name or Path(model).name
    async with cluster(model) as fake, serving(fake, served_name=served_name) as http:
        status, answer = await http.get("/v1/models")
        card = answer["data"][0]
        assert (status, card["id"], card["max_model_len"]) == (200, name, MAX_MODEL_LEN)
        for known in (name, card["root"]):  # vllm bench serve sends the root to /tokenize.
            assert await http.get(f"/v1/models/{known}") == (200, card)
            assert (await http.complete(model=known))["model"] == name
            assert (await http.answer({"model": known, "prompt": "a"}, "/tokenize"))["tokens"]
        assert await http.get("/health") == (200, {"status": "ok"})
        assert (await http.get("/version"))[1]["version"]
        assert (await http.complete())["model"] == name
        for other in ("other", str(Path(card["root"]).parent)):
            assert (await http.get(f"/v1/models/{other}"))[0] == 404
            status, answer, _ = await http.post({"prompt": "a", "model": other})
            assert (status, answer["error"]["type"]) == (404, "not_found_error")
            assert f"'{other}'" in answer["error"]["message"]
    assert all(one.without_contracts for one in asked), "a router takes its time for them, and a client could ask often"
