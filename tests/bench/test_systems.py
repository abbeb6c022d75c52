from __future__ import annotations

import pytest

from corun.errors import InvalidArgumentError
from corun_bench.systems import KINDS, Machine, NodeCounts, Places, System, parse_systems

CPU = Machine(model="m", cores=(0, 1, 2, 3))
ONE = Machine(model="m", gpus=(5,))
TWO = Machine(model="m", gpus=(2, 3))
FOUR = Machine(model="m", gpus=(0, 1, 2, 3))


def test_all_kinds_have_a_name_and_a_meaning() -> None:
    first, second, *others = KINDS
    assert [system.kind for system in parse_systems([f"{first},{second}", ",".join(others)])] == list(KINDS)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("stock", "must be one of std"),
        ("std:shared", "must be shared or XpYd"),
        ("cluster:2x1", "must be shared or XpYd"),
        ("cluster:1p1d:many", "must end in a number of slots"),
        ("cluster:1p1d:" + "9" * 5000, "must end in a number of slots"),  # Python reads no endless numbers.
        ("pd-std:colocated", "must be without colocated nodes"),
        ("pd-std:1p1d1c", "must be without colocated nodes"),
        ("colocated:colocated", "must be shared or XpYd"),
        ("std,std", "only once"),
        ("", "at least one"),
        ("cluster:0p1d", "must have a node for prefill and one for decode"),
        ("cluster:1p0d", "must have a node for prefill and one for decode"),
        ("cluster:0p0d0c", "must have a node for prefill and one for decode"),
        ("cluster:2p1d", "must leave a GPU to each engine; there are 2 places"),
        ("pd-std:2p2d", "must leave a GPU to each engine; there are 2 places"),
        ("cluster:1p1d1c", "must leave a GPU to each engine; there are 2 places"),
        ("cluster+own-length:0p1d", "must have a node for prefill and one for decode"),
    ],
)
def test_systems_that_are_none_or_have_no_room_are_refused(name: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError, match=limit):
        parse_systems([name])[0].places(TWO)


@pytest.mark.parametrize("text", ["", "1p", "2d", "1x", "p1d", "0p0d", "1d1p"])
def test_no_placement(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="placements"):
        NodeCounts.parse(text)


def test_placements() -> None:
    assert NodeCounts.parse("2p1d3c") == NodeCounts(prefill=2, decode=1, colocated=3)
    assert NodeCounts.parse("2p1d3c").name == "2p1d3c"
    assert NodeCounts.parse("0p0d1c").name == "1c"


@pytest.mark.parametrize("name", ["bi", "cluster+own-length:colocated"])
def test_systems_that_need_a_gpu_say_so(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a GPU: "):
        System.parse(name).places(CPU)


@pytest.mark.parametrize(
    ("name", "machine", "places"),
    [
        ("std", TWO, ((0, 1), (0, 1))),
        ("cluster", CPU, ((0,), (0,))),
        ("cluster", ONE, ((0,), (0,))),
        ("cluster", TWO, ((0,), (1,))),
        ("cluster", FOUR, ((0, 1), (2, 3))),
        ("cluster:1p3d", FOUR, ((0,), (1, 2, 3))),
        ("cluster:2p1d", CPU, ((0, 0), (0,))),
        ("cluster:shared", TWO, ((0, 1), (0, 1))),
        ("pd-std:1p1d:512", FOUR, ((0,), (1,))),
        ("cluster:colocated", CPU, ((), (), (0,))),
        ("cluster:colocated", TWO, ((), (), (0, 1))),
        ("cluster:0p0d1c", ONE, ((), (), (0,))),
        ("cluster:1p1d1c", FOUR, ((0,), (1,), (2,))),
        ("cluster:1d1c", FOUR, ((), (0,), (1,))),
        ("cluster+own-length:colocated", TWO, ((), (), (0, 1))),
        ("cluster:1p0d2c:512", FOUR, ((0,), (), (1, 2))),
    ],
)
def test_places(name: str, machine: Machine, places: tuple[tuple[int, ...], ...]) -> None:
    assert System.parse(name).places(machine) == Places(*places)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("bi", [("both", (2,), 0.84), ("both", (3,), 0.84)]),
        # Engines on one GPU share its memory, and start prefill first.
        (
            "pd-std:shared",
            [("prefill", (2,), 0.42), ("prefill", (3,), 0.42), ("decode", (2,), 0.42), ("decode", (3,), 0.42)],
        ),
    ],
)
def test_engines_get_gpus_and_their_share_of_memory(name: str, engines: list[tuple[str, tuple[int], float]]) -> None:
    found = System.parse(name).engines(TWO)
    assert [(one.role, one.gpus, one.gpu_memory_utilization) for one in found] == engines


def test_engines_get_cores_slots_and_groups() -> None:
    assert [one.cores for one in System.parse("pd-std").engines(CPU)] == [(2, 3), (0, 1)]
    assert [one.cores for one in System.parse("std").engines(CPU)] == [(0, 1, 2, 3)]
    assert System.parse("cluster:1p1d:512").slots_on(TWO) == 512
    assert System.parse("colocated::64").engines(ONE)[0].slots == 64
    stock = [System.parse(name).engines(ONE)[0].slots for name in ("std", "std::512", "pd-std", "pd-std::64", "bi::8")]
    assert stock == [0, 512, 0, 64, 8], "0: vLLM's own default"
    assert [System.parse(name).engines(CPU)[0].slots for name in ("std", "std::512")] == [CPU.slots, 512]
    assert System.parse("cluster").slots_on(TWO) == TWO.slots
    assert System.parse("cluster:shared").gpus(TWO) == {"prefill": 2, "decode": 2, "total": 2}
    assert System.parse("cluster:1p1d").gpus(TWO) == {"prefill": 1, "decode": 1, "total": 2}
    assert System.parse("cluster:1p1d1c").gpus(FOUR) == {"prefill": 2, "decode": 2, "total": 3}
    assert System.parse("cluster:colocated").gpus(TWO) == {"prefill": 2, "decode": 2, "total": 2}
    pairs = Machine(model="m", gpus=(0, 1, 2, 3), tensor_parallel_size=2)
    assert [one.gpus for one in System.parse("pd-std").engines(pairs)] == [(0, 1), (2, 3)]
    assert System.parse("pd-std").gpus(pairs) == {"prefill": 2, "decode": 2, "total": 4}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("std", {"engines": [(0,), (1,), (2,), (3,)]}),
        ("cluster:1p1d", {"prefill": [(0,)], "decode": [(1,)]}),
        ("cluster:1p1d2c", {"prefill": [(0,)], "decode": [(1,)], "colocated": [(2,), (3,)]}),
        ("cluster:0p0d1c", {"colocated": [(0,)]}),
    ],
)
def test_a_result_says_where_the_engines_were(name: str, places: dict[str, list[tuple[int, ...]]]) -> None:
    system = System.parse(name)
    assert system.describe(FOUR) == {"what": KINDS[system.kind], **places}
