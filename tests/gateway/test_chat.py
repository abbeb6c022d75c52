"""Chats over HTTP, with a real router over fake nodes: the model's template, every field, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.chat import ChatTemplate, read_template
from corun.client.client import AsyncClient
from corun.completion import Chunk
from corun.gateway import streams
from corun.gateway.chat_responses import CHAT as CHAT_SHAPE
from corun.gateway.chats import _FIXED_OF_CHATS, Chat, read_chat_request
from corun.params import SamplingParams, sample_seed
from corun.receipt import prompt_digest
from corun.testing.engines import MAX_MODEL_LEN, expected, expected_alternatives
from router.text import Tokenizer
from tests.clusters import cluster
from tests.gateway.serving import Http, check_choice, serving
from tests.gateway.test_completions import FIELDS as COMPLETION_FIELDS
from tests.gateway.test_completions import slow, texts_of
from tests.over_fakes import SPECIAL

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \N{GRINNING FACE}"}]
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IDS = {"return_token_ids": True, "logprobs": True}


def tokens(model: str, messages: Any = MESSAGES, **kwargs: Any) -> tuple[int, ...]:
    """The prompt of a chat, made without a gateway."""
    text = ChatTemplate(read_template(model)).render(messages, **kwargs)
    return Tokenizer.load(model).encode(text, special=False)


async def chat(http: Http, **fields: Any) -> Any:
    return await http.answer({"messages": MESSAGES, **fields}, CHAT)


async def stream(http: Http, **fields: Any) -> list[Any]:
    return await http.events({"messages": MESSAGES, **fields}, CHAT)


def joined(events: list[Any], index: int = 0) -> Any:
    """The choice that the events of a stream add up to."""
    parts = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    first, *rest = parts
    assert first["delta"] == {"role": "assistant", "content": ""}, "the role comes first"
    assert all(set(part["delta"]) == {"content"} for part in rest)
    assert all(part["finish_reason"] is None for part in parts[:-1])
    logprobs = [entry for part in rest for entry in (part["logprobs"] or {"content": []})["content"]]
    return {
        "index": index,
        "message": {"role": "assistant", "content": "".join(part["delta"]["content"] for part in parts)},
        "logprobs": {"content": logprobs} if rest[0]["logprobs"] else None,
        "finish_reason": parts[-1]["finish_reason"],
        "token_ids": [token_id for part in rest for token_id in part["token_ids"]],
        "corun": parts[-1]["corun"],
    }


@pytest.mark.parametrize("paced", [False, True], ids=["at once", "each"])
async def test_whole_stream_and_sdk_give_the_same_bits(chat_model: str, paced: bool) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.7, n=3, logprobs=True)
    fields = {"max_tokens": 12, "temperature": 0.7, "n": 3, "seed": 41, **IDS}
    prompt = tokens(chat_model)
    async with cluster(chat_model) as fake, serving(fake) as http, AsyncClient(fake.address) as client:
        if paced:
            slow(fake)
        sdk = await client.generate(prompt, params, seed=41)
        whole = await chat(http, **fields)
        events = await stream(http, **fields)
    assert prompt.count(SPECIAL["<s>"]) == 1, "the template's own first token, and no other"
    assert whole["prompt_token_ids"] == events[0]["prompt_token_ids"] == list(prompt)
    for sample in sdk.samples:
        choice, streamed = whole["choices"][sample.index], joined(events, sample.index)
        check_choice(choice, params, sample_seed(41, sample.index), prompt, whole=False)
        assert choice["message"] == {"role": "assistant", "content": sample.text}
        assert choice["token_ids"] == list(sample.token_ids)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(sample.logprobs)
        assert choice["corun"]["receipt"]["output_digest"] == sample.receipt.output_digest
        for varies in (choice, streamed):  # The nodes' generations are equal; the request ids are not.
            del varies["corun"]["receipt"]["request_id"]
        assert streamed == choice
    count = sum(len(sample.token_ids) for sample in sdk.samples)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    assert whole["usage"] == usage
    assert whole["system_fingerprint"] == events[-1]["system_fingerprint"] == sdk.receipt.fingerprint


async def test_the_shape_of_answers_and_streams(chat_model: str) -> None:
    usages = {"include_usage": True, "continuous_usage_stats": True}
    async with cluster(chat_model) as fake, serving(fake) as http:
        answer = await chat(http, max_tokens=2, request_id="mine", seed=1)
        slow(fake)
        *chunks, usage = await stream(
            http, max_tokens=4, seed=1, stream_options={"include_usage": True, "include_obfuscation": False}
        )
        counted = await stream(http, max_tokens=4, seed=1, stream_options=usages)
    begin = {"id", "object", "created", "model", "choices"}
    assert set(answer) == {*begin, "usage", "system_fingerprint"}
    assert (answer["id"], answer["object"], answer["model"]) == (
        "chatcmpl-mine",
        "chat.completion",
        Path(chat_model).name,
    )
    assert set(answer["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "corun"}
    assert answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(chunks) == 5, "the role, and an event a token; the last token and the end are one"
    for number, event in enumerate(chunks):
        own = {"corun"} if number in (1, 4) else set()
        assert set(event["choices"][0]) == {"index", "delta", "logprobs", "finish_reason", *own}
        assert set(event) == begin | ({"system_fingerprint"} if number == 4 else set())
        assert event["object"] == "chat.completion.chunk"
    size = len(tokens(chat_model))
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": size, "total_tokens": size + 4, "completion_tokens": 4}
    assert [event["usage"]["completion_tokens"] for event in counted] == [0, 1, 2, 3, 4, 4]


def test_choices_begin_in_their_order() -> None:
    """OpenAI's package puts choices in the order in which they begin, and breaks if another one than the first does."""
    asked = replace(read_chat_request(json.dumps({"messages": MESSAGES, "n": 3}).encode()).asked, prompts=((1, 2),))
    events = CHAT_SHAPE.events(CHAT_SHAPE.head(asked, "m"), asked)
    chunk = Chunk(request_id="r", sample_index=2, seed=1, text="a", token_ids=(1,), logprobs=(0.0,))
    sent = [events.chunk(0, chunk), events.chunk(0, replace(chunk, sample_index=0))]
    told = [json.loads(each.removeprefix("data: ")) for text in sent for each in text.split("\n\n")[:-1]]
    choices = [choice for event in told for choice in event["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 2, 0]
    assert ["role" in choice["delta"] for choice in choices] == [True, True, True, False, False]


async def test_log_probabilities_have_openais_shape(chat_model: str) -> None:
    ids, values, _ = expected(tokens(chat_model), SamplingParams(max_tokens=4), 3)
    texts = texts_of(chat_model, ids)
    async with cluster(chat_model) as fake, serving(fake) as http:
        for as_ids, count in itertools.product((False, True), (0, 3)):
            fields = {"logprobs": True, "top_logprobs": count, "return_tokens_as_token_ids": as_ids}
            answer = await chat(http, max_tokens=4, seed=3, **fields)
            events = await stream(http, max_tokens=4, seed=3, **fields)
            names = [f"token_id:{token_id}" for token_id in ids] if as_ids else texts
            tops = [tops_of(chat_model, *drawn, count, as_ids=as_ids) for drawn in zip(ids, values, strict=True)]
            assert answer["choices"][0]["logprobs"] == {
                "content": [
                    {"token": name, "logprob": value, "bytes": list(text.encode()), "top_logprobs": beside}
                    for name, value, text, beside in zip(names, values, texts, tops, strict=True)
                ]
            }
            choices = [event["choices"][0] for event in events if event["choices"]]
            streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert streamed == answer["choices"][0]["logprobs"]["content"]


def tops_of(model: str, token_id: int, logprob: float, count: int, *, as_ids: bool) -> list[dict[str, Any]]:
    """The alternatives of a fake engine's token, in OpenAI's shape."""
    tops, tokenizer = expected_alternatives(token_id, logprob, count), Tokenizer.load(model)
    texts = tokenizer.texts_alone(tops.token_ids)
    names = [f"token_id:{each}" for each in tops.token_ids] if as_ids else texts
    return [
        {"token": name, "logprob": value, "bytes": list(text.encode())}
        for name, value, text in zip(names, tops.logprobs, texts, strict=True)
    ]


FIELDS = {**COMPLETION_FIELDS, "max_completion_tokens": (6, {"max_tokens": 6})}
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "user": ["somebody"],
    "metadata": [{"a": "b"}],
    "store": [False, None],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    "parallel_tool_calls": [True, False],
    "tools": [None, []],
    "tool_choice": [None, "none"],
    "response_format": [{"type": "text"}],
    "logprobs": [None, False, True],
    "top_logprobs": [0, None],
    "add_generation_prompt": [True, None],
    "chat_template_kwargs": [None, {}, {"think": False}],
    "max_tokens": [6, None],
    "priority": [0, "high"],
}


async def test_every_field_reaches_the_sampler_or_has_no_effect(chat_model: str) -> None:
    prompt = tokens(chat_model)
    async with cluster(chat_model) as fake, serving(fake) as http:
        for name, (value, meaning) in FIELDS.items():
            params = SamplingParams(**{"max_tokens": 6, **meaning})
            answer = await chat(http, **{"max_tokens": 6, "seed": 9, **IDS, name.partition(" ")[0]: value})
            assert answer["choices"][0]["token_ids"] == expected(prompt, params, 9)[0], name
        plain = await chat(http, seed=9, max_completion_tokens=6, request_id="r", return_token_ids=True)
        for name, values in WITHOUT_EFFECT.items():
            for value in values:
                fields = {"seed": 9, "max_completion_tokens": 6, "return_token_ids": True, name: value}
                answer = await chat(http, **fields)
                assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"], (name, value)
                assert answer["usage"] == plain["usage"], (name, value)


async def test_the_template_gets_what_the_request_says(chat_model: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [tool_call]}]
    special = [{"role": "user", "content": "<s><|im_end|>"}]
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"messages": parts}, tokens(chat_model, [{"role": "user", "content": "a\nb"}])),
        ({"messages": talk, "add_generation_prompt": False}, tokens(chat_model, talk, add_generation_prompt=False)),
        ({"tools": [TOOL], "tool_choice": "none"}, tokens(chat_model, tools=[TOOL])),
        ({"chat_template_kwargs": {"think": True}}, tokens(chat_model, think=True)),
        ({"messages": special}, tokens(chat_model, special)),
    ]
    assert len({prompt for _, prompt in cases}) == len(cases)
    async with cluster(chat_model) as fake, serving(fake) as http:
        for fields, prompt in cases:
            answer = await chat(http, max_tokens=1, return_token_ids=True, **fields)
            assert answer["prompt_token_ids"] == list(prompt)
            assert answer["choices"][0]["corun"]["receipt"]["prompt_digest"] == prompt_digest(prompt)


async def test_a_chat_that_names_no_limit_may_be_long(chat_model: str) -> None:
    room = MAX_MODEL_LEN - len(tokens(chat_model))
    async with cluster(chat_model) as fake, serving(fake) as http, serving(fake, chat_max_tokens=20) as short:
        assert (await chat(http, ignore_eos=True))["usage"]["completion_tokens"] == room
        assert (await chat(short, ignore_eos=True))["usage"]["completion_tokens"] == 20
        assert (await chat(short, ignore_eos=True, max_tokens=30))["usage"]["completion_tokens"] == 30


REFUSED: dict[str, list[Any]] = {
    "messages": [None, [], "a", ["a"], [{"role": "user", "content": "x" * 600}], [{"role": "user"}]],
    "messages[0].content[0].type": [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]],
    "tools": [[TOOL], "f", [1]],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "top_logprobs": [1, -1, 21, True, "1"],
    "logprobs": [1, "yes"],
    "max_completion_tokens": [0, "many", 600],
    "max_tokens": [0, 600, 2**31 - 1, 10**30],
    "min_tokens": [600],
    "chat_template_kwargs": [1, {"no_such_variable": 1}, {"messages": []}, {"self": 1}],
    "add_generation_prompt": [1],
    "temperature": [-1, 2.5],
    "n": [0, 1000],
    "seed": [-1, "1"],
    "stop": [5],
    "logit_bias": [{"300": 1}],
    "stream": [1],
    "prompt": ["a"],
    "best_of": [1],
    "messagse": [[]],
    "store": [True],
    **{name: [["something else"]] for name in _FIXED_OF_CHATS},
}


async def test_what_cannot_be_done_is_refused_by_name(chat_model: str) -> None:
    async with cluster(chat_model) as fake, serving(fake) as http:
        for field, values in REFUSED.items():
            name = field.partition("[")[0]
            for value in values:
                for streamed in (False, True):
                    named = await http.refused({"messages": MESSAGES, "stream": streamed, name: value}, CHAT)
                    assert named.startswith(field), (field, value)
        for old, new in ((5, 6), (True, 1), (1.0, 1)):
            both = {"messages": MESSAGES, "max_tokens": old, "max_completion_tokens": new}
            assert await http.refused(both, CHAT) == "max_tokens"
        hidden = {"messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": True}}
        assert await http.refused(hidden, CHAT) == "stream_options.include_obfuscation"
        assert (await http.post({"messages": MESSAGES, "model": "other"}, CHAT))[0] == 404


async def test_a_model_without_a_template_takes_prompts_only(model: str) -> None:
    async with cluster(model) as fake, serving(fake) as http:
        status, answer, _ = await http.post({"messages": MESSAGES}, CHAT)
        assert (status, answer["error"]["param"]) == (400, "chat_template")
        assert "must have a chat template" in answer["error"]["message"]
        assert (await http.post({"prompt": "a", "max_tokens": 1}))[0] == 200


async def test_openais_own_client_chats(chat_model: str) -> None:
    openai = pytest.importorskip("openai")
    asked: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 8, "seed": 3, "logprobs": True}

    until: dict[str, Any] = {"extra_body": {"stop_token_ids": list(range(64))}}

    def blocking(url: str) -> tuple[Any, list[Any]]:
        with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
            name = client.models.list().data[0].id
            return client.chat.completions.create(model=name, **asked), list(
                client.chat.completions.create(model=name, stream=True, stream_options={"include_usage": True}, **asked)
            )

    async with cluster(chat_model) as fake, serving(fake) as http:
        whole, events = await asyncio.to_thread(blocking, http.gateway.url)
        async with openai.AsyncOpenAI(base_url=http.gateway.url + "/v1", api_key="EMPTY", max_retries=0) as client:
            name = whole.model
            again = await client.chat.completions.create(model=name, **asked)
            parts = [event async for event in await client.chat.completions.create(model=name, stream=True, **asked)]
            async with client.chat.completions.stream(model=name, **asked, **until) as manager:
                final = await manager.get_final_completion()
            stopped = await client.chat.completions.create(model=name, **asked, **until)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=name, **{**asked, "top_logprobs": 21})
    message = whole.choices[0].message
    assert (message.role, whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("assistant", "length", 8)
    assert again.choices[0].message.content == message.content
    assert final.choices[0].message.content == stopped.choices[0].message.content
    assert (final.choices[0].finish_reason, stopped.choices[0].finish_reason) == ("stop", "stop")
    for chunks in (events, parts):
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == message.content
        found = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert found == whole.choices[0].logprobs.content
    assert events[-1].usage == whole.usage
    assert whole.system_fingerprint == again.system_fingerprint
    assert refused.value.param == "top_logprobs"
    assert "must be an integer in [0, 20]" in refused.value.message


async def test_a_gateway_that_ends_tells_the_chats_that_it_renders(
    chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering, go_on = threading.Event(), threading.Event()

    def stall(*_: Any) -> str:
        rendering.set()
        go_on.wait()
        return "late"

    monkeypatch.setattr(Chat, "render", stall)
    async with cluster(chat_model) as fake, serving(fake, drain_grace_s=0.05) as http:
        asked = [asyncio.ensure_future(http.post({"messages": MESSAGES}, path)) for path in (CHAT, "/tokenize")]
        await fake.until(lambda: rendering.is_set() and http.gateway.activity.running == 2)
        try:
            await http.gateway.drain()
            await http.gateway.stop()
            for status, answer, _ in await asyncio.gather(*asked):
                assert (status, "shutting down" in answer["error"]["message"]) == (503, True)
        finally:
            go_on.set()


async def test_chats_that_take_long_are_answered(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Chat, "render", lambda *_: str(go_on.wait()))
    async with cluster(chat_model) as fake, serving(fake, timeout_s=0.2) as http:
        status, answer, _ = await http.post({"messages": MESSAGES}, CHAT)
        go_on.set()
        assert (status, "not rendered in 0.2 s" in answer["error"]["message"]) == (504, True)


async def test_text_becomes_tokens_and_text_again(chat_model: str) -> None:
    text = "<|im_start|>a \N{GRINNING FACE}"
    plain = Tokenizer.load(chat_model).encode(text, special=False)
    marked = (SPECIAL["<s>"], *plain)
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"prompt": text}, marked),
        ({"prompt": text, "add_special_tokens": False}, plain),
        ({"messages": MESSAGES}, tokens(chat_model)),
        ({"messages": MESSAGES, "add_generation_prompt": False}, tokens(chat_model, add_generation_prompt=False)),
        ({"prompt": text, **dict.fromkeys(("messages", "tools", "chat_template_kwargs", "chat_template"))}, marked),
        ({"messages": MESSAGES, "prompt": None, "tools": None}, tokens(chat_model)),
    ]
    async with cluster(chat_model) as fake, serving(fake) as http:
        for fields, ids in cases:
            status, answer, _ = await http.post(fields, "/tokenize")
            wanted = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": list(ids), "token_strs": None}
            assert (status, answer) == (200, wanted)
        _, answer, _ = await http.post({"prompt": text, "return_token_strs": True}, "/tokenize")
        assert answer["token_strs"][:3] == ["<s>", "<|im_start|>", "a"]
        status, answer, _ = await http.post({"tokens": plain, "model": Path(chat_model).name}, "/detokenize")
        assert (status, answer) == (200, {"prompt": text})
        for path, body, field in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": None, "messages": None}, "prompt"),
            ("/tokenize", {"prompt": ""}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "x" * 600}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
            ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
            ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
            ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [1, 256]}, "tokens[1]"),
            ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {"tokens": [1] * 600}, "tokens"),
            ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"),
        ):
            assert await http.refused(body, path) == field, body
        assert (await http.post({"prompt": "a", "model": "other"}, "/tokenize"))[0] == 404


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a" * 300}), ("/detokenize", {"tokens": [97] * 300})]
)
async def test_long_answers_about_tokens_are_sent_in_pieces(
    model: str, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Each piece has to be taken in time. Else clients could leave any number of answers in the gateway's memory."""
    monkeypatch.setattr(streams, "PIECE", 100)
    async with cluster(model) as fake, serving(fake) as http:
        status, answer, headers = await http.post(body, path)
    assert (status, headers["Transfer-Encoding"], headers["Content-Type"][:16]) == (200, "chunked", "application/json")
    assert len(answer.get("prompt") or answer["tokens"]) >= 300


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_can_begin_with_its_prompt(chat_model: str, streamed: bool) -> None:
    text = "<|im_start|>a"
    ids = list(Tokenizer.load(chat_model).encode(text, special=False))
    fields = {"prompt": [ids, "b"], "max_tokens": 5, "seed": 4, "n": 2}
    async with cluster(chat_model) as fake, serving(fake) as http:
        plain = await http.complete(**fields)
        if streamed:
            events = await http.stream(**fields, echo=True)
            found = ["" for _ in range(4)]
            for event in events:
                for choice in event["choices"]:
                    found[choice["index"]] += choice["text"]
        else:
            found = [choice["text"] for choice in (await http.complete(**fields, echo=True))["choices"]]
        assert await http.refused({"prompt": ["a", [999]], "echo": True}) == "prompt[1][0]"
    texts = [choice["text"] for choice in plain["choices"]]
    assert found == [text + texts[0], text + texts[1], "b" + texts[2], "b" + texts[3]]


async def test_prompts_of_text_may_go_without_special_tokens(chat_model: str) -> None:
    async with cluster(chat_model) as fake, serving(fake) as http:
        fields = {"prompt": ["a", "<s>b"], "max_tokens": 1, "return_token_ids": True}
        for special in (True, False):
            answer = await http.complete(**fields, add_special_tokens=special)
            prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
            assert [prompt.count(SPECIAL["<s>"]) for prompt in prompts] == ([1, 2] if special else [0, 1])
