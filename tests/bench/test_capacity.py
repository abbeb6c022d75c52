"""The router's measurement, at a size that takes a second; and its own parts. No timing is asserted."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from corun.errors import InvalidArgumentError, UnavailableError
from corun_bench import capacity
from corun_bench import load as load_module
from corun_bench.capacity import _load, _together, is_carried, quantiles
from corun_bench.children import Processes
from corun_bench.cli import RouterBench
from corun_bench.driver import Outcome, Request
from corun_bench.fake_node import DIRECT_METHOD, FakeDirect, StepEngine
from corun_bench.load import Load, age_s, read, time_code
from corun_bench.options import CapacityOptions
from decode_node.service import StepRow

SMALL = {"decode_nodes": 2, "slots": 3, "step_ms": 10.0, "output_tokens": 12, "prompt_tokens": 5}


def test_every_token_arrives_and_the_json_has_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    options = {**SMALL, "seconds": 0.5, "ramp_s": 0.1, "warmup_s": 0.2, "client_processes": 2}
    options |= {"output": path, "separate": True, "routers": 2}
    assert RouterBench(**options).run() == 0
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert json.loads(path.read_text()) == found
    assert table[0].startswith("conditions: decode_nodes 2, slots 3")
    assert (found["conditions"]["engines"], found["conditions"]["client_processes"]) == ("fake", 2)
    assert {"cpus", "processor", "load_average", "python", "grpcio", "uvloop"} <= found["conditions"].keys()
    for name in ("router", "separate", "direct"):
        figures = found[name]
        assert figures["wrong"] == 0, found["errors"]
        assert figures["samples"] > 6
        assert figures["tokens"] > 10 * (figures["samples"] - 6)  # Only the first of each slot are shorter than 12.
        assert figures["tokens_per_s"] > 0
        assert set(figures["latency_ms"]) == set(figures["ttft_ms"]) == {"p50", "p90", "p99", "max"}
        assert all(delay > 0 for delay in figures["latency_ms"].values())
        assert figures["itl_ms"]["p50"] > 0
        assert ("empty_call_ms" in figures) is (name != "direct")
    assert set(found["router"]["rss_mib"]) == set(found["router"]["cores"]) == {"router", "nodes", "clients"}
    assert set(found["direct"]["cpu_s_per_1000_tokens"]) == {"nodes", "clients"}
    assert found["added_ms"]["p50"] == pytest.approx(
        found["router"]["latency_ms"]["p50"] - found["direct"]["latency_ms"]["p50"], abs=0.01
    )

    def measured(setup: CapacityOptions) -> dict[str, Any]:
        """Stand in for a measurement: one router carries one decode node, and two carry three."""
        changed = {"routers": setup.routers, "decode_nodes": setup.decode_nodes}
        is_carried = setup.decode_nodes < 2 * setup.routers
        return {**found, "carried": is_carried, "conditions": {**found["conditions"], **changed}}

    monkeypatch.setattr(capacity, "measure", measured)
    assert RouterBench(**{**options, "sweep": (1, 3, 4), "sweep_routers": (1, 2)}).run() == 0
    *table, line = capsys.readouterr().out.splitlines()
    heads = [line.partition(" slots")[0] for line in table if " x 3 slots" in line]
    assert heads == [f"{routers}: {nodes} x 3" for routers in ("1 router", "2 routers") for nodes in (1, 3, 4)]
    assert table[-2:] == ["1 router: 1 decode nodes carried", "2 routers: 3 decode nodes carried"]
    assert json.loads(line)["carried_decode_nodes"] == {"1": 1, "2": 3}
    assert RouterBench(**{**options, "sweep_routers": (3,)}).run() == 0
    assert "3 routers: 2 decode nodes carried" in capsys.readouterr().out

    def failing(setup: CapacityOptions) -> dict[str, Any]:
        """Stand in for a machine on which samples of more than two nodes never end."""
        if setup.decode_nodes > 2:
            raise UnavailableError("client-0 ended with 1: samples still run\nits log")
        return measured(setup)

    monkeypatch.setattr(capacity, "measure", failing)
    assert RouterBench(**{**options, "sweep": (1, 3)}).run() == 1
    *table, line = capsys.readouterr().out.splitlines()
    trouble = "2 routers, 3 decode nodes: client-0 ended with 1: samples still run"
    assert table[-1] == f"not measured: {trouble}"
    assert (len(json.loads(line)["sweep"]), json.loads(line)["failures"]) == (1, [trouble])
    with pytest.raises(UnavailableError, match="samples still run"):
        RouterBench(**{**options, "sweep": (3, 4)}).run()


def test_nodes_with_longer_steps_offer_fewer_tokens() -> None:
    """A load of many nodes would else be one that no router carries."""
    setup = CapacityOptions(decode_nodes=16, slots=10, step_ms=10.0)
    steps_ms = [setup.step_ms_of(index) for index in range(16)]
    assert steps_ms == sorted(set(steps_ms))
    assert (steps_ms[0], steps_ms[15]) == (10.0, pytest.approx(10.45))
    assert setup.offered == pytest.approx(sum(10 / step_ms * 1000 for step_ms in steps_ms))
    assert setup.offered < 0.98 * 16_000


def test_a_router_is_measured_with_colocated_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    options = {**SMALL, "colocated": True, "seconds": 0.3, "ramp_s": 0.1, "warmup_s": 0.1}
    assert RouterBench(**options).run() == 0
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert "colocated True" in table[0]
    assert found["router"]["wrong"] == 0, found["errors"]
    assert found["router"]["tokens"] > 0


class LateClients(Processes):
    """Clients that come up one after the other, noted with what is waited for and looked at."""

    def start(
        self, name: str, module: str, *flags: str, stdin: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.seen = [*getattr(self, "seen", []), name]

    def wait(self, seconds: float) -> None:
        self.seen.append(seconds)
        index = sum(one == seconds for one in self.seen) - 1
        if index < 2:
            (self.logs / f"client-{index}.ready").touch()

    def cpu_s(self) -> dict[str, float]:
        self.seen.append("cpu")
        return {}

    def finish(self, names: Iterable[str], timeout_s: float) -> None:
        raise UnavailableError("enough is known")


def test_the_time_that_is_measured_begins_when_every_client_is_up(tmp_path: Path) -> None:
    setup = CapacityOptions(client_processes=2, ramp_s=4.0, warmup_s=3.0, seconds=20.0)
    processes = LateClients(tmp_path)
    with pytest.raises(UnavailableError, match="enough"):
        _load(setup, processes, "/a.B/C", ["h:1"], ())
    *polls, ramp, before, measured, after = processes.seen[2:]
    assert (ramp, before, measured, after) == (7.0, "cpu", 20.0, "cpu")
    assert len(polls) == 2


class Forgetful(FakeDirect):
    """Leaves out the first token of every sample."""

    def on_step(self, rows: Sequence[StepRow]) -> None:
        self.begun: set[str] = getattr(self, "begun", set())
        super().on_step([row for row in rows if row.request_id in self.begun])
        self.begun |= {row.request_id for row in rows}


async def test_a_token_that_does_not_arrive_is_found(tmp_path: Path) -> None:
    engine = StepEngine(0.002, 8)
    server = Forgetful(engine).server
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    setup = CapacityOptions(decode_nodes=1, slots=4, prompt_tokens=3, output_tokens=8, ramp_s=0.01)
    await server.start()
    load = Load(setup, 0, DIRECT_METHOD, [address], str(tmp_path / "unused"))
    ticking, stop = asyncio.ensure_future(engine.tick()), asyncio.Event()
    running = asyncio.ensure_future(load.run(stop))
    try:
        while len(load.samples) < 12 and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        stop.set()
        results = await running
    finally:
        ticking.cancel()
        await server.stop(0.0)
    assert len(results["errors"]) == results["calls"] > 4
    assert "7 of 8 tokens came" in results["errors"][-1]
    assert results["tokens"] == 1 + 3 + 5 + 7 + 7 * (results["calls"] - 4) == len(results["times"])
    assert all(0 <= age < 5 for _, age in results["times"])


async def test_samples_that_do_not_end_are_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "DRAIN_S", 0.05)
    server = FakeDirect(StepEngine(0.002, 8)).server  # Nobody lets this engine make a step.
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    setup = CapacityOptions(decode_nodes=1, slots=2, prompt_tokens=3, output_tokens=8, ramp_s=0.01)
    await server.start()
    stop = asyncio.Event()
    stop.set()
    try:
        with pytest.raises(UnavailableError, match=r"samples still run 0\.05 s .* loses a fake node"):
            await Load(setup, 0, DIRECT_METHOD, [address], str(tmp_path / "unused")).run(stop)
    finally:
        await server.stop(0.0)


def test_a_token_says_when_it_was_emitted_in_bits_that_fp32_keeps() -> None:
    for at in (0.0, 167.77216, 1e6 + 0.123):
        code = time_code(at)
        assert struct.unpack("<f", struct.pack("<f", code))[0] == code
        assert age_s(code, at + 150.0) == pytest.approx(150.0, abs=2e-5)
    request = Request(index=0, prompt_token_ids=(1,), max_tokens=2, seed=0)
    skipped = Outcome(request=request, arrivals=[(0.0, 2)], token_ids=[1, 3], logprobs=[-1.0, -2.0])
    assert read([skipped])["errors"] == ["its tokens are not of one step after the other"]


def test_quantiles_are_of_what_came() -> None:
    assert quantiles([i / 1000 for i in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    with pytest.raises(UnavailableError, match="nothing came"):
        quantiles([])


@pytest.mark.parametrize(
    ("delivered", "wrong", "added", "carried"),
    [(990, 0, 4.9, True), (900, 0, 4.9, False), (990, 1, 4.9, False), (990, 0, 5.1, False)],
)
def test_what_is_carried(delivered: float, wrong: int, added: float, carried: bool) -> None:
    router = {"tokens_per_s": delivered, "offered_tokens_per_s": 1000, "wrong": wrong}
    for slow in ("p50", "p90", "p99"):
        quantiles_added = {"p50": -2.0, "p90": -1.0, "p99": 0.0, "max": 90.0, slow: added}
        assert is_carried({"router": router, "added_ms": quantiles_added}) is carried


def test_one_wrong_sample_of_several_runs_is_not_lost_in_a_median() -> None:
    runs = [{"wrong": wrong, "latency_ms": {"p99": 1.0 + wrong}, "errors": []} for wrong in (0, 2, 0)]
    assert _together(runs) == {"wrong": 2, "latency_ms": {"p99": 1.0}}


@pytest.mark.parametrize(
    "bad", [{"decode_nodes": 0}, {"decode_nodes": 17}, {"step_ms": 0.0}, {"client_processes": 7}, {"routers": 0}]
)
def test_a_measurement_that_cannot_be_made_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        CapacityOptions(**{**SMALL, **bad}).check()
