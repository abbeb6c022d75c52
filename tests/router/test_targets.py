"""What the targets of latency change: which colocated nodes take prompts only, and which get prompts last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.fields import RouterConfig
from corun.errors import InvalidArgumentError
from corun.types import NodeInfo, NodeLoad, NodeRole, NodeState
from router import flexing
from router.flexing import DWELL_S
from router.nodes.registry import Registry
from router.placement import Need
from router.targets import Targets
from tests.clusters import cluster, generate
from tests.router.asking import PARAMS, PROMPT, right
from tests.router.test_colocated import add_colocated
from tests.router.test_placement import NEED
from tests.router.test_registry import info
from tests.scraping import scrape


class Line:
    """A queue with these prompt tokens in line."""

    def __init__(self, tokens_to_compute: int = 0) -> None:
        self.tokens_to_compute = tokens_to_compute

    def pump_soon(self) -> None:
        """Place nothing."""

    settle = pump_soon

    @property
    def head(self) -> Any:
        return SimpleNamespace(need=NEED) if self.tokens_to_compute else None


class Watched:
    """A registry with colocated nodes, a queue, and the clock of their heartbeats."""

    def __init__(self, model: str, *names: str, **wanted: int) -> None:
        self.registry, self.line = Registry(RouterConfig(), "r"), Line()
        clock: Any = self.registry.clock
        clock.time = lambda: self.now
        queue: Any = self.line
        self.now = 0.0
        self.targets = Targets(self.registry, queue, RouterConfig(**wanted))
        self.registry.on_change = self.targets.review
        self.sides: dict[str, tuple[NodeInfo, NodeInfo]] = {}
        for name in names:
            both = [
                replace(info(model, f"{name}-{role.value}", role), engine_id=f"engine of {name}") for role in NodeRole
            ]
            self.sides[name] = both[0], both[1]
            for side in both:
                self.registry.register(side)
        for node in self.registry._nodes():
            node.is_open = True
            node.peers = {*self.registry._prefills, *self.registry._decodes}

    def beat(self, seconds: float, tokens: int = 0, steps: int = 0) -> None:
        """All nodes are busy for so long, with so many prompt tokens and steps a second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            for prefill_side, decode_side in self.sides.values():
                load = NodeLoad(queued_prompt_tokens=100, tokens=int(self.now * tokens))
                self.registry.heartbeat(prefill_side.ref, load, draining=False)
                load = NodeLoad(used_slots=1, steps=int(self.now * steps))
                self.registry.heartbeat(decode_side.ref, load, draining=False)

    @property
    def details(self) -> dict[str, str]:
        assert {status.state for status in self.registry.statuses()} <= {NodeState.READY, NodeState.LOST}
        return {s.node.ref.node_id: s.detail for s in self.registry.statuses() if s.detail}


PROMPTS_ONLY = "takes prompts only: first tokens would come later than the target"
SLOW = "gets prompts last: its steps with prompts in them last longer than the target"


async def test_under_a_target_for_first_tokens_nodes_flex_not_faster_than_they_can_show_an_effect(model: str) -> None:
    all_of = Watched(model, "a", "b", "c", ttft_target_ms=1000)
    registry = all_of.registry
    all_of.beat(3, tokens=1000)
    assert all_of.details == {}
    for node in registry._prefills.values():  # As many prompts as may be there, and more wait for them.
        for _ in range(4):
            node.room.take(1)
    all_of.line.tokens_to_compute = 12_000
    all_of.beat(1, tokens=1000)
    assert all_of.targets.flexing.wait_s == pytest.approx(4.1, rel=0.02)
    assert all_of.details == {"a-decode": PROMPTS_ONLY}
    all_of.beat(DWELL_S - 1, tokens=1000)
    assert list(all_of.details) == ["a-decode"]
    all_of.beat(1 + 2 * DWELL_S, tokens=1000)
    assert list(all_of.details) == ["a-decode", "b-decode"], "one of three goes on to decode"
    assert all_of.targets.flexing.num_prompts_only == 2
    registry.lose(registry._node("c-decode"), "it died")  # type: ignore[arg-type]
    assert set(all_of.details.values()) == {"it died"}, "at once: otherwise nobody would decode"
    all_of.line.tokens_to_compute = 0
    await registry.close()


async def test_without_targets_nothing_is_measured_or_changed(model: str) -> None:
    both = Watched(model, "a", "b")
    both.line.tokens_to_compute = 10**9
    both.beat(20, tokens=1000, steps=1)
    assert both.details == {}
    await both.registry.close()


async def test_under_a_target_for_each_token_slow_nodes_get_prompts_last(model: str) -> None:
    both = Watched(model, "a", "b", tpot_target_ms=50)
    both.beat(4, steps=21)
    assert both.details == {}
    both.beat(20, steps=10)
    assert both.details == {"a-prefill": SLOW, "b-prefill": SLOW}
    both.beat(20, steps=30)
    assert both.details == {}
    await both.registry.close()


def test_targets_are_not_negative() -> None:
    for name in ("ttft_target_ms", "tpot_target_ms"):
        with pytest.raises(InvalidArgumentError, match=name):
            RouterConfig(**{name: -1})


async def test_a_router_flexes_while_its_queue_waits_for_prefill_and_no_longer(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flexing, "RATE_S", 0.05)
    monkeypatch.setattr(flexing, "DWELL_S", 0.05)
    async with cluster(model, prefills=0, decodes=0, ttft_target_ms=10) as fake:
        for name in ("c0", "c1"):
            await add_colocated(fake, name)
            fake.node(f"{name}-prefill").engine.delay_s = 0.02
        has_flexed = asyncio.Event()
        review, too_early = fake.router.targets.flexing.review, []

        def watched(decodes: Any, prefills: Any, head: Need | None, *others: Any) -> Any:
            fits = head and any(node.room.has_room(head.num_prompt, head.kv_key) for node in prefills)
            too_early.append(fits and any(node.room.may_ask(head) for node in decodes))
            return review(decodes, prefills, head, *others)

        monkeypatch.setattr(fake.router.targets.flexing, "review", watched)

        async def ask(number: int) -> None:
            """Ask again until a node has flexed: on a busy machine its heartbeats may be late."""
            while not has_flexed.is_set():
                assert right(
                    (await generate(fake, (number, 2, 3), PARAMS, seed=number))[0], (number, 2, 3), PARAMS, number
                )

        runs = [asyncio.ensure_future(ask(number)) for number in range(60)]
        await fake.until(lambda: fake.router.targets.flexing.num_prompts_only)
        assert PROMPTS_ONLY in (fake.detail("c0-decode"), fake.detail("c1-decode"))
        has_flexed.set()
        await asyncio.gather(*runs)
        await fake.until(lambda: not fake.router.targets.flexing.num_prompts_only)
        assert (fake.detail("c0-decode"), fake.detail("c1-decode")) == ("", "")
        assert too_early
        assert not any(too_early), "what can be placed has been placed before a router asks what the next one waits for"


async def test_a_router_with_targets_serves_and_shows_them(model: str) -> None:
    async with cluster(model, prefills=0, decodes=0, ttft_target_ms=1000, tpot_target_ms=30, metrics_port=0) as fake:
        await add_colocated(fake)
        await generate(fake, PROMPT)
        found = await scrape(fake.router.observation.metrics.port)
        names = "corun_router_expected_first_token_seconds", "corun_router_prompts_only_nodes"
        assert [found[name] for name in names] == [0, 0]
