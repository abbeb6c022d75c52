"""`corun verify`: run results or built-in prompts again under every condition."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from corun.cli.options import OptionalInt, OptionalPath, RouterOptions, unset
from corun.cli.verify_report import TIMEOUT_S, Report, Verification, built_in_cases
from corun.client.client import Client
from corun.client.progress import ProgressBar
from corun.errors import CorunError, InvalidArgumentError
from corun.records.reproduction import read_reproduction
from corun.records.rows import read_results, to_line
from corun.records.verification import Condition, NamedCase, case_from_reproduction, cases_from_row

MAX_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run results again and compare every bit.

    Each case runs alone, in a crowd, in other slots and in another order. Prints a table and one JSON object; the exit
    code is 3 if anything differs. Ctrl-C prints what came until then.
    Before a row is run, its tokens, counts, finish reason, seed and parameters are checked against its receipt. The run
    checks its text, its top_logprobs and the text of its prompt. Cases have the lowest priority; what runs beside them
    takes idle slots only, and gives way to other requests.

    examples:
      corun verify                                         built-in prompts: each condition against the first
      corun verify results.jsonl                           the output of corun batch: against its receipts
      corun verify results.jsonl --conditions alone crowded --json
      corun verify --reproduction audit-….json             what an audit found: against what the client got
      corun verify -o report.json                          the table here, the JSON object in a file as well
    """

    results: tyro.conf.Positional[OptionalPath] = None
    """Output of corun batch; without it, built-in prompts are run."""
    reproduction: OptionalPath = None
    """Instead of results: a file that a router's audit wrote. Equal runs mean that the audit's nodes were wrong."""
    conditions: tyro.conf.EnumChoicesFromValues[tuple[Condition, ...]] = tuple(Condition)
    """Conditions to run under."""
    limit: OptionalInt = None
    """Verify the first so many samples only."""
    order_seed: int = 0
    """Draws the orders and the crowds."""
    json: bool = False
    """Print the JSON object only."""
    output: Annotated[Path | None, unset(Path, "PATH", aliases=["-o"])] = None
    """Also write the JSON object to this file."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(
        default_factory=lambda: RouterOptions(timeout_s=TIMEOUT_S)
    )

    def run(self) -> int:
        if self.output is not None:
            self._check_output(self.output)
        with self.cluster.client() as client:
            found = Verification(self._cases(client), self.conditions, order_seed=self.order_seed)
            try:
                with ProgressBar(found.report.num_runs, "runs") as bar:
                    found.run(client, timeout_s=self.cluster.timeout_s, on_result=bar.advance)
            except (KeyboardInterrupt, CorunError):
                if found.report.runs:  # Show what was found, however the runs ended.
                    self._print(found.report)
                raise
        self._print(found.report)
        return 0 if found.report.match else 3

    def _check_output(self, output: Path) -> None:
        """Raise an error now if the report cannot be written, or would take the place of what is verified."""
        output.open("a").close()
        if any(
            path is not None and path.exists() and output.samefile(path) for path in (self.results, self.reproduction)
        ):
            raise InvalidArgumentError("output", str(output), "must not be what is verified")

    def _print(self, report: Report) -> None:
        line = to_line(report.to_dict())
        if not self.json:
            show(report)
        print(line)
        if self.output is not None:
            self.output.write_text(line + "\n", encoding="utf-8")

    def _cases(self, client: Client) -> list[NamedCase]:
        if self.limit is not None and self.limit < 1:
            raise InvalidArgumentError("limit", self.limit, "must be at least 1")
        if self.reproduction is not None:
            if self.results is not None:
                raise InvalidArgumentError("reproduction", str(self.reproduction), "must be given without results")
            return [case_from_reproduction(*read_reproduction(self.reproduction))]
        if self.results is None:
            return built_in_cases(client.get_cluster())[: self.limit]
        rows = read_results(self.results)
        cases = list(islice((case for row in rows for case in cases_from_row(*row)), self.limit))
        if not cases:
            raise InvalidArgumentError("results", str(self.results), "must hold at least one result")
        return cases


def show(report: Report) -> None:
    """Print the report as a table, with the first differences."""
    console = Console(highlight=False, markup=False)
    table = Table("condition", "runs", "equal", "different", box=box.SIMPLE_HEAD, pad_edge=False)
    for condition in Condition:
        if runs := report.runs[condition]:
            equal = report.equal[condition]
            style = "green" if equal == runs else "red"
            table.add_row(condition.value, str(runs), str(equal), str(runs - equal), style=style)
    console.print(table)
    for difference in report.differences[:MAX_SHOWN_DIFFERENCES]:
        console.print("{case}, {condition}: {reason}".format(**difference), style="red", soft_wrap=True)
    if more := len(report.differences[MAX_SHOWN_DIFFERENCES:]):
        console.print(f"and {more} more", style="red")
    verdict = "BITS DIFFER" if report.differences else "every bit agrees"
    missing = f"; {report.num_missing} of {report.num_runs} runs were not run" if report.num_missing else ""
    line = f"{report.num_cases} cases, {report.runs.total()} runs: {verdict}{missing}"
    style = "red" if report.differences else "yellow" if report.num_missing else "green"
    console.print(line, style=f"bold {style}", soft_wrap=True)
