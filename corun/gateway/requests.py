"""Read a request of OpenAI's API: parse its JSON, check every field, and turn it into this project's values.

Each field is used, or cannot change the output, or is refused by name. No field is silently dropped. This module must
not know HTTP.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from corun import strict_json
from corun.client.request import read_priority
from corun.completion import Prompt
from corun.errors import InvalidArgumentError, NotFoundError, Shown, shown
from corun.gateway.errors import SAMPLING, naming
from corun.gateway.tools import Calls
from corun.params import (
    MAX_LOGIT_BIAS,
    MAX_REQUEST_ID_LENGTH,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    check_request_id,
    check_seed,
    whole_number,
)
from corun.types import Priority

_OWN_WAY = ("top_k", "logit_bias", "logprobs", "top_logprobs")
_SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name not in _OWN_WAY)
"""Fields that `SamplingParams` has under the same name. null stands for the default there."""
_ASKED = ("top_k", "logit_bias", "logprobs", "response_format", "model", "seed", "request_id", "priority")
_ANSWERED = ("stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids")
"""Fields that say how the answer is given."""
_WITHOUT_EFFECT = ("user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention")
"""Fields that are accepted and do not affect the output."""
COMMON = (*_SAMPLING, *_ASKED, *_ANSWERED, *_WITHOUT_EFFECT)
"""The fields of every request that draws tokens."""
_NOT_SUPPORTED = ("prompt_embeds", "ec_transfer_params", "cache_salt", "vllm_xargs", "thinking_token_budget")
Fixed = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that may only be null or have a value that means what the cluster does anyway. Each has its allowed values and
the limit that a refusal names."""
FIXED: Fixed = {
    "use_beam_search": ((False,), "must be false"),
    "length_penalty": ((1, 1.0), "must be 1, as it is without beam search"),
    "include_stop_str_in_output": ((False,), "must be false: a stop string is not part of the text"),
    "skip_special_tokens": ((True,), "must be true: special tokens have no text; return_token_ids gives their ids"),
    "spaces_between_special_tokens": ((True,), "must be true: special tokens have no text"),
    "truncate_prompt_tokens": ((), "must be null: prompts are never cut"),
    "truncation_side": ((), "must be null: prompts are never cut"),
    "allowed_token_ids": ((), "must be null: not supported; see logit_bias"),
    "bad_words": (([],), "must be empty: not supported; see logit_bias"),
    "prompt_logprobs": ((), "must be null: /v1/completions scores prompts with echo and logprobs"),
    "logprob_token_ids": ((), "must be null: only the sampled token's own log probability is kept"),
    "return_token_offsets": ((False,), "must be false"),
    "kv_transfer_params": ((), "must be null: the cluster moves KV itself"),
    "repetition_detection": ((), "must be null: not supported"),
    **dict.fromkeys(_NOT_SUPPORTED, ((), "must be null: not supported")),
}
"""The fixed fields of every request that draws tokens."""
_OF_COMPLETIONS = ("prompt", "echo", "add_special_tokens")
_FIXED_OF_COMPLETIONS: Fixed = {
    **FIXED,
    "best_of": ((1,), "must be 1: ask for n samples"),
    "suffix": (("",), "must be empty: there is no insertion"),
}
_STREAM_OPTIONS = ("stream_options.include_usage", "stream_options.continuous_usage_stats")
_FIXED_STREAM_OPTIONS: Fixed = {
    "stream_options.include_obfuscation": ((False,), "must be false: nothing hides the sizes of events"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A request for `params.n` samples of each prompt. A chat is one, too, once its prompt is known."""

    model: str | None
    """The name of the model; None: whichever is served."""
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    seed: int | None
    """The seed of every prompt; None: the request has none."""
    request_id: str
    priority: Priority
    stream: bool
    include_usage: bool
    """True if a last event has the number of tokens."""
    continuous_usage: bool
    """True if every event has the number of tokens so far."""
    return_token_ids: bool
    tokens_as_ids: bool
    """True if log probabilities name tokens by their ids."""
    add_special_tokens: bool = True
    """True if prompts of text get the special tokens that the tokenizer adds."""
    echo: bool = False
    """True if each text begins with its prompt. With `params.logprobs` the prompt's tokens are scored, too."""
    is_list: bool = False
    """True if the prompts came in a list, which may have only one."""
    with_tops: bool = False
    """True if each scored token comes with the likeliest one at its place."""
    draws: bool = True
    """False if no token is drawn: `max_tokens` was 0."""
    texts: tuple[str, ...] = ()
    """The text of each prompt, if it is echoed."""
    calls: Calls | None = None
    """How tool calls are read from the text; None: none are."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names that the client knows fields by, where they are not the routers'."""

    def id_of(self, prompt_index: int) -> str:
        """Return the request id for the call that runs one prompt."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{prompt_index}"

    @property
    def scores(self) -> bool:
        """Whether the tokens of prompts are scored."""
        return self.echo and self.params.logprobs

    def named(self, field: str, prompt_index: int) -> str:
        """Return the field of an error about one prompt as the client knows it, with the prompt's number."""
        name, dot, rest = field.removeprefix(SAMPLING).partition(".")
        if name.startswith("token_ids"):
            name, rest = "prompt", name
        if name.startswith("continuations"):  # A prompt is scored as the continuation of its first token.
            name, rest = "prompt", ""
        if name == "prompt":  # Here it is the text or the list itself.
            dot, rest = "", rest.removeprefix("text").removeprefix("token_ids")
        if name in self.names:
            return self.names[name]
        if name == "prompt" and self.is_list:
            name = f"prompt[{prompt_index}]"
        return name + dot + rest


def read_request(body: bytes, *, request_id: str | None = None, max_prompts: int) -> CompletionRequest:
    """Read a request. Raises InvalidArgumentError, which names the field, if it cannot be done exactly as it is asked.

    request_id: the id in the HTTP header. It takes precedence over the id in the body, as in vLLM.
    """
    fields = read_json(body)
    check_known(fields, (*COMMON, *_OF_COMPLETIONS), _FIXED_OF_COMPLETIONS)
    echo, (logprobs, top_logprobs) = flag(fields, "echo"), _logprobs(fields)
    draws = type(fields.get("max_tokens")) is not int or fields["max_tokens"] != 0
    if not draws:
        _check_drawless(fields, scores=echo and logprobs)
        fields = {**fields, "max_tokens": 1}  # It has no other meaning than this one of being none.
    if echo and top_logprobs > 1:
        raise InvalidArgumentError(
            "logprobs", top_logprobs, "must be 0 or 1 with echo: scores name one token beside each"
        )
    params = read_params(fields, logprobs=logprobs, top_logprobs=top_logprobs)
    asked = read_common(fields, params, request_id)
    prompts = _prompts(fields.get("prompt"), max_prompts)
    _check_room_for_numbers(asked.request_id, len(prompts))
    if echo and logprobs and asked.stream:
        raise InvalidArgumentError("echo", True, "must be false in a stream with logprobs: scores come whole")
    special = flag(fields, "add_special_tokens", default=True)
    return replace(
        asked,
        prompts=prompts,
        is_list=isinstance(fields["prompt"], list) and type(fields["prompt"][0]) is not int,
        echo=echo,
        with_tops=top_logprobs > 0,
        draws=draws,
        add_special_tokens=special,
    )


def _check_drawless(fields: Mapping[str, Any], *, scores: bool) -> None:
    """Raise InvalidArgumentError unless a request without drawn tokens asks for scores, and for one choice a prompt."""
    if not scores:
        raise InvalidArgumentError("max_tokens", 0, "must be at least 1, or 0 with echo and logprobs to score a prompt")
    if fields.get("n") not in (None, 1):
        raise InvalidArgumentError("n", fields["n"], "must be 1 with max_tokens 0: nothing is drawn")


def _check_room_for_numbers(request_id: str, num_prompts: int) -> None:
    """Raise InvalidArgumentError unless the id that `CompletionRequest.id_of` makes for each prompt is short enough."""
    room = MAX_REQUEST_ID_LENGTH - len(f"-{num_prompts - 1}")
    if num_prompts > 1 and len(request_id) > room:
        limit = f"must be at most {room} characters with {num_prompts} prompts, whose numbers are appended to it"
        raise InvalidArgumentError("request_id", request_id, limit)


def read_common(fields: Mapping[str, Any], params: SamplingParams, request_id: str | None) -> CompletionRequest:
    """Return a request with the fields that all have, and without prompts."""
    stream = flag(fields, "stream")
    options = stream_options(fields, _STREAM_OPTIONS)
    # A response_format of text gives no constraint, and may stand beside one of structured_outputs.
    of_format = params.constraint is not None and not fields.get("structured_outputs")
    if request_id is None:
        request_id = text(fields, "request_id") or secrets.token_hex(16)
    return CompletionRequest(
        model=text(fields, "model"),
        prompts=(),
        params=params,
        seed=None if fields.get("seed") is None else check_seed(fields["seed"]),
        request_id=check_request_id(request_id),
        priority=_priority(fields.get("priority")),
        stream=stream,
        include_usage=flag(options, "stream_options.include_usage"),
        continuous_usage=flag(options, "stream_options.continuous_usage_stats"),
        return_token_ids=flag(fields, "return_token_ids"),
        tokens_as_ids=flag(fields, "return_tokens_as_token_ids"),
        names={"structured_outputs": "response_format"} if of_format else {},
    )


def read_json(body: bytes) -> dict[str, Any]:
    """Return the object that a body holds. Raises InvalidArgumentError if it is none."""
    try:
        # Decode as UTF-8 only. In other encodings, which Python would guess, the weight that `gateway.bodies` found
        # would be wrong.
        found = body.decode("utf-8-sig")
        read = strict_json.loads(found, object_pairs_hook=strict_json.unique)
        limit = "" if isinstance(read, dict) else "must be a JSON object"
    except ValueError as error:
        limit = f"must be JSON in UTF-8: {error}"
    if limit:
        raise InvalidArgumentError("body", Shown(f"{len(body)} bytes"), limit)
    return dict(read)


def check_known(fields: Mapping[str, Any], known: Sequence[str], fixed: Fixed) -> None:
    """Raise InvalidArgumentError for the first field that is not known, or has another value than it may have."""
    for name, value in fields.items():
        if name in known:
            continue
        if name not in fixed:
            near = difflib.get_close_matches(name[:64], known, n=1)
            limit = f"is not a known field{f'; the nearest is {near[0]}' if near else ''}"
            raise InvalidArgumentError(name, value, limit)
        allowed, limit = fixed[name]
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise InvalidArgumentError(name, value, limit)


def check_model(asked: str | None, served: str, *others: str) -> None:
    """Raise NotFoundError if a request asks for another model than the one that is served. others: its other names."""
    if asked not in (None, served, *others):
        raise NotFoundError(f"the model {shown(asked)} does not exist: this is {served!r}")


def read_params(fields: Mapping[str, Any], *, logprobs: bool, **more: Any) -> SamplingParams:
    """Return the sampling parameters. more: values for parameters that have another name among the fields."""
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    top_k = fields.get("top_k")
    if top_k is not None:
        given["top_k"] = 0 if top_k == -1 else top_k  # In vLLM, -1 also means the whole vocabulary.
    if fields.get("logit_bias") is not None:
        given["logit_bias"] = _logit_bias(fields["logit_bias"])
    if (constraint := _response_format(fields.get("response_format"))) is not None:
        if given.get("structured_outputs"):
            limit = "must be null with structured_outputs: an output has one constraint"
            raise InvalidArgumentError("response_format", Shown("an object"), limit)
        with naming(SAMPLING + "structured_outputs.json", "response_format.json_schema.schema"):
            return SamplingParams(**{**given, **more}, structured_outputs=constraint, logprobs=logprobs)
    return SamplingParams(**{**given, **more}, logprobs=logprobs)


def _response_format(value: Any) -> dict[str, Any] | None:
    """Return the constraint that OpenAI's `response_format` stands for; None if it leaves the output free."""
    kind = value.get("type") if isinstance(value, dict) else value
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind is None and value is None:
        return None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema") or not value.keys() <= known:
        limit = 'must be an object whose type is "text", "json_object", or "json_schema" with json_schema'
        raise InvalidArgumentError("response_format", Shown(str(kind)[:64]), limit)
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else None
    schema = value.get("json_schema")
    if not isinstance(schema, dict) or not schema.keys() <= {"name", "description", "schema", "strict"}:
        limit = "must be an object with a schema, and at most a name, a description and strict"
        raise InvalidArgumentError("response_format.json_schema", Shown("a value"), limit)
    if not isinstance(schema.get("schema"), dict):
        raise InvalidArgumentError("response_format.json_schema.schema", Shown("a value"), "must be an object")
    return {"json": schema["schema"]}


def _logprobs(fields: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether log probabilities are asked for, and how many of the likeliest tokens beside each token."""
    logprobs = fields.get("logprobs")
    return logprobs is not None, count_of_tops("logprobs", logprobs)


def count_of_tops(field: str, value: Any) -> int:
    """Return how many of the likeliest tokens are asked for; null: none."""
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_TOP_LOGPROBS):
        raise InvalidArgumentError(field, value, f"must be an integer in [0, {MAX_TOP_LOGPROBS}], or null")
    return value or 0


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError("logit_bias", value, "must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidArgumentError("logit_bias", Shown(f"{len(value)} entries"), f"must be at most {MAX_LOGIT_BIAS}")
    found: dict[int, Any] = {}
    for name, bias in value.items():
        if (token_id := whole_number(name)) is None or token_id in found:
            raise InvalidArgumentError("logit_bias", name, "must have token ids as names, each once")
        found[token_id] = bias
    return found


def _prompts(value: Any, max_prompts: int) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("prompt", value, "must be given as text, token ids, or a list of either")
    if type(value[0]) is int:
        return (_token_ids("prompt", value),)
    if len(value) > max_prompts:
        raise InvalidArgumentError("prompt", Shown(f"{len(value)} prompts"), f"must be at most {max_prompts}")
    return tuple(each if isinstance(each, str) else _token_ids(f"prompt[{i}]", each) for i, each in enumerate(value))


def _token_ids(field: str, value: Any) -> Sequence[int]:
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise InvalidArgumentError(field, value, "must be text or token ids, not empty")
    return tuple(value)


def stream_options(fields: Mapping[str, Any], known: Sequence[str]) -> Mapping[str, Any]:
    """Return the options of a request for a stream. known: those that may have more than one value."""
    value = fields.get("stream_options")
    if value is None:
        return {}
    if not flag(fields, "stream"):
        raise InvalidArgumentError("stream_options", value, "must be null unless stream is true")
    if not isinstance(value, dict):
        raise InvalidArgumentError("stream_options", value, "must be an object")
    options = {f"stream_options.{name}": option for name, option in value.items()}
    check_known(options, known, _FIXED_STREAM_OPTIONS)
    return options


def _priority(value: Any) -> Priority:
    """Return the priority. It is one of our names, or a number as in vLLM: a lower number comes first, 0 is normal."""
    if type(value) is int:
        return Priority.HIGH if value < 0 else Priority.LOW if value > 0 else Priority.NORMAL
    return Priority.NORMAL if value is None else read_priority(value)


def flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a field that is true or false; `default` if it is null or absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgumentError(name, value, "must be true or false")
    return default if value is None else value


def text(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a field that is text or null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(name, value, "must be text")
    return value
