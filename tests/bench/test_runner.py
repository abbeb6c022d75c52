"""A whole benchmark over targets without an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.errors import UnavailableError
from corun.models import tiny
from corun_bench import results, runner, workloads
from corun_bench.children import Processes
from corun_bench.options import BenchOptions
from corun_bench.runner import Benchmark, Plan
from corun_bench.systems import Machine, System, parse_systems
from tests.bench.targets import FakeTarget


class FakeUp(runner.Up):
    """A system that is up, without processes."""

    def __init__(self, system: System, target: FakeTarget) -> None:
        self.system, self.target = system, target
        self.slots, self.ready_s, self.fingerprint, self.settings = 4, 1.0, "f" * 64, {}
        self.gpus = {"prefill": 1, "decode": 1, "total": 1}
        self.processes = Processes(Path("/nowhere"))
        self.nodes = None
        self.engines = []

    def check(self) -> None:
        """Nothing can end."""


def plan(tmp_path: Path, **changes: Any) -> Plan:
    machine = Machine(model=str(tiny.ensure()), max_model_len=512, slots=4)
    systems = tuple(parse_systems([changes.pop("systems", "std,cluster")]))
    specs = workloads.expand(["in=8,out=4", "rl=2x3,in=8,out=4"])
    values: dict[str, Any] = {"num_prompts": 6, "num_warmups": 2, "repeats": 2, "mismatch_requests": 3}
    options = BenchOptions(**{**values, "max_concurrency": (1, 4), **changes})
    return Plan(options=options, machine=machine, systems=systems, specs=specs, directory=tmp_path)


def over(monkeypatch: pytest.MonkeyPatch, targets: dict[str, FakeTarget]) -> None:
    @asynccontextmanager
    async def up(system: System, machine: Machine, logs: Path) -> AsyncIterator[runner.Up]:
        if system.name not in targets:
            raise UnavailableError("it does not start\nits log")
        yield FakeUp(system, targets[system.name])

    monkeypatch.setattr(runner, "up", up)


async def test_every_system_runs_every_workload_at_every_concurrency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, {"std": FakeTarget(crowd_shows=True), "cluster": FakeTarget()})
    benchmark = Benchmark(plan(tmp_path))
    await benchmark.run()
    found = results.read(tmp_path / "result.json")
    assert found == json.loads(json.dumps(benchmark.result))
    assert benchmark.failures == []
    cells = [(run["system"], run["workload"], run["max_concurrency"], run["repeat"]) for run in found["runs"]]
    assert sorted(cells) == sorted(
        (system, workload, concurrency, repeat)
        for system in ("std", "cluster")
        for workload in ("in=8,out=4", "rl=2x3,in=8,out=4")
        for concurrency in (1, 4)
        for repeat in (0, 1)
    )
    assert {run["completed"] for run in found["runs"]} == {6}


async def test_bits_that_depend_on_the_crowd_are_found_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, {"std": FakeTarget(crowd_shows=True), "cluster": FakeTarget()})
    benchmark = Benchmark(plan(tmp_path))
    await benchmark.run()
    rows = [(row["system"], row["requests"], row["different_bits"]) for row in benchmark.result["mismatches"]]
    assert rows == [("std", 3, 3), ("std", 3, 3), ("cluster", 3, 0), ("cluster", 3, 0)]


async def test_every_system_gets_the_same_prompts_and_every_repeat_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = Benchmark(plan(tmp_path))
    spec = workloads.parse("in=8,out=4")
    first, again, other = (benchmark._workload(spec, repeat, 4) for repeat in (0, 0, 1))
    assert first == again
    assert {request.prompt_token_ids for request in first.requests}.isdisjoint(
        request.prompt_token_ids for request in other.requests
    )


async def test_what_does_not_start_is_said_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over(monkeypatch, {"cluster": FakeTarget()})
    benchmark = Benchmark(plan(tmp_path))
    await benchmark.run()
    assert benchmark.failures == ["std: it does not start"]
    assert {run["system"] for run in benchmark.result["runs"]} == {"cluster"}
    assert "its log" in capsys.readouterr().err


async def test_why_a_process_ended_is_said_and_not_what_failed_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forget(self: FakeTarget) -> None:
        self.forgotten = -1
        raise UnavailableError("std-0 does not listen")

    def check(self: FakeUp) -> None:
        assert isinstance(self.target, FakeTarget)
        if self.target.forgotten:
            raise UnavailableError("std-0 ended with -9")

    monkeypatch.setattr(FakeTarget, "forget", forget)
    monkeypatch.setattr(FakeUp, "check", check)
    over(monkeypatch, {"std": FakeTarget()})
    benchmark = Benchmark(plan(tmp_path, systems="std"))
    await benchmark.run()
    assert benchmark.failures == ["std: std-0 ended with -9"]


async def test_requests_that_fail_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over(monkeypatch, {"std": FakeTarget(errors={1: UnavailableError("gone")})})
    benchmark = Benchmark(plan(tmp_path, systems="std", mismatch_requests=0, num_warmups=0))
    await benchmark.run()
    assert benchmark.failures[0] == "std: in=8,out=4: 1 requests failed: UnavailableError: gone"
    assert {run["failed"] for run in benchmark.result["runs"]} == {1}


async def test_padding_is_of_systems_whose_steps_all_have_a_row_for_each_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, {"std": FakeTarget(), "colocated": FakeTarget(), "colocated+ladder": FakeTarget()})
    benchmark = Benchmark(plan(tmp_path, systems="std,colocated,colocated+ladder"))
    await benchmark.run()
    known = {run["system"]: run["padding_waste"] is not None for run in benchmark.result["runs"]}
    assert known == {"std": False, "colocated": True, "colocated+ladder": False}
    assert all(run["slot_occupancy"] is not None for run in benchmark.result["runs"])


async def test_a_long_run_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over(monkeypatch, {"std": FakeTarget(), "cluster": FakeTarget()})
    monkeypatch.setattr(runner, "PROGRESS_S", 0.0)
    await Benchmark(plan(tmp_path)).run()
    said = capsys.readouterr().err
    assert "std: in=8,out=4: 1 of 6 requests done" in said
    assert "6 of 6 requests done" not in said
