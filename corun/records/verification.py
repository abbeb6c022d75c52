"""What a verification runs, under which conditions, and what it finds: cases, conditions, results.

A case may come from a row of `corun batch`. What the row says about itself is first checked against its receipts. A
receipt is part of the row. If a row and its receipt were changed alike, only the new run finds it. Neither can prove
the row's request id and its nodes, since nobody can compute these again. This module must not know how cases are run.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from corun.errors import DataLossError, InvalidArgumentError
from corun.params import SamplingParams, check_text, check_token_ids, sample_seed
from corun.receipt import Receipt, alternatives_digest, output_digest, prompt_digest, text_digest, tokens_digest
from corun.records.rows import SAMPLE_FIELDS, located, params_from_dict, tops_from_dict


class Condition(enum.Enum):
    """The condition under which a case is run again."""

    ALONE = "alone"
    """The cases run one sample at a time."""
    CROWDED = "crowded"
    """Each case runs beside other samples: as many as there are idle slots, and as the client may have."""
    OTHER_SLOTS = "other_slots"
    """Each case runs in another slot, because other samples decode before it begins."""
    SHUFFLED = "shuffled"
    """Many cases run at once, in another order."""


def all_if_none(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the conditions to run under: those given, or all if none are. Raises InvalidArgumentError if one is given
    twice."""
    for index, condition in enumerate(conditions):
        if condition in conditions[:index]:
            raise InvalidArgumentError(f"conditions[{index}]", condition.value, "must be given once")
    return tuple(conditions) or tuple(Condition)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCase:
    """One sample to run again."""

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    """The parameters that the sample was drawn with. n must be 1."""
    seed: int
    output_digest: str = ""
    """The expected output digest. Empty: the run under the first condition sets it."""
    text: str = ""
    """The text that the prompt's token ids were made from, to check that they were. Empty: this is not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """The result of one case under one condition."""

    case_index: int
    condition: Condition
    match: bool
    expected_digest: str
    receipt: Receipt | None = None
    """The receipt of the run that was compared. None if the run failed."""
    error: str = ""
    """Why the run itself failed; then `match` is False. Empty if it did not."""
    text_digest: str = ""
    """The digest of the text of the run that was compared; 64 hex digits (`corun.receipt.text_digest`)."""
    alternatives_digest: str = ""
    """The digest of that run's alternatives; 64 hex digits (`corun.receipt.alternatives_digest`). Empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCase:
    """A case, its name, and what is known about its output."""

    name: str
    case: VerifyCase
    receipt: Receipt | None = None
    """The receipt of the run that the case was made from; None: there was no such run."""
    text_digest: str = ""
    """The digest of the row's output text; empty: the row has no output."""
    alternatives_digest: str = ""
    """The digest of the row's alternatives; empty: it has none."""
    audit: Receipt | None = None
    """The receipt of the run that was found to differ, for a case from a reproduction file."""


def cases_from_row(where: str, row: Mapping[str, Any]) -> list[NamedCase]:
    """Return the samples of one row of `corun batch` as cases.

    Raises DataLossError if the row differs from its own receipts, and InvalidArgumentError if a part is missing or bad.
    """
    cases = []
    with _reading(where, row, "is not a result of corun batch"):
        prompt, params = _prompt(row), params_from_dict(row["params"])
        text = check_text("prompt", row["prompt"]) if isinstance(row["prompt"], str) else ""
        for index, sample in enumerate(_samples(row, params)):
            receipt = Receipt.from_dict(sample["receipt"])
            tops = tuple(map(tops_from_dict, sample.get("top_logprobs", ())))
            of_tokens = tokens_digest(check_token_ids(sample["token_ids"], None, "token_ids"))
            facts: dict[str, tuple[object, object]] = {
                "seed": (sample["seed"], receipt.seed),
                "request's seed": (sample_seed(row["seed"], index), receipt.seed),
                "sample index": (sample.get("sample_index", 0), receipt.sample_index),
                "place among its samples": (index, receipt.sample_index),
                "request id": (row.get("request_id", receipt.request_id), receipt.request_id),
                "finish reason": (sample["finish_reason"], receipt.finish_reason.value),
                "number of tokens": (len(sample["token_ids"]), receipt.num_output_tokens),
                "tokens": (of_tokens, receipt.tokens_digest),
                "number of top_logprobs": (len(tops), receipt.num_output_tokens if params.top_logprobs else 0),
            }
            if params.logprobs or sample["logprobs"]:
                digest = output_digest(sample["token_ids"], sample["logprobs"])
                facts["tokens and log probabilities"] = (digest, receipt.output_digest)
            name = str(row["id"]) if params.n == 1 else f"{row['id']}[{index}]"
            case = _case(name, prompt, replace(params, n=1), receipt, facts, text)
            of_text, of_tops = text_digest(sample["text"]), alternatives_digest(tops)
            cases.append(replace(case, text_digest=of_text, alternatives_digest=of_tops))
    return cases


def case_from_reproduction(where: str, row: Mapping[str, Any]) -> NamedCase:
    """Return the sample of a file that an audit wrote as a case. It expects the output that the client got.

    The file has no output itself, only its digest. Raises the same errors as `cases_from_row`.
    """
    with _reading(where, row, "is not a file that an audit wrote"):
        prompt, params = _prompt(row), replace(params_from_dict(row["params"]), n=1)
        receipt, audit = Receipt.from_dict(row["receipt"]), Receipt.from_dict(row["audit"]["receipt"])
        found = _case(str(row["id"]), prompt, params, receipt, {"seed": (row["seed"], receipt.seed)})
        return replace(found, audit=audit)


@contextmanager
def _reading(where: str, row: Mapping[str, Any], limit: str) -> Iterator[None]:
    """Raise InvalidArgumentError, which names the row's place, for whatever its parts raise if it `limit`."""
    try:
        yield
    except InvalidArgumentError as error:
        raise located(where, error) from None
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, struct.error):
        raise InvalidArgumentError(where, row, limit) from None


def _prompt(row: Mapping[str, Any]) -> tuple[int, ...]:
    name = "prompt_token_ids" if isinstance(row["prompt"], str) else "prompt"
    return check_token_ids(row[name], None, name)


def _samples(row: Mapping[str, Any], params: SamplingParams) -> Sequence[Mapping[str, Any]]:
    """Return all samples of a row, each with all its parts. If there are several, the row itself repeats the first."""
    samples = row.get("samples", [row])
    if len(samples) != params.n:
        raise DataLossError(f"row {row['id']}: it has {len(samples)} samples of {params.n}: the row was changed")
    for sample in (row, *samples):
        missing = [name for name in SAMPLE_FIELDS if name not in sample]
        if missing:
            raise InvalidArgumentError(missing[0], None, "must be set: is this the output of corun batch?")
    if "samples" in row:  # Texts of JSON are compared, because -0.0 is 0.0 in Python, and True is 1.
        both = {name: (_text(row.get(name)), _text(samples[0].get(name))) for name in (*SAMPLE_FIELDS, "top_logprobs")}
        _compare(str(row["id"]), both, "sample 0")
    return samples  # type: ignore[no-any-return]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _case(
    name: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    receipt: Receipt,
    facts: Mapping[str, tuple[object, object]],
    text: str = "",
) -> NamedCase:
    """Return a case. Raises DataLossError if the receipt is that of another prompt, of other parameters or `facts`."""
    shared = {
        "prompt": (prompt_digest(prompt), receipt.prompt_digest),
        "number of prompt tokens": (len(prompt), receipt.num_prompt_tokens),
        "parameters": (params.digest(), receipt.params_digest),
    }
    _compare(name, {**shared, **facts})
    case = VerifyCase(
        prompt_token_ids=prompt,
        sampling_params=params,
        seed=receipt.seed,
        output_digest=receipt.output_digest,
        text=text,
    )
    return NamedCase(name=name, case=case, receipt=receipt)


def _compare(name: str, facts: Mapping[str, tuple[object, object]], what: str = "its receipt") -> None:
    """Raise DataLossError for the first fact that differs between the row and `what` it is compared with."""
    for fact, (found, stated) in facts.items():
        if found != stated or type(found) is not type(stated):  # True is not 1 here.
            raise DataLossError(f"row {name}: its {fact} is not that of {what}: the row was changed")
