"""`corun batch`: a file of prompts to a file of results, resumable at any moment."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from corun.cli.fingerprint import contract_lines, contracts_beside
from corun.cli.openai_batch import Answer, OpenAiFile, is_openai_file
from corun.cli.options import OptionalInt, PriorityName, RouterOptions, SamplingOptions
from corun.client.client import AsyncClient, all_or_none
from corun.client.progress import ProgressBar
from corun.client.request import DEFAULT_CONCURRENCY, check_concurrency, retry_delay_s
from corun.client.routers import Deadline
from corun.errors import CorunError, InvalidArgumentError, OverloadedError
from corun.params import check_seed, derive_seed
from corun.records.rows import PromptRow, drop_torn_line, located, read_finished, read_prompts, result_row, to_line

MAX_SHOWN_REFUSALS = 20


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Run a file of prompts; run it again to resume.

    Each input line is an object: {"prompt": "text" or [token ids], "id"?, "seed"?, "params"?: {"temperature": 0.6, …}}.
    Each output line is a finished prompt with its token ids, log probabilities and receipt, in order of completion.
    Sampling options are the defaults of rows that do not set them.
    Beside the output, NAME.contracts.jsonl gets the contracts that the rows were drawn under, which `corun diff` reads.
    For clients that are no operators, routers leave the values of environment variables out of them.
    A prompt that the cluster refuses is reported at the end, with exit code 2. The other prompts still run.
    A file whose first line has a custom_id is one of OpenAI's batch files, and so is then the output: requests for
    /v1/completions and /v1/chat/completions. There a refused or broken line has a line with the error.

    examples:
      corun batch openai.jsonl -o answers.jsonl
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
        for name, path in (("input", self.input), ("output", self.output)):
            if path.exists() and not path.is_file() and str(path) != os.devnull:
                raise InvalidArgumentError(name, str(path), "must be a regular file, since it is read more than once")
        if self.output.exists() and self.output.samefile(self.input):
            raise InvalidArgumentError("output", str(self.output), "must not be the input")
        work = self._openai_file() if is_openai_file(self.input) else _PromptFile(self)
        todo = work.unfinished()
        if drop_torn_line(self.output):
            print(f"{self.output}: dropped an unfinished last line", file=sys.stderr)
        run = _Run(self, work.answer, todo, work.refused)
        # An error may name a field that has a lone surrogate, which is written as JSON's escape.
        with self.output.open("a", encoding="utf-8", errors="backslashreplace") as sink:
            try:
                with ProgressBar(len(todo), "prompts") as bar:
                    asyncio.run(run.all(sink, bar))
            finally:
                print(run.summary(work.total), file=sys.stderr)
        return 2 if run.refused else 0

    def _openai_file(self) -> OpenAiFile:
        for name, value in asdict(self.sampling).items():
            if value != getattr(SamplingOptions(), name):
                raise InvalidArgumentError(name, value, "must be in the body of each line of OpenAI's batch file")
        return OpenAiFile(self.input, self.output, seed=self.seed, priority=self.priority)


class _PromptFile:
    """A file of prompts in this project's own form."""

    refused: Sequence[str] = ()
    """Refused prompts leave nothing in the output: each run asks for them again."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = [self._seeded(row) for row in read_prompts(batch.input, batch.sampling.params())]

    @property
    def total(self) -> int:
        return len(self._rows)

    def unfinished(self) -> list[PromptRow]:
        """Return the rows that have no result yet. Raises InvalidArgumentError if the output is that of other rows."""
        output = self._batch.output
        done = {row.id for _, row, _ in read_finished(self._rows, output) if row} if output.exists() else set()
        return [row for row in self._rows if row.id not in done]

    async def answer(self, client: AsyncClient, row: PromptRow, timeout_s: float) -> Answer:
        """Return the result of one row, or why the cluster refuses its prompt."""
        priority = self._batch.priority
        try:
            done = await client.generate(row.prompt, row.params, seed=row.seed, priority=priority, timeout_s=timeout_s)
        except InvalidArgumentError as error:
            return Answer(refused=str(located(row.where, error)))
        result = result_row(row.id, row.prompt, row.params, done)
        return Answer(row=result, fingerprint=done.receipt.fingerprint)

    def _seeded(self, row: PromptRow) -> PromptRow:
        seed = self._batch.seed
        if seed is None or row.seed is not None:
            return row
        return replace(row, seed=derive_seed(check_seed(seed).to_bytes(8, "little"), row.id))


class _Run:
    """The rows of one run that had no result before it, and what became of them.

    refused: what earlier runs were refused, which is told again.
    """

    def __init__(
        self, batch: Batch, answer: Callable[..., Awaitable[Answer]], todo: Sequence[Any], refused: Sequence[str]
    ) -> None:
        self._batch, self._answer, self._todo = batch, answer, todo
        self._finished = 0
        self._fingerprints: set[str] = set()
        self._refused_before = len(refused)
        self.refused = [*refused]

    async def all(self, sink: TextIO, bar: ProgressBar) -> None:
        """Run the rows, a bounded number at once. Write each result as it comes."""
        rows = iter(self._todo)

        async def work() -> None:
            for row in rows:  # All workers share the iterator: each takes the next row.
                answer = await self._ask(client, row)
                if answer.row is not None:
                    sink.write(to_line(answer.row) + "\n")
                    sink.flush()
                if answer.refused:
                    self.refused.append(answer.refused)
                else:
                    self._finished += 1
                    await self._keep_contracts(client, answer.fingerprint)
                bar.advance()

        async with self._batch.cluster.async_client() as client:
            await all_or_none(work() for _ in range(min(self._batch.concurrency, len(self._todo))))

    async def _ask(self, client: AsyncClient, row: Any) -> Answer:
        """Return the answer to one row. An overloaded router is asked again."""
        timeout_s = self._batch.cluster.timeout_s
        deadline = Deadline(timeout_s)
        while True:
            try:
                return await self._answer(client, row, timeout_s)
            except OverloadedError as error:
                await asyncio.sleep(retry_delay_s(error, deadline))
                if not (timeout_s := deadline.remaining_s):
                    raise

    async def _keep_contracts(self, client: AsyncClient, fingerprint: str) -> None:
        """Write the contracts of a fingerprint that this run has not met before. No error of that ends the
        batch, since results matter more."""
        if fingerprint in self._fingerprints:
            return
        self._fingerprints.add(fingerprint)
        with suppress(CorunError, OSError, ValueError):  # A ValueError is that of a file that is no UTF-8.
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
        before = total - len(self._todo) - self._refused_before
        left = total - before - self._finished - len(self.refused)
        counts = {"were there before": before, "refused": len(self.refused), "left": left}
        parts = [f"{self._finished} finished", *(f"{count} {what}" for what, count in counts.items() if count)]
        again = "; run the same command again to continue" if left else ""
        return "\n".join([*lines, f"{self._batch.output}: {', '.join(parts)} of {total} prompts{again}"])
