"""The client loop: it sends a workload's requests, closed or open loop, and records what comes back and when.

All systems share this loop. It must not know what a system is: a `Target` streams one request. Times are taken with
`time.monotonic` where the client receives a message; those of a `Run` are seconds since it began.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from corun.errors import CorunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample to draw: `max_tokens` tokens after a prompt, whatever they are."""

    index: int
    """The request's place in the workload, from 0."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    place: int = 0
    """The request's place among the samples of its prompt. Its seed is `sample_seed` of the first one's and this."""
    arrival_s: float = 0.0
    """The time at which the request is sent in an open loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in their order, and when they are sent.

    Closed loop: `max_concurrency` requests are in flight, and the next is sent when one ends (paper, Section V). Open
    loop: each is sent at its `arrival_s`, with at most `max_concurrency` in flight.
    """

    name: str
    """The workload's name, as in "in=512,out=256", "burstgpt", "rl=32x8"."""
    requests: tuple[Request, ...]
    max_concurrency: int = 256
    request_rate: float = math.inf
    """Requests a second of an open loop; inf: a closed loop."""

    @property
    def is_open(self) -> bool:
        return math.isfinite(self.request_rate)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The outcome of one request."""

    request: Request
    sent_s: float = 0.0
    """The time at which it was sent, or would have been if others had not filled an open loop's `max_concurrency`."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When each message with tokens came, and how many tokens it held."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """The fp32 log probabilities of the sampled tokens; empty unless asked for."""
    error: str = ""
    """Why the request failed; empty if it got all its tokens."""
    done_s: float = 0.0
    """The time at which the request ended, successfully or not."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens that came. A foreign system may not tell their ids."""
        return sum(count for _, count in self.arrivals)


@dataclass(kw_only=True, slots=True)
class Run:
    """One pass over a workload on one system."""

    outcomes: list[Outcome]
    """The outcomes in the order of the workload's requests."""
    duration_s: float
    """The time from the start of the run to the end of the last request, in seconds."""


class Target(ABC):
    """A system that is up."""

    @abstractmethod
    async def run(self, outcome: Outcome, *, logprobs: bool) -> None:
        """Draw the sample of a request: fill in its outcome, with logprobs if wanted. Raises CorunError if it fails."""

    def settle(self) -> None:  # noqa: B027
        """Fill in what `run` put off so that it takes no time from a request.

        Called after the last request has ended. By default `run` puts nothing off.
        """

    async def forget(self) -> None:  # noqa: B027
        """Drop what earlier runs left behind, such as prefix caches. By default there is nothing to drop."""


async def drive(
    target: Target,
    workload: Workload,
    *,
    logprobs: bool = False,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Run a workload once. A request that fails, or is not done `timeout_s` after the start, has an error."""
    outcomes = [Outcome(request=request) for request in workload.requests]

    async def one(outcome: Outcome) -> None:
        drawing = target.run(outcome, logprobs=logprobs)
        try:
            await asyncio.wait_for(drawing, max(0.001, began + timeout_s - time.monotonic()))
        except asyncio.TimeoutError:
            outcome.error = f"not done {timeout_s:g} s after the run began"
        except CorunError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.done_s = time.monotonic()
        on_done()

    async def work(waiting: Iterator[Outcome]) -> None:
        """Send the next request when one ends (paper, Section V)."""
        for outcome in waiting:
            outcome.sent_s = time.monotonic()
            await one(outcome)

    async def send_at(outcome: Outcome, gate: asyncio.Semaphore) -> None:
        await asyncio.sleep(began + outcome.request.arrival_s - time.monotonic())
        outcome.sent_s = time.monotonic()
        async with gate:
            await one(outcome)

    await target.forget()
    gc.disable()  # Everything that comes back is kept, and a search through it would stall the loop.
    try:
        began = time.monotonic()
        if workload.is_open:
            gate = asyncio.Semaphore(workload.max_concurrency)
            await asyncio.gather(*(send_at(outcome, gate) for outcome in outcomes))
        else:
            waiting = iter(outcomes)
            await asyncio.gather(*(work(waiting) for _ in range(min(workload.max_concurrency, len(outcomes)))))
    finally:
        gc.enable()
    target.settle()
    for outcome in outcomes:
        outcome.sent_s -= began
        outcome.done_s -= began
        outcome.arrivals = [(at - began, count) for at, count in outcome.arrivals]
        if not outcome.error and (came := outcome.num_output_tokens) != (wanted := outcome.request.max_tokens):
            outcome.error = f"{came} of {wanted} tokens came"
    duration_s = max((outcome.done_s for outcome in outcomes), default=0.0)
    return Run(outcomes=outcomes, duration_s=duration_s)
