"""What the user of a cluster is told of its processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun.config.cluster_file import ClusterSpec, PoolSpec
from corun.launch.cluster import Cluster, _Pool
from corun.launch.members import members
from corun.launch.progress import Progress
from corun.launch.supervisor import ProcessState, ProcessStatus

SPEC = ClusterSpec(pools=(PoolSpec(common={"model": "m"}),))
PREFILL = members(SPEC)[1]


def told(capsys: pytest.CaptureFixture[str], *rounds: ProcessStatus) -> list[str]:
    """Without the times."""
    cluster = Cluster(SPEC, Path("logs"), Progress())
    for status in rounds:
        cluster._tell_processes({PREFILL: status})
    return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("[")]


def status(state: ProcessState, pid: int = 0, deaths: int = 0) -> ProcessStatus:
    detail = "exit code 1" if deaths else ""
    return ProcessStatus(name=PREFILL.name, state=state, pid=pid, deaths=deaths, detail=detail)


RUNS, AGAIN = status(ProcessState.RUNNING, 7), status(ProcessState.RUNNING, 8, 1)
DEAD = status(ProcessState.WAITING, deaths=1)
ALL = [
    "prefill-0: process 7",
    "prefill-0: waiting: exit code 1",
    "prefill-0: process 8, start 2",
]


def test_what_a_node_does_is_told_until_it_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(SPEC, Path("logs"), Progress())
    cluster._pools = {"main": _Pool(("a:1",), ("a",))}
    loading = replace(RUNS, doing="loading the weights")
    cluster._tell_start({members(SPEC)[0]: replace(RUNS, doing="listening"), PREFILL: loading})
    assert capsys.readouterr().err.endswith("] prefill-0: loading the weights\n")
    cluster._pools["main"].in_use = ({"prefill-0"},)
    cluster._tell_start({PREFILL: replace(RUNS, doing="something else")})
    cluster._pools["main"] = _Pool(("a:1",), ("a",), ready=True)
    cluster._tell_start({PREFILL: replace(RUNS, doing="something else")})
    assert capsys.readouterr().err == ""


def test_a_change_of_numbers_is_told_when_it_begins_and_when_it_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(SPEC, Path("logs"), Progress())
    pool = cluster._pools["main"] = _Pool(("a:1",), ("a",), in_use=({"prefill-0", "decode-0"},))
    more = SPEC.scaled("", {"decode": 2})
    for wanted in (None, SPEC, more, more):
        cluster._scale(wanted)
    fleet: Any = SimpleNamespace(running=members(SPEC), stopping=[])
    cluster._fleet = fleet
    assert {node.name for node in cluster._scale_status({}).unsettled} == {"decode-1"}
    fleet.running = members(more)
    assert {node.name for node in cluster._scale_status({}).unsettled} == {"decode-1"}
    pool.in_use = ({"prefill-0", "decode-0", "decode-1"},)
    status = cluster._scale_status({})
    assert (status.spec, status.unsettled, status.failed) == (more, frozenset(), {})
    lines = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["scaling decode 1 → 2", "scaled decode 1 → 2"]


def test_a_node_that_cannot_start_ends_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(SPEC, Path("logs"), Progress())
    cluster._pools["main"] = _Pool(("a:1",), ("a",), in_use=({"prefill-0", "decode-0"},))
    cluster._scale(SPEC.scaled("", {"decode": 2}))
    *_, new = members(cluster._spec)
    fleet: Any = SimpleNamespace(running=members(cluster._spec), stopping=[])
    cluster._fleet = fleet
    failed = ProcessStatus(name=new.name, state=ProcessState.FAILED, detail="exit code 2")
    assert cluster._scale_status({new: failed}).failed == {new: "exit code 2\nlogs in logs"}
    assert capsys.readouterr().err.endswith("scaled decode 1 → 2, without decode-1\n")


def test_a_death_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, RUNS, RUNS, DEAD, DEAD, AGAIN, AGAIN) == ALL


def test_a_death_between_two_looks_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A look may take longer than the process waits for its next start."""
    assert told(capsys, RUNS, AGAIN, AGAIN) == ALL


def test_a_second_death_like_the_first_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    third = status(ProcessState.RUNNING, 9, 2)
    assert told(capsys, RUNS, DEAD, AGAIN, third, third) == [
        *ALL,
        "prefill-0: waiting: exit code 1",
        "prefill-0: process 9, start 3",
    ]


def test_deaths_on_a_machine_that_is_gone_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = (status(ProcessState.RUNNING, 17), status(ProcessState.RUNNING, 18, 1))
    assert told(capsys, AGAIN, *elsewhere)[-3:] == [
        "prefill-0: process 17",
        "prefill-0: waiting: exit code 1",
        "prefill-0: process 18, start 2",
    ]


def test_a_count_that_is_the_default_is_no_change(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(SPEC, Path("logs"), Progress())
    cluster._scaling = "decode 1 → 2"
    cluster._scale(SPEC.scaled("main", {"prefill": 1}))
    assert cluster._scaling == "decode 1 → 2"
    assert capsys.readouterr().err == ""
