"""`corun bench` as a user runs it: real engines on the tiny model, results, pages, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corun.processes import descendants, end_tree, living
from tests.e2e.conftest import Cluster
from tests.machine import command_line, free_port, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG, ROLLOUT, SHORTER = "in=600,out=16", "rl=3x2,in=400,out=12", "in=500,out=16"
REQUESTS = 6
RUN = (
    *("--max-model-len", "2048", "--slots", "24"),
    *("--num-prompts", str(REQUESTS), "--num-warmups", "2", "--repeats", "1", "--max-concurrency", "8"),
    *("--mismatch-requests", str(REQUESTS), "--mismatch-tokens", "16"),
)
"""24 slots: steps of 16 rows are tried, too."""
ENGINES = ("colocated+ladder", "pd-std")
"""std is measured until it is killed, in the other test."""
START_S = 150.0
END_S = 60.0
ALL_S = 660.0
"""Measuring the systems has ended by then. It takes three to five minutes, by the machine; most is three engines'
start."""


class Command:
    """A `corun` command in a process group of its own, as a shell has it, and all that it started."""

    def __init__(self, logs: Path, *words: str) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._files = [logs / "out", logs / "err"]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            command = [sys.executable, "-m", "corun", *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        self._tree: dict[int, str] = {}

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text(errors="replace")

    def tree(self) -> dict[int, str]:
        """Everything that it has started so far, as far as anybody looked."""
        self._tree |= descendants(self.process.pid)
        return self._tree

    def has_ended(self) -> bool:
        self.tree()
        return self.process.poll() is not None

    def end(self, timeout_s: float) -> int:
        """Wait until it ends, and return its exit code."""
        wait_for(self.has_ended, "it ends", timeout_s)
        return int(self.process.returncode)

    def says(self, words: str, timeout_s: float = START_S) -> None:
        """Wait until it says so on stderr."""
        wait_for(lambda: words in self.err or self.has_ended(), words, timeout_s)
        assert words in self.err, self.err[-3000:]

    def process_of(self, module: str) -> int:
        """The first that runs it."""
        return next(pid for pid in self.tree() if module in command_line(pid).split())

    def kill(self) -> None:
        tree = self.tree()
        self.process.kill()
        self.process.wait()
        end_tree(tree, step_s=2.0)


@contextmanager
def started(logs: Path, *words: str) -> Iterator[Command]:
    """Fails if it leaves a process behind. What it said is shown with a test that fails."""
    command = Command(logs, *words)
    try:
        yield command
        assert command.process.poll() is not None, "it still runs"
        assert living(command.tree()) == []
    finally:
        command.kill()
        print(command.err[-3000:])


def run(logs: Path, *words: str, timeout_s: float) -> str:
    """Run a command that has to succeed, and return the last line that it prints."""
    with started(logs, *words) as command:
        assert command.end(timeout_s) == 0, command.err[-3000:]
        return command.out.splitlines()[-1]


def mismatches(result: dict[str, Any], system: str) -> dict[str, int]:
    assert {row["requests"] for row in result["mismatches"] if row["system"] == system} == {REQUESTS}
    return {row["workload"]: row["different_bits"] for row in result["mismatches"] if row["system"] == system}


@pytest.mark.timeout(780)
def test_systems_are_measured_and_the_result_can_be_compared_and_reported(tmp_path: Path) -> None:
    """Two systems, with three engines of their own. Fixed shapes do not differ in other company.

    Whether stock vLLM does is the processor's matter: on some it differs in half of these requests, on others in none.
    So the control of this comparison is in `tests/bench/test_benchmark.py`, with a target whose bits show the crowd."""
    directory = tmp_path / "result"
    words = ("bench", "--systems", ",".join(ENGINES), "--workloads", LONG, ROLLOUT, *RUN, "-o", str(directory))
    with started(tmp_path / "bench", *words) as command:
        assert command.end(ALL_S) == 0, command.err[-3000:]
    result = json.loads((directory / "result.json").read_text())
    runs = {(row["system"], row["workload"]): (row["completed"], row["failed"]) for row in result["runs"]}
    assert runs == {(system, workload): (REQUESTS, 0) for system in ENGINES for workload in (LONG, ROLLOUT)}
    assert len(result["runs"]) == len(runs)
    for system in ENGINES:
        assert f"{system}: ready in " in command.err
    assert "not measured" not in command.err
    assert mismatches(result, "pd-std").keys() == {LONG, ROLLOUT}
    assert mismatches(result, "colocated+ladder") == {LONG: 0, ROLLOUT: 0}

    (line,) = command.out.splitlines()
    short = json.loads(line)
    assert short["failures"] == []
    assert len(short["runs"]) == len(ENGINES) * 2
    assert (directory / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert {path.suffix for path in directory.rglob("throughput*")} == {".png", ".svg"}

    file = str(directory / "result.json")
    rows = json.loads(run(tmp_path / "compare", "bench", "compare", file, file, timeout_s=END_S))["rows"]
    assert [row["ratio"] for row in rows] == [[1.0, 1.0, 1.0]] * len(ENGINES) * 2
    run(tmp_path / "report", "bench", "report", file, "-o", str(tmp_path / "page"), timeout_s=END_S)
    assert (tmp_path / "page" / "report.html").exists()


@pytest.mark.timeout(400)
def test_a_killed_engine_and_an_interrupt_leave_what_was_measured(tmp_path: Path) -> None:
    """The first system's engine is killed; the next one starts, and is interrupted while it does."""
    words = ("bench", "--systems", "std,std+nosplit", "--workloads", "in=64,out=8", "in=64,out=1900", *RUN)
    with started(tmp_path, *words, "-o", str(tmp_path / "result")) as command:
        command.says("requests differ in other company")  # The next engine call ends after many seconds.
        time.sleep(1.0)  # Into that call: before it the death would be that of an engine that does not listen.
        os.kill(command.process_of("corun_bench.engine"), signal.SIGKILL)
        command.says("std+nosplit: starting", END_S)
        time.sleep(3.0)  # Into the start.
        os.killpg(command.process.pid, signal.SIGINT)  # As Ctrl-C does.
        assert command.end(2 * END_S) == 130
    assert "not measured: std: both-0 ended with -9 (1 of its 2 runs were measured)" in command.err
    result = json.loads((tmp_path / "result" / "result.json").read_text())
    assert [(row["system"], row["workload"]) for row in result["runs"]] == [("std", "in=64,out=8")]
    assert json.loads(command.out)["failures"] == ["std: both-0 ended with -9 (1 of its 2 runs were measured)"]
    assert "Traceback" not in command.err


@pytest.mark.timeout(240)
def test_the_cluster_is_measured_through_its_gateway(cluster: Cluster, tmp_path: Path) -> None:
    """Last: from here on the cluster of this package's tests keeps the cores busy."""
    url = f"http://127.0.0.1:{free_port()}"
    gateway = ("gateway", "--router", cluster.address, "--port", url.rpartition(":")[2])
    with started(tmp_path / "gateway", *gateway) as served:
        wait_for(lambda: _answers(url), "the gateway serves")
        words = ("bench", "--systems", "--url", url, "--workloads", SHORTER, ROLLOUT, *RUN)
        words = (*words, "-o", str(tmp_path / "result"))
        run(tmp_path / "bench", *words, timeout_s=200.0)
        served.process.send_signal(signal.SIGTERM)
        assert served.end(END_S) == 0
    result = json.loads((tmp_path / "result" / "result.json").read_text())
    assert [(row["completed"], row["failed"]) for row in result["runs"]] == [(REQUESTS, 0)] * 2
    assert mismatches(result, url) == {SHORTER: 0, ROLLOUT: 0}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
