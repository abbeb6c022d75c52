"""JSON lines of `corun batch`: prompts to run, and results with all that is needed to verify them.

This module owns how rows look and how they are read and resumed. It must not know how a prompt is run.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from corun.completion import Generation, Prompt, Sample
from corun.errors import InvalidArgumentError
from corun.params import SamplingParams, check_seed, check_text, check_token_ids, whole_number
from corun.types import Alternatives

_ROW_FIELDS = ("id", "prompt", "seed", "params")
_PARAM_FIELDS = tuple(field.name for field in fields(SamplingParams))
SAMPLE_FIELDS = ("seed", "text", "token_ids", "logprobs", "finish_reason", "receipt")
"""The keys that a result has for each sample."""
_RESULT_START = b'{"id": '
_FP32 = struct.Struct("<f")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One line of a batch's input."""

    id: str
    """The row's id, which is unique in its file: the id that it gives, else its line number."""
    prompt: Prompt
    params: SamplingParams
    seed: int | None = None
    where: str = ""
    """The row's place as file:line, for messages."""


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRow]:
    """Read all rows of a batch's input. Raises InvalidArgumentError for the first bad row; the error names its line."""
    rows: dict[str, PromptRow] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        row = _prompt_row(_load(line, f"{path}:{number}"), str(number), f"{path}:{number}", defaults)
        if row.id in rows:
            raise InvalidArgumentError(f"{row.where}: id", row.id, f"must be unique; {rows[row.id].where} has it too")
        rows[row.id] = row
    return list(rows.values())


def result_row(row_id: str, prompt: Prompt, params: SamplingParams, done: Generation) -> dict[str, Any]:
    """Return the row that a batch writes for one prompt.

    The row itself holds sample 0. With n > 1, its `samples` holds all samples.
    """
    row: dict[str, Any] = {
        "id": row_id,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "params": params_to_dict(params),
    }
    if isinstance(prompt, str):
        row["prompt_token_ids"] = list(done.prompt_token_ids)
    row["request_id"] = done.request_id
    row |= _sample_values(done.samples[0])
    if len(done.samples) > 1:
        row["samples"] = [{"sample_index": sample.index, **_sample_values(sample)} for sample in done.samples]
    return row


def to_line(row: Mapping[str, Any]) -> str:
    """Return a row as one line of JSON, without a line end."""
    return json.dumps(row, ensure_ascii=False)


def read_results(path: Path, *, skip_torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a batch's output, each with its place as file:line.

    skip_torn: skip a last line without a line end, which an interrupted run leaves behind.

    Raises InvalidArgumentError for a line that is no result.
    """
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}:{number}"
        if skip_torn and not line.endswith(b"\n"):
            return
        row = _load(line, where)
        for name in ("id", "prompt", "params", "seed", "receipt"):
            if name not in row:
                raise InvalidArgumentError(f"{where}: {name}", None, "must be set: is this the output of corun batch?")
        yield where, row


def read_finished(rows: Sequence[PromptRow], path: Path) -> Iterator[tuple[str, PromptRow | None, dict[str, Any]]]:
    """Yield the results of a batch's output, each with its place and the row that it answers; None if it is not among
    `rows`.

    A last line without a line end is skipped. Raises InvalidArgumentError if the output has, under the id of one of the
    rows, the answer to another prompt.
    """
    by_id = {row.id: row for row in rows}
    for where, result in read_results(path, skip_torn=True):
        if (row := by_id.get(str(result["id"]))) is not None:
            check_same(row, result, where)
        yield where, row, result


def check_same(row: PromptRow, result: Mapping[str, Any], where: str) -> None:
    """Raise InvalidArgumentError if a finished row is not the answer to the prompt with the same id."""
    prompt = row.prompt if isinstance(row.prompt, str) else list(row.prompt)
    for name, value in (("prompt", prompt), ("params", params_to_dict(row.params)), ("seed", row.seed)):
        if result[name] != value and value is not None:
            limit = f"differs from {row.where}, which has the same id: write to another file"
            raise InvalidArgumentError(f"{where}: {name}", result[name], limit)


def drop_torn_line(path: Path) -> bool:
    """Cut off a last line that an interrupted run left unfinished. Return whether there was one.

    Raises InvalidArgumentError if the line is not the beginning of a result: nothing else is ever cut.
    """
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:  # It may be large.
        start = data.rfind(b"\n") + 1
        torn = data[start:]
    if not torn:
        return False
    if not torn.startswith(_RESULT_START) and not _RESULT_START.startswith(torn):
        raise InvalidArgumentError(str(path), torn[:64].decode(errors="replace"), "must be the output of corun batch")
    os.truncate(path, start)
    return True


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Return every field of the sampling parameters as plain values for JSON."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _PARAM_FIELDS}
    del values["structured_outputs"]  # An older version knows only free outputs, and reads them.
    if not params.top_logprobs:  # For the same reason.
        del values["top_logprobs"]
    if params.constraint is not None:
        kind, text = params.constraint
        values["structured_outputs"] = {kind: json.loads(text) if kind == "choice" else text}
    return values | {
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token_id): short_fp32(bias) for token_id, bias in params.logit_bias_map.items()},
    }


def params_from_dict(values: object, defaults: SamplingParams | None = None) -> SamplingParams:
    """Read what `params_to_dict` wrote. Absent fields keep their defaults.

    Raises InvalidArgumentError for an unknown name, or for a value outside its limit.
    """
    if not isinstance(values, Mapping):
        raise InvalidArgumentError("params", values, "must be an object")
    for name in values:
        if name not in _PARAM_FIELDS:
            raise InvalidArgumentError(f"params.{name}", values[name], "is not a sampling parameter")
    given = dict(values)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = [(_token_id(key), bias) for key, bias in given["logit_bias"].items()]
    return replace(defaults or SamplingParams(), **given)


def _token_id(key: object) -> object:
    """Return the number that a key of an object spells. What is none is left for `SamplingParams` to refuse."""
    number = whole_number(key) if isinstance(key, str) else None
    return key if number is None else number


def short_fp32(value: float) -> float:
    """Return the float with the shortest text that reads back as the same fp32: 0.1, not 0.10000000149011612."""
    bits = _FP32.pack(value)
    for digits in (6, 7, 8):  # fp32 keeps all decimals of up to 6 digits, so fewer need no trial.
        short = float(f"{value:.{digits}g}")
        if _FP32.pack(short) == bits:
            return short
    return float(f"{value:.9g}")


def _lines(path: Path) -> Iterator[bytes]:
    # Read bytes, since a torn line may end in the middle of a character.
    with path.open("rb") as file:
        yield from file


def _load(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        row = line.decode(errors="replace").strip()
    if not isinstance(row, dict):
        raise InvalidArgumentError(where, row, "must be a JSON object in UTF-8")
    return row


def _prompt_row(values: dict[str, Any], number: str, where: str, defaults: SamplingParams) -> PromptRow:
    try:
        for name, value in values.items():
            if name not in _ROW_FIELDS:
                raise InvalidArgumentError(name, value, f"must be one of {', '.join(_ROW_FIELDS)}")
        row_id = values.get("id", number)
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
            raise InvalidArgumentError("id", row_id, "must be text or an integer")
        prompt: Any = values.get("prompt")
        if not isinstance(prompt, (str, Sequence)):
            raise InvalidArgumentError("prompt", prompt, "must be text or a list of token ids")
        return PromptRow(
            id=check_text("id", str(row_id), min_length=0),
            prompt=check_text("prompt", prompt) if isinstance(prompt, str) else check_token_ids(prompt, None, "prompt"),
            params=params_from_dict(values.get("params", {}), defaults),
            seed=None if values.get("seed") is None else check_seed(values["seed"]),
            where=where,
        )
    except InvalidArgumentError as error:
        raise located(where, error) from None


def located(where: str, error: InvalidArgumentError) -> InvalidArgumentError:
    """Return the error of one row with the row's place, `where`, in its field."""
    return InvalidArgumentError(f"{where}: {error.field}", error.value, error.limit)


def _sample_values(sample: Sample) -> dict[str, Any]:
    return {
        "seed": sample.seed,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "logprobs": [short_fp32(logprob) for logprob in sample.logprobs],
        **({"top_logprobs": [_tops_to_dict(tops) for tops in sample.top_logprobs]} if sample.top_logprobs else {}),
        "finish_reason": sample.finish_reason.value,
        "receipt": sample.receipt.to_dict(),
    }


def _tops_to_dict(tops: Alternatives) -> dict[str, Any]:
    """Return the alternatives of one token, as columns."""
    logprobs = [short_fp32(logprob) for logprob in tops.logprobs]
    return {"token_ids": list(tops.token_ids), "logprobs": logprobs, "texts": list(tops.texts)}


def tops_from_dict(values: Mapping[str, Any]) -> Alternatives:
    """Read what a result has for the alternatives of one token."""
    logprobs = tuple(array("f", values["logprobs"]))  # The file has the shortest text of each fp32 value.
    return Alternatives(tuple(values["token_ids"]), logprobs, tuple(values["texts"]))
