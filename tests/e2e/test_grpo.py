"""The example of a GRPO loop, on real engines: what it prints is what it promises."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_two_policies_are_rolled_out_and_recomputed_with_the_same_bits() -> None:
    command = [sys.executable, "examples/grpo.py", "--steps", "2", "--group", "8"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=840, check=False)
    policies = re.findall(r"step \d: policy (\w+), 32 samples, mean reward 0\.\d+", run.stdout)
    assert len(set(policies)) == 2, run.stdout
    found = {
        name: [(int(count), int(total)) for count, total in re.findall(rf"(\d+) of (\d+) .*differ: {name}", run.stdout)]
        for name in ("drawn again", "scored, and scored again alone", "drawn, and computed by plain torch")
    }
    assert all(len(counts) == 2 and total > 0 for counts in found.values() for _, total in counts), run.stdout
    assert [count for count, _ in found["drawn again"] + found["scored, and scored again alone"]] == [0] * 4
    assert all(count for count, _ in found["drawn, and computed by plain torch"]), "the control could not differ"
    assert (run.returncode, run.stdout.splitlines()[-1]) == (0, "every bit that must agree agreed")


@pytest.mark.parametrize(("option", "value", "least"), [("--group", "1", 2), ("--steps", "0", 1)])
def test_what_would_compare_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str, least: int
) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "grpo.py"))
    example["main"].__globals__["made"] = lambda _: pytest.fail("it began")
    monkeypatch.setattr("sys.argv", ["grpo.py", option, value])
    with pytest.raises(SystemExit) as caught:
        example["main"]()
    assert caught.value.code == 2
    assert f"{option} = {value}: must be at least {least}" in capsys.readouterr().err


def test_two_zeros_of_other_signs_differ() -> None:
    differ = runpy.run_path(str(ROOT / "examples" / "grpo.py"))["differ"]
    assert differ("zeros", [[0.0, -1.5], [-0.0]], [[-0.0, -1.5], [-0.0]]) == 1
    assert differ("nothing", [[0.1], []], [[0.1], []]) == 0
