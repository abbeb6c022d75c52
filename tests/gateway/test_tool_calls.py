"""Tool calls in texts: styles that templates write, and reading them, in whatever pieces the text comes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corun.chat import ChatTemplate
from corun.gateway.chats import call_style
from corun.gateway.tool_calls import CallReader, CallStyle, Parsed, style_of
from corun.types import TemplateSource

HERMES = CallStyle(begin="<tool_call>\n", end="\n</tool_call>", opening='{"name": ', middle=', "arguments": ')
PLAIN = CallStyle(begin="", end="", opening='{"name": ', middle=', "parameters": ')
LIST = CallStyle(begin="", end="", opening='{"name": ', middle=', "arguments": ', is_list=True)
TAGGED_LIST = CallStyle(
    begin="<tool_call>", end="</tool_call>", opening='{"name": ', middle=', "arguments": ', is_list=True
)
STYLES = {"hermes": HERMES, "plain": PLAIN, "list": LIST, "tagged list": TAGGED_LIST}
NAMES = ("f", "get_weather")
CALLS = "{% for c in m.tool_calls or [] %}"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "{% if m.content or not loop.first %}\n"
    '{% endif %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
LLAMA = (
    "{{ tools | tojson }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    + CALLS
    + '{"name": '
    '"{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}'
)
MISTRAL = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] ["
    + CALLS
    + '{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</s>{% endif %}{% endfor %}'
)
SMOL = MISTRAL.replace("[TOOL_CALLS] [", "<tool_call>[").replace("]</s>", "]</tool_call>")
CODER = (
    "{{ tools }}{% for m in messages %}" + CALLS + "<tool_call>\n<function={{ c.function.name }}>\n</function>\n"
    "</tool_call>{% endfor %}{% endfor %}"
)
NESTED = (
    "{{ tools }}{% for m in messages %}" + CALLS + '{"type": "function", "function": {"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}}{% endfor %}{% endfor %}'
)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (QWEN, HERMES),
        (LLAMA, PLAIN),
        (MISTRAL, LIST),
        (SMOL, TAGGED_LIST),
        (CODER, None),
        (NESTED, None),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", None),  # It writes no calls.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),  # It has no tools.
    ],
)
def test_a_style_is_what_the_template_writes(template: str, style: CallStyle | None) -> None:
    assert call_style(ChatTemplate(TemplateSource(source=template))) == style


def test_a_style_of_nothing_is_none() -> None:
    assert [style_of(text) for text in ("", '"corun_probe_function"', '{"corun_probe_function"')] == [None] * 3


def read(style: CallStyle, *pieces: str, names: tuple[str, ...] = NAMES) -> tuple[str, list[tuple[str, str]]]:
    """Return what is said in a text, and the calls in it: names and arguments."""
    reader = CallReader(style, names)
    parts = [*map(reader.push, pieces), reader.finish()]
    return folded(parts)


def folded(parts: list[Parsed]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for part in (call for each in parts for call in each.calls):
        if part.name is not None:
            assert part.index == len(calls)
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return "".join(each.content for each in parts), [(name, arguments) for name, arguments in calls]


W = '{"city": "Paris, \\"}\\u00e9", "days": [1, {"a": null}]}'
UNKNOWN = f'<tool_call>\n{{"name": "unknown", "arguments": {W}}}\n</tool_call>\n'
NO_NAME = '<tool_call>{"name": 5, "arguments": {}}</tool_call>'
TWO = '[{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'
BOTH = [("f", '{"a": 1}'), ("get_weather", "{}")]
CASES: list[tuple[CallStyle, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Hello <b>you</b>\n", "Hello <b>you</b>\n", []),
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {W}}}\n</tool_call>', "", [("f", W)]),
    (HERMES, f'<tool_call>{{"name":"f","arguments":{W}}}</tool_call>', "", [("f", W)]),
    (
        HERMES,
        'I see.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n' + UNKNOWN,
        "I see.",
        [("f", "{}"), ("unknown", W)],
    ),
    # The arguments come first, or are text, or there is more: what cannot be told as it comes is told at its end.
    (HERMES, '<tool_call>{"arguments": {"a": "é"}, "name": "f"}</tool_call>', "", [("f", '{"a": "é"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"id": 1, "name": "f", "arguments": {}}</tool_call> Done.', " Done.", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>', "", [("f", "{}")]),
    # The closing tag is missing.
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} and so on', " and so on", [("f", "{}")]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f", "arguments": {"a": 1}}',
        "",
        [("f", "{}"), ("f", '{"a": 1}')],
    ),
    # Cut off: the arguments so far, or what is not known to be a call.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, "a <tool_c", "a <tool_c", []),
    (HERMES, 'a <tool_call>{"name": "f", "arguments": {}}\n</tool_c', "a", [("f", "{}")]),
    (TAGGED_LIST, f"<tool_call>{TWO}</", "", BOTH),
    # No calls.
    (HERMES, "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    (HERMES, NO_NAME, NO_NAME, []),
    (HERMES, "<tool_call>{]}</tool_call>", "<tool_call>{]}</tool_call>", []),
    (HERMES, "<<tool_call><tool", "<<tool_call><tool", []),
    (PLAIN, f'\n{{"name": "f", "parameters": {W}}}', "", [("f", W)]),
    (PLAIN, f'{{"name": "unknown", "parameters": {W}}}', f'{{"name": "unknown", "parameters": {W}}}', []),
    (PLAIN, '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    (PLAIN, 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    (PLAIN, "  ", "  ", []),
    (LIST, TWO, "", BOTH),
    (LIST, "[1, 2]", "[1, 2]", []),
    (TAGGED_LIST, f"<tool_call>{TWO}</tool_call>", "", BOTH),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_what_is_said_and_called(style: CallStyle, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(style, text) == (content, calls)
    assert read(style, *text) == (content, calls)


PARTS = [
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{", "}", "[", "]", '"', "\\",
    "\n", " ", "a", "é", ",", "<", "tool_call",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(STYLES)), st.lists(st.sampled_from(PARTS), max_size=14), st.randoms())
def test_any_text_in_any_pieces_gives_the_same(style: str, parts: list[str], draw: random.Random) -> None:
    """Nothing is dropped but tags, white space around them and a call's own JSON: without calls all is said."""
    text = "".join(parts)
    cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), 5)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(STYLES[style], text)
    assert read(STYLES[style], *pieces) == whole == read(STYLES[style], *text)
    if not whole[1]:
        assert whole[0] == text


def test_long_texts_are_read_as_short_pieces_are() -> None:
    long = (
        "So, it says. " * 300 + f'<tool_call>{{"name": "f", "arguments": {{"a": "{"b " * 900}"}}}}</tool_call> \n' * 3
    )
    content, calls = read(HERMES, long + "Done." * 900)
    assert (content, calls) == read(HERMES, *long, "Done." * 900)
    assert [len(arguments) for _, arguments in calls] == [1809] * 3


def test_arguments_are_told_as_they_come() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.push('<tool_call>\n{"name": "f", "arguments": ') == Parsed()
    (began,) = reader.push('{"a').calls
    assert (began.index, began.name, began.arguments) == (0, "f", '{"a')
    (more,) = reader.push('": 1}').calls
    assert (more.index, more.name, more.arguments) == (0, None, '": 1}')
    assert reader.push("}\n</tool_call>") == Parsed()


@pytest.mark.parametrize(
    "text",
    [
        " " * 50_000 + "a",
        "<tool_call>" * 5_000,
        '<tool_call>{"name": "' + "{" * 50_000,
        '<tool_call>{"a": ' + '{"a": ' * 10_000,
        '<tool_call>{"name": "f", "arguments": ' + "{" * 50_000,
        '<tool_call>{"name": "f", "arguments": {}}' + " " * 50_000 + "a",
    ],
)
def test_long_texts_are_read(text: str) -> None:
    """Each took minutes if all that came so far were looked at for each character."""
    read(HERMES, text)


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize("several", [False, True])
def test_a_constraint_allows_calls_that_the_reader_reads_and_nothing_else(style: str, several: bool) -> None:
    grammar: Any = pytest.importorskip("decode_node.grammar")
    from corun.models import tiny

    tokens = grammar.tokenizer(tiny.ensure() / "tokenizer.json", 512, [509])
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    made = STYLES[style]
    text = made.grammar({"f": schema, "get_weather": {"type": "object"}}, several=several)
    assert grammar.trial(tokens, "grammar", text) == ""

    def allows(output: str) -> bool:
        matcher = grammar.Matcher(tokens, "grammar", text)
        return all(map(matcher.accept, tokens.tokenize_str(output))) and matcher.accept(509)

    def call(name: str, arguments: str) -> str:
        return made.opening + json.dumps(name) + made.middle + arguments + "}"

    one, two = call("f", '{"a": 5}'), call("get_weather", '{"city": "Paris"}')
    begin, end = (made.begin + "[", "]" + made.end) if made.is_list else (made.begin, made.end)
    both = f"{begin}{one}, {two}{end}" if made.is_list else f"{begin}{one}{end}\n{begin}{two}{end}"
    assert allows(begin + one + end)
    assert read(made, begin + one + end) == ("", [("f", '{"a": 5}')])
    assert allows(both) is (several and style != "plain")
    if style != "plain":
        assert read(made, both) == ("", [("f", '{"a": 5}'), ("get_weather", '{"city": "Paris"}')])
    for wrong in ("", "Hello", begin + call("g", "{}") + end, begin + call("f", '{"a": "x"}') + end, begin + one):
        assert not allows(wrong) or (wrong == begin + one and not end)


def test_calls_after_the_first_one_are_left_out_where_one_is_allowed() -> None:
    text = 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    for pieces in ([text * 3], list(text * 3)):
        reader = CallReader(HERMES, NAMES, several=False)
        assert folded([*map(reader.push, pieces), reader.finish()]) == ("So:\nSo:\nSo:", [("f", '{"a": 1}')])
        assert reader.num_calls == 3
