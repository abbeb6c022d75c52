"""The results of many prompts: as a list, as columns, and in a file that an interrupted batch goes on from.

This module must not know how prompts are run.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corun.completion import Generation, Sample
from corun.config.extras import needs_extra
from corun.errors import ContractMismatchError, InvalidArgumentError
from corun.receipt import Receipt
from corun.records.rows import (
    PromptRow,
    drop_torn_line,
    located,
    read_finished,
    result_row,
    to_line,
    tops_from_dict,
)
from corun.records.verification import cases_from_row
from corun.types import FinishReason


class Generations(list[Generation]):
    """The generations of many prompts in the order of the prompts, which can also be had as a table of samples."""

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of a table with a row for each sample, in the order of prompts, then of samples.

        Log probabilities are an `array` of float32 in each row, and token ids one of uint32. numpy and torch read both
        without a copy. A row without log probabilities has an empty array.

        Example:
            logprobs = [torch.frombuffer(each, dtype=torch.float32) for each in done.columns()["logprobs"]]
        """
        rows = [_columns(index, done, sample) for index, done in enumerate(self) for sample in done.samples]
        return {name: [row[name] for row in rows] for name in _ARROW_TYPES}

    def to_pandas(self) -> Any:
        """Return the columns as a pandas.DataFrame. Token ids and log probabilities are numpy arrays.

        Raises:
            CorunError: pandas is not installed; the message says how to get it.

        Example:
            done.to_pandas().groupby("prompt_index").text.nunique()
        """
        with needs_extra("to_pandas", "tables"):
            pandas, numpy = importlib.import_module("pandas"), importlib.import_module("numpy")
        columns = self.columns()
        for name in ("prompt_token_ids", "token_ids", "logprobs"):
            columns[name] = [numpy.asarray(each) for each in columns[name]]
        types = {name: kind if kind == "int64" else "object" for name, kind in _ARROW_TYPES.items()}
        return pandas.DataFrame({name: pandas.Series(columns[name], dtype=kind) for name, kind in types.items()})

    def to_arrow(self) -> Any:
        """Return the columns as a pyarrow.Table. Token ids are lists of uint32, log probabilities lists of float32.

        Raises:
            CorunError: pyarrow is not installed; the message says how to get it.

        Example:
            pyarrow.parquet.write_table(done.to_arrow(), "rollouts.parquet")
        """
        with needs_extra("to_arrow", "tables"):
            arrow = importlib.import_module("pyarrow")
        schema = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in _ARROW_TYPES.items()])
        return arrow.table(self.columns(), schema=schema)


_ARROW_TYPES = {
    "prompt_index": "int64",
    "sample_index": "int64",
    "seed": "int64",
    "text": "string",
    "finish_reason": "string",
    "prompt_token_ids": "list uint32",
    "token_ids": "list uint32",
    "logprobs": "list float32",
    "request_id": "string",
    "fingerprint": "string",
    "output_digest": "string",
}
"""Arrow's type of each column."""


def _arrow_type(arrow: Any, kind: str) -> Any:
    base = getattr(arrow, kind.removeprefix("list "))()
    return arrow.list_(base) if kind.startswith("list ") else base


def _columns(index: int, done: Generation, sample: Sample) -> dict[str, Any]:
    return {
        "prompt_index": index,
        "sample_index": sample.index,
        "seed": sample.seed,
        "text": sample.text,
        "finish_reason": sample.finish_reason.value,
        "prompt_token_ids": array("I", done.prompt_token_ids),
        "token_ids": array("I", sample.token_ids),
        "logprobs": array("f", sample.logprobs),
        "request_id": done.request_id,
        "fingerprint": sample.receipt.fingerprint,
        "output_digest": sample.receipt.output_digest,
    }


class KeptResults:
    """The file that a batch's results are added to as they come, as `corun batch` writes it.

    All its results must have been drawn under one contract: those of two policies are no batch. Without a path, nothing
    is kept.

    Args:
        path: the file. What it has of these rows is read at once, and an unfinished last line cut off.
        rows: the rows of the batch.

    Raises:
        InvalidArgumentError: the file is none of `corun batch`, or has the answer to another prompt under a row's id.
        DataLossError: a result in it differs from its own receipt.
        ContractMismatchError: results in it were drawn under different contracts.
    """

    def __init__(self, path: str | Path | None, rows: Sequence[PromptRow]) -> None:
        self.found: dict[str, Generation] = {}
        """The generations that the file had, by the ids of their rows."""
        self._fingerprint = ""
        self._file = None
        if path is None:
            return
        path = Path(path)
        if path.exists():
            for where, row, result in read_finished(rows, path):
                if row is not None:
                    self.found[row.id] = read_generation(where, result)
                self._check_contract(_fingerprint(where, result))  # Those of other prompts count, too.
            drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> KeptResults:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, row: PromptRow, done: Generation) -> Generation:
        """Add a result, and return it as the file gives it to a later run.

        Raises ContractMismatchError if it was drawn under another contract than those in the file.
        """
        if self._file is None:
            return done
        self._check_contract(done.receipt.fingerprint)
        self._file.write(to_line(result_row(row.id, row.prompt, row.params, done)) + "\n")
        self._file.flush()
        return replace(done, samples=tuple(replace(sample, token_texts=()) for sample in done.samples))

    def _check_contract(self, found: str) -> None:
        self._fingerprint = self._fingerprint or found
        if found != self._fingerprint:
            differences = {"fingerprint": (self._fingerprint, found)}
            raise ContractMismatchError("the file has results of another contract: use another file", differences)


def read_generation(where: str, row: dict[str, Any]) -> Generation:
    """Return the generation that a row of results holds. Its log probabilities have every bit; it has no `token_texts`.

    Raises DataLossError or InvalidArgumentError, as `cases_from_row` does, if the row is not what its receipts say.
    """
    cases = cases_from_row(where, row)
    samples = tuple(_sample(index, each) for index, each in enumerate(row.get("samples", [row])))
    return Generation(
        request_id=samples[0].receipt.request_id, prompt_token_ids=cases[0].case.prompt_token_ids, samples=samples
    )


def _fingerprint(where: str, row: dict[str, Any]) -> str:
    try:
        return Receipt.from_dict(row["receipt"]).fingerprint
    except InvalidArgumentError as error:
        raise located(where, error) from None


def _sample(index: int, values: dict[str, Any]) -> Sample:
    return Sample(
        index=index,
        seed=values["seed"],
        text=values["text"],
        token_ids=tuple(values["token_ids"]),
        logprobs=tuple(array("f", values["logprobs"])),  # The file has the shortest text of each fp32 value.
        finish_reason=FinishReason(values["finish_reason"]),
        receipt=Receipt.from_dict(values["receipt"]),
        top_logprobs=tuple(map(tops_from_dict, values.get("top_logprobs", ()))),
    )
