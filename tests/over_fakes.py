"""Fixtures of all tests over fake clusters; the `conftest` of each folder that has some imports them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from corun.node import membership
from corun.testing.model import write_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model that has a tokenizer."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def no_lost_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a task or future ended with an error that nobody looked at."""
    yield
    lost = [r.getMessage() for r in caplog.get_records("call") if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not lost


@pytest.fixture(autouse=True)
def nodes_come_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "RETRY_S", 0.02)
