"""Tool calls in the text of a model: how a template writes them, what they are constrained to, how they are read.

A style is learned from what the template writes for a call that is known (`style_of`); no model is known by its name.
Two styles are read: JSON between two tags, `<tool_call>{...}</tool_call>`, and an answer that is plain JSON. The reader
takes one character at a time, so what it makes of a text does not depend on how the text came in pieces. This module
must not know templates, HTTP or how tokens are drawn.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

PROBE_NAME = "corun_probe_function"
PROBE_ARGUMENTS = {"corun_probe_argument": "corun_probe_value"}
PROBE_MESSAGES: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        # Some templates refuse ids of another length.
        "tool_calls": [
            {"id": "corun0000", "type": "function", "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}}
        ],
    },
)
PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {"name": "corun_tool", "description": "x", "parameters": {"type": "object", "properties": {}}},
    },
)
"""A chat with one call, and a tool with another name, so that only the call has the probe's."""
MAX_HEAD = 512
"""The most characters of a call up to its arguments for them to be told as they come; else they are told at its end."""
MAX_SPACE = 64
"""The most white space before a tag that is left out with it."""
_TAG_BEFORE = re.compile(r"<([^<>\s/][^<>\s]*)>(\s*)$")
_ORDINARY = re.compile(r'[^{}\[\]"\\]+')
"""Characters that do not change the nesting of JSON, within a text or without, unless the first one is escaped."""
_TAG_AFTER = re.compile(r"(\s*)</([^<>\s]+)>")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStyle:
    """How calls are written."""

    begin: str
    """The tag before a call, with the white space behind it; empty if calls are plain JSON."""
    end: str
    """The tag after a call, with the white space before it."""
    opening: str
    """What a call begins with, up to the name as a JSON text."""
    middle: str
    """What is between the name and the arguments, a JSON object."""
    is_list: bool = False
    """Whether the calls are a JSON list."""

    @property
    def keys(self) -> tuple[str, str]:
        """The JSON keys of name and arguments."""
        name, arguments = re.findall(r'"((?:[^"\\]|\\.)*)"\s*:', self.opening + '""' + self.middle)
        return name, arguments

    def grammar(self, functions: Mapping[str, Any], *, several: bool) -> str:
        """Return the constraint, in Lark, of an output that is a call.

        functions: the JSON schemas of arguments by names. several: whether more calls may follow the first.
        """
        calls = " | ".join(f"call_{number}" for number in range(len(functions)))
        begin, end = (self.begin + "[", "]" + self.end) if self.is_list else (self.begin, self.end)
        one, more = f"( {calls} )", ""
        if self.is_list:
            more = f'( ", " {one} )*' if several else ""
            one = _sequence(begin, f"{one} {more}", end)
        else:
            one = _sequence(begin, one, end)
            more = f'( "\\n" {one} )*' if several and self.begin else ""
            one = f"{one} {more}"
        rules = [f"start: {one}"]
        for number, (name, schema) in enumerate(functions.items()):
            head = json.dumps(self.opening + json.dumps(name) + self.middle)
            rules += [
                f'call_{number}: {head} arguments_{number} "}}"',
                f"arguments_{number}: %json {json.dumps(schema)}",
            ]
        return "\n".join(rules)


def _sequence(begin: str, inner: str, end: str) -> str:
    return " ".join(
        each for each in (json.dumps(begin) if begin else "", inner, json.dumps(end) if end else "") if each
    )


def style_of(rendered: str) -> CallStyle | None:
    """Return how a template has written the call of `PROBE_MESSAGES`; None if it is in no style that is read here."""
    at = rendered.rfind(json.dumps(PROBE_NAME))
    start = rendered.rfind("{", 0, max(at, 0))
    if at < 0 or start < 0:
        return None
    try:
        call, end = json.JSONDecoder().raw_decode(rendered, start)
    except ValueError:
        return None
    opening, rest = rendered[start:at], rendered[at + len(json.dumps(PROBE_NAME)) : end]
    middle = rest[: rest.find("{")]
    if list(call.values()) != [PROBE_NAME, PROBE_ARGUMENTS] or "{" not in rest:
        return None
    before, after, is_list = rendered[:start], rendered[end:], False
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        before, after, is_list = before.rstrip()[:-1], after.lstrip()[1:], True
    opened, closed = _TAG_BEFORE.search(before), _TAG_AFTER.match(after)
    tags = ("", "")
    if opened and closed and opened[1] == closed[2]:
        tags = opened[0], closed[0]
    elif before.rstrip().endswith((":", ",", "```", "```json")):
        return None  # It is part of something else.
    return CallStyle(begin=tags[0], end=tags[1], opening=opening, middle=middle, is_list=is_list)


@dataclass(slots=True)
class CallPart:
    """New output of one call."""

    index: int
    name: str | None = None
    """The function's name; set in a call's first part."""
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What new text has brought."""

    parts: list[str | CallPart] = field(default_factory=list)
    """What is said, and the output of calls, in their order."""

    @property
    def content(self) -> str:
        """All that is said."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]

    def say(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def argue(self, index: int, text: str) -> None:
        self.parts.append(CallPart(index, arguments=text))

    def joined(self) -> Parsed:
        """Return the same with neighbouring parts as one. They are joined once, since a text that grows by a character
        is copied each time."""
        made = Parsed()
        for index, group in groupby(self.parts, lambda part: part.index if isinstance(part, CallPart) else None):
            parts = Parsed(list(group))
            if index is None:
                made.say(parts.content)
            else:
                calls = parts.calls
                made.parts.append(CallPart(index, calls[0].name, "".join(call.arguments for call in calls)))
        return made


class _At(enum.Enum):
    START = enum.auto()
    """At the start of an answer that may be plain JSON."""
    TEXT = enum.auto()
    HEAD = enum.auto()
    """In a call whose arguments have not begun, as far as is known."""
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    """Behind the arguments, in the call."""
    AFTER = enum.auto()
    """Behind the call, where another or the closing tag may come."""


class _Nesting:
    """How deep the end of a text is in JSON's brackets."""

    __slots__ = ("_in_text", "depth", "is_escaped")

    def __init__(self) -> None:
        self.depth = 0
        self._in_text = self.is_escaped = False

    def push(self, char: str) -> None:
        if self.is_escaped:
            self.is_escaped = False
        elif self._in_text:
            self.is_escaped, self._in_text = char == "\\", char != '"'
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
        else:
            self._in_text = char == '"'


class CallReader:
    """Reads the text of one answer: what it says, and the calls in it.

    What looks like a call and is none is text. In the plain style, only calls of functions that are there are calls.
    Arguments are what the model wrote, and may be broken JSON if its output was cut off. Where an answer may not have
    several calls, those after the first one are left out, as vLLM does.
    """

    def __init__(self, style: CallStyle, names: Collection[str], *, several: bool = True) -> None:
        self.num_calls = 0
        self._several = several
        self._begin, self._end = style.begin.rstrip(), style.end.lstrip()
        self._names = frozenset(names)
        self._keys = style.keys
        name, arguments = (re.escape(json.dumps(key)) for key in style.keys)
        self._head = re.compile(rf'\{{\s*{name}\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{arguments}\s*:\s*\{{')
        self._ordinary = re.compile(rf"[^\s{re.escape(self._begin[:1])}]+")
        self._at = _At.TEXT if self._begin else _At.START
        self._held = ""
        """Text that may be part of a tag, or white space before one."""
        self._raw: list[str] = []
        """All of the call that is being read."""
        self._object: list[str] = []
        """The characters of the call's JSON so far, in `HEAD`."""
        self._in_list = False
        self._call = self._inner = _Nesting()

    def push(self, text: str) -> Parsed:
        """Return what new text brings."""
        found, at = Parsed(), 0
        while at < len(text):
            if run := self._run(text, at):
                at += len(run)
                self._take_run(run, found)
            else:
                self._step(text[at], found)
                at += 1
        if not self._several:
            found.parts = [part for part in found.parts if isinstance(part, str) or not part.index]
        return found.joined()

    def finish(self) -> Parsed:
        """Return what is left at the end of the answer."""
        found = Parsed()
        if self._at is _At.HEAD:
            found.say("".join(self._raw))
        elif self._at is not _At.AFTER and (self._held.strip() or not self.num_calls):
            found.say(self._held)  # Behind a call it is the beginning of the closing tag.
        self._held, self._raw = "", []
        return found

    def _run(self, text: str, at: int) -> str:
        """Return characters from `at` on that change nothing but what is told; often none. To take them one at a time
        would come to the same."""
        if self._at is _At.ARGUMENTS and not self._inner.is_escaped:
            run = _ORDINARY.match(text, at)
        elif self._at is _At.TEXT and not self._held:
            run = self._ordinary.match(text, at)
        else:
            run = None
        return run[0] if run else ""

    def _take_run(self, run: str, found: Parsed) -> None:
        if self._at is _At.ARGUMENTS:
            found.argue(self.num_calls - 1, run)
        else:
            found.say(run)

    def _step(self, char: str, found: Parsed) -> None:
        if self._at is _At.ARGUMENTS:
            self._inner.push(char)
            self._call.push(char)
            found.argue(self.num_calls - 1, char)
            if not self._inner.depth:
                self._at = _At.TAIL
        elif self._at is _At.TAIL:
            self._call.push(char)
            if not self._call.depth:
                self._at, self._held = _At.AFTER, ""
        elif self._at is _At.HEAD:
            self._step_head(char, found)
        elif self._at is _At.AFTER:
            self._step_after(char, found)
        elif self._at is _At.START:
            self._held += char
            if char in "{[":
                self._begin_call()
                self._step_head(char, found, is_raw=True)
            elif not char.isspace() or len(self._held) > MAX_SPACE:
                self._at = _At.TEXT
                self._release(found)
        else:
            self._held += char
            if self._begin and self._held.lstrip() == self._begin:
                self._begin_call()
            else:
                self._release(found)

    def _begin_call(self) -> None:
        self._at, self._raw, self._held = _At.HEAD, [self._held], ""
        self._object, self._in_list, self._call = [], False, _Nesting()

    def _step_head(self, char: str, found: Parsed, *, is_raw: bool = False) -> None:
        if not is_raw:
            self._raw.append(char)
        if not self._object:
            if char == "[" and not self._in_list:
                self._in_list = True
            elif char == "{":
                self._object.append(char)
                self._call.push(char)
            elif not char.isspace():
                self._give_up(found)
            return
        self._object.append(char)
        self._call.push(char)
        if char == "{" and self._call.depth == 2 and len(self._object) <= MAX_HEAD:
            head = self._head.fullmatch("".join(self._object))
            if head and isinstance(name := _loaded(head[1]), str) and self._takes(name):
                self._tell(name, "{", found)
                self._at, self._inner = _At.ARGUMENTS, _Nesting()
                self._inner.push(char)
        elif not self._call.depth:
            self._end_head(found)

    def _end_head(self, found: Parsed) -> None:
        """Read a call whose arguments could not be told as they came."""
        call = _loaded("".join(self._object))
        name, arguments = (call.get(key) if isinstance(call, dict) else None for key in self._keys)
        if not isinstance(name, str) or not self._takes(name) or not isinstance(arguments, (dict, str)):
            self._give_up(found)
            return
        self._tell(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False), found)
        self._at, self._held = _At.AFTER, ""

    def _step_after(self, char: str, found: Parsed) -> None:
        self._held += char
        rest = self._held.lstrip()
        if self._in_list and rest == ",":
            self._held = ""
        elif self._in_list and rest == "{":
            self._begin_call()
            self._in_list = True
            self._step_head(char, found, is_raw=True)
        elif self._in_list and rest == "]":
            self._in_list, self._held = False, ""
        elif self._end and rest == self._end:
            self._at, self._held = _At.TEXT, ""
        elif (rest and not self._end.startswith(rest)) or len(self._held) > MAX_SPACE + len(self._end):
            # The closing tag is not there. What is may be the next call.
            text, self._held, self._at = self._held, "", _At.TEXT
            for each in text:
                self._step(each, found)

    def _takes(self, name: str) -> bool:
        return bool(self._begin) or name in self._names

    def _tell(self, name: str, arguments: str, found: Parsed) -> None:
        found.parts.append(CallPart(self.num_calls, name, arguments))
        self.num_calls += 1

    def _give_up(self, found: Parsed) -> None:
        """Take what looked like a call for text."""
        found.say("".join(self._raw))
        self._at, self._raw, self._object = _At.TEXT, [], []

    def _release(self, found: Parsed) -> None:
        """Tell the held text up to where a tag may begin, or white space before one."""
        held = self._held
        start = 0
        while start < len(held) and not self._may_begin(held[start:]):
            start += 1
        found.say(held[:start])
        self._held = held[start:]

    def _may_begin(self, text: str) -> bool:
        return len(text) <= MAX_SPACE + len(self._begin) and self._begin.startswith(text.lstrip())


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
