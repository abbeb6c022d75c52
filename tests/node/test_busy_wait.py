"""vLLM's wait for a message sleeps where it would yield; the e2e tests show that engines still talk."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
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
