"""`python -m tests.chaos.overload`: measure a router at the load it can serve and at ten times that; print JSON.

The router and every client are processes of their own. The nodes' engines are fakes, so only the router is measured.
First one client asks as fast as it is served ("1x"). Then three clients ask at ten times that rate, whatever the
answers are ("10x"): a hog with most of the arrivals, a small client that wants more than its share, and a tiny one that
wants less. All times are measured at the clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro

from corun import AsyncClient, CorunError, OverloadedError, SamplingParams
from corun.testing.cluster import router_config
from corun.testing.engines import expected_digest
from corun.testing.model import write_tokenizer
from tests.chaos.report import quantiles
from tests.clusters import FakeCluster
from tests.machine import free_port, resident_mib

TIMEOUT_S = 60.0
SEED = 7
SHARES = {"hog": 0.9, "small": 0.09, "tiny": 0.01}
"""Each client's share of the arrivals at 10x."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """A measurement."""

    seconds: float = 10.0
    """The duration of each phase."""
    repeats: int = 3
    factor: float = 10.0
    """The rate of arrivals at overload, as a multiple of the rate that is served."""
    slots: int = 16
    step_ms: float = 10.0
    max_tokens: int = 32
    prompt_tokens: int = 32
    max_queued_samples: int = 256
    max_queue_wait_s: float = 2.0


@dataclass(kw_only=True)
class Tally:
    """The outcomes that clients saw, with times in seconds."""

    ended: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    """The number of other outcomes by their text, wrong bits included."""

    def add(self, tally: Tally) -> None:
        self.ended += tally.ended
        self.refused += tally.refused
        self.other += tally.other

    def summary(self, served: int) -> dict[str, Any]:
        """Return the figures of a client, of `served` requests that all clients together were served."""
        asked = len(self.ended) + len(self.refused) + self.other.total()
        return {
            "asked": asked,
            "success": round(len(self.ended) / max(1, asked), 3),
            "of_goodput": round(len(self.ended) / max(1, served), 3),
            "latency_s": quantiles(self.ended),
            "refusal_s": quantiles(self.refused),
            "other": dict(self.other),
        }


async def load(address: str, name: str, options: Options, rate: float) -> Tally:
    """Be one client, which sends one request with a known answer over and over: at random times, whatever the outcome
    of the earlier ones; with a rate of 0 as soon as one ends, as many at a time as there are slots."""
    prompt = list(range(1, options.prompt_tokens + 1))
    params = SamplingParams(max_tokens=options.max_tokens, logprobs=True)
    tally, digest = Tally(), expected_digest(prompt, params, SEED)
    end = time.monotonic() + options.seconds

    async def ask() -> None:
        began = time.monotonic()
        try:
            done = await client.generate(prompt, params, seed=SEED)
        except OverloadedError:
            tally.refused.append(time.monotonic() - began)
        except CorunError as error:
            tally.other[f"{type(error).__name__}: {error}"] += 1
        else:
            if done.receipt.output_digest == digest:
                tally.ended.append(time.monotonic() - began)
            else:
                tally.other["wrong bits"] += 1

    async def cycle() -> None:
        while time.monotonic() < end:
            await ask()

    async with AsyncClient(address, token=token_of(name), timeout_s=TIMEOUT_S) as client:
        if not rate:
            await asyncio.gather(*(cycle() for _ in range(options.slots)))
            return tally
        draw, calls, at = random.Random(name), [], time.monotonic()
        while (at := at + draw.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            calls.append(asyncio.ensure_future(ask()))
        await asyncio.gather(*calls)
    return tally


def run_load(*arguments: Any) -> Tally:
    return asyncio.run(load(*arguments))


def token_of(client: str) -> str:
    return f"token-of-client-{client}"


class Nodes(FakeCluster):
    """Fake nodes of a router that runs in another process."""

    addresses: Any = ()


async def measure(options: Options, scratch: Path, address: str, router: int) -> dict[str, Any]:
    """Measure the router with this address and pid."""
    with ProcessPoolExecutor(len(SHARES), multiprocessing.get_context("spawn")) as pool:

        async def phase(rate: float) -> dict[str, Any]:
            rates = {name: share * rate for name, share in SHARES.items()} if rate else {"hog": 0.0}
            began, loop = time.monotonic(), asyncio.get_running_loop()
            runs = [loop.run_in_executor(pool, run_load, address, name, options, rate) for name, rate in rates.items()]
            tallies, every = await asyncio.gather(*runs), Tally()
            for tally in tallies:
                every.add(tally)
            served = len(every.ended)
            return {
                "per_s": round(served / (time.monotonic() - began), 1),
                **every.summary(served),
                "clients": {name: tally.summary(served) for name, tally in zip(rates, tallies, strict=True)},
                "router_rss_mib": resident_mib(router),
            }

        nodes = Nodes(write_tokenizer(scratch), router_config(cluster_token_file=str(scratch / "members.token")))
        nodes.addresses = (address,)
        try:
            await nodes.add_prefill()
            decode = await nodes.add_decode(slots=options.slots)
            decode.engine.step_ms = options.step_ms
            await phase(0.0)  # Warm up: everything is loaded and used once, and the router sees how fast it serves.
            runs = []
            for _ in range(options.repeats):
                once = await phase(0.0)
                runs.append({"1x": once, "10x": await phase(options.factor * once["per_s"])})
        finally:
            await nodes.close()
    conditions = {"cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], "python": sys.version.split()[0]}
    return {"conditions": conditions, "options": asdict(options), "runs": runs}


def main() -> int:
    options, port = tyro.cli(Options, prog="tests.chaos.overload"), free_port()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        clients, members = Path(name) / "clients.tokens", Path(name) / "members.token"
        clients.write_text("".join(f"{client}: {token_of(client)}\n" for client in SHARES))
        members.write_text("members-of-the-cluster")
        flags = {
            "port": port,
            "client-tokens-file": clients,
            "cluster-token-file": members,
            "max-queued-samples": options.max_queued_samples,
            "max-queue-wait-s": options.max_queue_wait_s,
            "heartbeat-timeout-ms": 60_000,  # A machine that stalls must not spoil the measurement.
        }
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        router = subprocess.Popen([sys.executable, "-m", "router", *words])
        stack.callback(router.wait, TIMEOUT_S)
        stack.callback(router.terminate)
        found = asyncio.run(measure(options, Path(name), f"127.0.0.1:{port}", router.pid))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
