"""The negative control of the tests of bits. It runs before their cluster starts, so that its engine has the cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from corun.models import tiny
from tests.e2e.stock import results_of

pytestmark = pytest.mark.e2e


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="attention on CPU splits KV over 2 or more threads")
@pytest.mark.timeout(400)
def test_stock_vllm_differs_between_alone_and_crowded() -> None:
    """Negative control: stock vLLM fails the check that the cluster passes, on the same model and machine."""
    command = [sys.executable, "-m", "tests.e2e.stock", str(tiny.ensure())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = results_of(done.stdout).values()
    assert result["equal"] < result["prompts"], "every bit agreed on stock vLLM: these tests prove nothing here"
