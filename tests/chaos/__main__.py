"""`python -m tests.chaos`: faults against a cluster under load; prints a JSON object.

With `--engines fake` (the default) a router and nodes of all kinds whose engines are fakes, in this process. With
`--engines real` two routers, a gateway and nodes as processes, on the tiny model; a fault takes seconds there.
`--pairs 1 --colocated 1` has all kinds of nodes with three engines.
SIGINT and SIGTERM end the faults; the run is judged all the same.
Exit code 3 if any request got other bits than without faults, 1 if one failed, or something was left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from corun.testing.model import write_tokenizer
from tests.chaos import fakes, processes
from tests.chaos.report import Report

MANY_FAULTS = 10_000
"""More than come in any time that somebody would wait."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A run."""

    engines: Literal["fake", "real"] = "fake"
    seed: int = 1
    faults: int = 0
    """0: 1000 on fake engines, 30 on real ones."""
    clients: int = 0
    """Requests at a time; 0: 16 on fake engines, 4 on real ones."""
    pairs: int = 2
    """Prefill nodes, and decode nodes. The more fake ones there are, the faster come the faults."""
    colocated: int | None = None
    """Colocated nodes; None: 1 with a fake engine, and no real one, since a real engine takes 3 GiB."""
    kinds: tuple[str, ...] = ()
    """Real engines only: kinds of faults to draw from, by name."""
    minutes: float = 0.0
    """Real engines only: faults come for so long, however many that are, and `lasting` members are measured."""
    lasting: tuple[str, ...] = ("r0", "p0", "d0")
    """Real engines only, with `minutes`: members that are stopped and cut off but never replaced, so that what grows in
    them is seen."""
    control: bool = False
    """Real engines only: decode nodes are killed under routers that do not check repeated runs; must end with 3."""
    logs: str = ""
    """Real engines only: a directory to keep the logs of all processes in."""


async def run(options: Options, scratch: Path) -> Report:
    if options.engines == "fake":
        colocated = 1 if options.colocated is None else options.colocated
        async with fakes.under_chaos(write_tokenizer(scratch), options.seed, options.pairs, colocated) as chaos:
            return await chaos.run(chaos.plan(options.faults or 1000), clients=options.clients or 16)
    colocated = options.colocated or 0
    async with processes.under_chaos(
        scratch, options.seed, options.pairs, colocated, careless=options.control
    ) as chaos:
        plan = chaos.plan(
            options.faults or (MANY_FAULTS if options.minutes else 30),
            chaos.target.names("dc") if options.control else (),
            ("kill",) if options.control else options.kinds,
            options.lasting if options.minutes else (),
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, chaos, "is_cut_short", True)
        return await chaos.run(plan, clients=options.clients or 4, seconds=60 * options.minutes)


def main() -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # Else every lost connection is a line.
    options = tyro.cli(Options, prog="tests.chaos")
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(options.logs or scratch)
        logs.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(options, logs))
    found = report.as_dict()
    if options.engines == "fake":
        del found["hits"]  # They are too many to print.
    print(json.dumps(found))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
