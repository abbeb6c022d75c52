"""Each rule of the contract, broken on purpose in a real engine: the node's self-test must notice every one.

In the same engines: KV that an overflowing model has left, which no later request may notice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from corun.models import tiny
from tests.e2e.conftest import CHUNK

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="attention on CPU splits KV over 2 or more threads"),
    pytest.mark.timeout(400),
]
# Noticed on a GPU, where kernels follow the number of rows; on CPU these give the same bits with the tiny model.
SILENT_ON_CPU = {"unpadded body", "moving chunks"}
RULES = {
    "decode": {
        "split-KV on": "the KV of layer",
        "unpadded lm_head": "lm_head",
        "seeds ignored": "log probability",
        "randomness shared": "log probability",
    },
    "prefill": {"batched prefill": "differs in step 0, first in "},
}
"""Rules by role, each with what its breaking moves first. Batched prefill moves lm_head's product first on processors
with AVX-512, and the KV of the first layer on those with AVX2, whose kernels depend on the rows of every product."""


@pytest.fixture(scope="module", params=RULES)
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lines(role: str) -> list[dict[str, Any]]:
    """What one start of the engine prints."""
    command = [sys.executable, "-m", "tests.e2e.breaking", role, str(tiny.ensure())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_the_self_test_notices_every_broken_rule(role: str, lines: list[dict[str, Any]]) -> None:
    found = {line["broken"]: line["found"] for line in lines if "broken" in line}
    assert found.pop("") == "", "the whole node fails its own self-test"
    assert found.keys() - SILENT_ON_CPU == RULES[role].keys()
    for rule, stage in RULES[role].items():
        assert stage in found[rule], f"{rule}: {found[rule] or 'not noticed'}"


def test_kv_from_the_cache_has_the_bits_of_kv_that_was_computed(role: str, lines: list[dict[str, Any]]) -> None:
    """With a cache that looks at no token it has another prompt's."""
    found = [(line["blind"], line["cached"], line["same"]) for line in lines if "blind" in line]
    expected = [(blind, cached, not blind) for blind in (False, True) for cached in (CHUNK, CHUNK, 3 * CHUNK)]
    assert found == (expected if role == "prefill" else [])


def test_nan_that_was_left_in_kv_moves_no_bit(lines: list[dict[str, Any]]) -> None:
    """Without zeroing it does: else zeroing would be of no use on this machine."""
    same = {line["zeroing"]: line["same"] for line in lines if "zeroing" in line}
    assert same == {True: True, False: False}
