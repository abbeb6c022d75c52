"""Reproduction files: two runs of one sample that differ and should be equal, with all that is needed to run it again.

The file is one line of JSON: a result row of `corun batch` together with what the audit found. So `corun verify` can
read it. It holds the sample's prompt. This module must not know how samples are run.
"""

from __future__ import annotations

import os
import secrets
import struct
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.rows import params_to_dict, read_results, to_line

MAX_FILES = 100
"""The most reproduction files in a directory. If there are more, the oldest are deleted."""
_FP32 = struct.Struct(">f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A token as a node drew it."""

    token_id: int
    logprob_bits: str
    """The fp32 log probability as 8 hex digits, sign bit first."""

    @classmethod
    def of(cls, token_id: int, logprob: float) -> Drawn:
        return cls(token_id=token_id, logprob_bits=_FP32.pack(logprob).hex())


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """One sample, what its two runs gave, and where they ran."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    first: Receipt
    """The receipt of the run that the client got."""
    audit: Receipt
    """The receipt of the run that was compared with it. Its output continues after the difference."""
    differs_at: int
    """The index, from 0, of the first token that differs."""
    first_token: Drawn | None
    """The first run's token at that index. None: the run had ended before it."""
    audit_token: Drawn | None
    """The audit's token at that index. None: the run had ended before it."""
    same_nodes: tuple[str, ...]
    """The ids of the nodes that both runs used."""
    time: str
    """The time when the difference was found; ISO 8601, UTC."""

    def to_row(self) -> dict[str, Any]:
        """Return plain values for JSON: a result row that also has `audit`."""
        return {
            "id": f"{self.first.request_id}[{self.first.sample_index}]",
            "prompt": list(self.prompt_token_ids),
            "params": params_to_dict(self.params),
            "seed": self.first.seed,
            "receipt": self.first.to_dict(),
            "audit": {
                "receipt": self.audit.to_dict(),
                "differs_at": self.differs_at,
                "first_token": self.first_token and asdict(self.first_token),
                "audit_token": self.audit_token and asdict(self.audit_token),
                "same_nodes": list(self.same_nodes),
                "fingerprint": self.first.fingerprint,
                "time": self.time,
            },
        }


def write_reproduction(directory: Path, reproduction: Reproduction) -> Path:
    """Write a reproduction file, whole or not at all, and return its path. Names sort by time. Only the files' owner
    may read them, because they hold prompts. Raises OSError if the file cannot be written."""
    path = directory / f"audit-{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}.json"
    handle, new = tempfile.mkstemp(prefix=".audit-", dir=directory)  # The file gets mode 0600.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_line(reproduction.to_row()) + "\n")
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
