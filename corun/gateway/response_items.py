"""The answer of /v1/responses: its items, whole or as the events of a stream, in the shape of OpenAI's API.

Items are made by one class as the text comes, so a whole answer has those of its stream. The field `corun` is that of a
chat's choice. This module must not know HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from corun.completion import Chunk, Generation, Sample
from corun.errors import CorunError
from corun.gateway.errors import body_of
from corun.gateway.requests import CompletionRequest
from corun.gateway.responses import Events, Head, Shape, dumped, own
from corun.gateway.tool_calls import CallPart, Parsed
from corun.types import FinishReason

Event = dict[str, Any]


def shape(told: Mapping[str, Any]) -> Shape:
    """Return the shape of the answers to one request. told: what they repeat of it."""
    return Shape(head=partial(head, told), completion=completion, events=ItemEvents)


def head(told: Mapping[str, Any], asked: CompletionRequest, model: str) -> Head:
    """Return the response before anything of it is known."""
    return {
        "id": f"resp_{asked.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **told,
    }


def completion(head: Head, asked: CompletionRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the whole response."""
    (generation,) = generations
    (sample,) = generation.samples
    items = Items(asked, sample.seed)
    items.push(sample.text)
    items.finish(sample.finish_reason)
    return ended(head, items.found, sample, len(generation.prompt_token_ids), len(sample.token_ids))


def ended(
    head: Head, output: list[Any], last: Sample | Chunk, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """Return the response at its end."""
    assert last.receipt is not None
    is_cut = last.finish_reason is FinishReason.LENGTH
    usage = {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.receipt.cached_tokens},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return {
        **head,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": usage,
        "system_fingerprint": last.receipt.fingerprint,
        "corun": own(last),
    }


class Items:
    """The items of one answer, and the events that tell of them as they come."""

    def __init__(self, asked: CompletionRequest, seed: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._id, self._seed, self._calls = asked.request_id, seed, asked.calls
        self._reader = self._calls.reader() if self._calls is not None else None
        self._is_open = False
        """Whether the last item goes on."""
        self._texts: list[str] = []
        """What the open item has so far, to be joined at its end: a text that grows by a piece is copied each time."""

    def push(self, text: str) -> list[Event]:
        """Take new text. Return the events of it."""
        return self._take(self._reader.push(text) if self._reader else Parsed([text] if text else []))

    def finish(self, reason: FinishReason | None) -> list[Event]:
        """Take the end of the answer. Return the events of it."""
        events = self._take(self._reader.finish()) if self._reader else []
        if not self.found:
            events += self._begin_message()
        return events + self._close("incomplete" if reason is FinishReason.LENGTH else "completed")

    def _take(self, parsed: Parsed) -> list[Event]:
        taken = [self._said(part) if isinstance(part, str) else self._call(part) for part in parsed.parts]
        return [event for events in taken for event in events]

    def _said(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open or self.found[-1]["type"] != "message":
            events += self._close() + self._begin_message()
        self._texts.append(text)
        return [*events, self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[])]

    def _begin_message(self) -> list[Event]:
        item = {"id": f"msg_{self._id}_{len(self.found)}", "type": "message", "role": "assistant"}
        self.found.append({**item, "status": "in_progress", "content": [_text_part()]})
        self._is_open = True
        begun = {"item": {**self.found[-1], "content": []}}
        added = self._event("response.content_part.added", content_index=0, part=_text_part())
        return [self._of_item("response.output_item.added", **begun), added]

    def _call(self, call: CallPart) -> list[Event]:
        events = []
        if call.name is not None:
            assert self._calls is not None
            events += self._close()
            names = {"call_id": self._calls.id_of(self._seed, call.index), "name": call.name}
            item = {"id": f"fc_{self._id}_{len(self.found)}", "type": "function_call", "status": "in_progress"}
            self.found.append({**item, **names, "arguments": ""})
            self._is_open = True
            events.append(self._of_item("response.output_item.added", item=dict(self.found[-1])))
        self._texts.append(call.arguments)
        return [*events, self._event("response.function_call_arguments.delta", delta=call.arguments)]

    def _close(self, status: str = "completed") -> list[Event]:
        """End the item that is open, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.found[-1]
        item["status"], text, self._texts = status, "".join(self._texts), []
        done = self._of_item("response.output_item.done", item=item)
        if item["type"] == "function_call":
            item["arguments"] = text
            whole = {"name": item["name"], "arguments": text}
            return [self._event("response.function_call_arguments.done", **whole), done]
        (part,) = item["content"]
        part["text"] = text
        told = self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
        return [told, self._event("response.content_part.done", content_index=0, part=part), done]

    def _event(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, item_id=self.found[-1]["id"], **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.found) - 1, **fields}


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class ItemEvents(Events):
    """The events of one streamed answer."""

    done = ""

    def __init__(self, head: Head, asked: CompletionRequest) -> None:
        super().__init__(head, asked)
        self._items: Items | None = None
        self._num_sent = self._num_tokens = 0

    def chunk(self, prompt_index: int, chunk: Chunk) -> str:
        begun = ""
        if self._items is None:
            self._items = Items(self._asked, chunk.seed)
            begun = self._told({"type": "response.created", "response": self._head})
            begun += self._told({"type": "response.in_progress", "response": self._head})
        self._num_tokens += len(chunk.token_ids)
        events = self._items.push(chunk.text)
        if chunk.receipt is not None:
            events += self._items.finish(chunk.finish_reason)
            response = ended(self._head, self._items.found, chunk, len(self._prompts[0]), self._num_tokens)
            events.append({"type": f"response.{response['status']}", "response": response})
        return begun + "".join(map(self._told, events))

    def failure(self, error: CorunError) -> str:
        found = body_of(error)["error"]
        fields = {"code": found["type"], "message": found["message"], "param": found["param"]}
        return self._told({"type": "error", **fields})

    def _told(self, event: Event) -> str:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return f"event: {event['type']}\ndata: {dumped({**event, 'sequence_number': number})}\n\n"
