"""What becomes of requests to scale."""

from __future__ import annotations

from collections.abc import Collection

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.launch.changes import Changes
from corun.launch.control import Outcome, Request
from corun.launch.members import ProcessSpec, members
from corun.launch.supervisor import ProcessState, ProcessStatus


def cluster(prefill: int = 1, decode: int = 1) -> tuple[ProcessSpec, ...]:
    pool = PoolSpec(common={"model": "m"}, replicas={"prefill": prefill, "decode": decode})
    return members(ClusterSpec(pools=(pool,)))


def request(number: int, **counts: int) -> Request:
    return Request(number=number, pool="", counts=counts)


def outcomes(
    changes: Changes,
    wanted: Collection[ProcessSpec],
    running: Collection[ProcessSpec],
    *failed: str,
    stopping: str = "",
) -> list[Outcome | None]:
    """All that run are used, but the failed ones."""
    statuses = {
        m: ProcessStatus(name=m.name, state=ProcessState.FAILED, detail="exit code 1")
        for m in running
        if m.name in failed
    }
    used = {m.name for m in running if m.name not in failed}
    ending = [m for m in running if m.name == stopping]
    return [change.outcome(wanted, running, ending, statuses, [used]) for change in changes]


def test_a_request_is_done_once_its_nodes_are_used_or_gone() -> None:
    changes = Changes()
    changes.add(request(1, prefill=2, decode=1), "main", "x", cluster(1, 2), cluster(2, 1))
    assert outcomes(changes, cluster(2, 1), cluster(1, 2)) == [None]
    assert outcomes(changes, cluster(2, 1), cluster(2, 2), stopping="decode-1") == [None]
    assert outcomes(changes, cluster(2, 1), cluster(2, 1)) == [Outcome(text="x")]


def test_a_node_that_failed_before_spoils_no_request() -> None:
    changes = Changes()
    changes.add(request(1, prefill=2), "main", "x", cluster(1, 2), cluster(2, 2))
    assert outcomes(changes, cluster(2, 2), cluster(2, 2), "decode-1") == [Outcome(text="x")]
    failed = Outcome(text="x: prefill-1 exit code 1", failed=True)
    assert outcomes(changes, cluster(2, 2), cluster(2, 2), "decode-1", "prefill-1") == [failed]


def test_a_superseded_request_is_answered_as_such() -> None:
    changes = Changes()
    first, second, third = request(1, decode=3), request(2, prefill=2), request(3, decode=2)
    assert changes.add(first, "main", "decode 1 → 3", cluster(1, 1), cluster(1, 3)) == []
    assert changes.add(second, "main", "prefill 1 → 2", cluster(1, 3), cluster(2, 3)) == []
    ((answered, outcome),) = changes.add(third, "main", "decode 3 → 2", cluster(2, 3), cluster(2, 2))
    assert answered is first
    assert outcome.failed
    assert outcome.text == "decode 1 → 3: superseded by a later request, decode 3 → 2"
    assert outcomes(changes, cluster(2, 2), cluster(2, 1)) == [Outcome(text="prefill 1 → 2"), None]
    assert outcomes(changes, cluster(2, 2), cluster(2, 3)) == [Outcome(text="prefill 1 → 2"), None]
    assert outcomes(changes, cluster(2, 2), cluster(2, 2)).count(None) == 0
