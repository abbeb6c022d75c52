"""What two runs of one sample gave that should have been equal, as a file that runs it again.

The file is one line of JSON: a result row of `corun batch`, with what the audit found beside it, so that `corun verify`
reads it. It holds the sample's prompt. This module must not know how samples are run or where files are kept.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from corun.errors import InvalidArgumentError
from corun.params import SamplingParams
from corun.receipt import Receipt
from corun.records.rows import params_to_dict, read_results

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
    """Of the run that the client got."""
    audit: Receipt
    """Of the run that was compared with it; its output goes on after the difference."""
    differs_at: int
    """The first token, from 0, that differs."""
    first_token: Drawn | None
    """None: the run had ended."""
    audit_token: Drawn | None
    same_nodes: tuple[str, ...]
    """Ids of the nodes that both runs used."""
    time: str
    """Of the finding; ISO 8601, UTC."""

    def to_row(self) -> dict[str, Any]:
        """Plain values for JSON: a result row, and `audit` beside it."""
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


def read_reproduction(path: Path) -> tuple[str, dict[str, Any]]:
    """The row of a reproduction file with its file:line. Raises InvalidArgumentError if it is none."""
    for where, row in read_results(path):
        if isinstance(row.get("audit"), dict) and "receipt" in row["audit"]:
            return where, row
        break
    raise InvalidArgumentError("reproduction", str(path), "must be a file that an audit wrote")
