"""What is done so that the processes that run become those that are wanted."""

from __future__ import annotations

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.launch.members import ProcessSpec, members
from corun.launch.reconcile import Steps, failure, in_turn, steps, unsettled
from corun.launch.supervisor import ProcessState, ProcessStatus


def wanted(prefill: int = 1, decode: int = 1) -> tuple[ProcessSpec, ...]:
    pool = PoolSpec(common={"model": "m"}, replicas={"prefill": prefill, "decode": decode})
    return members(ClusterSpec(pools=(pool,)))


def names(found: Steps) -> tuple[list[str], list[str]]:
    return [member.name for member in found.start], [member.name for member in found.stop]


def test_everything_is_started() -> None:
    assert names(steps(wanted(), [], [])) == (["router", "prefill-0", "decode-0"], [])


def test_nothing_is_to_do() -> None:
    assert not steps(wanted(2, 3), wanted(2, 3), [])


def test_up_and_down_at_once() -> None:
    assert names(steps(wanted(3, 1), wanted(1, 3), [])) == (["prefill-1", "prefill-2"], ["decode-2", "decode-1"])


def test_what_ends_is_not_asked_again_and_starts_again_only_once_it_has_ended() -> None:
    ending = wanted(1, 2)[-1:]
    assert not steps(wanted(1, 1), wanted(1, 2), ending)
    assert not steps(wanted(1, 2), wanted(1, 2), ending)
    assert names(steps(wanted(1, 2), wanted(1, 1), [])) == (["decode-1"], [])


def test_a_node_is_settled_once_every_router_uses_it_or_none_does() -> None:
    def left(want: tuple[ProcessSpec, ...], run: tuple[ProcessSpec, ...], *used: str, stopping: str = "") -> list[str]:
        nodes = [member for member in wanted(2, 2) if not member.is_router]
        ending = [member for member in run if member.name == stopping]
        found = unsettled(nodes, want, run, ending, {"main": [set(names.split()) for names in used]})
        return sorted(member.name for member in found)

    want, before = wanted(2, 1), wanted(1, 2)
    assert left(want, before, "prefill-0 decode-0 decode-1") == ["decode-1", "prefill-1"]
    all_used = "prefill-0 prefill-1 decode-0"
    assert left(want, wanted(2, 2), all_used, stopping="decode-1") == ["decode-1"]
    assert left(want, want, f"{all_used} decode-1") == ["decode-1"]
    assert left(want, want, all_used, "prefill-0 decode-0") == ["prefill-1"]
    assert left(want, want, all_used, all_used) == []
    assert len(left(want, want)) == 4  # No router answers.


def test_what_a_cluster_does_not_survive() -> None:
    everything = wanted(1, 2)

    def found(*failed: str, ready: bool) -> str:
        statuses = {
            m: ProcessStatus(name=m.name, state=ProcessState.FAILED if m.name in failed else ProcessState.RUNNING)
            for m in everything
        }
        member = failure(everything, statuses, ["main"] if ready else [])
        return member.name if member else ""

    assert found(ready=False) == ""
    assert found("decode-1", ready=False) == "decode-1"
    assert found("decode-1", ready=True) == ""
    assert found("decode-0", "decode-1", ready=True) == "decode-0"
    assert found("prefill-0", ready=True) == "prefill-0"
    assert found("router", ready=True) == "router"


def test_nodes_on_one_gpu_start_one_after_the_other() -> None:
    _, *nodes = wanted(2, 2)
    assert in_turn(nodes, []) == (nodes[0],)
    assert in_turn(nodes[1:], [nodes[0]]) == ()
    assert in_turn([], []) == ()
