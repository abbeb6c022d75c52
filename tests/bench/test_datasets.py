"""Readers of data sets: columns by name, every version, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InvalidArgumentError
from corun_bench.datasets import read_blazedit, read_burstgpt, read_sharegpt

V1_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
# Later releases have two columns more, before those that a reader by position would take.
LATER = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.0,1722ac82-0a46,43,ChatGPT,472,18,490,Conversation log
45.0,,2,ChatGPT,1087,0,1087,API log
118.0,,9,GPT-4,417,276,693,API log
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


@pytest.mark.parametrize("text", [V1_1, LATER, "\ufeff" + V1_1], ids=["v1.1", "later", "byte order mark"])
def test_burstgpt_is_read_by_the_names_of_its_columns(tmp_path: Path, text: str) -> None:
    assert read_burstgpt(write(tmp_path / "trace.csv", text)) == ([(472, 18), (417, 276)], 1)
    assert read_burstgpt(tmp_path / "trace.csv", "GPT-4") == ([(417, 276)], 2)


def test_sharegpt_pairs_the_first_human_turn_with_the_answer_to_it(tmp_path: Path) -> None:
    def talk(*turns: tuple[str, str]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}

    entries = [
        talk(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
        talk(("gpt", "late answer"), ("human", "e"), ("gpt", "f")),
        talk(("human", "nobody answers")),
        talk(("human", "first"), ("human", "second")),
        talk(),
    ]
    turns, left_out = read_sharegpt(write(tmp_path / "talks.json", json.dumps(entries)))
    assert (turns, left_out) == ([("a", "b"), ("e", "f")], 3)


def test_blazedit_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "code": "x = 1", "change_request": "call it y", "norm_distance": 0.2, "more": None},
        {"code": "far", "change_request": "away", "norm_distance": 1.5},
    ]
    text = "\n\n".join(map(json.dumps, lines)) + "\n"
    edits, left_out = read_blazedit(write(tmp_path / "edits.jsonl", text))
    assert (edits, left_out) == ([("x = 1", "call it y")], 1)


TALK = '[{"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "x"}]}]'
EDIT = '{"code": "x", "change_request": "y", "norm_distance": 0}\n'


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_burstgpt, "", "data:1: has no column 'Model', 'Request tokens', 'Response tokens'"),
        (read_burstgpt, V1_1.replace("Response tokens", "Responses"), "data:1: has no column 'Response tokens'"),
        (read_burstgpt, V1_1.replace("417", "four"), "data:4: needs numbers"),
        (read_burstgpt, V1_1 + "130,GPT-4\n", "data:5: needs numbers"),
        (read_sharegpt, "{", "data: is not JSON"),
        (read_sharegpt, '{"id": 1}', "data: must be a JSON list"),
        (read_sharegpt, "[3]", "data:1: needs"),
        (read_sharegpt, '[{"conversations": 3}]', "data:1: needs"),
        (read_sharegpt, TALK, 'data:1: needs text in "value"'),
        (read_blazedit, EDIT + "nonsense", "data:2: is not JSON"),
        (read_blazedit, EDIT + "[]", "data:2: needs code, change_request, norm_distance"),
        (read_blazedit, EDIT + '{"code": "x"}', "data:2: needs code, change_request, norm_distance"),
        (read_blazedit, EDIT + EDIT.replace('"x"', "1"), "data:2: needs text in code"),
        (read_burstgpt, V1_1 + "\udc80", "data: is not UTF-8"),
        (read_burstgpt, V1_1 + '"' + "x" * 200_000, "data:5: is not CSV: field larger than"),
        (read_sharegpt, "\udc80", "data: is not UTF-8"),
        (read_sharegpt, "[" * 100_000, "data: is not JSON"),
        (read_blazedit, EDIT + "\udc80", "data: is not UTF-8"),
    ],
)
def test_another_file_is_an_error_that_names_the_line(tmp_path: Path, read: Any, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read(write(tmp_path / "data", text))
    assert message in str(raised.value)
