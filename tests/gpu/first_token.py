"""Says where the time to a first token goes: `python -m tests.gpu.first_token --model DIR [--colocated-gpus 0]`.

It starts a cluster that sends its traces here, runs requests one at a time and then all at once, and prints a JSON line
for each: at which millisecond after the request, or after the first of them, each span begins and ends. Prompts have
`--prompt-tokens` random tokens. `--model tiny --slots 64` shows that it runs without a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import tyro

from corun import AsyncClient, SamplingParams
from corun_bench.capacity import quantiles
from tests.nodes import Topology, running
from tests.otlp import Collector, Received, collecting, variables

WARM = 5
"""The number of requests before the first one that counts."""
AT = {"first": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "last": 1.0}
"""The quantiles that are shown."""
SETTLE_S = 0.3
"""The seconds that a cluster gets for its last spans, and for what it still does after a request."""


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """What to measure."""

    topology: tyro.conf.OmitArgPrefixes[Topology]
    requests: int = 30
    """The number of requests that run one at a time."""
    at_once: int = 256
    """The number of requests that are sent together; no more than slots, or some would wait."""
    prompt_tokens: int = 128
    max_tokens: int = 16


def ways(spans: Sequence[Received], began: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return when each kind of span begins and ends, and its events, after the time given for its request.

    began: the times of the requests that count, by request id, in seconds of the machine's clock.
    """
    name = "corun.request_id"
    traces = {span.trace: span.attributes[name] for span in spans if span.attributes.get(name) in began}
    found = defaultdict(list)
    for span in (span for span in spans if span.trace in traces):
        since = began[traces[span.trace]]
        times = {f"{span} begins": span.began, f"{span} ends": span.ended}
        times |= {f"{span} event {event}": at for event, at in span.events.items()}
        for what, at in times.items():
            found[what].append(at / 1e9 - since)
    shown = {what: quantiles(values, AT) for what, values in found.items()}
    return dict(sorted(shown.items(), key=lambda one: one[1]["p50"]))


async def ask(client: AsyncClient, name: str, options: FirstToken) -> tuple[float, float]:
    """Run a request; return when it was sent, and the seconds until the first token was here."""
    draw = random.Random(name)
    prompt = [draw.randrange(3, 500) for _ in range(options.prompt_tokens)]
    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, logprobs=True)
    began, first = time.time(), 0.0
    async for piece in client.stream(prompt, params, seed=1, request_id=name):
        if piece.token_ids and not first:
            first = time.time() - began
    return began, first


async def measure(address: str, collector: Collector, options: FirstToken) -> None:
    async with AsyncClient(address) as client:
        for number in range(WARM):
            await ask(client, f"warm-{number}", options)
        alone = {}
        for number in range(options.requests):
            alone[f"alone-{number}"] = await ask(client, f"alone-{number}", options)
            await asyncio.sleep(0.02)
        await asyncio.sleep(SETTLE_S)
        show("one at a time", collector.spans, {name: began for name, (began, _) in alone.items()}, alone)
        for turn in range(2):  # The first one also warms what only many requests use.
            names = [f"at-once-{turn}-{number}" for number in range(options.at_once)]
            together = dict(
                zip(names, await asyncio.gather(*(ask(client, name, options) for name in names)), strict=True)
            )
            await asyncio.sleep(SETTLE_S)
            sent = min(began for began, _ in together.values())
            show(f"{options.at_once} at once", collector.spans, dict.fromkeys(names, sent), together)


def show(what: str, spans: Sequence[Received], began: dict[str, float], seen: dict[str, tuple[float, float]]) -> None:
    """Print one line. began: see `ways`. seen: what `ask` returned, by request id."""
    firsts = [at + first - began[name] for name, (at, first) in seen.items()]
    print(json.dumps({"requests": what, "client has it": quantiles(firsts, AT), "ms": ways(spans, began)}), flush=True)


def main(options: FirstToken) -> None:
    with tempfile.TemporaryDirectory(prefix="corun-first-") as logs, collecting() as collector:
        given = variables(collector) | {"OTEL_BSP_MAX_QUEUE_SIZE": "100000"}
        topology = replace(options.topology, checks_all_kv=False)
        with mock.patch.dict(os.environ, given), running(topology, Path(logs)) as nodes:
            asyncio.run(measure(nodes.address, collector, options))


if __name__ == "__main__":
    main(tyro.cli(FirstToken))
