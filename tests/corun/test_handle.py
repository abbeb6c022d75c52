"""What a KV handle is bound to, and what the name of an owner of blocks depends on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from corun.node.kv.handle import binding, bound, is_checked, names_in, owner, read_id
from corun.types import KvHandle, KvOwner, NodeRef

P0 = NodeRef(node_id="p0", generation="a" * 16)
D0 = NodeRef(node_id="d0", generation="b" * 16)
HANDLE = bound(
    KvHandle(
        prefill_node=P0,
        engine_id="p0-engine",
        request_id="r",
        block_ids=((4, 5, 6),),
        host="127.0.0.1",
        port=7000,
        tp_size=1,
        num_tokens=40,
        prompt_digest="c" * 64,
        reader=D0,
        owners=(KvOwner(request_id="q", num_blocks=1), KvOwner(request_id="r", num_blocks=2)),
        cached_tokens=16,
    )
)
BINDING = "04f8929017d5ca6ca3104b46ee9399ce62bb4db41f6e3c87ab83c21f9d38f68c"
OWNER = 0x56D080C786BDF21B
OTHERS: dict[str, dict[str, Any]] = {
    "another request": {"request_id": "s"},
    "another prefill node": {"prefill_node": replace(P0, node_id="p1")},
    "another generation of the prefill node": {"prefill_node": replace(P0, generation="f" * 16)},
    "roles swapped": {"prefill_node": D0, "reader": P0},
    "another prompt": {"prompt_digest": "d" * 64},
    "another owner": {"owners": (KvOwner(request_id="p", num_blocks=1), *HANDLE.owners[1:])},
    "owners in another order": {"owners": HANDLE.owners[::-1]},
    "an owner less": {"owners": HANDLE.owners[1:]},
    "more of an owner's blocks": {"owners": (KvOwner(request_id="q", num_blocks=2), *HANDLE.owners[1:])},
    "more cached tokens": {"cached_tokens": 32},
    "another reader": {"reader": replace(D0, node_id="d1")},
    "another generation of the reader": {"reader": replace(D0, generation="f" * 16)},
    "another engine": {"engine_id": "p1-engine"},
    "another length": {"num_tokens": 41},
    "another block": {"block_ids": ((4, 5, 7),)},
    "blocks swapped": {"block_ids": ((5, 4, 6),)},
    "a block less": {"block_ids": ((4, 5),)},
    "blocks in other groups": {"block_ids": ((4,), (5, 6))},
}


def test_a_binding_is_pinned() -> None:
    """Nodes of one cluster may run different builds."""
    assert HANDLE.binding == binding(HANDLE) == BINDING
    assert owner("r", P0) == OWNER


def test_another_handle_has_another_binding() -> None:
    for change in OTHERS.values():
        assert binding(replace(HANDLE, **change)) != HANDLE.binding, change


def test_each_prefill_of_each_life_of_a_node_is_another_owner() -> None:
    nodes = (P0, D0, replace(P0, node_id="p1"), replace(P0, generation="f" * 16))
    assert len({owner(name, node) for name in ("r", "s") for node in nodes}) == 2 * len(nodes)


def test_every_field_is_bound_or_only_says_where_and_for_which_reader() -> None:
    """A reader's name decides when KV is freed, not whose it is: that is what the blocks' owners are looked at for."""
    changed = {name for change in OTHERS.values() for name in change}
    assert {field.name for field in fields(KvHandle)} - changed == {"host", "port", "tp_size", "binding", "claim"}


def test_a_reader_is_found_although_its_name_begins_with_the_mark() -> None:
    names = ("prefill-1", "/lease-1")
    assert names_in(read_id(*names)) == names


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_no_two_splits_of_the_same_letters_agree(a: str, b: str, c: str, d: str) -> None:
    left = replace(HANDLE, request_id=a, engine_id=b)
    right = replace(HANDLE, request_id=c, engine_id=d)
    assert (binding(left) == binding(right)) == ((a, b) == (c, d))


def test_a_fraction_is_that_share_and_the_same_every_time() -> None:
    names = [f"request-{i}" for i in range(20_000)]
    none, chosen, more, all_ = ([name for name in names if is_checked(name, f)] for f in (0.0, 0.1, 0.2, 1.0))
    assert (none, all_) == ([], names)
    assert 1800 < len(chosen) < 2200
    assert chosen == [name for name in names if is_checked(name, 0.1)]
    assert set(chosen) <= set(more)
