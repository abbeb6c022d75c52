"""Processes are started, restarted, given up and ended, and nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corun import guard
from corun.launch.supervisor import ProcessState, RestartPolicy, Supervisor
from corun.node.life import EXIT_QUARANTINED

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.05, settled_s=10, max_quick_deaths=3)
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
IGNORES_TERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
# Leaves a process of its own session behind, whose id it prints.
ORPHANS = (
    "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True); {}"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {timeout_s} s: {what}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    fields = guard.stat_fields(pid)
    return fields is not None and fields[0] != "Z"  # A container's init may never reap.


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "process.log"


def written(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_stop_asks_politely(log: Path) -> None:
    code = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('drained'))); {SLEEP}"
    supervisor = Supervisor("node", python(code), log, policy=QUICK)
    wait_for(lambda: "up" in written(log), "started")
    supervisor.stop()
    assert supervisor.join(30)
    assert written(log) == "up\ndrained\n"
    assert supervisor.status().state is ProcessState.STOPPED
    assert supervisor.status().deaths == 0


def test_stop_kills_after_the_grace(log: Path) -> None:
    supervisor = Supervisor("node", python(IGNORES_TERM), log, grace_s=0.2, policy=QUICK)
    wait_for(lambda: "up" in written(log), "started")
    supervisor.stop()
    assert supervisor.join(30)


def test_second_stop_kills_at_once(log: Path) -> None:
    supervisor = Supervisor("node", python(IGNORES_TERM), log, grace_s=60, policy=QUICK)
    wait_for(lambda: "up" in written(log), "started")
    supervisor.stop()
    assert not supervisor.join(0.2)
    supervisor.stop()
    assert supervisor.join(30)


def test_stop_during_the_delay_starts_nothing(log: Path) -> None:
    slow = RestartPolicy(first_delay_s=60, max_delay_s=60)
    supervisor = Supervisor("node", python("print('once')"), log, policy=slow)
    wait_for(lambda: supervisor.status().deaths == 1, "died")
    supervisor.stop()
    assert supervisor.join(30)
    assert written(log) == "once\n"


def test_killed_process_is_started_again(log: Path) -> None:
    supervisor = Supervisor("node", python(f"import os; print(os.getpid()); {SLEEP}"), log, policy=QUICK)
    wait_for(lambda: written(log).count("up") == 1, "started")
    os.kill(int(written(log).split()[0]), signal.SIGKILL)
    wait_for(lambda: written(log).count("up") == 2, "started again")
    status = supervisor.status()
    assert (status.state, status.deaths) == (ProcessState.RUNNING, 1)
    assert re.match(r"exit code 137 after \d+ s", status.detail)
    supervisor.stop()
    assert supervisor.join(30)


def test_gives_up_after_quick_deaths(log: Path) -> None:
    supervisor = Supervisor("node", python("raise SystemExit('no such model')"), log, policy=QUICK)
    assert supervisor.join(30)
    status = supervisor.status()
    assert (status.state, status.deaths) == (ProcessState.FAILED, 3)
    assert re.fullmatch(r"exit code 1 after \d+ s\nno such model", status.detail)


def test_a_death_in_the_moment_of_the_start_has_its_reason(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a process ever says may be in its log before whoever started it runs again."""

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr("corun.launch.supervisor.subprocess.Popen", Slow)
    supervisor = Supervisor("node", python("raise SystemExit('no such model')"), log, policy=QUICK)
    assert supervisor.join(30)
    assert supervisor.status().detail.endswith("s\nno such model")


def test_a_quarantined_node_is_started_again(log: Path) -> None:
    """With the delay of any death, and given up if that happens again and again."""
    supervisor = Supervisor("node", python(f"raise SystemExit({EXIT_QUARANTINED})"), log, policy=QUICK)
    assert supervisor.join(30)
    assert (supervisor.status().state, supervisor.status().deaths) == (ProcessState.FAILED, QUICK.max_quick_deaths)


def test_usage_error_is_final(log: Path) -> None:
    supervisor = Supervisor("node", python("raise SystemExit(2)"), log, policy=QUICK)
    assert supervisor.join(30)
    assert supervisor.status().deaths == 1


def test_long_lives_are_never_given_up() -> None:
    delays = [RestartPolicy().delay_s(quick) for quick in range(8)]
    assert delays == [1, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("last", ["", SLEEP], ids=["ended", "running"])
def test_orphans_end_too(log: Path, last: str) -> None:
    supervisor = Supervisor("node", python(ORPHANS.format(last)), log, policy=RestartPolicy(first_delay_s=60))
    wait_for(lambda: "\n" in written(log), "started")
    supervisor.stop()
    assert supervisor.join(30)
    assert not alive(int(written(log).split()[0]))


def test_nothing_outlives_a_killed_supervisor(log: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from corun.launch.supervisor import Supervisor;"
        "Supervisor('node', sys.argv[2:], Path(sys.argv[1])); time.sleep(60)"
    )
    owner = subprocess.Popen([*python(code), str(log), *python(ORPHANS.format(SLEEP))])
    wait_for(lambda: "up" in written(log), "started")
    tree = [*guard.children(owner.pid), int(written(log).split()[0])]
    assert len(tree) == 2
    owner.kill()
    owner.wait(30)
    wait_for(lambda: not any(map(alive, tree)), "all ended")


@pytest.mark.parametrize("is_asked", [False, True], ids=["running", "draining"])
def test_a_killed_supervisor_leaves_its_port_at_once(log: Path, is_asked: bool) -> None:
    """Nobody waits for the process to drain, and the next one needs its port."""
    code = (
        "import sys, time; from pathlib import Path; from corun.launch.supervisor import Supervisor;"
        "made = Supervisor('node', sys.argv[2:], Path(sys.argv[1]), grace_s=60);"
        "sys.stdin.readline() and made.stop(); print('stopped', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [*python(code), str(log), *python(IGNORES_TERM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    wait_for(lambda: "up" in written(log), "started")
    (of_guard,) = guard.children(owner.pid)
    tree = [of_guard, *guard.children(of_guard)]
    assert len(tree) == 2
    if is_asked:
        owner.stdin.write("stop\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "stopped\n"
        assert all(map(alive, tree))
    owner.kill()
    owner.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, tree)), "all ended")


def test_nothing_outlives_a_killed_guard(log: Path) -> None:
    code = f"import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); {SLEEP}"
    supervisor = Supervisor("node", python(code), log, policy=RestartPolicy(first_delay_s=60))
    wait_for(lambda: "up" in written(log), "started")
    os.kill(supervisor.status().pid, signal.SIGKILL)
    wait_for(lambda: supervisor.status().deaths == 1, "noticed")
    assert supervisor.status().detail.startswith("killed by signal 9")
    wait_for(lambda: not alive(int(written(log).split()[0])), "ended")
    supervisor.stop()
    assert supervisor.join(30)
