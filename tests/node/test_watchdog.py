"""When an engine counts as stuck, and when as alive; and the end of a process whose parent was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from corun.errors import UnavailableError
from corun.node.watchdog import Pulse, end_with_parent
from corun.processes import cpu_seconds, stat_fields
from tests.answers import until

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
    def __init__(self, timeout_s: float, restart_s: float) -> None:
        self.engine = Engine()
        self.told: list[str] = []
        self.pulse = Pulse(self.engine, self._tell, timeout_s=timeout_s, restart_s=restart_s)
        self.task = asyncio.create_task(self.pulse.run())

    async def _tell(self, stuck: str) -> None:
        self.told.append(stuck)


@asynccontextmanager
async def watching(timeout_s: float = TIMEOUT_S, restart_s: float = DEADLINE_S) -> AsyncIterator[Watch]:
    watch = Watch(timeout_s, restart_s)
    yield watch
    watch.task.cancel()
    await asyncio.wait((watch.task,))


async def test_silence_is_told_once_and_its_end_too() -> None:
    async with watching() as watch:
        await until(lambda: watch.engine.questions > 5)
        for _ in range(2):
            watch.engine.hanging = True
            await until(lambda: watch.pulse.stuck == STUCK)
            asked = watch.engine.questions
            await asyncio.sleep(2 * TIMEOUT_S)
            assert watch.engine.questions == asked, "one question at a time"
            watch.engine.hanging = False
            await until(lambda: not watch.pulse.stuck)
        assert watch.told == [STUCK, "", STUCK, ""]


async def test_steps_and_a_long_step_on_a_cpu_are_signs_of_life() -> None:
    async with watching() as watch, watching() as other:
        loop = asyncio.get_running_loop()
        watch.engine.hanging = other.engine.hanging = True
        watch.engine.given = lambda: int(loop.time() * 1000)
        other.engine.computed = loop.time
        await asyncio.sleep(5 * TIMEOUT_S)
        for one in (watch, other):
            assert one.told == []
            assert not one.task.done()
        watch.engine.given = lambda: 0
        other.engine.computed = lambda: 0.01 * loop.time()  # Some thread wakes now and then.
        await until(lambda: watch.told == other.told == [STUCK])


@pytest.mark.parametrize("computes", [False, True])
async def test_a_silence_ends_in_the_end(computes: bool) -> None:
    """Even that of an engine that computes."""
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
        await until(lambda: bool(watch.pulse.stuck))
        watch.engine.dead = True
        with pytest.raises(UnavailableError, match="the engine died"):
            await asyncio.wait_for(watch.task, DEADLINE_S)


async def test_a_node_that_stood_still_does_not_blame_its_engine() -> None:
    """After SIGCONT its time is over, and the answer may come a moment later: only the loop's own ticks count."""
    async with watching(timeout_s=1.0) as watch:
        real = asyncio.get_running_loop()
        watch.engine.hanging = True
        await until(lambda: watch.engine.questions == 1)
        now = real.time
        real.time = lambda: now() + 100.0  # type: ignore[method-assign]
        try:
            await asyncio.sleep(0.1)
            watch.engine.hanging = False
            await until(lambda: watch.engine.questions > 1)
            assert watch.told == []
        finally:
            real.time = now  # type: ignore[method-assign]


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


PARENT = """
import multiprocessing, os, sys, time
from corun.node.watchdog import end_with_parent

def child():
    if sys.argv[1] == "True":
        end_with_parent()
        end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(120)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


def ends(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (fields := stat_fields(pid)) is not None and fields[0] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("watch", [True, False])
def test_a_child_ends_with_its_killed_parent_only_if_it_watches(watch: bool) -> None:
    end_with_parent()  # This process has no such parent, and watches nobody.
    with subprocess.Popen([sys.executable, "-c", PARENT, str(watch)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    try:
        assert ends(pid, DEADLINE_S if watch else 0.5) is watch
    finally:
        if not watch:
            os.kill(pid, signal.SIGKILL)
