"""`python -m tests.fuzz`: hostile bytes and hostile clients against a router and nodes of fake engines; prints JSON.

Exit code 1 if anything was found. A case found is run again with `--seed S --first NUMBER --cases 1`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

import tyro

from tests.fuzz.observed import running
from tests.fuzz.runner import fuzzing


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run."""

    seed: int = 1
    cases: int = 10_000
    first: int = 0
    """Number of the first case."""
    at_once: int = 96
    """Cases at a time."""


async def run(options: Options) -> dict[str, Any]:
    async with running() as target, fuzzing(target, options.seed) as fuzzer:
        report = await fuzzer.run(first=options.first, cases=options.cases, at_once=options.at_once, canary_every=200)
    return report.as_dict()


def main() -> int:
    options = tyro.cli(Options, prog="tests.fuzz")
    report = asyncio.run(run(options))
    print(json.dumps(report))
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
