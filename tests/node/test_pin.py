"""Settings that can move a bit: one list, set once, refused if somebody else had another idea."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from corun.cluster import NodeRole
from corun.errors import InvalidArgumentError
from corun.node import pin

NAMES = {"CORUN_TEST_A": "1", "CORUN_TEST_B": "x"}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # So that it is restored, then:
        monkeypatch.delenv(name)


def test_unset_variables_are_set_for_children_too() -> None:
    pin.pin(NAMES)
    assert {name: os.environ[name] for name in NAMES} == NAMES
    script = "import os; print(os.environ['CORUN_TEST_A'], os.environ['CORUN_TEST_B'])"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.split() == ["1", "x"]


def test_the_same_value_again_is_fine() -> None:
    pin.pin(NAMES)
    pin.pin(NAMES)


@pytest.mark.parametrize("value", ["0", "", "1 "])
def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Never overwritten: whoever set it wants other bits than the contract gives."""
    monkeypatch.setenv("CORUN_TEST_A", value)
    with pytest.raises(InvalidArgumentError) as caught:
        pin.pin(NAMES)
    assert (caught.value.field, caught.value.value) == ("environment variable CORUN_TEST_A", value)
    assert caught.value.limit == "must be unset or '1'"
    assert os.environ["CORUN_TEST_A"] == value


def test_split_kv_is_prefill_only_on_cpu() -> None:
    """An isolated prompt is its own batch; a decode step must not depend on how many rows it has."""
    prefill, decode = (pin.cpu_settings(role, [0, 2]) for role in (NodeRole.PREFILL, NodeRole.DECODE))
    assert (prefill["VLLM_CPU_ATTN_SPLIT_KV"], decode["VLLM_CPU_ATTN_SPLIT_KV"]) == ("1", "0")
    assert prefill["VLLM_CPU_OMP_THREADS_BIND"] == decode["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"
    assert prefill["VLLM_USE_V2_MODEL_RUNNER"] == decode["VLLM_USE_V2_MODEL_RUNNER"] == "0"


@pytest.mark.parametrize("role", NodeRole)
def test_runners_differ_by_platform_and_nothing_is_pinned_twice(role: NodeRole) -> None:
    cpu, gpu = pin.cpu_settings(role, [0]), pin.gpu_settings(role)
    assert gpu["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert gpu["NVIDIA_TF32_OVERRIDE"] == "0"
    for settings in (cpu, gpu):
        assert all(isinstance(value, str) and value for value in settings.values())
        assert not settings.keys() & pin.PLUMBING.keys()


def test_cores_are_the_first_of_those_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 3, 5})
    assert [pin.cores(NodeRole.DECODE, threads) for threads in range(4)] == [[3, 5, 9], [3], [3, 5], [3, 5, 9]]
    assert [pin.cores(NodeRole.PREFILL, threads) for threads in range(4)] == [[9, 5, 3], [9], [9, 5], [9, 5, 3]]
    with pytest.raises(InvalidArgumentError, match="threads = 4: must be at most 3, the cores available here"):
        pin.cores(NodeRole.DECODE, 4)
