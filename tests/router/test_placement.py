from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from router.placement import (
    DecodeCandidate,
    DecodeRoom,
    Need,
    PrefillCandidate,
    PrefillRoom,
    choose_idle_pair,
    choose_pair,
)

NEED = Need(num_prompt=16, max_tokens=16)


def decode(node_id: str, *, slots: int = 4, kv_blocks: int = 100) -> DecodeCandidate:
    return DecodeCandidate(node_id, DecodeRoom(slots=slots, kv_blocks=kv_blocks, block_size=16))


def prefill(node_id: str, *, queued: int = 0, max_in_flight: int = 4) -> PrefillCandidate:
    room = PrefillRoom(max_in_flight=max_in_flight)
    if queued:
        room.take(queued)
    return PrefillCandidate(node_id, room)


def always(_: str, __: str) -> bool:
    return True


def only(*pairs: tuple[str, str]) -> Callable[[str, str], bool]:
    return lambda d, p: (d, p) in pairs


def test_most_free_slots_then_most_free_kv_then_id() -> None:
    assert choose_pair(NEED, [decode("a", slots=3), decode("b")], [prefill("p")], always) == ("b", "p")
    assert choose_pair(NEED, [decode("a"), decode("b", kv_blocks=200)], [prefill("p")], always) == ("b", "p")
    assert choose_pair(NEED, [decode("b"), decode("a")], [prefill("p")], always) == ("a", "p")


def test_fewest_queued_prompt_tokens_then_id() -> None:
    prefills = [prefill("a", queued=20), prefill("c", queued=10), prefill("b", queued=10)]
    assert choose_pair(NEED, [decode("d")], prefills, always) == ("d", "b")


def test_a_node_that_computes_the_same_kv_comes_first_even_if_it_takes_no_other_prompt() -> None:
    busy, idle = prefill("p", max_in_flight=1), prefill("q")
    busy.room.take(16, "k")
    assert choose_pair(replace(NEED, kv_key="k"), [decode("d")], [busy, idle], always) == ("d", "p")
    assert choose_pair(replace(NEED, kv_key="l"), [decode("d")], [busy, idle], always) == ("d", "q")
    assert choose_pair(replace(NEED, kv_key="k").again(), [decode("d")], [busy, idle], always) == ("d", "q")
    assert choose_pair(replace(NEED, kv_key="k"), [decode("d")], [busy, idle], only(("d", "q"))) == ("d", "q")
    lately = prefill("q")
    lately.room.take(16, "k")
    lately.room.give(16, "k", is_computed=True)
    assert choose_pair(replace(NEED, kv_key="k"), [decode("d")], [busy, lately], always) == ("d", "p")


def test_a_node_that_may_still_have_the_kv_saves_its_own_prompt() -> None:
    had, other = prefill("q", queued=10), prefill("p")
    had.room.take(16, "k")
    had.room.give(16, "k", is_computed=True)
    assert choose_pair(replace(NEED, kv_key="k"), [decode("d")], [had, other], always) == ("d", "q")
    had.room.take(10)
    assert choose_pair(replace(NEED, kv_key="k"), [decode("d")], [had, other], always) == ("d", "p")


def test_the_order_of_the_nodes_does_not_matter() -> None:
    decodes = [decode("a"), decode("b", slots=2), decode("c")]
    prefills = [prefill("p"), prefill("q", queued=3)]
    found = {
        choose_pair(NEED, ds, ps, always)
        for ds in itertools.permutations(decodes)
        for ps in itertools.permutations(prefills)
    }
    assert found == {("a", "p")}


def test_only_warm_pairs_are_used() -> None:
    decodes, prefills = [decode("a"), decode("b")], [prefill("p"), prefill("q")]
    assert choose_pair(NEED, decodes, prefills, only(("b", "q"))) == ("b", "q")
    assert choose_pair(NEED, decodes, prefills, only()) is None


def test_a_sample_waits_for_slots_kv_and_a_prefill_turn() -> None:
    assert choose_pair(NEED, [decode("a", slots=0)], [prefill("p")], always) is None
    assert choose_pair(NEED, [decode("a", kv_blocks=1)], [prefill("p")], always) is None
    assert choose_pair(NEED, [decode("a")], [prefill("p", queued=1, max_in_flight=1)], always) is None
    assert choose_pair(NEED, [], [prefill("p")], always) is None
    assert choose_pair(NEED, [decode("a")], [], always) is None


def test_nodes_that_failed_the_sample_come_last_but_are_taken() -> None:
    decodes, prefills = [decode("a", slots=8), decode("b")], [prefill("p"), prefill("q", queued=5)]
    again = NEED.again("a", "p")
    assert choose_pair(again, decodes, prefills, always) == ("b", "q")
    assert choose_pair(again, decodes[:1], prefills[:1], always) == ("a", "p")


def test_idle_pairs_are_other_nodes_with_slots_to_spare_and_nothing_to_prefill() -> None:
    decodes, prefills = [decode("a", slots=8), decode("b"), decode("c")], [prefill("p"), prefill("q"), prefill("r")]
    known = NEED.again("a", "p")
    assert choose_idle_pair(known, decodes, prefills, always, 2) == ("b", "q")
    assert choose_idle_pair(known, decodes, prefills, only(("c", "r"), ("a", "p")), 2) == ("c", "r")
    assert choose_idle_pair(known, decodes, [prefill("p"), prefill("q", queued=1)], always, 2) is None
    assert choose_idle_pair(known, [decodes[0], decode("b", slots=0)], prefills, always, 2) == ("a", "q")


def test_a_node_of_the_first_run_is_taken_only_where_no_other_could_ever_do() -> None:
    known = NEED.again("a", "p")
    small = decode("b", kv_blocks=1)
    assert choose_idle_pair(known, [decode("a"), small], [prefill("p")], always, 0) == ("a", "p")
    busy = decode("b")
    for _ in range(4):
        busy.room.take(16)
    assert choose_idle_pair(known, [decode("a"), busy], [prefill("p")], always, 0) is None
    assert choose_idle_pair(known, [decode("a"), busy], [prefill("p")], only(("a", "p")), 0) == ("a", "p")
    assert choose_idle_pair(known, [], [prefill("p")], always, 0) is None
