"""Which colocated nodes flex under targets of latency, from what a router knows and measures of nodes."""

from __future__ import annotations

from corun.types import NodeLoad
from router.flexing import Rate, choose_flexing, first_token_wait_s, lacks_decode
from router.placement import DecodeRoom, choose_pair
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
