"""The load of a router measurement: a process that keeps a number of samples running and times every token.

It is a closed loop: when a sample ends, the next is requested. The first samples are shorter, each by a different
length, so that they do not all end in one step. During the run, messages are only stored; everything that can wait is
done afterwards. `python -m corun_bench.load JSON` is one such process. It must not know what is between it and the
nodes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from corun.errors import CorunError, UnavailableError
from corun_bench.client import ClusterTarget, StreamTarget
from corun_bench.driver import Outcome, Request
from corun_bench.options import CapacityOptions

CONNECT_S = 60.0
CONNECTION_SAMPLES = 512
"""The samples in flight on one connection, of which servers allow 1024, if there are not more addresses."""
DRAIN_S = 120.0
"""The time for samples that still run at the end to finish, in seconds."""
STUCK = (
    "a router that loses a fake node runs its samples again and refuses the nodes, which then draw other tokens; with "
    "fewer nodes, or on more cores, it would lose none"
)
"""Why samples do not end under a load that the machine cannot carry."""
FIRST_TOKEN, NUM_TOKENS = 256, 128
"""The first of the token ids that are drawn, one after the other, and their number: they are words of the built-in tiny
model."""
_TICK_S, _TICKS = 1e-5, 2**24
"""The unit of the times in log probabilities, in seconds; and their number until the times begin again, after 168 s: up
to there, fp32 is exact."""


def time_code(at: float) -> float:
    """Return the log probability of all tokens of a step that is emitted at this time of the machine's clock."""
    return -float(int(at / _TICK_S) % _TICKS)


def age_s(logprob: float, now: float) -> float:
    """Return how many seconds ago a step was emitted, by the log probability of its tokens."""
    return (now / _TICK_S + logprob) % _TICKS * _TICK_S


class Load:
    """The closed loop of one process of several.

    index: the number of this process. method: the method of a stream for each sample; empty: the samples of a
    connection share one. addresses: host:port of the routers, or of the fake nodes without a router. output: the file
    of the results. An empty file beside it, .ready, says that the load begins.
    """

    def __init__(self, setup: CapacityOptions, index: int, method: str, addresses: Sequence[str], output: str) -> None:
        self.samples: list[Outcome] = []
        self._setup, self._output = setup, Path(output)
        self._concurrency = setup.samples // setup.client_processes
        self._concurrency += index < setup.samples % setup.client_processes
        self._draw = random.Random(index)
        self._method = method
        self._addresses = [*addresses] * -(-self._concurrency // (CONNECTION_SAMPLES * len(addresses)))

    async def run(self, stop: asyncio.Event) -> dict[str, Any]:
        """Run until `stop` is set, then wait for the samples in flight. Return plain values for JSON:

        {"calls", "tokens", "messages", "errors": [what is wrong with a sample], "first": [(when a sample was requested,
         when its first token came)], "times": [(when a token came, how long it was on the way)],
         "gaps": [(when a token came, how long after the one before)]}
        Raises UnavailableError if samples do not end.
        """
        targets = [
            StreamTarget(address, self._method) if self._method else ClusterTarget(address)
            for address in self._addresses
        ]
        try:
            await asyncio.wait_for(asyncio.gather(*(one.connected() for one in targets)), CONNECT_S)
            self._output.with_suffix(".ready").touch()
            places = range(self._concurrency)
            workers = [
                asyncio.ensure_future(self._work(place, targets[place % len(targets)], stop)) for place in places
            ]
            await stop.wait()
            try:
                await asyncio.wait_for(asyncio.gather(*workers), DRAIN_S)
            except asyncio.TimeoutError:
                raise UnavailableError(f"samples still run {DRAIN_S:g} s after the load has ended: {STUCK}") from None
        finally:
            await asyncio.gather(*(one.aclose() for one in targets))
        for target in targets:
            target.settle()
        return read(self.samples)

    async def _work(self, place: int, target: ClusterTarget, stop: asyncio.Event) -> None:
        await asyncio.sleep(self._setup.ramp_s * place / self._concurrency)
        await self._call(target, -(-self._setup.output_tokens * (place + 1) // self._concurrency))
        while not stop.is_set():
            await self._call(target, self._setup.output_tokens)

    async def _call(self, target: ClusterTarget, num_tokens: int) -> None:
        prompt = tuple(FIRST_TOKEN + self._draw.randrange(NUM_TOKENS) for _ in range(self._setup.prompt_tokens))
        index = len(self.samples)
        request = Request(index=index, prompt_token_ids=prompt, max_tokens=num_tokens, seed=index)
        outcome = Outcome(request=request, sent_s=time.monotonic())
        self.samples.append(outcome)
        try:
            await target.run(outcome, logprobs=True)
        except CorunError as error:
            outcome.error = str(error)


def read(samples: Sequence[Outcome]) -> dict[str, Any]:
    """Return the results of samples, as `Load.run` does."""
    came = [[at for at, count in sample.arrivals for _ in range(count)] for sample in samples]
    return {
        "calls": len(samples),
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "messages": sum(len(sample.arrivals) for sample in samples),
        "errors": [error for sample in samples if (error := _wrong(sample))],
        "first": [(sample.sent_s, at) for sample in samples for at, _ in sample.arrivals[:1]],
        "times": [
            (at, age_s(code, at))
            for sample, times in zip(samples, came, strict=True)
            for at, code in zip(times, sample.logprobs, strict=False)
        ],
        "gaps": [(at, at - before) for times in came for before, at in itertools.pairwise(times)],
    }


def _wrong(outcome: Outcome) -> str:
    """Return what is wrong with a sample, or an empty text."""
    if len(outcome.token_ids) != (wanted := outcome.request.max_tokens):
        return f"{len(outcome.token_ids)} of {wanted} tokens came; {outcome.error}"
    if any((after - before) % NUM_TOKENS != 1 for before, after in itertools.pairwise(outcome.token_ids)):
        return "its tokens are not of one step after the other"
    return outcome.error


async def _until_input_ends(load: Load) -> dict[str, Any]:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)
    try:
        return await load.run(stop)
    finally:
        asyncio.get_running_loop().remove_reader(sys.stdin)


def main() -> None:
    spec = json.loads(sys.argv[1])
    load, path = Load(CapacityOptions(**spec.pop("setup")), **spec), Path(spec["output"])
    gc.disable()  # The collector would go through the stored messages again and again.
    try:
        results = uvloop.run(_until_input_ends(load))
    except UnavailableError as error:
        sys.exit(str(error))
    path.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
