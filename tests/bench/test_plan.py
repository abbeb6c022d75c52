"""Plans: which placements are simulated, what is advised, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corun import cli
from corun.errors import InvalidArgumentError
from corun_bench.options import PlanOptions
from corun_bench.plan import plan, show


def options(workload: str, **own: Any) -> PlanOptions:
    """Rates like those of one H200, slots as few as make a small simulation."""
    given: dict[str, Any] = {
        "prefill_tokens_per_s": 40_000.0,
        "decode_step_ms": ("1:6", "16:7"),
        "handoff_us_per_token": 3.4,
        "slots": 16,
    }
    return PlanOptions(workload=workload, **given | own)


def test_a_pair_wastes_a_node_where_one_side_has_little_to_do() -> None:
    found = plan(options("in=4096,out=4", num_gpus=2))
    speeds = {row["placement"]: row["output_throughput"] for row in found["placements"]}
    assert speeds.keys() == {"1p1d", "2c", "1p1c", "1d1c"}
    assert speeds["1p1d"] < 0.55 * speeds["2c"]
    assert found["advised"] != "1p1d"
    wasted = [reason for reason in found["reasons"] if reason.startswith("1p1d wastes its decode nodes: they do 2% of")]
    assert len(wasted) == 1
    assert "while its prefill nodes do 100%" in wasted[0]
    found = plan(options("in=16,out=64", num_gpus=2))
    assert found["advised"] == "2c"
    assert any("1p1d wastes its prefill nodes" in reason for reason in found["reasons"])


def test_pairs_keep_the_time_per_token_that_long_prompts_would_break() -> None:
    """A prompt step takes 51 ms or more, in which a colocated node's outputs stall; a decode node's never do."""
    targets = ("tpot:8",)
    found = plan(options("in=2048,out=16", num_gpus=2, request_rate=15.0, goodput=targets, num_prompts=100))
    assert found["advised"] == "1p1d"
    best = found["placements"][0]
    assert best["good"] == 1.0
    assert next(row for row in found["placements"] if row["placement"] == "2c")["good"] < 0.95


def test_of_placements_that_are_as_good_the_one_with_fewer_kinds_is_advised() -> None:
    """All of them keep up, so the reasons name the others."""
    found = plan(options("in=512,out=16", num_gpus=2, request_rate=2.0, goodput=("ttft:1000",), num_prompts=20))
    assert {row["good"] for row in found["placements"]} == {1.0}
    assert found["advised"] == "2c"
    assert [reason for reason in found["reasons"] if reason.startswith("Within 1% of it, so as good as far")]


def test_the_fewest_gpus_that_reach_the_targets() -> None:
    """50 requests a second are 2.56 GPUs of prefill alone, and 2.9 with decode."""
    found = plan(options("in=2048,out=16", request_rate=50.0, goodput=("ttft:1000",), num_prompts=100))
    assert found["placements"][0]["gpus"] in {3, 4}
    assert found["placements"][0]["good"] >= 0.95
    with pytest.raises(
        InvalidArgumentError, match=r"goodput = 'ttft:10': must be easier: on up to 12 GPUs, at most 0\.0%"
    ):
        plan(options("in=2048,out=16", request_rate=50.0, goodput=("ttft:10",), num_prompts=20))


def test_a_large_cluster_is_placed_in_parts() -> None:
    found = plan(options("in=512,out=8", num_gpus=32, num_prompts=32))
    assert 8 <= len(found["placements"]) <= 43
    assert all(row["gpus"] == 32 for row in found["placements"])


def test_placements_by_name_and_nodes_of_several_gpus() -> None:
    found = plan(options("rl=4x4,in=512,out=8", placements=("1p1d", "1c", "1p1d"), gpus_per_node=2))
    assert {row["placement"]: row["gpus"] for row in found["placements"]} == {"1p1d": 4, "1c": 2}


def test_the_same_plan_has_the_same_bits() -> None:
    found = [
        json.dumps(plan(options("burstgpt", placements=("1p1d1c",), num_prompts=50, seed=seed))) for seed in (5, 5, 6)
    ]
    assert found[0] == found[1] != found[2]


def test_a_plan_under_targets_tells_how_long_nodes_took_prompts_only(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"placements": ("2c", "1p1d"), "request_rate": 120.0, "num_prompts": 1000, "step_tokens": 512, "slots": 128}
    found = plan(options("in=512,out=64", ttft_target_ms=200, tpot_target_ms=10, **given))
    without = plan(options("in=512,out=64", **given))
    rows = {row["placement"]: row for row in found["placements"]}
    assert found["ttft_target_ms"] == 200
    assert rows["2c"]["flexed"] > 0
    assert 0 < rows["2c"]["prompts_only"] <= 0.5, "one of two goes on to decode"
    assert rows["1p1d"]["flexed"] is None
    show(found)
    assert "prompts only, last" in capsys.readouterr().out
    assert not {"flexed", "ttft_target_ms"} & {*without, *without["placements"][0]}, "control"


def test_notes_say_what_was_not_measured() -> None:
    notes = plan(options("in=512,out=8", placements=("1c",), slots=32, kv_tokens=10**6))["notes"]
    assert notes == ["Steps of more than 16 rows were not measured; their time continues the line."]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("in=512 --num-gpus 1", "must be in=TOKENS,out=TOKENS or burstgpt"),
        ("in=512,out=8", "num_gpus = 0: must be given, or request_rate and goodput"),
        ("in=512,out=8 --num-gpus 1", "prefill_tokens_per_s = None: is not known; give it, or measure them with corun"),
        ("in=512,out=8 --num-gpus 3 --gpus-per-node 2", "must be a multiple of gpus_per_node, 2"),
        ("in=512,out=8 --num-gpus 1 --measured /nowhere.json", "/nowhere.json"),
        ("in=512,out=8 --placements 1p --prefill-tokens-per-s 9 --decode-step-ms 1:9 --slots 4", "placements = '1p'"),
        ("in=512,out=8 --num-gpus 1 --goodput words", "goodput"),
        ("in=512,out=8,rate=5 --num-gpus 1", "must have no rate: give it as request_rate"),
        ("in=512,out=8 --num-gpus 1 --slots 0", "slots = 0: must be above 0"),
        ("in=512,out=8 --num-gpus 1 --ttft-target-ms -1", "ttft_target_ms = -1: must be at least 0"),
        ("in=512,out=8 --num-gpus 1 --attain 2", "attain = 2.0: must be above 0 and at most 1"),
    ],
)
def test_a_wrong_command_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "plan", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    line = "in=4096,out=4 --num-gpus 2 --prefill-tokens-per-s 40000 --decode-step-ms 1:6 16:7 --slots 16"
    words = [*line.split(), "--handoff-us-per-token", "3.4", "--goodput", "ttft:5000", "-o", str(path)]
    assert cli.main(["bench", "plan", *words]) == 0
    out, err = capsys.readouterr()
    assert "advised: 2c" in out
    assert "4 placements on 2 engines" in err
    assert json.loads(out.splitlines()[-1]) == json.loads(path.read_text())
