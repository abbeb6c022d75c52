"""Engine processes that fail, end or never start: they are noticed at once, and none is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.errors import DeadlineError, UnavailableError
from corun.models import tiny
from corun.processes import descendants
from corun_bench import nodes, results, running, workloads
from corun_bench.benchmark import Benchmark
from corun_bench.children import Processes
from corun_bench.driver import Outcome, Request
from corun_bench.engines import Engine
from corun_bench.nodes import NodePlan, Nodes, Topology
from corun_bench.options import BenchOptions
from corun_bench.systems import EngineSettings, Machine, System, parse_systems

DEADLINE_S = 20.0
REQUEST = Request(index=0, prompt_token_ids=(1, 2), max_tokens=3, seed=5)


class FakeProcesses(Processes):
    def start(self, name: str, module: str, *flags: str) -> None:
        assert module == "corun_bench.engine"
        super().start(name, "tests.bench.fake_engine", *flags)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


def settings(model: str) -> EngineSettings:
    return System.parse("std").engines(Machine(model=model, cores=(0,)))[0]


@asynccontextmanager
async def engine(model: str, directory: Path) -> AsyncIterator[Engine]:
    made = Engine("both-0", settings(model), FakeProcesses(directory), directory)
    try:
        yield made
    finally:
        await asyncio.wait_for(made.stop(), DEADLINE_S)


async def draw(made: Engine) -> Outcome:
    outcome = Outcome(request=REQUEST)
    await asyncio.wait_for(made.draw("r1", outcome, {"max_tokens": 3}), DEADLINE_S)
    return outcome


@pytest.mark.parametrize("does", ["answers", "answers late"])
async def test_an_engine_that_answers(tmp_path: Path, does: str) -> None:
    """Also where its two connections come up apart, and the one that it is told by comes last."""
    async with engine(does, tmp_path) as made:
        await made.ready(time.monotonic() + DEADLINE_S)
        assert (await draw(made)).token_ids == [7, 7, 7]
        await made.forget()
        made.check()


async def test_one_that_fails_to_start_says_why_in_its_first_line(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as caught:
        async with engine("fails", tmp_path) as made:
            await made.ready(time.monotonic() + DEADLINE_S)
    assert str(caught.value).splitlines()[0] == "both-0 ended with 1: ValueError: no such weights"
    assert "Traceback" in str(caught.value)


async def test_one_that_never_listens_is_ended(tmp_path: Path) -> None:
    async with engine("starts for ever", tmp_path) as made:
        with pytest.raises(UnavailableError, match="both-0 does not listen"):
            await draw(made)


async def test_one_that_dies_in_its_process_fails_its_requests(tmp_path: Path) -> None:
    async with engine("dies", tmp_path) as made:
        await made.ready(time.monotonic() + DEADLINE_S)
        with pytest.raises(UnavailableError, match="both-0: the engine's output loop ended"):
            await draw(made)
        with pytest.raises(UnavailableError, match="both-0: the engine's output loop ended"):
            made.check()


@pytest.mark.parametrize(
    ("does", "words"), [("is killed", "std: both-0 ended with -9"), ("dies", "std: both-0: the engine's output loop")]
)
async def test_a_system_whose_engine_ends_costs_the_next_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, words: str
) -> None:
    benchmark = over(tmp_path, monkeypatch, {"std": does, "std+nosplit": "answers"})
    await asyncio.wait_for(benchmark.run(), DEADLINE_S)
    assert len(benchmark.failures) == 1
    assert benchmark.failures[0].startswith(words)
    assert [row["system"] for row in benchmark.result["runs"]] == ["std+nosplit"] * 2
    assert {row["slots"] for row in benchmark.result["systems"]} == {1024}, "those of the engine"
    assert {row["failed"] for row in benchmark.result["runs"]} == {0}


async def test_what_is_missing_of_a_system_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = over(tmp_path, monkeypatch, {"std": "answers"})
    drive, runs = benchmark._drive, []

    async def die_in_the_second(*args: Any, **options: Any) -> Any:
        runs.append(args)
        if len(runs) == 2:
            raise UnavailableError("both-0 ended with -9\nits log")
        return await drive(*args, **options)

    monkeypatch.setattr(benchmark, "_drive", die_in_the_second)
    await asyncio.wait_for(benchmark.run(), DEADLINE_S)
    assert benchmark.failures == ["std: both-0 ended with -9 (1 of its 2 runs were measured)"]


@pytest.mark.parametrize("does", ["hangs", "starts for ever"])
async def test_a_cancelled_benchmark_leaves_its_result_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    benchmark = over(tmp_path, monkeypatch, {"std": "answers", "std+nosplit": does})
    work = asyncio.create_task(benchmark.run())
    deadline = time.monotonic() + DEADLINE_S
    while len(benchmark.result["runs"]) < 2:
        assert time.monotonic() < deadline, benchmark.failures
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    work.cancel()
    await asyncio.wait({work}, timeout=DEADLINE_S)
    assert work.cancelled()
    assert len(results.read(tmp_path / "result.json")["runs"]) == 2


async def test_a_cluster_that_is_stopped_while_it_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, though a process that starts may not end when it is asked to."""
    begun, processes = asyncio.Event(), Processes(tmp_path)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Nodes, "all_ready", lambda nodes: not loop.call_soon_threadsafe(begun.set))
    monkeypatch.setattr(Nodes, "status", lambda nodes: None)
    monkeypatch.setattr(Processes, "start", lambda self, name, *_, **__: start(self, name, "timeit", "-n1", *DEAF))
    plans = NodePlan("p0", "prefill_node", (0,)), NodePlan("d0", "decode_node", (0,))
    cluster = Nodes(Topology(model="", max_model_len=64, nodes=plans), processes)
    starting = asyncio.create_task(asyncio.to_thread(cluster.start))
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    while not all("deaf" in processes.log(name) for name in ("router", "p0", "d0")):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    ended = await asyncio.wait_for(asyncio.to_thread(cluster.stop), DEADLINE_S)
    assert ended == dict.fromkeys(("router", "p0", "d0"), -9)
    with pytest.raises(UnavailableError, match="it was stopped while it started"):
        await starting
    assert processes.running == {}


async def test_a_cluster_on_a_cpu_gets_the_same_options_as_the_other_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def start(cluster: Nodes) -> None:
        found.extend(cluster.topology.flags(node) for node in cluster.topology.nodes)
        raise UnavailableError("enough is known")

    monkeypatch.setattr(nodes, "has_gpu", lambda: False)
    monkeypatch.setattr(Nodes, "start", start)
    machine = Machine(model="m", cores=(0, 1, 2, 3), kv_cache_gib=3, slots=5, chunk_size=6, max_model_len=7)
    with pytest.raises(UnavailableError, match="enough"):
        await running.up(System.parse("cluster:1p1d"), machine, tmp_path).__aenter__()
    same = {"--model": "m", "--max-model-len": "7", "--threads": "2", "--kv-cache-gib": "3"}
    prefill, decode = (dict(zip(flags[::2], flags[1::2], strict=True)) for flags in found)
    assert prefill == {**same, "--node-id": "p0", "--chunk-size": "6"}
    assert decode == {**same, "--node-id": "d0", "--slots": "5", "--decode-split": "none"}


def test_a_router_that_answers_late_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **__: Any) -> Any:
        raise DeadlineError("no answer after 5 s")

    monkeypatch.setattr(Nodes, "client", late)
    assert Nodes(Topology(model="", max_model_len=64, nodes=()), Processes(tmp_path)).status() is None


start = Processes.start
DEAF = ("-simport signal", "signal.signal(15, 1); print('deaf', flush=True); signal.pause()")
"""Statements for `timeit` that wait for ever and ignore SIGTERM."""


def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: dict[str, str]) -> Benchmark:
    """A benchmark of systems with fake engines that do so."""
    monkeypatch.setattr(running, "Processes", FakeProcesses)
    engines = System.engines
    monkeypatch.setattr(
        System, "engines", lambda self, machine: engines(self, Machine(model=does[self.name], cores=(0,)))
    )
    counts = {"num_prompts": 4, "num_warmups": 0, "repeats": 2, "mismatch_requests": 0}
    machine = Machine(model=str(tiny.ensure()), cores=(0,))
    options = BenchOptions(**counts, max_concurrency=(2,), timeout_s=120.0)
    return Benchmark(options, machine, tuple(parse_systems(list(does))), workloads.expand(["in=8,out=4"]), tmp_path)
