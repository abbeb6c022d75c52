"""Readers of the data sets that benchmarks use, from a user's file or from our own small sample of the same shape.

Each reader documents which records it leaves out, and counts them, so that nothing is dropped silently. A file of
another shape is an error that names the line. This module must not know tokenizers, lengths that fit a model, or
requests.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError, Shown

SAMPLES = Path(__file__).parent / "samples"
"""The folder of our own samples, made for this project: they have no data of anybody else."""

_MODEL, _PROMPT, _OUTPUT = "Model", "Request tokens", "Response tokens"


Texts = tuple[str, str]
"""A human's first turn and the model's answer; or a file and the change to make in it."""


def read_burstgpt(path: Path | None, model: str = "") -> tuple[list[tuple[int, int]], int]:
    """Return prompt and response tokens of the rows of a BurstGPT CSV file, and how many rows cannot be used.

    Columns are found by name. v1.1: "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"; later
    releases have "Session ID" and "Elapsed time" between the first two. Rows with 0 response tokens are requests that
    failed; they are left out, as in vLLM's benchmark. vLLM also keeps only rows of "GPT-4"; here `model` can select
    them.
    """
    path = path or SAMPLES / "burstgpt.csv"
    usable, left_out = [], 0
    rows = csv.DictReader(_lines(path))
    try:
        if missing := sorted({_MODEL, _PROMPT, _OUTPUT} - set(rows.fieldnames or [])):
            raise _wrong(path, 1, f"has no column {', '.join(map(repr, missing))}")
        for row in rows:
            prompt, output = int(row[_PROMPT]), int(row[_OUTPUT])
            if prompt <= 0 or output <= 0 or (model and row[_MODEL] != model):
                left_out += 1
            else:
                usable.append((prompt, output))
    except (TypeError, ValueError):
        raise _wrong(path, rows.line_num, f"needs numbers in {_PROMPT!r} and {_OUTPUT!r}") from None
    except csv.Error as error:
        raise _wrong(path, rows.line_num + 1, f"is not CSV: {error}") from None
    return usable, left_out


def read_sharegpt(path: Path | None) -> tuple[list[Texts], int]:
    """Return the first human turn of each conversation with the model turn after it, and how many have no such pair.

    The file is a JSON list of {"id", "conversations": [{"from": "human" | "gpt", "value": text}, …]}.
    """
    path = path or SAMPLES / "sharegpt.json"
    entries = _json(path, 0, _lines(path).read())
    if not isinstance(entries, list):
        raise _wrong(path, 0, "must be a JSON list of conversations")
    turns = [_first_turn(path, i, entry) for i, entry in enumerate(entries, 1)]
    usable = [turn for turn in turns if turn is not None]
    return usable, len(turns) - len(usable)


def read_blazedit(path: Path | None) -> tuple[list[Texts], int]:
    """Return the edit records of a file of JSON lines, and how many lie outside vLLM's range of distances.

    A record is {"code", "change_request", "norm_distance"}: the columns of the published sets that vLLM's
    BlazeditDataset reads. Its default range of `norm_distance` (edit distance over length) is [0, 1].
    """
    path = path or SAMPLES / "blazedit.jsonl"
    records = [_edit(path, number, line) for number, line in enumerate(_lines(path), 1) if line.strip()]
    usable = [edit for edit, distance in records if 0 <= distance <= 1]
    return usable, len(records) - len(usable)


def _first_turn(path: Path, number: int, entry: Any) -> Texts | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _wrong(path, number, 'needs "conversations", a list of turns')
    rest = itertools.dropwhile(lambda turn: turn.get("from") != "human", turns)
    prompt, answer = next(rest, None), next(rest, None)
    if prompt is None or answer is None or answer.get("from") != "gpt":
        return None
    said, answered = prompt.get("value"), answer.get("value")
    if not (isinstance(said, str) and isinstance(answered, str)):
        raise _wrong(path, number, 'needs text in "value"')
    return said, answered


def _edit(path: Path, number: int, line: str) -> tuple[Texts, float]:
    record = _json(path, number, line)
    names = ("code", "change_request", "norm_distance")
    if not isinstance(record, dict) or not set(names) <= set(record):
        raise _wrong(path, number, f"needs {', '.join(names)}")
    code, change, distance = (record[name] for name in names)
    if not (isinstance(code, str) and isinstance(change, str) and isinstance(distance, (int, float))):
        raise _wrong(path, number, "needs text in code and change_request, a number in norm_distance")
    return (code, change), float(distance)


def _lines(path: Path) -> io.StringIO:
    try:
        return io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    except UnicodeDecodeError:
        raise _wrong(path, 0, "is not UTF-8") from None


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"is not JSON: {error}") from None


def _wrong(path: Path, number: int, what: str) -> InvalidArgumentError:
    place = f"{path.name}:{number}" if number else path.name
    return InvalidArgumentError("workloads", Shown(place), what)
