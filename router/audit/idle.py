"""Runs in idle slots that no client waits for: audits, and the crowd of a verification.

These runs never queue. They start only while no sample waits in line, and give way at once to a client's sample. A
crowd is the samples that only run beside the verified ones. This module must not know what is audited or verified.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection
from typing import Any

from corun.config.fields import RouterConfig
from corun.errors import OverloadedError
from corun.params import MAX_SEED, SamplingParams
from corun.receipt import prompt_digest
from corun.rpc.auth import Caller
from corun.types import NO_ALTERNATIVES, Alternatives, FinishReason, NodeState, Priority
from router.attempt import Attempt, NodeFaultError, SampleTask
from router.clock import loop_time
from router.nodes.node import PrefillPlacement
from router.nodes.registry import Registry
from router.output import Output
from router.placement import Need
from router.prompts import Model
from router.queue import SampleQueue

SPARE_SLOTS = 4
"""The number of slots that low-priority runs leave free on a node, for samples that arrive meanwhile. On a node with
fewer slots, all but one stay free."""
CLOSE_TIMEOUT_S = 5.0
MAX_FILLER_PROMPT = 48
"""The most prompt tokens of a filler."""
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"top_p": 0.95, "top_k": 50, "presence_penalty": 0.5},
    {"min_p": 0.05, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.1},
)
"""The sampling filters of fillers, used in turn. Engines choose and compile the kernel of a step by what the samples of
the step ask for together, so every kind must occur."""

log = logging.getLogger(__name__)


class IdleRun:
    """One run of one sample, from its placement to its end."""

    def __init__(self, attempt: Attempt, keeps_free: int, on_end: Callable[[IdleRun], None]) -> None:
        self.placement = attempt.placement
        self.end: FinishReason | BaseException | None = None
        """Why the run's sample ended, or the error that ended the run before. None while it runs, and if it gave way
        because others came first, in this router or on the node."""
        self.attempt = attempt
        self.keeps_free = keeps_free
        self.on_end = on_end

    @property
    def may_stay(self) -> bool:
        """Whether the run's nodes are neither busy nor about to end."""
        draining = NodeState.DRAINING in (self.placement.decode.state, self.placement.prefill.state)
        return not draining and self.placement.decode.room.keeps_free(self.keeps_free)

    def is_in_the_way(self, placement: PrefillPlacement | None) -> bool:
        """Return whether a client's sample with this placement, or without one, may have to wait for this run."""
        if placement is None:
            return True
        # A prefill node computes prompts in the order in which it gets them.
        return self.placement.is_prefilling and self.placement.prefill is placement.prefill

    async def to_end(self) -> FinishReason:
        await self.attempt.reserve()
        return await self.attempt.decode(await self.attempt.prefill())


class IdleRuns:
    """All idle runs of one router. `review` has to be called when the registry changes, and `give_way` when a client's
    sample was placed or could not be placed."""

    def __init__(self, registry: Registry, queue: SampleQueue, config: RouterConfig) -> None:
        self._registry = registry
        self._queue = queue
        self._config = config
        self._running: dict[asyncio.Task[FinishReason], IdleRun] = {}

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

        The run may stay while its node keeps `keeps_free` slots free. `on_end` is called before its room is free.
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
        self._cancel(lambda run: not run.may_stay)

    def give_way(self, placement: PrefillPlacement | None) -> None:
        """Cancel the runs for which a client's sample would wait. placement: where the sample was placed; None if it
        has to wait for room, and then all runs are cancelled."""
        self._cancel(lambda run: run.is_in_the_way(placement) or not run.may_stay)

    def end(self, runs: Collection[IdleRun]) -> None:
        """End runs that are not needed any more."""
        self._cancel(lambda run: run in runs)

    async def close(self) -> None:
        """End all runs, and wait until each has given back what it held, at most `CLOSE_TIMEOUT_S` seconds."""
        self._cancel(lambda run: True)
        if self._running:
            await asyncio.wait(set(self._running), timeout=CLOSE_TIMEOUT_S)

    def _cancel(self, chosen: Callable[[IdleRun], bool]) -> None:
        for task in [task for task, run in self._running.items() if chosen(run)]:
            task.cancel()

    def _ended(self, task: asyncio.Task[FinishReason]) -> None:
        run = self._running.pop(task)
        error = None if task.cancelled() else task.exception()
        was_refused = isinstance(error, OverloadedError)  # Other routers' samples may be on the node.
        run.end = None if task.cancelled() or was_refused else error or task.result()
        run.on_end(run)
        is_late = loop_time() >= run.attempt.task.deadline
        if isinstance(error, NodeFaultError) and not is_late:  # It is not tried elsewhere: no client waits for it.
            self._registry.note_fault(error.node, error.error)
        if was_refused:
            run.placement.refuse()
            self._registry.changed()
        run.attempt.close()  # This comes last, because it tells everybody that room is free.


class Fillers:
    """Draws samples with random prompts and parameters from a seeded generator."""

    def __init__(self, model: Model, rng: random.Random, deadline: float, caller: Caller) -> None:
        self._model = model
        self._rng = rng
        self._deadline = deadline
        self._caller = caller
        self._filters = itertools.cycle(FILTERS)

    def draw(self, num_tokens: int, *, endless: bool = False) -> SampleTask:
        """Return a sample of at most `num_tokens` tokens, prompt and output together. endless: the sample uses all of
        them."""
        rng, room = self._rng, min(num_tokens, self._model.max_model_len)
        num_prompt = rng.randint(1, max(1, min(MAX_FILLER_PROMPT, room // 4)))
        longest = max(1, room - num_prompt)
        filters = next(self._filters)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.6, 1.0)),
            max_tokens=longest if endless else rng.randint(max(1, longest // 2), longest),
            ignore_eos=True,
            **filters | ({"top_k": min(filters["top_k"], self._model.vocab_size)} if "top_k" in filters else {}),
        )
        prompt = tuple(rng.randrange(self._model.vocab_size) for _ in range(num_prompt))
        return SampleTask(
            request_id=f"filler-{rng.getrandbits(64):016x}",
            index=0,
            prompt_token_ids=prompt,
            prompt_digest=prompt_digest(prompt),
            params=params,
            params_digest=params.digest(),
            seed=rng.randint(0, MAX_SEED),
            deadline=self._deadline,
            caller=self._caller,
            priority=Priority.LOW,
        )


class Unread(Output):
    """The output of a filler: its tokens are only counted."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        super().__init__()
        self._on_first = on_first

    def take(self, token_id: int, logprob: float, tops: Alternatives = NO_ALTERNATIVES) -> bool:
        ended = super().take(token_id, logprob, tops)
        if self.position == 1:
            self._on_first()
        return ended


class Crowd:
    """Up to `size` running fillers. A filler that ends or gives way is replaced as soon as a slot is idle, if its node
    then still has `spare_slots` free slots.

    `pump` has to be called when the registry changes. The caller must close the crowd in every case.
    """

    def __init__(
        self,
        registry: Registry,
        idle: IdleRuns,
        draw: Callable[[], SampleTask],
        size: int,
        spare_slots: Callable[[], int],
    ) -> None:
        self._registry = registry
        self._idle = idle
        self._draw = draw
        self._size = size
        self._spare_slots = spare_slots
        self._running: dict[IdleRun, Unread] = {}
        self._leaving: set[IdleRun] = set()
        """The ended runs whose room is not free yet."""
        self._has_turned = False
        """Whether a filler has come to its end. By then, other fillers are at every stage."""
        self._next = draw()

    def pump(self) -> None:
        """Start the fillers that may start now."""
        self._leaving = {run for run in self._leaving if run.placement.holds_room}
        while len(self._running) < self._size and self._start():
            pass

    async def stand(self, timeout_s: float) -> None:
        """Wait until all fillers run, or as many as there are idle slots; at most `timeout_s` seconds."""
        self.pump()
        await self._registry.until(self._stands, loop_time() + timeout_s)

    async def close(self) -> None:
        """End all fillers, and wait until their slots are free, at most `CLOSE_TIMEOUT_S` seconds."""
        self._size = 0
        self._idle.end(self._running)
        await self._registry.until(lambda: not self._running and not self._leaving, loop_time() + CLOSE_TIMEOUT_S)

    def _stands(self) -> bool:
        nobody_moves = not self._leaving and all(output.position for output in self._running.values())
        return nobody_moves or self._has_turned

    def _start(self) -> bool:
        output, spare = Unread(self._registry.changed), self._spare_slots()
        run = self._idle.start(self._next, self._next.need, output, self._ended, spare_slots=spare)
        if run is not None:
            self._running[run], self._next = output, self._draw()
        return run is not None

    def _ended(self, run: IdleRun) -> None:
        del self._running[run]
        self._leaving.add(run)
        if isinstance(run.end, FinishReason):
            self._has_turned = True
        elif run.end is not None:  # The crowd gets smaller. That is no problem, because the crowd is not compared.
            log.warning("a filler of a verification failed: %s", run.end)
            self._size -= 1
