"""`python -m tests.chaos`: faults against a router and nodes whose engines are fakes; prints a JSON object.

Exit code 3 if any request got other bits than without faults, 1 if one failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from tests.chaos.fakes import Report, under_chaos
from tests.fakes import write_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run."""

    seed: int = 1
    faults: int = 1000
    clients: int = 16
    """Requests at a time."""


async def run(options: Options, model: str) -> Report:
    async with under_chaos(model, options.seed) as chaos:
        return await chaos.run(faults=options.faults, clients=options.clients)


def main() -> int:
    options = tyro.cli(Options, prog="tests.chaos")
    with tempfile.TemporaryDirectory() as scratch:
        report = asyncio.run(run(options, write_tokenizer(Path(scratch))))
    print(json.dumps(report.as_dict()))
    return 3 if report.wrong else 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
