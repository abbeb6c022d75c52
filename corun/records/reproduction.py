"""Two runs of one sample that differ and should be equal: where they part, and the files of those that audits found.

A reproduction file has all that is needed to run the sample again. It is one line of JSON: a result row of
`corun batch` together with what the audit found. So `corun verify` can read it. It holds the sample's prompt. This
module must not know how samples are run.
"""

from __future__ import annotations

import os
import secrets
import struct
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import zip_longest
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.rows import params_to_dict, read_results, to_line

MAX_FILES = 100
"""The most reproduction files in a directory. If there are more, the oldest are deleted."""


def logprob_bits(logprob: float) -> str:
    """Return an fp32 log probability as 8 hex digits, sign bit first."""
    return struct.pack(">f", logprob).hex()


def parting(first: tuple[Sequence[int], Sequence[float]], second: tuple[Sequence[int], Sequence[float]]) -> str:
    """Return in words where two outputs part, each its token ids and log probabilities. Empty: nowhere.

    Log probabilities count where both outputs have them: bits are compared, so -0.0 is not 0.0.
    """
    with_logprobs = bool(first[1]) and bool(second[1])
    pairs = zip_longest(_drawn(*first, with_logprobs), _drawn(*second, with_logprobs), fillvalue="the end")
    return next((f"token {at}: {one} and {other}" for at, (one, other) in enumerate(pairs) if one != other), "")


def _drawn(token_ids: Sequence[int], logprobs: Sequence[float], with_logprobs: bool) -> list[str]:
    if not with_logprobs:
        return list(map(str, token_ids))
    drawn = zip(token_ids, logprobs, strict=True)
    return [f"{token_id} (logprob {logprob_bits(logprob)})" for token_id, logprob in drawn]


def reproduction_row(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    runs: tuple[Receipt, Receipt],
    differs_at: int,
    drawn: tuple[tuple[int, float] | None, tuple[int, float] | None],
    same_nodes: Sequence[str],
) -> dict[str, Any]:
    """Return one sample, what its two runs gave, and where they ran: a result row that also has `audit`.

    Of a pair, the first belongs to the run that the client got and the second to the audit. The audit's output
    continues after the difference.

    Args:
        differs_at: the index, from 0, of the first token that differs.
        drawn: each run's token at that index, with its log probability. None: the run had ended before it.
        same_nodes: the ids of the nodes that both runs used.
    """
    first, audit = runs
    tokens = [one and {"token_id": one[0], "logprob_bits": logprob_bits(one[1])} for one in drawn]
    return {
        "id": f"{first.request_id}[{first.sample_index}]",
        "prompt": list(prompt_token_ids),
        "params": params_to_dict(params),
        "seed": first.seed,
        "receipt": first.to_dict(),
        "audit": {
            "receipt": audit.to_dict(),
            "differs_at": differs_at,
            "first_token": tokens[0],
            "audit_token": tokens[1],
            "same_nodes": list(same_nodes),
            "fingerprint": first.fingerprint,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
    }


def write_reproduction(directory: Path, row: Mapping[str, Any]) -> Path:
    """Write a reproduction file, whole or not at all, and return its path. Names sort by time. Only the files' owner
    may read them, because they hold prompts. Raises OSError if the file cannot be written."""
    path = directory / f"audit-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}.json"
    handle, new = tempfile.mkstemp(prefix=".audit-", dir=directory)  # The file gets mode 0600.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_line(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(new).replace(path)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise
    for old in sorted(directory.glob("audit-*.json"))[:-MAX_FILES]:
        old.unlink(missing_ok=True)
    return path


def read_reproduction(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the row of a reproduction file and its place as file:line.

    Raises InvalidArgumentError if the file is not a reproduction file.
    """
    where, row = next(read_results(path), ("", {}))
    if not isinstance(row.get("audit"), dict) or "receipt" not in row["audit"]:
        raise InvalidArgumentError("reproduction", str(path), "must be a file that an audit wrote")
    return where, row
