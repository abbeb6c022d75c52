"""JSON lines of `corun batch`: prompts to run, and results that carry all it takes to verify them.

Owns how rows look and how they are read and resumed. This module must not know how a prompt is run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from corun.completion import Generation, Prompt, Sample
from corun.errors import CorunError, InvalidArgumentError
from corun.params import SamplingParams, check_seed, check_text, check_token_ids

_ROW_FIELDS = ("id", "prompt", "seed", "params")
_PARAM_FIELDS = tuple(field.name for field in fields(SamplingParams))
SAMPLE_FIELDS = ("seed", "text", "token_ids", "logprobs", "finish_reason", "receipt")
"""What a result says of each sample."""
_RESULT_START = b'{"id": '
_FP32 = struct.Struct("<f")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One line of a batch's input."""

    id: str
    """Unique in its file: the row's own, else its line number."""
    prompt: Prompt
    params: SamplingParams
    seed: int | None = None
    where: str = ""
    """file:line, for messages."""


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRow]:
    """All rows of a batch's input. Raises InvalidArgumentError for the first that is wrong, naming its line."""
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
    """What a batch writes for one prompt. With n > 1, `samples` holds all of them and the row itself sample 0."""
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
    """One line of JSON, without its line end."""
    return json.dumps(row, ensure_ascii=False)


def read_results(path: Path, *, skip_torn: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a batch's output with their file:line. Raises InvalidArgumentError for a line that is no result.

    skip_torn: pass over a last line without its end, as an interrupted run leaves it.
    """
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}:{number}"
        if skip_torn and not line.endswith(b"\n"):
            return
        row = _load(line, where)
        missing = [name for name in ("id", "prompt", "params", "seed", "receipt") if name not in row]
        if missing:
            raise InvalidArgumentError(
                f"{where}: {missing[0]}", None, "must be set: is this the output of corun batch?"
            )
        yield where, row


def check_same(row: PromptRow, result: Mapping[str, Any], where: str) -> None:
    """Raises InvalidArgumentError if a finished row is not the answer to the prompt that has its id."""
    asked: dict[str, Any] = {
        "prompt": row.prompt if isinstance(row.prompt, str) else list(row.prompt),
        "params": params_to_dict(row.params),
    }
    if row.seed is not None:
        asked["seed"] = row.seed
    for name, value in asked.items():
        if result[name] != value:
            limit = f"differs from {row.where}, which has the same id: write to another file"
            raise InvalidArgumentError(f"{where}: {name}", result[name], limit)


def drop_torn_line(path: Path) -> bool:
    """Cuts off a last line that an interrupted run left unfinished; True if there was one.

    Raises InvalidArgumentError if it is not the beginning of a result: nothing else is ever cut.
    """
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    torn = data[start:]
    if not torn:
        return False
    if not torn.startswith(_RESULT_START) and not _RESULT_START.startswith(torn):
        raise InvalidArgumentError(str(path), torn[:64].decode(errors="replace"), "must be the output of corun batch")
    with path.open("r+b") as file:
        file.truncate(start)
    return True


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Every field, as JSON has them."""
    values: dict[str, Any] = {name: getattr(params, name) for name in _PARAM_FIELDS}
    return values | {
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token_id): short_fp32(bias) for token_id, bias in params.logit_bias_map.items()},
    }


def params_from_dict(values: object, defaults: SamplingParams | None = None) -> SamplingParams:
    """Back from `params_to_dict`; what is absent keeps its default. Raises InvalidArgumentError for an unknown name."""
    if not isinstance(values, Mapping):
        raise InvalidArgumentError("params", values, "must be an object")
    for name in values:
        if name not in _PARAM_FIELDS:
            raise InvalidArgumentError(f"params.{name}", values[name], "is not a sampling parameter")
    given = dict(values)
    if isinstance(given.get("logit_bias"), Mapping):
        given["logit_bias"] = [(_token_id(key), bias) for key, bias in given["logit_bias"].items()]
    return replace(defaults or SamplingParams(), **given)


def short_fp32(value: float) -> float:
    """The float whose text is the shortest that reads back as the same fp32: 0.1, not 0.10000000149011612."""
    bits = _FP32.pack(value)
    for digits in (6, 7, 8):  # Every decimal of up to 6 digits survives fp32, so fewer need no trial of their own.
        short = float(f"{value:.{digits}g}")
        if _FP32.pack(short) == bits:
            return short
    return float(f"{value:.9g}")


def _lines(path: Path) -> Iterator[bytes]:
    # Bytes: a torn line may end in the middle of a character.
    with path.open("rb") as file:
        yield from file


def _load(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        text = line.decode(errors="replace").strip()
        raise InvalidArgumentError(where, text, "must be a JSON object in UTF-8") from None
    if not isinstance(row, dict):
        raise InvalidArgumentError(where, row, "must be a JSON object in UTF-8")
    return row


def _prompt_row(values: dict[str, Any], number: str, where: str, defaults: SamplingParams) -> PromptRow:
    try:
        for name, value in values.items():
            if name not in _ROW_FIELDS:
                raise InvalidArgumentError(name, value, f"must be one of {', '.join(_ROW_FIELDS)}")
        return PromptRow(
            id=_row_id(values.get("id", number)),
            prompt=_prompt(values.get("prompt")),
            params=params_from_dict(values.get("params", {}), defaults),
            seed=None if values.get("seed") is None else check_seed(values["seed"]),
            where=where,
        )
    except InvalidArgumentError as error:
        raise located(where, error) from None


def located(where: str, error: CorunError) -> CorunError:
    """The error of one row, with its file and line."""
    if isinstance(error, InvalidArgumentError):
        return InvalidArgumentError(f"{where}: {error.field}", error.value, error.limit)
    return error


def _row_id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidArgumentError("id", value, "must be text or an integer")
    return str(value)


def _prompt(value: object) -> Prompt:
    if isinstance(value, str):
        return check_text("prompt", value)
    if not isinstance(value, Sequence):
        raise InvalidArgumentError("prompt", value, "must be text or a list of token ids")
    return check_token_ids(value, 2**32, "prompt")


def _token_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _sample_values(sample: Sample) -> dict[str, Any]:
    return {
        "seed": sample.seed,
        "text": sample.text,
        "token_ids": list(sample.token_ids),
        "logprobs": [short_fp32(logprob) for logprob in sample.logprobs],
        "finish_reason": sample.finish_reason.value,
        "receipt": sample.receipt.to_dict(),
    }
