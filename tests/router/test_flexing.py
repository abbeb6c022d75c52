"""Which colocated nodes flex under targets of latency, from what a router knows and measures of nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from corun.types import NodeLoad
from router.flexing import Flexing, Rate, choose_flexing, first_token_wait_s, lacks_decode
from router.placement import DecodeRoom, PrefillRoom, choose_pair
from tests.router.test_placement import NEED, always, decode, prefill


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


R = TypeVar("R", PrefillRoom, DecodeRoom)


@dataclass(eq=False)
class Node(Generic[R]):
    """A node that reports what a test says."""

    node_id: str
    room: R
    load: NodeLoad = field(default_factory=NodeLoad)
    heard_at: float = 0.0

    def report(self, now: float, load: NodeLoad) -> None:
        self.load, self.heard_at = load, now


def test_a_node_whose_rate_is_not_known_yet_counts_as_the_mean_of_the_others() -> None:
    """Otherwise the first node that is measured would have to compute what all have, and nodes would flex for that."""
    flexing = Flexing(ttft_target_ms=1000, tpot_target_ms=0)
    nodes = [Node(*prefill(name, queued=100)) for name in "pqrs"]
    decodes = [Node(*decode("d"))]
    for now in range(5):
        nodes[0].report(now, NodeLoad(queued_prompt_tokens=100, tokens=1000 * now))
        flexing.review(decodes, nodes, None, 0, now)
    assert flexing.wait_s == 0.1, "400 tokens at four nodes, of which one was seen to compute 1000 a second"


def test_while_samples_wait_for_a_decode_node_none_takes_prompts_only() -> None:
    """A cluster with more requests than it can decode would else give decode nodes away, and wait to take them back."""
    flexing = Flexing(ttft_target_ms=1000, tpot_target_ms=0)
    prefills = [Node(*prefill(name, queued=100, engine=name)) for name in "ab"]
    decodes = [Node(f"{name}-decode", decode(name, engine=name)[1]) for name in "ab"]
    full, room = decodes[1].room, decodes[0].room
    for now in range(5):
        prefills[0].report(now, NodeLoad(queued_prompt_tokens=100, tokens=10 * now))
        flexing.review(decodes, prefills, None, 0, now)
    assert (flexing.wait_s, room.prompts_only, full.prompts_only) == (10, True, False), "control: prompts wait"
    while full.has_room(NEED):
        full.take(NEED)
    assert flexing.review(decodes, prefills, None, 0, 5) == [], "nobody waits for it, and the last change was just now"
    assert flexing.review(decodes, prefills, NEED, 0, 5) == decodes[:1]
    while room.has_room(NEED):
        room.take(NEED)
    assert flexing.review(decodes, prefills, NEED, 0, 60) == []
    assert flexing.review(decodes, prefills, None, 0, 60) != [], "control"


def test_a_node_without_rows_is_not_slow_whatever_was_measured_before() -> None:
    """It would get prompts last, and so would never be measured again, while it takes prompts only."""
    flexing = Flexing(ttft_target_ms=0, tpot_target_ms=50)
    decodes, prefills = [Node(*decode("d", engine="e"))], [Node(*prefill("p", engine="e"))]
    for now in range(5):
        prefills[0].report(now, NodeLoad(queued_prompt_tokens=100))
        decodes[0].report(now, NodeLoad(used_slots=1, steps=10 * now))
        flexing.review(decodes, prefills, None, 0, now)
    assert prefills[0].room.is_slow
    decodes[0].report(5, NodeLoad(used_slots=0, steps=40))
    flexing.review(decodes, prefills, None, 0, 5)
    assert not prefills[0].room.is_slow
