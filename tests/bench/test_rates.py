"""Rates that can be read off a timeline by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from corun.errors import InvalidArgumentError
from corun_bench import rates
from corun_bench.options import PlanOptions

TIMELINE = {
    "bin_s": 1.0,
    "prefill_tokens_per_s": [200, 200, 0, 0, 0, 0, 0],
    "decode_tokens_per_s": [10, 30, 80, 80, 80, 80, 40],
    "running": [1, 3, 4, 4, 4, 4, 1],
}
"""Four prompts of 100 tokens in two seconds, then 80 steps of four rows in four seconds, and 40 of one row in one."""


def result(decode: Any = ((1,),), **run: Any) -> dict[str, Any]:
    """A result of a prefill node on GPU 0, and of decode nodes on these."""
    row = {"system": "cluster:1p1d", "workload": "in=100,out=99", "max_concurrency": 4, "request_rate": None}
    row |= {"completed": 4, "failed": 0, "total_input_tokens": 400, "timeline": TIMELINE} | run
    system = {
        "system": "cluster:1p1d",
        "slots": 8,
        "settings": {
            "prefill": [[0]],
            "decode": [list(places) for places in decode],
            "nodes": {"d0": {"kv_blocks": 9}},
        },
        "handoff": {"count": 4, "bytes": 1, "mean_ms": 5.0},
    }
    return {"schema": "corun-bench-1", "systems": [system], "runs": [row], "mismatches": []}


def test_nodes_on_gpus_of_their_own() -> None:
    found = rates.measured(result(), "", 100)
    assert found.prefill_tokens_per_s == pytest.approx(200)
    assert found.decode_steps == ((1.0, pytest.approx(0.025)), (4.0, pytest.approx(0.05)))
    assert found.handoff_s_per_token == pytest.approx(5e-5)
    assert (found.slots, found.kv_tokens, found.shares, found.lacks) == (8, 144, False, "")


def test_decode_steps_are_taken_off_where_nodes_share_a_gpu() -> None:
    """Ten steps of one row in the first second, and ten of three in the next: 250 ms and 10 x 41.7 ms."""
    found = rates.measured(result(decode=((0,),)), "", 100)
    assert found.prefill_tokens_per_s == pytest.approx(400 / (2 - 0.25 - 10 * (0.025 + 0.025 * 2 / 3)))
    assert found.handoff_s_per_token is None  # A read there waits for its turn on the GPU.


def test_two_decode_nodes_have_half_of_the_rows_each() -> None:
    found = rates.measured(result(decode=((1,), (2,))), "", 100)
    assert found.decode_steps == ((2.0, pytest.approx(0.05)),)
    assert found.slots == 4


def test_the_room_of_nodes_that_only_prefill_does_not_count() -> None:
    """As of a colocated node on an H200, whose prompts have an eighth of the room."""
    found = result()
    sides = {"c0-prefill": {"kv_blocks": 5670, "slots": 0}, "c0-decode": {"kv_blocks": 39_694, "slots": 256}}
    found["systems"][0]["settings"] = {"colocated": [[0]], "nodes": sides}
    assert rates.measured(found, "", 100).kv_tokens == 39_694 * 16


def test_a_system_must_be_chosen() -> None:
    two = result()
    two["systems"].append({"system": "std", "slots": 4, "settings": {"engines": [[0]]}})
    assert rates.measured(two, "", 100).system == "cluster:1p1d"
    with pytest.raises(InvalidArgumentError, match="system = 'bi': must be one of std, cluster:1p1d"):
        rates.measured(two, "bi", 100)
    assert rates.measured(two, "std", 100).lacks == "std has no closed-loop run of which 20 steps only decode"


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 3},
        {"settings": {"prefill": 0.5, "decode": [[0]]}},
        {"settings": {"colocated": [[0]], "nodes": {"c0": "x"}}},
        {"settings": {"colocated": [[[0]]]}},
    ],
)
def test_a_file_with_other_things_in_it_is_no_traceback(changes: dict[str, Any]) -> None:
    odd = result(completed=0, timeline=TIMELINE | {"running": [1, None, "x"]})
    odd["systems"][0] |= changes
    with suppress(InvalidArgumentError):
        rates.measured(odd, "", 100)


def test_a_mix_shows_the_rates_of_neither_kind() -> None:
    mix = result()
    mix["systems"][0]["settings"]["colocated"] = [[2]]
    with pytest.raises(InvalidArgumentError, match="a mix shows the rates of neither"):
        rates.measured(mix, "", 100)
    mix["systems"][0]["settings"] = {"colocated": [[0], [1]]}
    found = rates.measured(mix, "", 100)
    assert (found.shares, found.slots, [rows for rows, _ in found.decode_steps]) == (True, 4, [2.0])


@pytest.mark.parametrize("run", [{"request_rate": 3.0}, {"failed": 1}, {"workload": "padding=8"}])
def test_runs_that_show_no_rates(run: dict[str, Any]) -> None:
    assert rates.measured(result(**run), "", 100).decode_steps == ()


def test_a_rollout_shows_no_prefill_rate() -> None:
    """Its prompts were not all computed, so tokens a second of them are too many."""
    found = rates.measured(result(workload="rl=2x2,in=100,out=99"), "", 100)
    assert (found.prefill_tokens_per_s, len(found.decode_steps)) == (0.0, 2)


def test_the_prefill_rate_of_the_closest_prompts() -> None:
    both = result()
    both["runs"].append(
        both["runs"][0]
        | {"workload": "in=200,out=99", "total_input_tokens": 800}
        | {"timeline": TIMELINE | {"prefill_tokens_per_s": [600, 200, 0, 0, 0, 0, 0]}}
    )
    assert rates.measured(both, "", 90).prefill_tokens_per_s == pytest.approx(200)
    found = rates.measured(both, "", 180)
    assert (found.prefill_tokens_per_s, found.prompt_tokens) == (pytest.approx(400), 200)


def test_options_go_before_what_was_measured() -> None:
    given = PlanOptions(workload="in=1,out=1", handoff_us_per_token=0.0, slots=2, decode_step_ms=("1:5", "2:6"))
    found = rates.chosen(given, rates.measured(result(), "", 100))
    assert (found.handoff_s_per_token, found.slots, found.kv_tokens) == (0.0, 2, 144)
    assert found.decode_steps == ((1, 0.005), (2, 0.006))
    assert found.prefill_tokens_per_s == pytest.approx(200)


def test_no_rate_is_made_up() -> None:
    with pytest.raises(InvalidArgumentError, match=r"prefill_tokens_per_s = None: is not known; give it, or measure"):
        rates.chosen(PlanOptions(workload="in=1,out=1"), None)
    short = rates.measured(result(request_rate=1.0), "", 100)
    with pytest.raises(InvalidArgumentError, match="is not in what was measured: cluster:1p1d has no closed-loop run"):
        rates.chosen(PlanOptions(workload="in=1,out=1"), short)


@pytest.mark.parametrize("words", [("5",), ("0:1",), ("1:0",), ("1:nan",), ("2:5", "1:6"), ("1:5", "2:4")])
def test_no_steps(words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="decode_step_ms"):
        rates.parse_steps(words)
