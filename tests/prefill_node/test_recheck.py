"""Prompts are computed again in the contract's own form while a node is idle, and one differing bit is a finding."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from corun.errors import UnavailableError
from prefill_node import recheck
from prefill_node.metrics import PrefillMetrics
from prefill_node.recheck import MAX_WAITING, Computation, Digests, Recheck, difference


class Engine:
    """Computes a prompt when `go` is set: block i of rank r has the digest `first token + i`, or another one."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.wrong = 0
        self.error: Exception | None = None
        self.asked: list[Sequence[int]] = []
        self.findings: list[str] = []
        self.metrics = PrefillMetrics()
        self.recheck = Recheck(self.recompute, self.metrics, self.findings.append)

    def computed(self, first: int) -> Computation:
        prompt = (first,) * 33
        return Computation(
            prompt_token_ids=prompt,
            digests=digests(first),
            freedoms={"packed", "cached"},
            cached_tokens=16,
            steps=[[16, first, 90, 5], [1, 1, 1, 0]],
        )

    async def recompute(self, prompt: Sequence[int]) -> Digests:
        self.asked.append(prompt[0])  # type: ignore[arg-type]
        await self.go.wait()
        if self.error:
            raise self.error
        return digests(prompt[0], wrong=self.wrong)

    def count(self, result: str) -> float:
        return self.metrics.rechecked_prompts.labels(result).value


def digests(first: int, wrong: int = 0) -> Digests:
    return [[first, first + 1], [first, first + 1 + wrong]]


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(recheck, "IDLE_S", 0.0)
    return Engine()


async def idle() -> None:
    """Let all that can run without waiting run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_equal_bits_are_counted_and_change_nothing(engine: Engine) -> None:
    for first in (1, 2, 3):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    assert (engine.asked, engine.findings) == ([1, 2, 3], [])
    assert (engine.count("equal"), engine.count("different")) == (3, 0)
    engine.recheck.add(engine.computed(4))
    engine.recheck.resume()
    await idle()
    assert engine.count("equal") == 4


async def test_one_differing_bit_is_a_finding_with_the_company_that_it_had(engine: Engine) -> None:
    engine.wrong = 1
    for first in (7, 8):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    engine.recheck.resume()
    await idle()
    (finding,) = engine.findings
    assert "first in KV block 1 of 2 (rank 1)" in finding
    assert finding.endswith(
        "it may use cached, packed, took 16 tokens from the cache, and ran as 16 of the 90 tokens of 7 prompts "
        "beside 5 samples; 1 of the 1 tokens of 1 prompts"
    )
    assert (engine.asked, engine.count("different")) == ([7], 1)


async def test_a_clients_prompt_goes_first(engine: Engine) -> None:
    """What it interrupts is given up, and the next one runs later. A start that is due does not come, either."""
    engine.go.clear()
    for first in (1, 2):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    engine.recheck.pause()
    engine.recheck.resume()
    engine.recheck.pause()
    await idle()
    assert (engine.asked, engine.count("equal")) == ([1], 0)
    engine.go.set()
    engine.recheck.resume()
    await idle()
    assert (engine.asked, engine.count("equal")) == ([1, 2], 1)


async def test_one_that_is_given_up_late_does_not_disturb_the_next(engine: Engine) -> None:
    """The end of its computation fails instead of being cancelled."""
    ends = asyncio.Event()

    async def stubborn(prompt: Sequence[int]) -> Digests:
        try:
            return await engine.recompute(prompt)
        except asyncio.CancelledError:
            await ends.wait()
            raise UnavailableError("no answer") from None

    engine.recheck._recompute = stubborn
    engine.go.clear()
    for first in (1, 2, 3):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    engine.recheck.pause()
    engine.recheck.resume()
    await idle()
    ends.set()
    await idle()
    assert engine.asked == [1, 2]
    engine.recheck.pause()
    engine.go.set()
    await idle()
    assert engine.count("equal") == 0, "the second one was given up, too"


async def test_a_node_that_is_never_idle_forgets_the_oldest(engine: Engine) -> None:
    for first in range(MAX_WAITING + 3):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    assert engine.asked == list(range(3, MAX_WAITING + 3))


async def test_an_engine_that_cannot_compute_now_is_asked_again_later(engine: Engine) -> None:
    engine.error = UnavailableError("the engine died")
    for first in (1, 2):
        engine.recheck.add(engine.computed(first))
    engine.recheck.resume()
    await idle()
    assert (engine.asked, engine.findings) == ([1], [])
    engine.error = None
    engine.recheck.resume()
    await idle()
    assert (engine.asked, engine.count("equal")) == ([1, 2], 1)


def test_the_first_difference_is_named() -> None:
    assert difference([[1, 2], [3]], [[1, 2], [3]]) == ""
    assert difference([[1, 2], [3]], [[1, 5], [4]]) == "first in KV block 1 of 2 (rank 0)"
    assert difference([[]], [[]]) == ""
