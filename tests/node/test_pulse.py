"""When an engine counts as stuck, and when as alive."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from corun.errors import UnavailableError
from corun.node.vllm.start import answer
from corun.node.watchdog import Pulse
from corun.processes import cpu_seconds

DEADLINE_S = 60.0
TIMEOUT_S = 0.1
STUCK = "its engine is stuck: no answer and no step for 0.1 s"


class Engine:
    """Answers unless it hangs; then it may step, or compute."""

    def __init__(self) -> None:
        self.hanging = False
        self.dead = False
        self.questions = 0
        self.given: Callable[[], int] = lambda: 0
        self.computed: Callable[[], float] = lambda: 0.0

    @property
    def steps(self) -> int:
        return self.given()

    async def answer(self) -> None:
        self.questions += 1
        while self.hanging and not self.dead:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        if self.dead:
            raise UnavailableError("the engine died")

    def computed_s(self) -> float:
        return self.computed()


class Watch:
    def __init__(self, restart_s: float) -> None:
        self.engine = Engine()
        self.told: list[str] = []
        self.pulse = Pulse(self.engine, self._tell, timeout_s=TIMEOUT_S, restart_s=restart_s)
        self.task = asyncio.create_task(self.pulse.run())

    async def _tell(self, stuck: str) -> None:
        self.told.append(stuck)

    async def until(self, condition: Callable[[], bool]) -> None:
        async def poll() -> None:
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

        await asyncio.wait_for(poll(), DEADLINE_S)

    async def stays_well(self) -> None:
        await asyncio.sleep(5 * TIMEOUT_S)
        assert self.told == []
        assert not self.task.done()


@asynccontextmanager
async def watching(restart_s: float = DEADLINE_S) -> AsyncIterator[Watch]:
    watch = Watch(restart_s)
    yield watch
    watch.task.cancel()
    await asyncio.wait((watch.task,))


async def test_an_engine_that_answers_is_asked_again_and_again() -> None:
    async with watching() as watch:
        await watch.until(lambda: watch.engine.questions > 5)
        assert watch.told == []


async def test_silence_is_told_once_and_its_end_too() -> None:
    async with watching() as watch:
        for _ in range(2):
            watch.engine.hanging = True
            await watch.until(lambda: watch.pulse.stuck == STUCK)
            await asyncio.sleep(2 * TIMEOUT_S)
            watch.engine.hanging = False
            await watch.until(lambda: not watch.pulse.stuck)
        assert watch.told == [STUCK, "", STUCK, ""]


async def test_one_question_at_a_time() -> None:
    async with watching() as watch:
        watch.engine.hanging = True
        await watch.until(lambda: bool(watch.pulse.stuck))
        asked = watch.engine.questions
        await asyncio.sleep(2 * TIMEOUT_S)
        assert watch.engine.questions == asked


async def test_steps_are_a_sign_of_life() -> None:
    async with watching() as watch:
        loop = asyncio.get_running_loop()
        watch.engine.hanging = True
        watch.engine.given = lambda: int(loop.time() * 1000)
        await watch.stays_well()
        watch.engine.given = lambda: 0
        await watch.until(lambda: watch.told == [STUCK])


async def test_a_long_step_on_a_cpu_is_no_silence() -> None:
    """It is one only for `restart_s`."""
    async with watching() as watch:
        loop = asyncio.get_running_loop()
        watch.engine.hanging = True
        watch.engine.computed = loop.time
        await watch.stays_well()
        watch.engine.computed = lambda: 0.01 * loop.time()  # Some thread wakes now and then.
        await watch.until(lambda: watch.told == [STUCK])


@pytest.mark.parametrize("computes", [False, True])
async def test_a_silence_ends_in_the_end(computes: bool) -> None:
    async with watching(restart_s=3 * TIMEOUT_S) as watch:
        loop = asyncio.get_running_loop()
        watch.engine.hanging = True
        watch.engine.computed = loop.time if computes else lambda: 0.0
        with pytest.raises(UnavailableError, match="the engine has not answered for"):
            await asyncio.wait_for(watch.task, DEADLINE_S)
        assert watch.told == ([] if computes else [STUCK])


async def test_death_is_no_silence() -> None:
    async with watching() as watch:
        watch.engine.hanging = True
        await watch.until(lambda: bool(watch.pulse.stuck))
        watch.engine.dead = True
        with pytest.raises(UnavailableError, match="the engine died"):
            await asyncio.wait_for(watch.task, DEADLINE_S)


async def test_a_node_that_stood_still_does_not_blame_its_engine() -> None:
    """After SIGCONT the answer is there, but its time is over: only the loop's own ticks count."""
    async with watching() as watch:
        real = asyncio.get_running_loop()
        watch.engine.hanging = True
        await asyncio.sleep(0.3 * TIMEOUT_S)
        now, jump = real.time, 100 * TIMEOUT_S
        real.time = lambda: now() + jump  # type: ignore[method-assign]
        await asyncio.sleep(0)
        watch.engine.hanging = False
        try:
            await asyncio.sleep(0.3 * TIMEOUT_S)
            assert watch.told == []
        finally:
            real.time = now  # type: ignore[method-assign]


class Llm:
    """The calls of `AsyncLLM` that an answer takes."""

    def __init__(self) -> None:
        self.errored = False
        self.result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def is_sleeping(self) -> bool:
        return await self.result


async def test_the_question_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves it unanswered when the engine dies."""
    monkeypatch.setattr("corun.node.vllm.start.ANSWER_POLL_S", 0.01)
    llm = Llm()
    asking = asyncio.create_task(answer(llm))
    await asyncio.sleep(0.03)
    assert not asking.done()
    llm.errored = True
    with pytest.raises(UnavailableError, match="the engine died"):
        await asking
    assert llm.result.cancelled()


async def test_an_answer_is_an_answer() -> None:
    llm = Llm()
    llm.result.set_result(False)
    await answer(llm)
    failing: Any = SimpleNamespace(errored=False, is_sleeping=_fail)
    with pytest.raises(UnavailableError):
        await answer(failing)


async def _fail() -> bool:
    raise RuntimeError("EngineDeadError")


def test_computing_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + DEADLINE_S
        while cpu_seconds(os.getpid()) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        busy.kill()
        busy.wait()
