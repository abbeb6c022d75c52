"""`corun diff`: compare two files of results, and say where they part and which field of the contract explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from corun.cli.fingerprint import contracts_beside, differing, of_file
from corun.errors import InvalidArgumentError
from corun.receipt import alternatives_digest
from corun.records.reproduction import parting
from corun.records.rows import read_results, to_line, tops_from_dict
from corun.records.verification import cases_from_row

MAX_SHOWN = 20
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two files of results row by row: the first token and log probability where two runs part.

    Rows belong together by their ids. A difference in what was asked comes before one in what was drawn. If the runs
    were drawn under other contracts, the fields in which these differ are shown: `corun batch` keeps contracts beside
    its output. Each row is checked against its receipt. The exit code is 3 if a row differs.

    examples:
      corun batch prompts.jsonl -o before.jsonl --logprobs --seed 7
      corun batch prompts.jsonl -o after.jsonl --logprobs --seed 7
      corun diff before.jsonl after.jsonl
    """

    first: tyro.conf.Positional[Path]
    """Output of corun batch."""
    second: tyro.conf.Positional[Path]
    """Output of corun batch with the same prompts."""
    json: bool = False
    """Print JSON objects instead: one a row that differs, then a summary."""

    def run(self) -> int:
        rows = [_rows(path) for path in (self.first, self.second)]
        common = [name for name in rows[0] if name in rows[1]]
        if not common:
            raise InvalidArgumentError("second", str(self.second), f"must have an id in common with {self.first}")
        found = {name: why for name in common if (why := difference(rows[0][name], rows[1][name]))}
        summary = {
            "rows": len(common),
            "equal": len(common) - len(found),
            "only_in_first": len(rows[0]) - len(common),
            "only_in_second": len(rows[1]) - len(common),
            "contract": self._contract(rows),
        }
        if self.json:
            for name, why in found.items():
                print(to_line({"id": name, "difference": why}))
            print(to_line(summary))
        else:
            self._show(found, summary)
        return 3 if found else 0

    def _contract(self, rows: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
        """Return the fingerprint that most rows of each file have, and the fields in which their contracts differ."""
        first, second = (_fingerprint(each) for each in rows)
        found: dict[str, Any] = {"fingerprints": [first, second]}
        if first == second:
            return found
        files = [contracts_beside(path) for path in (self.first, self.second)]
        if missing := [str(file) for file in files if not file.is_file()]:
            return found | {"unknown": f"{', '.join(missing)} is not there"}
        try:
            values = differing(of_file(files[0], first), of_file(files[1], second))
        except InvalidArgumentError as error:
            return found | {"unknown": str(error)}
        return found | {"fields": {name: list(both) for name, both in sorted(values.items())}}

    def _show(self, found: Mapping[str, str], summary: Mapping[str, Any]) -> None:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for name, why in list(found.items())[:MAX_SHOWN]:
            console.print(f"{name}: {why}", style="red")
        if len(found) > MAX_SHOWN:
            console.print(f"and {len(found) - MAX_SHOWN} more", style="red")
        for line in _about(summary["contract"]):
            console.print(line)
        alone = {"first": summary["only_in_first"], "second": summary["only_in_second"]}
        rest = "".join(f"; {count} only in the {which}" for which, count in alone.items() if count)
        verdict = f"{len(found)} differ" if found else "every bit agrees"
        console.print(f"{summary['rows']} rows in both: {verdict}{rest}", style="bold red" if found else "bold green")


def difference(first: Row, second: Row) -> str:
    """Return the first difference between two results in words. Empty: there is none."""
    for name, one, other in _facts(first, second):
        if one != other:
            return f"{name}: {one!r} and {other!r}"
    pairs = zip(first.get("samples", [first]), second.get("samples", [second]), strict=True)
    for index, (one, other) in enumerate(pairs):
        name = f"sample {index}, " if "samples" in first else ""
        if found := parting((one["token_ids"], one["logprobs"]), (other["token_ids"], other["logprobs"])):
            return f"{name}{found}"
        if one["receipt"]["output_digest"] != other["receipt"]["output_digest"]:
            return f"{name}the output's digest, by a log probability that not both files have"
        for field in ("finish_reason", "text"):
            if one[field] != other[field]:
                return f"{name}{field}: {one[field]!r} and {other[field]!r}"
        tops = zip(_tops_digests(one), _tops_digests(other), strict=True)
        if (at := next((at for at, (a, b) in enumerate(tops) if a != b), None)) is not None:
            return f"{name}the top_logprobs of token {at}"
    return ""


def _tops_digests(sample: Row) -> list[str]:
    """Return a digest of the alternatives of each token. No other digest covers them."""
    return [alternatives_digest([tops_from_dict(values)]) for values in sample.get("top_logprobs", ())]


def _facts(first: Row, second: Row) -> Iterator[tuple[str, Any, Any]]:
    """Yield what was asked, with its name and both values."""
    yield "prompt", first["prompt"], second["prompt"]
    ids = "prompt_token_ids"
    yield "the prompt's token ids, by another tokenizer", first.get(ids), second.get(ids)
    yield "seed", first["seed"], second["seed"]
    for name in sorted({*first["params"], *second["params"]} - {"logprobs"}):
        yield name, first["params"].get(name), second["params"].get(name)


def _rows(path: Path) -> dict[str, Row]:
    """Return a file's results by their ids. Raises InvalidArgumentError or DataLossError for one that is not right."""
    found: dict[str, Row] = {}
    for where, row in read_results(path):
        cases_from_row(where, row)
        if (name := str(row["id"])) in found:
            raise InvalidArgumentError(f"{where}: id", name, "must be unique")
        found[name] = row
    if not found:
        raise InvalidArgumentError("results", str(path), "must hold at least one result")
    return found


def _fingerprint(rows: Mapping[str, Row]) -> str:
    return Counter(row["receipt"]["fingerprint"] for row in rows.values()).most_common(1)[0][0]  # type: ignore[no-any-return]


def _about(contract: Mapping[str, Any]) -> Iterator[str]:
    first, second = contract["fingerprints"]
    if first == second:
        yield f"one contract: {first}"
        return
    yield f"two contracts: {first} and {second}"
    if "unknown" in contract:
        yield f"  what differs in them is not known: {contract['unknown']}"
    for name, (one, other) in contract.get("fields", {}).items():
        yield f"  {name}: {one} and {other}"
