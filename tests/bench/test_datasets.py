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
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", [V1_1, LATER, "\ufeff" + V1_1], ids=["v1.1", "later", "byte order mark"])
def test_burstgpt_is_read_by_the_names_of_its_columns(tmp_path: Path, text: str) -> None:
    assert read_burstgpt(write(tmp_path / "trace.csv", text)) == ([(472, 18), (417, 276)], 1)
    assert read_burstgpt(tmp_path / "trace.csv", "GPT-4") == ([(417, 276)], 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv:1: has no column 'Model', 'Request tokens', 'Response tokens'"),
        (V1_1.replace("Response tokens", "Responses"), "trace.csv:1: has no column 'Response tokens'"),
        (V1_1.replace("417", "four"), "trace.csv:4: needs numbers"),
        (V1_1 + "130,GPT-4\n", "trace.csv:5: needs numbers"),
    ],
)
def test_another_file_than_burstgpt_is_an_error_that_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read_burstgpt(write(tmp_path / "trace.csv", text))
    assert message in str(raised.value)


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
    ("read", "texts", "place"),
    [
        (read_sharegpt, ("{", '{"id": 1}', "[3]", '[{"conversations": 3}]', TALK), "data.json"),
        (
            read_blazedit,
            (EDIT + "nonsense", EDIT + "[]", EDIT + '{"code": "x"}', EDIT + EDIT.replace('"x"', "1")),
            ":2",
        ),
    ],
)
def test_another_file_is_an_error_that_names_the_place(
    tmp_path: Path, read: Any, texts: tuple[str, ...], place: str
) -> None:
    for text in texts:
        with pytest.raises(InvalidArgumentError, match=place):
            read(write(tmp_path / "data.json", text))
