"""Readers of the data sets that benchmarks use, from a user's file or from our own small sample of the same shape.

Each reader documents which records it leaves out, and counts them, so that nothing is dropped silently. A file of
another shape is an error that names the line. This module must not know tokenizers, lengths that fit a model, or
requests.
"""

from __future__ import annotations

import csv
import itertools
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from corun.errors import InvalidArgumentError, Shown

SAMPLES = Path(__file__).parent / "samples"
"""The folder of our own samples, made for this project: they have no data of anybody else."""

_TIME, _MODEL, _PROMPT, _OUTPUT = "Timestamp", "Model", "Request tokens", "Response tokens"


@dataclass(kw_only=True, slots=True)
class BurstGptRows:
    """The usable rows of a BurstGPT file as columns: a real file has millions of rows."""

    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    timestamps: array[float] = field(default_factory=lambda: array("d"))
    """The time of each request, in seconds."""
    left_out: int = 0
    """The number of rows without prompt or response tokens (the request failed), or of another model."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)


class Turn(NamedTuple):
    """A human's first turn and the model's answer."""

    prompt: str
    answer: str


class Edit(NamedTuple):
    """A file, and the change to make in it."""

    code: str
    change_request: str


def read_burstgpt(path: Path | None, model: str = "") -> BurstGptRows:
    """Read the rows of a BurstGPT CSV file, in the file's order; columns are found by name.

    v1.1: "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"; later releases have "Session ID" and
    "Elapsed time" between the first two. Rows with 0 response tokens are requests that failed; they are left out, as in
    vLLM's benchmark. vLLM also keeps only rows of "GPT-4"; here `model` can select them.
    """
    path = path or SAMPLES / "burstgpt.csv"
    trace = BurstGptRows()
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        if missing := sorted({_TIME, _MODEL, _PROMPT, _OUTPUT} - set(rows.fieldnames or [])):
            raise _wrong(path, 1, f"has no column {', '.join(map(repr, missing))}")
        for row in rows:
            try:
                prompt, output, at = int(row[_PROMPT]), int(row[_OUTPUT]), float(row[_TIME])
            except (TypeError, ValueError):
                limit = f"needs numbers in {_TIME!r}, {_PROMPT!r} and {_OUTPUT!r}"
                raise _wrong(path, rows.line_num, limit) from None
            if prompt <= 0 or output <= 0 or (model and row[_MODEL] != model):
                trace.left_out += 1
                continue
            trace.prompt_tokens.append(prompt)
            trace.output_tokens.append(output)
            trace.timestamps.append(at)
    return trace


def read_sharegpt(path: Path | None) -> tuple[list[Turn], int]:
    """Return the first human turn of each conversation with the model turn after it, and how many have no such pair.

    The file is a JSON list of {"id", "conversations": [{"from": "human" | "gpt", "value": text}, …]}.
    """
    path = path or SAMPLES / "sharegpt.json"
    entries = _json(path, 0, path.read_text(encoding="utf-8-sig"))
    if not isinstance(entries, list):
        raise _wrong(path, 0, "must be a JSON list of conversations")
    turns = [_first_turn(path, i, entry) for i, entry in enumerate(entries, 1)]
    usable = [turn for turn in turns if turn is not None]
    return usable, len(turns) - len(usable)


def read_blazedit(path: Path | None) -> tuple[list[Edit], int]:
    """Return the edit records of a file of JSON lines, and how many lie outside vLLM's range of distances.

    A record is {"code", "change_request", "norm_distance"}: the columns of the published sets that vLLM's
    BlazeditDataset reads. Its default range of `norm_distance` (edit distance over length) is [0, 1].
    """
    path = path or SAMPLES / "blazedit.jsonl"
    with path.open(encoding="utf-8-sig") as lines:
        records = [_edit(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    usable = [edit for edit, distance in records if 0 <= distance <= 1]
    return usable, len(records) - len(usable)


def _first_turn(path: Path, number: int, entry: Any) -> Turn | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _wrong(path, number, 'needs "conversations", a list of turns')
    said = itertools.dropwhile(lambda turn: turn.get("from") != "human", turns)
    prompt, answer = next(said, None), next(said, None)
    if prompt is None or answer is None or answer.get("from") != "gpt":
        return None
    texts = prompt.get("value"), answer.get("value")
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(path, number, 'needs text in "value"')
    return Turn(*texts)


def _edit(path: Path, number: int, line: str) -> tuple[Edit, float]:
    record = _json(path, number, line)
    names = ("code", "change_request", "norm_distance")
    if not isinstance(record, dict) or not set(names) <= set(record):
        raise _wrong(path, number, f"needs {', '.join(names)}")
    code, change, distance = (record[name] for name in names)
    if not (isinstance(code, str) and isinstance(change, str) and isinstance(distance, (int, float))):
        raise _wrong(path, number, "needs text in code and change_request, a number in norm_distance")
    return Edit(code, change), float(distance)


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _wrong(path, number, f"is not JSON: {error}") from None


def _wrong(path: Path, number: int, what: str) -> InvalidArgumentError:
    place = f"{path.name}:{number}" if number else path.name
    return InvalidArgumentError("workloads", Shown(place), what)
