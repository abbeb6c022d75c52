"""A completion as JSON: as a whole, or as the events of a stream, in vLLM's shape.

An event is made for every token, so events are built from strings that are made once per request. A choice's field
`corun` holds what OpenAI's API has no place for: the seed, and at the end of the sample its receipt. This module must
not know HTTP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

from corun.completion import Chunk, Generation, Sample
from corun.errors import CorunError
from corun.gateway.echoes import Echo
from corun.gateway.errors import event_of
from corun.gateway.requests import CompletionRequest
from corun.types import NO_ALTERNATIVES, Alternatives, FinishReason

DONE = "data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""The number that stands for minus infinity, which JSON lacks. vLLM uses the same number."""
TOKENS_AT_ONCE = 64
"""The tokens whose log probabilities are made at once. One of them takes up to 0.3 ms, with 20 alternatives."""
VALUES_AT_ONCE = 1024
"""The numbers or texts of a long list that are written at once. A thousand of them take up to 0.6 ms."""
quoted = json.encoder.encode_basestring_ascii


Listed = tuple[str, Iterable[str], str]
"""A list as JSON: what stands before its items, the items, and what stands behind them."""


class Parts:
    """A long list of a whole response, as parts of its JSON. They are made when they are sent: all at once would stop
    the event loop for seconds."""

    def __init__(self, make: Callable[[], Listed]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[str]:
        begin, items, end = self._make()
        yield begin
        before, rest = "", iter(items)
        while some := list(islice(rest, TOKENS_AT_ONCE)):
            yield before + ",".join(some)
            before = ","
        yield end


def parts(value: Any) -> Iterator[str]:
    """Yield the JSON of a whole response in parts, none of which takes long to make. It has the spaces of `json.dumps`:
    the playground's shell script looks for a field by them."""
    if isinstance(value, Parts):
        yield from value
    elif isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield f"{', ' if number else '{'}{quoted(name)}: "
            yield from parts(each)
        yield "}" if value else "{}"
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            yield ", " if number else "["
            yield from parts(each)
        yield "]"
    elif isinstance(value, list) and len(value) > VALUES_AT_ONCE:
        for at in range(0, len(value), VALUES_AT_ONCE):
            yield (", " if at else "[") + json.dumps(value[at : at + VALUES_AT_ONCE], allow_nan=False)[1:-1]
        yield "]"
    else:
        yield json.dumps(value, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a whole response, or a value of one, with all of it made."""
    return json.loads("".join(parts(value)))


def head(asked: CompletionRequest, model: str) -> dict[str, Any]:
    """Return the fields with which every part of one response begins."""
    return begin(f"cmpl-{asked.request_id}", "text_completion", model)


def begin(response_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": model}


def completion(head: dict[str, Any], asked: CompletionRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the whole response. Its choices are in the order of prompts, then of samples."""
    found = [(i, generation, sample) for i, generation in enumerate(generations) for sample in generation.samples]
    return whole(head, [_choice(number, asked, *each) for number, each in enumerate(found)], generations)


def with_echoes(answer: dict[str, Any], asked: CompletionRequest, echoes: Sequence[Echo]) -> dict[str, Any]:
    """Return a whole response whose choices begin with the scores of their prompts."""
    for number, choice in enumerate(answer["choices"]):
        echo = echoes[number // asked.params.n]
        before = echo.logprobs(with_tops=asked.with_tops, as_ids=asked.tokens_as_ids)
        drawn = plain(choice["logprobs"])
        drawn["text_offset"] = [len(echo.text) + offset for offset in drawn["text_offset"]]
        choice["logprobs"] = {name: column + drawn[name] for name, column in before.items()}
        choice["corun"]["echo"] = echo.facts()
    return answer


def echoed(head: dict[str, Any], asked: CompletionRequest, echoes: Sequence[Echo]) -> dict[str, Any]:
    """Return a whole response in which nothing was drawn."""
    choices = []
    for number, echo in enumerate(echoes):
        choice = {
            "index": number,
            "text": asked.texts[number],
            "logprobs": echo.logprobs(with_tops=asked.with_tops, as_ids=asked.tokens_as_ids),
            "finish_reason": FinishReason.LENGTH.value,
        }
        ids = {"prompt_token_ids": list(echo.token_ids), "token_ids": []} if asked.return_token_ids else {}
        choices.append({**choice, **ids, "corun": {"echo": echo.facts()}})
    counted = usage(sum(len(echo.token_ids) for echo in echoes), 0)
    return {**head, "choices": choices, "usage": counted, "system_fingerprint": echoes[0].fingerprint}


def whole(head: dict[str, Any], choices: list[Any], generations: Sequence[Generation]) -> dict[str, Any]:
    """Return a whole response with these choices."""
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    tokens = sum(len(sample.token_ids) for generation in generations for sample in generation.samples)
    fingerprint = generations[0].receipt.fingerprint
    return {**head, "choices": choices, "usage": usage(prompt_tokens, tokens), "system_fingerprint": fingerprint}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


Head = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The shape of the answers to one kind of request."""

    head: Callable[[CompletionRequest, str], Head]
    """Returns the fields with which every part of one response begins, for a request and the model's name."""
    completion: Callable[[Head, CompletionRequest, Sequence[Generation]], dict[str, Any]]
    """Returns the whole response."""
    events: Callable[[Head, CompletionRequest], Events]


@dataclass(slots=True)
class Sent:
    """How much of one choice has been sent."""

    tokens: int = 0
    begun: bool = False
    held: Chunk | None = None
    """The chunk with the last token, which is held until the receipt comes."""
    text: int = 0
    """The number of characters of text that were sent."""
    token_texts: int = 0
    """The number of characters of the tokens that were sent. It exceeds `text` while some text waits for later
    tokens."""


class Events:
    """The events of one stream."""

    done = DONE
    """What ends the stream."""

    def __init__(self, head: dict[str, Any], asked: CompletionRequest) -> None:
        self._head = head
        self._asked = asked
        opening = json.dumps(head, separators=(",", ":"))
        self._begin = f'data: {opening[:-1]},"choices":[{{"index":'
        self._choices = [Sent() for _ in range(len(asked.prompts) * asked.params.n)]
        self._prompts: list[Sequence[int]] = [() if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        """The token ids of each prompt. For a prompt given as text they are empty until its first chunk."""
        self._fingerprint = ""

    def chunk(self, prompt_index: int, chunk: Chunk) -> str:
        """Return the event for new output of one sample; empty while the output waits for its receipt."""
        prompt = self._prompts[prompt_index] = self._prompts[prompt_index] or chunk.prompt_token_ids
        number = prompt_index * self._asked.params.n + chunk.sample_index
        choice = self._choices[number]
        choice.tokens += len(chunk.token_ids)
        if choice.held is not None:
            chunk, choice.held = _both(choice.held, chunk), None
        if chunk.receipt is None and choice.tokens == self._asked.params.max_tokens:
            # A router may send the receipt a moment later. It would then need a later event without a token.
            choice.held = chunk
            return ""
        return self._event(number, prompt, choice, chunk)

    def failure(self, error: CorunError) -> str:
        """Return the event for an error that ends a stream which has begun."""
        return event_of(error)

    def usage(self) -> str:
        """Return the last event before the end, with the number of tokens; empty if it was not asked for."""
        if not self._asked.include_usage:
            return ""
        counted = usage(sum(map(len, self._prompts)), sum(choice.tokens for choice in self._choices))
        last = {**self._head, "choices": [], "usage": counted, "system_fingerprint": self._fingerprint}
        return f"data: {dumped(last)}\n\n"

    def _event(self, number: int, prompt: Sequence[int], choice: Sent, chunk: Chunk) -> str:
        asked = self._asked
        logprobs = self._logprobs(chunk, *self._texts(choice, chunk)) if asked.params.logprobs else "null"
        content = self._content(choice, number // asked.params.n, chunk)
        reason = f'"{ended}"' if (ended := self._reason(chunk)) else "null"
        text = f'{self._begin}{number},{content},"logprobs":{logprobs},"finish_reason":{reason}'
        if asked.return_token_ids:
            text += self._ids(choice, prompt, chunk)
        if chunk.receipt is not None or not choice.begun:
            text += f',"corun":{dumped(own(chunk))}'
            choice.begun = True
        text += "}]"
        if chunk.receipt is not None:
            self._fingerprint = chunk.receipt.fingerprint
            text += f',"system_fingerprint":"{self._fingerprint}"'
        if asked.continuous_usage:
            text += f',"usage":{dumped(usage(len(prompt), choice.tokens))}'
        return f"{text}}}\n\n"

    def _reason(self, chunk: Chunk) -> str:
        """Return why the choice ended; empty if it goes on."""
        return chunk.finish_reason.value if chunk.finish_reason else ""

    def _content(self, choice: Sent, prompt_index: int, chunk: Chunk) -> str:
        """Return the field with the new text."""
        echoed = "" if choice.begun or not self._asked.echo else self._asked.texts[prompt_index]
        return f'"text":{quoted(echoed + chunk.text)}'

    def _ids(self, choice: Sent, prompt: Sequence[int], chunk: Chunk) -> str:
        """Return the fields with token ids."""
        of_prompt = "null" if choice.begun else dumped(list(prompt))
        return f',"prompt_token_ids":{of_prompt},"token_ids":[{",".join(map(str, chunk.token_ids))}]'

    def _logprobs(self, chunk: Chunk, texts: Sequence[str], begin: int) -> str:
        opening, tops, end = _logprobs(chunk, texts, begin, as_ids=self._asked.tokens_as_ids)
        return f"{opening}{','.join(tops)}{end}"

    def _texts(self, choice: Sent, chunk: Chunk) -> tuple[Sequence[str], int]:
        """Return the texts of the new tokens, and the number of characters of the earlier ones."""
        texts, begin = chunk.token_texts, choice.token_texts
        choice.text += len(chunk.text)
        choice.token_texts += sum(map(len, texts))
        if texts and choice.text > choice.token_texts:  # The last token left a character unfinished.
            late = chunk.text[choice.token_texts - choice.text :]
            texts = (*texts[:-1], texts[-1] + late)
        return texts, begin


COMPLETION = Shape(head=head, completion=completion, events=Events)


def _both(first: Chunk, last: Chunk) -> Chunk:
    return replace(
        last,
        text=first.text + last.text,
        token_ids=first.token_ids + last.token_ids,
        logprobs=first.logprobs + last.logprobs,
        token_texts=first.token_texts + last.token_texts,
        top_logprobs=first.top_logprobs + last.top_logprobs,
    )


def _choice(
    number: int, asked: CompletionRequest, prompt_index: int, generation: Generation, sample: Sample
) -> dict[str, Any]:
    logprobs = None
    if asked.params.logprobs:
        logprobs = Parts(lambda: _logprobs(sample, sample.token_texts, 0, as_ids=asked.tokens_as_ids))
    choice: dict[str, Any] = {
        "index": number,
        "text": (asked.texts[prompt_index] if asked.echo else "") + sample.text,
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason.value,
    }
    if asked.return_token_ids:
        choice |= {"prompt_token_ids": list(generation.prompt_token_ids), "token_ids": list(sample.token_ids)}
    return {**choice, "corun": own(sample)}


def own(output: Chunk | Sample) -> dict[str, Any]:
    return {"seed": output.seed} | ({"receipt": output.receipt.to_dict()} if output.receipt else {})


def _logprobs(output: Chunk | Sample, texts: Sequence[str], begin: int, *, as_ids: bool) -> Listed:
    """Return the log probabilities as JSON in vLLM's shape, whose last list has the alternatives of each token.

    begin: the number of characters of the sample's earlier tokens. as_ids: name tokens by ids instead of texts.
    """
    values = list(map(exact, output.logprobs))
    names = names_of(output, texts, as_ids=as_ids)
    beside = output.top_logprobs or [NO_ALTERNATIVES] * len(names)
    drawn = zip(output.token_ids, names, values, beside, strict=True)
    offsets = ",".join(map(str, accumulate(map(len, texts[:-1]), initial=begin))) if texts else ""
    tokens = f'"token_logprobs":[{",".join(values)}],"tokens":[{",".join(names)}]'
    tops = (_tops(*each, as_ids=as_ids) for each in drawn)
    return f'{{"text_offset":[{offsets}],{tokens},"top_logprobs":[', tops, "]}"


def _tops(token_id: int, name: str, value: str, tops: Alternatives, *, as_ids: bool) -> str:
    """Return a token's alternatives as a JSON object, with the token itself under its own name. Of tokens with one
    name, it has the likeliest."""
    found: dict[str, str] = {}
    others = names_of(tops, tops.texts, as_ids=as_ids)
    for other_id, other, logprob in zip(tops.token_ids, others, tops.logprobs, strict=True):
        found.setdefault(name if other_id == token_id else other, exact(logprob))
    found.setdefault(name, value)
    return "{" + ",".join(f"{each}:{its}" for each, its in found.items()) + "}"


def exact(logprob: float) -> str:
    """Return a log probability as JSON, with every fp32 bit."""
    return repr(max(logprob, LEAST_LOGPROB))


def names_of(output: Chunk | Sample | Alternatives, texts: Sequence[str], *, as_ids: bool) -> list[str]:
    """Return the name of each token as JSON: its text, or its id."""
    return [f'"token_id:{token_id}"' for token_id in output.token_ids] if as_ids else list(map(quoted, texts))


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
