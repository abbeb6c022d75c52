"""Nodes that are registered and cannot be used: who needs one waits aside, all others go on, and words say why."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from corun.errors import UnavailableError
from corun.params import SamplingParams
from corun.testing.nodes import LocalNode
from corun.types import NodeState
from router.nodes.node import Placement
from tests.clusters import FakeCluster, cluster, generate
from tests.router.asking import started

PROMPT = (5, 6, 7)
SMALL = SamplingParams(max_tokens=4)
LARGE = SamplingParams(max_tokens=300)
"""19 KV blocks: too many for the small node."""
PATIENT_S = 60.0


@contextlib.asynccontextmanager
async def small_and_large(model: str, *, node_wait_s: float) -> AsyncIterator[tuple[FakeCluster, LocalNode]]:
    """d1 is small and READY. d2 is large, and does not connect as long as its engine has errors."""
    async with cluster(model, decodes=0, node_wait_s=node_wait_s) as fake:
        await fake.add_decode("d1", kv_blocks=10)
        large = await fake.add_decode("d2", kv_blocks=1000, join=False)
        large.engine.connect_errors = [UnavailableError("its NIXL port does not answer")] * 1000
        large.join()
        await fake.ready("d1")
        await fake.until(lambda: "its NIXL port does not answer" in fake.detail("d2"))
        yield fake, large


async def test_who_fits_only_a_node_that_cannot_be_used_blocks_nobody_until_it_can(model: str) -> None:
    """Idle slots are idle meanwhile: what runs in them, like audits, is not in the way of who could not use them."""
    async with small_and_large(model, node_wait_s=PATIENT_S) as (fake, large):
        placements: list[Placement | None] = []
        fake.router.registry.watch(placements.append)
        waiting = started(fake, PROMPT, LARGE, seed=1)
        await fake.until(lambda: fake.router.queue.waiting == 1)
        assert fake.router.queue.in_line == 0
        assert placements == []
        for seed in range(3):
            await generate(fake, PROMPT, SMALL, seed=seed, timeout_s=5.0)
        assert not waiting.done()
        large.engine.connect_errors.clear()
        (output,) = await waiting
        assert output.receipt.decode_node == large.info.ref


async def test_its_wait_ends_with_the_node_and_the_reason(model: str) -> None:
    async with small_and_large(model, node_wait_s=0.3) as (fake, _):
        with pytest.raises(UnavailableError, match=r"303 tokens.* d2 is joining: .*its NIXL port does not answer"):
            await generate(fake, PROMPT, LARGE, seed=1)


async def test_a_node_that_takes_no_work_for_a_moment_fails_nobody(model: str) -> None:
    """It says that its engine is stuck, and recovers."""
    async with cluster(model, decodes=0) as fake:
        await fake.add_decode("d1", kv_blocks=10)
        large = await fake.add_decode("d2", kv_blocks=1000)
        await fake.ready("d1", "d2")
        large.agent.stuck = "its engine does not answer"
        large.agent.tell()
        await fake.until(lambda: fake.state("d2") is NodeState.JOINING)
        waiting = started(fake, PROMPT, LARGE, seed=1)
        await fake.until(lambda: fake.router.queue.waiting == 1)
        await generate(fake, PROMPT, SMALL, seed=2, timeout_s=5.0)
        large.agent.stuck = ""
        large.agent.tell()
        (output,) = await waiting
        assert output.receipt.decode_node == large.info.ref


async def test_why_a_pair_does_not_connect_is_logged_when_it_changes(
    model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.nodes.preparation.LONGEST_RETRY_S", 0.01)
    monkeypatch.setattr("router.nodes.preparation.FIRST_RETRY_S", 0.01)
    with caplog.at_level(logging.WARNING):
        async with small_and_large(model, node_wait_s=PATIENT_S) as (fake, large):
            await fake.until(lambda: len(large.engine.connect_errors) < 980)
            large.engine.connect_errors = [UnavailableError("it has other weights")] * 1000
            await fake.until(lambda: "it has other weights" in fake.detail("d2"))
            await fake.until(lambda: len(large.engine.connect_errors) < 980)
            lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if "d2 cannot connect to p1" in line]
    assert [("its NIXL port" in line, "other weights" in line) for line in said] == [(True, False), (False, True)]
