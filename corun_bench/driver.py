"""The client loop: it sends a workload's requests, closed or open loop, and records what comes back and when.

All systems share this loop. It must not know what a system is: a `Target` streams one request.
"""

from __future__ import annotations

import asyncio
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corun.errors import CorunError
from corun_bench.records import Outcome, Request, Run, Workload


class Target(ABC):
    """A system that is up."""

    @abstractmethod
    async def run(self, request: Request, outcome: Outcome, *, logprobs: bool, clock: Callable[[], float]) -> None:
        """Draw one sample; fill in arrivals, tokens and, if wanted, logprobs. Raises CorunError if it fails."""

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
    system: str,
    repeat: int = 0,
    logprobs: bool = False,
    timeout_s: float = 600.0,
    on_done: Callable[[], None] = lambda: None,
) -> Run:
    """Run a workload once. A request that fails, or is not done `timeout_s` after the start, has an error."""
    loop = _Loop(target, workload, logprobs, timeout_s, on_done)
    await target.forget()
    return await loop.run(system, repeat)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off garbage collection: everything that comes back is kept, and a search through it would stall the loop."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Loop:
    def __init__(
        self, target: Target, workload: Workload, logprobs: bool, timeout_s: float, on_done: Callable[[], None]
    ) -> None:
        self._target, self._workload, self._logprobs = target, workload, logprobs
        self._timeout_s, self._on_done = timeout_s, on_done
        self._outcomes = [
            Outcome(index=request.index, num_prompt_tokens=len(request.prompt_token_ids))
            for request in workload.requests
        ]
        self._began = 0.0

    async def run(self, system: str, repeat: int) -> Run:
        with _no_collections():
            self._began = time.perf_counter()
            await (self._open() if self._workload.is_open else self._closed())
        self._target.settle()
        self._check_counts()
        return Run(
            system=system,
            workload=self._workload.name,
            repeat=repeat,
            outcomes=self._outcomes,
            duration_s=max((outcome.done_s for outcome in self._outcomes), default=0.0),
        )

    def _check_counts(self) -> None:
        for request, outcome in zip(self._workload.requests, self._outcomes, strict=True):
            came = sum(count for _, count in outcome.arrivals)
            if not outcome.error and came != request.max_tokens:
                outcome.error = f"{came} of {request.max_tokens} tokens came"

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    async def _closed(self) -> None:
        """Keep `max_concurrency` requests in flight: send the next when one ends (paper, Section V)."""
        waiting = iter(zip(self._workload.requests, self._outcomes, strict=True))
        workers = min(self._workload.max_concurrency, len(self._outcomes))
        await asyncio.gather(*(self._work(waiting) for _ in range(workers)))

    async def _work(self, waiting: Iterator[tuple[Request, Outcome]]) -> None:
        for request, outcome in waiting:
            await self._one(request, outcome)

    async def _open(self) -> None:
        """Send each request at its arrival time, within the limit on requests in flight, if there is one."""
        limit = self._workload.max_concurrency or len(self._outcomes)
        gate = asyncio.Semaphore(max(1, limit))
        await asyncio.gather(
            *(
                self._at(request, outcome, gate)
                for request, outcome in zip(self._workload.requests, self._outcomes, strict=True)
            )
        )

    async def _at(self, request: Request, outcome: Outcome, gate: asyncio.Semaphore) -> None:
        await asyncio.sleep(request.arrival_s - self._clock())
        async with gate:
            await self._one(request, outcome)

    async def _one(self, request: Request, outcome: Outcome) -> None:
        outcome.sent_s = self._clock()
        try:
            await asyncio.wait_for(
                self._target.run(request, outcome, logprobs=self._logprobs, clock=self._clock),
                max(0.001, self._timeout_s - outcome.sent_s),
            )
        except asyncio.TimeoutError:
            outcome.error = f"not done {self._timeout_s:g} s after the run began"
        except CorunError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.done_s = self._clock()
        self._on_done()
