"""Waits for messages sleep: vLLM's where it would yield, NIXL's in its poll. The e2e tests show that engines still
talk."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nixl import _api as nixl
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from corun.node.workarounds import busy_wait


@pytest.mark.parametrize("napping", [True, False])
def test_a_reader_naps_where_vllm_would_yield(monkeypatch: pytest.MonkeyPatch, napping: bool) -> None:
    """Without our change it yields: the function is the one that vLLM calls."""
    taken: list[str] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: taken.append("yield"))
    monkeypatch.setattr(busy_wait, "time", SimpleNamespace(sleep=lambda seconds: taken.append(f"sleep {seconds}")))
    if napping:
        busy_wait.nap_instead()
    SpinCondition.wait(SimpleNamespace(is_reader=True, last_read=time.monotonic(), busy_loop_s=60.0))
    assert taken == [f"sleep {busy_wait.NAP_S}" if napping else "yield"]


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shm_broadcast, "sched_yield")
    with pytest.raises(AttributeError, match="sched_yield"):
        busy_wait.nap_instead()


@pytest.mark.parametrize("with_timeout", [True, False])
def test_nixls_progress_thread_sleeps(monkeypatch: pytest.MonkeyPatch, with_timeout: bool) -> None:
    """Without our change it spins."""
    monkeypatch.setattr(nixl.nixlBind, "nixlAgentConfig", nixl.nixlBind.nixlAgentConfig)  # Restored at the end.
    if with_timeout:
        busy_wait.poll_with_timeout()
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    agent = nixl.nixl_agent("waits", nixl.nixl_agent_config(backends=["UCX"]))
    threads = set(tasks.iterdir()) - before
    assert any(spins(thread) for thread in threads) != with_timeout
    del agent


def test_another_nixl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.nixlBind, "nixlAgentConfig", SimpleNamespace)
    with pytest.raises(AttributeError, match="pthrDelay"):
        busy_wait.poll_with_timeout()


def spins(thread: Path) -> bool:
    """Return whether a thread is never seen asleep in 50 looks."""
    for _ in range(50):
        time.sleep(0.001)
        if (thread / "stat").read_text().rpartition(")")[2].split()[0] != "R":
            return False
    return True
