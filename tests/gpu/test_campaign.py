"""Which experiment of a campaign runs when, and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.campaign import RESULTS, Campaign, Experiment, Plan, Result, read, run

HERE = Path(__file__).parent


def plan(*experiments: Experiment, gpus: int = 2) -> Plan:
    return Plan(list(experiments), dict.fromkeys(range(gpus), 1.0))


def some(name: str, **needs: object) -> Experiment:
    return Experiment(name=name, command="", **{"minutes": 1.0, **needs})  # type: ignore[arg-type]


def started(made: Plan) -> list[tuple[str, tuple[int, ...]]]:
    found = []
    while (one := made.next()) is not None:
        found.append((one[0].name, one[1]))
    return found


def test_shares_of_a_gpu_fill_it_and_the_emptiest_gpu_comes_first() -> None:
    made = plan(*(some(name, share=0.4) for name in "abcde"))
    assert started(made) == [("a", (0,)), ("b", (1,)), ("c", (0,)), ("d", (1,))]
    assert [one.name for one in made.waiting] == ["e"]


def test_one_that_waits_for_whole_gpus_is_not_overtaken_on_them() -> None:
    small, pair = some("small", share=0.5), some("pair", count=2)
    made = plan(small, pair, some("later", share=0.5))
    assert started(made) == [("small", (0,))]
    made.end(small, Result(name="small", code=0, gpus=(0,)))
    assert started(made) == [("pair", (0, 1))]
    made.end(pair, Result(name="pair", code=0, gpus=(0, 1)))
    assert started(made) == [("later", (0,))]


def test_what_needs_the_results_of_another_waits_and_is_left_out_if_that_failed() -> None:
    first = some("first", share=0.1)
    made = plan(first, some("second", after=("first",)), some("other", share=0.1))
    assert started(made) == [("first", (0,)), ("other", (1,))]
    made.end(first, Result(name="first", code=3, gpus=(0,)))
    assert [one.why for one in made.drop(1000.0)] == ["first did not end with 0"]


def test_what_can_not_end_in_time_or_has_too_few_gpus_is_left_out() -> None:
    made = plan(some("long", minutes=10.0), some("wide", count=4), some("short"))
    assert {one.name: one.why for one in made.drop(100.0)} == {"long": "no time left", "wide": "needs 4 GPUs"}
    assert started(made) == [("short", (0,))]


def test_commands_run_once_and_know_their_gpu_and_their_directories(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        '[[experiment]]\nname = "one"\nminutes = 1\ncommand = "echo {gpu} > {out}/said"\n'
        '[[experiment]]\nname = "two"\nminutes = 1\nafter = ["one"]\ncommand = "cat {results}/one/said && exit 3"\n'
        '[[experiment]]\nname = "late"\nminutes = 0\ncommand = "exec sleep 600"\n'
    )
    out = tmp_path / "out"
    assert run(Campaign(file=file, out=out)) == 1
    found = {one["name"]: (one["code"], one["why"]) for one in json.loads((out / RESULTS).read_text())}
    assert found == {"one": (0, ""), "late": (None, "its time was over"), "two": (3, "")}
    assert (out / "two" / "log").read_text() == "0\n"
    (out / "one" / "said").write_text("kept\n")
    assert run(Campaign(file=file, out=out, only=("two",))) == 1
    assert (out / "two" / "log").read_text() == "kept\n"


@pytest.mark.parametrize("wrong", ["again", "unknown"])
def test_a_wrong_list_is_refused(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "some.toml"
    one = '[[experiment]]\nname = "one"\nminutes = 1\ncommand = "true"\n'
    file.write_text(one * 2 if wrong == "again" else one)
    with pytest.raises(ValueError, match="one" if wrong == "again" else "other"):
        read(file, () if wrong == "again" else ("other",))


def test_the_list_of_the_project_can_be_read() -> None:
    found = read(HERE / "campaign.toml")
    assert all(0 < one.share <= 1 and one.minutes > 0 for one in found)
