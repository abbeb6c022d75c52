"""A short run of chaos over fake engines, and what it would look like if the router delivered whatever it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.testing.model import write_tokenizer
from router.output import SampleOutput
from tests.chaos.fakes import FAULTS, under_chaos

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_is_the_right_one(model: str, seed: int) -> None:
    async with under_chaos(model, seed) as chaos:
        report = await chaos.run(faults=60, clients=8)
    assert report.wrong == []
    assert report.failed == []
    assert report.completed > 20
    assert report.vanished > 0
    assert set(report.faults) == set(FAULTS)


@pytest.mark.timeout(120)
async def test_without_replay_it_would_not_be(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Negative control: a router that goes on with a new run as if it were the old one."""
    monkeypatch.setattr(SampleOutput, "restart", lambda output: None)
    async with under_chaos(model, 1) as chaos:
        report = await chaos.run(faults=60, clients=8)
    assert report.wrong or report.failed
