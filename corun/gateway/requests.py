"""Read a completion request of OpenAI's API: parse its JSON, check every field, and turn it into this project's values.

Each field is used, or cannot change the output, or is refused by name. No field is silently dropped. This module must
not know HTTP.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from corun.client.request import read_priority
from corun.completion import Prompt
from corun.errors import InvalidArgumentError, Shown
from corun.params import MAX_LOGIT_BIAS, SamplingParams, check_request_id, check_seed
from corun.types import Priority

_OWN_WAY = ("top_k", "logit_bias", "logprobs")
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in _OWN_WAY)
"""Fields that `SamplingParams` has under the same name. null stands for the default there."""
_ASKED = (*_OWN_WAY, "model", "prompt", "seed", "request_id", "priority")
_ANSWERED = ("stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids")
"""Fields that say how the answer is given."""
_WITHOUT_EFFECT = ("user", "safety_identifier", "metadata")
"""Fields that are accepted and do not affect the output."""
_NOT_SUPPORTED = ("prompt_embeds", "ec_transfer_params", "cache_salt", "vllm_xargs", "thinking_token_budget")
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "must be false: prompts are not sent back, nor scored"),
    "best_of": ((1,), "must be 1: ask for n samples"),
    "suffix": (("",), "must be empty: there is no insertion"),
    "use_beam_search": ((False,), "must be false"),
    "length_penalty": ((1, 1.0), "must be 1, as it is without beam search"),
    "include_stop_str_in_output": ((False,), "must be false: a stop string is not part of the text"),
    "skip_special_tokens": ((True,), "must be true: special tokens have no text; return_token_ids gives their ids"),
    "spaces_between_special_tokens": ((True,), "must be true: special tokens have no text"),
    "add_special_tokens": ((True,), "must be true; send token ids for a prompt without them"),
    "truncate_prompt_tokens": ((), "must be null: prompts are never cut"),
    "truncation_side": ((), "must be null: prompts are never cut"),
    "allowed_token_ids": ((), "must be null: not supported; see logit_bias"),
    "bad_words": (([],), "must be empty: not supported; see logit_bias"),
    "prompt_logprobs": ((), "must be null: prompts are not scored"),
    "logprob_token_ids": ((), "must be null: only the sampled token's own log probability is kept"),
    "response_format": (({"type": "text"},), 'must be {"type": "text"}: output is not constrained'),
    "structured_outputs": ((), "must be null: output is not constrained"),
    "return_token_offsets": ((False,), "must be false"),
    "kv_transfer_params": ((), "must be null: the cluster moves KV itself"),
    "repetition_detection": ((), "must be null: not supported"),
    **dict.fromkeys(_NOT_SUPPORTED, ((), "must be null: not supported")),
}
"""Fields that may only be null or have a value that means what the cluster does anyway. Each has its allowed values and
the limit that a refusal names."""
_STREAM_OPTIONS = ("stream_options.include_usage", "stream_options.continuous_usage_stats")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A request for `params.n` samples of each prompt."""

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

    def id_of(self, prompt_index: int) -> str:
        """Return the request id for the call that runs one prompt."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{prompt_index}"


def read_request(body: bytes, *, request_id: str | None = None, max_prompts: int) -> CompletionRequest:
    """Read a request. Raises InvalidArgumentError, which names the field, if it cannot be done exactly as it is asked.

    request_id: the id in the HTTP header. It takes precedence over the id in the body, as in vLLM.
    """
    fields = _read_json(body)
    for name, value in fields.items():
        _check_known(name, value)
    stream = _flag(fields, "stream")
    options = _stream_options(fields.get("stream_options"), stream)
    if request_id is None:
        request_id = _text(fields, "request_id") or secrets.token_hex(16)
    return CompletionRequest(
        model=_text(fields, "model"),
        prompts=_prompts(fields.get("prompt"), max_prompts),
        params=_params(fields),
        seed=None if fields.get("seed") is None else check_seed(fields["seed"]),
        request_id=check_request_id(request_id),
        priority=_priority(fields.get("priority")),
        stream=stream,
        include_usage=_flag(options, "stream_options.include_usage"),
        continuous_usage=_flag(options, "stream_options.continuous_usage_stats"),
        return_token_ids=_flag(fields, "return_token_ids"),
        tokens_as_ids=_flag(fields, "return_tokens_as_token_ids"),
    )


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        # Decode as UTF-8 only. In other encodings, which Python would guess, the weight that `gateway.bodies` found
        # would be wrong.
        text = body.decode("utf-8-sig")
        read = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
        limit = "" if isinstance(read, dict) else "must be a JSON object"
    except RecursionError:
        limit = "must be JSON that is not so deep"
    except ValueError as error:
        limit = f"must be JSON in UTF-8: {error}"
    if limit:
        raise InvalidArgumentError("body", Shown(f"{len(body)} bytes"), limit)
    return dict(read)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # Python would keep only the last value of a name.
        raise ValueError("a name is in an object twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_known(name: str, value: Any) -> None:
    if name in _SAMPLING or name in (*_ASKED, *_ANSWERED, *_WITHOUT_EFFECT):
        return
    if name not in _FIXED:
        raise InvalidArgumentError(name, value, "is not a known field")
    allowed, limit = _FIXED[name]
    if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
        raise InvalidArgumentError(name, value, limit)


def _params(fields: Mapping[str, Any]) -> SamplingParams:
    given = {name: fields[name] for name in _SAMPLING if fields.get(name) is not None}
    top_k = fields.get("top_k")
    if top_k is not None:
        given["top_k"] = 0 if top_k == -1 else top_k  # In vLLM, -1 also means the whole vocabulary.
    if fields.get("logit_bias") is not None:
        given["logit_bias"] = _logit_bias(fields["logit_bias"])
    logprobs = fields.get("logprobs")
    if logprobs is not None and (type(logprobs) is not int or logprobs not in (0, 1)):
        limit = "must be 0 or 1: only the sampled token's own log probability is kept"
        raise InvalidArgumentError("logprobs", logprobs, limit)
    return SamplingParams(**given, logprobs=logprobs is not None)


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise InvalidArgumentError("logit_bias", value, "must be an object of token ids and biases")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidArgumentError("logit_bias", Shown(f"{len(value)} entries"), f"must be at most {MAX_LOGIT_BIAS}")
    found: dict[int, Any] = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10) or int(name) in found:
            raise InvalidArgumentError("logit_bias", name, "must have token ids as names, each once")
        found[int(name)] = bias
    return found


def _prompts(value: Any, max_prompts: int) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError("prompt", value, "must be text, token ids, or a list of either")
    if type(value[0]) is int:
        return (_token_ids("prompt", value),)
    if len(value) > max_prompts:
        raise InvalidArgumentError("prompt", Shown(f"{len(value)} prompts"), f"must be at most {max_prompts}")
    return tuple(each if isinstance(each, str) else _token_ids(f"prompt[{i}]", each) for i, each in enumerate(value))


def _token_ids(field: str, value: Any) -> Sequence[int]:
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise InvalidArgumentError(field, value, "must be text or token ids, not empty")
    return tuple(value)


def _stream_options(value: Any, stream: bool) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not stream:
        raise InvalidArgumentError("stream_options", value, "must be null unless stream is true")
    if not isinstance(value, dict):
        raise InvalidArgumentError("stream_options", value, "must be an object")
    options = {f"stream_options.{name}": option for name, option in value.items()}
    for name, option in options.items():
        if name not in _STREAM_OPTIONS:
            raise InvalidArgumentError(name, option, "is not a known field")
    return options


def _priority(value: Any) -> Priority:
    """Return the priority. It is one of our names, or a number as in vLLM: a lower number comes first, 0 is normal."""
    if type(value) is int:
        return Priority.HIGH if value < 0 else Priority.LOW if value > 0 else Priority.NORMAL
    return Priority.NORMAL if value is None else read_priority(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgumentError(name, value, "must be true or false")
    return bool(value)


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgumentError(name, value, "must be text")
    return value
