"""Chats become the same prompts as with transformers; a template that errs, or does too much, ends in a typed error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corun.chat import MAX_ARGUMENTS, ChatTemplate, read_template
from corun.errors import InvalidArgumentError, UnavailableError
from corun.types import SpecialToken, TemplateSource

CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
RICH = """{{ bos_token }}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% set ns = namespace(last=none) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index0 > 8 %}{% break %}{% endif %}
    {% set ns.last = message.role %}
    {% if message.role == 'assistant' %}
        {% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {% elif message.content is string %}
        {{ loop.index }}/{{ loop.length }} {{ message.role.upper() }}: {{ message['content'] }}
    {% endif %}
    {% for call in message.tool_calls or [] %}
        {{ call.function.name }}({{ call.function.arguments | tojson }}){{ "," if not loop.last }}
    {% endfor %}
    {% if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('no such role') }}{% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
{% if add_generation_prompt %}{{ ns.last }}> {% endif %}"""
USER = {"role": "user", "content": "1 < 2 & \u00fc"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "several": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": " hm "}, USER],
    "tools": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(source: str) -> ChatTemplate:
    tokens = tuple(SpecialToken(name=name, text=text) for name, text in TOKENS.items())
    return ChatTemplate(TemplateSource(source=source, special_tokens=tokens))


def refusal(template: ChatTemplate, messages: Any, **kwargs: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as found:
        template.render(messages, **kwargs)
    return found.value


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("source", [CHATML, RICH])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_prompts_are_those_of_transformers(name: str, source: str, add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = CHATS[name]
    called = [
        message | {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"x": 1}}}]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
    asked: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    if source is RICH:
        asked |= {"tools": [TOOL], "enable_thinking": True}
    [expected], _ = utils.render_jinja_template([called], chat_template=source, **TOKENS, **asked)
    assert chat(source).render(messages, **asked) == expected
    assert expected


def test_content_in_parts_is_joined_or_kept_as_the_template_wants() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(CHATML).render([{"role": "user", "content": parts}], add_generation_prompt=False) == (
        "<|im_start|>user\na\nb<|im_end|>\n"
    )
    assert chat(PARTS).render([{"role": "user", "content": parts}]) == "[text:a][text:b]"
    assert chat(PARTS).render([{"role": "user", "content": "a"}]) == "[text:a]"
    named = PARTS.replace("{% for part in m['content'] %}", "{% set c = m.content %}{% for part in c | list %}")
    assert chat(named).render([{"role": "user", "content": "a"}]) == "[text:a]"


def test_null_is_no_field() -> None:
    template = chat("{% for m in messages %}{{ m.name is defined }}{{ m.tool_calls }}{% endfor %}")
    assert template.render([{"role": "user", "content": "a", "name": None, "tool_calls": None}]) == "False"


def test_a_history_that_openais_package_writes_is_taken() -> None:
    unused = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    said = {"role": "assistant", "content": "a", "tool_calls": None, **unused}
    assert chat(CHATML).render([said]) == chat(CHATML).render([{"role": "assistant", "content": "a"}])
    for name in unused:
        assert refusal(chat(CHATML), [{**said, name: "x"}]).field == f"messages[0].{name}"


def test_content_that_is_missing_is_empty() -> None:
    shows = chat("{% for m in messages %}{{ m.content | tojson }}{{ m.tool_calls is defined }}{% endfor %}")
    parts = chat("{% for m in messages %}{{ m.content }}{% for part in m.content %}{% endfor %}{% endfor %}")
    for without in ({"content": None}, {}, {"content": None, "tool_calls": []}):
        message = {"role": "assistant", **without}
        assert shows.render([message]) == '""False'
        assert parts.render([message]) == "[]"
    assert shows.render([{"role": "assistant", "tool_calls": [CALL]}]) == '""True'


def test_templates_know_reasoning_by_both_names() -> None:
    template = chat("{% for m in messages %}{{ m.reasoning }},{{ m.reasoning_content }}{% endfor %}")
    for given in ({"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "r"}):
        assert template.render([{**USER, **given}]) == "r,r"
    assert template.render([USER]) == ","
    differ = {"reasoning": "r", "reasoning_content": "s"}
    assert refusal(template, [{**USER, **differ}]).field == "messages[0].reasoning_content"


def calling(*arguments: Any) -> list[dict[str, Any]]:
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return [USER, {"role": "assistant", "tool_calls": calls}]


def test_arguments_may_be_left_out_but_are_never_another_thing() -> None:
    shows = chat("{{ messages[1].tool_calls[0].function.arguments | tojson }}")
    assert {shows.render(calling(none)) for none in (None, "", {}, "{}")} == {"{}"}
    for wrong in ([], 0, False, "[]", "0"):
        with pytest.raises(InvalidArgumentError, match=r"arguments = .*: must be a JSON object"):
            shows.render(calling(wrong))


def test_arguments_of_tool_calls_are_bounded_before_they_are_read() -> None:
    shows = chat("{{ messages[1].tool_calls[0].function.arguments | tojson }}")
    largest = json.dumps({"x": "y" * (MAX_ARGUMENTS - 9)})
    assert len(largest) == MAX_ARGUMENTS
    assert shows.render(calling(largest)) == largest
    for texts in ([largest + " "], [largest, "{}"], ["[" * (MAX_ARGUMENTS + 1)]):
        error = refusal(shows, calling(*texts))
        assert (error.field, str(MAX_ARGUMENTS) in error.limit) == ("messages", True)
    for text in ('{"x":' + "[" * 100_000, '{"x":' + "[" * 100 + "]" * 100 + "}", '{"x": 1e999}', '{"x": NaN}'):
        error = refusal(shows, calling("{}", text))
        assert error.field == "messages[1].tool_calls[1].function.arguments"
        assert "at most 100 levels" in error.limit


def test_contents_together_are_bounded_before_a_template_sees_them() -> None:
    source = TemplateSource(source="{{ raise_exception('rendered') }}")
    for messages in ([USER, USER], [{"role": "user", "content": [{"type": "text", "text": "x" * 20}]}]):
        assert "rendered" in refusal(ChatTemplate(source, 40), messages).limit
        error = refusal(ChatTemplate(source, 15), messages)
        assert (error.field, "at most 15 characters" in error.limit) == ("messages", True)


def test_what_a_template_writes_with_every_message_is_bounded_while_it_does() -> None:
    """A client's own variable may be as long as its request."""
    source = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ raise_exception('rendered') }}"
    template = ChatTemplate(TemplateSource(source=source), 100)
    assert "rendered" in refusal(template, [USER] * 5, eos_token="x").limit
    error = refusal(template, [USER] * 5, eos_token="x" * 50)
    assert (error.field, "at most 100 characters when they are rendered" in error.limit) == ("messages", True)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([USER, {"role": 1, "content": "a"}], "messages[1].role"),
        ([{"role": "king", "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "messages[0].content[0].x"),
        ([{"role": "user", "content": "a", "contnt": "b"}], "messages[0].contnt"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_name(messages: Any, field: str) -> None:
    assert refusal(chat(CHATML), messages).field == field


def test_variables_that_the_template_lacks_are_refused_by_name() -> None:
    assert refusal(chat(CHATML), [USER], enable_thinking=True).field == "chat_template_kwargs.enable_thinking"
    assert refusal(chat(CHATML), [USER], tools=[TOOL]).field == "tools"


def test_a_template_may_refuse_a_chat() -> None:
    error = refusal(chat(RICH), [{"role": "developer", "content": "a"}])
    assert (error.field, "no such role" in error.limit) == ("messages", True)
    error = refusal(chat("{{ messages[0].content + 1 }}"), [USER])
    assert error.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    assert refusal(chat(source), [USER]).field == "messages"


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_a_folder_has_a_template_in_one_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="must have a chat template"):
        ChatTemplate(read_template(tmp_path))
    write(tmp_path, "special_tokens_map.json", {"bos_token": "<old>", "pad_token": "<pad>"})
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    template = ChatTemplate(read_template(tmp_path))
    assert template.render([USER]) == "list"
    assert template.render([USER], tools=[TOOL, TOOL]) == "2 tools"
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": None, "extra_special_tokens": {"image_token": "<i>"}}
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}"
    write(tmp_path, "tokenizer_config.json", {"chat_template": source, **tokens})
    assert ChatTemplate(read_template(tmp_path)).render([USER]) == "<s><pad><i>"
    write(tmp_path, "chat_template.jinja", "file {{ bos_token }}")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "{{ tools | length }} in a file")
    assert ChatTemplate(read_template(tmp_path)).render([USER]) == "file <s>"
    assert ChatTemplate(read_template(tmp_path)).render([USER], tools=[TOOL]) == "1 in a file"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", {"chat_template": {"default": "a"}}),
        ("tokenizer_config.json", {"chat_template": ["a"]}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": "{% for %}"}),
        ("chat_template.jinja", "{{ 1 "),
        ("chat_template.jinja", "{% nothing %}"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: Any) -> None:
    write(tmp_path, name, content)
    with pytest.raises(UnavailableError, match="cannot be"):
        ChatTemplate(read_template(tmp_path))


def test_no_engine_is_loaded() -> None:
    source = (
        "import sys, corun.chat; sys.exit(bool({'torch', 'vllm', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
