"""A short run of the fuzzer and of every hostile client, what a bug would look like, and what both rely on."""

from __future__ import annotations

import asyncio
import random
from typing import cast

import pytest

from tests.fuzz.hostile import ATTACKS, measure
from tests.fuzz.http2 import Connection
from tests.fuzz.messages import Maker, mutated
from tests.fuzz.raw import SCRIPTS, script
from tests.fuzz.runner import KINDS, fuzzing
from tests.fuzz.surface import SERVED, SERVICES, Method
from tests.fuzz.target import running

pytestmark = pytest.mark.timeout(300)

SCALE = {"slowloris": 20, "idle": 200, "giant": 1, "slow_reader": 1, "many_streams": 1500}
NODES = {kind: {"generation": "0" * 16, "contract": "{}"} for kind in ("prefill", "decode", "colocated")}


@pytest.mark.slow
async def test_nothing_is_found() -> None:
    async with running() as target, fuzzing(target, 1) as fuzzer:
        report = await fuzzer.run(first=0, cases=800, at_once=64, canary_every=200)
        alive = target.alive
    assert report.findings == []
    assert alive
    assert set(report.statuses) == set(KINDS)
    assert report.canaries >= 12
    seen = {status for kind in ("message", "bytes", "token") for status in report.statuses[kind]}
    assert {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "NOT_FOUND", "ABORTED"} <= seen


@pytest.mark.slow
async def test_a_bug_is_found() -> None:
    """Negative control: a handler that raises KeyError for most values of one field."""
    async with running(broken=True) as target, fuzzing(target, 1, ("message",)) as fuzzer:
        report = await fuzzer.run(first=0, cases=300, at_once=64, canary_every=1000)
    wrong = "open /corun.v1.ClusterService/Generate, message: INTERNAL internal error, id"
    assert any(wrong in finding for finding in report.findings)
    assert any("in the log: KeyError" in finding for finding in report.findings)


@pytest.mark.slow
async def test_hostile_clients_keep_nothing() -> None:
    async with running(client_timeout_s=1.0) as target:
        for name in ATTACKS:
            report = await measure(target, name, scale=SCALE[name], seconds=1.0)
            assert report["alive"], name
            assert report["left"] == [], name
            assert report["before"]["failed"] == report["during"]["failed"] == {}, name
            assert report["seen"], name
            assert not any("failed" in seen for seen in report["seen"]), report["seen"]


def test_a_case_is_drawn_from_its_number_and_any_service_may_be() -> None:
    def draw(number: int) -> bytes:
        rng = random.Random(number)
        method = Method(rng, rng.choice(tuple(SERVED)))
        right = method.valid(rng, NODES)
        data = Maker(rng).changed(right).SerializeToString(deterministic=True)
        return mutated(rng, data, right.SerializeToString()) + script(rng.choice(SCRIPTS), rng)

    assert [draw(number) for number in range(50)] == [draw(number) for number in range(50)]
    assert {name for names in SERVED.values() for name in names} == set(SERVICES)


@pytest.mark.parametrize("turns", range(6))
async def test_a_reader_that_is_cancelled_as_bytes_come_ends(turns: int) -> None:
    """An attack reads in a loop without an end: one lost cancellation, and the attacker's process outlives its test."""
    link = Connection(asyncio.StreamReader(), cast(asyncio.StreamWriter, None))

    async def forever() -> None:
        while True:
            await link.read(5.0)

    reading = asyncio.create_task(forever())
    await asyncio.sleep(0)
    link.reader.feed_data(b"1")
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading], timeout=1.0)
    cancelled = reading.cancelled()
    reading.cancel()
    assert cancelled
