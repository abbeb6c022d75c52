"""What tests share: a router that does as it is told, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from corun import Client
from tests.corun.fake_router import FakeRouter


@pytest.fixture
def fake() -> Iterator[FakeRouter]:
    with FakeRouter() as router:
        yield router


@pytest.fixture
def client(fake: FakeRouter) -> Iterator[Client]:
    with Client(fake.address, timeout_s=20) as client:
        yield client
