"""Tools of a chat: what a request says of them, what that does to its parameters, and how calls are read from answers.

This module must not know HTTP, nor how calls are written (`corun.gateway.tool_calls`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from corun.errors import InvalidArgumentError, Shown
from corun.gateway.tool_calls import CallReader, CallStyle, Parsed
from corun.params import SamplingParams

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION = ("name", "description", "parameters", "strict")
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The functions that an answer may call."""

    functions: Mapping[str, Any]
    """The JSON schemas of their arguments, by names."""
    choice: str
    """auto, required, or the name of the one that must be called."""
    is_named: bool
    """Whether the choice is a name. A function may be called "auto" or "required", too."""
    parallel: bool
    """Whether an answer may have several calls."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call, which a constraint sees to."""
        return self.is_named or self.choice != "auto"

    def constrained(self, params: SamplingParams, style: CallStyle) -> SamplingParams:
        """Return the parameters under which an answer is what the choice says. Raises InvalidArgumentError if they have
        another constraint."""
        if not self.is_forced:
            return params
        if params.constraint is not None:
            limit = (
                'must be "auto" or "none" beside response_format or structured_outputs: an output has one constraint'
            )
            raise InvalidArgumentError("tool_choice", self.choice, limit)
        names = [self.choice] if self.is_named else list(self.functions)
        several = self.parallel and not self.is_named
        grammar = style.grammar({name: self.functions[name] for name in names}, several=several)
        return replace(params, structured_outputs={"grammar": grammar})


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """How calls are read from the answers to one request."""

    use: ToolUse
    style: CallStyle
    prompt_digest: str

    def reader(self) -> CallReader:
        return CallReader(self.style, self.use.functions, several=self.use.parallel)

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """Return why an answer ended. As in OpenAI's API, an answer with calls ends for them, unless it was cut off or
        the request itself named the function."""
        return "tool_calls" if num_calls and reason == "stop" and not self.use.is_named else reason

    def id_of(self, seed: int, index: int) -> str:
        """Return the id of a call. It follows from prompt, seed and place, so the same request gets the same answer,
        and calls of later turns, which have other prompts, get other ids."""
        asked = f"{self.prompt_digest} {seed} {index}"
        return f"call_{hashlib.blake2b(asked.encode(), digest_size=12).hexdigest()}"


def deltas(parsed: Parsed, calls: Calls, seed: int) -> list[dict[str, Any]]:
    """Return the new output of calls in the shape of OpenAI's streams."""
    found: list[dict[str, Any]] = []
    for part in parsed.calls:
        function = {"arguments": part.arguments}
        delta: dict[str, Any] = {"index": part.index, "function": function}
        if part.name is not None:
            begun = {"index": part.index, "id": calls.id_of(seed, part.index), "type": "function"}
            delta = {**begun, "function": {"name": part.name, **function}}
        found.append(delta)
    return found


def message(text: str, calls: Calls, seed: int) -> tuple[dict[str, Any], int]:
    """Return a whole answer as OpenAI's message, and the number of its calls."""
    reader = calls.reader()
    parts = [reader.push(text), reader.finish()]
    found: list[dict[str, Any]] = []
    for delta in (each for part in parts for each in deltas(part, calls, seed)):
        number = delta.pop("index")
        if number == len(found):
            found.append(delta)
        else:
            found[number]["function"]["arguments"] += delta["function"]["arguments"]
    content = "".join(part.content for part in parts)
    if not found:
        return {"role": "assistant", "content": content}, 0
    return {"role": "assistant", "content": content or None, "tool_calls": found}, len(found)


def read_tool_use(fields: Mapping[str, Any]) -> ToolUse | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls` of a chat; None if no calls are to be read.

    Raises InvalidArgumentError, which names the field.
    """
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    check_tools(tools)
    chosen, is_named = _choice(choice)
    if not tools:
        if choice not in (None, "none"):
            raise InvalidArgumentError("tool_choice", choice, 'must be null or "none" without tools')
        return None
    if chosen == "none" and not is_named:
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidArgumentError("tools", Shown(f"{len(tools)} tools"), f"must be at most {MAX_TOOLS}")
    functions: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        function, schema = _function(f"tools[{i}]", tool)
        if function in functions:
            raise InvalidArgumentError(f"tools[{i}].function.name", function, "must be that of no other tool")
        functions[function] = schema
    if is_named and chosen not in functions:
        raise InvalidArgumentError("tool_choice", chosen, "must name one of the tools")
    parallel = fields.get("parallel_tool_calls") is not False
    return ToolUse(functions=functions, choice=chosen, is_named=is_named, parallel=parallel)


def check_tools(value: Any) -> None:
    if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
        raise InvalidArgumentError("tools", value, "must be a list of objects")


def _choice(value: Any) -> tuple[str, bool]:
    """Return a choice by its word or its function's name, and whether it is a name. Without one, the model chooses."""
    if value is None or value in ("none", "auto", "required"):
        return value or "auto", False
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(value) != {"type", "function"}:
        limit = 'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
        raise InvalidArgumentError("tool_choice", Shown("a value"), limit)
    return name, True


def _function(field: str, tool: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a function's name and the schema of its arguments."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidArgumentError(f"{field}.type", tool.get("type"), 'must be "function", with function')
    for name in function:
        if name not in _FUNCTION:
            raise InvalidArgumentError(f"{field}.function.{name}", Shown("a value"), "is not a known field")
    if not isinstance(name := function.get("name"), str) or not _NAME.fullmatch(name):
        limit = "must be 1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidArgumentError(f"{field}.function.name", name, limit)
    schema = _ANY_ARGUMENTS if function.get("parameters") is None else function["parameters"]
    if not isinstance(schema, dict):
        raise InvalidArgumentError(f"{field}.function.parameters", Shown("a value"), "must be a JSON schema, an object")
    return name, schema if "type" in schema else {**_ANY_ARGUMENTS, **schema}
