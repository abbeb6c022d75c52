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
from router import targets
from router.nodes.registry import Registry
from router.placement import DecodeRoom, choose_pair
from router.targets import DWELL_S, Rate, Targets, choose_flexing, first_token_wait_s, lacks_decode
from tests.clusters import cluster, generate
from tests.router.asking import PARAMS, PROMPT, right
from tests.router.test_colocated import add_colocated
from tests.router.test_placement import NEED, always, decode, prefill
from tests.router.test_registry import info
from tests.scraping import scrape


def test_a_rate_is_measured_while_the_node_is_busy_and_over_whole_seconds() -> None:
    rate = Rate()
    for now, count, busy in ((0, 0, False), (5, 900, True), (6, 1900, True), (6.9, 2800, True)):
        rate.report(count, now, is_busy=busy)
        assert rate.per_s == 0
    rate.report(2900, 7, is_busy=True)
    assert rate.per_s == 1000
    rate.report(2900, 7, is_busy=True)  # The same heartbeat, seen again.
    rate.report(2900, 9, is_busy=False)  # It was idle for an unknown part of the time.
    rate.report(2900, 60, is_busy=True)
    assert rate.per_s == 1000
    rate.report(2900 + 6000, 62, is_busy=True)
    assert rate.per_s == 1500, "a quarter of the way from 1000 to 3000"


def test_a_prompt_waits_for_those_at_nodes_and_in_the_queue_if_that_waits_for_prefill() -> None:
    (_, free), (_, full) = prefill("p", queued=100), prefill("q", queued=300, max_in_flight=1)
    (_, room), (_, none) = decode("d"), decode("d", slots=0)
    assert first_token_wait_s(None, 0, [room], [free, full], 1000) == 0.4
    assert first_token_wait_s(NEED, 5000, [room], [free, full], 1000) == 0.4, "it does not wait for prefill"
    assert first_token_wait_s(NEED, 5000, [none], [full], 1000) == 0.3, "it waits for decode"
    assert first_token_wait_s(NEED, 5000, [none, room], [full], 1000) == 5.3
    assert first_token_wait_s(NEED, 5000, [room], [full], 0) == 0, "no rate is known yet"


def flexing(wait_s: float, rooms: dict[str, DecodeRoom], colocated: str) -> str:
    """Let the chosen node change. Return the ids of those that take prompts only."""
    if name := choose_flexing(wait_s, 1.0, rooms, set(colocated)):
        rooms[name].prompts_only = not rooms[name].prompts_only
    return "".join(sorted(name for name, room in rooms.items() if room.prompts_only))


def test_the_least_used_colocated_nodes_take_prompts_only_one_by_one_and_never_all() -> None:
    rooms = dict([decode("a", slots=8), decode("b", slots=9), decode("c", slots=7)])
    assert flexing(1.0, rooms, "abc") == ""
    assert [flexing(1.1, rooms, "abc") for _ in range(4)] == ["b", "ab", "ab", "ab"]
    assert flexing(0.5, rooms, "abc") == "ab", "between target and half of it nothing changes"
    assert [flexing(0.4, rooms, "abc") for _ in range(3)] == ["b", "", ""]
    assert flexing(9, rooms, "") == "", "plain decode nodes never do"
    assert [flexing(9, rooms, "bc") for _ in range(3)] == ["b", "bc", "bc"]


def test_a_node_that_alone_can_hold_the_largest_samples_goes_on_to_decode() -> None:
    rooms = dict([decode("a", slots=8, kv_blocks=200), decode("b")])
    assert [flexing(9, rooms, "ab") for _ in range(2)] == ["b", "b"]
    assert not lacks_decode(rooms.values())
    rooms["a"].prompts_only, rooms["b"].prompts_only = True, False
    assert lacks_decode(rooms.values())
    del rooms["b"]
    assert lacks_decode(rooms.values())


def test_a_node_that_takes_prompts_only_gets_no_sample_to_decode_but_prompts_for_others() -> None:
    rooms, prefills = dict([decode("a", slots=8, engine="e"), decode("b")]), dict([prefill("p", engine="e")])
    rooms["a"].report(NodeLoad(leases=1))  # Other routers' leases are no reason to ask, either.
    rooms["a"].prompts_only = True
    assert choose_pair(NEED, rooms, prefills, always) == ("b", "p")
    assert not rooms["a"].keeps_free(1), "runs that nobody waits for leave it"
    assert rooms["a"].could_hold(NEED.total)
    rooms["a"].report(NodeLoad())
    assert not rooms["a"].has_room(NEED)


def test_a_slow_node_gets_prompts_last_but_gets_them() -> None:
    slow, other = prefill("p", engine="e"), prefill("q", queued=9999, max_in_flight=2)
    slow[1].is_slow = True
    one = dict([decode("d", engine="e")])
    assert choose_pair(NEED, one, dict([slow, other]), always) == ("d", "q")
    assert choose_pair(NEED.again("q"), one, dict([slow, other]), always) == ("d", "p")
    other[1].take(1)
    assert choose_pair(NEED, one, dict([slow, other]), always) == ("d", "p")


class Line:
    """A queue with these prompt tokens in line."""

    def __init__(self, tokens_to_compute: int = 0) -> None:
        self.tokens_to_compute = tokens_to_compute

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
        self.registry.subscribe(self.targets.review)
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
    assert all_of.targets.wait_s == pytest.approx(4.1, rel=0.02)
    assert all_of.details == {"a-decode": PROMPTS_ONLY}
    all_of.beat(DWELL_S - 1, tokens=1000)
    assert list(all_of.details) == ["a-decode"]
    all_of.beat(1 + 2 * DWELL_S, tokens=1000)
    assert list(all_of.details) == ["a-decode", "b-decode"], "one of three goes on to decode"
    assert all_of.targets.num_prompts_only == 2
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
    monkeypatch.setattr(targets, "RATE_S", 0.05)
    monkeypatch.setattr(targets, "DWELL_S", 0.05)
    async with cluster(model, prefills=0, decodes=0, ttft_target_ms=10) as fake:
        for name in ("c0", "c1"):
            await add_colocated(fake, name)
            fake.node(f"{name}-prefill").engine.delay_s = 0.02
        has_flexed = asyncio.Event()

        async def ask(number: int) -> None:
            """Ask again until a node has flexed: on a busy machine its heartbeats may be late."""
            while not has_flexed.is_set():
                assert right(
                    (await generate(fake, (number, 2, 3), PARAMS, seed=number))[0], (number, 2, 3), PARAMS, number
                )

        runs = [asyncio.ensure_future(ask(number)) for number in range(60)]
        await fake.until(lambda: fake.router.targets.num_prompts_only)
        assert PROMPTS_ONLY in (fake.detail("c0-decode"), fake.detail("c1-decode"))
        has_flexed.set()
        await asyncio.gather(*runs)
        await fake.until(lambda: not fake.router.targets.num_prompts_only)
        assert (fake.detail("c0-decode"), fake.detail("c1-decode")) == ("", "")


async def test_a_router_with_targets_serves_and_shows_them(model: str) -> None:
    async with cluster(model, prefills=0, decodes=0, ttft_target_ms=1000, tpot_target_ms=30, metrics_port=0) as fake:
        await add_colocated(fake)
        await generate(fake, PROMPT)
        found = await scrape(fake.router.observation.metrics.port)
        names = "corun_router_expected_first_token_seconds", "corun_router_prompts_only_nodes"
        assert [found[name] for name in names] == [0, 0]
