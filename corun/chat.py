"""Render chats into prompts with the template that a model brings.

A template is a program that comes with a model. It runs in jinja2's sandbox, so it reads no files and calls nothing but
what transformers gives templates. What bounds its time is the size of the chat: callers bound that. This module must
not know tokens, and loads neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from corun import strict_json
from corun.errors import InvalidArgumentError, Shown, UnavailableError
from corun.types import SpecialToken, TemplateSource

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
TOKENS_FILE = "special_tokens_map.json"
MAX_FILE_BYTES = 16 * 1024 * 1024
"""The most bytes of each file that is read. Configurations that list every added token have a few MiB."""
MAX_TEMPLATE = 1024 * 1024
"""The most characters of a template."""
MAX_ARGUMENTS = 256 * 1024
"""The most characters that the arguments of a chat's tool calls may have as text. Python's parser holds the interpreter
while it reads them."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking")
"""The fields that a message may have."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that it may have, which are those of OpenAI's API. Most templates would write a misspelt one, too."""
_EMPTY = ("refusal", "annotations", "audio", "function_call")
"""Fields of the messages that OpenAI's package writes. They may be null or an empty list, and are left out."""
_REASONING = ("reasoning", "reasoning_content")
"""The two names of one field."""
OWN = ("self", "messages", "tools", "add_generation_prompt")
"""The names that a template's own variables cannot have, since `render` has them."""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat template of one model. It may be used in several threads."""

    def __init__(self, source: TemplateSource, max_content: int | None = None) -> None:
        """Compile a template.

        max_content: the most characters that the contents of a chat may have together, and that its prompt may have;
            None: any number.

        Raises:
            InvalidArgumentError: the model has no chat template.
            UnavailableError: its chat template cannot be used.
        """
        if not source.source:
            limit = f"must have a chat template, in {TEMPLATE_FILE} or {CONFIG_FILE}: this model takes only prompts"
            raise InvalidArgumentError("chat_template", Shown("none"), limit)
        environment = _Environment()
        self._max_content = max_content
        self._tokens = {token.name: token.text for token in source.special_tokens}
        self._plain = _Compiled(environment, source.source)
        self._for_tools = _Compiled(environment, source.source_for_tools) if source.source_for_tools else self._plain

    @property
    def takes_tools(self) -> bool:
        """Whether a chat may have tools."""
        return self._for_tools.takes_tools

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the prompt of a chat. It has all special tokens, so it must be tokenized without adding more.

        messages: in OpenAI's shape; each has a role, and content as text or as a list of text parts. tools: in OpenAI's
        shape. add_generation_prompt: end with what begins the assistant's answer. kwargs: the template's own
        variables.

        Raises InvalidArgumentError, which names the field, if a message is malformed, or if the template knows no such
        variable or refuses the chat.
        """
        compiled = self._for_tools if tools else self._plain
        compiled.check_variables(tools, kwargs)
        read = _messages(messages, as_parts=compiled.takes_parts)
        self._check_size(read)
        variables = {
            **self._tokens,
            **kwargs,
            "messages": read,
            "tools": list(map(dict, tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return "".join(self._bounded(compiled.template.generate(variables)))
        except (MemoryError, InvalidArgumentError):
            raise
        except Exception as error:  # A template can raise anything. It met this chat, so the chat is what is refused.
            chat = Shown(f"{len(messages)} messages")
            raise InvalidArgumentError("messages", chat, f"the model's chat template refuses them: {error}") from error

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Raise InvalidArgumentError if the contents are too long. Templates that append each message to the text so
        far would take too long, too."""
        size = sum(map(_length, (message["content"] for message in messages)))
        if self._max_content is not None and size > self._max_content:
            limit = f"must be at most {self._max_content} characters of content together"
            raise InvalidArgumentError("messages", Shown(f"{size} characters"), limit)

    def _bounded(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield the pieces of a prompt. Raises InvalidArgumentError once they are too long, before there are more: a
        template may write a long variable with every message."""
        size = 0
        for piece in pieces:
            size += len(piece)
            if self._max_content is not None and size > self._max_content:
                found = Shown(f"more than {self._max_content} characters")
                limit = f"must be at most {self._max_content} characters when they are rendered"
                raise InvalidArgumentError("messages", found, limit)
            yield piece


class _Compiled:
    """One template, and what it takes."""

    def __init__(self, environment: _Environment, source: str) -> None:
        try:
            tree = environment.parse(source)
            self.template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnavailableError(f"the model's chat template cannot be used: {error}") from error
        self.takes_parts = _loops_over_content(tree)
        """Whether the template wants the content of messages as lists of parts."""
        self._variables = meta.find_undeclared_variables(tree)
        self.takes_tools = "tools" in self._variables

    def check_variables(self, tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]) -> None:
        if tools and not self.takes_tools:
            raise InvalidArgumentError("tools", tools, "must be null: the model's chat template has none")
        for name, value in kwargs.items():
            if name not in self._variables:
                limit = "is not a variable of the model's chat template"
                raise InvalidArgumentError(f"chat_template_kwargs.{name}", value, limit)


class _Generation(Extension):
    """The statement `generation`, which marks an assistant's text for training and is its content otherwise."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with what transformers gives them."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **kwargs: Any) -> str:
    """Return JSON without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Return whether a template has a loop over a message's content, by its name or by a name given to it."""
    assigned = {
        each.target.name
        for each in tree.find_all(nodes.Assign)
        if isinstance(each.target, nodes.Name) and _is_content(each.node)
    }
    loops = (_inner(each.iter) for each in tree.find_all(nodes.For))
    return any(_is_content(over) or (isinstance(over, nodes.Name) and over.name in assigned) for over in loops)


def _is_content(expression: nodes.Node) -> bool:
    found = _inner(expression)
    if isinstance(found, nodes.Getitem):
        return isinstance(found.arg, nodes.Const) and found.arg.value == "content"
    return isinstance(found, nodes.Getattr) and found.attr == "content"


def _inner(expression: nodes.Node) -> nodes.Node:
    """Return an expression without the filters around it."""
    while isinstance(expression, nodes.Filter) and expression.node is not None:
        expression = expression.node
    return expression


def _messages(messages: Sequence[Message], *, as_parts: bool) -> list[dict[str, Any]]:
    """Check messages and return them as a template wants them."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidArgumentError("messages", messages, "must be given as a list of messages, at least one")
    found = [_message(f"messages[{i}]", message, as_parts=as_parts) for i, message in enumerate(messages)]
    _read_arguments(found)
    return found


def _length(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _message(field: str, message: Any, *, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgumentError(field, message, "must be an object with role and content")
    message = {name: value for name, value in message.items() if not (name in _EMPTY and value in (None, []))}
    for name, value in message.items():
        if name not in _MESSAGE:
            limit = "must be null or empty: it is not supported" if name in _EMPTY else "is not a known field"
            raise InvalidArgumentError(f"{field}.{name}", value, limit)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidArgumentError(f"{field}.role", role, f"must be one of {', '.join(_ROLES)}")
    found = {name: value for name, value in message.items() if value is not None}  # To a template null is text.
    calls = _tool_calls(f"{field}.tool_calls", found.pop("tool_calls", ()))
    if "content" not in found and not calls and role != "assistant":
        limit = "must be text or text parts, unless there are tool_calls or the role is assistant"
        raise InvalidArgumentError(f"{field}.content", None, limit)
    found["content"] = _content(f"{field}.content", found.get("content", ()), as_parts=as_parts)
    found |= {"tool_calls": calls} if calls else {}  # To some templates an empty list is a list of calls.
    return found | _reasoning(field, found)


def _reasoning(field: str, message: Message) -> dict[str, Any]:
    """Return a message's reasoning under both of its names, since each template knows one of them."""
    given = [message[name] for name in _REASONING if name in message]
    if len(given) == 2 and given[0] != given[1]:
        raise InvalidArgumentError(f"{field}.reasoning_content", given[1], "must be null, or equal to reasoning")
    return dict.fromkeys(_REASONING, given[0]) if given else {}


def _content(field: str, content: Any, *, as_parts: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if as_parts else content
    if not isinstance(content, (list, tuple)):
        raise InvalidArgumentError(field, content, "must be text or a list of text parts")
    parts = [_part(f"{field}[{i}]", part) for i, part in enumerate(content)]
    return parts if as_parts else "\n".join(part["text"] for part in parts)


def _part(field: str, part: Any) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise InvalidArgumentError(field, part, "must be an object with type and text")
    if part.get("type") != "text":
        limit = "must be text: the model is given no images, audio, video or files"
        raise InvalidArgumentError(f"{field}.type", part.get("type"), limit)
    for name, value in part.items():
        if name not in ("type", "text"):
            raise InvalidArgumentError(f"{field}.{name}", value, "is not a known field")
    if not isinstance(part.get("text"), str):
        raise InvalidArgumentError(f"{field}.text", part.get("text"), "must be text")
    return {"type": "text", "text": part["text"]}


def _tool_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Return copies of tool calls, with arguments that are not read yet."""
    if not isinstance(calls, (list, tuple)):
        raise InvalidArgumentError(field, calls, "must be a list of tool calls")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidArgumentError(f"{field}[{i}]", call, "must be an object with function.name")
        arguments = function.get("arguments")
        found.append({**call, "function": {**function, "arguments": {} if arguments in (None, "") else arguments}})
    return found


def _read_arguments(messages: Sequence[Message]) -> None:
    """Turn the arguments of tool calls into objects, which templates expect. In OpenAI's API they are text."""
    functions = {
        f"messages[{i}].tool_calls[{j}].function.arguments": call["function"]
        for i, message in enumerate(messages)
        for j, call in enumerate(message.get("tool_calls", ()))
    }
    texts = (each["arguments"] for each in functions.values())
    if (size := sum(len(text) for text in texts if isinstance(text, str))) > MAX_ARGUMENTS:
        limit = f"must have at most {MAX_ARGUMENTS} characters in the arguments of all tool_calls together"
        raise InvalidArgumentError("messages", Shown(f"{size} characters"), limit)
    for field, function in functions.items():
        function["arguments"] = _arguments(field, function["arguments"])


def _arguments(field: str, given: Any) -> Mapping[str, Any]:
    try:
        found = strict_json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        limit = f"must be a JSON object, or text of one, of finite numbers and at most {strict_json.MAX_DEPTH} levels"
        raise InvalidArgumentError(field, given, limit)
    return found


def read_template(path: str | Path) -> TemplateSource:
    """Read the template in a model's folder: chat_template.jinja, else that of tokenizer_config.json.

    Raises UnavailableError if a file cannot be read.
    """
    folder = Path(path)
    config = _read_json(folder / CONFIG_FILE)
    sources = _sources(folder, config)
    for name, text in sources.items():
        if len(text) > MAX_TEMPLATE:
            raise UnavailableError(f"the chat template {name} has more than {MAX_TEMPLATE} characters")
    tokens = _tokens({**_read_json(folder / TOKENS_FILE), **config})
    return TemplateSource(
        source=sources.get("default", ""),
        source_for_tools=sources.get("tool_use", ""),
        special_tokens=tuple(SpecialToken(name=name, text=text) for name, text in sorted(tokens.items())),
    )


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a model's templates by name. Files of their own count for more than the configuration."""
    given = config.get("chat_template") or []
    listed = [{"name": "default", "template": given}] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(map(_is_named, listed)):
        limit = "chat_template must be text, or a list of objects with name and template"
        raise UnavailableError(f"{CONFIG_FILE} cannot be used: {limit}")
    named = {each["name"]: each["template"] for each in listed}
    files = {"default": folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))}
    read = {name: text for name, path in files.items() if (text := _read(path)) is not None}
    return {**named, **read}


def _is_named(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in ("name", "template"))


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by their names."""
    found = {name: config.get(name) for name in _TOKENS}
    extra = config.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    texts = {name: each.get("content") if isinstance(each, dict) else each for name, each in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    text = _read(path)
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnavailableError(f"{path.name} cannot be read: it is not a JSON object")
    return found


def _read(path: Path) -> str | None:
    """Return the text of a file; None if there is no file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UnavailableError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnavailableError(f"{path.name} cannot be read: {error.strerror}") from error  # The path is not told.
    except ValueError as error:
        raise UnavailableError(f"{path.name} cannot be read: it must be UTF-8") from error
