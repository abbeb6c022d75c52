"""What a cluster does in a second, between heartbeats."""

from __future__ import annotations

from dataclasses import replace

from corun.observe.rates import History, Look, Rates, tokens
from corun.types import ClusterStatus, NodeLoad, NodeRole, NodeState, NodeStatus
from tests.corun.fake_router import healthy_status

STATUS = healthy_status()
DECODE = next(each for each in STATUS.nodes if each.node.role is NodeRole.DECODE)
OTHER = replace(DECODE, node=replace(DECODE.node, ref=replace(DECODE.node.ref, node_id="another")))


def told(node: NodeStatus, count: int, age_ms: int = 0) -> NodeStatus:
    return replace(node, load=replace(node.load, tokens=count), last_heartbeat_ms=age_ms)


def status(*nodes: NodeStatus, finished: int = 0, router: str = "r") -> ClusterStatus:
    return replace(STATUS, nodes=nodes, finished_samples=finished, router_id=router)


def rates(*looks: tuple[float, ClusterStatus]) -> Rates:
    history = History(5.0)
    for at, each in looks:
        history.add(Look(at, each))
    return history.rates()


def test_a_rate_is_one_between_heartbeats() -> None:
    found = rates((100.0, status(told(DECODE, 100), finished=4)), (105.0, status(told(DECODE, 500, 1000), finished=9)))
    assert (found.of_node(DECODE.node.ref, tokens), found.finished) == (100.0, 1.0)
    assert found.of(NodeRole.PREFILL, tokens) is None


def test_the_same_heartbeat_gives_no_rate() -> None:
    found = rates((100.0, status(told(DECODE, 100, 200))), (100.5, status(told(DECODE, 100, 700))))
    assert found.of(NodeRole.DECODE, tokens) is None


def test_a_window_has_the_last_seconds() -> None:
    history = History(10.0)
    for second in range(40):
        history.add(Look(float(second), status(told(DECODE, second**2))))
    assert (history.looks[0].at, len(history.looks)) == (29.0, 11)
    assert history.rates().of(NodeRole.DECODE, tokens) == 68.0


def test_a_node_that_joined_within_the_window_counts_from_then() -> None:
    first, then = status(told(DECODE, 0)), status(told(DECODE, 10), told(OTHER, 1000))
    found = rates((0.0, first), (1.0, then), (3.0, status(told(DECODE, 30), told(OTHER, 1040))))
    assert found.of_node(OTHER.node.ref, tokens) == 20.0
    assert found.of(NodeRole.DECODE, tokens) == 30.0
    lost = status(told(DECODE, 30), replace(told(OTHER, 1040), state=NodeState.LOST))
    assert rates((0.0, then), (2.0, lost)).of(NodeRole.DECODE, tokens) == 10.0


def test_a_node_that_registered_counts_from_its_heartbeat() -> None:
    """Until then it has no totals: they neither fall to 0 nor rise from there."""
    silent = replace(DECODE, load=NodeLoad())
    joined = rates((0.0, status(silent)), (1.0, status(told(DECODE, 5000))), (3.0, status(told(DECODE, 5040))))
    assert joined.of(NodeRole.DECODE, tokens) == 20.0
    again = [(0.0, status(told(DECODE, 5000))), (1.0, status(silent)), (4.0, status(told(DECODE, 5040)))]
    assert rates(*again[:2]).of(NodeRole.DECODE, tokens) is None
    assert rates(*again).of(NodeRole.DECODE, tokens) == 10.0
    assert rates((0.0, status(silent)), (1.0, status(silent))).of(NodeRole.DECODE, tokens) == 0.0


def test_another_router_or_another_life_of_it_or_of_a_node_begins_at_nothing() -> None:
    before = (0.0, status(told(DECODE, 0), finished=9))
    born = replace(DECODE, node=replace(DECODE.node, ref=replace(DECODE.node.ref, generation="3" * 16)))
    assert rates(before, (5.0, status(told(born, 50), finished=9))).of(NodeRole.DECODE, tokens) is None
    for now in (status(told(DECODE, 50), finished=9, router="other"), status(told(DECODE, 50), finished=8)):
        found = rates(before, (5.0, now))
        assert (found.of(NodeRole.DECODE, tokens), found.finished) == (None, None)
