"""`corun replay`: run recorded requests again, and say where the first bit differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from corun.cli.colours import coloured
from corun.cli.options import RouterOptions
from corun.client.client import Client
from corun.client.progress import ProgressBar
from corun.completion import Sample
from corun.errors import InvalidArgumentError
from corun.receipt import alternatives_digest, text_digest
from corun.records.reproduction import parting
from corun.records.rows import read_results, to_line
from corun.records.verification import NamedCase, case_from_reproduction, cases_from_row

BIT_EXACT = "BIT-EXACT"
Recorded = tuple[NamedCase, Mapping[str, Any]]
"""A sample to run again, and its values as the record has them. A file that an audit wrote has no output, only its
digest."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Run recorded requests again and say BIT-EXACT, or the first token and log probability that differ.

    A record is what `corun generate --json` prints, a row of `corun batch`, or a file that an audit wrote. Before it is
    run, it is checked against its own receipt. The exit code is 3 if anything differs. `corun verify` also runs samples
    in crowds and in other slots; this command runs each once, as any request.

    examples:
      corun generate "Once upon a time" --logprobs --json > record.json
      corun replay record.json
      corun replay results.jsonl --id 17 --json
    """

    record: tyro.conf.Positional[Path]
    """JSON lines of records."""
    id: tuple[str, ...] = ()
    """Run only the rows with these ids."""
    json: bool = False
    """Print a JSON object for each sample instead."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)

    def run(self) -> int:
        recorded = self._recorded()
        num_equal = 0
        with self.cluster.client() as client, ProgressBar(len(recorded), "samples") as bar:
            for case, values in recorded:
                found = replayed(client, case, values)
                num_equal += found["match"]
                print(to_line(found) if self.json else _sentence(found), flush=True)
                bar.advance()
        if len(recorded) > 1 and not self.json:
            print(f"{num_equal} of {len(recorded)} samples are {BIT_EXACT}")
        return 0 if num_equal == len(recorded) else 3

    def _recorded(self) -> list[Recorded]:
        rows = list(read_results(self.record))
        if unknown := set(self.id) - {str(row["id"]) for _, row in rows}:
            raise InvalidArgumentError("id", min(unknown), f"must be the id of a row of {self.record}")
        found = [
            each for where, row in rows if not self.id or str(row["id"]) in self.id for each in samples(where, row)
        ]
        if not found:
            raise InvalidArgumentError("record", str(self.record), "must hold at least one record")
        return found


def samples(where: str, row: Mapping[str, Any]) -> Iterator[Recorded]:
    """Yield the samples of a record. Raises what `corun verify` raises for a row that is not right."""
    if "audit" in row:
        yield case_from_reproduction(where, row), {}
    else:
        yield from zip(cases_from_row(where, row), row.get("samples", [row]), strict=True)


def replayed(client: Client, case: NamedCase, values: Mapping[str, Any]) -> dict[str, Any]:
    """Run one sample again and return what was found, as plain values for JSON."""
    asked, receipt = case.case, case.receipt
    assert receipt is not None  # A record always has one.
    done = client.generate(asked.prompt_token_ids, asked.sampling_params, seed=asked.seed).samples[0]
    found: dict[str, Any] = {"id": case.name, "match": True, "seed": asked.seed, "num_tokens": len(done.token_ids)}
    if difference := _difference(done, case, values):
        found |= {"match": False, "difference": difference}
    if receipt.fingerprint != done.receipt.fingerprint:
        found["fingerprints"] = [receipt.fingerprint, done.receipt.fingerprint]
    return found


def _difference(done: Sample, case: NamedCase, values: Mapping[str, Any]) -> str:
    """Return the first difference between a record and its run in words. Empty: there is none."""
    assert case.receipt is not None
    if values and (found := parting((values["token_ids"], values["logprobs"]), (done.token_ids, done.logprobs))):
        return f"{found} (recorded and now)"
    if done.receipt.output_digest != case.case.output_digest:
        told = "the record has none" if values else "an audit's file has no output"
        return f"the output's digest, by a log probability; which one is not known, because {told}"
    if done.finish_reason is not case.receipt.finish_reason:
        return f"finish reason: {case.receipt.finish_reason.value} and {done.finish_reason.value} (recorded and now)"
    if case.text_digest and text_digest(done.text) != case.text_digest:
        return "the text; all tokens are the same, so it was decoded by another tokenizer"
    if values and alternatives_digest(done.top_logprobs) != case.alternatives_digest:
        return "the top_logprobs; all tokens and their own log probabilities are the same"
    return ""


def _sentence(found: Mapping[str, Any]) -> str:
    verdict = coloured(BIT_EXACT, "green") if found["match"] else coloured(f"DIFFERS at {found['difference']}", "red")
    lines = [f"{found['id']}: {verdict}; {found['num_tokens']} tokens, seed {found['seed']}"]
    if recorded_and_now := found.get("fingerprints"):
        lines.append("  another contract: recorded {}, now {}".format(*recorded_and_now))
    return "\n".join(lines)
