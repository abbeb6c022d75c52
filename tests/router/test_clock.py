"""A router that stood still itself concludes nothing about its nodes, and blames neither them nor a request for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from corun.errors import DeadlineError, UnavailableError
from corun.params import SamplingParams
from corun.testing.engines import expected
from corun.types import NodeState
from router import clock as clocks
from router.clock import AwakeClock
from tests.answers import put_forward
from tests.clusters import FakeCluster, cluster, generate, retries
from tests.router.asking import started

TIMEOUT_S = 2.0
"""Longer than a busy machine takes for anything here. Standing still costs no time."""
STILL_S = 2 * TIMEOUT_S
PARAMS = SamplingParams(max_tokens=300, logprobs=True)
PROMPT = (5, 6, 7)
HASTY: dict[str, Any] = {"heartbeat_timeout_ms": round(1000 * TIMEOUT_S)}
PATIENT: dict[str, Any] = {"heartbeat_timeout_ms": 30_000}
pytestmark = pytest.mark.usefixtures("fast_clock")


def stand_still(seconds: float = STILL_S) -> None:
    """Do as if the loop had not run for so long. All timers are late then."""
    put_forward(seconds)


async def test_the_clock_stands_still_with_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    clock = AwakeClock()
    await asyncio.sleep(3 * clocks.TICK_S)
    before = clock.time()
    assert before >= 3 * clocks.TICK_S
    stand_still()
    for _ in range(2):  # Before the clock's own timer has run, and after that.
        assert clock.time() - before <= 2 * clocks.LONGEST_TICK_S < STILL_S
        assert clock.still_s >= STILL_S - 2 * clocks.LONGEST_TICK_S
        await asyncio.sleep(0)
    assert f"the event loop stood still for {STILL_S:.0f}." in caplog.text
    clock.stop()


async def test_a_wait_lasts_as_long_as_the_loop_runs() -> None:
    clock, never = AwakeClock(), asyncio.get_running_loop().create_future()
    answer = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(clock.wait((never, answer), TIMEOUT_S))
    await asyncio.sleep(0)
    stand_still()
    await asyncio.sleep(clocks.TICK_S)
    assert not waiting.done()
    answer.set_result(None)
    await waiting
    began = clock.time()
    await clock.wait((never,), TIMEOUT_S)
    assert clock.time() - began >= TIMEOUT_S
    assert not never.done()
    clock.stop()


async def test_a_router_that_stood_still_loses_no_node(model: str) -> None:
    async with cluster(model, **HASTY) as fake:
        run = started(fake, PROMPT, PARAMS, seed=1)
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 3)
        for _ in range(3):
            stand_still()
            await asyncio.sleep(clocks.TICK_S)
            assert {fake.state(name) for name in ("p1", "d1")} == {NodeState.READY}
        (output,) = await run
        assert output.token_ids == expected(PROMPT, PARAMS, 1)[0]
        assert not retries(fake)


async def test_a_router_with_more_than_it_can_do_is_late_and_loses_no_node(model: str) -> None:
    """Each step takes it longer than the node, and nearly as long as counts: no stillness excuses the nodes."""
    async with cluster(model, step_timeout_s=TIMEOUT_S, **HASTY) as fake:
        client = fake.router.registry._decodes["d1"].client
        on_step, num_steps = client._on_step, 0

        def late(message: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            stand_still(0.8 * clocks.LONGEST_TICK_S)
            on_step(message)

        client._on_step = late  # type: ignore[method-assign]
        before = fake.router.registry.clock.time()
        (output,) = await generate(fake, PROMPT, PARAMS, seed=1, timeout_s=600.0)
        assert output.token_ids == expected(PROMPT, PARAMS, 1)[0]
        assert not retries(fake)
        assert {fake.state(name) for name in ("p1", "d1")} == {NodeState.READY}
        assert num_steps > 100
        assert fake.router.registry.clock.time() - before > 2 * TIMEOUT_S


async def test_a_node_that_is_silent_is_lost_all_the_same(model: str) -> None:
    async with cluster(model, **HASTY) as fake:
        await fake.nodes[1].fall_silent()
        for _ in range(3):
            stand_still()
            await asyncio.sleep(clocks.TICK_S)
        await fake.until(lambda: fake.state("d1") is NodeState.LOST)
        assert fake.state("p1") is not NodeState.LOST
        assert fake.detail("d1") == f"no heartbeat for {TIMEOUT_S:g} s"


@pytest.mark.parametrize("unread", ["step_timeout_s", "reserve_timeout_s"])
async def test_what_was_not_read_came_in_time(model: str, unread: str) -> None:
    async with cluster(model, max_attempts=1, **{unread: TIMEOUT_S}, **PATIENT) as fake:
        client = fake.router.registry._decodes["d1"].client
        reserve = client._reserve

        async def slowly(*args: Any) -> None:
            await reserve(*args)
            stand_still()
            await asyncio.sleep(clocks.TICK_S)  # As an answer that is still to be read.

        if unread == "reserve_timeout_s":
            client._reserve = slowly  # type: ignore[method-assign]
        run = started(fake, PROMPT, PARAMS, seed=1)
        await fake.until(lambda: fake.nodes[1].drawn_tokens > 3)
        if unread == "step_timeout_s":
            stand_still()
        (output,) = await run
        assert output.token_ids == expected(PROMPT, PARAMS, 1)[0]


async def lose(fake: FakeCluster, *, after_stillness: bool) -> None:
    """Loses the decode node once a token of its sample has come; it joins again by itself."""

    def runs() -> bool:
        leases = fake.router.registry._decodes["d1"].client._leases
        return any(lease.first_row_at is not None for lease in leases.values())

    await fake.until(runs)
    if after_stillness:
        stand_still()
    fake.router.registry.lose(fake.router.registry._decodes["d1"], "its step stream broke")


@pytest.mark.parametrize("after_stillness", [True, False])
async def test_losses_after_the_routers_own_stillness_are_nobodys_fault(model: str, after_stillness: bool) -> None:
    """Nodes end a connection that is not read. The request goes on; without the stillness it may be poison."""
    settings = HASTY if after_stillness else PATIENT
    async with cluster(model, max_attempts=2, lease_ttl_ms=200, **settings) as fake:
        run = started(fake, PROMPT, PARAMS, seed=1, timeout_s=30.0)
        for _ in range(2):
            await lose(fake, after_stillness=after_stillness)
        if not after_stillness:
            lost = r"may be poison: 2 runs of its sample 0 ended with a lost node \(d1@\w+, d1@\w+\)"
            with pytest.raises(UnavailableError, match=lost) as caught:
                await run
            assert caught.value.retry_after_s is None  # No client is to try it elsewhere.
            return
        (output,) = await run
        assert output.token_ids == expected(PROMPT, PARAMS, 1)[0]
        assert retries(fake) == {"lost": 2}


async def test_what_is_nobodys_fault_still_ends_at_the_deadline(model: str) -> None:
    async with cluster(model, max_attempts=1, lease_ttl_ms=200, **HASTY) as fake:
        fake.nodes[1].engine.step_ms = 20.0
        run = started(fake, PROMPT, PARAMS, seed=1, timeout_s=2.0 + STILL_S)
        await lose(fake, after_stillness=True)
        with pytest.raises(DeadlineError):
            await run
