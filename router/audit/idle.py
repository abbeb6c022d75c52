"""Runs that no client waits for, in slots that are idle: audits, and the company of a verification.

They never queue, start only while nobody waits, and give way at once to a sample that a client waits for. This module
must not know what a run is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from corun.config.fields import RouterConfig
from corun.errors import OverloadedError
from corun.types import FinishReason
from router.admission import AdmissionQueue
from router.failover import NodeFaultError, Output, Run, Sample
from router.nodes.members import Seat
from router.nodes.registry import Registry
from router.placement import Need

SPARE_SLOTS = 4
"""Slots that stay free on a node beside what may wait, for samples that come in meanwhile; all but one on a node that
has fewer."""
CLOSE_TIMEOUT_S = 5.0


class IdleRun:
    """One run of one sample, from its seat to its end."""

    def __init__(self, sample: Sample, run: Run, keeps_free: int, on_end: Callable[[IdleRun], None]) -> None:
        self.sample = sample
        self.seat = run.seat
        self.was_refused = False
        """The node had no room after all: another router's samples may be there."""
        self.gave_way = False
        """It ended since others came first, in this router or on the node."""
        self.error: BaseException | None = None
        """What else ended it before its sample had ended."""
        self.reason: FinishReason | None = None
        """Why its sample ended; None: it did not."""
        self.on_end = on_end
        self._run = run
        self._keeps_free = keeps_free

    @property
    def may_stay(self) -> bool:
        draining = self.seat.decode.draining or self.seat.prefill.draining
        return not draining and self.seat.decode.room.keeps_free(self._keeps_free)

    def is_in_the_way(self, seat: Seat | None) -> bool:
        """Whether a client's sample with this seat, or with none, has to wait for it."""
        if seat is None:
            return True
        return self.seat.is_prefilling and self.seat.prefill is seat.prefill  # It computes one prompt after the other.

    async def to_end(self) -> FinishReason:
        await self._run.reserve()
        return await self._run.to_end()

    def note_end(self, task: asyncio.Task[FinishReason]) -> None:
        error = None if task.cancelled() else task.exception()
        self.was_refused = isinstance(error, OverloadedError)
        self.gave_way = task.cancelled() or self.was_refused
        self.error = None if self.gave_way else error
        self.reason = None if task.cancelled() or error else task.result()

    def close(self) -> None:
        """Gives back what it holds."""
        self._run.close()


class IdleRuns:
    """All of one router. `review` has to be called when the registry changes, `give_way` when a sample of a client was
    placed, or could not be."""

    def __init__(self, registry: Registry, queue: AdmissionQueue, config: RouterConfig) -> None:
        self._registry = registry
        self._queue = queue
        self._config = config
        self._running: dict[asyncio.Task[FinishReason], IdleRun] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    def start(
        self,
        sample: Sample,
        need: Need,
        output: Output,
        on_end: Callable[[IdleRun], None],
        *,
        spare_slots: int,
        keeps_free: int = 0,
    ) -> IdleRun | None:
        """Runs a sample now, once, where `spare_slots` stay free; None if somebody waits or no nodes are idle.

        It stays for as long as its node keeps `keeps_free` slots free. `on_end` is called before its slot is free.
        """
        if self._queue.in_line or (seat := self._registry.place_idle(need, spare_slots)) is None:
            return None
        run = IdleRun(sample, Run(sample, seat, output, self._config), keeps_free, on_end)
        task = asyncio.ensure_future(run.to_end())
        self._running[task] = run
        task.add_done_callback(self._ended)  # Also of a task that was cancelled before its first step.
        return run

    def review(self) -> None:
        """Takes runs off nodes that have become busy or are to end."""
        self._cancel(task for task, run in self._running.items() if not run.may_stay)

    def give_way(self, seat: Seat | None) -> None:
        """A sample of a client got this seat; or, if None, has to wait, and nothing here may be why."""
        self._cancel(task for task, run in self._running.items() if run.is_in_the_way(seat) or not run.may_stay)

    def end(self, runs: Iterable[IdleRun]) -> None:
        """Ends runs that nobody needs any more."""
        ended = set(runs)
        self._cancel(task for task, run in self._running.items() if run in ended)

    async def close(self) -> None:
        """Ends all, and returns when each has given back what it held."""
        self._cancel(self._running)
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_TIMEOUT_S)

    def _cancel(self, tasks: Iterable[asyncio.Task[FinishReason]]) -> None:
        for task in tuple(tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[FinishReason]) -> None:
        run = self._running.pop(task)
        run.note_end(task)
        run.on_end(run)
        self._note_fault(run)
        if run.was_refused:
            run.seat.refuse()
            self._registry.changed()
        run.close()  # Last: it tells everybody that a slot is free.

    def _note_fault(self, run: IdleRun) -> None:
        """Nobody waits for it, so a node that fails it is not followed by another."""
        is_late = asyncio.get_running_loop().time() >= run.sample.deadline
        if isinstance(run.error, NodeFaultError) and not is_late:
            self._registry.note_fault(run.error.member, run.error.error)
