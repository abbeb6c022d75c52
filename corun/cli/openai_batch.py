"""OpenAI's batch files for `corun batch`: what of a file is left to do, and the answer to each of its lines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corun.client.client import AsyncClient
from corun.errors import DeadlineError, InvalidArgumentError
from corun.gateway.batches import Answers, Request, Row, broken, is_batch, read_line
from corun.gateway.config import GatewayConfig
from corun.gateway.requests import read_json
from corun.params import check_seed, derive_seed
from corun.records.rows import located


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of one line of a batch."""

    row: dict[str, Any] | None = None
    """The line to write, if any."""
    refused: str = ""
    """Why the line was refused; empty: it was not."""
    fingerprint: str = ""


def is_openai_file(path: Path) -> bool:
    """Return whether the first line of a file is one of OpenAI's batch files."""
    with path.open("rb") as file:
        return is_batch(next((line for line in file if line.strip()), b""))


class OpenAiFile:
    """One of OpenAI's batch files.

    Args:
        seed: gives each line without a seed one that depends on this seed and the line's custom_id.
        priority: of lines that name none.
    """

    def __init__(self, path: Path, output: Path, *, seed: int | None, priority: str) -> None:
        self._path, self._output = path, output
        self._seed = None if seed is None else check_seed(seed).to_bytes(8, "little")
        self._priority = priority
        self._answers: Answers | None = None
        self._items = self._read()
        self.refused: list[str] = []
        """The lines that the output says were refused, and why; `unfinished` finds them."""

    @property
    def total(self) -> int:
        return len(self._items)

    def unfinished(self) -> list[Request | Row]:
        """Return the requests that have no answer yet, and the errors of broken lines that were not written yet.

        Raises InvalidArgumentError if the output has the answer to another request under the same custom_id.
        """
        done = self._answered()
        others = {row["custom_id"]: where for where, row in done.values() if row["response"] is not None}
        for item in self._items:
            if isinstance(item, Request) and item.id not in done and item.custom_id in others:
                limit = f"is the answer to another request than {self._path}:{item.number}: write to another file"
                raise InvalidArgumentError(f"{others[item.custom_id]}: custom_id", item.custom_id, limit)
        ids = [item.id if isinstance(item, Request) else item["id"] for item in self._items]
        refusals = [self._refusal(done[each][1]) for each in ids if each in done]
        self.refused = [each for each in refusals if each]
        return [item for each, item in zip(ids, self._items, strict=True) if each not in done]

    async def answer(self, client: AsyncClient, item: Request | Row, timeout_s: float) -> Answer:
        """Return the answer to one line. timeout_s: the time that all its calls have together."""
        row = await self._ask(client, item, timeout_s) if isinstance(item, Request) else item
        if refused := self._refusal(row):
            return Answer(row=row, refused=refused)
        return Answer(row=row, fingerprint=row["response"]["body"]["system_fingerprint"])

    async def _ask(self, client: AsyncClient, request: Request, timeout_s: float) -> Row:
        self._answers = self._answers or Answers(client, GatewayConfig(), self._priority)
        try:
            return await asyncio.wait_for(self._answers.answer(request), timeout_s)
        except asyncio.TimeoutError:
            raise DeadlineError(f"{self._path}:{request.number}: not answered in time") from None

    def _refusal(self, row: Row) -> str:
        """Return the place of a refused line and why it was refused; empty if it was answered."""
        error = row["error"] or row["response"]["body"].get("error")
        return f"{self._path}:{error.get('line')}: {error.get('message')}" if error else ""

    def _read(self) -> list[Request | Row]:
        items: list[Request | Row] = []
        places: dict[str, int] = {}
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    request = read_line(line, number, self._seed_of)
                    if request.custom_id in places:
                        limit = f"must be unique; line {places[request.custom_id]} has it too"
                        raise InvalidArgumentError("custom_id", request.custom_id, limit)
                    places[request.custom_id] = number
                    items.append(request)
                except InvalidArgumentError as error:
                    items.append(broken(line, number, error))
        return items

    def _seed_of(self, custom_id: str) -> int | None:
        return None if self._seed is None else derive_seed(self._seed, custom_id)

    def _answered(self) -> dict[str, tuple[str, Row]]:
        """Return the rows of the output by their ids, each with its place. A torn last line is left out."""
        found: dict[str, tuple[str, Row]] = {}
        if not self._output.exists():
            return found
        with self._output.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                where = f"{self._output}:{number}"
                try:
                    row = read_json(line)
                    if not _is_answer(row):
                        raise InvalidArgumentError("id", row.get("id"), "must be that of an answer in OpenAI's form")
                except InvalidArgumentError as error:
                    raise located(where, error) from None
                found[row["id"]] = where, row
        return found


def _is_answer(row: Row) -> bool:
    """Return whether a row has the form of an answer: that of a line that was broken, refused or answered."""
    match row:
        case {"id": str(), "custom_id": str() | None, "response": None, "error": dict()}:
            return True
        case {"id": str(), "custom_id": str(), "response": {"body": dict(body)}, "error": None}:
            return isinstance(body.get("error", {}), dict)
    return False
