"""What both roles' schedulers share: zeroed blocks, and the end of a process whose parent was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from corun.guard import stat_fields
from corun.types import NodeRole
from tests.loading import load
from tests.traces import CPU, Trace

SCHEDULERS = {
    NodeRole.PREFILL: "prefill_node.scheduler.IsolatedPrefillScheduler",
    NodeRole.DECODE: "decode_node.scheduler.FixedSlotScheduler",
}
DEADLINE_S = 60.0


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("role", SCHEDULERS)
def test_blocks_are_zeroed_where_a_cpu_computes(monkeypatch: pytest.MonkeyPatch, role: NodeRole, on_cpu: bool) -> None:
    """A GPU's runner ends of blocks to be zeroed: vLLM makes it ready for them with such models only that need it."""
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: False)
    monkeypatch.setattr(load("corun.node.vllm.scheduler"), "current_platform", platform)
    trace = Trace(slots=2, chunk=16, blocks=9, ops=())
    scheduler = load("tests.stepping").engine(SCHEDULERS[role], trace, CPU, role=role).scheduler
    assert scheduler.needs_kv_cache_zeroing is on_cpu


def child(watch: bool, pid_file: str) -> None:
    if watch:
        load("corun.node.vllm.scheduler").end_with_parent()
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
    load("corun.node.vllm.scheduler").end_with_parent()  # This process has no such parent, and watches nobody.
    pid_file = tmp_path / "pid"
    code = f"from tests.node.test_scheduler import parent; parent({watch}, {str(pid_file)!r})"
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
