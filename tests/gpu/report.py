"""What a run found: a JSON line per result as it comes, a table and one JSON file at the end.

Must not know what a check does. The file is written again after every result, so that a run that is cut off leaves
what it found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

EQUAL, DIFFERENT, ERROR, SKIPPED = "equal", "DIFFERENT", "ERROR", "skipped"
CONTROL_DIFFERS = "differs, as it must"
EXIT_CODES = {DIFFERENT: 3, ERROR: 1, SKIPPED: 1}
"""The first of these verdicts that any result has decides; else 0. What was not run was not verified."""
MAX_ERROR = 1500
MIN_WIDTH = 120
"""Columns of the table; a log has no width of its own."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one check found."""

    name: str
    total: int = 0
    equal: int = 0
    must_differ: bool = False
    """A control: it passes if something differs."""
    error: str = ""
    skipped: str = ""
    """Why it was not run."""
    seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.error or self.skipped:
            return ERROR if self.error else SKIPPED
        if self.must_differ:  # A control that agrees means that the checks prove nothing.
            return ERROR if self.equal == self.total else CONTROL_DIFFERS
        return EQUAL if self.equal == self.total and self.total else DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        found = {"check": self.name, "verdict": self.verdict, "total": self.total, "equal": self.equal}
        if self.error:
            is_short = len(self.error) <= MAX_ERROR
            ends = f"{self.error[: MAX_ERROR // 3]} ... {self.error[-MAX_ERROR * 2 // 3 :]}"
            found["error"] = self.error if is_short else ends
        found |= {"skipped": self.skipped} if self.skipped else {}
        return found | {"seconds": round(self.seconds, 1), **self.detail}


class Report:
    """Collects outcomes and facts."""

    def __init__(self, path: Path | None = None) -> None:
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] = {}
        self._path = path

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(json.dumps(outcome.to_dict()), flush=True)
        self.save()

    def say(self, **facts: Any) -> None:
        """Facts that belong to the conditions; printed, and part of the file."""
        print(json.dumps(facts), flush=True)
        self.keep(**facts)

    def keep(self, **facts: Any) -> None:
        """Facts for the file alone."""
        self.facts |= facts
        self.save()

    @property
    def exit_code(self) -> int:
        verdicts = {outcome.verdict for outcome in self.outcomes}
        return next((code for verdict, code in EXIT_CODES.items() if verdict in verdicts), 0 if verdicts else 1)

    def save(self) -> None:
        if self._path is not None:
            checks = [outcome.to_dict() for outcome in self.outcomes]
            found = {"exit_code": self.exit_code, "conditions": self.facts, "checks": checks}
            fresh = self._path.with_suffix(".tmp")
            fresh.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(fresh, self._path)

    def show(self) -> None:
        """The table."""
        table = Table("check", "equal", "of", "seconds", "", box=box.SIMPLE_HEAD, pad_edge=False)
        styles = {EQUAL: "green", CONTROL_DIFFERS: "green", SKIPPED: "yellow"}
        for outcome in self.outcomes:
            note = outcome.error or outcome.skipped
            text = f"{outcome.verdict}: {note.splitlines()[0][:60]}" if note else outcome.verdict
            row = (outcome.name, str(outcome.equal), str(outcome.total), f"{outcome.seconds:.1f}", text)
            table.add_row(*row, style=styles.get(outcome.verdict, "red"))
        Console(highlight=False, markup=False, width=max(Console().width, MIN_WIDTH)).print(table)
