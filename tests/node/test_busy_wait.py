"""Waits for messages sleep: vLLM's where it would yield, NIXL's in its poll. The e2e tests show that engines still
talk."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loading import load


@pytest.fixture(scope="module")
def busy_wait() -> Any:
    return load("corun.node.workarounds.busy_wait")


@pytest.fixture(scope="module")
def shm_broadcast() -> Any:
    return load("vllm.distributed.device_communicators.shm_broadcast")


@pytest.fixture(scope="module")
def nixl() -> Any:
    return load("nixl._api")


@pytest.mark.parametrize("napping", [True, False])
def test_a_reader_naps_where_vllm_would_yield(
    busy_wait: Any, shm_broadcast: Any, monkeypatch: pytest.MonkeyPatch, napping: bool
) -> None:
    """Without our change it yields: the function is the one that vLLM calls."""
    taken: list[str] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: taken.append("yield"))
    monkeypatch.setattr(busy_wait, "time", SimpleNamespace(sleep=lambda seconds: taken.append(f"sleep {seconds}")))
    if napping:
        busy_wait.nap_instead()
    shm_broadcast.SpinCondition.wait(SimpleNamespace(is_reader=True, last_read=time.monotonic(), busy_loop_s=60.0))
    assert taken == [f"sleep {busy_wait.NAP_S}" if napping else "yield"]


def test_another_vllm_is_refused(busy_wait: Any, shm_broadcast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shm_broadcast, "sched_yield")
    with pytest.raises(AttributeError, match="sched_yield"):
        busy_wait.nap_instead()


@pytest.mark.parametrize("with_timeout", [True, False])
def test_nixls_progress_thread_sleeps(
    busy_wait: Any, nixl: Any, monkeypatch: pytest.MonkeyPatch, with_timeout: bool
) -> None:
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


def test_another_nixl_is_refused(busy_wait: Any, nixl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
