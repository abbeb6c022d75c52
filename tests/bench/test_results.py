"""Result files: written whole, read with their schema checked, compared with what differs between them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tyro

from corun.errors import InvalidArgumentError
from corun_bench import results
from corun_bench.cli import Compare
from corun_bench.compare import compare, differing, ratio
from corun_bench.results import Spread


def row(system: str, throughput: float, workload: str = "in=1,out=2", **changes: Any) -> dict[str, Any]:
    latencies = {"median_ttft_ms": 10.0, "p99_ttft_ms": 20.0, "median_tpot_ms": 5.0}
    return {
        "system": system,
        "workload": workload,
        "repeat": 0,
        "output_throughput": throughput,
        **latencies,
        **changes,
    }


def result(*runs: dict[str, Any], **changes: Any) -> results.Json:
    conditions = {"date": "today", "hardware": {"gpu": "x"}, "versions": {"vllm": "1"}, "clocks": {}, "model": "tiny"}
    systems = [
        {"system": name, "gpus": {"prefill": 1, "decode": 1, "total": 2}, "slots": 4, "settings": {"chunk_size": 8}}
        for name in dict.fromkeys(run["system"] for run in runs)
    ]
    parts = {"command": ["corun", "bench"], "conditions": conditions, "systems": systems}
    return {"schema": results.SCHEMA, **parts, "runs": list(runs), "mismatches": [], **changes}


def mismatch(system: str, requests: int, different_bits: int) -> dict[str, Any]:
    return {"system": system, "workload": "in=1,out=2", "requests": requests, "different_bits": different_bits}


def with_conditions(value: results.Json, **changes: Any) -> results.Json:
    return {**value, "conditions": {**value["conditions"], **changes}}


def test_a_result_comes_back_as_it_was_and_one_that_is_not_json_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    results.write(path, result(row("std", 1.0)))
    assert results.read(path) == result(row("std", 1.0))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        results.write(path, result(row("std", math.nan)))
    assert path.read_bytes() == before
    assert [left.name for left in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "schema = None: must be 'corun-bench-1' or 'corun-bench-kernels-1' in a.json"),
        ('{"schema": "corun-bench-2"}', "schema = 'corun-bench-2': must be 'corun-bench-1'"),
        ('{"schema": "corun-bench-1"}', "command = in a.json: must be a JSON list"),
        (json.dumps(result() | {"conditions": []}), "conditions = in a.json: must be a JSON object"),
        (
            json.dumps(result() | {"runs": [{"system": "std"}]}),
            "runs[0] = in a.json: must be an object with system and",
        ),
        (json.dumps(result() | {"systems": [3]}), "systems[0]"),
        ('{"schema": "corun-bench-kernels-1"}', "kernels = in a.json: must be a JSON list"),
        ('{"schema": "corun-bench-kernels-1", "kernels": [{"kernel": "mean"}]}', "kernels[0]"),
    ],
)
def test_another_file_is_an_error_that_names_the_part(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidArgumentError) as raised:
        results.read(tmp_path / "a.json", (results.SCHEMA, results.KERNELS_SCHEMA))
    assert message in str(raised.value)


def test_what_is_no_finite_number_is_left_out() -> None:
    rows = [{"a": value} for value in (1.0, math.nan, True, "2", None, 10**400, 3)]
    assert results.spread_of(rows, "a") == spread_of_two(1.0, 3.0)
    assert results.spread_of(rows, "b") is None
    assert results.median_of(rows, "a") == 2.0
    assert results.numbers({"a": [1, math.inf, "x"]}, "a") == [1.0]


def spread_of_two(low: float, high: float) -> Spread:
    return Spread(median=(low + high) / 2, min=low, max=high, repeats=2)


def test_differing_conditions_are_named() -> None:
    first = result(row("std", 1.0), row("only a", 1.0))
    assert differing(first, first) == {}
    later = with_conditions(first, date="tomorrow", clocks={"sm": 1})
    assert differing(first, later) == {}, "a date and a clock differ in every run"
    other = with_conditions(first, hardware={"gpu": "y", "driver": 5}, versions={"vllm": "2"}, model="large")
    assert differing(first, other) == {
        "hardware.driver": ["none", "5"],
        "hardware.gpu": ["x", "y"],
        "model": ["tiny", "large"],
        "versions.vllm": ["1", "2"],
    }
    second = result(row("std", 1.0), row("only b", 1.0))
    second["systems"][0] |= {"slots": 8, "settings": {"chunk_size": 16}}
    assert differing(first, second) == {
        "std: settings.chunk_size": ["8", "16"],
        "std: slots": ["4", "8"],
    }


def test_a_comparison_has_every_cell_of_both_files() -> None:
    first = result(row("std", 100.0), row("std", 110.0), row("gone", 5.0), mismatches=[mismatch("std", 10, 1)])
    second = result(row("std", 210.0, median_ttft_ms=7.0), row("new", 6.0), mismatches=[mismatch("std", 10, 0)])
    rows = {found["system"]: found for found in compare(first, second)["rows"]}
    assert list(rows) == ["std", "gone", "new"]
    assert rows["std"]["output_throughput"] == [105.0, 210.0]
    assert rows["std"]["ratio"] == [2.0, 210 / 110, 2.1]
    assert rows["std"]["median_ttft_ms"] == [10.0, 7.0]
    assert rows["std"]["mismatch_rate"] == [0.1, 0.0]
    assert rows["std"]["repeats"] == [2, 1]
    assert (rows["gone"]["output_throughput"], rows["gone"]["ratio"]) == ([5.0, None], None)
    assert rows["new"]["p99_ttft_ms"] == [None, 20.0]
    assert ratio(spread_of_two(0.0, 0.0), spread_of_two(1.0, 1.0)) is None


def test_runs_at_other_loads_are_no_repeats_of_each_other() -> None:
    first = result(*(row("std", 10.0 * count, max_concurrency=count) for count in (1, 64)))
    second = result(*(row("std", 10.0 * count, max_concurrency=count) for count in (64, 256)))
    second["runs"].append(row("std", 5.0, max_concurrency=64, request_rate=2.0))
    found = [
        (one["max_concurrency"], one["request_rate"], one["repeats"], one["output_throughput"])
        for one in compare(first, second)["rows"]
    ]
    assert found == [
        (1, None, [1, 0], [10.0, None]),
        (64, None, [1, 1], [640.0, 640.0]),
        (256, None, [0, 1], [None, 2560.0]),
        (64, 2.0, [0, 1], [None, 5.0]),
    ]


def test_one_load_stands_for_a_workload() -> None:
    """Files with other arrival rates may be merged: the median over them would be a number of none."""
    loads = ((4, None, 1.0), (4, None, 3.0), (2, None, 50.0), (4, 2.0, 70.0), (4, 8.0, 90.0))
    runs = [row("std", value, max_concurrency=count, request_rate=rate) for count, rate, value in loads]
    merged = results.merge({"a": result(*runs[:3]), "b": result(*runs[3:])})
    assert [run["output_throughput"] for run in merged.runs_of("in=1,out=2", "std")] == [1.0, 3.0]
    opened = results.merge({"b": result(*runs[3:])})
    assert [run["output_throughput"] for run in opened.runs_of("in=1,out=2", "std")] == [90.0]


def test_the_command_prints_warnings_a_table_and_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    results.write(first, result(row("std", 100.0), mismatches=[mismatch("std", 8, 1)]))
    results.write(second, with_conditions(result(row("std", 150.0), row("new", 1.0)), model="large"))
    assert tyro.cli(Compare, args=[str(first), str(second)]).run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "warning: model differs: tiny != large"
    std = next(line for line in lines if " std " in line)
    assert "100.0 → 150.0" in std
    assert "1.500 (1.500 to 1.500)" in std
    assert "12.50% → -" in std
    assert json.loads(lines[-1]) == compare(results.read(first), results.read(second))
    assert tyro.cli(Compare, args=["--json", str(first), str(first)]).run() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
