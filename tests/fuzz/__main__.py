"""`python -m tests.fuzz`: hostile bytes and hostile clients against a router and nodes; prints JSON.

Engines are fakes, in one process with everything else. `--engines real` is another kind of run: for `--minutes`, it
assaults a whole real cluster with another client's streams beside the assaults. The exit code is 1 if anything was
found. To run a case again that was found on fakes, use `--seed S --first NUMBER --cases 1`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from tests.fuzz.beside import CALM_S, besiege
from tests.fuzz.hostile import ATTACKS, measure
from tests.fuzz.runner import fuzzing
from tests.fuzz.target import running
from tests.nodes import Topology


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run."""

    engines: Literal["fake", "real"] = "fake"
    minutes: float = 30.0
    """Real engines only: how long the assaults go on."""
    model: str = "tiny"
    """Real engines only: directory of a checkpoint, or the built-in one."""
    nodes: Literal["pair", "colocated"] = "pair"
    """Real engines only: a prefill and a decode node, or one node that is both."""
    slots: int = 8
    """Real engines only: slots of the node that decodes."""
    gpu: int = 0
    """Real engines only: the GPU of all nodes, if there are GPUs."""
    gpu_memory_utilization: float = 0.0
    """Real engines only: the share of the GPU's memory that each engine takes; 0: equal shares of 0.84."""
    threads: int = 1
    """Real engines only: CPU threads of each engine."""
    calm_s: float = CALM_S
    """Real engines only: seconds of ordinary requests before the assaults; the assaults are compared with them."""
    logs: str = ""
    """Real engines only: a directory to keep the logs of all processes in."""
    seed: int = 1
    cases: int = 10_000
    first: int = 0
    """Number of the first case."""
    at_once: int = 0
    """Cases at a time; 0: 96 on fake engines, 6 on real ones."""
    attack: tuple[Literal["slowloris", "idle", "giant", "slow_reader", "many_streams"], ...] = ()
    """Run these hostile clients instead of cases."""
    server: Literal["open", "guarded"] = "open"
    """The router under attack: open to anyone, or one that requires tokens, which the attackers do not have."""
    scale: int = 0
    """Connections, or calls, of each attack; 0: as many as it has by itself."""
    seconds: float = 10.0
    """Seconds of ordinary requests without each attack, and again as many with it."""
    client_timeout_s: float = 5.0
    """The client timeout of the router under attack."""
    log: str = ""
    """File for the target's log; empty: thrown away."""


async def run_attacks(options: Options) -> dict[str, Any]:
    """Run each attack on a router of its own."""
    reports = []
    for name in options.attack:
        async with running(options.log, client_timeout_s=options.client_timeout_s) as target:
            scale = options.scale or ATTACKS[name][0]
            reports.append(await measure(target, name, scale=scale, seconds=options.seconds, server=options.server))
    left = [f"{report['attack']}: {left}" for report in reports for left in report["left"]]
    return {"attacks": reports, "findings": left}


async def run_cases(options: Options) -> dict[str, Any]:
    async with running(options.log) as target, fuzzing(target, options.seed) as fuzzer:
        at_once = options.at_once or 96
        report = await fuzzer.run(first=options.first, cases=options.cases, at_once=at_once, canary_every=200)
    return report.as_dict()


async def run_siege(options: Options) -> dict[str, Any]:
    gpus, is_pair = (options.gpu,), options.nodes == "pair"
    topology = Topology(
        model=options.model,
        prefill_gpus=gpus if is_pair else (),
        decode_gpus=gpus if is_pair else (),
        colocated_gpus=() if is_pair else gpus,
        gpu_memory_utilization=options.gpu_memory_utilization,
        threads=options.threads,
        slots=options.slots,
    )
    with tempfile.TemporaryDirectory() as scratch:
        logs, at_once = Path(options.logs or scratch), options.at_once or 6
        report = await besiege(
            topology, logs, seed=options.seed, minutes=options.minutes, at_once=at_once, calm_s=options.calm_s
        )
    return report.as_dict()


def main() -> int:
    options = tyro.cli(Options, prog="tests.fuzz")
    run = run_siege if options.engines == "real" else run_attacks if options.attack else run_cases
    report = asyncio.run(run(options))
    print(json.dumps(report))
    return 1 if report["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
