"""Child processes: none is left after the block, and one that ends by itself is noticed. No timing is asserted."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from corun.errors import UnavailableError
from corun.processes import descendants, living
from corun_bench.children import Processes

UNTIL_ITS_INPUT_ENDS = "tokenize"


def test_none_is_left_after_the_block(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("a", UNTIL_ITS_INPUT_ENDS, stdin=subprocess.PIPE)
        child = processes.running["a"]
        assert child.poll() is None
    assert child.returncode == -9
    assert processes.running == {}


def test_those_whose_input_ends_finish(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        for name in ("a", "b", "other"):
            processes.start(name, UNTIL_ITS_INPUT_ENDS, stdin=subprocess.PIPE)
        processes.finish(["a", "b"], 60.0)
        assert list(processes.running) == ["other"]
        processes.start("bad", UNTIL_ITS_INPUT_ENDS, "no such file", stdin=subprocess.PIPE)
        with pytest.raises(UnavailableError, match=r"bad ended with 1: .*no such file"):
            processes.finish(["bad"], 60.0)


def test_one_that_ends_meanwhile_is_noticed(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("a", "no_such_module")
        with pytest.raises(UnavailableError, match=r"a ended with 1: .*No module named no_such_module"):
            processes.wait(60.0)


def test_the_tail_of_a_log_begins_with_what_went_wrong_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("fine\nValueError: the cause\n" + 2 * (1000 * "more\n" + "OSError: later\n"))
    lines = Processes(tmp_path).tail("a").splitlines()
    assert lines[:2] == ["ValueError: the cause", "OSError: later"]
    assert (set(lines[3:-1]), lines[-1]) == ({"more"}, "OSError: later")


def test_each_is_asked_what_it_uses(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("a", UNTIL_ITS_INPUT_ENDS, stdin=subprocess.PIPE)
        processes.start("b", UNTIL_ITS_INPUT_ENDS, stdin=subprocess.PIPE)
        assert {name: child.pid for name, child in processes.running.items()} == {
            name: pid for pid, name in processes.owners().items()
        }
        assert processes.memory().keys() == processes.cpu_s().keys() == {"a", "b"}
        while not all(size > 0 for size in processes.memory().values()):
            time.sleep(0.01)  # While a process loads its program, it has no memory for a moment.
        assert processes.terminate("a") == -15
        assert processes.terminate("b") == -15


def test_one_that_does_not_end_when_it_is_asked_to_is_killed(tmp_path: Path) -> None:
    """Its owner goes on: what was measured before is not lost, and the next system gets its turn."""
    deaf = "import signal; signal.signal(15, 1); print('deaf', flush=True); signal.pause()"
    with Processes(tmp_path) as processes:
        processes.start("a", "timeit", "-n1", deaf)
        while "deaf" not in processes.log("a"):
            time.sleep(0.01)
        assert processes.terminate("a", 0.1) == -9


def test_what_a_killed_one_had_started_ends_with_it(tmp_path: Path) -> None:
    started = "import subprocess, time; subprocess.Popen(['sleep', '600'])"
    with Processes(tmp_path) as processes:
        processes.start("a", "timeit", "-n1", "-r1", f"-s{started}", "time.sleep(600)")
        while not (tree := descendants(processes.running["a"].pid)):
            time.sleep(0.01)
        processes.note("a")
        processes.running["a"].kill()
        processes.running["a"].wait()
        assert living(tree)
    assert not living(tree)
