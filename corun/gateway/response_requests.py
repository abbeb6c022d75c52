"""Read a request for /v1/responses: its items become the messages of a chat, and its fields those of one.

What is stored elsewhere in OpenAI's API is refused here by name: this gateway keeps nothing. This module must not know
HTTP, nor what answers look like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from corun.errors import InvalidArgumentError, Shown, renaming
from corun.gateway.chats import ChatRequest, chat_request
from corun.gateway.requests import Fixed, check_known, flag, read_json, stream_options, text
from corun.params import check_text

_SAME = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls"),
    # Not OpenAI's; as in chats.
    *("seed", "request_id", "priority", "top_k", "min_p", "stop", "stop_token_ids", "chat_template_kwargs"),
    *("user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention", "service_tier"),
)
"""The fields that mean the same in a chat."""
_OWN = ("input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "stream_options")
_STORED = "must be null: nothing is stored here, so each request has its whole conversation as input"
_FIXED: Fixed = {
    "store": ((False,), "must be false or null, which means false here: nothing is stored"),
    "previous_response_id": ((), _STORED),
    "conversation": ((), _STORED),
    "background": ((False,), "must be false: an answer that nobody waits for would have to be stored"),
    "prompt": ((), "must be null: no prompts are stored here"),
    "include": (([],), "must be empty: /v1/chat/completions gives log probabilities"),
    "top_logprobs": ((0,), "must be 0: /v1/chat/completions gives log probabilities"),
    "max_tool_calls": ((), "must be null: the cluster calls no tools itself"),
    "reasoning": ((), "must be null; chat_template_kwargs sets the variables of the model's chat template"),
    "truncation": (("disabled",), 'must be "disabled": prompts are never cut'),
    "context_management": ((), "must be null: prompts are never cut"),
    "moderation": ((), "must be null: not supported"),
    "prompt_cache_options": ((), "must be null: the cluster shares prompts by itself"),
}
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""The names of a chat's fields here."""
_MESSAGE = ("type", "role", "content", "id", "status", "phase")
_CALL = ("type", "call_id", "name", "arguments", "id", "status")
_OUTPUT = ("type", "call_id", "output", "id", "status")
_PART = ("type", "text", "annotations", "logprobs")
_FORMATS = ("type", "name", "description", "schema", "strict")
MAX_METADATA = 16
"""The most pairs of `metadata`, as at OpenAI."""
MAX_METADATA_KEY = 64
"""The most characters of a key there."""
MAX_METADATA_VALUE = 512
"""The most characters of a value there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRequest:
    """A request for the answer to a conversation."""

    chat: ChatRequest
    told: Mapping[str, Any]
    """What the answer repeats of the request."""
    sources: Mapping[str, str]
    """The fields of the request by those of the chat's messages that were made of them, for errors: a client knows the
    items that it sent, and not the messages."""


def read_response_request(body: bytes, *, request_id: str | None = None) -> ResponseRequest:
    """Read a request. Errors and arguments are those of `read_request`."""
    fields = read_json(body)
    check_known(fields, (*_SAME, *_OWN), _FIXED)
    instructions, found = text(fields, "instructions"), _text_format(fields.get("text"))
    tools, choice = _tools(fields.get("tools")), _tool_choice(fields)
    stream_options(fields, ())
    asked: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
    asked |= {"max_completion_tokens": fields.get("max_output_tokens"), "tools": tools, "tool_choice": choice}
    asked["response_format"] = found.get("chat")
    asked["messages"], sources = _messages(instructions, fields.get("input"))
    with named(sources):
        chat = chat_request(asked, request_id=request_id)
    names = {**chat.asked.names, "prompt": "input", "max_tokens": "max_output_tokens"}
    names |= {"structured_outputs": "text.format"} if asked["response_format"] else {}
    told = {
        "instructions": instructions,
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": _metadata(fields.get("metadata")),
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "temperature": chat.asked.params.temperature,
        "text": {"format": found["told"]},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_p": chat.asked.params.top_p,
        "user": text(fields, "user"),
    }
    asked_for = replace(chat, asked=replace(chat.asked, names=names))
    return ResponseRequest(chat=asked_for, told=told, sources=sources)


def named(sources: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
    """Name fields in errors as a client of this API knows them. sources: as in `ResponseRequest`."""
    names = {**(sources or {}), **_NAMES}

    def known(field: str) -> str:
        for chats in sorted(names, key=len, reverse=True):  # A call's item before that of its message.
            if field.startswith(chats):
                field = names[chats] + field[len(chats) :].replace("json_schema.", "")
                break
        return field.replace(".function.", ".")

    return renaming(known)


def _metadata(value: Any) -> Mapping[str, str]:
    """Return the metadata, which the answer repeats. Clients expect text there, so nothing else is accepted."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgumentError("metadata", value, "must be an object of text to text")
    if len(value) > MAX_METADATA:
        raise InvalidArgumentError("metadata", Shown(f"{len(value)} pairs"), f"must be at most {MAX_METADATA}")
    for name, each in value.items():
        if len(name) > MAX_METADATA_KEY:
            raise InvalidArgumentError("metadata", name, f"must have keys of at most {MAX_METADATA_KEY} characters")
        check_text(f"metadata.{name}", each, MAX_METADATA_VALUE, min_length=0)
    return value


def _check_described(field: str, value: Mapping[str, Any]) -> None:
    """Check what a tool or a format says of itself. The answer repeats it, and nothing else reads all of it."""
    found = {f"{field}.{name}": value.get(name) for name in ("name", "description", "strict")}
    text(found, f"{field}.name")
    text(found, f"{field}.description")
    flag(found, f"{field}.strict")


def _text_format(value: Any) -> dict[str, Any]:
    """Return a format as the answer repeats it, and as a chat has it."""
    if value is not None and (not isinstance(value, dict) or not value.keys() <= {"format", "verbosity"}):
        raise InvalidArgumentError("text", Shown("a value"), "must be an object with format")
    if value and value.get("verbosity") not in (None, "medium"):
        raise InvalidArgumentError("text.verbosity", value["verbosity"], 'must be null or "medium": not supported')
    form = (value or {}).get("format")
    if form is None:
        return {"told": {"type": "text"}}
    if not isinstance(form, dict) or not form.keys() <= set(_FORMATS):
        raise InvalidArgumentError("text.format", Shown("a value"), f"must be an object of {', '.join(_FORMATS)}")
    if form.get("type") != "json_schema":
        return {"told": form, "chat": form}
    _check_described("text.format", form)
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"told": form, "chat": {"type": "json_schema", "json_schema": schema}}


def _tools(value: Any) -> Any:
    """Return tools as a chat has them."""
    if value is None or not isinstance(value, list):
        return value
    found = []
    for i, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            limit = 'must be "function": the cluster has no tools of its own'
            raise InvalidArgumentError(f"tools[{i}].type", Shown("a value"), limit)
        _check_described(f"tools[{i}]", tool)
        found.append({"type": "function", "function": {name: each for name, each in tool.items() if name != "type"}})
    return found


def _tool_choice(fields: Mapping[str, Any]) -> Any:
    """Return a choice as a chat has it. Here "auto" is also the choice where there are no tools."""
    value = fields.get("tool_choice")
    if value == "auto" and not fields.get("tools"):
        return None
    if isinstance(value, dict) and value.keys() == {"type", "name"}:
        return {"type": value["type"], "function": {"name": value["name"]}}
    return value


def _messages(instructions: str | None, value: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the messages that the instructions and the items of an input are, and the `sources` of the request."""
    found: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*found, {"role": "user", "content": value}], {}
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("input", value, "must be given as text, or as a list of items, not empty")
    sources: dict[str, str] = {}
    for i, item in enumerate(value):
        field = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            _check_fields(field, item, _MESSAGE)
            role = "system" if item.get("role") == "developer" else item.get("role")
            sources[f"messages[{len(found)}]"] = field
            found.append({"role": role, "content": _content(f"{field}.content", item.get("content"))})
        elif kind == "function_call":
            _check_fields(field, item, _CALL)
            name = check_text(f"{field}.name", item.get("name"), min_length=0)
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = found[-1].setdefault("tool_calls", [])
            sources[f"messages[{len(found) - 1}].tool_calls[{len(calls)}].function"] = field
            function = {"name": name, "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            _check_fields(field, item, _OUTPUT)
            output = _content(f"{field}.output", item.get("output"))
            sources[f"messages[{len(found)}].content"] = f"{field}.output"
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            limit = "must be message, function_call or function_call_output"
            raise InvalidArgumentError(f"{field}.type", Shown(str(kind)[:64]), limit)
    return found, sources


def _check_fields(field: str, item: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise InvalidArgumentError for a field that is not known. It may be null, since OpenAI's package dumps items with
    all fields of its version."""
    for name, value in item.items():
        if name not in known and value is not None:
            raise InvalidArgumentError(f"{field}.{name}", Shown("a value"), "is not a known field")


def _content(field: str, value: Any) -> Any:
    """Return contents as a chat has them."""
    if not isinstance(value, list):
        return value
    found = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text"):
            limit = "must be input_text or output_text: the model is given text only"
            raise InvalidArgumentError(f"{field}[{i}].type", Shown("a value"), limit)
        _check_fields(f"{field}[{i}]", part, _PART)
        found.append({"type": "text", "text": part.get("text")})
    return found
