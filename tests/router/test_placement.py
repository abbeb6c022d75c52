"""Which nodes a sample gets, and the estimates of their room that this follows from."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corun.types import FreedomStatus, NodeLoad, NodeRole
from decode_node.slots import NoRoomError, SlotTable
from router.nodes.node import PrefillNode
from router.placement import (
    BEGINNING,
    BESIDE,
    PREFILLS_IN_FLIGHT,
    STEPS_IN_FLIGHT,
    DecodeRoom,
    Need,
    PrefillRoom,
    SharedCount,
    beginnings_of,
    choose_idle_pair,
    choose_pair,
)
from tests.router.test_registry import info

NEED = Need(num_prompt=16, max_tokens=16)
SHARING = replace(NEED, kv_key="k")
Decode, Prefill = tuple[str, DecodeRoom], tuple[str, PrefillRoom]


def room(slots: int = 2, kv_blocks: int = 10) -> DecodeRoom:
    return DecodeRoom(slots=slots, kv_blocks=kv_blocks, block_size=16)


def alone(num_tokens: int) -> Need:
    """A sample of so many tokens that shares no block."""
    return Need(num_prompt=1, max_tokens=num_tokens - 1)


def decode(node_id: str, *, slots: int = 4, kv_blocks: int = 100, engine: str = "") -> Decode:
    return node_id, DecodeRoom(slots=slots, kv_blocks=kv_blocks, block_size=16, engine_id=engine)


def prefill(
    node_id: str, *, queued: int = 0, max_in_flight: int = 4, computed: str = "", engine: str = "", beginnings: int = 0
) -> Prefill:
    room = PrefillRoom(max_in_flight=max_in_flight, engine_id=engine)
    room.max_beginnings = beginnings
    if queued:
        room.take(queued)
    if computed:
        room.take(16, computed)
        room.give(16, computed, is_computed=True)
    return node_id, room


def always(_: str, __: str) -> bool:
    return True


def only(*pairs: tuple[str, str]) -> Callable[[str, str], bool]:
    return lambda d, p: (d, p) in pairs


def chosen(
    decodes: Iterable[Decode], prefills: Iterable[Prefill], need: Need = NEED, is_warm: Callable[..., bool] = always
) -> str:
    """The names of the pair; empty if the sample has to wait."""
    return "".join(choose_pair(need, dict(decodes), dict(prefills), is_warm) or ())


def idle(
    decodes: Iterable[Decode], prefills: Iterable[Prefill], spare: int, is_warm: Callable[..., bool] = always
) -> str:
    """The names of the pair for an audit of a sample that ran on nodes a and p."""
    return "".join(choose_idle_pair(NEED.again("a", "p"), dict(decodes), dict(prefills), is_warm, spare) or ())


P, Q = prefill("p"), prefill("q")


@pytest.mark.parametrize(
    ("decodes", "prefills", "pair"),
    [
        ([decode("a", slots=3, kv_blocks=200), decode("b")], [P], "bp"),  # The most free slots,
        ([decode("a"), decode("b", kv_blocks=200)], [P], "bp"),  # then the most free KV,
        ([decode("b"), decode("a")], [P], "ap"),  # then the first id.
        ([decode("d")], [prefill("a", queued=20), prefill("c", queued=10), prefill("b", queued=10)], "db"),
        ([decode("a", slots=0)], [P], ""),
        ([decode("a", kv_blocks=1)], [P], ""),
        ([decode("a")], [prefill("p", queued=1, max_in_flight=1)], ""),
        ([], [P], ""),
        ([decode("a")], [], ""),
    ],
)
def test_the_choice(decodes: list[Decode], prefills: list[Prefill], pair: str) -> None:
    found = {chosen(ds, ps) for ds in itertools.permutations(decodes) for ps in itertools.permutations(prefills)}
    assert found == {pair}, "the order of the nodes does not matter"


def test_a_node_that_computes_the_same_kv_comes_first_even_if_it_takes_no_other_prompt() -> None:
    one, busy = [decode("d")], prefill("p", max_in_flight=1)
    busy[1].take(16, "k")
    assert chosen(one, [busy, Q], SHARING) == "dp"
    assert chosen(one, [busy, Q], replace(NEED, kv_key="l")) == "dq"
    assert chosen(one, [busy, Q], SHARING.again()) == "dq"
    assert chosen(one, [busy, Q], SHARING, only(("d", "q"))) == "dq"
    assert chosen(one, [busy, prefill("q", computed="k")], SHARING) == "dp"


def test_a_node_that_may_still_have_the_kv_saves_its_own_prompt() -> None:
    had = prefill("q", queued=10, computed="k")
    assert chosen([decode("d")], [had, P], SHARING) == "dq"
    had[1].take(10)
    assert chosen([decode("d")], [had, P], SHARING) == "dp"


def test_a_prompt_stays_in_its_engine_unless_another_prefill_node_is_ahead_by_more_than_a_handoff() -> None:
    need = Need(num_prompt=400, max_tokens=16)
    both = [prefill("p", engine="e"), prefill("q")]
    assert chosen([decode("d")], both, need) == "dp"
    assert chosen([decode("d", engine="f")], both, need) == "dp"
    assert chosen([decode("d", engine="e")], [prefill("a"), *both], need) == "dp"
    for queued, taken in ((100, "dp"), (101, "dq")):
        assert chosen([decode("d", engine="e")], [prefill("p", queued=queued, engine="e"), Q], need) == taken


def test_a_decode_node_is_chosen_as_before_and_then_its_own_prefill_side() -> None:
    decodes = [decode("a", engine="a"), decode("b", slots=8, engine="b"), decode("c", engine="c")]
    prefills = [prefill(name, engine=name) for name in "abc"]
    assert chosen(decodes, prefills) == "bb"
    assert idle(decodes, prefills, 1) == "bb"
    assert idle([decode("x", engine="c")], prefills, 1) == "xc"


def test_a_colocated_node_with_room_for_the_prompt_decodes_it_too() -> None:
    """Another one may have more slots free, up to a quarter of its own. But its prompts fill it, and to read the KV
    there takes a step or two."""
    for taken in range(9):
        decodes = [decode("a", slots=8, engine="a"), decode("b", slots=8, engine="b")]
        prefills = [prefill("a", engine="a"), prefill("b", max_in_flight=1, queued=16, engine="b")]
        for _ in range(taken):
            dict(decodes)["a"].take(NEED)
        assert chosen(decodes, prefills) == ("aa" if taken <= 2 else "ba")


def test_a_node_that_only_decodes_is_not_left_empty_by_colocated_ones() -> None:
    """Rows of a colocated node wait for its steps of prompts; those of the other do not."""
    prefills = [prefill("a", engine="a"), prefill("b", queued=100, engine="b")]
    for engine, found in (("d", "d"), ("b", "a")):
        decodes = [decode("a", slots=8, engine="a"), decode("d", slots=8, engine=engine)]
        decodes[0][1].take(NEED)
        assert chosen(decodes, prefills)[0] == found


def test_nodes_of_one_role_are_used_before_colocated_ones_with_rows() -> None:
    """A prompt goes there even if it waits for a step's tokens more, and a row as long as a slot is free."""
    for queued, rows, found in ((BESIDE - 16, 1, "dp"), (BESIDE + 16, 1, "da"), (16, 0, "da")):
        decodes, prefills = (
            [decode("d"), decode("a", slots=8, engine="a")],
            [prefill("a", engine="a"), prefill("p", queued=queued)],
        )
        for _ in range(rows):
            decodes[1][1].take(NEED)
        assert chosen(decodes, prefills) == found
    full = decode("d", slots=8)
    for _ in range(8):
        full[1].take(NEED)
    assert chosen([full, decode("a", slots=8, engine="a")], [prefill("a", engine="a")]) == "aa"
    assert chosen([full], [prefill("a", engine="a")]) == "da", "in line, if there is no other"


@pytest.mark.parametrize(
    ("need", "nodes"),
    [(Need(num_prompt=16, max_tokens=17), "ddd" + "cdcdcdcdcd" + "ccc"), (NEED, "d" * 8 + "c" * 8)],
)
def test_a_decode_node_decodes_long_outputs_not_alone(need: Need, nodes: str) -> None:
    """It is ahead by a quarter of the colocated node's slots, and not until it is full, as with long prompts."""
    one, both = decode("d", slots=8), decode("c", slots=8, engine="c")
    prompts, found = [prefill("p"), prefill("c", engine="c")], ""
    for _ in nodes:
        found += chosen([one, both], prompts, need)[0]
        {"d": one, "c": both}[found[-1]][1].take(need)
    assert found == nodes


def test_between_colocated_nodes_alone_rows_count_for_nothing() -> None:
    """What one has in its prefix cache would not be found if a prompt were kept away from rows."""
    decodes = [decode("a", slots=8, engine="a"), decode("b", slots=8, engine="b")]
    decodes[0][1].take(NEED)
    assert chosen(decodes, [prefill("a", engine="a"), prefill("b", queued=16, engine="b")]) == "aa"


def test_a_node_without_room_for_the_sample_is_no_reason_to_leave_the_one_with_the_most() -> None:
    """Others' samples fill its KV, so it would be asked in vain."""
    full = decode("a", slots=8, kv_blocks=2, engine="a")
    full[1].report(NodeLoad(leases=1, used_kv_blocks=2))
    assert full[1].may_ask(NEED)
    assert full[1].free_slots == 7
    prefills = [prefill("a", engine="a"), prefill("b", queued=100, engine="b")]
    assert chosen([full, decode("b", slots=8, engine="b")], prefills)[0] == "b"


def test_samples_of_one_prompt_do_not_fill_one_colocated_node() -> None:
    decodes = dict(decode(name, slots=64, engine=name) for name in "abcd")
    prefills = dict(prefill(name, max_in_flight=100, engine=name) for name in "abcd")
    prefills["a"].take(16, "k")
    for _ in range(64):
        found, _ = choose_pair(SHARING, decodes, prefills, always) or ("", "")
        decodes[found].take(SHARING)
    used = sorted(64 - room.free_slots for room in decodes.values())
    assert used[-1] - used[0] <= 64 // 4 + 1


def test_a_node_that_failed_the_sample_takes_the_other_side_of_its_engine_with_it() -> None:
    decodes, prefills = [decode("a", slots=8, engine="e"), decode("b")], [prefill("p", engine="e"), Q]
    assert chosen(decodes, prefills, NEED.again("a")) == "bq"
    assert chosen(decodes, prefills, NEED.again("p")) == "bq"
    assert chosen(decodes[:1], prefills[:1], NEED.again("p")) == "ap"
    for failed in ("a", "p"):
        found = choose_idle_pair(NEED.again(failed), dict(decodes), dict(prefills), always, 1)
        assert found == ("b", "q")


def begun(scope: str, *numbers: int) -> Need:
    """The need of a prompt with a token more than a beginning for each number."""
    prompt = [number for number in numbers for _ in range(BEGINNING)] + [0]
    return Need(num_prompt=len(prompt), max_tokens=16, beginnings=beginnings_of(prompt, scope))


def test_a_prompt_goes_where_its_beginning_is_if_that_saves_more_than_the_way_there() -> None:
    had, need = prefill("q", beginnings=10), begun("a", 1, 2, 3)
    assert len(need.beginnings) == 3
    had[1].take(need.num_prompt)
    had[1].give(need.num_prompt, beginnings=need.beginnings)  # It was not computed.
    assert had[1].cached_tokens(need) == 0
    had[1].take(need.num_prompt)
    had[1].give(need.num_prompt, is_computed=True, beginnings=need.beginnings)
    known = [begun("a", 1, 2, 3), begun("a", 1, 2, 3, 4), begun("a", 1, 2, 9), begun("a", 9, 2, 3), begun("b", 1, 2, 3)]
    assert [had[1].cached_tokens(other) // BEGINNING for other in known] == [3, 3, 2, 0, 0]
    assert [chosen([decode("d")], [P, had], other)[1] for other in known] == ["q", "q", "q", "p", "p"]
    assert chosen([decode("d", engine="e")], [prefill("p", engine="e"), had], begun("a", 1, 2, 9)) == "dq"
    had[1].take(2 * BEGINNING + 1)
    assert chosen([decode("d")], [P, had], begun("a", 1, 2, 9)) == "dp"


def test_beginnings_are_those_of_the_tokens_and_the_scope_alone() -> None:
    assert beginnings_of(range(BEGINNING - 1), "a") == ()
    assert beginnings_of(range(3 * BEGINNING + 5), "a")[:2] == beginnings_of(range(2 * BEGINNING), "a")
    assert beginnings_of(range(BEGINNING), "a") != beginnings_of(range(BEGINNING), "b")
    assert beginnings_of(range(BEGINNING), "") == ()
    assert NEED.again("x").beginnings == ()
    need = begun("a", 1)
    assert (need.again("x").beginnings, need.again("x", shares=True).beginnings) == ((), need.beginnings)


def test_a_node_remembers_as_many_beginnings_as_it_has_room_for_and_the_shorter_ones_for_longer() -> None:
    _, room = prefill("p", beginnings=4)
    for numbers in ((1, 2, 3), (4, 5)):
        need = begun("a", *numbers)
        room.take(need.num_prompt)
        room.give(need.num_prompt, is_computed=True, beginnings=need.beginnings)
    assert [room.cached_tokens(begun("a", *n)) // BEGINNING for n in ((1, 2, 3), (4, 5))] == [2, 2]
    room.max_beginnings = 0  # It has lost the freedom that beginnings need.
    assert room.cached_tokens(begun("a", 4, 5)) == 0


def test_only_warm_pairs_are_used() -> None:
    decodes = [decode("a"), decode("b")]
    assert chosen(decodes, [P, Q], NEED, only(("b", "q"))) == "bq"
    assert chosen(decodes, [P, Q], NEED, only()) == ""


def test_nodes_that_failed_the_sample_come_last_but_are_taken() -> None:
    decodes, prefills, again = [decode("a", slots=8), decode("b")], [P, prefill("q", queued=5)], NEED.again("a", "p")
    assert chosen(decodes, prefills, again) == "bq"
    assert chosen(decodes[:1], prefills[:1], again) == "ap"


def test_idle_pairs_are_other_nodes_with_slots_to_spare_and_nothing_to_prefill() -> None:
    decodes, prefills = [decode("a", slots=8), decode("b"), decode("c")], [P, Q, prefill("r")]
    assert idle(decodes, prefills, 2) == "bq"
    assert idle(decodes, prefills, 2, only(("c", "r"), ("a", "p"))) == "cr"
    assert idle(decodes, [P, prefill("q", queued=1)], 2) == ""
    assert idle([decodes[0], decode("b", slots=0)], prefills, 2) == "aq"


def test_a_node_of_the_first_run_is_taken_only_where_no_other_could_ever_do() -> None:
    assert idle([decode("a"), decode("b", kv_blocks=1)], [P], 0) == "ap"
    busy = decode("b")
    for _ in range(4):
        busy[1].take(alone(16))
    assert idle([decode("a"), busy], [P], 0) == ""
    assert idle([decode("a"), busy], [P], 0, only(("a", "p"))) == "ap"
    assert idle([], [P], 0) == ""


def free(decode: DecodeRoom) -> tuple[int, int]:
    return decode.free_slots, decode.free_blocks


def test_a_sample_needs_a_slot_and_its_whole_kv() -> None:
    decode = room()
    assert [(decode.has_room(alone(n)), decode.could_hold(n)) for n in (160, 161)] == [(True, True), (False, False)]
    decode.take(alone(96))
    assert [decode.has_room(alone(n)) for n in (64, 65)] == [True, False]
    decode.take(alone(16))
    assert free(decode) == (0, 3)
    assert not decode.has_room(alone(1))
    decode.give(alone(96))
    assert decode.has_room(alone(144))


def test_a_slot_counts_as_free_where_nodes_are_compared_if_its_sample_ends_soon() -> None:
    nodes = {name: room(2) for name in "ab"}
    for decode in nodes.values():
        decode.take(alone(16))
    nodes["b"].note_ending()
    assert [(each.free_slots, each.soon_free) for each in nodes.values()] == [(1, 1), (1, 2)]
    prefills = {"p": PrefillRoom(max_in_flight=9)}
    assert choose_pair(alone(16), nodes, prefills, always) == ("b", "p")
    nodes["b"].give(alone(16), was_ending=True)
    nodes["b"].take(alone(16))
    assert choose_pair(alone(16), nodes, prefills, always) == ("a", "p")
    nodes["b"].note_ending()
    nodes["b"].refuse(alone(16), nodes["b"].take(alone(16)))
    assert nodes["b"].soon_free == 0, "it is closed"


def test_a_sample_waits_for_no_slot_that_is_free_soon_while_another_is_free_now() -> None:
    """All samples on `a` have few tokens left, and there is a place in line."""
    nodes = {name: room(4) for name in "ab"}
    for _ in range(4):
        nodes["a"].take(alone(16))
        nodes["a"].note_ending()
    for _ in range(2):
        nodes["b"].take(alone(16))
    prefills = {"p": PrefillRoom(max_in_flight=9)}
    assert [(each.free_slots, each.soon_free) for each in nodes.values()] == [(0, 4), (2, 2)]
    assert choose_pair(alone(16), nodes, prefills, always) == ("b", "p")
    for _ in range(2):
        nodes["b"].take(alone(16))
    assert choose_pair(alone(16), nodes, prefills, always) == ("a", "p")


def test_a_refusal_closes_the_node_until_something_changes_and_was_never_ours() -> None:
    decode = room()
    decode.take(alone(16))
    decode.refuse(alone(16), decode.take(alone(16)))
    assert free(decode) == (0, 0)
    decode.give(alone(16))
    assert free(decode) == (2, 10)
    decode.refuse(alone(16), decode.take(alone(16)))
    decode.report(NodeLoad(leases=1, used_kv_blocks=1))  # Perhaps our own of a moment ago.
    assert free(decode) == (2, 10)
    decode = room(4, 100)
    decode.report(NodeLoad(leases=3, used_kv_blocks=8))
    decode.refuse(alone(32), decode.take(alone(32)))
    decode.report(NodeLoad(leases=4, used_kv_blocks=8))
    assert decode.free_slots == 0


def test_where_others_hold_room_a_router_asks_once_after_each_report() -> None:
    """The refusal tells the node that it waits, and then the others get no more than their part."""
    decode, own = room(1), room(1)
    for _ in range(2):
        own.take(alone(16))
    assert not own.may_ask(alone(16)), "nobody else holds any"
    for _ in range(2):
        decode.report(NodeLoad(leases=2, used_kv_blocks=2))
        assert not decode.has_room(alone(16))
        assert [decode.may_ask(alone(n)) for n in (16, 160, 161)] == [True, True, False]
        decode.take(alone(16))
        assert not decode.may_ask(alone(16)), "all that wait would ask before the first is refused"
        decode.give(alone(16))
        assert not decode.may_ask(alone(16))
        decode.refuse(alone(16), decode.take(alone(16)))
        assert not decode.may_ask(alone(16))


def test_a_node_that_others_fill_is_asked_only_where_no_other_has_room() -> None:
    """Its slots are free, but not its KV. A refusal there would keep the others from it for nothing."""
    full, other, colocated = decode("a", slots=8), decode("b", slots=2), decode("c", slots=2, engine="e")
    full[1].report(NodeLoad(leases=1, used_kv_blocks=100))
    assert chosen([full, other], [P]) == "bp"
    assert chosen([full, colocated], [P, prefill("q", engine="e")]) == "cq"
    assert chosen([full, other], [P], is_warm=only(("a", "p"))) == "ap"


def test_samples_of_a_prompt_count_its_blocks_once_while_one_of_them_lives() -> None:
    """A prompt of 48 tokens has two blocks before its last position, and each sample two of its own."""
    decode, sample = room(8), Need(num_prompt=48, max_tokens=16, kv_key="k")
    for left in (6, 4, 2, 0):
        assert decode.has_room(sample)
        assert decode.has_room(replace(sample, kv_key="l")) == (left > 0), "another prompt needs all four"
        decode.take(sample)
        assert decode.free_blocks == left
    assert not decode.has_room(sample)
    for left in (2, 4, 6, 10):
        decode.give(sample)
        assert decode.free_blocks == left


def test_what_the_first_sample_of_a_prompt_was_refused_stays_with_the_second() -> None:
    decode, sample = room(8), Need(num_prompt=48, max_tokens=16, kv_key="k")
    raised = decode.take(sample)
    decode.take(sample)
    decode.refuse(sample, raised)
    decode.report(NodeLoad(leases=1, used_kv_blocks=4))
    assert free(decode) == (7, 6)
    decode.give(sample)
    decode.report(NodeLoad())
    assert free(decode) == (8, 10)


SAMPLES = st.builds(
    Need, num_prompt=st.sampled_from([1, 16, 33, 48]), max_tokens=st.integers(1, 40), kv_key=st.sampled_from(["", "k"])
)


@given(st.lists(SAMPLES | st.integers(0, 30), max_size=60))
def test_a_router_that_is_alone_knows_what_its_node_grants(trace: list[Need | int]) -> None:
    """Samples that come, and the n-th of those that run, which ends."""
    decode, node = room(8, 30), SlotTable(slots=8, kv_blocks=30, block_size=16)
    running: list[tuple[Need, int]] = []
    for op in trace:
        if isinstance(op, int):
            if op < len(running):
                sample, lease_id = running.pop(op)
                node.release(lease_id)
                decode.give(sample)
        elif decode.has_room(op):
            decode.take(op)
            running.append((op, node.reserve("r", op.num_prompt, op.max_tokens, share_key=op.kv_key).lease_id))
        else:
            with pytest.raises(NoRoomError):
                node.reserve("r", op.num_prompt, op.max_tokens, share_key=op.kv_key)
        assert 30 - decode.free_blocks == node.used_kv_blocks


def test_slots_of_other_routers_count_and_ours_only_once() -> None:
    decode = room(4)
    decode.take(alone(16))
    decode.report(NodeLoad(leases=3, used_kv_blocks=3))
    assert free(decode) == (1, 7)
    decode.report(NodeLoad())
    assert free(decode) == (3, 9), "an empty report does not free our leases"
    for _ in range(3):
        decode.take(alone(16))
    for _ in range(4):
        decode.give(alone(16))
    decode.report(NodeLoad(leases=4, used_kv_blocks=4))  # Sampled before they ended.
    assert decode.free_slots == 4


@given(st.integers(0, 9), st.lists(st.lists(st.integers(1, 2), max_size=5), max_size=12))
def test_the_beginnings_that_a_node_remembers_have_no_gaps(most: int, prompts: list[list[int]]) -> None:
    _, room = prefill("p", beginnings=most)
    needs = [begun("a", *numbers) for numbers in prompts]
    for need in needs:
        room.take(need.num_prompt)
        room.give(need.num_prompt, is_computed=True, beginnings=need.beginnings)
        assert room.cached_tokens(need) == BEGINNING * min(most, len(need.beginnings))
        assert len(room._beginnings) <= most
    for need in needs:
        known = [beginning in room._beginnings for beginning in need.beginnings]
        assert known == sorted(known, reverse=True)


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "report"]), st.integers(1, 5)), max_size=50))
def test_counts_never_go_below_zero_or_lose_own_claims(steps: list[tuple[str, int]]) -> None:
    count, held = SharedCount(), []
    for action, amount in steps:
        if action == "take":
            held.append(amount)
            count.take(amount)
        elif action == "give" and held:
            count.give(held.pop())
        elif action == "report":
            count.report(amount)
        assert count.own == sum(held)
        assert count.foreign >= 0
        assert count.used >= sum(held)


def test_spare_slots_are_all_but_one_where_there_are_fewer() -> None:
    decode = room(6, 100)
    decode.take(alone(16))
    assert decode.has_idle_room(alone(16), 4)
    decode.take(alone(16))
    assert decode.keeps_free(4)
    assert not decode.has_idle_room(alone(16), 4)
    decode.report(NodeLoad(leases=3))  # Another router came.
    assert not decode.keeps_free(4)
    single = room(1, 2)
    assert [single.has_idle_room(alone(n), 4) for n in (32, 33)] == [True, False]
    single.take(alone(16))
    assert single.keeps_free(4)
    assert not single.has_idle_room(alone(16), 4)


def test_a_node_gives_places_in_line_beyond_its_slots_but_idle_runs_leave_them_alone() -> None:
    decode = room(8, 100)
    for taken in range(10):
        assert decode.has_room(alone(16))
        assert decode.free_slots == 8 - taken
        assert decode.keeps_free(0) == (taken <= 8), "from the first sample in line on, idle runs are in the way"
        assert decode.has_idle_room(alone(16), 0) == (taken < 8)
        decode.take(alone(16))
    assert not decode.has_room(alone(16))
    decode.give(alone(16))
    assert (decode.has_room(alone(16)), decode.free_slots) == (True, -1)
    decode.refuse(alone(16), decode.take(alone(16)))
    assert (decode.has_room(alone(16)), decode.free_slots) == (False, -1)


def test_samples_that_get_the_kv_of_one_computation_count_once() -> None:
    prefill = PrefillRoom(max_in_flight=1)
    for _ in range(3):
        assert prefill.has_room(100, "a")
        prefill.take(100, "a")
    assert prefill.queued_tokens == 100
    assert not prefill.has_room(1, "b")
    assert not prefill.has_room(1)
    for _ in range(2):
        prefill.give(100, "a")
    assert prefill.queued_tokens == 100
    assert not prefill.may_have("a")
    prefill.give(100, "a", is_computed=True)
    assert prefill.is_idle
    assert prefill.may_have("a")
    assert not prefill.computes("a")
    prefill.take(100)
    assert not prefill.may_have("")
    assert not prefill.has_room(1, "a")


def test_a_prefill_node_takes_a_bounded_number_of_prompts() -> None:
    prefill = PrefillRoom(max_in_flight=2)
    prefill.take(100)
    assert prefill.has_room(10_000)
    prefill.take(50)
    assert not prefill.has_room(1)
    assert prefill.queued_tokens == 150
    prefill.give(100)
    prefill.report(NodeLoad(queued_prompt_tokens=1150))
    assert prefill.has_room(1)
    assert prefill.queued_tokens == 50 + 1000


def test_a_node_that_packs_takes_more_prompts_while_they_are_short() -> None:
    prefill = PrefillRoom(max_in_flight=2, max_tokens=100)
    for _ in range(2):
        assert prefill.has_room(10_000)
        prefill.take(40)
    assert [prefill.has_room(n) for n in (20, 21)] == [True, False]
    prefill.take(20)
    assert not prefill.has_room(1)
    prefill.report(NodeLoad(queued_prompt_tokens=500))  # Other routers have prompts there, too: each has its own part.
    prefill.give(20)
    assert prefill.has_room(20)


def time_of(room: PrefillRoom, num_tokens: int, *, packs: bool) -> tuple[float, int]:
    """Let a router send 1000 prompts to a node while there is room; return the seconds that they take, and the most of
    them that were at the node without being computed.

    A step takes 5 ms and 1 ms for 45 tokens (as measured: 128 tokens alone 16,000 a second, 2048 tokens 40,500). A
    prompt needs 1 ms to the node, and an answer 1 ms back.
    """
    events = [(0.0, "room", 0)]  # The time, what happens, and with how many prompts.
    sent = here = computed = done = most_waiting = 0
    while done < 1000:
        now, what, number = heapq.heappop(events)
        here += number if what == "arrive" else 0
        computed -= number if what == "end" else 0
        if what == "end":
            heapq.heappush(events, (now + 0.001, "room", number))
        if what == "room":
            done += number
            for _ in range(number):
                room.give(num_tokens)
            while sent < 1000 and room.has_room(num_tokens):
                room.take(num_tokens)
                sent += 1
                heapq.heappush(events, (now + 0.001, "arrive", 1))
        if events and events[0][0] == now:
            continue  # All that happens at one time comes before the next step.
        if here and not computed:
            computed = min(here, max(1, 4096 // num_tokens), 64) if packs else 1
            here -= computed
            heapq.heappush(events, (now + 0.005 + computed * num_tokens / 45_000, "end", computed))
        most_waiting = max(most_waiting, here)
    return now, most_waiting


@pytest.mark.parametrize("num_tokens", [32, 128, 700, 2048])
def test_prompts_in_flight_keep_a_node_busy_and_no_more(num_tokens: int) -> None:
    """Where prompts are packed, a few in flight leave steps short. Where they are not, more of them only wait."""
    few = {"max_in_flight": PREFILLS_IN_FLIGHT, "max_tokens": 0}
    many = {"max_in_flight": PREFILLS_IN_FLIGHT, "max_tokens": STEPS_IN_FLIGHT * 4096}
    best, _ = time_of(PrefillRoom(max_in_flight=1000), num_tokens, packs=True)
    packed, _ = time_of(PrefillRoom(**many), num_tokens, packs=True)
    assert packed < 1.04 * best
    if num_tokens <= 128:
        assert time_of(PrefillRoom(**few), num_tokens, packs=True)[0] > 1.3 * best
    best, _ = time_of(PrefillRoom(max_in_flight=1000), num_tokens, packs=False)
    alone, waiting = time_of(PrefillRoom(**few), num_tokens, packs=False)
    assert alone < 1.01 * best
    assert waiting == PREFILLS_IN_FLIGHT - 1
    assert time_of(PrefillRoom(**many), num_tokens, packs=False)[1] == max(4, STEPS_IN_FLIGHT * 4096 // num_tokens) - 1


BESIDE_ROWS, CHUNK = 8192 - 256, 2048
"""The most prompt tokens of a colocated node's step, and those of one prompt in it."""


def steps_beside_rows(room: PrefillRoom, num_tokens: int) -> int:
    """Let a router send 400 prompts to a colocated node that always has rows; return the steps that they take.

    A step is chosen when the one before begins. Then the router hears of the step that has just ended, and what it
    sends is there when the next one is chosen.
    """
    line: list[int] = []
    sent = steps = ended = running = 0  # How many prompts end in the last step, and in the one that begins.
    while sent < 400 or line or running:
        ending, left = 0, BESIDE_ROWS
        for place, tokens in enumerate(line):
            given = min(CHUNK, tokens, left)
            line[place], left, ending = tokens - given, left - given, ending + (given == tokens)
        line = [tokens for tokens in line if tokens]
        for _ in range(ended):
            room.give(num_tokens)
        while sent < 400 and room.has_room(num_tokens):
            room.take(num_tokens)
            line.append(num_tokens)
            sent += 1
        steps, ended, running = steps + 1, running, ending
    return steps


@pytest.mark.parametrize("num_tokens", [128, 512, 2048, 4096])
def test_a_colocated_node_has_the_prompts_of_its_next_step_before_the_router_hears_of_the_last(num_tokens: int) -> None:
    best = steps_beside_rows(PrefillRoom(max_in_flight=1000), num_tokens)
    many = PrefillRoom(max_in_flight=PREFILLS_IN_FLIGHT, max_tokens=STEPS_IN_FLIGHT * 8192)
    assert steps_beside_rows(many, num_tokens) < 1.02 * best
    two_steps = PrefillRoom(max_in_flight=PREFILLS_IN_FLIGHT, max_tokens=2 * 8192)
    assert steps_beside_rows(two_steps, num_tokens) > 1.3 * best


@pytest.mark.parametrize(
    ("freedoms", "packs"),
    [
        ((), False),
        ((FreedomStatus(name="packed"), FreedomStatus(name="chunks")), True),
        ((FreedomStatus(name="packed", refused="why"), FreedomStatus(name="chunks", refused="why")), False),
    ],
)
def test_a_router_knows_from_a_node_whether_it_packs_and_cuts(
    model: str, freedoms: tuple[FreedomStatus, ...], packs: bool
) -> None:
    told = replace(info(model, "p1", NodeRole.PREFILL), freedoms=freedoms, engine_id="e", kv_blocks=64, step_tokens=9)
    client: Any = None
    room = PrefillNode(told, client, 0.0).room
    for _ in range(PREFILLS_IN_FLIGHT):
        room.take(3)
    assert room.has_room(3) is packs
    steps = STEPS_IN_FLIGHT if packs else 0
    assert room.max_tokens == steps * 9
    assert PrefillNode(replace(told, step_tokens=0), client, 0.0).room.max_tokens == steps * 4096
    assert room.max_beginnings == (64 * 16 // BEGINNING if packs else 0)
    assert room.engine_id == "e"
