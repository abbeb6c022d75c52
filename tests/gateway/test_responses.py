"""/v1/responses by OpenAI's own client: items in and out, whole and streamed. What would be stored is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from corun.chat import ChatTemplate, read_template
from corun.errors import InvalidArgumentError
from corun.gateway.response_requests import named, read_response_request
from corun.testing.engines import expected
from corun.types import TemplateSource
from router.text import Tokenizer
from tests.clusters import cluster
from tests.gateway.serving import serving
from tests.gateway.test_tool_calls import QWEN
from tests.gateway.test_tools import ARGUMENTS, CALLED, ENDS, SCHEMA, said, tool_model

__all__ = ["said", "tool_model"]
PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "description": "It tells.", "parameters": SCHEMA}]
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
    {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "a", "output": "5"},
]
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "5"}


def read(**fields: Any) -> Any:
    return read_response_request(json.dumps({"input": "x", **fields}).encode())


def test_items_become_messages() -> None:
    chat = read(input=ITEMS, instructions="Help.").chat.chat
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
    ]
    assert chat.messages == [
        {"role": "system", "content": "Help."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]


def test_unknown_fields_of_items_may_be_null() -> None:
    """OpenAI's package writes all that its version knows when items are dumped."""
    part = {"type": "input_text", "text": "Hi", "later": None}
    items = [{"role": "user", "content": [part], "later": None}, {**CALL, "async": None}, {**OUTPUT, "later": None}]
    plain = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, CALL, OUTPUT]
    assert read(input=items).chat.chat.messages == read(input=plain).chat.chat.messages


def test_fields_are_those_of_a_chat() -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    made = read(max_output_tokens=7, temperature=0.5, top_p=0.25, seed=3, text={"format": form}, store=False)
    params = made.chat.asked.params
    assert (params.max_tokens, params.temperature, params.top_p, made.chat.asked.seed) == (7, 0.5, 0.25, 3)
    assert json.loads(params.constraint[1]) == SCHEMA
    assert made.told["text"] == {"format": form}
    named = read(tools=TOOLS, tool_choice={"type": "function", "name": "get_weather"}).chat.use
    assert (named.choice, named.is_named) == ("get_weather", True)
    assert read().told["tool_choice"] == "auto"


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
def test_the_model_may_choose_among_no_tools(tools: dict[str, Any]) -> None:
    """An answer without tools says that the choice is auto, and clients send what they were told."""
    made = read(tool_choice="auto", **tools)
    assert (made.chat.use, made.told["tool_choice"], made.told["tools"]) == (None, "auto", [])
    with pytest.raises(InvalidArgumentError, match=r"^tool_choice = "):
        read(tool_choice="required", **tools)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"messages": []}, "messages"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input[0].more"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**TOOLS[0], "description": 5}]}, "tools[0].description"),
    ({"tools": [{**TOOLS[0], "name": 5}], "tool_choice": "none"}, "tools[0].name"),
    ({"tools": [{**TOOLS[0], "strict": 5}]}, "tools[0].strict"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"temperature": 5}, "temperature"),
    ({"user": 5}, "user"),
    ({"metadata": []}, "metadata"),
    ({"metadata": "a"}, "metadata"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {"a": None}}, "metadata.a"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"k" * 65: "a"}}, "metadata"),
    ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "name": 5}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "description": []}}}, "text.format.description"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": "yes"}}}, "text.format.strict"),
]


@pytest.mark.parametrize(("fields", "name"), WRONG)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read(**fields)
    assert refused.value.field.removeprefix("sampling_params.") == name


SAID = {"role": "assistant", "content": "x"}
WRONG_ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"role": 5, "content": "x"}], "input[0].role"),
    ([CALL, CALL, {"role": "user", "content": 5}], "input[2].content"),
    ([{"role": "user", "content": "x"}, {**CALL, "arguments": "x"}], "input[1].arguments"),
    ([SAID, CALL, {**CALL, "arguments": "[]"}], "input[2].arguments"),
    ([{**CALL, "name": None}], "input[0].name"),
    ([CALL, {**OUTPUT, "output": 5}], "input[1].output"),
    ([CALL, {**OUTPUT, "output": [{"type": "input_text", "text": 5}]}], "input[1].output[0].text"),
    ([CALL, CALL, {"role": "user", "content": [{"type": "input_text"}]}], "input[2].content[0].text"),
    ([CALL] * 11 + [{**CALL, "arguments": "x"}], "input[11].arguments"),
    ([CALL, *[OUTPUT] * 11, {"role": "user"}], "input[12].content"),
]


@pytest.mark.parametrize("instructions", [None, "Help."])
@pytest.mark.parametrize(("items", "name"), WRONG_ITEMS)
def test_an_error_names_the_item_that_was_sent(
    items: list[dict[str, Any]], name: str, instructions: str | None
) -> None:
    """Items and messages have other numbers, since instructions are a message and calls of one turn share one."""

    def rendered() -> None:
        request = read(input=items, instructions=instructions)
        with named(request.sources):
            request.chat.render(TemplateSource(source=QWEN), 10_000)

    with pytest.raises(InvalidArgumentError) as refused:
        rendered()
    assert refused.value.field == name


def test_what_an_answer_repeats_may_be_as_long_as_at_openai() -> None:
    metadata = {f"{number:064}": "x" * 512 for number in range(16)}
    assert read(metadata=metadata, user="").told["metadata"] == metadata
    assert (read(metadata=None).told["metadata"], read(user="u").told["user"]) == ({}, "u")


async def test_openais_own_client_gets_responses(chat_model: str) -> None:
    """The bits are those of the chat with these messages."""
    openai = pytest.importorskip("openai")
    asked: dict[str, Any] = {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 8}
    seed = {"extra_body": {"seed": 3}}

    def blocking(url: str) -> tuple[Any, list[Any]]:
        with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0) as client:
            name = client.models.list().data[0].id
            whole = client.responses.create(model=name, **asked, **seed)
            return whole, list(client.responses.create(model=name, stream=True, **asked, **seed))

    async with cluster(chat_model) as fake, serving(fake) as http:
        whole, events = await asyncio.to_thread(blocking, http.gateway.url)
        async with async_client(http.gateway.url) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=whole.model, **asked, store=True)
            with pytest.raises(openai.BadRequestError) as long:
                await client.responses.create(model=whole.model, input="x" * 600)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(whole.id)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        _, chat, _ = await http.post({"messages": messages, "max_tokens": 8, "seed": 3}, "/v1/chat/completions")
    assert whole.output_text == chat["choices"][0]["message"]["content"]
    assert (whole.status, whole.incomplete_details.reason, whole.store) == ("incomplete", "max_output_tokens", False)
    prompt = Tokenizer.load(chat_model).encode(ChatTemplate(read_template(chat_model)).render(messages), special=False)
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(prompt), 8)
    ids = expected(prompt, read(max_output_tokens=8).chat.asked.params, 3)[0]
    assert whole.corun["receipt"]["num_output_tokens"] == len(ids)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert refused.value.param == "store"
    assert long.value.param == "input"


def async_client(url: str) -> Any:
    return pytest.importorskip("openai").AsyncOpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0)


async def test_calls_are_items(tool_model: str, said: list[str]) -> None:
    asked: dict[str, Any] = {"input": "Hi", "tools": TOOLS, "max_output_tokens": 200}
    asked["extra_body"] = {"seed": 3, "stop_token_ids": ENDS["stop_token_ids"]}
    said[0] += " Done."
    async with cluster(tool_model) as fake, serving(fake) as http, async_client(http.gateway.url) as client:
        name = (await client.models.list()).data[0].id
        whole = await client.responses.create(model=name, **asked)
        async with client.responses.stream(model=name, **asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        output = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "5"}
        talk = {"input": [{"role": "user", "content": "Hi"}, *whole.output, output], "max_output_tokens": 1}
        more = await client.responses.create(model=name, **talk)
        talk["input"][1:-1] = [item.model_dump(mode="json", by_alias=True) for item in whole.output]
        again = await client.responses.create(model=name, **talk)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call", "message"]
    assert (whole.status, whole.output_text) == ("completed", "Let me see. Done.")
    assert [(item.name, item.arguments) for item in whole.output[1:3]] == CALLED
    fields = [[getattr(item, "call_id", ""), getattr(item, "arguments", "")] for item in whole.output]
    assert [[getattr(item, "call_id", ""), getattr(item, "arguments", "")] for item in final.output] == fields
    assert more.usage.input_tokens > whole.usage.input_tokens - len(json.dumps(TOOLS)), "its items can be sent back"
    assert again.usage.input_tokens == more.usage.input_tokens
    pieces = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in pieces if event.output_index == 1) == ARGUMENTS
    assert len(pieces) > 5
