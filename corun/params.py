"""Sampling parameters, the seeds of samples, and the limits on everything a client may ask for.

Values are validated here, once, at the edge. Each refusal names the field, the value and the limit. What is not in
`SamplingParams` is not accepted. This module must not know any engine.

Seeds are pure functions of what identifies a sample, so that anybody can derive them again. A sample's seed is never
seed + i: a request with seed s + 1 would then draw the same tokens as sample 1 of a request with seed s. How they are
derived may not change, because recorded seeds and receipts depend on it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import numbers
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Any

from corun.errors import InvalidArgumentError, Shown

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
"""The most characters of one stop string."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_BYTES = 65_536
"""The most UTF-8 bytes of what constrains an output; a JSON schema is counted as it is written."""
MAX_CHOICES = 1024
MAX_SAMPLES = 256
MAX_TOP_LOGPROBS = 20
"""The most likeliest tokens beside each sampled one, as in OpenAI's API and vLLM."""
MAX_CONTINUATIONS = 256
MAX_SCORED_TOKENS = 131_072
"""The most tokens that one request may score, unless the model's length is more: its answer is one message, of about 14
bytes for each of them."""
MAX_REQUEST_ID_LENGTH = 128
"""The most characters of a request id."""
MAX_NAME_LENGTH = 128
"""The most characters of the name of a process, or of its address."""

MAX_SEED = 2**63 - 1
"""The largest seed; 63 bits fit a signed integer in every language."""
MAX_KEY_BYTES = 64
"""The longest key that BLAKE2b accepts."""

_UINT32 = 2**32
_INT31 = 2**31
_PARAMS_TAG = b"corun.v1.params\0"
_REQUEST = b"corun.v1.request"  # BLAKE2b's personalisation takes at most 16 bytes.
_SAMPLE = b"corun.v1.sample"
MAX_KEPT = 128
"""The number of different parameters of which a process keeps what it has found out. Most requests have equal ones."""
_NOT_IN_DIGEST = frozenset({"logprobs", "n", "top_logprobs"})
CONSTRAINTS = ("json", "regex", "choice", "grammar")
"""The kinds of constraints on an output, by vLLM's names."""
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Names and meanings are vLLM's. Raises InvalidArgumentError for a value outside its limit.

    No limit is wider than that of the pinned engine, and no value is accepted that the engine would change. Some limits
    are narrower than the engine's, so that every sum and product of the values is finite in fp32 in any combination.

    Sequences become tuples, and `logit_bias` becomes a tuple of (token id, bias) pairs, ascending by id. So equal
    parameters are equal values, whatever types they were made from.
    """

    temperature: float = 1.0
    """The sampling temperature: 0, which is greedy, or in [0.01, 2]."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens, as many as it takes for their probabilities to reach this, in [1e-9, 1]."""
    top_k: int = 0
    """Draw only from this many of the likeliest tokens; 0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """The least probability of a token, relative to the likeliest token, in [0, 1]."""
    max_tokens: int = 16
    """The most output tokens of a sample, at least 1."""
    min_tokens: int = 0
    """The number of output tokens before any stop may end the sample."""
    stop: str | Sequence[str] = ()
    """Texts that end the sample; they are not part of its text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the sample; they are part of its token ids."""
    ignore_eos: bool = False
    """Keep going past the model's end-of-sequence token."""
    presence_penalty: float = 0.0
    """The penalty on tokens that the output has already, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """The penalty on tokens for each time that the output has them already, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """The penalty, as a factor, on tokens that the prompt or the output has already, in [0.01, 2]."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Maps a token id to a bias in [-100, 100], which is held as fp32."""
    logprobs: bool = False
    """Return each sampled token's log probability."""
    n: int = 1
    """The number of samples per prompt, at most 256."""
    structured_outputs: Mapping[str, Any] | Sequence[str] = ()
    """Draw only tokens that keep the output within a constraint, by one of vLLM's names: `json` (a schema, as an object
    or as text), `json_object` (True), `regex`, `choice` (texts), or `grammar` (Lark or GBNF). At most 65536 bytes. An
    output that reaches `max_tokens` may be cut off. Log probabilities are those of all tokens, allowed or not.

    It is held as a pair: the kind in `CONSTRAINTS`, and its text; that of `choice` is a JSON list. Empty: none."""
    top_logprobs: int = 0
    """Return this many of the likeliest tokens at the place of each sampled token, with their log probabilities, at
    most 20. It needs `logprobs`. They follow from the same logits, and neither receipts nor digests have them."""

    def __post_init__(self) -> None:
        for name, normalise in _NORMALISERS.items():
            object.__setattr__(self, name, normalise(f"sampling_params.{name}", getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            limit = f"must be at most max_tokens, {self.max_tokens}"
            raise InvalidArgumentError("sampling_params.min_tokens", self.min_tokens, limit)
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgumentError("sampling_params.top_logprobs", self.top_logprobs, "must be 0 without logprobs")
        for name in ("min_tokens", "ignore_eos") if self.structured_outputs else ():
            if value := getattr(self, name):  # A complete output could only go on with what the constraint forbids.
                limit = f"must be {value and type(value)()} with structured_outputs, which say where the output ends"
                raise InvalidArgumentError(f"sampling_params.{name}", value, limit)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def constraint(self) -> tuple[str, str] | None:
        """`structured_outputs` as its kind and its text; None if there is none."""
        return tuple(self.structured_outputs) or None  # type: ignore[return-value]

    @property
    def logit_bias_map(self) -> dict[int, float]:
        """`logit_bias` as a dict by token id, ascending."""
        return dict(self.logit_bias)

    def digest(self) -> str:
        """Return the SHA-256 over every parameter that can change a sample's output, as 64 hex digits.

        A constraint is part of it only if there is one, so that digests from before there were any still hold.
        """
        if self.structured_outputs or self.logit_bias:  # They may be long, and would take memory.
            return _digest(self)
        return _kept_digest(self)


def _digest(params: SamplingParams) -> str:
    """Return `SamplingParams.digest`."""
    values = {f.name: _exact(getattr(params, f.name)) for f in fields(params) if f.name not in _NOT_IN_DIGEST}
    if not params.structured_outputs:
        del values["structured_outputs"]
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(_PARAMS_TAG + canonical.encode()).hexdigest()


_kept_digest = functools.lru_cache(MAX_KEPT)(_digest)


def check_token_ids(
    token_ids: Iterable[int], vocab_size: int | None, field: str = "prompt.token_ids"
) -> tuple[int, ...]:
    """Return the prompt as a tuple of ints.

    vocab_size: None if it is not known here: then only what a message cannot carry is refused.

    Raises InvalidArgumentError if it is empty, or has a token id outside [0, vocab_size).
    """
    end, limit = (2**32, "must be a token id of the vocabulary") if vocab_size is None else (vocab_size, "")
    if isinstance(token_ids, (str, bytes, bytearray)) or not isinstance(token_ids, Iterable):
        raise InvalidArgumentError(field, token_ids, "must be a sequence of token ids")
    ids = tuple(token_ids)
    if not ids:
        raise InvalidArgumentError(field, Shown("no tokens"), "must not be empty")
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < end:
        return ids
    return tuple(_integer(f"{field}[{i}]", value, 0, end, limit) for i, value in enumerate(ids))


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgumentError if `params` names a token that the vocabulary lacks, or asks for more than it has."""
    if params.top_logprobs > vocab_size:
        limit = f"must be at most the vocabulary's size, {vocab_size}"
        raise InvalidArgumentError("sampling_params.top_logprobs", params.top_logprobs, limit)
    for i, token_id in enumerate(params.stop_token_ids):
        _integer(f"sampling_params.stop_token_ids[{i}]", token_id, 0, vocab_size)
    for token_id in params.logit_bias_map:
        _integer("sampling_params.logit_bias", token_id, 0, vocab_size)


def check_lengths(num_prompt: int, max_tokens: int, max_model_len: int) -> None:
    """Raise InvalidArgumentError unless a prompt and its output fit the model. All three lengths are in tokens."""
    if num_prompt < 1:
        raise InvalidArgumentError("prompt.token_ids", Shown("no tokens"), "must not be empty")
    room = max_model_len - num_prompt
    if room < 1:
        limit = f"must be at most {max_model_len - 1} tokens, the model's length {max_model_len} less one for output"
        raise InvalidArgumentError("prompt.token_ids", Shown(f"{num_prompt} tokens"), limit)
    if max_tokens > room:
        limit = f"must be at most {room}, the model's length {max_model_len} less the prompt's {num_prompt} tokens"
        raise InvalidArgumentError("sampling_params.max_tokens", max_tokens, limit)


def check_prompt(token_ids: Sequence[int], max_tokens: int, max_model_len: int, vocab_size: int) -> None:
    """Raise InvalidArgumentError unless the model is long enough for a prompt and its output, and has all its tokens.

    The ids are those of a message or a tokenizer, which give no other numbers than token ids from 0 on.
    """
    check_lengths(len(token_ids), max_tokens, max_model_len)
    if max(token_ids) >= vocab_size:
        check_token_ids(token_ids, vocab_size)


def check_continuations(continuations: Sequence[object]) -> None:
    """Raise InvalidArgumentError unless there are 1 to 256 continuations."""
    if isinstance(continuations, (str, bytes, bytearray)) or not isinstance(continuations, Sequence):
        raise InvalidArgumentError("continuations", continuations, "must be a sequence of texts or token ids")
    if not 1 <= len(continuations) <= MAX_CONTINUATIONS:
        found = Shown(f"{len(continuations)} continuations")
        raise InvalidArgumentError("continuations", found, f"must be 1 to {MAX_CONTINUATIONS}")


def check_scored_lengths(num_prompt: int, num_scored: Sequence[int], max_model_len: int) -> None:
    """Raise InvalidArgumentError unless each continuation fits the model with the prompt, and the answer a message. All
    lengths are in tokens."""
    room, most = max_model_len - num_prompt, max(MAX_SCORED_TOKENS, max_model_len)
    if num_prompt < 1 or room < 1:
        limit = f"must be 1 to {max_model_len - 1} tokens, the model's length {max_model_len} less one to score"
        raise InvalidArgumentError("prompt.token_ids", Shown(f"{num_prompt} tokens"), limit)
    for i, count in enumerate(num_scored):
        if not 1 <= count <= room:
            limit = f"must be 1 to {room} tokens, the model's length {max_model_len} less the prompt's {num_prompt}"
            raise InvalidArgumentError(f"continuations[{i}].token_ids", Shown(f"{count} tokens"), limit)
    if sum(num_scored) > most:
        limit = f"must have at most {most} tokens together"
        raise InvalidArgumentError("continuations", Shown(f"{sum(num_scored)} tokens"), limit)


def check_seed(seed: int) -> int:
    """Return the seed as an int. Raises InvalidArgumentError unless it is in [0, 2^63)."""
    return _integer("seed", seed, 0, 2**63, "must be in [0, 2^63)")


def derive_seed(key: bytes, request_id: str) -> int:
    """Return the seed of a request that named none: the keyed BLAKE2b of its id, 63 bits.

    Raises InvalidArgumentError unless the key has 1 to 64 bytes.
    """
    if not 0 < len(key) <= MAX_KEY_BYTES:
        # The key itself stays out of the error: it is a secret.
        raise InvalidArgumentError("seed_key", Shown(f"{len(key)} bytes"), f"must be 1 to {MAX_KEY_BYTES} bytes")
    return _seed(hashlib.blake2b(request_id.encode(), key=key, person=_REQUEST, digest_size=8))


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one sample: sample 0 keeps the request's seed, sample i gets BLAKE2b(seed, i), 63 bits."""
    if sample_index < 0:
        raise InvalidArgumentError("sample_index", sample_index, "must be at least 0")
    check_seed(seed)
    if sample_index == 0:
        return seed
    return _seed(hashlib.blake2b(struct.pack("<QQ", seed, sample_index), person=_SAMPLE, digest_size=8))


def _seed(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little") & MAX_SEED


def check_text(field: str, text: str, max_length: int | None = None, min_length: int = 1) -> str:
    """Return `text`. Raises InvalidArgumentError unless it is valid Unicode of the allowed length in characters."""
    if not isinstance(text, str):
        raise InvalidArgumentError(field, text, "must be text")
    if len(text) < min_length:
        raise InvalidArgumentError(field, text, "must not be empty")
    if max_length is not None and len(text) > max_length:
        raise InvalidArgumentError(field, text, f"must be at most {max_length} characters, not {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(field, text, "must be valid Unicode, without lone surrogates") from None
    return text


def check_request_id(request_id: str) -> str:
    """Return `request_id`, which may be empty. Raises InvalidArgumentError if it has more than 128 characters."""
    return check_text("request_id", request_id, MAX_REQUEST_ID_LENGTH, min_length=0)


def check_name(field: str, name: str) -> str:
    """Return the name of a process.

    Raises InvalidArgumentError unless it is 1 to 128 characters of visible ASCII, since it is written to logs.
    """
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not all("!" <= char <= "~" for char in name):
        raise InvalidArgumentError(field, name, f"must be 1 to {MAX_NAME_LENGTH} visible ASCII characters")
    return name


def whole_number(text: str) -> int | None:
    """Return the number that a text of digits spells. None: it has other characters, or more digits than any number
    here. Python reads no endless ones."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _integer(field: str, value: Any, low: int, end: int, limit: str = "") -> int:
    """Return `value` as an int. Raises InvalidArgumentError unless it is an integer in [low, end)."""
    # The type alone is looked at first: there may be thousands, and abstract types take four times as long.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise InvalidArgumentError(field, value, "must be an integer")
    number = operator.index(value)  # This accepts numpy's integers, too.
    if not low <= number < end:
        raise InvalidArgumentError(field, number, limit or f"must be in [{low}, {end})")
    return number


def _real(field: str, value: Any, low: float, high: float, limit: str = "") -> float:
    """Return `value` as a float. Raises InvalidArgumentError unless it is a finite number in [low, high]."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise InvalidArgumentError(field, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:  # This refuses a NaN, too.
        raise InvalidArgumentError(field, value, limit or f"must be in [{low:g}, {high:g}]")
    return number + 0.0  # -0.0 becomes 0.0: equal values have equal digests.


def _temperature(field: str, value: Any) -> float:
    """Check a temperature. vLLM refuses more than 2, and treats everything between 0 and 0.01 as 0.01."""
    limit = "must be 0 or in [0.01, 2]"
    number = _real(field, value, 0, 2, limit)
    return number if number == 0 else _real(field, value, 0.01, 2, limit)


def _penalty(field: str, value: Any) -> float:
    return _real(field, value, -2, 2)


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgumentError(field, value, "must be true or false")
    return value


def _stop(field: str, value: Any) -> tuple[str, ...]:
    strings = _items(field, (value,) if isinstance(value, str) else value, MAX_STOP_STRINGS, "strings")
    return tuple(check_text(f"{field}[{i}]", text, MAX_STOP_LENGTH) for i, text in enumerate(strings))


def _stop_token_ids(field: str, value: Any) -> tuple[int, ...]:
    ids = _items(field, value, MAX_STOP_TOKEN_IDS, "token ids")
    return tuple(_integer(f"{field}[{i}]", token_id, 0, _UINT32) for i, token_id in enumerate(ids))


def _logit_bias(field: str, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = _items(field, value.items() if isinstance(value, Mapping) else value, MAX_LOGIT_BIAS, "entries")
    bias: dict[int, float] = {}
    for pair in pairs:
        if (type(pair) is not tuple and (not isinstance(pair, Sequence) or isinstance(pair, str))) or len(pair) != 2:
            raise InvalidArgumentError(field, pair, "must be pairs of a token id and a bias")
        token_id = _integer(field, pair[0], 0, _UINT32)
        if token_id in bias:
            raise InvalidArgumentError(f"{field}[{token_id}]", pair[1], "must be given once")
        bias[token_id] = _real(f"{field}[{token_id}]", pair[1], -100, 100)
    fp32 = f"<{len(bias)}f"  # They are rounded as the wire does.
    rounded = [number + 0.0 for number in struct.unpack(fp32, struct.pack(fp32, *bias.values()))]
    return tuple(sorted(zip(bias, rounded, strict=True)))


def _structured_outputs(field: str, value: Any) -> tuple[str, ...]:
    """Return a constraint as the pair of its kind and its text; empty if there is none."""
    limit = "must be one of " + ", ".join((*CONSTRAINTS, "json_object")) + ", with its value"
    if not isinstance(value, Mapping):
        pair = _items(field, value, 2, "texts")
        if len(pair) == 1 or not all(isinstance(each, str) for each in pair):
            raise InvalidArgumentError(field, value, limit)
        value = dict([pair]) if pair else {}
        if isinstance(value.get("choice"), str):
            choices = _loaded(f"{field}.choice", value["choice"])
            value = {"choice": choices if isinstance(choices, list) else None}
    given = {name: each for name, each in value.items() if each is not None}
    if not value:
        return ()
    if len(given) != 1 or not given.keys() <= {*CONSTRAINTS, "json_object"}:
        raise InvalidArgumentError(field, Shown(", ".join(map(str, value))), limit)
    ((kind, found),) = given.items()
    kind, text = _constraint(f"{field}.{kind}", kind, found)
    check_text(f"{field}.{kind}", text)
    if (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(f"{field}.{kind}", Shown(f"{size} bytes"), f"must be at most {MAX_GRAMMAR_BYTES}")
    return kind, text


def _constraint(field: str, kind: str, value: Any) -> tuple[str, str]:
    """Return the kind and the text of one constraint."""
    if kind == "json_object":
        if value is not True:
            raise InvalidArgumentError(field, value, "must be true")
        return "json", _ANY_OBJECT
    if kind == "choice":
        choices = _items(field, value, MAX_CHOICES, "texts")
        if not choices:
            raise InvalidArgumentError(field, value, "must be at least one text")
        return kind, json.dumps([check_text(f"{field}[{i}]", each) for i, each in enumerate(choices)])
    if kind == "json":
        text = value if isinstance(value, str) else _dumped(field, value)
        if not isinstance(_loaded(field, text), dict):
            raise InvalidArgumentError(field, value, "must be a JSON schema, which is an object")
        return kind, text
    return kind, value


def _dumped(field: str, value: Any) -> str:
    """Return a schema as text, with its properties in their order: outputs have them in this order."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, Shown("a schema"), f"must be JSON: {error}") from None


def _loaded(field: str, text: str) -> Any:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(field, Shown(f"{len(text)} characters"), f"must be at most {MAX_GRAMMAR_BYTES}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, Shown("a text"), f"must be JSON: {error}") from None


def _items(field: str, value: Any, limit: int, unit: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(field, value, f"must be a sequence of {unit}")
    items = value if isinstance(value, Sized) else tuple(value)
    if len(items) > limit:  # Count before reading any item: there may be millions.
        raise InvalidArgumentError(field, Shown(f"{len(items)} {unit}"), f"must be at most {limit}")
    return tuple(items)


def _exact(value: Any) -> Any:
    """Return `value` for JSON, with floats as hexadecimal text, which keeps every bit in any language."""
    if isinstance(value, float):
        return value.hex()
    return [_exact(item) for item in value] if isinstance(value, tuple) else value


_NORMALISERS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _temperature,
    "top_p": lambda f, v: _real(f, v, 1e-9, 1),  # Engines hold top_p in fp32, where the smallest numbers become 0.
    "top_k": lambda f, v: _integer(f, v, 0, _INT31),
    "min_p": lambda f, v: _real(f, v, 0, 1),
    "max_tokens": lambda f, v: _integer(f, v, 1, _UINT32),
    "min_tokens": lambda f, v: _integer(f, v, 0, _UINT32),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "repetition_penalty": lambda f, v: _real(f, v, 0.01, 2),  # The engine multiplies logits by its inverse.
    "logit_bias": _logit_bias,
    "logprobs": _flag,
    "n": lambda f, v: _integer(f, v, 1, MAX_SAMPLES + 1, f"must be in [1, {MAX_SAMPLES}]"),
    "structured_outputs": _structured_outputs,
    "top_logprobs": lambda f, v: _integer(f, v, 0, MAX_TOP_LOGPROBS + 1, f"must be in [0, {MAX_TOP_LOGPROBS}]"),
}
