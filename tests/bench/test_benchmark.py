"""A whole benchmark over targets without an engine."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun.models import tiny
from corun_bench import benchmark, conditions, results, workloads
from corun_bench.benchmark import Benchmark
from corun_bench.driver import Target
from corun_bench.engines import IndependentEngines
from corun_bench.options import BenchOptions
from corun_bench.running import RunningSystem
from corun_bench.systems import Machine, System, parse_systems
from tests.bench.targets import FakeEngine, FakeTarget


class FakeRunning(RunningSystem):
    """A system that is up, without processes."""

    def check(self) -> None:
        """Nothing can end."""


def made(tmp_path: Path, **changes: Any) -> Benchmark:
    machine = Machine(model=str(tiny.ensure()), max_model_len=512, slots=4)
    systems = tuple(parse_systems([changes.pop("systems", "std,cluster")]))
    specs = workloads.expand(["in=8,out=4", "rl=2x3,in=8,out=4"])
    values: dict[str, Any] = {"num_prompts": 6, "num_warmups": 2, "repeats": 2, "mismatch_requests": 3}
    options = BenchOptions(**{**values, "max_concurrency": (1, 4), **changes})
    return Benchmark(options, machine, systems, specs, tmp_path)


def over(monkeypatch: pytest.MonkeyPatch, **targets: Target) -> None:
    @asynccontextmanager
    async def up(system: System, machine: Machine, logs: Path) -> AsyncIterator[RunningSystem]:
        if system.name not in targets:
            raise UnavailableError("it does not start\nits log")
        target = targets[system.name]
        engines = getattr(target, "engines", [])
        contract = {"fingerprint": "f" * system.name.startswith("cluster"), "settings": {}, "slots": 4}
        yield FakeRunning(name=system.name, target=target, pads=system.pads, engines=engines, **contract)

    monkeypatch.setattr(benchmark, "up", up)


async def test_every_system_runs_every_workload_and_bits_that_depend_on_the_crowd_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {"std": FakeTarget(crowd_shows=True), "cluster": FakeTarget()}
    over(monkeypatch, **targets)
    monkeypatch.setattr(benchmark, "PROGRESS_S", 0.0)
    one = made(tmp_path)
    one.prepare()
    await one.run()
    found = results.read(tmp_path / "result.json")
    assert found == json.loads(json.dumps(one.result))
    assert one.failures == []
    cells = [(run["system"], run["workload"], run["max_concurrency"], run["repeat"]) for run in found["runs"]]
    assert sorted(cells) == sorted(
        (system, workload, concurrency, repeat)
        for system in ("std", "cluster")
        for workload in ("in=8,out=4", "rl=2x3,in=8,out=4")
        for concurrency in (1, 4)
        for repeat in (0, 1)
    )
    assert {run["completed"] for run in found["runs"]} == {6}
    rows = [(row["system"], row["requests"], row["different_bits"]) for row in found["mismatches"]]
    assert rows == [("std", 3, 3), ("std", 3, 3), ("cluster", 3, 0), ("cluster", 3, 0)]
    assert targets["cluster"].started[-3:] == [2, 1, 0], "few at a time, in the reverse order"
    said = capsys.readouterr().err
    assert "std: in=8,out=4: 1 of 6 requests done" in said
    assert "6 of 6 requests done" not in said


async def test_placements_of_one_contract_are_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that always gives the same bits, but others than the first, is found only so."""
    over(monkeypatch, **{"cluster": FakeTarget(), "cluster:colocated": FakeTarget(), "cluster:1p1d": FakeTarget(own=7)})
    one = made(tmp_path, systems="cluster,cluster:colocated,cluster:1p1d", repeats=1)
    one.prepare()
    await one.run()
    rows = [row for row in one.result["mismatches"] if row["workload"] == "in=8,out=4"]
    assert [(row["system"], row["against"], row["requests"], row["different_bits"]) for row in rows] == [
        ("cluster", "", 3, 0),
        ("cluster:colocated", "", 3, 0),
        ("cluster:colocated", "cluster", 3, 0),
        ("cluster:1p1d", "", 3, 0),
        ("cluster:1p1d", "cluster", 3, 3),
    ]
    assert "cluster:1p1d: in=8,out=4: 3 of 3 requests differ from cluster\n" in capsys.readouterr().err


async def test_a_workload_at_another_rate_is_warmed_up_and_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FakeTarget()
    over(monkeypatch, std=target)
    one = made(tmp_path, systems="std", repeats=1, max_concurrency=(4,))
    one._specs = workloads.expand(["in=8,out=4,rate=900", "in=8,out=4,rate=990", "in=8,out=5,rate=990"])
    one.prepare()
    await one.run()
    assert [row["workload"] for row in one.result["runs"]] == [spec.name for spec in one._specs]
    assert [row["workload"] for row in one.result["mismatches"]] == ["in=8,out=4,rate=900", "in=8,out=5,rate=990"]
    warmed, timed, compared = 2, 6, 6 + 3
    assert len(target.prompts) == 3 * timed + 2 * (warmed + compared)


async def test_even_gaps_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over(monkeypatch, std=FakeTarget())
    one = made(tmp_path, systems="std", request_rate=900.0, burstiness=math.inf)
    await one.run()
    assert {run["burstiness"] for run in results.read(tmp_path / "result.json")["runs"]} == {"inf"}


async def test_requests_that_warm_up_have_short_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their times do not count, and whole outputs of some workloads take minutes."""
    target = FakeTarget()
    over(monkeypatch, std=target)
    one = made(tmp_path, systems="std", repeats=1, max_concurrency=(4,), mismatch_requests=0)
    one._specs = workloads.expand(["in=8,out=300"])
    one.prepare()
    await one.run()
    assert target.tokens_asked == [benchmark.WARM_UP_TOKENS] * 2 + [300] * 6


async def test_no_prompt_of_a_timed_run_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, again = FakeTarget(), FakeTarget()
    over(monkeypatch, std=target, cluster=again)
    one = made(tmp_path, mismatch_requests=0)
    one._specs = one._specs[:1]
    one.prepare()
    await one.run()
    assert len(target.prompts) == len(set(target.prompts)) == 2 + 2 * 2 * 6, "warm-up; two runs of 1 and 4 at a time"
    assert again.prompts == target.prompts, "systems get the same prompts"


async def test_no_text_of_a_timed_run_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster still has the beginnings of earlier runs' prompts, and the few records come again in each run."""
    target = FakeTarget()
    over(monkeypatch, cluster=target)
    one = made(tmp_path, systems="cluster", max_concurrency=(4,), num_prompts=8)
    one._specs = workloads.expand(["blazedit,out=2", "sharegpt,out=2"])
    one.prepare()
    await one.run()
    starts: dict[tuple[int, ...], set[int]] = {}
    for place, prompt in enumerate(target.prompts):
        starts.setdefault(prompt[:16], set()).add(place)
    warmed, timed, compared = 2, 2 * 8, 8 + 3
    run_of = [0] * warmed + [1] * 8 + [2] * 8 + [3] * compared
    of_run = [sorted({run_of[place % len(run_of)] for place in places}) for places in starts.values()]
    assert len(target.prompts) == 2 * (warmed + timed + compared)
    assert all(len(runs) == 1 for runs in of_run), of_run


async def test_what_does_not_start_is_said_and_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over(monkeypatch, cluster=FakeTarget())
    one = made(tmp_path)
    await one.run()
    assert one.failures == ["std: it does not start"]
    assert {run["system"] for run in one.result["runs"]} == {"cluster"}
    assert "its log" in capsys.readouterr().err


async def test_why_a_process_ended_is_said_and_not_what_failed_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forget(self: FakeTarget) -> None:
        self.forgotten = -1
        raise UnavailableError("std-0 does not listen")

    def check(self: FakeRunning) -> None:
        assert isinstance(self.target, FakeTarget)
        if self.target.forgotten:
            raise UnavailableError("std-0 ended with -9")

    monkeypatch.setattr(FakeTarget, "forget", forget)
    monkeypatch.setattr(FakeRunning, "check", check)
    over(monkeypatch, std=FakeTarget())
    one = made(tmp_path, systems="std")
    await one.run()
    assert one.failures == ["std: std-0 ended with -9"]


async def test_requests_that_fail_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over(monkeypatch, std=FakeTarget(errors={1: UnavailableError("gone")}))
    one = made(tmp_path, systems="std")
    await one.run()
    assert one.failures[0] == "std: in=8,out=4: 1 requests failed: UnavailableError: gone"
    assert "std: in=8,out=4: 1 requests could not be compared" in one.failures
    assert {run["failed"] for run in one.result["runs"]} == {1}


async def test_padding_is_of_systems_whose_steps_all_have_a_row_for_each_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {name: FakeEngine(name) for name in ("std", "colocated", "colocated+ladder")}
    over(monkeypatch, **{name: IndependentEngines([engine]) for name, engine in engines.items()})  # type: ignore[list-item]
    one = made(tmp_path, systems=",".join(engines), padding=(1, 2), mismatch_requests=0)
    await one.run()
    assert one.failures == []
    known = {run["system"]: run["padding_waste"] is not None for run in one.result["runs"]}
    assert known == {"std": False, "colocated": True, "colocated+ladder": False}
    assert all(run["slot_occupancy"] is not None for run in one.result["runs"])
    swept = [(run["system"], run["workload"]) for run in one.result["runs"] if "padding" in run["workload"]]
    expected = [("std", 1), ("colocated", 1), ("colocated", 2), ("colocated+ladder", 1)]
    assert swept == [(name, f"padding={rows}") for name, rows in expected for _ in range(2)]
    assert [engine.padded for engine in engines.values()] == [[], [1, 2, 4], []]


@pytest.mark.parametrize(("text", "message"), [("[]", "a dir"), ("[" * 100_000, "a dir"), ("{}", "no vocab_size")])
def test_a_model_that_tells_too_little_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        benchmark.run(BenchOptions(model=str(tmp_path), systems=(), url=("http://127.0.0.1:1",)))


def test_the_config_of_a_models_text_part_counts(tmp_path: Path) -> None:
    text = {"vocab_size": 9, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["A"], "text_config": text}))
    config = conditions.model_config(str(tmp_path))
    assert conditions.model_summary("m", config) == {"name": "m", "architectures": ["A"], "vocab_size": 9}
    assert benchmark._machine(BenchOptions(model=str(tmp_path))).max_model_len == 8
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    assert benchmark._machine(BenchOptions(model=str(tmp_path), max_model_len=77)).max_model_len == 77


def test_a_gpu_whose_memory_is_not_told_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"--query-gpu=memory.used": [["[N/A]"], ["512"]], "--query-compute-apps=pid,used_memory": [["7", "[N/A]"]]}
    monkeypatch.setattr(conditions, "smi", told.__getitem__)
    assert conditions.gpu_memory({7: "p0"}) == {"gpus": ["[N/A]", 512], "processes": {"p0 7": "[N/A]"}}


def test_conditions_are_said_in_lines(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be a directory with a config\.json"):
        conditions.model_config(str(tmp_path))
    h200 = {"name": "NVIDIA H200", "driver": "580.1", "memory": "143771"}
    found = {
        "hardware": {"cpu": "A CPU", "cores": 8, "gpus": [h200, h200]},
        "versions": {"vllm": "0.26.0"},
        "clocks": {"before": [], "after": [{"clocks.sm": "1860", "clocks.max.sm": "1980"}]},
        "model": {"name": "m"},
        "sampling": "temperature 0.6",
    }
    systems = [{"system": "std", "fingerprint": ""}, {"system": "cluster", "fingerprint": "ab12"}]
    assert list(conditions.lines(found, systems)) == [
        "A CPU, 8 cores; 2 x NVIDIA H200, driver 580.1",
        "vllm 0.26.0",
        "model {'name': 'm'}; temperature 0.6",
        "clocks at the end: 1860 of 1980 MHz",
        "cluster: fingerprint ab12",
    ]
