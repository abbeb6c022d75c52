"""What the live page says of a cluster: figures from totals, letters for slots, alerts for what somebody should see."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corun.gateway.definitions import DEFINITIONS, WINDOW_S
from corun.gateway.view import View, quantile, view_of, waiting
from corun.observe.rates import History, Look
from corun.types import (
    GONE_AS_PLANNED,
    AuditStatus,
    ClusterStatus,
    Distribution,
    FreedomStatus,
    KvReads,
    ModelStatus,
    NodeInfo,
    NodeLoad,
    NodeRef,
    NodeRole,
    NodeState,
    NodeStatus,
    SlotSamples,
)

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"


def node(name: str, role: NodeRole, load: NodeLoad | None = None, **values: Any) -> NodeStatus:
    info = NodeInfo(
        ref=NodeRef(node_id=name, generation=f"{name:0>16}"),
        role=role,
        address="",
        contract_json="",
        slots=4 if role is NodeRole.DECODE else 0,
        kv_blocks=1000,
        block_size=16,
        max_model_len=512,
        vocab_size=256,
        model="m",
        engine_id=values.pop("engine_id", ""),
        freedoms=values.pop("freedoms", ()),
    )
    return NodeStatus(node=info, load=load or NodeLoad(), **{"state": NodeState.READY, **values})


def status(*nodes: NodeStatus, **values: Any) -> ClusterStatus:
    model = ModelStatus(name="qwen", max_model_len=512, max_prompt_bytes=1000)
    known = {"router_id": "r", "fingerprint": "f" * 64, "model": model, "queued_samples": 0, "max_queued_samples": 4096}
    return ClusterStatus(nodes=nodes, **{**known, "finished_samples": 0, **values})


def view(*looks: tuple[float, ClusterStatus]) -> View:
    history = History(WINDOW_S)
    for at, each in looks:
        history.add(Look(at, each))
    return view_of(history)


def test_rates_are_over_the_time_between_heartbeats() -> None:
    """The totals of a heartbeat are as old as it is."""
    before, after = (
        status(
            node("p", NodeRole.PREFILL, NodeLoad(tokens=tokens, cached_tokens=cached), last_heartbeat_ms=age),
            node("d", NodeRole.DECODE, load, last_heartbeat_ms=age),
        )
        for tokens, cached, age, load in (
            (1000, 100, 0, NodeLoad(tokens=100, rows=1000, used_rows=100, step_seconds=1.0, timed_steps=10)),
            (
                *(5000, 1100, 1000),
                NodeLoad(
                    tokens=500,
                    rows=2000,
                    used_rows=850,
                    step_seconds=1.4,
                    timed_steps=30,
                    kv_reads=KvReads(count=8, bytes=8_000_000_000),
                ),
            ),
        )
    )
    texts = view((100.0, before), (105.0, after)).texts()
    assert texts["output_rate"] == "100"
    assert texts["prompt_rate"] == "1,000"
    assert texts["cache"] == "20 %"
    assert texts["padding"] == "25 %"
    assert texts["itl"] == "20 ms"
    assert (texts["handoff"], texts["handoff note"]) == ("2 GB/s", "2 reads/s")


def test_what_is_not_known_yet_is_not_said() -> None:
    found = view((0.0, status(node("p", NodeRole.PREFILL), node("d", NodeRole.DECODE)))).texts()
    for key in ("output_rate", "prompt_rate", "itl", "cache", "padding", "handoff", "ttft"):
        assert found[key] == "\N{EN DASH}", key
    assert view((0.0, status())).alerts == (
        ("warn", "No node has joined yet. A node joins by itself once its engine has started and is certified."),
    )


def distribution(*counts: int) -> Distribution:
    return Distribution(bounds=(0.1, 1.0, 10.0), counts=counts, sum=1.0)


def test_latencies_are_those_of_the_window_or_of_all() -> None:
    first, second = (
        status(first_token_seconds=distribution(*counts), output_token_seconds=distribution(10, 0, 0, 0))
        for counts in ((90, 0, 0, 0), (90, 0, 10, 0))
    )
    texts = view((0.0, first), (5.0, second)).texts()
    assert (texts["ttft"], texts["ttft note"]) == ("5.5 s", "median, p99 9.91 s")
    assert texts["tpot"] == "50 ms", "nothing came in the window"
    again = view((0.0, second), (5.0, first)).texts()
    assert again["ttft"] == "50 ms", "counts that fall are of a router that began anew"


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [((0, 0, 0, 0), 0.5, None), ((4, 0, 0, 0), 0.5, 0.05), ((0, 2, 2, 0), 0.75, 5.5), ((0, 0, 0, 3), 0.5, 10.0)],
)
def test_quantiles(counts: tuple[int, ...], share: float, value: float | None) -> None:
    assert quantile((0.1, 1.0, 10.0), counts, share) == value


def samples(**values: Any) -> SlotSamples:
    known = {"places": (0, 2, 5), "decoding": (True, False, False), "ages_ms": (1500, 20, 3), "others": 1}
    of_ours = {"told": (0,), "request_ids": ("mine",), "sample_indices": (1,), "seeds": (2**63 - 1,)}
    return SlotSamples(**{**known, **of_ours, "num_tokens": (7,), "max_tokens": (16,), **values})


def test_slots_are_letters_and_others_are_behind() -> None:
    (card,) = view((0.0, status(node("d", NodeRole.DECODE, samples=samples())))).cards
    assert (card.cells, card.line) == ("R.ro", "r")
    assert (card.columns, card.rows()) == (2, ["R.", "ro"])
    assert card.samples == ((0, 1500, "mine", 1, "9223372036854775807", 7, 16), (2, 20), (5, 3))
    assert list(card.table()) == [
        ("0", "running", "mine #1", "7 of 16", "9223372036854775807", "1.5 s"),
    ]
    assert card.untold == 2
    (card,) = view((0.0, status(node("d", NodeRole.DECODE, samples=samples(), state=NodeState.DRAINING)))).cards
    assert (card.cells, card.line) == ("d.do", "d")
    (card,) = view((0.0, status(node("d", NodeRole.DECODE, samples=samples(others=9))))).cards
    assert (card.cells, card.line) == ("Roro", "rooooooo")


@pytest.mark.parametrize(("slots", "columns"), [(1, 1), (4, 2), (8, 4), (64, 8), (256, 16), (384, 32), (512, 32)])
def test_a_grid_is_about_a_square(slots: int, columns: int) -> None:
    one = node("d", NodeRole.DECODE)
    (card,) = view((0.0, status(replace(one, node=replace(one.node, slots=slots))))).cards
    assert card.columns == columns
    assert "".join(card.rows()) == "." * slots


def test_alerts_and_states() -> None:
    lost = {"state": NodeState.LOST, "detail": "no heartbeat for 10 s"}
    found = view(
        (
            0.0,
            status(
                node("p", NodeRole.PREFILL),
                node("d1", NodeRole.DECODE, **lost),
                node("d2", NodeRole.DECODE, state=NodeState.LOST, detail=GONE_AS_PLANNED),
                node("d3", NodeRole.DECODE, state=NodeState.REFUSED, detail="wrong bits"),
                mismatches=2,
                audit=AuditStatus(mismatched=2, last_mismatch="today"),
            ),
        )
    )
    assert found.alerts == (
        ("bad", "2 samples gave other bits when run again. Last: today."),
        ("bad", "d1 is lost: no heartbeat for 10 s. Its streams go on elsewhere."),
        ("bad", "d3 is refused: wrong bits."),
    )
    assert (found.state, found.colour) == ("no decode node is ready", "warn")
    assert [card.colour for card in found.cards] == ["good", "bad", "off", "bad"]
    assert not found.cards[1].figures, "nothing is known of a node that is lost"


def test_the_sides_of_a_colocated_node_are_together() -> None:
    nodes = (
        node("a-prefill", NodeRole.PREFILL, engine_id="a"),
        node("p", NodeRole.PREFILL),
        node("a-decode", NodeRole.DECODE, engine_id="a", freedoms=(FreedomStatus(name="rows", refused="why"),)),
    )
    found = view((0.0, status(*nodes))).cards
    assert [(card.name, card.colocated) for card in found] == [("a-prefill", True), ("a-decode", True), ("p", False)]
    assert found[1].freedoms == (("smaller steps", "why"),)


def test_the_layout_changes_with_the_nodes_alone() -> None:
    one, two = node("d", NodeRole.DECODE), node("d2", NodeRole.DECODE)
    first = view((0.0, status(one))).layout
    busy = replace(one, load=NodeLoad(used_slots=3), samples=samples(), state=NodeState.DRAINING)
    assert view((0.0, status(busy, mismatches=1))).layout == first
    assert view((0.0, status(one, two))).layout != first


def test_an_event_has_every_text_of_the_page() -> None:
    found = view((0.0, status(node("d", NodeRole.DECODE, samples=samples()), node("p", NodeRole.PREFILL))))
    event = json.loads(found.event())
    assert event["texts"] == found.texts()
    (slots,) = event["slots"].values()
    assert slots["cells"] == "R.ro"
    assert {key for key in event["texts"] if " " not in key} == {"state", *(one.key for one in found.figures)}
    assert json.loads(waiting("why").event())["alerts"] == [["warn", "why"]]


def test_every_figure_has_a_definition_whose_metrics_there_are() -> None:
    found = view((0.0, status(node("d", NodeRole.DECODE), node("p", NodeRole.PREFILL))))
    keys = {one.key for one in (*found.figures, *(one for card in found.cards for one in card.figures))}
    assert keys <= set(DEFINITIONS)
    assert set(DEFINITIONS) - keys == {"fingerprint", "generation", "certificates"}
    docs = DOCS.read_text()
    for one in DEFINITIONS.values():
        for name in one.metrics:
            short = re.sub(r"^corun_(router|prefill|decode|node)_", "", name)
            assert f"`{short}`" in docs, name
