"""The items of an answer: the same in whatever pieces its text comes, and read in time that grows as the text does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.gateway.response_items import Items
from corun.gateway.tool_calls import CallReader, CallStyle
from corun.gateway.tools import Calls, ToolUse
from corun.types import FinishReason
from tests.gateway.test_tool_calls import HERMES, PARTS, STYLES

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def items(style: CallStyle | None) -> Items:
    use = ToolUse(functions={"f": {}, "get_weather": {}}, choice="auto", is_named=False, parallel=True)
    calls = Calls(use=use, style=style, prompt_digest="") if style else None
    asked: Any = SimpleNamespace(request_id="x", calls=calls)
    return Items(asked, 3)


def merged(events: list[Any]) -> list[Any]:
    """Return events in which neighbouring pieces of one text are one piece."""
    found: list[Any] = []
    for event in events:
        if "delta" in event and found and found[-1]["type"] == event["type"]:
            found[-1] = {**event, "delta": found[-1]["delta"] + event["delta"]}
        else:
            found.append(event)
    return found


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([None, *STYLES.values()]), st.lists(st.sampled_from([*PARTS, CALL]), max_size=14), st.randoms())
def test_pieces_bring_what_their_characters_bring(
    style: CallStyle | None, parts: list[str], draw: random.Random
) -> None:
    """So what is said between calls stays between them, and a whole answer has the items of its stream."""
    text, whole, pieces, chars = "".join(parts), items(style), items(style), items(style)
    cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 5)))
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        told = pieces.push(text[begin:end])
        assert told == merged([event for char in text[begin:end] for event in chars.push(char)])
    whole.push(text)
    ends = [each.finish(FinishReason.STOP) for each in (pieces, chars, whole)]
    assert ends[0] == ends[1] == ends[2]
    assert pieces.found == chars.found == whole.found


def test_what_is_said_between_calls_stays_between_them() -> None:
    made = items(HERMES)
    made.push(f"A {CALL} B {CALL}{CALL} C")
    made.finish(FinishReason.STOP)
    said = [item["content"][0]["text"] if "content" in item else item["arguments"] for item in made.found]
    assert said == ["A", '{"a": 1}', " B", '{"a": 1}', '{"a": 1}', " C"]


class Counted(str):
    """Text that counts the characters that are copied when texts are added to each other."""

    __slots__ = ()
    copied = 0

    def __add__(self, other: str) -> Counted:
        return self._counted(str(self) + str(other))

    def __radd__(self, other: str) -> Counted:
        return self._counted(str(other) + str(self))

    @staticmethod
    def _counted(text: str) -> Counted:
        Counted.copied += len(text)
        return Counted(text)


def test_a_long_stream_copies_no_text_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "copied", 0)
    made = items(None)
    for _ in range(1000):
        made.push(Counted("word "))
    made.finish(FinishReason.STOP)
    assert made.found[0]["content"][0]["text"] == "word " * 1000
    assert Counted.copied <= 10_000


def test_a_long_text_is_pushed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[int] = []
    push = CallReader.push
    monkeypatch.setattr(CallReader, "push", lambda reader, text: pushed.append(len(text)) or push(reader, text))
    text = "word " * 1000 + CALL.replace("1", '"' + "word " * 1000 + '"')
    made = items(HERMES)
    made.push(text)
    assert [item["type"] for item in made.found] == ["message", "function_call"]
    assert pushed == [len(text)]
