"""The answer to a chat as JSON, as a whole or as the events of a stream, in the shape of OpenAI's API as vLLM has it.

What differs from a completion is here; what is common to both is in `responses`. This module must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from corun.completion import Chunk, Generation, Sample
from corun.gateway import tools
from corun.gateway.requests import CompletionRequest
from corun.gateway.responses import (
    Events,
    Listed,
    Parts,
    Sent,
    Shape,
    begin,
    dumped,
    exact,
    names_of,
    own,
    quoted,
    usage,
    whole,
)
from corun.types import NO_ALTERNATIVES, Alternatives


def head(asked: CompletionRequest, model: str) -> dict[str, Any]:
    """Return the fields with which every part of one response begins."""
    return begin(f"chatcmpl-{asked.request_id}", "chat.completion.chunk" if asked.stream else "chat.completion", model)


def completion(head: dict[str, Any], asked: CompletionRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the whole response."""
    (generation,) = generations
    choices = [_choice(asked, sample) for sample in generation.samples]
    prompt = {"prompt_token_ids": list(generation.prompt_token_ids)} if asked.return_token_ids else {}
    return whole(head, choices, generations) | prompt


class ChatEvents(Events):
    """The events of one streamed answer. It begins with the role of every choice, in their order: OpenAI's package
    expects the first choice in the first event, and the others in the order of their indexes."""

    def __init__(self, head: dict[str, Any], asked: CompletionRequest) -> None:
        super().__init__(head, asked)
        calls = asked.calls
        self._readers = [calls.reader() for _ in self._choices] if calls is not None else ()
        self._has_begun = False

    def _event(self, number: int, prompt: Sequence[int], choice: Sent, chunk: Chunk) -> str:
        event = super()._event(number, prompt, choice, chunk)
        if self._has_begun:
            return event
        self._has_begun = True
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        counted = f',"usage":{dumped(usage(len(prompt), 0))}' if self._asked.continuous_usage else ""
        roles = [f"{self._begin}{each},{delta}}}]{counted}" for each in range(len(self._choices))]
        roles[0] += f',"prompt_token_ids":{dumped(list(prompt))}' if self._asked.return_token_ids else ""
        return "}\n\n".join([*roles, event])

    def _content(self, choice: Sent, prompt_index: int, chunk: Chunk) -> str:
        calls = self._asked.calls
        if calls is None:
            return f'"delta":{{"content":{quoted(chunk.text)}}}'
        reader = self._readers[chunk.sample_index]
        parts = [reader.push(chunk.text), *([reader.finish()] if chunk.receipt is not None else [])]
        content = "".join(part.content for part in parts)
        called = [each for part in parts for each in tools.deltas(part, calls, chunk.seed)]
        delta = ({"content": content} if content else {}) | ({"tool_calls": called} if called else {})
        return f'"delta":{dumped(delta)}'

    def _reason(self, chunk: Chunk) -> str:
        reason = super()._reason(chunk)
        if self._asked.calls is None or not reason:
            return reason
        return self._asked.calls.finish_reason(reason, self._readers[chunk.sample_index].num_calls)

    def _ids(self, choice: Sent, prompt: Sequence[int], chunk: Chunk) -> str:
        return f',"token_ids":[{",".join(map(str, chunk.token_ids))}]'

    def _logprobs(self, chunk: Chunk, texts: Sequence[str], begin: int) -> str:
        opening, entries, end = _logprobs(chunk, texts, as_ids=self._asked.tokens_as_ids)
        return f"{opening}{','.join(entries)}{end}"


CHAT = Shape(head=head, completion=completion, events=ChatEvents)


def _choice(asked: CompletionRequest, sample: Sample) -> dict[str, Any]:
    logprobs = None
    if asked.params.logprobs:
        logprobs = Parts(lambda: _logprobs(sample, sample.token_texts, as_ids=asked.tokens_as_ids))
    reason, said = sample.finish_reason.value, {"role": "assistant", "content": sample.text}
    if asked.calls is not None:
        said, num_calls = tools.message(sample.text, asked.calls, sample.seed)
        reason = asked.calls.finish_reason(reason, num_calls)
    choice = {"index": sample.index, "message": said, "logprobs": logprobs, "finish_reason": reason}
    ids = {"token_ids": list(sample.token_ids)} if asked.return_token_ids else {}
    return {**choice, **ids, "corun": own(sample)}


def _logprobs(output: Chunk | Sample, texts: Sequence[str], *, as_ids: bool) -> Listed:
    """Return the log probabilities as JSON, with the alternatives of each token if there are any.

    A token that is its own alternative has the same name there: alone, a part of a character has another text.
    """
    tops = output.top_logprobs or [NO_ALTERNATIVES] * len(output.token_ids)
    drawn = zip(output.token_ids, texts, _tokens(output, texts, as_ids=as_ids), tops, strict=True)
    entries = (
        f'{{{token},"top_logprobs":[{_beside(token_id, text, each, as_ids=as_ids) if each.token_ids else ""}]}}'
        for token_id, text, token, each in drawn
    )
    return '{"content":[', entries, "]}"


def _beside(token_id: int, text: str, tops: Alternatives, *, as_ids: bool) -> str:
    """Return the alternatives to a drawn token as the items of a JSON list. text: the drawn token's own."""
    texts = [text if other == token_id else its for other, its in zip(tops.token_ids, tops.texts, strict=True)]
    return ",".join(f"{{{each}}}" for each in _tokens(tops, texts, as_ids=as_ids))


def _tokens(found: Chunk | Sample | Alternatives, texts: Sequence[str], *, as_ids: bool) -> Iterator[str]:
    """Yield the fields of each token: its name, log probability and bytes."""
    for name, logprob, text in zip(names_of(found, texts, as_ids=as_ids), found.logprobs, texts, strict=True):
        yield f'"token":{name},"logprob":{exact(logprob)},"bytes":{list(text.encode())}'
