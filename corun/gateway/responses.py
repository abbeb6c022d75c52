"""A completion as JSON: whole, or as the events of a stream, in the shape of vLLM's.

Events are put together from strings that are made once per request: this is done for every token. What OpenAI's API has
no place for is in a choice's `corun`: its seed, and at its end its receipt. This module must not know HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from corun.completion import Chunk, Generation, Sample
from corun.gateway.requests import CompletionRequest

DONE = "data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; vLLM's number."""
_quoted = json.encoder.encode_basestring_ascii


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What all parts of one response begin with."""

    request_id: str
    created: int
    """Seconds since 1970."""
    model: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }


def completion(head: Head, asked: CompletionRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """The whole response; choices in the order of prompts, then of samples."""
    found = [(generation, sample) for generation in generations for sample in generation.samples]
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    return {
        **head.to_dict(),
        "choices": [_choice(i, asked, *each) for i, each in enumerate(found)],
        "usage": usage(prompt_tokens, sum(len(sample.token_ids) for _, sample in found)),
        "system_fingerprint": found[0][1].receipt.fingerprint,
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


@dataclass(slots=True)
class _Sent:
    """How much of one choice has been sent."""

    tokens: int = 0
    begun: bool = False
    held: Chunk | None = None
    """Its last token, until its receipt is there."""
    text: int = 0
    """Characters."""
    token_texts: int = 0
    """Characters of its tokens; more than those of the text while some of that waits for what follows."""


@dataclass(slots=True)
class _Prompt:
    """What is known of one prompt."""

    token_ids: Sequence[int] = ()
    """Empty until its first chunk, for text."""
    fingerprint: str = ""
    choices: list[_Sent] = field(default_factory=list)


class Events:
    """The events of one stream."""

    def __init__(self, head: Head, asked: CompletionRequest) -> None:
        self._head = head
        self._asked = asked
        opening = json.dumps(head.to_dict(), separators=(",", ":"))
        self._begin = f'data: {opening[:-1]},"choices":[{{"index":'
        self._prompts = [
            _Prompt(() if isinstance(prompt, str) else prompt, "", [_Sent() for _ in range(asked.params.n)])
            for prompt in asked.prompts
        ]

    def chunk(self, prompt_index: int, chunk: Chunk) -> str:
        """New output of one sample; nothing while it waits for its receipt."""
        prompt = self._prompts[prompt_index]
        prompt.token_ids = prompt.token_ids or chunk.prompt_token_ids
        choice = prompt.choices[chunk.sample_index]
        choice.tokens += len(chunk.token_ids)
        if choice.held is not None:
            chunk, choice.held = _both(choice.held, chunk), None
        if chunk.receipt is None and choice.tokens == self._asked.params.max_tokens:
            choice.held = chunk  # A router may send the receipt a moment later: an event, and a time, without a token.
            return ""
        return self._event(prompt_index, prompt, choice, chunk)

    def usage(self) -> str:
        """The last event before the end, if it was asked for."""
        if not self._asked.include_usage:
            return ""
        tokens = sum(choice.tokens for prompt in self._prompts for choice in prompt.choices)
        counted = usage(sum(len(prompt.token_ids) for prompt in self._prompts), tokens)
        fingerprint = {"system_fingerprint": self._prompts[0].fingerprint}
        return f"data: {_dumped({**self._head.to_dict(), 'choices': [], 'usage': counted, **fingerprint})}\n\n"

    def _event(self, prompt_index: int, prompt: _Prompt, choice: _Sent, chunk: Chunk) -> str:
        number = prompt_index * self._asked.params.n + chunk.sample_index
        reason = f'"{chunk.finish_reason.value}"' if chunk.finish_reason else "null"
        logprobs = self._logprobs(choice, chunk) if self._asked.params.logprobs else "null"
        text = f'{self._begin}{number},"text":{_quoted(chunk.text)},"logprobs":{logprobs},"finish_reason":{reason}'
        if self._asked.return_token_ids:
            text += self._token_ids(prompt, choice, chunk)
        if chunk.receipt is not None or not choice.begun:
            text += f',"corun":{_dumped(_own(chunk))}'
            choice.begun = True
        return f"{text}}}]{self._after(prompt, choice, chunk)}}}\n\n"

    def _logprobs(self, choice: _Sent, chunk: Chunk) -> str:
        texts, begin = chunk.token_texts, choice.token_texts
        choice.text += len(chunk.text)
        choice.token_texts += sum(map(len, texts))
        if texts and choice.text > choice.token_texts:  # At the end: a character that its last token left unfinished.
            late = chunk.text[choice.token_texts - choice.text :]
            texts = (*texts[:-1], texts[-1] + late)
        return _logprobs(chunk, texts, begin, as_ids=self._asked.tokens_as_ids)

    def _token_ids(self, prompt: _Prompt, choice: _Sent, chunk: Chunk) -> str:
        of_prompt = "null" if choice.begun else _dumped(list(prompt.token_ids))
        return f',"prompt_token_ids":{of_prompt},"token_ids":[{",".join(map(str, chunk.token_ids))}]'

    def _after(self, prompt: _Prompt, choice: _Sent, chunk: Chunk) -> str:
        """What an event has beside its choice."""
        text = ""
        if chunk.receipt is not None:
            prompt.fingerprint = chunk.receipt.fingerprint
            text += f',"system_fingerprint":"{prompt.fingerprint}"'
        if self._asked.continuous_usage:
            text += f',"usage":{_dumped(usage(len(prompt.token_ids), choice.tokens))}'
        return text


def _both(first: Chunk, last: Chunk) -> Chunk:
    return replace(
        last,
        text=first.text + last.text,
        token_ids=first.token_ids + last.token_ids,
        logprobs=first.logprobs + last.logprobs,
        token_texts=first.token_texts + last.token_texts,
    )


def _choice(index: int, asked: CompletionRequest, generation: Generation, sample: Sample) -> dict[str, Any]:
    logprobs = None
    if asked.params.logprobs:
        logprobs = json.loads(_logprobs(sample, sample.token_texts, 0, as_ids=asked.tokens_as_ids))
    choice: dict[str, Any] = {
        "index": index,
        "text": sample.text,
        "logprobs": logprobs,
        "finish_reason": sample.finish_reason.value,
    }
    if asked.return_token_ids:
        choice |= {"prompt_token_ids": list(generation.prompt_token_ids), "token_ids": list(sample.token_ids)}
    return {**choice, "corun": _own(sample)}


def _own(output: Chunk | Sample) -> dict[str, Any]:
    return {"seed": output.seed} | ({"receipt": output.receipt.to_dict()} if output.receipt else {})


def _logprobs(output: Chunk | Sample, texts: Sequence[str], begin: int, *, as_ids: bool) -> str:
    """vLLM's shape. begin: characters of the sample's tokens before these. as_ids: names in place of texts."""
    values = [repr(max(logprob, _LEAST_LOGPROB)) for logprob in output.logprobs]  # Every bit of an fp32 value.
    names = [f'"token_id:{token_id}"' for token_id in output.token_ids] if as_ids else list(map(_quoted, texts))
    tops = ",".join(f"{{{name}:{value}}}" for name, value in zip(names, values, strict=True))
    offsets = ",".join(map(str, accumulate(map(len, texts[:-1]), initial=begin))) if texts else ""
    tokens = f'"token_logprobs":[{",".join(values)}],"tokens":[{",".join(names)}]'
    return f'{{"text_offset":[{offsets}],{tokens},"top_logprobs":[{tops}]}}'


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
