"""Whether a node's engine is alive: its core is a process of its own, which may hang while the node goes on to answer.

Owns: the question that the engine is asked every second, and how long it may be silent. Must not know: vLLM, gRPC, what
is done about a stuck engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from corun.errors import UnavailableError

LONGEST_INTERVAL_S = 1.0
COMPUTING_SHARE = 0.02
"""Of one core: an engine that uses less does not compute. On a busy machine, one that does may get little more."""
log = logging.getLogger(__name__)


class Engine(Protocol):
    """What can be seen of an engine from outside."""

    steps: int
    """That have given something, since its start."""

    async def answer(self) -> None:
        """Returns once the engine's core has answered. Raises UnavailableError if it is dead."""

    def computed_s(self) -> float:
        """CPU time used so far; always 0 if it tells nothing."""


class Pulse:
    """Watches one engine.

    timeout_s: silent so long without computing, it is stuck. restart_s: silent so long, it is given up. told: hears why
    the engine is stuck, and an empty reason when it has answered again.
    """

    def __init__(
        self, engine: Engine, told: Callable[[str], Awaitable[None]], *, timeout_s: float, restart_s: float
    ) -> None:
        self.stuck = ""
        """Why the engine cannot be used now; empty if it can."""
        self._engine = engine
        self._told = told
        self._timeout_s = timeout_s
        self._restart_s = restart_s
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / 5)

    async def run(self) -> None:
        """Asks until cancelled. Raises UnavailableError when the engine is dead or has been silent for too long."""
        while True:
            await self._ask()
            await self._say("")
            await asyncio.sleep(self._interval_s)

    async def _ask(self) -> None:
        question = asyncio.ensure_future(self._engine.answer())
        silence = _Silence(self._engine, self._interval_s)
        try:
            while not (await asyncio.wait((question,), timeout=self._interval_s))[0]:
                silence.grow()
                if silence.total_s >= self._restart_s:
                    raise UnavailableError(f"the engine has not answered for {silence.total_s:.0f} s")
                if silence.idle_s >= self._timeout_s:
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


class _Silence:
    """How long a question has been without an answer. Time in which this process itself stood still does not count."""

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self.total_s = 0.0
        """Without a step either."""
        self.idle_s = 0.0
        """And without computing."""
        self._engine = engine
        self._interval_s = interval_s
        self._at = asyncio.get_running_loop().time()
        self._steps = engine.steps
        self._computed_s: float | None = None  # Looked at only in a silence: looking takes some milliseconds.

    def grow(self) -> None:
        now = asyncio.get_running_loop().time()
        passed_s, self._at = now - self._at, now
        counted_s = min(passed_s, 2 * self._interval_s)
        if self._has_stepped():
            self.total_s = self.idle_s = 0.0
            return
        self.total_s += counted_s
        self.idle_s = 0.0 if self._has_computed(COMPUTING_SHARE * passed_s) else self.idle_s + counted_s

    def _has_stepped(self) -> bool:
        before, self._steps = self._steps, self._engine.steps
        return self._steps != before

    def _has_computed(self, least_s: float) -> bool:
        before, self._computed_s = self._computed_s, self._engine.computed_s()
        return before is not None and self._computed_s - before >= max(least_s, 1e-9)
