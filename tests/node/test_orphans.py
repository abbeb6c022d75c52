"""A process whose parent was killed: with and without the watch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corun.guard import stat_fields
from corun.node.vllm.orphans import end_with_parent

DEADLINE_S = 30.0


def child(watch: bool, pid_file: str) -> None:
    if watch:
        end_with_parent()
    Path(f"{pid_file}.new").write_text(str(os.getpid()))
    Path(f"{pid_file}.new").rename(pid_file)
    time.sleep(2 * DEADLINE_S)


def parent(watch: bool, pid_file: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=child, args=(watch, pid_file))
    process.start()
    process.join()


def ends(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (fields := stat_fields(pid)) is not None and fields[0] != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("watch", [True, False])
def test_a_child_ends_with_its_killed_parent_only_if_it_watches(watch: bool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"from tests.node.test_orphans import parent; parent({watch}, {str(pid_file)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not pid_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = int(pid_file.read_text())
        process.kill()
    try:
        assert ends(pid, DEADLINE_S if watch else 0.5) is watch
    finally:
        if not watch:
            os.kill(pid, signal.SIGKILL)


def test_a_process_of_its_own_watches_nobody() -> None:
    end_with_parent()
