from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from corun.types import NodeLoad
from router.placement import DecodeRoom, PrefillRoom, SharedCount


def room(slots: int = 2, kv_blocks: int = 10, block_size: int = 16) -> DecodeRoom:
    return DecodeRoom(slots=slots, kv_blocks=kv_blocks, block_size=block_size)


def test_blocks_are_rounded_up() -> None:
    assert [room().blocks(n) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]


def test_a_sample_needs_a_slot_and_its_whole_kv() -> None:
    decode = room()
    assert decode.has_room(160)
    assert not decode.has_room(161)
    assert decode.could_hold(160)
    assert not decode.could_hold(161)
    decode.take(96)
    assert decode.has_room(64)
    assert not decode.has_room(65)
    decode.take(16)
    assert (decode.free_slots, decode.free_blocks) == (0, 3)
    assert not decode.has_room(1)
    decode.give(96)
    assert decode.has_room(144)


def test_a_refusal_closes_the_node_until_something_changes() -> None:
    decode = room()
    decode.take(16)
    decode.refuse(16, decode.take(16))
    assert (decode.free_slots, decode.free_blocks) == (0, 0)
    decode.give(16)
    assert (decode.free_slots, decode.free_blocks) == (2, 10)
    decode.refuse(16, decode.take(16))
    decode.report(NodeLoad(used_slots=1, used_kv_blocks=1))  # Perhaps our own of a moment ago.
    assert (decode.free_slots, decode.free_blocks) == (2, 10)


def test_slots_of_other_routers_count() -> None:
    decode = room(slots=4)
    decode.take(16)
    decode.report(NodeLoad(used_slots=3, used_kv_blocks=3))
    assert (decode.free_slots, decode.free_blocks) == (1, 7)
    decode.report(NodeLoad(used_slots=1, used_kv_blocks=1))
    assert (decode.free_slots, decode.free_blocks) == (3, 9)


def test_an_old_report_does_not_count_our_ended_leases_as_foreign() -> None:
    decode = room(slots=4)
    for _ in range(4):
        decode.take(16)
    for _ in range(4):
        decode.give(16)
    decode.report(NodeLoad(used_slots=4, used_kv_blocks=4))  # Sampled before they ended.
    assert decode.free_slots == 4


def test_an_empty_report_does_not_free_our_leases() -> None:
    decode = room()
    decode.take(16)
    decode.report(NodeLoad())
    assert decode.free_slots == 1


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
    decode = DecodeRoom(slots=6, kv_blocks=100, block_size=16)
    decode.take(16)
    assert decode.has_idle_room(16, 4)
    decode.take(16)
    assert decode.keeps_free(4)
    assert not decode.has_idle_room(16, 4)
    decode.report(NodeLoad(used_slots=3))  # Another router came.
    assert not decode.keeps_free(4)
    single = DecodeRoom(slots=1, kv_blocks=2, block_size=16)
    assert single.has_idle_room(32, 4)
    assert not single.has_idle_room(33, 4)
    single.take(16)
    assert single.keeps_free(4)
    assert not single.has_idle_room(16, 4)


def test_samples_that_get_the_kv_of_one_computation_count_once() -> None:
    prefill = PrefillRoom(max_in_flight=1)
    for _ in range(3):
        assert prefill.has_room("a")
        prefill.take(100, "a")
    assert prefill.queued_tokens == 100
    assert not prefill.has_room("b")
    assert not prefill.has_room()
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
    assert not prefill.has_room("a")


def test_a_prefill_node_takes_a_bounded_number_of_prompts() -> None:
    prefill = PrefillRoom(max_in_flight=2)
    prefill.take(100)
    assert prefill.has_room()
    prefill.take(50)
    assert not prefill.has_room()
    assert prefill.queued_tokens == 150
    prefill.give(100)
    prefill.report(NodeLoad(queued_prompt_tokens=1150))
    assert prefill.has_room()
    assert prefill.queued_tokens == 50 + 1000


def test_what_was_refused_was_never_ours() -> None:
    decode = DecodeRoom(slots=4, kv_blocks=100, block_size=16)
    decode.report(NodeLoad(used_slots=3, used_kv_blocks=8))
    decode.refuse(32, decode.take(32))
    decode.report(NodeLoad(used_slots=4, used_kv_blocks=8))
    assert decode.free_slots == 0
