"""Bits under every condition with one thread per engine: other kernels, another contract.

Comes first by its name, so that its cluster has the machine for itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import started
from tests.e2e.test_determinism import make_cases, verify_all

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(400)
def test_verify_under_every_condition(tmp_path: Path) -> None:
    with started(tmp_path, threads=1) as cluster:
        verify_all(cluster, make_cases(10))
