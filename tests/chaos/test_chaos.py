"""A short run of chaos over fake engines, and what it would look like if the router delivered whatever it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from corun.testing.model import write_tokenizer
from router.output import SampleOutput
from tests.chaos.fakes import Fakes, under_chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_is_the_right_one(tmp_path: Path, seed: int) -> None:
    async with under_chaos(write_tokenizer(tmp_path), seed) as chaos:
        report = await chaos.run(chaos.plan(60), clients=8)
    assert (report.wrong, report.failed, report.leaked) == ([], [], [])
    assert report.completed > 20
    assert report.vanished > 0
    assert set(report.faults) == set(Fakes.kinds)
    assert report.as_dict()["fault_count"] == 60


async def test_without_replay_it_would_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a router that goes on with a new run as if it were the old one."""
    monkeypatch.setattr(SampleOutput, "restart", lambda output: None)
    async with under_chaos(write_tokenizer(tmp_path), 1) as chaos:
        report = await chaos.run(chaos.plan(60), clients=8)
    assert report.wrong or report.failed
