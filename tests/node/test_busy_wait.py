"""Waits for messages sleep: vLLM's where it would yield, NIXL's in its poll. The e2e tests show that engines still
talk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nixl import _api as nixl
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from corun.node.workarounds import busy_wait


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a reader that got a message just now wait for the next, and returns how often each way was taken."""
    taken: list[str] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: taken.append("yield"))
    monkeypatch.setattr(busy_wait, "time", SimpleNamespace(sleep=lambda seconds: taken.append(f"sleep {seconds}")))
    reader = SimpleNamespace(is_reader=True, last_read=time.monotonic(), busy_loop_s=60.0)

    def wait() -> list[str]:
        SpinCondition.wait(reader)
        return taken

    return wait


def test_a_reader_naps(waits: Any) -> None:
    busy_wait.nap_instead()
    assert waits() == [f"sleep {busy_wait.NAP_S}"]


def test_without_it_a_reader_yields(waits: Any) -> None:
    """Negative control: the function is the one that vLLM calls."""
    assert waits() == ["yield"]


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shm_broadcast, "sched_yield")
    with pytest.raises(AttributeError, match="sched_yield"):
        busy_wait.nap_instead()


def test_nixls_progress_thread_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.nixlBind, "nixlAgentConfig", nixl.nixlBind.nixlAgentConfig)  # Restored at the end.
    busy_wait.poll_with_timeout()
    with agent() as threads:
        assert not spins(threads)


def test_without_it_nixls_progress_thread_spins() -> None:
    """Negative control."""
    with agent() as threads:
        assert spins(threads)


def test_another_nixl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl.nixlBind, "nixlAgentConfig", SimpleNamespace)
    with pytest.raises(AttributeError, match="pthrDelay"):
        busy_wait.poll_with_timeout()


@contextmanager
def agent() -> Iterator[list[Path]]:
    """Yield the /proc entries of the threads of a NIXL agent."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    made = nixl.nixl_agent("waits", nixl.nixl_agent_config(backends=["UCX"]))
    yield list(set(tasks.iterdir()) - before)
    del made


def spins(threads: list[Path]) -> bool:
    """Return whether one of the threads is never seen asleep in 50 looks."""
    return any(all(state(thread) == "R" for _ in range(50)) for thread in threads)


def state(thread: Path) -> str:
    time.sleep(0.001)
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
