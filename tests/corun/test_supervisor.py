"""Processes are started, restarted, given up and ended, and nothing of them is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corun import processes
from corun.launch import supervisor as policy
from corun.launch.supervisor import ProcessState, Supervisor
from corun.node.life import EXIT_QUARANTINED
from corun.observe import stages
from tests.machine import wait_for

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
IGNORES_TERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
DRAINS = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('drained'))); {SLEEP}"
# Leaves a process of its own session behind, whose id it prints.
ORPHANS = (
    "import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print(p.pid, flush=True); {}"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    fields = processes.stat_fields(pid)
    return fields is not None and fields[0] != "Z"  # A container's init may never reap.


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FIRST_DELAY_S", 0.01)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started again while the test runs."""
    monkeypatch.setattr(policy, "FIRST_DELAY_S", policy.MAX_DELAY_S)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "process.log"


def written(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def first_pid(log: Path) -> int:
    return int(written(log).split()[0])


def supervise(log: Path, code: str, text: str, **options: Any) -> Supervisor:
    """Start a process, and wait until its log has a text."""
    supervisor = Supervisor("node", python(code), log, **options)
    wait_for(lambda: text in written(log), "started")
    return supervisor


def has_ended(supervisor: Supervisor) -> bool:
    return supervisor.status().state in (ProcessState.STOPPED, ProcessState.FAILED)


def end(supervisor: Supervisor) -> None:
    supervisor.stop()
    wait_for(lambda: has_ended(supervisor), "ended")


def test_stop_asks_politely(log: Path) -> None:
    supervisor = supervise(log, DRAINS, "up")
    end(supervisor)
    assert written(log) == "up\ndrained\n"
    assert (supervisor.status().state, supervisor.status().deaths) == (ProcessState.STOPPED, 0)


def test_stop_kills_after_the_grace_and_a_second_stop_at_once(log: Path) -> None:
    end(supervise(log, IGNORES_TERM, "up", grace_s=0.2))
    supervisor = supervise(log, IGNORES_TERM, "up\nup", grace_s=60)
    supervisor.stop()
    time.sleep(0.2)
    assert not has_ended(supervisor)
    end(supervisor)


@pytest.mark.parametrize(
    ("entered", "drains"),
    [((), True), (("importing vLLM",), False), (("importing vLLM", stages.LAST), True)],
    ids=["no-stages", "loading", "joined"],
)
def test_a_process_that_starts_is_ended_at_once_and_one_that_may_have_work_drains(
    log: Path, entered: tuple[str, ...], drains: bool
) -> None:
    enter = f"from corun.observe import stages; [stages.enter(one) for one in {entered}]"
    end(supervise(log, f"{enter}; {DRAINS if drains else IGNORES_TERM}", "up", grace_s=60))
    assert ("drained" in written(log)) == drains


def test_a_process_whose_log_was_cleared_away_is_started_again(log: Path) -> None:
    """Logs are below /tmp by default, which systems clear of what is old."""
    at = log.parent / "cleared" / log.name
    at.parent.mkdir()
    supervisor = supervise(at, f"import os; print(os.getpid()); {SLEEP}", "up")
    pid = first_pid(at)
    shutil.rmtree(at.parent)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "up" in written(at), "started again")
    assert re.fullmatch(r"killed by signal 9 after \d+ s", supervisor.status().detail)
    end(supervisor)


def failing_starts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    left = iter(range(count))

    class Failing(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if next(left, None) is not None:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("corun.launch.supervisor.subprocess.Popen", Failing)


def test_a_start_that_fails_for_a_moment_is_made_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be full, or there may be too many processes, when a node that died is to start again."""
    supervisor = supervise(log, f"import os; print(os.getpid()); {SLEEP}", "up")
    failing_starts(monkeypatch, 2)
    os.kill(first_pid(log), signal.SIGKILL)
    wait_for(lambda: written(log).count("up") == 2, "started again")
    assert (supervisor.status().state, supervisor.status().deaths) == (ProcessState.RUNNING, 1)
    end(supervisor)


def test_a_process_that_cannot_be_started_again_is_given_up(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervise(log, f"import os; print(os.getpid()); {SLEEP}", "up")
    failing_starts(monkeypatch, 99)
    os.kill(first_pid(log), signal.SIGKILL)
    wait_for(lambda: has_ended(supervisor), "given up")
    assert supervisor.status().state is ProcessState.FAILED
    assert supervisor.status().detail == "cannot be started: [Errno 11] Resource temporarily unavailable"


def test_what_cannot_be_started_is_given_up(log: Path) -> None:
    """Whoever waits for its end would wait for ever, if it counted as one that starts again."""
    (log.parent / "file").touch()
    supervisor = Supervisor("node", python(SLEEP), log.parent / "file" / log.name)
    wait_for(lambda: has_ended(supervisor), "given up")
    status = supervisor.status()
    assert (status.state, status.deaths) == (ProcessState.FAILED, 1)
    assert status.detail.startswith("cannot be started: [Errno 17] File exists")


def test_stop_during_the_delay_starts_nothing(log: Path, slow: None) -> None:
    supervisor = supervise(log, "print('once')", "once")
    wait_for(lambda: supervisor.status().deaths == 1, "died")
    end(supervisor)
    assert written(log) == "once\n"


def test_killed_process_is_started_again(log: Path) -> None:
    supervisor = supervise(log, f"import os; print(os.getpid()); {SLEEP}", "up")
    os.kill(first_pid(log), signal.SIGKILL)
    wait_for(lambda: written(log).count("up") == 2, "started again")
    status = supervisor.status()
    assert (status.state, status.deaths) == (ProcessState.RUNNING, 1)
    assert re.fullmatch(r"killed by signal 9 after \d+ s", status.detail)
    end(supervisor)


@pytest.mark.parametrize(
    ("code", "exit_code", "deaths"),
    [
        ("raise SystemExit('no such model')", 1, 3),
        (f"raise SystemExit({EXIT_QUARANTINED})", EXIT_QUARANTINED, 3),  # It is started again, as after any death.
        ("raise SystemExit(2)", 2, 1),  # A usage error is final.
    ],
)
@pytest.mark.parametrize("is_slow", [False, True])
def test_quick_deaths_are_given_up(
    log: Path, code: str, exit_code: int, deaths: int, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a process ever says may be in its log before whoever started it runs again."""

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    if is_slow:
        monkeypatch.setattr("corun.launch.supervisor.subprocess.Popen", Slow)
    supervisor = Supervisor("node", python(code), log)
    wait_for(lambda: has_ended(supervisor), "given up")
    status = supervisor.status()
    assert (status.state, status.deaths) == (ProcessState.FAILED, deaths)
    said = "\nno such model" if "model" in code else ""
    assert re.fullmatch(rf"exit code {exit_code} after \d+ s{said}", status.detail)


def test_a_death_after_a_long_life_is_no_quick_one(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 1000.0, 1000.0, 1001.0, 1001.0, 1002.0, 1002.0, 1003.0))
    monkeypatch.setattr(policy, "time", SimpleNamespace(monotonic=lambda: next(times)))
    supervisor = Supervisor("node", python("raise SystemExit(1)"), log)
    wait_for(lambda: has_ended(supervisor), "given up")
    assert (supervisor.status().state, supervisor.status().deaths) == (ProcessState.FAILED, 4)


def test_the_delay_doubles_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [policy._delay_s(quick) for quick in range(8)] == [1, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("last", ["", SLEEP], ids=["ended", "running"])
def test_orphans_end_too(log: Path, last: str, slow: None) -> None:
    end(supervise(log, ORPHANS.format(last), "\n"))
    assert not alive(first_pid(log))


@pytest.mark.parametrize("is_asked", [False, True], ids=["running", "draining"])
def test_nothing_outlives_a_killed_supervisor_for_a_moment(log: Path, is_asked: bool) -> None:
    """Nobody waits for the process to drain: the next one needs its port. Orphans end, too."""
    code = (
        "import sys, time; from pathlib import Path; from corun.launch.supervisor import Supervisor;"
        "made = Supervisor('node', sys.argv[2:], Path(sys.argv[1]), grace_s=60);"
        "sys.stdin.readline() and made.stop(); print('stopped', flush=True); time.sleep(60)"
    )
    command = [*python(code), str(log), *python(ORPHANS.format(IGNORES_TERM))]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdin is not None
    assert owner.stdout is not None
    wait_for(lambda: "up" in written(log), "started")
    (of_guard,) = processes.children(owner.pid)
    tree = [of_guard, *processes.children(of_guard), first_pid(log)]
    assert len(tree) == 3
    if is_asked:
        owner.stdin.write("stop\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "stopped\n"
        assert all(map(alive, tree))
    owner.kill()
    owner.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, tree)), "all ended")


def test_nothing_outlives_a_killed_guard(log: Path, slow: None) -> None:
    code = f"import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); {SLEEP}"
    supervisor = supervise(log, code, "up")
    os.kill(supervisor.status().pid, signal.SIGKILL)
    wait_for(lambda: supervisor.status().deaths == 1, "noticed")
    # Whoever was killed has not written why.
    assert re.fullmatch(r"killed by signal 9 after \d+ s", supervisor.status().detail)
    wait_for(lambda: not alive(first_pid(log)), "ended")
    end(supervisor)


def test_deaths_on_request_do_not_count(log: Path) -> None:
    """Somebody who watches kills of a node may ask for many of them."""
    supervisor = supervise(log, f"import subprocess; subprocess.Popen(['sleep', '60']); {SLEEP}", "up")
    for deaths in range(1, 2 + policy.MAX_QUICK_DEATHS):
        supervisor.kill()
        wait_for(lambda deaths=deaths: written(log).count("up") == deaths + 1, "started again")  # type: ignore[misc]
        assert supervisor.status().deaths == deaths
        assert re.match(r"killed on request after \d+ s", supervisor.status().detail)
    end(supervisor)
    supervisor.kill()  # There is nothing to kill.
