"""Constraints as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corun.errors import InvalidArgumentError
from corun.gateway.chats import read_chat_request
from corun.gateway.requests import read_request
from corun.params import SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{"type":"integer"}}}'


def both(**fields: Any) -> list[SamplingParams]:
    """Read the fields in a completion and in a chat."""
    completion = json.dumps({"prompt": "x", **fields}).encode()
    chat = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    return [read_request(completion, max_prompts=1).params, read_chat_request(chat).asked.params]


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **more}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json", '{"type":"object"}')),
        ({"response_format": schema(SCHEMA, strict=True)}, ("json", TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, ("json", TEXT)),
        ({"structured_outputs": {"json": TEXT, "regex": None}}, ("json", TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("grammar", 'root ::= "a"')),
        ({"structured_outputs": None, "response_format": None}, None),
    ],
)
def test_a_constraint_is_read(fields: dict[str, Any], constraint: tuple[str, str] | None) -> None:
    assert [params.constraint for params in both(**fields)] == [constraint] * 2


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema(5)}, "response_format.json_schema.schema"),
        ({"response_format": schema({"a": "x" * 70_000})}, "response_format.json_schema.schema"),
        ({"response_format": schema(SCHEMA), "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "sampling_params.structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "sampling_params.structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "sampling_params.min_tokens"),
    ],
)
def test_what_is_no_constraint_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        both(**fields)
    assert caught.value.field == name


def test_errors_of_nodes_name_the_field_that_the_client_sent() -> None:
    field = "sampling_params.structured_outputs.json"
    body = {"prompt": "x", "response_format": schema(SCHEMA)}
    assert read_request(json.dumps(body).encode(), max_prompts=1).named(field, 0) == "response_format"
    for beside in ({}, {"response_format": None}, {"response_format": {"type": "text"}}):
        body = {"prompt": "x", "structured_outputs": {"json": SCHEMA}, **beside}
        asked = read_request(json.dumps(body).encode(), max_prompts=1)
        assert asked.named(field, 0) == "structured_outputs.json"
