"""Tool calls over HTTP: what a request may say of tools, and what its answers say of calls, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corun.chat import ChatTemplate, read_template
from corun.completion import Chunk
from corun.errors import InvalidArgumentError
from corun.gateway.chat_responses import CHAT as CHAT_SHAPE
from corun.gateway.chats import call_style, read_chat_request
from corun.gateway.tools import message
from corun.params import SamplingParams
from corun.testing import engines
from corun.types import TemplateSource
from router.text import Tokenizer
from tests.clusters import cluster
from tests.gateway.serving import Http, serving
from tests.gateway.test_tool_calls import HERMES, LLAMA, QWEN
from tests.over_fakes import SPECIAL

MESSAGES = [{"role": "user", "content": "Weather?"}]
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "It tells.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "strict": True}},
]
ARGUMENTS = '{"city": "Zürich 😀"}'
TEXT = (
    f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "stop", "arguments": {}}\n</tool_call>'
)
CALLED = [("get_weather", ARGUMENTS), ("stop", "{}")]


@pytest.fixture(scope="module")
def tool_model(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tool-model") / "model"
    shutil.copytree(chat_model, folder)
    (folder / "chat_template.jinja").write_text(QWEN + "{{ bos_token }}", encoding="utf-8")
    return str(folder)


@pytest.fixture
def said(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text that fake engines draw, and then the end token."""
    texts, tokenizer = [TEXT], Tokenizer.load(chat_model)

    def token(prompt: Any, params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
        ids = (*tokenizer.encode(texts[0], special=False), SPECIAL["<|im_end|>"])
        return ids[min(position, len(ids) - 1)], -1.0

    monkeypatch.setattr(engines, "token", token)
    return texts


ENDS = {"stop_token_ids": [SPECIAL["<|im_end|>"]], "max_completion_tokens": 200}


async def whole(http: Http, **fields: Any) -> Any:
    return await http.answer({"messages": MESSAGES, "tools": TOOLS, **ENDS, **fields}, CHAT)


async def streamed(http: Http, **fields: Any) -> list[Any]:
    return await http.events({"messages": MESSAGES, "tools": TOOLS, **ENDS, **fields}, CHAT)


def calls_of(message: Any) -> list[tuple[str, str]]:
    assert {call["type"] for call in message.get("tool_calls", ())} <= {"function"}
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def joined(events: list[Any], index: int = 0) -> Any:
    """The message that the events of a stream add up to, and its end."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    content, calls = "", dict[int, Any]()
    for delta in (choice["delta"] for choice in choices):
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls[part["index"]] = {"id": part["id"], "type": part["type"], "function": dict(part["function"])}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    made = {"role": "assistant", "content": content or None} | ({"tool_calls": list(calls.values())} if calls else {})
    return made, choices[-1]["finish_reason"]


async def test_calls_are_read_from_answers_whole_and_streamed_alike(tool_model: str, said: list[str]) -> None:
    async with cluster(tool_model) as fake, serving(fake) as http:
        answer = await whole(http, n=2, seed=3)
        again, events = await whole(http, n=2, seed=3), await streamed(http, n=2, seed=3)
        first, second = (choice["message"] for choice in answer["choices"])
        assert first["content"] == "Let me see."
        assert calls_of(first) == calls_of(second) == CALLED
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"tool_calls"}
        ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
        assert len(set(ids)) == 4
        assert [choice["message"] for choice in again["choices"]] == [first, second], "ids follow from the request"
        for index, message in enumerate((first, second)):
            assert joined(events, index) == (message, "tool_calls")
        # Arguments come in pieces, and tokens of tags bring nothing.
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert {} in deltas
        assert sum("tool_calls" in delta for delta in deltas) > 8
        later = await whole(http, seed=3, messages=[{"role": "user", "content": "And then?"}])
        assert not {call["id"] for call in later["choices"][0]["message"]["tool_calls"]} & set(ids)
        cut = await whole(http, max_completion_tokens=70)
        (choice,) = cut["choices"]
        assert choice["finish_reason"] == "length"
        ((name, arguments),) = calls_of(choice["message"])
        assert (name, ARGUMENTS.startswith(arguments)) == ("get_weather", True)
        none = await whole(http, tool_choice="none")
        assert none["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
        said[0] = "No."
        free = await whole(http)
        assert free["choices"][0]["message"] == {"role": "assistant", "content": "No."}
        assert (free["choices"][0]["finish_reason"], joined(await streamed(http))[1]) == ("stop", "stop")


def asked(template: str = QWEN, **fields: Any) -> Any:
    """The request that a cluster gets for a chat with tools."""
    body = {"messages": MESSAGES, "tools": TOOLS, **fields}
    chat = read_chat_request(json.dumps(body).encode())
    _, style = chat.render(TemplateSource(source=template), 10**6)
    return chat.with_prompt((1, 2), style, 100, 50)


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_a_choice_that_forces_a_call_is_a_constraint(template: str) -> None:
    """What the constraint allows is tested with its own reader (tests/corun/test_tool_calls.py)."""
    assert asked(template, tool_choice="auto").params.constraint is None
    assert asked(template).params.constraint is None
    kind, text = asked(template, tool_choice="required").params.constraint
    assert (kind, text.count("%json")) == ("grammar", 2)
    one = asked(template, tool_choice="required", parallel_tool_calls=False).params.constraint[1]
    assert ("*" in text.split("%json")[0]) is (template == QWEN)
    assert "*" not in one.split("%json")[0]
    named = asked(template, tool_choice={"type": "function", "function": {"name": "stop"}})
    assert named.params.constraint[1].count("%json") == 1
    assert "get_weather" not in named.params.constraint[1]
    assert named.calls.finish_reason("stop", 1) == "stop", "as in OpenAI's API"
    assert named.names["structured_outputs"] == "tools"


@pytest.mark.parametrize(("parallel", "names"), [(True, ["get_weather", "stop"]), (False, ["get_weather"])])
def test_an_answer_has_one_call_if_no_more_are_wanted(parallel: bool, names: list[str]) -> None:
    said, num_calls = message(TEXT, asked(QWEN, parallel_tool_calls=parallel).calls, 7)
    assert [call["function"]["name"] for call in said["tool_calls"]] == names
    assert num_calls == len(names)


def test_a_long_prompt_is_read_once_for_the_ids_of_all_calls() -> None:
    """They are made in the loop that carries all streams, and a prompt may have 100,000 tokens."""

    class Prompt(tuple[int, ...]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            Prompt.reads += 1
            return super().__iter__()

    def ids(prompt: Prompt) -> list[str]:
        chat = read_chat_request(json.dumps({"messages": MESSAGES, "tools": TOOLS}).encode())
        request = chat.with_prompt(prompt, HERMES, 10, 5)
        chunk = Chunk(request_id="r", sample_index=0, seed=1, text=TEXT, token_ids=(), logprobs=())
        text = CHAT_SHAPE.events(CHAT_SHAPE.head(request, "m"), request).chunk(0, chunk)
        return re.findall(r"call_[0-9a-f]+", text)

    first, second = ids(Prompt((1, 2)))
    assert (Prompt.reads, first == second, ids(Prompt((1, 2)))) == (1, False, [first, second])
    assert not {first, second} & set(ids(Prompt((1, 3))))


LARGE = {"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 70_000}}}


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_function_may_be_called_what_a_choice_is_called(name: str) -> None:
    """A choice by name is that function, not the word."""
    function = {"type": "function", "function": {"name": name}}
    chosen = asked(QWEN, tools=[*TOOLS, function], tool_choice=function)
    assert (chosen.calls.use.is_forced, chosen.calls.use.is_named) == (True, True)
    assert chosen.params.constraint[1].count("%json") == 1
    assert chosen.calls.finish_reason("stop", 1) == "stop"
    assert asked(QWEN, tools=[*TOOLS, function], tool_choice="required").params.constraint[1].count("%json") == 3
    assert asked(QWEN, tools=[*TOOLS, function]).params.constraint is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "more": 1}}]}, "tools[0].function.more"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ({"tools": [TOOLS[0]] * 129}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "auto"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "none"}}, "tools": None}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tool_choice": "required", "min_tokens": 2}, "min_tokens"),
    ({"tool_choice": "required", "tools": [TOOLS[1], LARGE]}, "tools.grammar"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), WRONG)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        asked(**fields)
    assert refused.value.field.removeprefix("sampling_params.") == name


@pytest.mark.parametrize(
    "template", ["{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "{{ messages }}"]
)
def test_a_model_that_writes_no_calls_takes_no_tools(template: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        asked(template)
    assert refused.value.field == "tools"
    assert "the model's chat template" in refused.value.limit
    assert asked(template, tools=None).calls is None
    assert asked(template, tool_choice="none").calls is None


def test_a_template_that_takes_no_tools_gets_none_where_none_may_be_called() -> None:
    def rendered(**fields: Any) -> str:
        read = read_chat_request(json.dumps({"messages": MESSAGES, **fields}).encode())
        return read.render(TemplateSource(source="{{ messages }}"), 10**6)[0]

    assert rendered(tools=TOOLS, tool_choice="none") == rendered()
    with pytest.raises(InvalidArgumentError, match=r"^tools = \[\{.*: must be null"):
        rendered(tools=TOOLS)


def test_tools_of_a_template_are_what_the_request_says() -> None:
    template = ChatTemplate(TemplateSource(source=QWEN))
    assert json.dumps(TOOLS[1]) in template.render(MESSAGES, TOOLS)


async def test_openais_own_client_calls_tools(tool_model: str, said: list[str]) -> None:
    openai = pytest.importorskip("openai")
    fields: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS[:1], "max_completion_tokens": 200, "seed": 3}
    fields["extra_body"] = {"stop_token_ids": ENDS["stop_token_ids"]}

    def blocking(url: str) -> Any:
        with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
            return client.chat.completions.create(model=client.models.list().data[0].id, **fields)

    async with cluster(tool_model) as fake, serving(fake) as http:
        (choice,) = (found := await asyncio.to_thread(blocking, http.gateway.url)).choices
        first = choice.message.tool_calls[0]
        async with openai.AsyncOpenAI(base_url=http.gateway.url + "/v1", api_key="EMPTY", max_retries=0) as client:
            async with client.chat.completions.stream(model=found.model, **fields) as manager:
                final = (await manager.get_final_completion()).choices[0]
            talk = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": first.id, "content": "5"}]
            tools = {"tools": openai.omit, "tool_choice": "none"}
            more = await client.chat.completions.create(
                model=found.model, **{**fields, **tools, "max_completion_tokens": 1, "messages": talk}
            )
    assert choice.finish_reason == final.finish_reason == "tool_calls"
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    called = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert [(call.id, call.function.name, call.function.arguments) for call in final.message.tool_calls] == called
    assert more.choices[0].message.tool_calls is None


def test_the_models_folder_is_as_the_tests_say(tool_model: str) -> None:
    assert call_style(ChatTemplate(read_template(Path(tool_model)))) is not None
