"""Read the requests about chats and tokens: /v1/chat/completions, /tokenize and /detokenize.

A chat is read in two steps: its fields at once, and its prompt when the model's template has rendered it. This module
must not know HTTP.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from corun.chat import OWN, ChatTemplate
from corun.errors import InvalidArgumentError, Shown
from corun.gateway.errors import SAMPLING, naming
from corun.gateway.requests import (
    COMMON,
    FIXED,
    CompletionRequest,
    Fixed,
    check_known,
    count_of_tops,
    flag,
    read_common,
    read_json,
    read_params,
    text,
)
from corun.gateway.tool_calls import PROBE_MESSAGES, PROBE_TOOLS, CallStyle, style_of
from corun.gateway.tools import Calls, ToolUse, check_tools, read_tool_use
from corun.params import check_text, check_token_ids
from corun.receipt import prompt_digest
from corun.types import TemplateSource

_TEMPLATE = ("messages", "tools", "add_generation_prompt", "chat_template_kwargs")
_OF_CHATS = (*_TEMPLATE, "tool_choice", "top_logprobs", "max_completion_tokens")
_FIXED_TEMPLATE: Fixed = {
    "chat_template": ((), "must be null: a chat is rendered by the model's own template"),
    "continue_final_message": ((False,), "must be false: send a prompt to /v1/completions to go on with a text"),
    "add_special_tokens": ((False,), "must be false: the model's chat template writes them"),
    "mm_processor_kwargs": ((), "must be null: the model is given text only"),
}
_FIXED_OF_CHATS: Fixed = {
    **FIXED,
    **_FIXED_TEMPLATE,
    "echo": ((False,), "must be false: messages are not sent back"),
    "documents": ((), "must be null: not supported"),
    "modalities": ((["text"],), 'must be ["text"]'),
    "audio": ((), "must be null: the model writes text only"),
    "prediction": ((), "must be null: not supported"),
    "moderation": ((), "must be null: not supported"),
    "prompt_cache_options": ((), "must be null: the cluster shares prompts by itself"),
    "reasoning_effort": ((), "must be null; chat_template_kwargs sets the variables of the model's chat template"),
    "include_reasoning": ((True,), "must be true: reasoning is part of the text"),
    "verbosity": ((), "must be null: not supported"),
    "web_search_options": ((), "must be null: not supported"),
    "store": ((False,), "must be false: nothing is stored"),
    "service_tier": (("auto", "default"), 'must be "auto" or "default"; see priority'),
    "parallel_tool_calls": ((True, False), "must be true or false"),
    "functions": (([],), "must be null: see tools"),
    "function_call": (("none",), 'must be "none": see tools'),
    "media_io_kwargs": ((), "must be null: the model is given text only"),
    "return_prompt_text": ((False,), "must be false: /tokenize gives the prompt's tokens"),
    "return_metrics": ((False,), "must be false: not supported"),
}
_FIXED_OF_TOKENIZED_CHATS: Fixed = {**_FIXED_TEMPLATE, "prompt": ((), "must be null beside messages")}
_FIXED_OF_TOKENIZED_PROMPTS: Fixed = dict.fromkeys(
    (*_TEMPLATE, *_FIXED_TEMPLATE), ((), "must be null without messages: only chats have it")
)
_NO_LIMIT = 2**31 - 1
"""The output tokens of a chat that names no limit, until its prompt is known."""


_compiled = functools.lru_cache(maxsize=8)(ChatTemplate)
"""Compiles a template once, for as long as the routers tell the same one."""


@functools.lru_cache(maxsize=8)
def call_style(template: ChatTemplate) -> CallStyle | None:
    """Return how a template writes tool calls; None if it takes no tools, or writes calls in no style that is read."""
    try:
        return style_of(template.render(PROBE_MESSAGES, PROBE_TOOLS, add_generation_prompt=False))
    except InvalidArgumentError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Messages, and how the template makes a prompt of them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    may_call: bool
    """Whether the answer may call tools. If not, a template that takes none is rendered without them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The values of the template's own variables."""

    def render(self, source: TemplateSource, max_bytes: int) -> str:
        """Return the prompt. Raises InvalidArgumentError if it is refused, or has more than `max_bytes` bytes."""
        template = _compiled(source, max_bytes)
        tools = self.tools if self.may_call or template.takes_tools else None
        prompt = template.render(self.messages, tools, self.add_generation_prompt, **self.variables)
        if (size := len(check_text("messages", prompt).encode())) > max_bytes:
            limit = f"must be at most {max_bytes} bytes when they are rendered"
            raise InvalidArgumentError("messages", Shown(f"{size} bytes"), limit)
        return prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the answer to a chat."""

    chat: Chat
    asked: CompletionRequest
    """The request without its prompt."""
    has_limit: bool
    """Whether the request limits the output tokens."""
    use: ToolUse | None = None
    """The tools that the answer may call; None: no calls are read."""

    def render(self, source: TemplateSource, max_bytes: int) -> tuple[str, CallStyle | None]:
        """Return the prompt, and how calls are written; None if none are to be read.

        Raises InvalidArgumentError as `Chat.render` does, and if the template writes calls in no way that is read here.
        """
        text = self.chat.render(source, max_bytes)
        style = call_style(_compiled(source, max_bytes)) if self.use else None
        if self.use and style is None:
            limit = (
                'must be null, or tool_choice "none": the model\'s chat template writes no tool calls, or not as JSON '
                "between tags or alone, which is what is read here"
            )
            raise InvalidArgumentError("tools", Shown(f"{len(self.use.functions)} tools"), limit)
        return text, style

    def with_prompt(
        self, prompt: Sequence[int], style: CallStyle | None, max_model_len: int, chat_max_tokens: int
    ) -> CompletionRequest:
        """Return the request for the prompt that the chat has become. style: how calls are written in its answer.

        chat_max_tokens: the output tokens of a chat that names no limit, if the model's length leaves so many.
        """
        asked, params = self.asked, self.asked.params
        if not self.has_limit:
            params = replace(params, max_tokens=min(chat_max_tokens, max_model_len - len(prompt)))
        if self.use is None or style is None:
            return replace(asked, prompts=(prompt,), params=params)
        names = {**asked.names, "structured_outputs": "tools"} if self.use.is_forced else asked.names
        with naming(SAMPLING + "structured_outputs", "tools"):
            params = self.use.constrained(params, style)
        calls = Calls(use=self.use, style=style, prompt_digest=prompt_digest(prompt))
        return replace(asked, prompts=(prompt,), params=params, calls=calls, names=names)


def read_chat_request(body: bytes, *, request_id: str | None = None) -> ChatRequest:
    """Read a request for /v1/chat/completions. Errors and arguments are those of `read_request`."""
    return chat_request(read_json(body), request_id=request_id)


def chat_request(fields: Mapping[str, Any], *, request_id: str | None = None) -> ChatRequest:
    """Return the request that these fields make."""
    check_known(fields, (*COMMON, *_OF_CHATS), _FIXED_OF_CHATS)
    name, max_tokens = _max_tokens(fields)
    limit = _NO_LIMIT if max_tokens is None else max_tokens
    with naming(SAMPLING + "max_tokens", name):
        params = read_params(fields, **_logprobs(fields), max_tokens=limit)
    asked = read_common(fields, params, request_id)
    return ChatRequest(
        chat=_chat(fields),
        asked=replace(asked, names={**asked.names, "prompt": "messages", "max_tokens": name}),
        has_limit=max_tokens is not None,
        use=read_tool_use(fields),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizeRequest:
    """A request for the tokens of a text or of a chat."""

    model: str | None
    prompt: str | Chat
    add_special_tokens: bool
    return_token_strs: bool


def read_tokenize(body: bytes) -> TokenizeRequest:
    """Read a request for /tokenize. Raises InvalidArgumentError, which names the field."""
    fields = read_json(body)
    prompt: Any = fields.get("prompt")
    is_chat = fields.get("messages") is not None
    both = "model", "return_token_strs"
    if is_chat:
        check_known(fields, (*_TEMPLATE, *both), _FIXED_OF_TOKENIZED_CHATS)
    else:
        check_known(fields, ("prompt", "add_special_tokens", *both), _FIXED_OF_TOKENIZED_PROMPTS)
    return TokenizeRequest(
        model=text(fields, "model"),
        prompt=_chat(fields) if is_chat else check_text("prompt", prompt),
        add_special_tokens=flag(fields, "add_special_tokens", default=not is_chat),
        return_token_strs=flag(fields, "return_token_strs"),
    )


def read_detokenize(body: bytes) -> tuple[str | None, tuple[int, ...]]:
    """Read a request for /detokenize: the model's name, and the token ids. Raises InvalidArgumentError."""
    fields = read_json(body)
    check_known(fields, ("model", "tokens"), {})
    return text(fields, "model"), check_token_ids(fields.get("tokens", ()), None, "tokens")


def _chat(fields: Mapping[str, Any]) -> Chat:
    check_tools(fields.get("tools"))
    messages: Any = fields.get("messages")
    variables = fields.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise InvalidArgumentError("chat_template_kwargs", variables, "must be an object of the template's variables")
    for name, value in (variables or {}).items():
        if name in OWN:
            raise InvalidArgumentError(f"chat_template_kwargs.{name}", value, "must not be among them: it is not free")
    return Chat(
        messages=messages,
        tools=fields.get("tools") or None,
        may_call=fields.get("tool_choice") != "none",
        add_generation_prompt=flag(fields, "add_generation_prompt", default=True),
        variables=variables or {},
    )


def _max_tokens(fields: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the limit on output tokens, None if there is none, with the name that it has in the request."""
    new, old = fields.get("max_completion_tokens"), fields.get("max_tokens")
    if new is None:
        return "max_tokens", old
    if old is not None and (type(old) is not type(new) or old != new):
        raise InvalidArgumentError("max_tokens", old, f"must be null, or max_completion_tokens, {new!r}")
    return "max_completion_tokens", new


def _logprobs(fields: Mapping[str, Any]) -> dict[str, Any]:
    count, wanted = count_of_tops("top_logprobs", fields.get("top_logprobs")), flag(fields, "logprobs")
    if count and not wanted:
        raise InvalidArgumentError("top_logprobs", count, "must be 0 or null unless logprobs is true")
    return {"logprobs": wanted, "top_logprobs": count}
