"""`corun batch`: a file of prompts to a file of results, resumable at any moment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TextIO

import tyro

from corun.cli.fingerprint import contract_lines, contracts_beside
from corun.cli.options import OptionalInt, PriorityName, RouterOptions, SamplingOptions
from corun.client.client import AsyncClient
from corun.client.progress import ProgressBar
from corun.client.request import DEFAULT_CONCURRENCY, check_concurrency, retry_delay_s
from corun.client.routers import Deadline
from corun.completion import Generation
from corun.errors import CorunError, InvalidArgumentError, OverloadedError
from corun.params import check_seed
from corun.records.rows import (
    PromptRow,
    drop_torn_line,
    located,
    read_finished,
    read_prompts,
    result_row,
    to_line,
)
from corun.seeds import derive_seed

MAX_SHOWN_REFUSALS = 20


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Run a file of prompts; run it again to resume.

    Each input line is an object: {"prompt": "text" or [token ids], "id"?, "seed"?, "params"?: {"temperature": 0.6, …}}.
    Each output line is a finished prompt with its token ids, log probabilities and receipt, in order of completion.
    Sampling options are the defaults of rows that do not set them.
    Beside the output, NAME.contracts.jsonl gets the contracts that the rows were drawn under, which `corun diff` reads.
    Routers that ask for tokens give them to operators only.
    A prompt that the cluster refuses is reported at the end, with exit code 2. The other prompts still run.

    examples:
      corun batch prompts.jsonl -o results.jsonl --max-tokens 256 --logprobs --seed 7
      corun verify results.jsonl
    """

    input: tyro.conf.Positional[Path]
    """JSON lines of prompts."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """JSON lines of results; rows whose id is already there are not run again."""
    seed: OptionalInt = None
    """Gives each row without a seed one that depends on this seed and the row's id."""
    concurrency: int = DEFAULT_CONCURRENCY
    """Prompts in flight at once."""
    priority: PriorityName = "low"
    """Which of the waiting requests come first; low ones may wait for as long as their time allows."""
    cluster: tyro.conf.OmitArgPrefixes[RouterOptions] = field(default_factory=RouterOptions)
    sampling: tyro.conf.OmitArgPrefixes[SamplingOptions] = field(default_factory=SamplingOptions)

    def run(self) -> int:
        check_concurrency(self.concurrency)
        if self.output.exists() and self.output.samefile(self.input):
            raise InvalidArgumentError("output", str(self.output), "must not be the input")
        rows = [self._seeded(row) for row in read_prompts(self.input, self.sampling.params())]
        todo = unfinished(rows, self.output)
        run = _Run(self, todo)
        try:
            with self.output.open("a", encoding="utf-8") as sink, ProgressBar(len(todo), "prompts") as bar:
                asyncio.run(run.all(sink, bar))
        finally:
            print(run.summary(len(rows)), file=sys.stderr)
        return 2 if run.refused else 0

    def _seeded(self, row: PromptRow) -> PromptRow:
        if self.seed is None or row.seed is not None:
            return row
        return replace(row, seed=derive_seed(check_seed(self.seed).to_bytes(8, "little"), row.id))


class _Run:
    """The rows of one run that had no result before it, and what became of them."""

    def __init__(self, batch: Batch, todo: Sequence[PromptRow]) -> None:
        self._batch, self._todo = batch, todo
        self._finished = 0
        self._fingerprints: set[str] = set()
        self.refused: list[str] = []

    async def all(self, sink: TextIO, bar: ProgressBar) -> None:
        """Run the rows, a bounded number at once. Write each result as it comes."""
        rows = iter(self._todo)

        async def work() -> None:
            for row in rows:  # All workers share the iterator: each takes the next row.
                done = await self._generate(client, row)
                if done is not None:
                    sink.write(to_line(result_row(row.id, row.prompt, row.params, done)) + "\n")
                    sink.flush()
                    self._finished += 1
                    await self._keep_contracts(client, done.receipt.fingerprint)
                bar.advance()

        async with self._batch.cluster.async_client() as client:
            workers = [asyncio.create_task(work()) for _ in range(min(self._batch.concurrency, len(self._todo)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _generate(self, client: AsyncClient, row: PromptRow) -> Generation | None:
        """Run one row. Return None if the cluster refuses its prompt."""
        deadline = Deadline(self._batch.cluster.timeout_s)
        while True:
            try:
                return await client.generate(
                    row.prompt, row.params, seed=row.seed, priority=self._batch.priority, timeout_s=deadline.remaining_s
                )
            except OverloadedError as error:
                delay = retry_delay_s(error, deadline)
            except InvalidArgumentError as error:
                self.refused.append(str(located(row.where, error)))
                return None
            await asyncio.sleep(delay)

    async def _keep_contracts(self, client: AsyncClient, fingerprint: str) -> None:
        """Write the contracts of a fingerprint that this run has not met before. No error of that ends the
        batch, since results matter more."""
        if fingerprint in self._fingerprints:
            return
        self._fingerprints.add(fingerprint)
        with suppress(CorunError, OSError):
            status = await client.get_cluster()
            path = contracts_beside(self._batch.output)
            known = path.read_text(encoding="utf-8") if path.exists() else ""
            lines = contract_lines(status)
            if lines and status.fingerprint == fingerprint and fingerprint not in known:
                path.write_text(known + "\n".join(lines) + "\n", encoding="utf-8")

    def summary(self, total: int) -> str:
        """Return what to tell of the run. total: the number of rows of the input."""
        lines = [f"refused {line}" for line in self.refused[:MAX_SHOWN_REFUSALS]]
        if len(self.refused) > MAX_SHOWN_REFUSALS:
            lines.append(f"refused {len(self.refused) - MAX_SHOWN_REFUSALS} more")
        before, left = total - len(self._todo), len(self._todo) - self._finished - len(self.refused)
        counts = {"were there before": before, "refused": len(self.refused), "left": left}
        parts = [f"{self._finished} finished", *(f"{count} {what}" for what, count in counts.items() if count)]
        again = "; run the same command again to continue" if left else ""
        return "\n".join([*lines, f"{self._batch.output}: {', '.join(parts)} of {total} prompts{again}"])


def unfinished(rows: list[PromptRow], output: Path) -> list[PromptRow]:
    """Return the rows that have no result in `output` yet. Cut off a last line that an interrupted run left incomplete.

    Raises InvalidArgumentError if `output` has, under the id of one of the rows, the answer to another prompt.
    """
    if not output.exists():
        return rows
    done = {row.id for _, row, _ in read_finished(rows, output)}
    if drop_torn_line(output):
        print(f"{output}: dropped an unfinished last line", file=sys.stderr)
    return [row for row in rows if row.id not in done]
