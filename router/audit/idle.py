"""Runs in idle slots that no client waits for: audits, and the crowd of a verification.

These runs never queue. They start only while no sample waits in line, and give way at once to a client's sample. This
module must not know what a run is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from corun.config.fields import RouterConfig
from corun.errors import OverloadedError
from corun.types import FinishReason, NodeState
from router.attempt import Attempt, NodeFaultError, Output, SampleTask
from router.nodes.node import Placement
from router.nodes.registry import Registry
from router.placement import Need
from router.queue import SampleQueue

SPARE_SLOTS = 4
"""The number of slots that low-priority runs leave free on a node, for samples that arrive meanwhile. On a node with
fewer slots, all but one stay free."""
CLOSE_TIMEOUT_S = 5.0


class IdleRun:
    """One run of one sample, from its placement to its end."""

    def __init__(self, run: Attempt[Any], keeps_free: int, on_end: Callable[[IdleRun], None]) -> None:
        self.task = run.task
        self.placement = run.placement
        self.was_refused = False
        """Whether the node had no room after all. Other routers' samples may be there."""
        self.gave_way = False
        """Whether the run ended because others came first, in this router or on the node."""
        self.error: BaseException | None = None
        """Any other error that ended the run before its sample had ended."""
        self.reason: FinishReason | None = None
        """Why the run's sample ended; None if it did not end."""
        self.on_end = on_end
        self._run = run
        self._keeps_free = keeps_free

    @property
    def may_stay(self) -> bool:
        draining = NodeState.DRAINING in (self.placement.decode.state, self.placement.prefill.state)
        return not draining and self.placement.decode.room.keeps_free(self._keeps_free)

    def is_in_the_way(self, placement: Placement | None) -> bool:
        """Return whether a client's sample with this placement, or without one, may have to wait for this run."""
        if placement is None:
            return True
        # A prefill node computes one prompt after the other.
        return self.placement.is_prefilling and self.placement.prefill is placement.prefill

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
        """Give back all that the run holds."""
        self._run.close()


class IdleRuns:
    """All idle runs of one router. `review` has to be called when the registry changes, and `give_way` when a client's
    sample was placed or could not be placed."""

    def __init__(self, registry: Registry, queue: SampleQueue, config: RouterConfig) -> None:
        self._registry = registry
        self._queue = queue
        self._config = config
        self._running: dict[asyncio.Task[FinishReason], IdleRun] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    def start(
        self,
        sample: SampleTask,
        need: Need,
        output: Output,
        on_end: Callable[[IdleRun], None],
        *,
        spare_slots: int,
        keeps_free: int = 0,
    ) -> IdleRun | None:
        """Run a sample once, now, on nodes where `spare_slots` slots stay free. Return None if a sample waits in line
        or no nodes are idle.

        The run may stay while its node keeps `keeps_free` slots free. `on_end` is called before its slot is free.
        """
        if self._queue.in_line or (placement := self._registry.place_idle(need, spare_slots)) is None:
            return None
        run = IdleRun(Attempt(sample, placement, output, self._config), keeps_free, on_end)
        task = asyncio.ensure_future(run.to_end())
        self._running[task] = run
        task.add_done_callback(self._ended)  # It is called even if the task is cancelled before its first step.
        return run

    def review(self) -> None:
        """Cancel the runs on nodes that have become busy or drain."""
        self._cancel(task for task, run in self._running.items() if not run.may_stay)

    def give_way(self, placement: Placement | None) -> None:
        """Cancel the runs for which a client's sample would wait. placement: where the sample was placed; None if it
        has to wait for room, and then all runs are cancelled."""
        self._cancel(task for task, run in self._running.items() if run.is_in_the_way(placement) or not run.may_stay)

    def end(self, runs: Iterable[IdleRun]) -> None:
        """End runs that are not needed any more."""
        ended = set(runs)
        self._cancel(task for task, run in self._running.items() if run in ended)

    async def close(self) -> None:
        """End all runs, and wait until each has given back what it held, at most `CLOSE_TIMEOUT_S` seconds."""
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
            run.placement.refuse()
            self._registry.changed()
        run.close()  # This comes last, because it tells all listeners that a slot is free.

    def _note_fault(self, run: IdleRun) -> None:
        """Report a node that failed the run to the registry. The run is not tried on another node, because no client
        waits for it."""
        is_late = asyncio.get_running_loop().time() >= run.task.deadline
        if isinstance(run.error, NodeFaultError) and not is_late:
            self._registry.note_fault(run.error.node, run.error.error)
