"""Watches whether a node's engine is alive, and ends the engine when the node dies: its core is a separate process,
which may hang while the node answers, or outlive it.

Owns: the question that the engine is asked every second, and how long it may be silent. Must not know: vLLM, gRPC, what
is done about a stuck engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol

from corun.errors import UnavailableError

LONGEST_INTERVAL_S = 1.0
COMPUTING_SHARE = 0.02
"""The share of one core below which an engine counts as not computing. It is low, because on a busy machine an engine
that computes may get little more."""
log = logging.getLogger(__name__)


class Engine(Protocol):
    """The properties of an engine that can be seen from outside."""

    steps: int
    """The number of steps with any output since the engine's start."""

    async def answer(self) -> None:
        """Return once the engine's core has answered. Raises UnavailableError if it is dead."""

    def computed_s(self) -> float:
        """Return the CPU time used so far, in seconds; always 0 where CPU time does not show whether it computes."""


class Pulse:
    """Watches one engine.

    timeout_s: after so long a silence without computing, the engine counts as stuck. restart_s: after so long a
    silence, the engine is given up. told: called with the reason why the engine is stuck, or with an empty reason when
    it has answered again.
    """

    def __init__(
        self, engine: Engine, told: Callable[[str], Awaitable[None]], *, timeout_s: float, restart_s: float
    ) -> None:
        self.stuck = ""
        """The reason why the engine cannot be used now; empty if it can."""
        self._engine = engine
        self._told = told
        self._timeout_s = timeout_s
        self._restart_s = restart_s
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / 5)

    async def run(self) -> None:
        """Ask until cancelled. Raises UnavailableError when the engine is dead or has been silent for too long."""
        while True:
            await self._ask()
            await self._say("")
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> None:
        """Ask one question and wait for its answer. Only time in which this process did not hang counts as silence."""
        loop, engine = asyncio.get_running_loop(), self._engine
        at, steps = loop.time(), engine.steps
        computed_s: float | None = None  # Read only during a silence, because reading takes some milliseconds.
        silent_s = 0.0  # the time without an answer and without a step
        idle_s = 0.0  # the time without an answer, without a step and without computing
        question = asyncio.ensure_future(engine.answer())
        try:
            while not (await asyncio.wait((question,), timeout=self._interval_s))[0]:
                last, at = at, loop.time()
                if engine.steps != steps:
                    steps, silent_s, idle_s = engine.steps, 0.0, 0.0
                    continue
                counted_s = min(at - last, 2 * self._interval_s)
                before, computed_s = computed_s, engine.computed_s()
                computes = before is not None and computed_s - before >= max(COMPUTING_SHARE * (at - last), 1e-9)
                silent_s += counted_s
                idle_s = 0.0 if computes else idle_s + counted_s
                if silent_s >= self._restart_s:
                    raise UnavailableError(f"the engine has not answered for {silent_s:.0f} s")
                if idle_s >= self._timeout_s:
                    await self._say(f"its engine is stuck: no answer and no step for {self._timeout_s:g} s")
            question.result()
        finally:
            question.cancel()

    async def _say(self, stuck: str) -> None:
        if stuck == self.stuck:
            return
        log.error("%s", stuck) if stuck else log.warning("the engine answers again")
        self.stuck = stuck
        await self._told(stuck)


@functools.cache
def end_with_parent() -> None:
    """End this process, from now on, as soon as its parent process has ended. Do nothing if `multiprocessing` did not
    start this process, or if this was called before.

    A killed node cannot end its engine, which would keep memory and a device. vLLM's core does not watch the node. Its
    workers watch the core, but their way out may hang: two of their threads shut the same queue down at the same time,
    and one was seen in zmq's `send` for good (shm_broadcast.py: `SpinCondition.cancel`).
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        log.error("the parent process has ended, and so does this part of a node's engine")
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
